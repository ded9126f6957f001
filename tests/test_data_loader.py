"""Batches: their order is a pure function of (seed, step), and nothing about reading them grows or races."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from data import Tokens, UserError
from data.loader import IGNORE_INDEX, Loader, epoch_order, validation_batches
from data.shards import ShardWriter, open_split
from data.tokenizer import ByteTokenizer

T = 8


def counting(n):
    """Tokens that are their own positions, in three shards."""
    return Tokens(np.split(np.arange(n, dtype=np.uint16), [n // 3, n // 3 + 5]))


def loader(n=1000, windows_per_step=6, seed=1, micro_batch_size=2, **options):
    return Loader(counting(n), T, windows_per_step, seed, "cpu", micro_batch_size, **options)


def step_rows(loader, step):
    """Inputs of all micro-batches of a step, [rows, T]."""
    return torch.cat([loader.micro_batch(step, m)[0] for m in range(loader.micro_batches_per_step)])


def test_a_batch_is_windows_of_the_text_and_their_next_tokens():
    x, y = loader().micro_batch(3, 1)
    assert x.shape == y.shape == (2, T) and x.dtype == y.dtype == torch.int64
    assert x.is_contiguous() and y.is_contiguous()
    assert torch.equal(x, x[:, :1] + torch.arange(T)) and torch.equal(y, x + 1)


def test_the_order_depends_on_seed_and_step_alone():
    one = loader()
    forward = [step_rows(one, step) for step in range(60)]
    other = loader()
    for step in reversed(range(60)):  # another process, another order of asking, batches left out
        assert torch.equal(step_rows(other, step), forward[step])
        list(validation_batches(other.tokens, T, 4, "cpu"))
    assert torch.equal(loader(micro_batch_size=2).micro_batch(41, 2)[0], forward[41][4:6])
    assert not torch.equal(step_rows(loader(seed=2), 0), forward[0])


def test_the_order_is_pinned():
    """Changing it would change what a resumed run sees: then it must be told apart from older checkpoints."""
    offset, order = epoch_order(seed=1, epoch=0, n_windows=10, n_offsets=8)
    assert (offset, order.tolist()) == (3, [3, 5, 2, 9, 7, 0, 8, 6, 1, 4])


@pytest.mark.parametrize("n", [T + 1, T + 5, 2 * T - 1, 2 * T, 2 * T + 1, 3 * T, 999, 1000, 1001, 1007])
@pytest.mark.parametrize("windows_per_step", [1, 6])
def test_an_epoch_has_every_window_once(n, windows_per_step):
    one = loader(n, windows_per_step, micro_batch_size=1)
    per_epoch = one.windows_per_epoch
    assert (per_epoch + 1) * T + T > n > per_epoch * T  # all but what the offset may cost
    steps = -(-3 * per_epoch // windows_per_step)
    starts = torch.cat([step_rows(one, step)[:, 0] for step in range(steps)])
    offsets = set()
    for epoch in range(3):
        seen = starts[epoch * per_epoch : (epoch + 1) * per_epoch].sort().values
        assert torch.equal(seen, seen[0] + T * torch.arange(per_epoch))
        assert 0 <= seen[0] < T and seen[-1] + T + 1 <= n
        offsets.add(int(seen[0]))
    if n > 3 * T:
        orders = [starts[epoch * per_epoch : (epoch + 1) * per_epoch] - starts[epoch * per_epoch] for epoch in range(3)]
        assert len(offsets) > 1 and not torch.equal(orders[0], orders[1])


def test_every_offset_comes_up():
    offsets = {epoch_order(0, epoch, 4, T)[0] for epoch in range(200)}
    assert offsets == set(range(T))


def test_epochs_are_counted():
    one = loader(1000, 6)
    assert one.windows_per_epoch == 124
    assert one.epoch(0) == 0 and one.epoch(62) == 62 * 6 / 124
    assert loader(T + 1, 6).epoch(10) == 60  # one window, seen six times a step


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_ranks_share_out_the_global_batch(world_size, micro_batch_size):
    whole = loader(windows_per_step=12, micro_batch_size=12)
    ranks = [
        loader(windows_per_step=12, micro_batch_size=micro_batch_size, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for step in (0, 5, 30):
        parts = [rank.micro_batch(step, m)[0] for m in range(ranks[0].micro_batches_per_step) for rank in ranks]
        assert torch.equal(torch.cat(parts), whole.micro_batch(step, 0)[0])


def test_sizes_that_do_not_divide_and_micro_batches_that_are_not_there():
    with pytest.raises(ValueError, match="no multiple"):
        loader(windows_per_step=7)
    with pytest.raises(ValueError, match="no multiple"):
        loader(windows_per_step=6, micro_batch_size=2, world_size=2)
    for m in (-1, 3):
        with pytest.raises(IndexError):
            loader().micro_batch(0, m)


def test_a_split_shorter_than_a_window_is_explained():
    with pytest.raises(
        UserError, match="the train split of x has 8 tokens, fewer than .* block_size \\+ 1 = 9; .*block_size"
    ):
        Loader(Tokens([np.arange(T)], "the train split of x"), T, 1, 0, "cpu", 1)
    with pytest.raises(UserError, match="predicting one takes two"):
        next(validation_batches(np.arange(1), T, 2, "cpu"))


def test_big_seeds_and_late_steps():
    for seed in (0, -1, 2**63, 2**64 + 5):
        step_rows(loader(seed=seed), 10**9)


@pytest.mark.parametrize("n", [2, 3, T, T + 1, T + 2, 5 * T, 5 * T + 1, 5 * T + 2, 12 * T + 3])
@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
def test_validation_predicts_every_token_once_in_order(n, batch_size):
    batches = list(validation_batches(counting(n), T, batch_size, "cpu"))
    assert len({x.shape for x, _ in batches}) == 1 and all(x.shape == y.shape for x, y in batches)
    assert batches[0][0].shape[0] <= batch_size
    x, y = (torch.cat([batch[i] for batch in batches]).flatten() for i in (0, 1))
    real = y != IGNORE_INDEX
    assert torch.equal(y[real], torch.arange(1, n)) and torch.equal(x[real], torch.arange(n - 1))
    assert (x[~real] == 0).all() and x.dtype == y.dtype == torch.int64


def test_a_bounded_validation_is_a_fixed_spread_of_windows():
    tokens = counting(100 * T + 1)
    starts = [x[:, 0] for x, _ in validation_batches(tokens, T, 4, "cpu", max_windows=10)]
    assert torch.equal(torch.cat(starts)[:10], torch.arange(10) * 10 * T)
    everything = list(validation_batches(tokens, T, 4, "cpu"))
    for more, (x, y) in zip(everything, validation_batches(tokens, T, 4, "cpu", max_windows=100), strict=True):
        assert torch.equal(more[0], x) and torch.equal(more[1], y)


def test_a_batch_is_the_callers_to_keep():
    one = loader()
    first = one.micro_batch(0, 0)[0]
    copy = first.clone()
    for m in (1, 2, 0, 1):
        one.micro_batch(1, m)
    assert torch.equal(first, copy)


FLAT = """
import sys, tempfile
from pathlib import Path
import numpy as np
from data.loader import Loader
from data.shards import ShardWriter, open_split
from data.tokenizer import ByteTokenizer

