"""Generation below the command line: from prompts to text, as it comes.

    engine = Engine(checkpoint.load_model("out/small"), checkpoint.load_tokenizer("out/small"))
    for piece in engine.generate(["def main("], Sampling(temperature=0.8), max_new_tokens=100, seed=1):
        print(piece.text, end="", flush=True)

`Engine` is the host's side: it checks, starts the rounds of decoding (rounds.py), turns their tokens into text
(textstream.py), ends rows, and reports. The model's weights and cache are decoding.py's, the choice of a token is
sampling.py's, and how many tokens to guess ahead speculation.py's.

A row is one sample of one prompt. Its text is a function of the model, the prompt, the sampling and the row's seed:
neither the rows beside it nor speculation change it.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from config import find_gpu
from data import UserError
from decoding import CHUNK, KV, Decoder, cache_bytes, memory_left, whole_chunks
from rounds import MAX_DRAFTS, Round, Rounds
from sampling import Sampling
from speculation import MODEL, AdaptiveDrafts, FixedDrafts, SpeculationStats
from textstream import TextStream

SLOTS = 1024  # tokens of each row: the least that a cache which is kept for later calls has room for


@dataclass(frozen=True)
class Piece:
    """What one round added to a row. `text` may be empty while it is held back."""

    row: int  # prompt index * num_samples + sample
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # in a row's last piece: "stop" (stop string), "eot" or "length"
    log_probabilities: list[float] | None = None  # of token_ids, if asked for


@dataclass(frozen=True)
class Completion:
    """One finished row. `token_ids` are all that were sampled: an end-of-text token and a stop string are in them,
    but not in `text`."""

    prompt: str | list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    log_probabilities: list[float] | None = None


@dataclass(frozen=True)
class Report:
    """What one call took. Rates are over all rows together, 0 where there was nothing to measure."""

    prompt_tokens: int  # each prompt once, however many samples it has
    new_tokens: int
    seconds: float  # the whole call, with what the caller did between pieces
    tokens_per_s: float  # new_tokens / seconds
    time_to_first_token_s: float
    prefill_tokens_per_s: float  # the prompt tokens that were read, by the time it took
    decode_tokens_per_s: float  # the tokens after each row's first, by the time after it
    decode_tokens_per_s_per_row: float
    weight_bytes: int  # that a round reads, whatever its rows and drafts
    kv_bytes: int  # that a round reads of the caches of all rows, at the mean position
    read_tb_per_s: float  # the two, by the mean time of a round without its drafting
    gpu_read_tb_per_s: float | None  # what this GPU can read, measured; None where nobody has
    kv_cache_bytes: int  # allocated
    peak_memory_bytes: int | None  # CUDA only
    speculation: dict | None  # see SpeculationStats.summary; None without

    def __str__(self) -> str:
        """One line for people; `dataclasses.asdict` is for JSON."""
        memory = f", peak memory {self.peak_memory_bytes / 1e9:.2f} GB" if self.peak_memory_bytes else ""
        limit = f" of {self.gpu_read_tb_per_s * 1e3:.0f}" if self.gpu_read_tb_per_s else ""
        read = f" at {self.prefill_tokens_per_s:.0f} tokens/s" if self.prefill_tokens_per_s else ""
        guessed = ""
        if self.speculation and self.speculation["acceptance"]:
            guessed = f", {self.speculation['tokens_per_pass']:.2f} tokens a round"
        return (
            f"{self.new_tokens} new tokens in {self.seconds:.2f} s: {self.tokens_per_s:.1f} tokens/s "
            f"(first after {self.time_to_first_token_s * 1e3:.0f} ms, then {self.decode_tokens_per_s:.1f} tokens/s"
            f"{guessed}; prompt of {self.prompt_tokens}{read}; "
            f"reading {self.read_tb_per_s * 1e3:.1f}{limit} GB/s; KV cache {self.kv_cache_bytes / 1e6:.1f} MB{memory})"
        )


@dataclass
class Row:
    """The host's side of a row: its text, and when it ends."""

    index: int
    seed: int
    length: int  # tokens so far, prompt included
    max_new_tokens: int
    text: TextStream
    stop_ids: frozenset[int]
    ids: list[int] = field(default_factory=list)  # the new ones
    finish_reason: str | None = None

    @property
    def new_tokens(self) -> int:
        return len(self.ids)

    def accept(self, tokens: Sequence[int], log_probabilities: Sequence[float] | None = None) -> Piece:
        """Take the tokens of a round, as far as the row goes: what comes after its end is dropped."""
        text, before = "", self.new_tokens
        for token in tokens:
            self.length += 1
            self.ids.append(token)
            ended = token in self.stop_ids
            text += "" if ended else self.text.feed([token])
            if ended or self.new_tokens == self.max_new_tokens:
                text += self.text.finish()
                self.finish_reason = "eot" if ended else "length"
            if self.text.stopped:
                self.finish_reason = "stop"
            if self.finish_reason:
                break
        new = self.ids[before:]
        return Piece(self.index, text, new, self.finish_reason, log_probabilities and log_probabilities[: len(new)])


