"""Attention of one new token over a KV cache: our kernel, what torch ships, and the time the bytes alone would take.

    python -m bench.decode_attention            the table
    python -m bench.decode_attention --quick    two shapes
    python -m bench.decode_attention --sweep    time candidate plans for kernels/flash_decode_plan.py

Microseconds a call inside a CUDA graph, which is how a decoder runs them: no launch from the host is counted. A cache
that fits in the L2 would be read from there and not from memory, so the calls of a graph go round through caches that
together are four times as large. The byte limit is K and V (and scales) once, at the bandwidth of `torch.sum` over
4 GiB, measured in the same run. The last line printed is JSON.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
from dataclasses import astuple, dataclass, replace

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import flash_decode
from kernels.flash_decode import launch
from kernels.flash_decode_plan import TURNS, Chunks, Plan, plan_for, programs_that_fit

DTYPE = torch.bfloat16
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
LENGTHS = (2048, 8192, 32768, 131072)


@dataclass(frozen=True)
class Shape:
    n_head: int
    n_kv_head: int
    head_dim: int
    slots: int  # room in the cache
    length: int  # tokens in it
    int8: bool = False
    batch: int = 1
    tokens: int = 1

    def __str__(self):
        cache = f"{self.length}" if self.length == self.slots else f"{self.length} of {self.slots}"
        rows = f"B{self.batch} T{self.tokens} " if (self.batch, self.tokens) != (1, 1) else ""
        return f"{rows}{self.n_head}/{self.n_kv_head} D{self.head_dim} {'int8' if self.int8 else 'bf16'} {cache}"

    def bytes_read(self) -> int:
        """K and V of every cached token once, and their scales."""
        vector = self.head_dim + 4 if self.int8 else 2 * self.head_dim
        return 2 * self.batch * self.n_kv_head * self.length * vector


SHAPES = [Shape(h, kv, d, n, n) for h, kv, d in ((32, 8, 128), (32, 1, 128), (12, 4, 64)) for n in LENGTHS]
SHAPES += [Shape(32, 8, 128, n, n, int8=True) for n in LENGTHS]
SHAPES += [Shape(32, 8, 128, 131072, n) for n in (200, 8192)]  # what an almost empty cache costs
SHAPES += [Shape(32, 8, 128, 8192, 8192, tokens=5), Shape(32, 8, 128, 8192, 8192, batch=8)]
QUICK = [Shape(32, 8, 128, 8192, 8192), Shape(32, 1, 128, 131072, 131072)]
SWEEP = [Shape(32, 8, 128, n, n) for n in (1024, 8192, 32768, 131072)] + [Shape(32, 8, 128, 8192, 8192, tokens=5)]
SWEEP += [Shape(32, 1, 128, n, n) for n in (8192, 131072)] + [Shape(12, 4, 64, n, n) for n in (1024, 8192)]
SWEEP += [Shape(32, 8, 128, 131072, 131072, int8=True)]


class Inputs:
    """A query, and as many caches of a shape as exceed four times the L2 cache together."""

    def __init__(self, shape: Shape, copies: int | None = None):
        self.shape = shape
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self.copies = copies or max(2, math.ceil(4 * l2 / shape.bytes_read()))
        # Each copy begins where the used part of the one before it ends.
        size = (shape.batch, shape.n_kv_head, shape.slots + (self.copies - 1) * shape.length, shape.head_dim)
        options = dict(device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        self.scales = []
        if shape.int8:
            self.k, self.v = (torch.randint(-127, 128, size, dtype=torch.int8, **options) for _ in "kv")
            self.scales = [torch.rand(size[:3], **options) / 100 for _ in "kv"]
        else:
            self.k, self.v = (torch.randn(size, dtype=DTYPE, **options) for _ in "kv")
        self.q = torch.randn(shape.batch, shape.n_head, shape.tokens, shape.head_dim, dtype=DTYPE, **options)
        self.cache_len = torch.full((shape.batch,), shape.length, dtype=torch.int32, device="cuda")

    def calls(self, attend) -> list:
        """One call of `attend(q, k, v, cache_len, **scales)` for each copy of the cache."""

        def call(i):
            slots = slice(i * self.shape.length, i * self.shape.length + self.shape.slots)
            k, v, *scales = (x[:, :, slots] for x in (self.k, self.v, *self.scales))
            scales = dict(zip(("k_scale", "v_scale"), scales, strict=False))
            return lambda: attend(self.q, k, v, self.cache_len, **scales)

        return [call(i) for i in range(self.copies)]


def sdpa(name: str, shape: Shape):
    """torch's own attention over the part of the cache that is in use: it cannot be told a length on the device."""

    def attend(q, k, v, cache_len):
        k, v = k[:, :, : shape.length], v[:, :, : shape.length]
        with sdpa_kernel(PEERS[name]):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=shape.n_head != shape.n_kv_head)

    return attend


