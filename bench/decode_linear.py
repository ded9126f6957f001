"""A few rows times a weight matrix: our kernels in bf16, int8 and int4 beside torch's F.linear, in bytes a second.

    python -m bench.decode_linear                       the table
    python -m bench.decode_linear --rows 1 8 16         for these numbers of rows
    python -m bench.decode_linear --sweep --bits 8 4    time candidate tilings for kernels/quantized_linear.py
    python -m bench.decode_linear --sweep --bits 16     for ring_linear.py and decode_linear.py

Every call reads another copy of the weights, and the copies are four times the L2 cache, so nothing is read from it.
Calls are captured into one CUDA graph and replayed: the launch overhead is the GPU's, not the host's. GB/s counts the
weights with their scales. Beside it stands the bandwidth of a kernel that only reads. The last line printed is JSON.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
from dataclasses import astuple, dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels import quantized_linear, ring_linear
from kernels.decode_linear import TABLE, Tiling, class_of, decode_linear, launch
from kernels.quantize import CHUNK_COLUMNS, Weight, quantize

FORMATS = {16: None, 8: "int8", 4: "int4"}


@dataclass(frozen=True)
class Shape:
    """One of the matrices of a decoder: [N, K], and what its launch fuses."""

    name: str
    N: int
    K: int
    fusion: str  # "norm", "swiglu" (with norm) or "residual"


SHAPES = [
    Shape(f"{model} {name}", N, K, fusion)
    for model, C, kv, d_ff, vocab in (("124M", 768, 256, 2048, 50304), ("1B", 2048, 512, 8192, 128256),
                                      ("8B", 4096, 1024, 14336, 128256))
    for name, N, K, fusion in (
        ("qkv", C + 2 * kv, C, "norm"), ("o", C, C, "residual"), ("gate+up", 2 * d_ff, C, "swiglu"),
        ("down", C, d_ff, "residual"), ("head", vocab, C, "norm"),
    )
]  # fmt: skip


@triton.jit
def read_kernel(x, out, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * STEPS * BLOCK
    total = tl.zeros([BLOCK], tl.int32)
    for step in tl.range(STEPS):
        total += tl.load(x + first + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def read_bandwidth() -> float:
    """Bytes a second of a kernel that reads 2 GiB and writes next to nothing."""
    x = torch.zeros(2**29, dtype=torch.int32, device="cuda")
    best = 0.0
    for block, steps in itertools.product((4096, 8192), (2, 8)):
        programs = x.numel() // (block * steps)
        out = torch.empty(programs, dtype=torch.int32, device="cuda")
        call = lambda: read_kernel[(programs,)](x, out, STEPS=steps, BLOCK=block, num_warps=8)  # noqa: E731, B023
        best = max(best, x.numel() * 4 / seconds([call]))
    return best


def seconds(calls, replays: int = 7) -> float:
    """Seconds of one call: all of them in a CUDA graph, the median of some replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times[1:])


