"""Generation below the command line: choosing tokens, turning them into text, and the engine that does both.

Read down. `sample` turns logits into one token, with noise that is a function and not a stream; `TextStream` turns
tokens into whole characters and finds stop strings; `Batch` holds what lives on the device; `Engine` runs it.
Shapes in the comments: B rows, V vocabulary. A row is one sample of one prompt.
"""

import codecs
import copy
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from data import UserError
from model import KVCache

CHUNK = 256  # tokens of one prefill step; also the unit in which the cache grows and is read
GREEDY_BELOW = 1e-6  # a temperature under this is 0: dividing fp32 logits by it would only make infinities


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from its logits. None, 0 (min_p) or 1 (top_p, repetition_penalty) switches a step off.

    Args:
        temperature: logits are divided by it; 0 takes the likeliest token, the lowest id on ties.
        top_k: keep the k likeliest tokens, and all that tie with the last of them.
        top_p: keep the fewest likeliest tokens whose probability reaches p (Holtzman et al. 2020), and all that
            tie with the last of them.
        min_p: keep tokens at least min_p times as probable as the likeliest one (Nguyen et al. 2024).
        repetition_penalty: divide positive and multiply negative logits of tokens already in the row, prompt
            included (Keskar et al. 2019, as in Hugging Face transformers).

    Raises:
        ValueError: a value out of range.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be 0 (the likeliest token) or above")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must lie between 0 and 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0 (1 is none)")


