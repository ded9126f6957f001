"""Attention side by side: our Triton kernels, what torch ships (cuDNN, FlashAttention-2, FlexAttention), and naive.

    python -m bench.attention                       the table: speed, share of the matrix rate, memory
    python -m bench.attention --quick               two shapes, few rounds
    python -m bench.attention --context 32k --n_head 32     one shape of your own; naive runs out of memory
    python -m bench.attention --plot attention.png  speed and memory against the length of the sequence
    python -m bench.attention --sweep               time candidate tile sizes for kernels/tiles.py

Kernels are timed in interleaved rounds, each round all of them once, and reported as medians: a GPU's clock drifts by
10% within minutes, and a ratio within a round does not. FLOPs are 4 B H T^2 D forward and 2.5 times that backward,
halved under a causal mask. The last line printed is JSON.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, astuple, dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kernels import flash_attention

DTYPE = torch.bfloat16
PEERS = ("cudnn", "fa2", "flex")
# TFLOP/s on an H100 at T=8192 from the papers, (head_dim, causal) -> "forward/backward". FlashAttention-3 paper
# (Shah et al. 2024, figures 5 to 7) for versions 2 and 3; version 1 from the FlashAttention-2 abstract: 25 to 40% of
# an A100's 312.
PUBLISHED = {
    (64, True): {"FA1": "78-125 (A100)", "FA2": "295/-", "FA3": "460/-"},
    (64, False): {"FA1": "78-125 (A100)", "FA2": "322/287", "FA3": "496/472"},
    (128, True): {"FA1": "78-125 (A100)", "FA2": "333/-", "FA3": "602/-"},
    (128, False): {"FA1": "78-125 (A100)", "FA2": "370/318", "FA3": "646/559"},
}


@dataclass(frozen=True)
class Shape:
    batch: int
    n_head: int
    n_kv_head: int
    tokens: int
    head_dim: int
    causal: bool = True

    def __str__(self):
        heads = f"{self.n_head}/{self.n_kv_head}"
        return f"B{self.batch} H{heads} T{self.tokens} D{self.head_dim} {'causal' if self.causal else 'full'}"

    def flops(self, direction: str) -> float:
        forward = 4 * self.batch * self.n_head * self.tokens**2 * self.head_dim / (2 if self.causal else 1)
        return forward * {"forward": 1.0, "backward": 2.5}[direction]

    def tensors(self) -> list[torch.Tensor]:
        """q, k, v and an upstream gradient, in the memory order of a model: `[B, T, H, D]` seen as `[B, H, T, D]`."""
        generator = torch.Generator("cuda").manual_seed(0)
        heads = (self.n_head, self.n_kv_head, self.n_kv_head, self.n_head)
        made = [
            torch.randn(self.batch, self.tokens, h, self.head_dim, device="cuda", dtype=DTYPE, generator=generator)
            for h in heads
        ]
        return [x.transpose(1, 2).requires_grad_(i < 3) for i, x in enumerate(made)]


# 16k tokens a batch. The third is a small GPT with grouped heads.
SHAPES = [
    Shape(b, h, kv, t, d, causal)
    for b, h, kv, t, d in (
        (2, 16, 16, 8192, 128),
        (2, 32, 32, 8192, 64),
        (16, 12, 4, 1024, 64),
        (16, 16, 16, 1024, 128),
    )
    for causal in (True, False)
]


def attention_of(name: str, shape: Shape):
    """The implementation `name` as a function of q, k, v."""
    if name in ("triton", "naive"):
        return lambda q, k, v: flash_attention(q, k, v, causal=shape.causal, backend=name)
    if name == "flex":
        mask = None
        if shape.causal:
            mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, shape.tokens, shape.tokens, device="cuda")
        torch._dynamo.reset()  # its limit of recompilations counts all shapes of a run
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=shape.n_head != shape.n_kv_head)
    kernel = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}[name]

    def sdpa(q, k, v):
        with sdpa_kernel(kernel):
            gqa = shape.n_head != shape.n_kv_head
            return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=gqa)

    return sdpa


def time_once(call, repeats: int, host_seconds: float) -> float:
    """Milliseconds of one call. The GPU sleeps while the CPU queues the calls, so launch overhead is not counted."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(2e9 * min(0.05, 1.5 * repeats * host_seconds)))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def host_time(call) -> float:
    """Seconds that the CPU needs to queue one call, after warming up."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e7))
    began = time.perf_counter()
    for _ in range(5):
        call()
    took = (time.perf_counter() - began) / 5
    torch.cuda.synchronize()
    return took


def interleave(calls: dict, rounds: int, repeats: int = 5) -> dict[str, list[float]]:
    """Milliseconds of each call in each round; every round starts with another one."""
    host = {name: host_time(call) for name, call in calls.items()}
    times = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds if names else 0):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(time_once(calls[name], repeats, host[name]))
    return times


def measure(shape: Shape, names: tuple[str, ...], rounds: int) -> dict[str, dict]:
    """For each implementation: milliseconds of each round, forward and backward, host microseconds and peak memory.

    An implementation that cannot run the shape gets {"error": why}; later issues and benches reuse this function.
    """
    q, k, v, dout = shape.tensors()
    results, forward, backward = {}, {}, {}
    for name in names:
        try:
            call = attention_of(name, shape)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            for _ in range(2):  # the first compiles and may need scratch memory for that
                torch.cuda.reset_peak_memory_stats()
                out = call(q, k, v)
                torch.autograd.grad(out, (q, k, v), dout)
                out = None
            peak = torch.cuda.max_memory_allocated() - before
            out = call(q, k, v)
        except torch.cuda.OutOfMemoryError:
            results[name] = {"error": "out of memory"}
        except RuntimeError as error:  # SDPA: no such kernel for this shape or build
            results[name] = {"error": str(error).splitlines()[0][:120]}
        else:
            results[name] = {"peak_bytes": peak}
            forward[name] = lambda call=call: call(q, k, v)
            backward[name] = lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
            results[name]["host_us"] = {
                "forward": 1e6 * host_time(forward[name]),
                "backward": 1e6 * host_time(backward[name]),
            }
        out = None
    for direction, calls in (("forward", forward), ("backward", backward)):
        for name, times in interleave(calls, rounds).items():
            results[name][direction] = times
    return results


def in_own_process(function, *arguments):
    """Run where memory may run out, so that nothing of it stays behind."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def matrix_rate(rounds: int) -> float:
    """TFLOP/s of a bf16 product of 8192 x 8192 matrices on random numbers: the card's practical ceiling."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=DTYPE) for _ in range(2))
    times = interleave({"mm": lambda: a @ b}, rounds)["mm"]
    return 2 * 8192**3 / statistics.median(times) / 1e9


def tflops(shape: Shape, result: dict, direction: str) -> float:
    return shape.flops(direction) / statistics.median(result[direction]) / 1e9


def ratio(results: dict, other: str, direction: str) -> float | None:
    """How many times faster `triton` is than `other`: the median over rounds of the ratio within a round."""
    if "error" in results["triton"] or "error" in results.get(other, {"error": ""}):
        return None
    pairs = zip(results[other][direction], results["triton"][direction], strict=False)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def table(shapes: list[Shape], rounds: int, naive: bool) -> dict:
    """Measure and print; returns what the JSON line says."""
    rate = matrix_rate(rounds)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, matrix product {rate:.0f} TFLOP/s")
    print("TFLOP/s forward/backward, medians of", rounds, "interleaved rounds; x = times as fast as; peak MB of both\n")
    head = ("shape", "triton", "share", *PEERS, "naive", *(f"x {p}" for p in PEERS), "x naive", "MB", "naive MB")
    published = ("FA1", "FA2", "FA3")
    print("| " + " | ".join((*head, *(f"{p} (published)" for p in published))) + " |")
    print("|" + "---|" * (len(head) + len(published)))
    rows = []
    for shape in shapes:
        results = measure(shape, ("triton", *PEERS), rounds)
        torch.cuda.empty_cache()
        results["naive"] = in_own_process(measure, shape, ("naive",), 3)["naive"] if naive else {"error": "not run"}
        row = dict(shape=asdict(shape), results={})
        cells = {"shape": str(shape)}
        for name, result in results.items():
            if "error" in result:
                cells[name] = result["error"] if len(result["error"]) < 20 else "n/a"
                if cells[name] == "n/a":
                    print(f"{name} cannot run {shape}: {result['error']}", file=sys.stderr)
                row["results"][name] = result
                continue
            speed = {d: tflops(shape, result, d) for d in ("forward", "backward")}
            cells[name] = "/".join(f"{s:.0f}" for s in speed.values())
            row["results"][name] = dict(tflops=speed, peak_bytes=result["peak_bytes"], host_us=result["host_us"])
        if "error" not in results["triton"]:
            ours = row["results"]["triton"]["tflops"]
            cells["share"] = "/".join(f"{100 * s / rate:.0f}%" for s in ours.values())
        row["ratios"] = {}
        for other in (*PEERS, "naive"):
            both = {d: ratio(results, other, d) for d in ("forward", "backward")}
            row["ratios"][other] = both
            if both["forward"] is not None:
                cells[f"x {other}"] = "/".join(f"{r:.2f}" for r in both.values())
        for name, column in (("triton", "MB"), ("naive", "naive MB")):
            if "error" not in results[name]:
                cells[column] = f"{results[name]['peak_bytes'] / 2**20:.0f}"
        if shape.tokens == 8192:
            cells |= {f"{p} (published)": x for p, x in PUBLISHED.get((shape.head_dim, shape.causal), {}).items()}
        columns = (*head, *(f"{p} (published)" for p in published))
        print("| " + " | ".join(cells.get(column, "-") for column in columns) + " |", flush=True)
        rows.append(row)
    return dict(device=torch.cuda.get_device_name(), matrix_tflops=rate, rounds=rounds, rows=rows)


def lengths_table(lengths: list[int], rounds: int) -> dict[str, list]:
    """For each implementation (tokens, TFLOP/s of both passes, peak GB), as far as it goes; 16k tokens a batch."""
    names = ("triton", *PEERS, "naive")
    points = {name: [] for name in names}
    for tokens in lengths:
        shape = Shape(max(1, 16_384 // tokens), 16, 16, tokens, 128)
        results = measure(shape, names[:-1], rounds)
        torch.cuda.empty_cache()
        results |= in_own_process(measure, shape, ("naive",), 3)
        for name in names:
            if "error" not in results[name]:
                seconds = sum(statistics.median(results[name][d]) for d in ("forward", "backward")) / 1e3
                speed = (shape.flops("forward") + shape.flops("backward")) / seconds / 1e12
                points[name].append((tokens, speed, results[name]["peak_bytes"] / 2**30))
        print(tokens, {name: points[name][-1] for name in names if points[name]}, flush=True)
    return points


def draw(points: dict[str, list], path: str, device: str) -> None:
    """Speed and memory against the length of the sequence; PNG."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(11, 4))
    for name, measured in points.items():
        if measured:
            length, flops, gigabytes = zip(*measured, strict=True)
            speed.plot(length, flops, marker="o", label=name)
            memory.plot(length, gigabytes, marker="o", label=name)
    lengths = sorted({tokens for measured in points.values() for tokens, _, _ in measured})
    for axes, title in ((speed, "TFLOP/s, forward and backward"), (memory, "peak memory of both, GB")):
        axes.set(xscale="log", xlabel="tokens in a sequence", title=title, xticks=lengths, xticklabels=lengths)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    memory.set_yscale("log")
    speed.legend()
    figure.suptitle(f"causal attention, 16 heads of 128, bf16, {device}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# The sweep: every candidate tile is compiled by a pool of processes into Triton's cache, timed once, and the best are
# timed again in interleaved rounds.


def candidates(phase: str) -> list:
    """Tiles worth trying for a phase."""
    from kernels.tiles import Tile

    sides = {
        "forward": [(64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 32, 8), (128, 64, 8), (128, 128, 8), (128, 64, 4),
                    (256, 64, 8)],
        "dkdv": [(32, 64, 4), (64, 64, 4), (64, 64, 8), (32, 128, 8), (64, 128, 8), (128, 128, 8), (64, 128, 4)],
        "dq": [(64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 32, 8), (128, 64, 8), (128, 128, 8), (64, 64, 8)],
    }[phase]  # fmt: skip
    limits = [None, 128] if phase != "dkdv" else [None]
    return [
        Tile(*side, stages, tma, registers)
        for side in sides
        for stages in (1, 2, 3)
        for tma in (True, False)
        for registers in (limits if side[2] == 8 else [None])
        if tma or registers is None
    ]


def phase_runner(phase: str, shape: Shape):
    """A function of a tile that launches one kernel on this shape and returns its results."""
    from kernels.flash_attention_backward import key_gradients, prepare, query_gradients
    from kernels.flash_attention_forward import forward

    q, k, v, dout = (x.detach() for x in shape.tensors())
    options = (None, shape.causal, None, 1 / math.sqrt(shape.head_dim))
    if phase == "forward":
        return lambda tile: forward(q, k, v, *options, tile)
    out, lse = forward(q, k, v, *options)
    prepared = prepare(out, dout, lse)
    launch = {"dkdv": key_gradients, "dq": query_gradients}[phase]
    return lambda tile: launch(q, k, v, dout, prepared, *options, tile)


def why_not(job) -> str | None:
    """In a process of the pool: compile and launch on a short sequence; None if that works, else the error."""
    import triton

    phase, head_dim, causal, tile = job
    try:
        phase_runner(phase, Shape(1, 1, 1, 256, head_dim, causal))(tile)
        torch.cuda.synchronize()
    except (RuntimeError, triton.errors.TritonError) as error:  # does not fit this chip, or the compiler gives up
        return f"{type(error).__name__}: {str(error)[:60]}"
    return None


def sweep(head_dims: list[int], phases: list[str], rounds: int) -> dict:
    """Time all candidates; print the best of each phase and head_dim by their mean slowdown against the best."""
    from kernels.tiles import tile_for

    began = time.perf_counter()
    jobs = [(p, d, c, t) for p in phases for d in head_dims for c in (True, False) for t in candidates(p)]
    with multiprocessing.get_context("spawn").Pool(max(1, min(14, multiprocessing.cpu_count() - 1))) as pool:
        reasons = dict(zip(jobs, pool.map(why_not, jobs, chunksize=4), strict=True))
    good = {job for job, reason in reasons.items() if reason is None}
    print(f"{len(good)} of {len(jobs)} candidates compiled in {time.perf_counter() - began:.0f} s", flush=True)
    for reason, times in Counter(r for r in reasons.values() if r).most_common(5):
        print(f"  {times} times {reason}")
    best = {}
    for phase in phases:
        for head_dim in head_dims:
            default = tile_for(phase, head_dim, DTYPE, torch.device("cuda", 0))
            tiles = [t for t in candidates(phase) if all((phase, head_dim, c, t) in good for c in (True, False))]
            best[f"{phase} D{head_dim}"] = sweep_kernel(phase, head_dim, default, tiles, rounds)
    return dict(sweep=best, seconds=time.perf_counter() - began)


def sweep_kernel(phase: str, head_dim: int, default, tiles: list, rounds: int) -> dict:
    """The best tile of one kernel over the shapes with this head_dim, and how much it gains over the table's."""
    shapes = [s for s in SHAPES if s.head_dim == head_dim]
    runners = {shape: phase_runner(phase, shape) for shape in shapes}
    tiles = list(dict.fromkeys([default, *tiles]))
    screened = {}
    for shape, launch in runners.items():
        for tile in tiles:
            launch(tile)
            screened[shape, tile] = time_once(lambda tile=tile, launch=launch: launch(tile), 3, 3e-4)

    def slowdown(tile, times, among):
        """Geometric mean over the shapes of this tile's time over the fastest tile's."""
        return statistics.geometric_mean(times[s, tile] / min(times[s, t] for t in among) for s in shapes)

    finalists = [default, *sorted(tiles, key=lambda tile: slowdown(tile, screened, tiles))[:8]]
    finalists += [min(tiles, key=lambda t, s=s: screened[s, t]) for s in shapes]  # is one shape served badly?
    finalists = list(dict.fromkeys(finalists))
    final = {}
    for shape, launch in runners.items():
        wanted = launch(default)
        for tile in finalists:
            pairs = zip(*((x,) if torch.is_tensor(x) else x for x in (launch(tile), wanted)), strict=True)
            wrong = max((a.float() - b.float()).abs().max().item() for a, b in pairs)
            if not wrong < 0.1:
                print(f"WRONG: {phase} {shape} {astuple(tile)} differs by {wrong:.2e}")
        times = interleave({t: lambda t=t, launch=launch: launch(t) for t in finalists}, rounds)
        final |= {(shape, t): statistics.median(times[t]) for t in finalists}

    print(f"\n{phase} D{head_dim}: mean slowdown, tile, TFLOP/s at " + "; ".join(map(str, shapes)))
    ranked = sorted(finalists, key=lambda tile: slowdown(tile, final, finalists))
    # Matrix products of size T x T x D: two in the forward pass, four in the kernel for dk and dv, three for dq.
    work = {"forward": 1.0, "dkdv": 2.0, "dq": 1.5}[phase]
    for tile in ranked:
        speeds = " ".join(f"{work * s.flops('forward') / final[s, tile] / 1e9:.0f}" for s in shapes)
        mark = " <- the table's" if tile == default else ""
        print(f"{slowdown(tile, final, finalists):.3f} {astuple(tile)}: {speeds}{mark}", flush=True)
    gain = slowdown(default, final, finalists) / slowdown(ranked[0], final, finalists) - 1
    return dict(tile=astuple(ranked[0]), gain_over_table=gain)


def count(text: str) -> int:
    """An int, with k for 1024."""
    return int(text[:-1]) * 1024 if text.lower().endswith("k") else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two shapes and 10 rounds, no naive")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--context", type=count, help="tokens of one shape of your own, such as 32k")
    parser.add_argument("--n_head", type=int, default=16)
    parser.add_argument("--n_kv_head", type=int, help="default: n_head")
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--full", action="store_true", help="with --context: no causal mask")
    parser.add_argument("--plot", metavar="PNG", help="draw speed and memory against the length of the sequence")
    parser.add_argument("--sweep", action="store_true", help="time candidate tiles for kernels/tiles.py")
    parser.add_argument("--phases", nargs="+", default=["forward", "dkdv", "dq"], help="with --sweep")
    parser.add_argument("--head_dims", nargs="+", type=int, default=[64, 128], help="with --sweep")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.attention needs a CUDA GPU; torch sees none")
    torch._functorch.config.donated_buffer = False  # FlexAttention's backward is timed on one kept graph

    if arguments.sweep:
        summary = sweep(arguments.head_dims, arguments.phases, max(10, arguments.rounds))
    elif arguments.plot:
        points = lengths_table([1024 * 2**i for i in range(6)], arguments.rounds)
        draw(points, arguments.plot, torch.cuda.get_device_name())
        summary = dict(plot=arguments.plot, points=points)
    elif arguments.context:
        kv = arguments.n_kv_head or arguments.n_head
        shape = Shape(arguments.batch, arguments.n_head, kv, arguments.context, arguments.head_dim, not arguments.full)
        summary = table([shape], arguments.rounds, naive=True)
    elif arguments.quick:
        summary = table(SHAPES[:1] + SHAPES[4:5], 10, naive=False)
    else:
        summary = table(SHAPES, arguments.rounds, naive=True)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