def random_weights(shape: Shape, bits: int) -> list[Weight]:
    """Copies of a matrix that together are four times the L2 cache."""
    matrix = torch.randn(shape.N, shape.K, device="cuda", dtype=torch.bfloat16) * shape.K**-0.5
    first = quantize(matrix, FORMATS[bits])
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    copies = max(2, -(-4 * l2 // first.nbytes))
    scales = [None if first.scales is None else first.scales.clone() for _ in range(copies)]
    return [replace(first, values=first.values.clone(), scales=s) for s in scales]


def arguments(shape: Shape, rows: int) -> tuple[torch.Tensor, dict]:
    """x and the options of a launch."""
    x = torch.randn(rows, shape.K, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(shape.K, device="cuda", dtype=torch.bfloat16) if shape.fusion != "residual" else None
    width = shape.N // 2 if shape.fusion == "swiglu" else shape.N
    out = torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16)
    residual = out if shape.fusion == "residual" else None
    return x, dict(norm=norm, eps=1e-5, bias=None, residual=residual, swiglu=shape.fusion == "swiglu", out=out)


def table(rows_list: list[int]) -> dict:
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, reading alone {bandwidth / 1e9:.0f} GB/s")
    print("microseconds, GB/s of weights and share of reading alone; torch: F.linear in bf16, nothing fused\n")
    print("| matrix | N x K | rows | torch us | " + " | ".join(f"{b} bits us | GB/s | share" for b in FORMATS) + " |")
    print("|" + "---|" * (4 + 3 * len(FORMATS)))
    results = []
    for shape, rows in itertools.product(SHAPES, rows_list):
        cells, row = [], dict(shape=astuple(shape), rows=rows, us={}, share={})
        for bits in FORMATS:
            weights = random_weights(shape, bits)
            x, options = arguments(shape, rows)
            if bits == 16:
                row["torch_us"] = 1e6 * seconds([lambda w=w: F.linear(x, w.values) for w in weights])  # noqa: B023
            took = seconds([lambda w=w: decode_linear(x, w, **options) for w in weights])  # noqa: B023
            rate = weights[0].nbytes / took
            row["us"][bits], row["share"][bits] = 1e6 * took, rate / bandwidth
            cells += [f"{1e6 * took:.2f}", f"{rate / 1e9:.0f}", f"{100 * rate / bandwidth:.0f}%"]
            del weights
        head = (shape.name, f"{shape.N} x {shape.K}", str(rows), f"{row['torch_us']:.2f}")
        print("| " + " | ".join((*head, *cells)) + " |", flush=True)
        results.append(row)
    return dict(device=torch.cuda.get_device_name(), read_gb_s=bandwidth / 1e9, rows=results)


def entry_of(bits: int, shape: Shape) -> tuple:
    """Which kernel's table a matrix is looked up in, the class there, and the tiling."""
    N, K = shape.N, shape.K
    if bits != 16:
        index = quantized_linear.class_of(N, K)
        return "quantized_linear", index, quantized_linear.TABLE[bits][index]
    if ring_linear.fits(torch.empty(N, K, dtype=torch.bfloat16, device="meta"), None):
        return "ring_linear", ring_linear.class_of(N, K), ring_linear.tiling_for(N, K)
    return "decode_linear", class_of(N), TABLE[class_of(N)]


def candidates(bits: int, shape: Shape) -> list:
    """Tilings worth trying for a matrix, of each of the kernels that could take it."""
    if bits != 16:
        return quantized_candidates(bits, shape)
    # All of the kernel that takes it, and a few of the other, to see on which side of the line it belongs.
    if entry_of(bits, shape)[0] == "ring_linear":
        return ring_candidates(shape) + list(TABLE)
    return ring_candidates(shape)[:4] + pipeline_candidates()


def quantized_candidates(bits: int, shape: Shape) -> list[quantized_linear.Tiling]:
    """Those in use, and others of 4 to 16 warps: with more panels a program where there are rows enough for it."""
    numbers = [(1, 4, 8, 4), (1, 8, 4, 2), (1, 8, 8, 4), (2, 4, 4, 2), (2, 8, 4, 4), (2, 16, 2)]
    if shape.N > 4096:
        numbers += [(2, 4, 3, 3), (4, 2, 2, 2), (4, 4, 2, 2), (4, 8, 2, 2)]
    else:
        numbers += [(1, 4, 4, 4), (1, 8, 2, 2), (1, 16, 2, 2), (1, 16, 4, 4)]
    found = [*quantized_linear.TABLE[bits], *itertools.starmap(quantized_linear.Tiling, numbers)]
    return list(dict.fromkeys(found))


def ring_candidates(shape: Shape) -> list[ring_linear.Tiling]:
    """With all of K ahead as long as that leaves registers, and with a queue for a K that is not short."""
    ring = ring_linear.Tiling
    queues = [ring(4, 4, 1, 2), ring(2, 4, 1, 4), ring(2, 8, 1, 3), ring(2, 8, 1, 4, 1), ring(2, 8, 1, 4, 2)]
    queues += [ring(1, 8, 2, 4, 2), ring(1, 16, 1, 4, 2), ring(1, 8, 1, 8, 2), ring(4, 4, 1, 3), ring(4, 8, 1, 2)]
    whole = []
    for panels, slices, chunks in itertools.product((1, 2, 4), (4, 8, 16), (1, 2)):
        tiling = ring(panels, slices, chunks)
        words = 4 * panels * chunks * ring_linear.constants(tiling, 1, shape.K)["STEPS"]  # of W, in a lane's registers
        if words <= 96 and slices * chunks <= 16:
            whole.append(tiling)
    return (queues if shape.K >= 1024 else queues[:2]) + whole


def pipeline_candidates() -> list[Tiling]:
    """Between 4 and 32 KB of weights a step, 16 to 160 KB on their way in a program."""
    found = list(TABLE)
    for block_n, block_k, slices, warps, stages in itertools.product((16, 32, 64), (64, 128), (4, 8), (4, 8), (3, 5)):
        step = block_n * block_k * slices * 2  # bytes
        x_step = 8 * block_k * slices * 2  # of eight rows
        fits = 4096 <= step <= 32768 and 16384 <= step * (stages - 1) and (step + x_step) * stages <= 180_000
        if fits and slices >= warps:
            found.append(Tiling(block_n, block_k, slices, warps, stages))
    return list(dict.fromkeys(found))


def variant(bits: int, tiling, K: int):
    """What of K the compiled code depends on: whether steps divide it, or all of it."""
    if isinstance(tiling, ring_linear.Tiling):
        return tuple(ring_linear.constants(tiling, 1, K).items())
    width = tiling.block_k if isinstance(tiling, Tiling) else CHUNK_COLUMNS[bits]
    return K % (tiling.slices * width) == 0


def compile_tiling(bits: int, tiling, shape: Shape, rows: int) -> str | None:
    """Into Triton's cache, in a process of its own; why not, if it cannot be."""
    small = replace(shape, N=128)
    x, options = arguments(small, rows)
    matrix = torch.randn(128, shape.K, device="cuda", dtype=torch.bfloat16)
    try:
        launch(x, quantize(matrix, FORMATS[bits]), tiling=tiling, **options)
        torch.cuda.synchronize()
    except triton.errors.TritonError as error:  # too much shared memory
        return str(error).splitlines()[0]
    return None


def short(tiling) -> str:
    """A tiling as its numbers."""
    values = ",".join("-" if value is None else str(value) for value in astuple(tiling))
    return ("pipeline " if isinstance(tiling, Tiling) else "") + values


def sweep(rows: int, formats: list[int]) -> dict:
    """The best tilings of each matrix and format, and for each class of the tables the best on average."""
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, reading alone {bandwidth / 1e9:.0f} GB/s, {rows} rows")
    work = [(bits, tiling, shape) for bits in formats for shape in SHAPES for tiling in candidates(bits, shape)]
    jobs = {(bits, t, s.fusion, variant(bits, t, s.K)): (bits, t, s, rows) for bits, t, s in work}
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        failed = pool.starmap(compile_tiling, list(jobs.values()), chunksize=2)
    print(f"{len(jobs)} kernels compiled, {sum(f is not None for f in failed)} do not fit", flush=True)
    results = []
    for bits, shape in itertools.product(formats, SHAPES):
        weights = random_weights(shape, bits)
        x, options = arguments(shape, rows)
        timed = []
        for tiling in candidates(bits, shape):
            calls = [lambda w=w: launch(x, w, tiling=tiling, **options) for w in weights]  # noqa: B023
            try:
                timed.append((seconds(calls, 4), tiling))
            except triton.errors.TritonError:
                continue
        timed.sort(key=lambda pair: pair[0])
        line = "; ".join(
            f"{short(t)} {1e6 * s:.2f}us {100 * weights[0].nbytes / s / bandwidth:.0f}%" for s, t in timed[:4]
        )
        print(f"{bits:2d} {shape.name:12s} {line}", flush=True)
        results.append((bits, shape, dict((t, s) for s, t in timed)))
        del weights
    return dict(device=torch.cuda.get_device_name(), read_gb_s=bandwidth / 1e9, best=best_of_classes(results))


def best_of_classes(results: list) -> dict:
    """For each class of the tables the tilings that lose least to each matrix's own best, on average."""
    classes, best = {}, {}
    for bits, shape, times in results:
        classes.setdefault((bits, *entry_of(bits, shape)), []).append(times)
    for (bits, kernel, index, now), mine in classes.items():
        both = set.intersection(*(set(times) for times in mine))
        score = {t: statistics.geometric_mean(times[t] / min(times.values()) for times in mine) for t in both}
        ranked = sorted(score, key=score.get)[:4]
        line = "; ".join(f"{short(t)} {score[t]:.3f}" for t in ranked)
        line += f"; in the table {short(now)} {score.get(now, float('nan')):.3f}"
        print(f"{bits:2d} bits, {kernel}.py, class {index}: {line}")
        best[f"{bits}:{kernel}:{index}"] = [astuple(t) for t in ranked]
    return best


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.decode_linear", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="rows of x (default 1)")
    parser.add_argument("--sweep", action="store_true", help="time candidate tilings instead")
    parser.add_argument("--bits", type=int, nargs="+", choices=FORMATS, default=list(FORMATS), help="formats to sweep")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.decode_linear measures GPU kernels, and there is no GPU here")
    torch.manual_seed(0)
    print(json.dumps(sweep(options.rows[0], options.bits) if options.sweep else table(options.rows)))


if __name__ == "__main__":
    main()