def penalise(logits, seen, penalty):
    """logits fp32 [B, V], seen bool [B, V]: make the seen tokens less likely (more likely if penalty < 1)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits, k):
    last = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < last, -math.inf)


def keep_top_p(logits, p):
    ordered = logits.sort(descending=True).values
    mass = ordered.softmax(-1).cumsum(-1)  # [B, V]: probability of the 1, 2, 3 ... likeliest tokens
    last = (mass < p).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)  # rank of the token that reaches p
    return logits.masked_fill(logits < ordered.gather(-1, last), -math.inf)


def keep_min_p(logits, p):
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -math.inf)


def filtered(logits, sampling: Sampling):
    """Temperature, top-k, top-p, min-p, in this order: fp32 [B, V] whose softmax is what is sampled; -inf is never."""
    # Their maximum becomes 0 first, so that no temperature can overflow to inf - inf.
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p:
        logits = keep_min_p(logits, sampling.min_p)
    return logits


def shift_right(x, n):
    """x >> n for int64 read as unsigned: torch's own shift would copy the sign bit."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def splitmix64(state, n):
    """Output n = 0, 1, 2 ... of the SplitMix64 generator seeded with `state`; int64 tensors that broadcast.

    Steele, Lea and Flood 2014, with the constants of Vigna's splitmix64.c; products wrap modulo 2**64.
    """
    z = state + (n + 1) * (0x9E3779B97F4A7C15 - 2**64)
    z = (z ^ shift_right(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ shift_right(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ shift_right(z, 31)


def uniform(seeds, positions, vocab_size):
    """Numbers in (0, 1), fp32 [B, V], each a pure function of (row seed, position, token id).

    seeds, positions: int64 [B]. Position p of a row is the start of a stream of its own, token v its v-th number.
    63 random bits are rounded to a float, so small numbers stay fine-grained down to 2**-64 and none is 0 or 1. The
    bits are the same on every device.
    """
    token = torch.arange(vocab_size, device=seeds.device)
    bits = splitmix64(splitmix64(seeds, positions)[:, None], token)
    return ((shift_right(bits, 1).float() + 0.5) * 2.0**-63).clamp(max=1 - 2.0**-24)


def gumbel(seeds, positions, vocab_size):
    """Standard Gumbel noise, fp32 [B, V], finite, from -2.9 to 44.4: argmax(logits + gumbel) samples softmax(logits).

    -log(-log(1 - u)) puts the fine end of u on the large values, the ones that let an unlikely token win. Adding
    noise to logits, where a filtered token is -inf, never draws a token of probability 0 (dividing probabilities
    by exponential noise can: 0 / 0).
    """
    return -torch.log(-torch.log1p(-uniform(seeds, positions, vocab_size)))


def sample(logits, sampling: Sampling, seeds, positions, seen=None):
    """Choose one token per row: int64 [B].

    logits: [B, V] in any float dtype. seeds, positions: int64 [B], the row's seed and where in it the chosen token will
    stand. seen: bool [B, V], the tokens under the repetition penalty (None: no penalty).
    """
    logits = logits.float()
    if seen is not None:
        logits = penalise(logits, seen, sampling.repetition_penalty)
    if sampling.temperature < GREEDY_BELOW:
        return logits.argmax(-1)  # torch: the first of equals
    return (filtered(logits, sampling) + gumbel(seeds, positions, logits.shape[-1])).argmax(-1)


class TextStream:
    """The text of one row as its tokens arrive: whole characters only, ending before the first stop string.

    Bytes of an unfinished character are held back, and so is text that may turn out to begin a stop string. Of
    several stop strings the one that is complete first wins, so that the text does not depend on how it was cut
    into tokens.
    """

    def __init__(self, tokenizer, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, stop
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""
        self.stopped = False  # a stop string came; nothing more will

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that has become certain."""
        self.held += self.decoder.decode(self.tokenizer.decode_bytes(token_ids))
        return self._release(final=False)

    def finish(self) -> str:
        """No more tokens: returns what was held back; a broken character becomes U+FFFD."""
        self.held += self.decoder.decode(b"", final=True)
        return self._release(final=True)

    def _release(self, final):
        if self.stopped:
            return ""
        found = [(start + len(s), start) for s in self.stop if (start := self.held.find(s)) >= 0]
        if found:
            self.stopped = True
            return self.held[: min(found)[1]]
        keep = 0 if final else max((_overlap(self.held, s) for s in self.stop), default=0)
        certain = len(self.held) - keep
        text, self.held = self.held[:certain], self.held[certain:]
        return text


def _overlap(text, stop):
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class Piece:
    """What one step added to a row. `text` may be empty while it is held back."""

    row: int  # prompt index * num_samples + sample
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # in a row's last piece: "stop" (stop string), "eot" or "length"


@dataclass(frozen=True)
class Completion:
    """One finished row. `token_ids` are all that were sampled: an end-of-text token and a stop string are in them,
    but not in `text`."""

    prompt: str
    text: str
    token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Report:
    """What one call took. Rates are over all rows together, 0 where there was nothing to measure."""

    prompt_tokens: int  # each prompt once, however many samples it has
    new_tokens: int
    seconds: float  # the whole call, with what the caller did between pieces
    tokens_per_s: float  # new_tokens / seconds
    time_to_first_token_s: float
    prefill_tokens_per_s: float  # prompt_tokens / time_to_first_token_s
    decode_tokens_per_s: float  # the tokens after each row's first, by the time after it
    kv_cache_bytes: int
    peak_memory_bytes: int | None  # CUDA only

    def __str__(self) -> str:
        """One line for people; `dataclasses.asdict` is for JSON."""
        memory = f", peak memory {self.peak_memory_bytes / 1e9:.2f} GB" if self.peak_memory_bytes else ""
        return (
            f"{self.new_tokens} new tokens in {self.seconds:.2f} s: {self.tokens_per_s:.1f} tokens/s "
            f"(first after {self.time_to_first_token_s * 1e3:.0f} ms, then {self.decode_tokens_per_s:.1f} tokens/s; "
            f"prompt of {self.prompt_tokens} at {self.prefill_tokens_per_s:.0f} tokens/s; "
            f"KV cache {self.kv_cache_bytes / 1e6:.1f} MB{memory})"
        )


@dataclass
class Row:
    """The host's side of a row: its text, and when it ends."""

    index: int
    seed: int
    length: int  # tokens so far, prompt included
    max_new_tokens: int
    text: TextStream
    new_tokens: int = 0
    finish_reason: str | None = None

    def accept(self, token: int, eot_id: int) -> Piece:
        """Take the token that was sampled."""
        self.length, self.new_tokens = self.length + 1, self.new_tokens + 1
        text = "" if token == eot_id else self.text.feed([token])
        if token == eot_id or self.new_tokens == self.max_new_tokens:
            text += self.text.finish()
            self.finish_reason = "eot" if token == eot_id else "length"
        if self.text.stopped:
            self.finish_reason = "stop"
        return Piece(self.index, text, [token], self.finish_reason)


class Batch:
    """The device's side of all rows of one call: newest token, its position, and the cache, never reallocated."""

    @torch.inference_mode()
    def __init__(self, model, vocab_size: int, rows: Sequence[Row], sampling: Sampling):
        device, dtype = model.embed.weight.device, model.dtype or model.embed.weight.dtype
        self.model, self.vocab_size, self.sampling = model, vocab_size, sampling
        slots = _whole_chunks(max(row.length + row.max_new_tokens for row in rows))
        self.cache = KVCache(model.config, len(rows), slots, device, dtype)
        self.tokens = torch.zeros(len(rows), 1, dtype=torch.int64, device=device)
        self.positions = torch.tensor([[row.length] for row in rows], device=device)  # of the token to be chosen
        self.seeds = torch.tensor([_int64(row.seed) for row in rows], device=device)
        penalty = sampling.repetition_penalty != 1
        self.seen = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device) if penalty else None

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int], rows: slice):
        """Read a prompt once, in chunks, for all of its samples `rows`, and choose the first token of each."""
        tokens = torch.tensor([prompt], device=self.tokens.device)
        first, length = slice(rows.start, rows.start + 1), len(prompt)
        for start in range(0, length, CHUNK):
            chunk = tokens[:, start : start + CHUNK]
            positions = torch.arange(start, start + chunk.shape[1], device=tokens.device)[None]
            cache = self._cache_of(first, start + chunk.shape[1])
            logits = self.model.decode(chunk, positions, cache, last_only=True)
        for saved in (self.cache.k, self.cache.v):
            saved[:, rows.start + 1 : rows.stop, :, :length] = saved[:, first, :, :length]
        if self.seen is not None:
            self.seen[rows, tokens[0]] = True
        for row in range(rows.start, rows.stop):  # one by one, see Engine
            self._choose(logits[:, -1], slice(row, row + 1))

    @torch.inference_mode()
    def decode(self, rows: slice, length: int):
        """One token more for `rows`, of which the longest has `length` tokens. Rows that ended may be among them."""
        here = self.positions[rows].clamp(max=length - 1)  # moves only rows that ended: they may have been longer
        logits = self.model.decode(self.tokens[rows], here, self._cache_of(rows, length))
        self.positions[rows] = here + 1
        self._choose(logits[:, -1], rows)

    def _choose(self, logits, rows):
        """logits [B, V'] -> the newest token of each row. Ids past the tokenizer's, which V' may have, never win."""
        seen = None if self.seen is None else self.seen[rows]
        logits, positions = logits[:, : self.vocab_size], self.positions[rows].squeeze(1)
        chosen = sample(logits, self.sampling, self.seeds[rows], positions, seen)[:, None]
        self.tokens[rows] = chosen
        if seen is not None:
            seen.scatter_(1, chosen, True)

    def _cache_of(self, rows, length):
        """The cache of `rows` as far as `length` tokens fill it, in whole chunks."""
        view = copy.copy(self.cache)
        view.k, view.v = (x[:, rows, :, : _whole_chunks(length)] for x in (self.cache.k, self.cache.v))
        return view


def _whole_chunks(length):
    return math.ceil(length / CHUNK) * CHUNK


def _int64(seed):
    """Any whole number, wrapped into 64 signed bits."""
    return (seed + 2**63) % 2**64 - 2**63


class Engine:
    """Text from a model and its tokenizer.

    On a CPU the rows of a batch take turns, each in matrix products of its own: a product with another number of
    rows may add its terms in another order, and a row's last bits would then depend on its neighbours. Alone they
    cannot. (Padding every product to 16 rows would do too, but makes a single row 1.5 to 5 times slower.) On a GPU
    all rows share each product, for speed, and a row may differ from the same row alone where two tokens nearly tie.

    Args:
        model: a Transformer, on any device, in any dtype. It runs in eval mode and is left in the mode it had.
        tokenizer: of the package `data`.

    Raises:
        UserError: the tokenizer has ids that the model does not know.
    """

    def __init__(self, model, tokenizer):
        if tokenizer.vocab_size > model.config.vocab_size:
            raise UserError(
                f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids but the model only "
                f"{model.config.vocab_size}: use the tokenizer it was trained with"
            )
        self.model, self.tokenizer = model, tokenizer
        self.share_products = model.embed.weight.device.type != "cpu"
        self.report: Report | None = None  # of the last call, once it has ended or was abandoned

    def room(self, prompt: str) -> int:
        """How many tokens may follow `prompt` within block_size; below 1 when it is too long."""
        return self.model.config.block_size - len(self._encode(prompt))

    def generate(
        self,
        prompts: Sequence[str],
        sampling: Sampling | None = None,
        max_new_tokens: int = 200,
        *,
        seed: int = 0,
        row_seeds: Sequence[int] | None = None,
        stop: Sequence[str] = (),
        num_samples: int = 1,
    ) -> Iterator[Piece]:
        """Continue prompts, yielding text as it comes. The arguments are checked before this returns.

        Args:
            prompts: texts of any lengths; an empty one starts from the end-of-text token.
            sampling: how tokens are drawn (None: the defaults of `Sampling`).
            max_new_tokens: tokens after which a row ends.
            seed: row r draws with the noise of seed + r.
            row_seeds: instead, one seed for each row.
            stop: strings that end a row; they are not part of its text.
            num_samples: rows per prompt, which is read once. Row = prompt index * num_samples + sample.

        Returns:
            an iterator of `Piece`s, one for each running row at each step. `self.report` is set when it ends.

        Raises:
            UserError: a prompt and max_new_tokens go past block_size, or a prompt cannot be encoded.
            ValueError: nothing to do, an empty stop string, the wrong number of row_seeds.
        """
        self.report = None
        count = len(prompts) * num_samples
        seeds = range(seed, seed + count) if row_seeds is None else row_seeds
        if isinstance(prompts, str) or isinstance(stop, str):
            raise ValueError("prompts and stop are sequences of strings: put a single one in a list")
        if count < 1 or max_new_tokens < 1:
            raise ValueError("the number of prompts, num_samples and max_new_tokens must be at least 1")
        if not all(stop):
            raise ValueError("an empty stop string would end every text before its first character")
        if len(seeds) != count:
            raise ValueError(f"{len(seeds)} row_seeds for {count} rows: give one for each")
        encoded = [self._encode(prompt) for prompt in prompts]
        self._check_length(max(map(len, encoded)), max_new_tokens)
        rows = [
            Row(i, seeds[i], len(encoded[i // num_samples]), max_new_tokens, TextStream(self.tokenizer, stop))
            for i in range(count)
        ]
        return self._run(encoded, rows, sampling or Sampling())

    def complete(
        self, prompts: Sequence[str], sampling: Sampling | None = None, max_new_tokens: int = 200, **options
    ) -> list[Completion]:
        """`generate`, collected: one Completion per row, in order. The same arguments and errors."""
        text, ids, reasons = defaultdict(str), defaultdict(list), {}
        for piece in self.generate(prompts, sampling, max_new_tokens, **options):
            text[piece.row] += piece.text
            ids[piece.row] += piece.token_ids
            reasons[piece.row] = piece.finish_reason
        samples = len(reasons) // len(prompts)
        return [Completion(prompts[r // samples], text[r], ids[r], reasons[r]) for r in range(len(reasons))]

    def _encode(self, prompt):
        return self.tokenizer.encode(prompt) or [self.tokenizer.eot_id]

    def _check_length(self, prompt, new):
        limit = self.model.config.block_size
        if prompt + new <= limit:
            return
        fits = [f"max_new_tokens of at most {limit - prompt}"] * (prompt < limit)
        fits += [f"a prompt of at most {limit - new} tokens"] * (new < limit)
        raise UserError(
            f"a prompt of {prompt} tokens and max_new_tokens={new} make {prompt + new}, past this model's block_size "
            f"of {limit}: use {' or '.join(fits) or 'less of both'}"
        )

    def _run(self, prompts, rows, sampling):
        start, first, training = time.perf_counter(), None, self.model.training
        device, samples = self.model.embed.weight.device, len(rows) // len(prompts)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        batch = Batch(self.model, self.tokenizer.vocab_size, rows, sampling)
        try:
            self.model.eval()
            for i, prompt in enumerate(prompts):
                batch.prefill(prompt, slice(i * samples, (i + 1) * samples))
            active = rows
            while True:
                tokens = batch.tokens.flatten().tolist()  # the one wait for the device in a step
                first = first or time.perf_counter()
                for row in active:
                    yield row.accept(tokens[row.index], self.tokenizer.eot_id)
                active = [row for row in active if row.finish_reason is None]
                if not active:
                    break
                for group in [active] if self.share_products else [[row] for row in active]:
                    batch.decode(slice(group[0].index, group[-1].index + 1), max(row.length for row in group))
        finally:
            self.model.train(training)
            self.report = measure(start, first, sum(map(len, prompts)), rows, batch.cache)


def measure(start: float, first: float | None, prompt_tokens: int, rows: Sequence[Row], cache: KVCache) -> Report:
    """The Report of a call that began at `start` and had its first token at `first`, on the clock of perf_counter."""
    end, new = time.perf_counter(), sum(row.new_tokens for row in rows)
    to_first, later = (first or end) - start, sum(max(0, row.new_tokens - 1) for row in rows)
    return Report(
        prompt_tokens=prompt_tokens,
        new_tokens=new,
        seconds=end - start,
        tokens_per_s=new / (end - start),
        time_to_first_token_s=to_first,
        prefill_tokens_per_s=prompt_tokens / to_first if first else 0.0,
        decode_tokens_per_s=later / (end - first) if first else 0.0,
        kv_cache_bytes=cache.k.nbytes + cache.v.nbytes,
        peak_memory_bytes=torch.cuda.max_memory_allocated(cache.k.device) if cache.k.is_cuda else None,
    )
