"""Generation at batch 1 and more: tokens a second, and how much of the memory's speed that is.

    python -m bench.decode                                  the table of the README: 124M to 8B, bf16, int8, int4
    python -m bench.decode --models 1b out/small --quant none int8 --prompt 32 2k 32k --batch 1 8 32
    python -m bench.decode --models 1b --context 32k        a cache that holds so many tokens already, of random values
    python -m bench.decode --prefill 8k 32k --models 8b     reading a prompt
    python -m bench.decode --seventy                        70B, int8, with 131,072 tokens in its cache, on one GPU
    python -m bench.decode --cold                           time to the first token with and without compiled kernels

A model is one of the names in bench/models.py, a preset (both with random weights, made on the device) or a checkpoint,
in bf16 unless the row says otherwise.

    tokens/s        new tokens by the wall time of the whole `Engine.generate` call, prompt included, at temperature 0.8
                    and top_k 200, without speculation: the best of 3 calls after 2
    graph           the same from replays of the captured round alone
    limit           what the bytes allow: weights and cache that a token reads, by the read bandwidth
    bandwidth       the share of it that replays reach; it is that of `torch.sum` over 4 GiB, in the same run
    prompt tok/s    the tokens of the prompt by the time to the first new one

For attention alone see bench.decode_attention. Each model has a process of its own, so that what goes wrong there is
one cell. The last line printed is JSON.
"""

import argparse
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from pathlib import Path

import torch

from bench.attention import count, matrix_rate
from bench.decode_attention import read_bandwidth
from bench.models import (
    MODELS,
    SAMPLING,
    Ids,
    decoder_of,
    fill,
    in_process,
    known_model,
    printed_at_the_end,
    random_ids,
    replay_seconds,
    synchronize,
    wall_time,
)
from config import pick_device
from data import UserError, exit_cleanly
from decoding import KV, Cache, Decoder, whole_chunks
from engine import Engine
from model import ModelConfig

# tokens/s of others on one H200, measured so on 2026-11-29: prompt of 128, 200 new tokens, batch 1, random weights.
PEERS = {
    ("124m", None): "gpt-fast 1,622",
    ("1b", None): "gpt-fast 669, transformers static 397, dynamic 86",
    ("8b", None): "gpt-fast 190",
    ("8b", "int8"): "gpt-fast 195",
}
PROMPT, NEW = 128, 200
WARM_UP, CALLS, REPLAYS = 2, 3, 100
CHUNK = 4096  # of the prompt of the 70B model, whose prefill is timed at both ends
NAIVE_LIMIT = 8192  # tokens up to which prefill is also timed with the T x T matrix


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: str  # name, preset or checkpoint
    quant: str | None = None
    prompt: int = PROMPT
    batch: int = 1
    context: int = 0  # tokens in the cache already, keys and values of random numbers; a prompt is not read then
    prefill: bool = False  # time the reading of the prompt alone
    kv: str = "auto"
    new: int = NEW

    def __str__(self):
        name = self.model if self.model in MODELS else Path(self.model).stem
        words = [name] + [self.quant] * (self.quant is not None)
        words += [f"B{self.batch}"] if self.batch > 1 else []
        words += [f"prefill {self.prompt}"] if self.prefill else [f"prompt {self.prompt}"] * (self.prompt != PROMPT)
        words += [f"context {self.context}"] if self.context else []
        words += [f"{self.kv} cache"] if self.kv != "auto" else []
        return " ".join(words)


DEFAULT = [  # what matters most comes first, for a run that has to be stopped
    Case("1b"),
    Case("1b", context=32768),
    Case("8b"),
    Case("8b", prompt=8192, prefill=True),
    Case("8b", prompt=32768, prefill=True),
    Case("8b", "int8"),
    Case("124m"),
    Case("8b", "int4"),
]


@dataclass(frozen=True)
class Machine:
    """What a row is compared with."""

    device: str
    read_bandwidth: float | None = None  # bytes a second; None: not measured (CPU)
    matrix_tflops: float | None = None


