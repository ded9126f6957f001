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

Several datasets with weights (see mixture.py) are drawn from in blocks of BLOCK_WINDOWS windows: every block has the
same number of windows of each dataset, in an order drawn from (seed, block). So it is known, without counting up to it,
that a window is the n-th of its dataset; which one that is follows from the dataset's own epochs as above.

Where documents are not to see each other (doc_mask), batches also say where each position's document starts.

Chats (see chat.py) are marked token by token: only a target that is part of an answer counts, the others become
IGNORE_INDEX. Windows then hold different numbers of targets, and `weight` says how much a micro-batch's mean loss
counts, so that a step's loss is the mean over its targets however it was divided.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from .errors import UserError
from .mixture import MixedTokens, split_parts
from .shards import ANSWER, ENDS_DOCUMENT, ID_MASK, Tokens

IGNORE_INDEX = -100  # the target that torch's and our own cross-entropy leave out
STREAM_SHIFT = 40  # of the second word of a Philox key the low bits count epochs, the high ones tell streams apart
MIXING_STREAM = (1 << 23) - 1


class Loader:
    """Training batches from one split.

    tokens: the split of a dataset or of a mixture (a plain array of ids will do)
    block_size: tokens in a row
    windows_per_step: rows in a step, over all micro-batches and ranks
    micro_batch_size: rows in one `micro_batch`
    eot_id: given, every batch has a third tensor, that of `document_starts`

    Raises UserError when a dataset is shorter than one window.
    """

    def __init__(
        self,
        tokens: Tokens | MixedTokens | np.ndarray,
        block_size: int,
        windows_per_step: int,
        seed: int,
        device: torch.device | str,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        eot_id: int | None = None,
    ):
        if windows_per_step % (micro_batch_size * world_size):
            raise ValueError(f"{windows_per_step=} is no multiple of {micro_batch_size=} times {world_size=}")
        self.tokens = Tokens([tokens]) if isinstance(tokens, np.ndarray) else tokens
        self.block_size = block_size
        self.windows_per_step = windows_per_step
        self.micro_batch_size = micro_batch_size
        self.micro_batches_per_step = windows_per_step // (micro_batch_size * world_size)
        self.rank = rank
        self.world_size = world_size
        self.eot_id = eot_id
        parts = split_parts(self.tokens)
        self._orders = [WindowOrder(part, block_size, seed, stream) for stream, (part, _) in enumerate(parts)]
        self._mixing = Mixing(seed, self.tokens.shares) if isinstance(self.tokens, MixedTokens) else None
        self._to_device = _BatchCopier(device)
        self._marked = any(part.marked for part, _ in parts)
        self._counts_of_step: tuple[int, np.ndarray] | None = None

    @property
    def windows_per_epoch(self) -> int:
        """Windows in one epoch of every dataset."""
        return sum(order.windows_per_epoch for order in self._orders)

    def epoch(self, step: int) -> float:
        """Epochs done before step `step`; in a mixture, those of the dataset that was read most often."""
        return max(self.epochs(step))

    def epochs(self, step: int) -> list[float]:
        """Epochs done before step `step`, of each dataset."""
        window = step * self.windows_per_step
        drawn = self._mixing.drawn_before(window) if self._mixing else [window]
        return [n / order.windows_per_epoch for n, order in zip(drawn, self._orders, strict=True)]

    def micro_batch(self, step: int, m: int) -> tuple[torch.Tensor, ...]:
        """Inputs and targets of micro-batch `m` of `step` for this rank: int64 [micro_batch_size, block_size] each.

        With an eot_id, doc_start follows. All are new tensors on the device. On CUDA the copy runs on the
        current stream, behind the work before it.
        """
        if not 0 <= m < self.micro_batches_per_step:
            raise IndexError(f"micro-batch {m} of {self.micro_batches_per_step}")
        row = (m * self.world_size + self.rank) * self.micro_batch_size
        rows = self.rows(np.arange(row, row + self.micro_batch_size) + step * self.windows_per_step)
        if not self._marked:
            return _with_documents(self._to_device(rows[:, :-1], rows[:, 1:]), self.eot_id)
        targets = marked_targets(rows[:, 1:])
        if (targets == IGNORE_INDEX).all():
            targets[0, 0] = rows[0, 1] & ID_MASK  # a mean over nothing is NaN; this one has weight 0
        batch = self._to_device(rows[:, :-1] & ID_MASK, targets)
        return batch if self.eot_id is None else (*batch, _marked_documents(rows[:, :-1], batch[0].device))

    def weight(self, step: int, m: int) -> float:
        """What micro-batch `m`'s mean loss counts in the step's: the weights of a step add up to 1 on average over the
        ranks, and are in proportion to the targets that count."""
        if not self._marked:
            return 1 / self.micro_batches_per_step
        if self._counts_of_step is None or self._counts_of_step[0] != step:
            rows = self.rows(np.arange(self.windows_per_step) + step * self.windows_per_step)
            counts = ((rows[:, 1:] & ANSWER) > 0).sum(axis=1)  # [windows_per_step]
            self._counts_of_step = step, counts.reshape(-1, self.world_size, self.micro_batch_size).sum(axis=2)
        counts = self._counts_of_step[1]
        return float(counts[m, self.rank] * self.world_size / max(1, counts.sum()))

    def rows(self, windows: np.ndarray) -> np.ndarray:
        """The tokens of the windows of these global indices [n], int64 [n, block_size + 1]; marked where any are."""
        if self._mixing is None:
            return self._orders[0].rows(windows)
        rows = np.empty((len(windows), self.block_size + 1), dtype=np.int64)
        dataset_of, local = self._mixing.locate(windows)
        for dataset in np.unique(dataset_of):
            chosen = dataset_of == dataset
            rows[chosen] = self._orders[dataset].rows(local[chosen])
            if self._marked and not self._orders[dataset].tokens.marked:  # plain text beside chats: all of it counts
                rows[chosen] |= np.where(rows[chosen] == self.eot_id, ANSWER | ENDS_DOCUMENT, ANSWER)
        return rows


