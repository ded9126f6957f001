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

Job = namedtuple("Job", "capability kernel cache head_dim tiles rope window")
REGISTERS = 65_536  # of a multiprocessor
KINDS = ("bf16", "i8")
JOBS = (
    [Job(90, "split", cache, d, tiles, False, False) for cache in KINDS for d in (64, 128) for tiles in (1, 4)]
    + [Job(90, "split", cache, d, tiles, True, False) for cache in KINDS for d in (64, 128) for tiles in (1, 2)]
    + [Job(90, "split", cache, d, 1, True, False) for cache in KINDS for d in (80, 256)]
    + [Job(90, "split", cache, 128, 1, True, True) for cache in KINDS]
    + [Job(90, "split", "bf16", 128, 4, True, False)]
    + [Job(90, "split", cache, 128, 1, True, False) for cache in ("fp16", "fp32")]
    + [Job(c, "split", cache, 128, 1, True, False) for c in (80, 86, 120) for cache in KINDS]
    + [Job(89, "split", "bf16", 128, 2, True, False)]
    + [Job(c, "combine", "bf16", 128, runs, False, False) for c in (80, 90, 120) for runs in (1, 8, 16)]
    + [Job(90, "rope", "bf16", 64, 1, False, False), Job(90, "rope", "i8", 128, 1, False, True)]
    + [Job(80, "rope", "i8", 64, 1, False, False), Job(90, "angles", "bf16", 128, 1, False, False)]
)
# Bytes that each thread may keep in memory; outside this list, none. Sine and cosine of angles past 100,000 keep a
# table there, which smaller angles never touch. Four tiles of rows are more than registers hold. Under the limit that
# lets four programs read an int8 cache, what turns q and k before the loop is the most.
SPILLS = {job: 32 for job in JOBS if job.kernel in ("rope", "angles")}
SPILLS |= {job: 96 for job in JOBS if job.kernel == "split" and job.tiles == 4}
SPILLS |= {job: 48 for job in JOBS if job.kernel == "split" and job.cache == "i8" and job.rope and job.tiles == 1}


def compile_job(job):
    """Compile one kernel as its launcher would; what the machine code looks like, as a dict."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels.flash_decode import ROWS, RUN, combine_options, plan_for_chip
    from kernels.flash_decode_kernels import combine_kernel, split_kernel
    from kernels.rope_cache import BLOCK_H, rope_angles_kernel, rope_cache_kernel

    element = "bf16" if job.cache == "i8" else job.cache
    size = {"i8": 1, "fp32": 4}.get(job.cache, 2)
    plan = plan_for_chip(8, job.head_dim, size, SHARED_MEMORY[job.capability])
    constants, options = dict(HEAD_DIM=job.head_dim, WINDOW=job.window, OVERLAP=job.capability >= 90), {}
    if job.kernel == "split":
        kernel = split_kernel
        constants |= dict(TILES=job.tiles, BLOCK_M=ROWS, BLOCK_N=plan.keys, BLOCK_B=1)
        constants |= dict(PTX=element == "bf16")
        options = dict(num_warps=plan.warps, num_stages=plan.stages)
        if plan.registers and job.tiles == 1:
            options |= dict(maxnreg=plan.registers)
    elif job.kernel == "combine":
        kernel = combine_kernel
        block_d, log_runs, options = combine_options(RUN * job.tiles, job.head_dim)
        constants |= dict(RUN=RUN, LOG_RUNS=log_runs, BLOCK_D=block_d)
        constants |= {name: options.pop(name) for name in ("STEPS", "UNROLL")}
    elif job.kernel == "rope":
        kernel, constants, options = rope_cache_kernel, constants | dict(BLOCK_H=BLOCK_H), dict(num_warps=BLOCK_H)
    else:
        kernel, constants, options = rope_angles_kernel, dict(HALF=job.head_dim // 2), dict(num_warps=1)

    aligned = [["tt.divisibility", 16]]
    signature, values, attributes = {}, {}, {}

    def tensor(i, name, dtype, strides):
        signature[name] = ("*" + dtype,) + ("i32",) * strides
        attributes.update({(i, j): aligned for j in range(strides + 1)})

    def nothing(i, name):
        signature[name], values[(i,)] = "constexpr", None

    inside = job.kernel == "split"  # rotary positions are a part of it if job.rope
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        elif inside and not job.rope and name in ("k_new", "v_new", "cos_ptr", "sin_ptr"):
            nothing(i, name)
        elif name.endswith("norm_ptr") and not job.window:
            nothing(i, name)
        elif (name in ("k_scale", "v_scale") and size != 1) or (
            name == "v_words" and (size != 1 or job.head_dim <= 64)
        ):
            nothing(i, name)
        elif name in ("k_scale", "v_scale"):
            tensor(i, name, "fp32", 2)
        elif name == "v_words":
            tensor(i, name, "i32", 3)
        elif name in ("k", "v", "k_cache", "v_cache"):
            tensor(i, name, job.cache, 3)
        elif name in ("q", "out", "k_new", "v_new"):
            tensor(i, name, element, 3)
        elif name == "qkv":
            tensor(i, name, element, 2)
        elif name == "turns":
            signature[name] = ("i32",) * len(plan.chunks.turns)
        elif name.endswith("_ptr"):
            dtype = "i32" if name in ("cache_len_ptr", "positions_ptr") else "fp32"
            signature[name], attributes[(i,)] = "*" + dtype, aligned
        else:
            signature[name] = "fp32" if name in ("scale_log2", "eps", "attention_factor") else "i32"

    source = ASTSource(kernel, signature, values, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", job.capability, 32), options=options)
    seen = read_machine_code(compiled.asm["cubin"])
    seen["prefetches"] = compiled.asm["ptx"].count("cp.async.c")
    return dict(shared=compiled.metadata.shared, programs=plan.programs, warps=plan.warps, **seen)


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
        if job.cache != "fp32" and job.head_dim <= 128:  # as many as the plan counts on
            assert seen["registers"] * 32 * seen["warps"] * programs <= REGISTERS, seen
    elif job.kernel == "combine":
        # Two numbers and a logarithm of each of 16 chunks at once: with fewer registers it would wait for one by one.
        assert seen["registers"] >= 64, seen
        assert seen["registers"] * 32 * 4 * 3 <= REGISTERS and seen["shared"] <= 16 * 1024, seen
    else:
        assert seen["registers"] <= 128 and seen["shared"] <= 64 * 1024, seen


if __name__ == "__main__":
    main()