def microseconds(calls: list, rounds: int = 5, seconds: float = 0.02) -> float:
    """Median over rounds of the time of one call, all of them captured in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # compiles, and allocates what must exist before a capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay(times):
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / times / len(calls)

    replay(2)
    times = max(2, math.ceil(seconds / rounds * 1e6 / (replay(2) * len(calls))))
    return statistics.median(replay(times) for _ in range(rounds))


def read_bandwidth() -> float:
    """Bytes a second of `torch.sum` over 4 GiB, which only reads."""
    x = torch.zeros(2**30, device="cuda")
    return x.nbytes / (microseconds([x.sum], seconds=0.1) * 1e-6)


def decode_attention_table(shapes: list[Shape] = SHAPES, bandwidth: float | None = None) -> list[dict]:
    """One row for each shape: `shape`, `limit_us`, `ours_us`, `cudnn_us`, `fa2_us` (None where it cannot run) and
    `of_bandwidth`, the share of the read bandwidth that ours reaches."""
    bandwidth = bandwidth or read_bandwidth()
    rows = []
    for shape in shapes:
        inputs = Inputs(shape)
        row = dict(shape=str(shape), limit_us=shape.bytes_read() / bandwidth * 1e6)
        row["ours_us"] = microseconds(inputs.calls(flash_decode))
        for name in PEERS:
            row[f"{name}_us"] = None
            if not shape.int8 and shape.tokens == 1:
                try:
                    row[f"{name}_us"] = microseconds(inputs.calls(sdpa(name, shape)))
                except RuntimeError as error:
                    print(f"{name} cannot run {shape}: {str(error).splitlines()[0]}", file=sys.stderr)
        row["of_bandwidth"] = row["limit_us"] / row["ours_us"]
        rows.append(row)
        del inputs
        torch.cuda.empty_cache()
    return rows


def print_table(rows: list[dict]):
    print(f"{'heads, head_dim, cache':<34} {'bytes':>8} {'ours':>8} {'cudnn':>8} {'fa2':>8}   share of the bandwidth")
    for row in rows:
        times = (row["limit_us"], row["ours_us"], row["cudnn_us"], row["fa2_us"])
        cells = " ".join(f"{t:>8.1f}" if t is not None else f"{'-':>8}" for t in times)
        print(f"{row['shape']:<34} {cells}   {row['of_bandwidth']:>6.0%}")


def plans(shape: Shape) -> list[Plan]:
    """The plan that would be chosen, then the candidates of `--sweep`."""
    size = 1 if shape.int8 else 2
    device = torch.device("cuda", 0)
    chosen = plan_for(shape.n_kv_head, shape.head_dim, size, device)
    shared_memory = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    wide = max(128 // shape.head_dim, 1)  # keys of a tile, for tiles of one size in bytes
    tiles = [(32, 4, 3), (32, 4, 5), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 8, 2), (128, 8, 3)]
    found = []
    for keys_of_chunk in (64, 128, 256, 512, 1024, 2048):
        chunk, chunks = uniform(keys_of_chunk), math.ceil(shape.slots / keys_of_chunk)
        if keys_of_chunk > shape.slots or chunks > 512 or chunks * shape.n_kv_head > 8192:
            continue
        found.append(replace(chosen, chunks=chunk))
        for keys, warps, stages in tiles:
            keys *= wide
            if keys <= keys_of_chunk:
                programs = programs_that_fit(keys, stages, shape.head_dim, size, shared_memory)
                found += [Plan(chunk, keys, warps, stages, min(programs, 2))]
    found += [replace(chosen, programs=p) for p in (1, 2, 3, 4)]
    found += [replace(chosen, programs=p, registers=r) for p, r in ((3, 168), (4, 128))]
    return [chosen, *(plan for plan in dict.fromkeys(found) if plan != chosen)]


def uniform(keys: int) -> Chunks:
    """Chunks of one length wherever a text stands: none is as long as where they would double."""
    return Chunks(keys, (2**26,) * len(TURNS))


def compiled_kernel(shape: Shape, plan: Plan) -> tuple:
    """What distinguishes the kernels of two plans: the rest are arguments."""
    kernel = replace(plan, chunks=uniform(0), programs=0)
    runs = (plan.chunks.room(shape.slots, shape.tokens) - 1).bit_length()
    return shape.n_head // shape.n_kv_head * shape.tokens, shape.head_dim, shape.int8, kernel, runs


def compile_plan(job) -> str | None:
    """In a process of the pool, into Triton's cache, on a cache with one token; what went wrong, if anything."""
    shape, plan = job
    one = Inputs(replace(shape, length=shape.tokens), copies=1)
    try:
        one.calls(lambda *tensors, **scales: launch(*tensors, plan=plan, **scales))[0]()
        torch.cuda.synchronize()
    except (RuntimeError, triton.errors.TritonError) as error:  # most often: more shared memory than there is
        return f"{type(error).__name__}: {error}"
    return None