class WindowOrder:
    """The endless sequence of windows of one dataset, epoch after epoch. `stream` is its place in the mixture."""

    def __init__(self, tokens: Tokens, block_size: int, seed: int, stream: int = 0):
        if len(tokens) < block_size + 1:
            raise UserError(
                f"{tokens.source} has {len(tokens):,} tokens, fewer than one window of block_size + 1 = "
                f"{block_size + 1:,}; prepare more text, or set a smaller block_size"
            )
        self.tokens = tokens
        self.block_size = block_size
        self.seed = seed
        self.stream = stream
        # The offset costs up to block_size - 1 tokens; one window fewer, and every offset leaves room for all windows.
        self.windows_per_epoch = max(1, len(tokens) // block_size - 1)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    def rows(self, windows: np.ndarray) -> np.ndarray:
        """The tokens of the windows of these indices [n], int64 [n, block_size + 1]."""
        return self.tokens.windows(self.window_starts(windows), self.block_size + 1)

    def window_starts(self, windows: np.ndarray) -> np.ndarray:
        """Where the windows of these indices [n] start in the token sequence, int64 [n]."""
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
            n_offsets = min(slack, self.block_size)
            self._orders[epoch] = epoch_order(self.seed, epoch, self.windows_per_epoch, n_offsets, self.stream)
        return self._orders[epoch]


class Mixing:
    """Which dataset a window of a mixture comes from, and the how-manieth of that dataset it is.

    shares: windows of each dataset in a block
    """

    def __init__(self, seed: int, shares: Sequence[int]):
        self.seed = seed
        self.shares = np.array(shares, dtype=np.int64)
        self._block = int(self.shares.sum())
        self._dataset_of_slot = np.repeat(np.arange(len(shares)), self.shares)
        self._kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def locate(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For windows of these global indices [n]: the dataset of each and its index in that dataset's sequence."""
        blocks, within = np.divmod(windows, self._block)
        datasets, local = np.empty_like(windows), np.empty_like(windows)
        for block in np.unique(blocks):
            dataset_of, rank = self._order(int(block))
            chosen = blocks == block
            datasets[chosen] = dataset_of[within[chosen]]
            local[chosen] = block * self.shares[datasets[chosen]] + rank[within[chosen]]
        return datasets, local

    def drawn_before(self, window: int) -> list[int]:
        """How many windows of each dataset come before this global index."""
        block, within = divmod(window, self._block)
        dataset_of, _ = self._order(block)
        return (block * self.shares + np.bincount(dataset_of[:within], minlength=len(self.shares))).tolist()

    def _order(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """For each place in a block: its dataset, and how many of that dataset stand before it. Two are kept."""
        if block not in self._kept:
            if len(self._kept) == 2:
                self._kept.pop(min(self._kept))
            _, slots = epoch_order(self.seed, block, self._block, 1, MIXING_STREAM)
            dataset_of = self._dataset_of_slot[slots]
            rank = np.empty(self._block, dtype=np.int64)
            for dataset, share in enumerate(self.shares):
                rank[dataset_of == dataset] = np.arange(share)
            self._kept[block] = dataset_of, rank
        return self._kept[block]


def epoch_order(seed: int, epoch: int, n_windows: int, n_offsets: int, stream: int = 0) -> tuple[int, np.ndarray]:
    """The offset in [0, n_offsets) and the permutation of n_windows that (seed, epoch) stand for.

    Each `stream` has its own: the datasets of a mixture count from 0, and the order of its blocks is MIXING_STREAM.
    Made of Philox's raw bits and a stable sort: numpy promises those never change, unlike `Generator.permutation`.
    """
    key = np.array([seed % 2**64, stream << STREAM_SHIFT | epoch], dtype=np.uint64)
    bits = np.random.Philox(key=key).random_raw(n_windows + 1)
    return int(bits[-1] % np.uint64(n_offsets)), np.argsort(bits[:-1], kind="stable")


def validation_batches(
    tokens: Tokens | np.ndarray,
    block_size: int,
    batch_size: int,
    device: torch.device | str,
    max_windows: int | None = None,
    eot_id: int | None = None,
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The fixed windows that validate a model, in order: inputs and targets, int64 [batch_size, block_size] each.

    The windows do not overlap and every token but the first is a target exactly once. All batches have the same shape:
    what is missing in the last window and in the last batch is filled with input 0 and target IGNORE_INDEX. Given
    `max_windows`, only that many windows are read, evenly spread and always the same ones. With an eot_id, the tensor
    of `document_starts` follows. A mixture is validated one dataset after the other, see `mixture.split_parts`.
    """
    tokens = Tokens([tokens]) if isinstance(tokens, np.ndarray) else tokens
    n_windows = math.ceil((len(tokens) - 1) / block_size)
    if n_windows < 1:
        raise UserError(f"{tokens.source} has {len(tokens)} tokens, and predicting one takes two")
    chosen = np.arange(n_windows)
    if max_windows is not None and max_windows < n_windows:
        chosen = np.arange(max_windows) * n_windows // max_windows
    batch_size = min(batch_size, len(chosen))
    to_device = _BatchCopier(device)
    for first in range(0, len(chosen), batch_size):
        inputs, targets = _validation_rows(tokens, chosen[first : first + batch_size], block_size, batch_size)
        if not tokens.marked:
            yield _with_documents(to_device(inputs, targets), eot_id)
            continue
        batch = to_device(inputs & ID_MASK, marked_targets(targets))
        yield batch if eot_id is None else (*batch, _marked_documents(inputs, batch[0].device))


def document_starts(inputs: torch.Tensor, eot_id: int) -> torch.Tensor:
    """Where each position's document starts in its row: int32 [B, T], for inputs int64 [B, T].

    It is the index in the row of the first token of the document; a position that starts anew with each document is
    the index less this. An eot_id belongs to the document it ends; the first document of a row starts at 0, also where
    the row begins in the middle of it.
    """
    index = torch.arange(inputs.shape[1], device=inputs.device)
    after_eot = torch.zeros_like(inputs)
    after_eot[:, 1:] = torch.where(inputs[:, :-1] == eot_id, index[1:], 0)
    return after_eot.cummax(dim=1).values.to(torch.int32)


def _with_documents(batch: tuple[torch.Tensor, torch.Tensor], eot_id: int | None) -> tuple[torch.Tensor, ...]:
    return batch if eot_id is None else (*batch, document_starts(batch[0], eot_id))


def marked_targets(targets: np.ndarray) -> np.ndarray:
    """The ids that count among marked ones, IGNORE_INDEX for the others; of the same shape."""
    return np.where((targets & ANSWER > 0) & (targets != IGNORE_INDEX), targets & ID_MASK, IGNORE_INDEX)


def _marked_documents(inputs: np.ndarray, device: torch.device) -> torch.Tensor:
    """`document_starts` by the marks, since the end-of-text token may also end the turns of a chat: int32 [B, T]."""
    return document_starts(torch.from_numpy(inputs & ENDS_DOCUMENT), ENDS_DOCUMENT).to(device)


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