def measure_generate(decoder: Decoder, case: Case, machine: Machine) -> dict:
    """The measures of one row by name."""
    config, device = decoder.config, decoder.device
    engine = Engine(decoder, Ids(config.vocab_size), kv=case.kv, speculate=0)
    length = min(case.context, config.block_size - case.new) if case.context else case.prompt
    samples = case.batch if case.context else 1  # the rows share a context
    prompts = random_ids(config, case.batch // samples, length)
    if case.context:
        fill(engine, prompts[0], case.batch, case.new)
    first_call, best, report = None, None, None
    for i in range(WARM_UP + CALLS):
        seconds = wall_time(
            lambda: engine.complete(prompts, SAMPLING, case.new, num_samples=samples, reuse=bool(case.context)), device
        )
        first_call = first_call or engine.report.time_to_first_token_s
        if i >= WARM_UP and (best is None or seconds < best):
            best, report = seconds, engine.report
    assert report.new_tokens == case.batch * case.new
    replay = replay_seconds(engine.rounds, prompts, samples, min(REPLAYS, case.new), bool(case.context))
    read = report.weight_bytes + report.kv_bytes
    return dict(
        tokens_per_s=report.new_tokens / best,
        decode_tokens_per_s=report.decode_tokens_per_s,
        replay_us=replay and replay * 1e6,
        replay_tokens_per_s=replay and case.batch / replay,
        first_token_ms=report.time_to_first_token_s * 1e3,
        first_call_ms=first_call * 1e3,
        prompt_tokens_per_s=None if case.context else case.batch * length / report.time_to_first_token_s,
        weight_bytes=report.weight_bytes,
        kv_bytes=report.kv_bytes,
        limit_tokens_per_s=machine.read_bandwidth and case.batch * machine.read_bandwidth / read,
        of_bandwidth=machine.read_bandwidth and replay and read / replay / machine.read_bandwidth,
        kv_cache_bytes=report.kv_cache_bytes,
        peak_bytes=report.peak_memory_bytes,
        peers=PEERS.get((case.model, case.quant), "") if case == Case(case.model, case.quant) else "",
    )


def prefill_flops(config: ModelConfig, tokens: int) -> int:
    """Operations of `Decoder.prefill`, which leaves the last layer when that has its keys and values. Attention counts
    its causal half."""
    qkv = config.n_embd * config.head_dim * (config.n_head + 2 * config.n_kv_head)
    layer = qkv + config.n_embd * config.head_dim * config.n_head + 3 * config.n_embd * config.d_ff
    attention = 2 * config.n_head * config.head_dim * tokens**2
    return 2 * tokens * ((config.n_layer - 1) * layer + qkv) + (config.n_layer - 1) * attention


def measure_prefill(decoder: Decoder, case: Case, machine: Machine) -> dict:
    """Seconds to read a prompt, with our attention, with torch's and with the textbook's."""
    cache = decoder.cache(1, whole_chunks(case.prompt), case.kv)
    prompt = random_ids(decoder.config, 1, case.prompt)[0]
    seconds = {}
    chosen = decoder.attention
    for backend in ("ours", "torch", "naive"):
        if backend == "naive" and case.prompt > NAIVE_LIMIT:
            continue
        decoder.attention = chosen if backend == "ours" else backend
        calls = 1 + (CALLS if backend == "ours" else 1)
        try:
            times = [wall_time(lambda: decoder.prefill(prompt, cache, 0), decoder.device) for _ in range(calls)]
            seconds[backend] = min(times[1:])
        except torch.OutOfMemoryError:
            seconds[backend] = None
    decoder.attention = chosen
    rate = prefill_flops(decoder.config, case.prompt) / seconds["ours"] / 1e12
    return dict(
        seconds=seconds,
        prefill_tokens_per_s=case.prompt / seconds["ours"],
        tflops=rate,
        of_matrix_rate=machine.matrix_tflops and rate / machine.matrix_tflops,
    )


def measure_group(cases: list[Case], machine: Machine) -> list[dict]:
    """Rows that share a decoder. What goes wrong in a row is its `error`; each is printed when it is there."""
    device = torch.device(machine.device)
    rows, decoder = [], None
    for case in cases:
        try:
            decoder = decoder or decoder_of(case.model, case.quant, device)
            result = (measure_prefill if case.prefill else measure_generate)(decoder, case, machine)
        except Exception as error:  # whatever it is, the other rows are still wanted
            traceback.print_exc()
            result = dict(error=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
        rows.append(asdict(case) | dict(case=str(case)) | result)
        print(line_of(rows[-1]), flush=True)
    return rows


HEAD = ("model", "tokens/s", "graph", "limit", "bandwidth", "MB a token", "first token ms", "prompt tok/s", "peak GB")


def line_of(row: dict) -> str:
    """A row of the table in Markdown."""
    if "error" in row:
        return f"| {row['case']} | {row['error']} |"
    if row["prefill"]:
        share = f", {row['of_matrix_rate']:.0%} of the matrix rate" if row["of_matrix_rate"] else ""
        times = "; ".join(f"{n} {f'{s * 1e3:,.0f} ms' if s else 'out of memory'}" for n, s in row["seconds"].items())
        return (
            f"| {row['case']} | {row['prefill_tokens_per_s']:,.0f} tok/s, {row['tflops']:.0f} TFLOP/s{share}: {times} |"
        )

    def number(value, form):
        return format(value, form) if value is not None else "-"

    cells = (
        row["case"],
        number(row["tokens_per_s"], ",.0f"),
        number(row["replay_tokens_per_s"], ",.0f"),
        number(row["limit_tokens_per_s"], ",.0f"),
        number(row["of_bandwidth"], ".0%"),
        f"{(row['weight_bytes'] + row['kv_bytes']) / row['batch'] / 1e6:,.0f}",
        f"{row['first_token_ms']:.1f} (first call {row['first_call_ms']:,.0f})",
        number(row["prompt_tokens_per_s"], ",.0f"),
        number(row["peak_bytes"] and row["peak_bytes"] / 1e9, ".1f"),
        row["peers"],
    )
    return "| " + " | ".join(cells) + " |"


def table(cases: list[Case], machine: Machine) -> Iterator[list[dict]]:
    """Measure and print the rows, each model and quantisation in a process of its own if there is a GPU; gives the
    rows of each."""
    print(
        "| " + " | ".join((*HEAD, "others, measured 2026-11-29")) + " |\n" + "|---" * (len(HEAD) + 1) + "|", flush=True
    )
    for _, group in groupby(cases, key=lambda case: (case.model, case.quant)):
        group = list(group)
        if machine.device == "cpu":
            yield measure_group(group, machine)
            continue
        try:
            yield in_process(measure_group, group, machine)
        except RuntimeError as error:  # the process died: BrokenProcessPool
            print(f"| {', '.join(map(str, group))} | the process died: {error} |", flush=True)
            yield [asdict(case) | dict(case=str(case), error=f"{type(error).__name__}: {error}") for case in group]


def seventy(machine: Machine, model: str = "70b", quant: str | None = "int8", new: int = 32) -> dict:
    """A model whose cache at full context fills what its weights leave of the GPU: does it fit, and how fast is it?"""
    device = torch.device(machine.device)
    start = time.perf_counter()
    decoder = decoder_of(model, quant, device)
    synchronize(device)
    config, length = decoder.config, decoder.config.block_size - new
    row = dict(model=model, quant=quant, built_s=time.perf_counter() - start, weight_bytes=decoder.weight_bytes())
    print(
        f"{model} {quant}: {row['weight_bytes'] / 1e9:.1f} GB of weights read a token, made in {row['built_s']:.1f} s"
    )
    row |= refused_with_full_heads(config, device, decoder.dtype)
    engine = Engine(decoder, Ids(config.vocab_size), speculate=0)
    prompt = random_ids(config, 1, length)[0]
    fill(engine, prompt, 1, new)
    row["kv_cache_bytes"] = engine.rounds.cache.nbytes
    print(f"cache of {config.block_size:,} tokens: {row['kv_cache_bytes']:,} bytes", flush=True)
    for _ in range(2):
        engine.complete([prompt], SAMPLING, new, reuse=True)
    report, replay = engine.report, replay_seconds(engine.rounds, [prompt], 1, new, reuse=True)
    row |= dict(tokens_per_s=report.decode_tokens_per_s, peak_bytes=report.peak_memory_bytes)
    row |= dict(replay_tokens_per_s=replay and 1 / replay, kv_bytes=report.kv_bytes)
    limit = machine.read_bandwidth and machine.read_bandwidth / (report.weight_bytes + report.kv_bytes)
    row |= dict(limit_tokens_per_s=limit, of_limit=limit and report.decode_tokens_per_s / limit)
    against = (
        f" of the {limit:.1f} that the bytes allow ({row['of_limit']:.0%}); graph alone {1 / replay:.1f}"
        if replay
        else ""
    )
    memory = f"; peak memory {report.peak_memory_bytes / 1e9:.1f} GB" if report.peak_memory_bytes else ""
    print(f"decoding with the cache full: {report.decode_tokens_per_s:.1f} tokens/s{against}{memory}", flush=True)
    row |= prefill_ends(engine, prompt)
    return row


def refused_with_full_heads(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict:
    """What happens with a key/value head to each query head."""
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    try:
        Cache(replace(config, n_kv_head=config.n_head), 1, config.block_size, device, dtype)
        refused = None
    except UserError as error:
        refused = str(error)
    after = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    print(f"MHA in its place: {refused or 'fits too'} ({after - before} bytes were allocated)", flush=True)
    return dict(mha_refused=refused, mha_allocated=after - before)


def prefill_ends(engine: Engine, prompt: list[int]) -> dict:
    """Seconds of the first and of the last chunk of a prompt, and of the whole: between the two it grows evenly."""
    decoder, cache, device = engine.decoder, engine.rounds.cache, engine.decoder.device
    size = min(CHUNK, len(prompt))

    def seconds(end):
        return min(wall_time(lambda: decoder.prefill(prompt[:end], cache, 0, end - size), device) for _ in range(2))

    first, last = seconds(size), seconds(len(prompt) // size * size)
    whole = len(prompt) / size * (first + last) / 2
    print(
        f"prefill: first {size} tokens {first:.2f} s, last {last:.2f} s; the whole prompt about {whole:.0f} s",
        flush=True,
    )
    return dict(prefill_first_s=first, prefill_last_s=last, prefill_whole_s=whole)


def first_token_seconds(model: str, device: str) -> float:
    """From packed weights to the first token of a first call: kernels, graph, prompt."""
    decoder = decoder_of(model, None, torch.device(device))
    prompts, tokenizer = random_ids(decoder.config, 1, PROMPT), Ids(decoder.config.vocab_size)

    def call():
        Engine(decoder, tokenizer, speculate=0).complete(prompts, SAMPLING, 1)

    return wall_time(call, decoder.device)


def cold(model: str, device: str) -> dict:
    """`first_token_seconds` in a fresh process, with Triton's cache of compiled kernels empty, then with it filled."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # the processes inherit it
        seconds = [in_process(first_token_seconds, model, device) for _ in range(2)]
        del os.environ["TRITON_CACHE_DIR"]
    print(f"{model}, first call of a process: {seconds[0]:.1f} s with nothing compiled, {seconds[1]:.1f} s after that")
    return dict(model=model, cold_s=seconds[0], warm_s=seconds[1])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="default: the table of the README")
    parser.add_argument("--quant", nargs="+", choices=("none", "int8", "int4"), default=["none"])
    parser.add_argument("--prompt", nargs="+", type=count, default=[PROMPT], help="tokens, such as 2k")
    parser.add_argument("--batch", nargs="+", type=count, default=[1])
    parser.add_argument("--context", nargs="+", type=count, default=[0], help="tokens already in the cache")
    parser.add_argument("--kv", nargs="+", choices=KV, default=["auto"], help="of the cache (auto: bf16)")
    parser.add_argument("--new", type=count, default=NEW, help="new tokens (default: %(default)s)")
    parser.add_argument("--prefill", nargs="+", type=count, metavar="N", help="time the reading of N tokens alone")
    parser.add_argument("--seventy", action="store_true", help="the 70B shape alone, or --models, at full context")
    parser.add_argument("--cold", action="store_true", help="time to the first token of 1b, or --models, alone")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    args = parser.parse_args(argv)
    device = pick_device(args.device)
    models = [known_model(model) for model in args.models or ()]
    machine, name = Machine(str(device)), "CPU"
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
        machine = Machine(str(device), read_bandwidth(), None if args.seventy or args.cold else matrix_rate(5))
        torch.cuda.empty_cache()
        rate = f", bf16 matrix product {machine.matrix_tflops:.0f} TFLOP/s" if machine.matrix_tflops else ""
        print(f"{name}, torch {torch.__version__}: reads {machine.read_bandwidth / 1e12:.2f} TB/s{rate}", flush=True)
    summary = dict(device=name, read_bandwidth=machine.read_bandwidth, matrix_tflops=machine.matrix_tflops)
    with printed_at_the_end(summary):
        if args.seventy:
            summary["seventy"] = [seventy(machine, model) for model in models or ["70b"]]
        elif args.cold:
            summary["cold"] = [cold(model, str(device)) for model in models or ["1b"]]
        else:
            summary["rows"] = []
            for rows in table(cases_of(args, models) if models or args.prefill else DEFAULT, machine):
                summary["rows"] += rows


def cases_of(args, models: list[str]) -> list[Case]:
    """Every combination of the options, those that share a decoder beside one another."""
    quants = [None if quant == "none" else quant for quant in args.quant]
    lengths = args.prefill or args.prompt
    shapes = list(product(lengths, args.batch, args.context, args.kv))
    return [
        Case(model, quant, prompt, batch, context, bool(args.prefill), kv, args.new)
        for model, quant in product(models or ["8b"], quants)
        for prompt, batch, context, kv in shapes
    ]


if __name__ == "__main__":
    with exit_cleanly():
        main()