class Engine:
    """Text from a model and its tokenizer. It keeps its cache and CUDA graphs from call to call.

    Args:
        model: a Transformer on any device, which is packed for decoding and not changed, or a `Decoder`.
        tokenizer: of the package `data`.
        quant: "int8" or "int4" weights, or None.
        kv: "auto", a cache in the dtype of activations, or "int8", half of it.
        draft: a smaller model and its tokenizer, which must be the same: its guesses are checked several at a time.
        speculate: how many tokens to guess ahead: "auto" (as many as pay, from what is measured), 0 (never), or a fixed
            number up to 16. Without a draft model the guesses repeat what the text said before. The text is the same.
        release: let `model` lose each weight as it is packed, so that there are never two copies; it is useless then.

    Raises:
        UserError: a tokenizer with ids that a model does not know, or a draft model with another tokenizer.
        ValueError: an option that is none of these.
    """

    def __init__(
        self,
        model,
        tokenizer,
        *,
        quant: str | None = None,
        kv: str = "auto",
        draft: tuple | None = None,
        speculate: str | int = "auto",
        release: bool = False,
    ):
        if speculate != "auto" and not (isinstance(speculate, int) and 0 <= speculate <= MAX_DRAFTS):
            raise ValueError(f"speculate={speculate!r} must be auto or a whole number from 0 to {MAX_DRAFTS}")
        if kv not in KV:
            raise ValueError(f"kv={kv!r} must be one of {', '.join(KV)}")
        refuse_unknown_ids(model.config, tokenizer)
        self.tokenizer, self.config, self.kv = tokenizer, model.config, kv
        self.decoder = packed(model, quant, release)
        self.draft = None
        if draft is not None and speculate != 0:
            small, its_tokenizer = draft
            if its_tokenizer.hash != tokenizer.hash:
                raise UserError(
                    f"the draft model's tokenizer ({its_tokenizer.name}) is not the model's ({tokenizer.name}): a "
                    "token would mean another text to each; use a draft model trained with the same tokenizer"
                )
            refuse_unknown_ids(small.config, tokenizer)
            self.draft = packed(small, quant, release)
        self.speculate = speculate
        self.policy = AdaptiveDrafts() if speculate == "auto" else FixedDrafts(speculate)
        self.rounds: Rounds | None = None
        self.call = None  # the call that the rounds belong to
        self.report: Report | None = None  # of the last call, once it has ended or was abandoned

    def room(self, prompt: str | Sequence[int]) -> int:
        """How many tokens may follow `prompt` within block_size; below 1 when it is too long."""
        return self.config.block_size - len(self._encode(prompt))

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling | None = None,
        max_new_tokens: int = 200,
        *,
        seed: int = 0,
        row_seeds: Sequence[int] | None = None,
        stop: Sequence[str] = (),
        num_samples: int = 1,
        logprobs: bool = False,
        reuse: bool = False,
    ) -> Iterator[Piece]:
        """Continue prompts, yielding text as it comes. The arguments are checked before this returns.

        Args:
            prompts: texts of any lengths, or lists of token ids; an empty one starts from the end-of-text token.
            sampling: how tokens are drawn (None: the defaults of `Sampling`).
            max_new_tokens: tokens after which a row ends. Any of the tokenizer's `stop_ids` ends it too.
            seed: row r draws with the noise of seed + r.
            row_seeds: instead, one seed for each row.
            stop: strings that end a row; they are not part of its text.
            num_samples: rows per prompt, which is read once. Row = prompt index * num_samples + sample.
            logprobs: give each token's log-probability, under the model alone: before temperature, filters, penalty.
            reuse: do not read again what the cache of the last call holds of the first prompt (a conversation). Its
                keys and values may differ in their last bits from those of the prompt read at once.

        Returns:
            an iterator of `Piece`s, one for each running row in each round. `self.report` is set when it ends. Another
            call to generate takes the cache over: only the last iterator may be gone on with.

        Raises:
            UserError: a prompt and max_new_tokens go past block_size or memory, or a prompt cannot be encoded.
            ValueError: nothing to do, an empty stop string, the wrong number of row_seeds, ids that are no tokens.
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
        if row_seeds is not None and len(seeds) != count:
            raise ValueError(f"{len(seeds)} row_seeds for {count} rows: give one for each")
        encoded = [self._encode(prompt) for prompt in prompts]
        longest = max(map(len, encoded))
        self._check_length(longest, max_new_tokens)
        rounds = self._rounds(count, longest + max_new_tokens, grows=reuse)  # refuses more rows than memory can hold
        stop_ids = self.tokenizer.stop_ids
        texts = [TextStream(self.tokenizer, stop, begins=not prompts[i // num_samples]) for i in range(count)]
        rows = [
            Row(i, seeds[i], len(encoded[i // num_samples]), max_new_tokens, texts[i], stop_ids) for i in range(count)
        ]
        return self._run(rounds, encoded, rows, sampling or Sampling(), logprobs, reuse)

    def complete(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling | None = None,
        max_new_tokens: int = 200,
        **options,
    ) -> list[Completion]:
        """`generate`, collected: one Completion per row, in order. The same arguments and errors."""
        text, ids, logs, reasons = defaultdict(str), defaultdict(list), defaultdict(list), {}
        for piece in self.generate(prompts, sampling, max_new_tokens, **options):
            text[piece.row] += piece.text
            ids[piece.row] += piece.token_ids
            logs[piece.row] += piece.log_probabilities or []
            reasons[piece.row] = piece.finish_reason
        samples = len(reasons) // len(prompts)
        return [
            Completion(prompts[r // samples], text[r], ids[r], reasons[r], logs[r] if options.get("logprobs") else None)
            for r in range(len(reasons))
        ]

    def _encode(self, prompt):
        if isinstance(prompt, str):
            return self.tokenizer.encode_prompt(prompt) or [self.tokenizer.eot_id]
        if not all(0 <= token < self.config.vocab_size for token in prompt):
            raise ValueError(f"a prompt has ids outside 0 .. {self.config.vocab_size - 1}")
        return list(prompt) or [self.tokenizer.eot_id]

    def _check_length(self, prompt, new):
        limit = self.config.block_size
        if prompt + new <= limit:
            return
        fits = [f"max_new_tokens of at most {limit - prompt}"] * (prompt < limit)
        fits += [f"a prompt of at most {limit - new} tokens"] * (new < limit)
        raise UserError(
            f"a prompt of {prompt} tokens and max_new_tokens={new} make {prompt + new}, past this model's block_size "
            f"of {limit}: use {' or '.join(fits) or 'less of both'}"
        )

    def _rounds(self, batch: int, length: int, grows: bool) -> Rounds:
        """The rounds of the last call, if they have room for `batch` rows of `length` tokens, or new ones."""
        if self.rounds is not None and self.rounds.batch == batch and self.rounds.slots >= length:
            return self.rounds
        self.rounds = None  # its memory first
        exact = whole_chunks(length)
        slots = exact
        if grows or self.decoder.device.type == "cuda":
            # Room for longer calls, in powers of two, where there is memory for it: a conversation keeps what it has
            # read, and a GPU its graphs.
            power = max(SLOTS, 1 << (length + MAX_DRAFTS - 1).bit_length())
            roomy = max(exact, min(power, whole_chunks(self.config.block_size)))
            need = cache_bytes(self.config, batch, roomy, self.decoder.dtype, self.kv)
            slots = roomy if need < memory_left(self.decoder.device) // 2 else exact
        self.rounds = Rounds(self.decoder, self.tokenizer.vocab_size, batch, slots, self.kv, self.draft)
        if isinstance(self.policy, AdaptiveDrafts):
            self.policy.restart()
        return self.rounds

    def _run(self, rounds, prompts, rows, sampling, logprobs, reuse):
        call = self.call = object()
        start, first, read = time.perf_counter(), None, None
        samples, device = len(rows) // len(prompts), self.decoder.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        stats, active = SpeculationStats(), list(rows)
        try:
            read = rounds.begin(
                prompts,
                samples,
                [row.length + row.max_new_tokens - 1 for row in rows],
                [row.seed for row in rows],
                sampling,
                logprobs=logprobs,
                lookup=self.draft is None and self.speculate != 0,
                reuse=reuse,
            )
            while active:
                missing = max(row.max_new_tokens - row.new_tokens for row in active)  # a round brings one at least
                while len(rounds.pending) < min(rounds.ahead, missing):
                    rounds.launch(self.policy.choose(self._sources(rounds.match, active), rounds.room()))
                done = rounds.collect()
                first = first or time.perf_counter()
                self._observe(done, active, stats)
                for row in active:
                    new, logs = done.tokens[row.index], done.log_probabilities
                    piece = row.accept(new, logs and logs[row.index])
                    if row.finish_reason:
                        rounds.end(row.index)
                    yield piece
                    if self.call is not call:
                        raise RuntimeError("another call to generate has taken this engine's cache over")
                active = [row for row in active if row.finish_reason is None]
        finally:
            if self.call is call:
                if read is not None:  # else an interrupt came while the prompt was read
                    rounds.held = [*prompts[0], *rows[0].ids][:-1]  # the newest token has not been through the model
                self.report = self._measure(start, first, read, prompts, rows, rounds, stats)

    def _sources(self, match, active):
        """Where the drafts of each running row come from: the length of a match, or the draft model."""
        return [MODEL if self.draft else match[row.index] for row in active]

    def _observe(self, done: Round, active, stats):
        sources = self._sources(done.match, active)
        added = [len(done.tokens[row.index]) for row in active]
        self.policy.observe(done, sources, added)
        stats.observe(done, sources, added)

    def _measure(self, start, first, read, prompts, rows, rounds, stats) -> Report:
        end, new = time.perf_counter(), sum(row.new_tokens for row in rows)
        later = sum(max(0, row.new_tokens - 1) for row in rows)
        decode = later / (end - first) if first and later else 0.0
        passes = sum(stats.rounds.values())
        kv_bytes = sum(self._kv_bytes(row.length - row.new_tokens / 2) for row in rows)
        per_round = stats.verify_seconds / passes if passes else 0.0
        weight_bytes, cuda = self.decoder.weight_bytes(), rounds.cuda
        gpu = find_gpu(torch.cuda.get_device_name(rounds.device)) if cuda else None
        return Report(
            prompt_tokens=sum(map(len, prompts)),
            new_tokens=new,
            seconds=end - start,
            tokens_per_s=new / (end - start),
            time_to_first_token_s=(first or end) - start,
            prefill_tokens_per_s=read / rounds.prompt_seconds() if read else 0.0,
            decode_tokens_per_s=decode,
            decode_tokens_per_s_per_row=decode / len(rows),
            weight_bytes=weight_bytes,
            kv_bytes=int(kv_bytes),
            read_tb_per_s=(weight_bytes + kv_bytes) / per_round / 1e12 if per_round else 0.0,
            gpu_read_tb_per_s=gpu.read_tbs if gpu else None,
            kv_cache_bytes=rounds.cache.nbytes,
            peak_memory_bytes=torch.cuda.max_memory_allocated(rounds.device) if cuda else None,
            speculation=stats.summary() if self.speculate != 0 else None,
        )

    def _kv_bytes(self, length):
        """Bytes of a row's cache that a token at position `length` reads."""
        seen = min(length, self.config.sliding_window or length)
        return seen * cache_bytes(self.config, 1, CHUNK, self.decoder.dtype, self.kv) / CHUNK


def refuse_unknown_ids(config, tokenizer):
    """UserError if the model has no embedding for some of the tokenizer's ids."""
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids but the model only "
            f"{config.vocab_size}: use the tokenizer it was trained with"
        )


def packed(model, quant: str | None, release: bool) -> Decoder:
    """The Decoder of a Transformer; one that is given is taken as it is."""
    return model if isinstance(model, Decoder) else Decoder.of(model, quant, release)
