"""Losses: of a model in training on its validation windows, and of a finished one on a text.

Both are sums of nats over targets that count, each divided by the targets, or by the bytes of text, only at the end: so
batches, ranks and windows of different sizes weigh what they hold. Bits per byte, nats / ln 2 / bytes, compare models
with different tokenizers.
"""

import math
from dataclasses import dataclass

import torch
from tqdm import tqdm

from data import UserError, split_parts, weighted_totals
from data.loader import IGNORE_INDEX, validation_batches


def evaluate(model, dataset, config, world, device) -> dict:
    """Nats per token and bits per byte over the validation windows: fixed ones, all of them or eval_tokens' worth.

    The datasets of a mixture count by their weights, as they do in training.
    """
    model.eval()
    totals = [
        (weight, *score(model, dataset, val, weight, config, world, device)) for val, weight in split_parts(dataset.val)
    ]
    model.train()
    if not all(n_tokens for _, _, n_tokens, _ in totals):
        raise UserError(f"eval_tokens={config.eval_tokens} reads no answer of the validation text: raise it")
    nats, n_tokens, n_bytes = weighted_totals(totals)
    return {"val_loss": nats / n_tokens, "val_bpb": nats / math.log(2) / n_bytes}


@torch.no_grad()
def score(model, dataset, tokens, weight, config, world, device) -> tuple[float, int, int]:
    """Nats, tokens and bytes of one dataset's windows. Each rank takes every world.size-th batch."""
    block_size = config.model.block_size
    max_windows = None if config.eval_tokens is None else max(1, int(weight * config.eval_tokens) // block_size)
    eot_id = dataset.tokenizer.eot_id if config.doc_mask else None
    byte_lengths = torch.from_numpy(dataset.tokenizer.token_byte_lengths())
    sums = torch.zeros(3, dtype=torch.float64)
    batches = validation_batches(tokens, block_size, config.micro_batch_size, device, max_windows, eot_id)
    hidden = None if world.is_main else True
    for i, batch in enumerate(tqdm(batches, desc="evaluating", unit="batch", leave=False, disable=hidden)):
        if i % world.size == world.rank:
            targets = batch[1]
            counted = targets[targets != IGNORE_INDEX].cpu()
            loss = model(*batch).item() if len(counted) else 0.0  # chats may leave a batch without a target
            sums += torch.tensor([loss * len(counted), len(counted), byte_lengths[counted].sum()], dtype=torch.float64)
    nats, n_tokens, n_bytes = world.sum(sums.to(device) if world.size > 1 else sums).tolist()
    return nats, int(n_tokens), int(n_bytes)


@dataclass(frozen=True)
class TextLoss:
    """The loss of a model on a text."""

    n_tokens: int  # each was predicted once
    n_bytes: int  # of the text in UTF-8
    nats_per_token: float
    bits_per_byte: float

    @property
    def perplexity(self) -> float:
        """exp(nats per token); infinite where a float cannot hold it."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf


def strided_windows(n_tokens: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """How a text is read: (start, stop, first counted) of each window, as indices of predicted tokens.

    Windows are `window` tokens long and start `stride` apart. The first counts all of its tokens, each later one the
    `stride` that the windows before did not have: every token counts once, and behind the first window with at least
    window - stride tokens of context.
    """
    windows = [(0, min(window, n_tokens), 0)]
    while windows[-1][1] < n_tokens:
        start, counted = windows[-1][0] + stride, windows[-1][1]
        windows.append((start, min(start + window, n_tokens), counted))
    return windows


@torch.no_grad()
def text_loss(
    model, tokenizer, text: str, window: int, stride: int, batch_size: int = 8, progress: str | None = None
) -> TextLoss:
    """The loss of a model on all of a text, see `strided_windows`.

    The first token is predicted too, from the token that begins a text, or else from the one that ends a document.

    Args:
        model: a Transformer in eval mode, on any device.
        window, stride: in tokens, 1 <= stride <= window <= block_size.
        batch_size: windows in one forward pass.
        progress: what the progress bar is called (None: no bar).

    Raises:
        UserError: a window or stride that cannot be, or a text without tokens.
    """
    if not 1 <= stride <= window:
        raise UserError(f"stride={stride} must be at least 1 and at most window={window}: else tokens were left out")
    if window > model.config.block_size:
        raise UserError(f"window={window} is past this model's block_size of {model.config.block_size}")
    first = tokenizer.eot_id if tokenizer.bos_id is None else tokenizer.bos_id
    ids = torch.tensor([first, *tokenizer.encode(text)])
    n_tokens = len(ids) - 1
    if n_tokens < 1:
        raise UserError("the text is empty: there is nothing to predict")
    windows, device = strided_windows(n_tokens, window, stride), model.embed.weight.device
    nats = 0.0
    with tqdm(total=n_tokens, desc=progress, unit="token", leave=False, disable=None if progress else True) as bar:
        for i in range(0, len(windows), batch_size):
            inputs, targets = _batch(ids, windows[i : i + batch_size])
            counted = int((targets != IGNORE_INDEX).sum())
            nats += model(inputs.to(device), targets.to(device)).item() * counted
            bar.update(counted)
    n_bytes = len(text.encode("utf-8"))
    return TextLoss(n_tokens, n_bytes, nats / n_tokens, nats / math.log(2) / n_bytes)


def _batch(ids, windows):
    """Inputs and targets, int64 [B, T] each, filled up behind the text, where causal attention cannot look."""
    length = max(stop - start for start, stop, _ in windows)
    inputs = torch.zeros(len(windows), length, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORE_INDEX)
    for row, (start, stop, counted) in enumerate(windows):
        inputs[row, : stop - start] = ids[start:stop]
        targets[row, counted - start : stop - start] = ids[counted + 1 : stop + 1]
    return inputs, targets
