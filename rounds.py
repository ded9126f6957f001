"""Rounds of decoding: what lives on the device, and the steps between two looks of the host.

One round takes the newest token of every row and k drafts of what may follow through the model, keeps those that the
model itself chooses, and adds its next choice (kernels/round.py); k = 0 is plain decoding through the same code. A
draft stands if it equals the token that the noise of (row seed, position) makes the model choose there, so a row's text
is the same for every k and every source of drafts. Drafts come from the row's own earlier text ("prompt lookup", Saxena
2023), or from a smaller model that draws with the same noise.

On a GPU a round is captured once as a CUDA graph for each (rows, k) and then replayed: positions, lengths and tokens
are read from memory, so one graph serves every length. (With a draft model it is two, so that each can be timed.) The
host queues AHEAD rounds before it reads the oldest, which hides all that it does; tokens that come after the end of a
row are cut by the host. A CPU runs the same code at once.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from decoding import CHUNK, Decoder, whole_chunks
from kernels.flash_decode_plan import turning_points
from kernels.round import INDEX_BITS, accept, gather, look_up, publish
from sampling import Sampling, choose, parameters

MAX_DRAFTS = 16
AHEAD = 2  # rounds in the queue of a GPU while the host reads the one before
CAPTURED_PROMPT = 8 * CHUNK  # tokens: longer prompts are read by Python's calls
CATCH_UP = 16  # tokens that a draft model reads at once when it was not asked for a while


@dataclass(frozen=True)
class Round:
    """What one round did. Lists have an entry for each row."""

    drafts: int  # k
    tokens: list[list[int]]  # the new ones; none for a row that had ended
    log_probabilities: list[list[float]] | None
    match: list[int]  # tokens of the match that gave the drafts, 0 without one
    draft_seconds: float  # of the device
    seconds: float  # of the device, drafts included


DRAFTS_BEGAN, BEGAN, CATCHING_UP_BEGAN, DONE = range(4)  # columns of the times that a round leaves


class Rounds:
    """Rows of text on their way, for one number of rows and one length of cache. Reused from call to call.

    Args:
        decoder: the model.
        vocab_size: ids from here on are never chosen.
        batch, slots: rows, and tokens of each row's cache.
        kv: "auto" or "int8", as in `Decoder.cache`.
        draft: a smaller model with the same tokenizer, or None.
    """

    @torch.no_grad()
    def __init__(self, decoder: Decoder, vocab_size: int, batch: int, slots: int, kv: str, draft: Decoder | None):
        self.decoder, self.draft, self.vocab_size = decoder, draft, vocab_size
        self.batch, self.slots, self.device = batch, slots, decoder.device
        self.turns = turning_points(decoder.config.n_kv_head, decoder.config.head_dim)
        self.cuda = self.device.type == "cuda"
        self.ahead = AHEAD if self.cuda else 1  # rounds to keep in the queue
        self.cache = decoder.cache(batch, slots, kv)
        self.draft_cache = draft and draft.cache(batch, slots)

        def zeros(*shape, dtype=torch.int32):
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.tokens = zeros(batch, slots + MAX_DRAFTS + 1)
        self.state, parts = state_of(batch, self.device)
        self.seeds, self.position, self.limit, self.place, self.drafts, self.log, self.params = parts
        self.logprobs = zeros(batch, MAX_DRAFTS + 1, dtype=torch.float32)
        self.seen = zeros(batch, vocab_size, dtype=torch.bool)
        self.origin, self.shift = zeros(1), zeros(1)
        self.count = torch.arange(MAX_DRAFTS + 1, device=self.device)
        # Where results wait for the host: in its own memory, where a GPU stores them itself.
        self.ring = tuple(
            torch.zeros(AHEAD + 1, *shape, dtype=dtype, pin_memory=self.cuda)
            for shape, dtype in (
                (self.log.shape, self.log.dtype),
                (self.logprobs.shape, self.logprobs.dtype),
                ((4,), torch.int64),
            )
        )
        self.stamps = zeros(3, 2, dtype=torch.int64)
        self.next_place = 0  # in the ring, of the next round to be launched
        self.done = [torch.cuda.Event() for _ in range(AHEAD + 1)] if self.cuda else None
        self.reading = [torch.cuda.Event(enable_timing=True) for _ in "12"] if self.cuda else [0.0, 0.0]
        self.pending: deque[tuple[int, int, int]] = deque()  # drafts, place in the ring, column of when it began
        self.graphs, self.pool, self.behind = {}, None, 0
        self.held: list[int] = []  # tokens whose keys and values row 0 of the cache has

    @torch.no_grad()
    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        limits: Sequence[int],
        seeds: Sequence[int],
        sampling: Sampling,
        *,
        logprobs: bool = False,
        lookup: bool = False,
        reuse: bool = False,
    ) -> int:
        """Read the prompts, each once for its `samples` rows, all but the last token, which the first round takes.

        limits: the last index at which a token of each row may stand. lookup: draft from the rows' own text. reuse: do
        not read again what row 0 holds since the last call.

        Returns:
            the number of tokens that were read.
        """
        self.sampling, self.with_logprobs, self.lookup = sampling, logprobs, lookup
        self.penalty = sampling.repetition_penalty != 1
        self.pending.clear()
        self.positions, self.limits = [len(p) - 1 for p in prompts for _ in range(samples)], list(limits)
        # What a draft model has not read, or only as a draft of its own, it reads again.
        unread, self.behind = self.behind + MAX_DRAFTS + 1, 0
        held, self.held = self.held if reuse else [], []
        self.match, read = [0] * self.batch, 0
        with self._on_device():
            self._mark(0)
            self._send_text(prompts, samples)
            for i, prompt in enumerate(prompts):
                row, known = i * samples, len(prompt) - 1
                start = common_prefix(held, prompt[:-1]) if row == 0 else 0
                for model, cache in ((self.decoder, self.cache), (self.draft, self.draft_cache)):
                    if model is not None:
                        first = start if model is self.decoder else max(0, start - unread)
                        self._prefill(model, cache, prompt[:-1], row, first)
                        if samples > 1:
                            cache.copy_row(row, slice(row + 1, row + samples), known)
                read += known - start
            self._mark(1)
            self._send_state(seeds)  # a GPU is reading the prompts meanwhile
            if self.penalty:
                self.seen.zero_().scatter_(1, self.tokens[:, : max(map(len, prompts))].long(), True)
            if self.lookup:
                look_up(self.tokens, self.position, self.log)
                if not self.cuda:
                    self.match = [score >> INDEX_BITS for score in self.log[:, 1].tolist()]
        return read

    def prompt_seconds(self) -> float:
        """How long the last `begin` read, in time of the device; waits for the end of it."""
        began, ended = self.reading
        if not self.cuda:
            return ended - began
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3

    def _mark(self, end):
        if self.cuda:
            self.reading[end].record()
        else:
            self.reading[end] = time.perf_counter()

    def _prefill(self, model, cache, tokens, row, start):
        """`Decoder.prefill`. A short prompt of the first row is a captured graph too, one for each number of chunks:
        Python needs ten times as long to call the kernels of a small model as they run. What stands behind the prompt
        is read as its padding."""
        size = whole_chunks(len(tokens))
        if not (self.cuda and row == start == 0 and 0 < size <= min(CAPTURED_PROMPT, cache.slots)):
            return model.prefill(tokens, cache, row, start)
        key = ("prompt", size, cache is self.draft_cache)
        if key not in self.graphs:
            self.graphs[key] = self._capture(partial(model.read, self.tokens[0, :size], self.origin, 0, cache, 0))
        self.graphs[key].replay()

    def _send_text(self, prompts, samples):
        """Shorter rows repeat their last token, which is seen anyway, up to the length of the longest."""
        longest = max(map(len, prompts))
        text = [[*prompt, *prompt[-1:] * (longest - len(prompt))] for prompt in prompts for _ in range(samples)]
        # From pinned memory, or the host would wait for the copy. PyTorch gives the memory to nobody before it is done.
        text = torch.tensor(text, dtype=torch.int32, pin_memory=self.cuda)
        self.tokens[:, :longest].copy_(text, non_blocking=True)

    def _send_state(self, seeds):
        state, parts = state_of(self.batch, pin_memory=self.cuda)
        its_seeds, position, limit, _, drafts, _, params = parts
        its_seeds.copy_(torch.tensor([_int64(seed) for seed in seeds]))
        position.copy_(torch.tensor(self.positions))
        limit.copy_(torch.tensor(self.limits))
        drafts.fill_(-1)
        settings = parameters(self.sampling, len(params), self.device)
        if settings is not None:
            params.copy_(settings)
        self.state.copy_(state, non_blocking=True)
        self.next_place = 0

    def room(self) -> int:
        """Drafts for which every running row surely has slots in the cache, whatever the rounds in the queue bring."""
        queued = sum(drafts + 1 for drafts, *_ in self.pending)
        newest = [min(at + queued, limit - 1) for at, limit in zip(self.positions, self.limits, strict=True)]
        return self.slots - 1 - max(newest)

    def end(self, row: int):
        """The row has ended: from the next round on it is left alone."""
        self.limits[row] = 0
        with self._on_device():
            self.limit[row].fill_(-1)

    @torch.no_grad()
    def launch(self, drafts: int):
        """Start a round with so many drafts; `collect` has its results."""
        with self._on_device():
            # Captured before any of it runs: a graph that is new takes a while.
            draft = self._ready("draft", drafts) if self.draft is not None and drafts else None
            read = self._ready("read", CATCH_UP) if draft and self.behind else None
            verify = self._ready("verify", drafts)
            if read:
                self._catch_up(read)
            self.behind = 0 if draft else self.behind + 1
            if draft:
                draft()
            verify()
            if self.cuda:
                self.done[self.next_place].record()
        self.pending.append((drafts, self.next_place, CATCHING_UP_BEGAN if read else DRAFTS_BEGAN if draft else BEGAN))
        self.next_place = (self.next_place + 1) % len(self.ring[0])

    def collect(self) -> Round:
        """The results of the oldest round that was launched; waits for it."""
        drafts, place, first = self.pending.popleft()
        if self.cuda:
            self.done[place].synchronize()
        log, logprobs, times = (x[place] for x in self.ring)
        log, times = log.tolist(), times.tolist()
        tokens = [row[2 : 2 + row[0]] for row in log]
        if self.with_logprobs:
            logprobs = [row[: len(new)] for row, new in zip(logprobs.tolist(), tokens, strict=True)]
        else:
            logprobs = None
        match, self.match = self.match, [row[1] >> INDEX_BITS for row in log]
        self.positions = [position + len(new) for position, new in zip(self.positions, tokens, strict=True)]
        draft_seconds, seconds = ((times[end] - times[first]) / 1e9 for end in (BEGAN, DONE))
        return Round(drafts, tokens, logprobs, match, draft_seconds, seconds)

    def _on_device(self):
        return torch.cuda.device(self.device) if self.cuda else contextlib.nullcontext()

    # ----- one round, in operations of the device alone

    def _verify(self, drafts):
        """The drafts and the newest token through the model, and what stands of them."""
        width = drafts + 1
        match = self.log[:, 1] if self.lookup and drafts else None
        x, start, lengths, seeds, positions = self._gather(self.decoder, width, match=match, stamp=self.stamps[BEGAN])
        logits = self.decoder.step(x, start, lengths, self.cache)[:, : self.vocab_size]  # [B T, V]
        seen = self._seen(width).flatten(0, 1) if self.penalty else None
        chosen, logprobs = self._choose(logits, seeds, positions, seen, self.with_logprobs)
        if self.with_logprobs:
            self.logprobs[:, :width] = logprobs.view(-1, width)
        chosen = chosen.view(-1, width)
        accept(self.tokens, self.position, self.limit, self.drafts, chosen, self.log, self.turns)
        if self.penalty:
            kept = self.count[:width] < self.log[:, :1]
            self.seen.scatter_(1, torch.where(kept, chosen, self._newest()), True)
        if self.lookup:
            look_up(self.tokens, self.position, self.log)
        publish(self.log, self.logprobs if self.with_logprobs else None, self.stamps, self.place, self.ring)

    def _draft(self, drafts):
        """The smaller model's own text, one token after another. Its first step takes two tokens: when all drafts of
        the last round stood it has not read the last of them, and reading one twice changes nothing."""
        for j in range(drafts):
            width, first = (1, j) if j else (2, -1)
            stamp = None if j else self.stamps[DRAFTS_BEGAN]
            x, start, lengths, *noise = self._gather(self.draft, width, first=first, stamp=stamp)
            logits = self.draft.step(x, start, lengths, self.draft_cache).view(self.batch, width, -1)
            seeds, positions = (n.view(-1, width)[:, -1].contiguous() for n in noise)
            seen = self._seen(j + 1)[:, -1] if self.penalty else None
            self.drafts[:, j] = self._choose(logits[:, -1, : self.vocab_size], seeds, positions, seen)[0]

    def _read(self, width):
        """The smaller model reads tokens that it was not asked about."""
        x, start, lengths, *_ = self._gather(self.draft, width, shift=self.shift, stamp=self.stamps[CATCHING_UP_BEGAN])
        self.draft.step(x, start, lengths, self.draft_cache)

    def _gather(self, model, width, **options):
        state = (self.tokens, self.position, self.limit, self.drafts, self.seeds)
        return gather(*state, model.embed, width, **options)

    def _catch_up(self, read):
        """Let the smaller model read what came in the rounds without it, and the token before."""
        for block in range(-(-(self.behind + 1) // CATCH_UP), 0, -1):
            self.shift.fill_(-CATCH_UP * block)
            read()

    def _choose(self, logits, seeds, positions, seen, logprobs=False):
        return choose(logits, self.sampling, self.params[: len(logits)], seeds, positions, seen, logprobs)

    def _newest(self):
        return self.tokens.gather(1, self.position[:, None].long()).long()  # [B, 1]

    def _seen(self, width):
        """Tokens under the penalty at each of `width` places, bool [B, width, V]: those of the text, and drafts 1 .. j
        at place j."""
        seen = self.seen[:, None].repeat(1, width, 1)
        for j in range(1, width):
            draft = self.drafts[:, j - 1 : j].long()
            draft = torch.where(draft < 0, self._newest(), draft)  # no draft: a token that is marked anyway
            seen[:, j:].scatter_(2, draft[:, None].expand(-1, width - j, 1), True)
        return seen

    # ----- CUDA graphs

    def _ready(self, part, size):
        """A function that does one part of a round: on a GPU the replay of its graph."""
        work = partial({"verify": self._verify, "draft": self._draft, "read": self._read}[part], size)
        if not self.cuda:
            return work
        key = (part, size, self.sampling.filters, self.penalty, self.with_logprobs, self.lookup)
        if key not in self.graphs:
            self.graphs[key] = self._capture(work)
        return self.graphs[key].replay

    def _capture(self, work):
        """A graph of `work`. It runs first, on rows that count as ended: so nothing moves, and every kernel is compiled
        and has made what it keeps."""
        limit, place = self.limit.clone(), self.place.clone()
        self.limit.fill_(-1)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()
        torch.cuda.current_stream().wait_stream(aside)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            work()
        self.limit.copy_(limit)
        self.place.copy_(place)
        return graph


def state_of(batch: int, device="cpu", pin_memory: bool = False) -> tuple[Tensor, list[Tensor]]:
    """What a call sets before its first round, as one piece of memory, so that one copy brings it: int32 [n] of zeros,
    and its parts: seeds, position, limit, place, drafts, log (kernels/round.py), params (sampling.py)."""
    integers = ((batch,), (batch,), (1,), (batch, MAX_DRAFTS), (batch, MAX_DRAFTS + 3))
    shapes = [((batch,), torch.int64), *((shape, torch.int32) for shape in integers)]
    shapes += [((batch * (MAX_DRAFTS + 1), 5), torch.float32)]
    words = [math.prod(shape) * dtype.itemsize // 4 for shape, dtype in shapes]
    room = [-(-n // 32) * 32 for n in words]  # each begins where a line of the cache does
    state = torch.zeros(sum(room), dtype=torch.int32, device=device, pin_memory=pin_memory)
    pieces = zip(state.split(room), words, shapes, strict=True)
    parts = [piece[:n].view(dtype).view(shape) for piece, n, (shape, dtype) in pieces]
    return state, parts


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with together."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _int64(seed):
    """Any whole number, wrapped into 64 signed bits."""
    return (seed + 2**63) % 2**64 - 2**63
