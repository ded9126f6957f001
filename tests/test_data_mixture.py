"""Several datasets with weights in one run, and batches that know where documents start."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from data import (
    MixedDataset,
    Tokens,
    UserError,
    open_dataset,
    open_datasets,
    parse_mixture,
    shards,
    split_parts,
    weighted_totals,
)
from data.loader import IGNORE_INDEX, Loader, Mixing, document_starts, validation_batches
from data.mixture import MixedTokens, block_shares
from data.prepare import main

T = 8
ROOT = Path(__file__).resolve().parent.parent


def part(first, n, name):
    """n tokens that count up from `first`, so that a token tells its dataset and its place."""
    return Tokens([np.arange(first, first + n, dtype=np.uint32)], f"the train split of {name}")


def mixed(sizes=(1000, 300, 77), shares=(700, 290, 10)):
    parts = [part(1_000_000 * i, n, f"d{i}") for i, n in enumerate(sizes)]
    return MixedTokens(tuple(parts), tuple(shares))


def loader(tokens=None, windows_per_step=12, seed=1, micro_batch_size=4, **options):
    return Loader(tokens or mixed(), T, windows_per_step, seed, "cpu", micro_batch_size, **options)


def step_rows(loader, step):
    return torch.cat([loader.micro_batch(step, m)[0] for m in range(loader.micro_batches_per_step)])


# ---------------------------------------------------------------- the order


def test_a_batch_is_windows_of_the_datasets():
    one = loader()
    for step in range(50):
        x, y = one.micro_batch(step, 0)
        assert torch.equal(x, x[:, :1] + torch.arange(T)) and torch.equal(y, x + 1)


def test_every_block_has_the_exact_shares():
    one = loader(windows_per_step=100, micro_batch_size=100)
    for first in range(0, 30, 10):  # blocks of 1,000 windows
        starts = torch.cat([step_rows(one, step)[:, 0] for step in range(first, first + 10)])
        assert Counter((starts // 1_000_000).tolist()) == {0: 700, 1: 290, 2: 10}


def test_shares_hold_early_on_too():
    starts = step_rows(loader(windows_per_step=200, micro_batch_size=200), 0)[:, 0]
    assert abs(Counter((starts // 1_000_000).tolist())[0] - 140) < 30


def test_the_order_depends_on_seed_and_step_alone():
    forward_loader = loader()
    forward = [step_rows(forward_loader, step) for step in range(200)]
    other = loader()
    for step in reversed(range(200)):
        assert torch.equal(step_rows(other, step), forward[step])
    assert torch.equal(step_rows(loader(), 150), forward[150])  # a resumed run: nothing is read before its step
    assert not torch.equal(step_rows(loader(seed=2), 0), forward[0])


def test_the_order_is_pinned():
    """Changing it would change what a resumed run sees."""
    datasets, local = Mixing(seed=1, shares=[7, 3]).locate(np.arange(20))
    assert datasets.tolist() == [0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 0]
    assert local.tolist() == [0, 1, 0, 2, 1, 3, 2, 4, 5, 6, 7, 8, 9, 10, 11, 3, 4, 12, 5, 13]


def test_a_single_dataset_is_drawn_as_before_there_were_mixtures():
    tokens = np.arange(1000)
    assert step_rows(Loader(tokens, T, 6, 1, "cpu", 2), 0)[:, 0].tolist() == SINGLE_STEP_0
    first = Loader(tokens, T, 6, 1, "cpu", 2)
    assert first.windows_per_epoch == 124 and first.epochs(62) == [first.epoch(62)] == [3.0]


SINGLE_STEP_0 = [723, 627, 27, 947, 923, 531]


def test_each_dataset_has_its_own_epochs():
    """The windows of every dataset, taken by themselves, are an epoch's worth of different windows, again and again."""
    tokens = mixed()
    one = loader(tokens, windows_per_step=1000, micro_batch_size=1000)
    starts = torch.cat([step_rows(one, step)[:, 0] for step in range(40)]).numpy()
    for index, tokens in enumerate(one.tokens.parts):
        own = starts[starts // 1_000_000 == index] - 1_000_000 * index
        per_epoch = max(1, len(tokens) // T - 1)
        assert len(own) == 40 * one.tokens.shares[index]
        for epoch in range(len(own) // per_epoch):
            seen = np.sort(own[epoch * per_epoch : (epoch + 1) * per_epoch])
            assert np.array_equal(np.diff(seen), np.full(per_epoch - 1, T)) and 0 <= seen[0] < T
            assert seen[-1] + T + 1 <= len(tokens)


def test_epochs_count_what_was_drawn():
    one = loader(windows_per_step=12)
    for step in (0, 1, 37, 83, 84, 1000):
        drawn, _ = one._mixing.locate(np.arange(step * 12))
        expected = [(drawn == i).sum() / max(1, len(tokens) // T - 1) for i, tokens in enumerate(one.tokens.parts)]
        assert one.epochs(step) == expected and one.epoch(step) == max(expected)


def test_datasets_of_one_size_have_orders_of_their_own():
    same = MixedTokens((part(0, 1000, "a"), part(1_000_000, 1000, "b")), (500, 500))
    starts = step_rows(loader(same, windows_per_step=120, micro_batch_size=120), 0)[:, 0]
    a, b = starts[starts < 1_000_000], starts[starts >= 1_000_000] - 1_000_000
    n = min(len(a), len(b))
    assert n > 40 and (a[:n] - a[0] != b[:n] - b[0]).sum() > n // 2


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_ranks_share_out_the_global_batch(world_size):
    whole = loader(micro_batch_size=12)
    ranks = [loader(micro_batch_size=2, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step in (0, 5, 83, 84):
        parts = [rank.micro_batch(step, m)[0] for m in range(ranks[0].micro_batches_per_step) for rank in ranks]
        assert torch.equal(torch.cat(parts), whole.micro_batch(step, 0)[0])


def test_late_steps_and_big_seeds_are_no_slower():
    for seed in (0, -1, 2**63):
        step_rows(loader(seed=seed), 10**9)


def test_a_dataset_shorter_than_a_window_is_named():
    with pytest.raises(UserError, match="the train split of d1 has 8 tokens, fewer than one window"):
        loader(mixed(sizes=(1000, T, 77)))


FLAT = """
import numpy as np
from pathlib import Path
from data import Tokens
from data.loader import Loader
from data.mixture import MixedTokens

def anonymous_kb():
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

parts = tuple(Tokens([np.zeros(n << 20, dtype=np.uint16)]) for n in (4, 2, 1, 1))
loader = Loader(MixedTokens(parts, (400, 300, 200, 100)), 256, 32, 0, "cpu", 32, eot_id=1)
for step in range(3000):
    loader.micro_batch(step, 0)
before = anonymous_kb()
for step in range(3000, 13_000):
    loader.micro_batch(step, 0)
print(anonymous_kb() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon from Linux's /proc")
def test_anonymous_memory_is_flat_over_10_000_batches_of_4_datasets():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    grown = subprocess.check_output([sys.executable, "-c", FLAT], env=environment, text=True)
    assert int(grown) < 1024  # KiB


# ---------------------------------------------------------------- names and weights


@pytest.mark.parametrize(
    "spec, named",
    [
        ("a", [("a", 1.0)]),
        ("a:0.7,b:0.3", [("a", 0.7), ("b", 0.3)]),
        ("a:7, b:3", [("a", 7.0), ("b", 3.0)]),
        ("a:1e-1,sub/b.c:1", [("a", 0.1), ("sub/b.c", 1.0)]),
        ("C:/data:0.5,D:/more:0.5", [("C:/data", 0.5), ("D:/more", 0.5)]),
        ("C:/data", [("C:/data", 1.0)]),
        ("a:3", [("a", 1.0)]),
    ],
)
def test_mixtures_are_read(spec, named):
    assert parse_mixture(spec) == named


@pytest.mark.parametrize(
    "spec, match",
    [
        ("a,b", "each needs its weight"),
        ("a:0.5,b", "each needs its weight"),
        ("a:0.5,", "each needs its weight"),
        ("a:0.5,:0.5", "each needs its weight"),
        ("a:0.5,b:half", "each needs its weight"),
        ("a:0,b:1", "the weight of a has to be a number above 0"),
        ("a:1,b:-1", "the weight of b has"),
        ("a:1,b:nan", "the weight of b has"),
        ("a:inf,b:1", "the weight of a has"),
        ("a:0.5,a:0.5", "names a twice"),
    ],
)
def test_mixtures_that_make_no_sense(spec, match):
    with pytest.raises(UserError, match=match) as error:
        parse_mixture(spec)
    assert "\n" not in str(error.value)


def test_a_folder_with_a_comma_and_a_colon_is_one_dataset(tmp_path):
    folder = tmp_path / "a:0.5,b:0.5"
    folder.mkdir()
    assert parse_mixture(folder) == [(str(folder), 1.0)]


@pytest.mark.parametrize(
    "weights, shares",
    [
        ([0.7, 0.3], [700, 300]),
        ([7, 3], [700, 300]),
        ([1, 1, 1], [334, 333, 333]),
        ([0.999, 0.001], [999, 1]),
        ([0.1] * 10, [100] * 10),
        ([2 / 3, 1 / 3], [667, 333]),
        ([1, 0.0006], [999, 1]),
    ],
)
def test_shares(weights, shares):
    assert block_shares(weights) == shares


def test_a_weight_too_small_to_be_drawn():
    with pytest.raises(UserError, match="the smallest weight is 0.0001 of the sum"):
        block_shares([0.9999, 0.0001])


# ---------------------------------------------------------------- datasets


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Datasets a and b of bytes, c of characters; c's tokenizer is another."""
    monkeypatch.setattr(shards, "SHARDS_FOLDER", tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    for name, tokenizer in (("a", "bytes"), ("b", "bytes"), ("c", "char")):
        Path(f"{name}.txt").write_text(f"text of {name}\n" * 300, encoding="utf-8")
        main(["files", f"{name}.txt", "--tokenizer", tokenizer])
    return tmp_path


def test_one_name_opens_the_dataset_itself(two):
    assert type(open_datasets("a")) is type(open_dataset("a")) and open_datasets("a").hash == open_dataset("a").hash
    assert split_parts(open_datasets("a").val)[0][1] == 1.0


def test_a_mixture_is_used_like_a_dataset(two):
    mix = open_datasets("a:0.7,b:0.3")
    a, b = open_dataset("a"), open_dataset("b")
    assert isinstance(mix, MixedDataset) and mix.name == "a:0.7,b:0.3" and mix.tokenizer.hash == a.tokenizer.hash
    assert len(mix.train) == len(a.train) + len(b.train) and len(mix.val) == len(a.val) + len(b.val)
    assert [weight for _, weight in split_parts(mix.val)] == [0.7, 0.3]
    assert mix.hash == open_datasets("a:7,b:3").hash  # the same shares
    assert len({mix.hash, a.hash, open_datasets("a:0.6,b:0.4").hash, open_datasets("b:0.7,a:0.3").hash}) == 4
    x, _ = Loader(mix.train, 64, 10, 0, "cpu", 10).micro_batch(0, 0)
    texts = [mix.tokenizer.decode(row.tolist()) for row in x]
    assert sum("of a" in text for text in texts) + sum("of b" in text for text in texts) == 10


def test_tokenizers_that_differ_are_refused(two):
    with pytest.raises(
        UserError, match="need one tokenizer, and a has bytes .* where c has char .* --tokenizer like:a"
    ):
        open_datasets("a:0.7,c:0.3")
    with pytest.raises(UserError, match="no dataset in .*nowhere"):
        open_datasets("a:0.7,nowhere:0.3")


# ---------------------------------------------------------------- validation


def test_totals_of_one_dataset_come_back_as_they_are():
    assert weighted_totals([(1.0, 123.4567, 89, 333)]) == (123.4567, 89, 333)


def test_totals_are_weighted_by_the_weights_and_not_by_the_sizes():
    nats, tokens, n_bytes = weighted_totals([(0.7, 2.0 * 1000, 1000, 4000), (0.3, 5.0 * 10, 10, 20)])
    assert nats / tokens == pytest.approx(0.7 * 2 + 0.3 * 5)
    assert n_bytes / tokens == pytest.approx(0.7 * 4 + 0.3 * 2)  # bytes behind a token of the mixture
    assert nats / math.log(2) / n_bytes == pytest.approx((0.7 * 2 + 0.3 * 5) / math.log(2) / (0.7 * 4 + 0.3 * 2))


# ---------------------------------------------------------------- documents

EOT = 0


def by_hand(row):
    """doc_start of a row, one token after the other."""
    starts, start = [], 0
    for index, token in enumerate(row):
        starts.append(start)
        if token == EOT:
            start = index + 1
    return starts


@pytest.mark.parametrize(
    "row, doc_start",
    [
        ([5, 6, 7, 8], [0, 0, 0, 0]),
        ([5, EOT, 7, 8], [0, 0, 2, 2]),
        ([EOT, 6, EOT, EOT], [0, 1, 1, 3]),
        ([EOT, EOT, EOT, EOT], [0, 1, 2, 3]),
        ([5, 6, 7, EOT], [0, 0, 0, 0]),
        ([5], [0]),
    ],
)
def test_documents_start_after_eot(row, doc_start):
    starts = document_starts(torch.tensor([row]), EOT)
    assert starts.tolist() == [doc_start] and starts.dtype == torch.int32


def test_documents_of_random_rows():
    rows = torch.from_numpy(np.random.default_rng(0).integers(4, size=(50, 33)))
    assert document_starts(rows, EOT).tolist() == [by_hand(row) for row in rows.tolist()]


def test_training_batches_carry_documents():
    tokens = np.random.default_rng(1).integers(5, size=500)
    plain, masked = Loader(tokens, T, 6, 0, "cpu", 3), Loader(tokens, T, 6, 0, "cpu", 3, eot_id=EOT)
    for step in range(20):
        x, y, doc_start = masked.micro_batch(step, 1)
        assert all(torch.equal(a, b) for a, b in zip(plain.micro_batch(step, 1), (x, y), strict=True))
        assert doc_start.tolist() == [by_hand(row) for row in x.tolist()]


def test_validation_batches_carry_documents():
    tokens = np.random.default_rng(1).integers(1, 5, size=10 * T + 4)
    tokens[::7] = EOT
    plain = list(validation_batches(tokens, T, 4, "cpu"))
    masked = list(validation_batches(tokens, T, 4, "cpu", eot_id=EOT))
    for (x, y), (x2, y2, doc_start) in zip(plain, masked, strict=True):
        assert torch.equal(x, x2) and torch.equal(y, y2) and doc_start.shape == x.shape
        real = y != IGNORE_INDEX
        expected = torch.tensor([by_hand(row) for row in x.tolist()])
        assert torch.equal(doc_start[real], expected[real].int())


def test_documents_of_prepared_text(two):
    """Packed documents come apart where the files did."""
    folder = two / "texts"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i:02d}.txt").write_text(f"<{i:02d}" + "x" * i, encoding="utf-8")
    main(["files", str(folder), "--tokenizer", "bytes"])
    data = open_datasets("texts")
    seen = set()
    for step in range(30):
        x, _, doc_start = Loader(data.train, 64, 4, 0, "cpu", 4, eot_id=data.tokenizer.eot_id).micro_batch(step, 0)
        firsts = x[(torch.arange(64) == doc_start) & (doc_start > 0)]
        assert (firsts == ord("<")).all() and len(firsts)
        seen.update(x[doc_start > 0].tolist())
    assert json.loads((two / "shards/texts/dataset.json").read_text(encoding="utf-8"))["splits"]["val"]["documents"]
    assert data.tokenizer.eot_id in seen
