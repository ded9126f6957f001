"""Compile the kernels of decoding for GPUs that are not here, and read the machine code: see test_kernel_lint.py."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections import namedtuple

import pytest

triton = pytest.importorskip("triton")

from tests.test_kernel_lint import SHARED_MEMORY, read_machine_code  # noqa: E402

Job = namedtuple("Job", "capability kernel cache head_dim tiles slots window")
LONG, SHORT, SINGLE = 131072, 8192, 128  # a second kernel combines; the first one combines; nothing to combine
REGISTERS = 65_536  # of a multiprocessor
JOBS = (
    [Job(90, "split", cache, d, tiles, LONG, False) for cache in ("bf16", "i8") for d in (64, 128) for tiles in (1, 4)]
    + [Job(90, "split", cache, 128, 1, SHORT, True) for cache in ("bf16", "i8")]
    + [Job(90, "split", "bf16", 64, 1, SHORT, False), Job(90, "split", "bf16", 128, 2, SHORT, False)]
    + [Job(90, "split", "bf16", d, 1, SINGLE, False) for d in (64, 80, 128, 256)]
    + [Job(90, "split", "fp16", 128, 1, LONG, False), Job(90, "split", "fp32", 128, 1, SHORT, False)]
    + [Job(c, "split", cache, 128, 1, SHORT, False) for c in (80, 86) for cache in ("bf16", "i8")]
    + [Job(c, "combine", "bf16", 128, 1, LONG, False) for c in (80, 90)]
    + [Job(90, "rope", "bf16", 64, 1, SHORT, False), Job(90, "rope", "i8", 128, 1, SHORT, True)]
    + [Job(80, "rope", "i8", 64, 1, SHORT, False)]
)
# Bytes that each thread may keep in memory; outside this list, none. Sine and cosine of angles past 100,000 keep a
# table there, which smaller angles never touch. With the other one ptxas makes room for a fourth program.
SPILLS = {job: 32 for job in JOBS if job.kernel == "rope"}
SPILLS |= {Job(90, "split", "i8", 128, 1, SHORT, True): 16}


def compile_job(job):
    """Compile one kernel as its launcher would; what the machine code looks like, as a dict."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels.flash_decode import ROWS, plan_for_chip
    from kernels.flash_decode_kernels import combine_kernel, split_kernel
    from kernels.rope_cache import BLOCK_H, rope_cache_kernel

    element = "bf16" if job.cache == "i8" else job.cache
    size = {"i8": 1, "fp32": 4}.get(job.cache, 2)
    plan = plan_for_chip(job.slots, 8, job.head_dim, size, SHARED_MEMORY[job.capability])
    single = job.slots <= plan.chunks.near
    overlap = dict(OVERLAP=job.capability >= 90)
    kernel, constants, warps, stages = {
        "split": (
            split_kernel,
            dict(
                HEAD_DIM=job.head_dim,
                TILES=job.tiles,
                BLOCK_M=ROWS,
                BLOCK_N=plan.keys,
                BLOCK_B=1,
                BLOCK_R=4,
            )
            | dict(WINDOW=job.window, QUANTIZED=size == 1, SINGLE=single, FUSED=plan.fused and not single)
            | overlap,
            plan.warps,
            plan.stages,
        ),
        "combine": (
            combine_kernel,
            dict(HEAD_DIM=job.head_dim, WINDOW=job.window, RUN=32, LOG_RUNS=3, BLOCK_D=32, STAGES=16) | overlap,
            4,
            3,
        ),
        "rope": (rope_cache_kernel, dict(HEAD_DIM=job.head_dim, BLOCK_H=BLOCK_H) | overlap, BLOCK_H, 3),
    }[job.kernel]

    aligned = [["tt.divisibility", 16]]
    signature, values, attributes = {}, {}, {}

    def tensor(i, name, dtype, strides):
        signature[name] = ("*" + dtype,) + ("i32",) * strides
        attributes.update({(i, j): aligned for j in range(strides + 1)})

    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        elif name == "chunking":
            signature[name] = ("i32",) * 5
        elif name in ("k_scale", "v_scale") and size == 1:
            tensor(i, name, "fp32", 2)
        elif name in ("k_scale", "v_scale") or (name.endswith("norm_ptr") and not job.window):
            signature[name], values[(i,)] = "constexpr", None
        elif name in ("k", "v", "k_cache", "v_cache"):
            tensor(i, name, job.cache, 3)
        elif name in ("q", "out"):
            tensor(i, name, element, 3)
        elif name == "qkv":
            tensor(i, name, element, 2)
        elif name.endswith("_ptr"):
            dtype = "i32" if name in ("cache_len_ptr", "counter_ptr", "positions_ptr") else "fp32"
            signature[name], attributes[(i,)] = "*" + dtype, aligned
        else:
            signature[name] = "fp32" if name in ("scale_log2", "eps", "attention_factor") else "i32"

    source = ASTSource(kernel, signature, values, attributes)
    options = dict(num_warps=warps, num_stages=stages)
    compiled = triton.compile(source, target=GPUTarget("cuda", job.capability, 32), options=options)
    seen = read_machine_code(compiled.asm["cubin"])
    seen["prefetches"] = compiled.asm["ptx"].count("cp.async.c")
    return dict(shared=compiled.metadata.shared, programs=plan.programs, warps=warps, **seen)


def main():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(json.dumps(pool.map(compile_job, JOBS, chunksize=1)))


@pytest.fixture(scope="module")
def compiled():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.test_decode_lint"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(JOBS, json.loads(done.stdout), strict=True))


@pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="the machine code of Triton 3.6 is described here"
)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(map(str, job)))
def test_machine_code(job, compiled):
    seen = compiled[job]
    assert seen["spilled"] <= SPILLS.get(job, 0), seen
    if job.kernel == "split":
        programs = seen["programs"] if job.tiles == 1 else min(seen["programs"], 2)
        assert seen["shared"] * programs <= SHARED_MEMORY[job.capability], seen
        if job.cache == "fp32":  # exact products on the plain units
            assert seen["mma"] == 0, seen
        else:
            assert seen["mma"] > 0 and seen["prefetches"] > 0, seen
        if job.tiles == 1 and job.cache == "bf16" and job.head_dim <= 128:  # plain decoding: as many as memory wants
            assert seen["registers"] * 32 * seen["warps"] * min(seen["programs"], 2) <= REGISTERS, seen
    else:
        assert seen["registers"] <= 128 and seen["shared"] <= 64 * 1024, seen


if __name__ == "__main__":
    main()
