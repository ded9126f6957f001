"""Several datasets in one run: "a:0.7,b:0.3" draws seven windows from a for every three from b.

A weight is a share of the training windows, and so of the training tokens; weights need not sum to 1. Each dataset
keeps its own epochs: a small one with a large weight comes round often, a large one perhaps never. All must have been
made with the same tokenizer.

The weight stands behind the last colon and is a number, so a path may contain colons ("C:/data" has no weight). What
names an existing folder is one dataset, whatever characters are in it; a path with a comma cannot be part of a mixture.
"""

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .errors import UserError
from .shards import Dataset, Tokens, dataset_folder, open_dataset
from .tokenizer import Tokenizer

BLOCK_WINDOWS = 1000  # windows in which a mixture has its exact shares: weights in thousandths are kept exactly


@dataclass(frozen=True)
class MixedTokens:
    """One split of several datasets. `shares`: windows of each in BLOCK_WINDOWS training windows."""

    parts: tuple[Tokens, ...]
    shares: tuple[int, ...]

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(share / sum(self.shares) for share in self.shares)

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)


@dataclass(frozen=True)
class MixedDataset:
    """Several datasets, used like one (`Dataset`).

    hash: hex digest of the datasets' hashes and shares, in order
    shares: windows of each dataset in BLOCK_WINDOWS training windows
    """

    name: str
    hash: str
    datasets: tuple[Dataset, ...]
    shares: tuple[int, ...]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.datasets[0].tokenizer

    @cached_property
    def train(self) -> MixedTokens:
        return MixedTokens(tuple(dataset.train for dataset in self.datasets), self.shares)

    @cached_property
    def val(self) -> MixedTokens:
        return MixedTokens(tuple(dataset.val for dataset in self.datasets), self.shares)


def open_datasets(spec: str | os.PathLike) -> Dataset | MixedDataset:
    """Open what a run's `dataset` setting names: one dataset as `open_dataset` does, or several with weights.

    Raises UserError for a mixture that cannot be read or whose datasets do not have one tokenizer.
    """
    named = parse_mixture(spec)
    if len(named) == 1:
        return open_dataset(named[0][0])
    shares = block_shares([weight for _, weight in named])
    datasets = tuple(open_dataset(name) for name, _ in named)
    first = datasets[0]
    for dataset in datasets[1:]:
        if dataset.tokenizer.hash != first.tokenizer.hash:
            raise UserError(
                f"the datasets of one run need one tokenizer, and {first.name} has {first.tokenizer.name} "
                f"({first.tokenizer.hash[:12]}) where {dataset.name} has {dataset.tokenizer.name} "
                f"({dataset.tokenizer.hash[:12]}); prepare {dataset.name} again with --tokenizer like:{named[0][0]}"
            )
    content = " ".join(f"{dataset.hash}:{share}" for dataset, share in zip(datasets, shares, strict=True))
    digest = hashlib.sha256(content.encode("ascii")).hexdigest()
    return MixedDataset(os.fspath(spec), digest, datasets, tuple(shares))


def parse_mixture(spec: str | os.PathLike) -> list[tuple[str, float]]:
    """The names and weights in "a:0.7,b:0.3". UserError for a weight that is missing or makes no sense."""
    text = os.fspath(spec)
    if dataset_folder(text).is_dir():
        return [(text, 1.0)]
    named = [_name_and_weight(item.strip()) for item in text.split(",")]
    if len(named) == 1:
        return [(named[0][0], 1.0)]
    names = [name for name, _ in named]
    for name, weight in named:
        if not name or weight is None:
            raise UserError(f"dataset={text!r} names several datasets, and each needs its weight: a:0.7,b:0.3")
        if not (weight > 0 and math.isfinite(weight)):
            raise UserError(f"dataset={text!r}: the weight of {name} has to be a number above 0")
        if names.count(name) > 1:
            raise UserError(f"dataset={text!r} names {name} twice; add the two weights up")
    return named


def _name_and_weight(item: str) -> tuple[str, float | None]:
    name, colon, weight = item.rpartition(":")
    try:
        return (name, float(weight)) if colon else (item, None)
    except ValueError:
        return item, None  # the colon belongs to the path


def block_shares(weights: Sequence[float]) -> list[int]:
    """How many of BLOCK_WINDOWS windows each dataset gets: by largest remainder, and at least one."""
    exact = np.array(weights, dtype=np.float64) / math.fsum(weights) * BLOCK_WINDOWS
    shares = np.floor(exact + 1e-9).astype(np.int64)  # 0.7 of 1000 is 700, also where floats make it 699.9999
    for index in np.argsort(shares - exact, kind="stable")[: BLOCK_WINDOWS - shares.sum()]:
        shares[index] += 1
    if shares.min() < 1:
        raise UserError(
            f"the smallest weight is {min(weights) / math.fsum(weights):.2g} of the sum, and less than one window in "
            f"{BLOCK_WINDOWS:,} cannot be drawn; leave that dataset out, or give it more"
        )
    return shares.tolist()


def split_parts(tokens: Tokens | MixedTokens) -> list[tuple[Tokens, float]]:
    """The datasets of a split, each with its weight; a single dataset has weight 1."""
    if isinstance(tokens, MixedTokens):
        return list(zip(tokens.parts, tokens.weights, strict=True))
    return [(tokens, 1.0)]


def weighted_totals(parts: Sequence[tuple[float, float, int, int]]) -> tuple[float, float, float]:
    """The nats, tokens and bytes of a validation over several datasets, from (weight, nats, tokens, bytes) of each.

    Every dataset's numbers are scaled so that its share of the tokens is its weight, as it is in training. So
    nats / tokens is the mean of the datasets' losses weighted by their weights: what the training loss estimates, and
    not what the largest validation split happens to say. Bits per byte follow as nats / ln 2 / bytes. One dataset's
    numbers come back as they are.
    """
    all_tokens = sum(tokens for _, _, tokens, _ in parts)
    scaled = [(weight * (all_tokens / tokens), nats, tokens, n_bytes) for weight, nats, tokens, n_bytes in parts]
    nats = sum(scale * nats for scale, nats, _, _ in scaled)
    tokens = sum(scale * tokens for scale, _, tokens, _ in scaled)
    return nats, tokens, sum(scale * n_bytes for scale, _, _, n_bytes in scaled)
