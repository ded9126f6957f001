"""From token shards to batches: which windows a step sees, and how they reach the device.

The order of training data is a pure function of (seed, step). The corpus is cut into windows of block_size + 1 tokens,
each starting block_size after the one before, so that every token is predicted once. An epoch visits all windows in an
order drawn from (seed, epoch), with the cuts shifted by an offset drawn likewise, so that the next epoch cuts the text
elsewhere. Step s takes windows s * windows_per_step ... of that endless sequence; its micro-batches and the ranks of a
parallel run only divide those among themselves:

    window of the step   0 1 2 3 | 4 5 6 7 | 8 9 ...        micro_batch_size = 2, world_size = 2
    rank                 0 0 1 1 | 0 0 1 1 | 0 0 ...
    micro-batch          0       | 1       | 2

So a run resumes by knowing its step, sees the same data on any number of ranks, and no evaluation can disturb it.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch

from .errors import UserError
from .shards import Tokens

IGNORE_INDEX = -100  # the target that torch's and our own cross-entropy leave out


class Loader:
    """Training batches from one split.

    tokens: the split (a plain array of ids will do)
    block_size: tokens in a row
    windows_per_step: rows in a step, over all micro-batches and ranks
    micro_batch_size: rows in one `micro_batch`

    Raises UserError when the split is shorter than one window.
    """

    def __init__(
        self,
        tokens: Tokens | np.ndarray,
        block_size: int,
        windows_per_step: int,
        seed: int,
        device: torch.device | str,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.tokens = tokens if isinstance(tokens, Tokens) else Tokens([tokens])
        if len(self.tokens) < block_size + 1:
            raise UserError(
                f"{self.tokens.source} has {len(self.tokens):,} tokens, fewer than one window of block_size + 1 = "
                f"{block_size + 1:,}; prepare more text, or set a smaller block_size"
            )
        if windows_per_step % (micro_batch_size * world_size):
            raise ValueError(f"{windows_per_step=} is no multiple of {micro_batch_size=} times {world_size=}")
        self.block_size = block_size
        self.windows_per_step = windows_per_step
        self.micro_batch_size = micro_batch_size
        self.micro_batches_per_step = windows_per_step // (micro_batch_size * world_size)
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        # The offset costs up to block_size - 1 tokens; one window fewer, and every offset leaves room for all windows.
        self.windows_per_epoch = max(1, len(self.tokens) // block_size - 1)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        self._to_device = _BatchCopier(device)

    def epoch(self, step: int) -> float:
        """How many times the corpus has been seen before step `step`."""
        return step * self.windows_per_step / self.windows_per_epoch

    def micro_batch(self, step: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of micro-batch `m` of `step` for this rank: int64 [micro_batch_size, block_size] each.

        They are new tensors on the device. On CUDA the copy runs on the current stream, behind the work before it.
        """
        if not 0 <= m < self.micro_batches_per_step:
            raise IndexError(f"micro-batch {m} of {self.micro_batches_per_step}")
        row = (m * self.world_size + self.rank) * self.micro_batch_size
        windows = np.arange(row, row + self.micro_batch_size) + step * self.windows_per_step
        rows = self.tokens.windows(self.window_starts(windows), self.block_size + 1)
        return self._to_device(rows[:, :-1], rows[:, 1:])

    def window_starts(self, windows: np.ndarray) -> np.ndarray:
        """Where the windows of these global indices [n] start in the token sequence, int64 [n]."""
        epochs, within = np.divmod(windows, self.windows_per_epoch)
        starts = np.empty(len(windows), dtype=np.int64)
        for epoch in np.unique(epochs):
            offset, order = self._order(int(epoch))
            chosen = epochs == epoch
            starts[chosen] = offset + order[within[chosen]] * self.block_size
        return starts

    def _order(self, epoch: int) -> tuple[int, np.ndarray]:
        """Offset and permutation of an epoch. The last two epochs are kept: a step may straddle them."""
        if epoch not in self._orders:
            if len(self._orders) == 2:
                self._orders.pop(min(self._orders))
            slack = len(self.tokens) - self.windows_per_epoch * self.block_size  # offsets that leave room, at least 1
            self._orders[epoch] = epoch_order(self.seed, epoch, self.windows_per_epoch, min(slack, self.block_size))
        return self._orders[epoch]