def anonymous_kb():
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

folder = Path(tempfile.mkdtemp(dir=sys.argv[1]))
with ShardWriter(folder, "train", ByteTokenizer(), 1 << 20) as writer:
    for i in range(16):
        writer.write(np.random.default_rng(i).integers(256, size=1 << 20))
tokens = open_split(folder, "train", writer.headers, ByteTokenizer())
loader = Loader(tokens, 256, 32, 0, "cpu", 32)
for step in range(4500):  # past the second epoch, when two orders are kept
    loader.micro_batch(step, 0)
before = anonymous_kb()
for step in range(4500, 14_500):
    loader.micro_batch(step, 0)
print(anonymous_kb() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon from Linux's /proc")
def test_anonymous_memory_is_flat_over_10_000_batches(tmp_path):
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": root}
    grown = subprocess.check_output([sys.executable, "-c", FLAT, str(tmp_path)], env=environment, text=True)
    assert int(grown) < 1024  # KiB; the 10,000 batches are 1.3 GB


def test_the_loader_reads_shards_that_were_written(tmp_path):
    tokenizer = ByteTokenizer()
    tokens = np.random.default_rng(0).integers(256, size=5000)
    with ShardWriter(tmp_path, "train", tokenizer, shard_tokens=700) as writer:
        writer.write(tokens)
    mapped = Loader(open_split(tmp_path, "train", writer.headers, tokenizer), 64, 8, 3, "cpu", 8)
    plain = Loader(tokens, 64, 8, 3, "cpu", 8)
    for step in range(30):
        for a, b in zip(mapped.micro_batch(step, 0), plain.micro_batch(step, 0), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_copies_to_the_gpu_do_not_race():
    """The copies run behind a busy stream, so a buffer filled too early would be seen."""
    tokens = Tokens([np.random.default_rng(0).integers(50_000, size=1_000_000).astype(np.uint16)])
    on_cpu = Loader(tokens, 1024, 32, 0, "cpu", 32)
    on_gpu = Loader(tokens, 1024, 32, 0, "cuda", 32)
    busy = torch.randn(8192, 8192, device="cuda")
    seen = []
    for step in range(40):
        busy = busy @ busy
        seen.append(on_gpu.micro_batch(step, 0))
    for step, batch in enumerate(seen):
        for ours, expected in zip(batch, on_cpu.micro_batch(step, 0), strict=True):
            assert ours.is_contiguous() and torch.equal(ours.cpu(), expected)