def sweep(shapes: list[Shape], bandwidth: float):
    """Time every candidate for every shape; prints the best eight of each and the plan in use, as the fields of Plan:
    its chunks, keys of a tile, warps, stages, programs a multiprocessor, registers of a thread."""
    jobs = {compiled_kernel(shape, plan): (shape, plan) for shape in shapes for plan in plans(shape)}
    with multiprocessing.get_context("spawn").Pool(max(1, min(14, (os.cpu_count() or 2) - 2))) as pool:
        failures = dict(zip(jobs, pool.map(compile_plan, jobs.values(), chunksize=1), strict=True))
    for shape in shapes:
        inputs = Inputs(shape)
        chosen, time_of = plans(shape)[0], {}
        for plan in plans(shape):
            failure = failures[compiled_kernel(shape, plan)]
            if failure is not None:
                print(f"cannot run {plan}: {failure.splitlines()[0]}")
                continue
            calls = inputs.calls(lambda *tensors, plan=plan, **scales: launch(*tensors, plan=plan, **scales))
            time_of[plan] = microseconds(calls, rounds=3, seconds=0.006)
        limit = shape.bytes_read() / bandwidth * 1e6
        print(f"\n{shape}: bytes {limit:.1f} us; {time_of[chosen]:.1f} us with the plan in use, {astuple(chosen)}")
        for plan in sorted(time_of, key=time_of.get)[:8]:
            print(f"  {time_of[plan]:7.1f} us  {limit / time_of[plan]:4.0%}  {astuple(plan)}", flush=True)
        del inputs
        torch.cuda.empty_cache()


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(prog="bench.decode_attention", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two shapes")
    parser.add_argument("--sweep", action="store_true", help="time candidate plans instead")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("bench.decode_attention measures a GPU, and there is none here")
    shapes = QUICK if options.quick else SWEEP if options.sweep else SHAPES
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: reads {bandwidth / 1e12:.2f} TB/s")
    if options.sweep:
        return sweep(shapes, bandwidth)
    print("microseconds a call, one new token unless T says otherwise")
    rows = decode_attention_table(shapes, bandwidth)
    print_table(rows)
    print(json.dumps(dict(device=torch.cuda.get_device_name(), read_bandwidth=bandwidth, rows=rows)))


if __name__ == "__main__":
    main()