def epoch_order(seed: int, epoch: int, n_windows: int, n_offsets: int) -> tuple[int, np.ndarray]:
    """The offset in [0, n_offsets) and the permutation of n_windows that (seed, epoch) stand for.

    Made of Philox's raw bits and a stable sort: numpy promises those never change, unlike `Generator.permutation`.
    """
    bits = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(n_windows + 1)
    return int(bits[-1] % np.uint64(n_offsets)), np.argsort(bits[:-1], kind="stable")


def validation_batches(
    tokens: Tokens | np.ndarray,
    block_size: int,
    batch_size: int,
    device: torch.device | str,
    max_windows: int | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The fixed windows that validate a model, in order: inputs and targets, int64 [batch_size, block_size] each.

    The windows do not overlap and every token but the first is a target exactly once. All batches have the same shape:
    what is missing in the last window and in the last batch is filled with input 0 and target IGNORE_INDEX. Given
    `max_windows`, only that many windows are read, evenly spread and always the same ones.
    """
    tokens = tokens if isinstance(tokens, Tokens) else Tokens([tokens])
    n_windows = math.ceil((len(tokens) - 1) / block_size)
    if n_windows < 1:
        raise UserError(f"{tokens.source} has {len(tokens)} tokens, and predicting one takes two")
    chosen = np.arange(n_windows)
    if max_windows is not None and max_windows < n_windows:
        chosen = np.arange(max_windows) * n_windows // max_windows
    batch_size = min(batch_size, len(chosen))
    to_device = _BatchCopier(device)
    for first in range(0, len(chosen), batch_size):
        yield to_device(*_validation_rows(tokens, chosen[first : first + batch_size], block_size, batch_size))


def _validation_rows(
    tokens: Tokens, windows: np.ndarray, block_size: int, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.zeros((batch_size, block_size), dtype=np.int64)
    targets = np.full((batch_size, block_size), IGNORE_INDEX, dtype=np.int64)
    starts = windows * block_size
    whole = int((starts + block_size < len(tokens)).sum())  # all but perhaps the last window of the split
    rows = tokens.windows(starts[:whole], block_size + 1)
    inputs[:whole], targets[:whole] = rows[:, :-1], rows[:, 1:]
    if whole < len(windows):
        rest = tokens.read(int(starts[whole]), len(tokens))
        inputs[whole, : len(rest) - 1], targets[whole, : len(rest) - 1] = rest[:-1], rest[1:]
    return inputs, targets


class _BatchCopier:
    """Moves (inputs, targets) to the device.

    To CUDA they go through two page-locked buffers in turn, so that the host can fill one while the other is still
    being copied; an event tells when a buffer may be filled again.
    """

    def __init__(self, device: torch.device | str):
        self._device = torch.device(device)
        self._buffers: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._turn = 0

    def __call__(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        if self._device.type != "cuda":
            batch = torch.from_numpy(np.stack([inputs, targets])).to(self._device)
            return batch[0], batch[1]
        self._turn ^= 1
        buffer = self._free_buffer(inputs.shape)
        buffer[0].numpy()[:], buffer[1].numpy()[:] = inputs, targets
        batch = buffer.to(self._device, non_blocking=True)
        self._copied[self._turn].record(torch.cuda.current_stream(self._device))
        return batch[0], batch[1]

    def _free_buffer(self, shape: tuple[int, ...]) -> torch.Tensor:
        if not self._buffers:
            self._buffers = [torch.empty((2, *shape), dtype=torch.int64, pin_memory=True) for _ in range(2)]
            self._copied = [torch.cuda.Event() for _ in range(2)]
        self._copied[self._turn].synchronize()  # returns at once for an event never recorded
        return self._buffers[self._turn]
