"""Compile the attention of decoding for GPUs that are not here, and read the machine code: see machine_code.py."""

import json
import multiprocessing
from collections import namedtuple

import pytest

pytest.importorskip("triton")

from tests.machine_code import (  # noqa: E402
    REGISTERS,
    SHARED_MEMORY,
    compile_for,
    described,
    from_own_process,
    read_machine_code,
    signature_of,
)

Job = namedtuple("Job", "capability kernel cache head_dim tiles rope window")
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


def element_of(job):
    """The dtype of q, and the bytes of an element of the cache."""
    return "bf16" if job.cache == "i8" else job.cache, {"i8": 1, "fp32": 4}.get(job.cache, 2)


def kernel_of(job, plan):
    """The kernel, its constants, and the options it is launched with."""
    from kernels.flash_decode import ROWS
    from kernels.flash_decode_kernels import combine_kernel, split_kernel
    from kernels.flash_decode_plan import RUN, combine_options
    from kernels.rope_cache import BLOCK_H, rope_angles_kernel, rope_cache_kernel

    constants = dict(HEAD_DIM=job.head_dim, WINDOW=job.window, OVERLAP=job.capability >= 90)
    if job.kernel == "split":
        constants |= dict(TILES=job.tiles, BLOCK_M=ROWS, BLOCK_N=plan.keys, BLOCK_B=1, PTX=element_of(job)[0] == "bf16")
        options = dict(num_warps=plan.warps, num_stages=plan.stages)
        if plan.registers and job.tiles == 1:
            options |= dict(maxnreg=plan.registers)
        return split_kernel, constants, options
    if job.kernel == "combine":
        block_d, log_runs, options = combine_options(RUN * job.tiles, job.head_dim)
        constants |= dict(RUN=RUN, LOG_RUNS=log_runs, BLOCK_D=block_d)
        constants |= {name: options.pop(name) for name in ("STEPS", "UNROLL")}
        return combine_kernel, constants, options
    if job.kernel == "rope":
        return rope_cache_kernel, constants | dict(BLOCK_H=BLOCK_H), dict(num_warps=BLOCK_H)
    return rope_angles_kernel, dict(HALF=job.head_dim // 2), dict(num_warps=1)


def types_of(job, plan):
    """Of the arguments that are no integers, by name: None for those that this job goes without."""

    def strided(dtype, strides):
        return ("*" + dtype,) + ("i32",) * strides

    element, size = element_of(job)
    types = dict(turns=("i32",) * len(plan.chunks.turns), qkv=strided(element, 2))
    types |= {name: strided(job.cache, 3) for name in ("k", "v", "k_cache", "v_cache")}
    types |= {name: strided(element, 3) for name in ("q", "out", "k_new", "v_new")}
    types |= {name: strided("fp32", 2) if size == 1 else None for name in ("k_scale", "v_scale")}
    types |= dict(v_words=strided("i32", 3) if size == 1 and job.head_dim > 64 else None)
    types |= {name: "*i32" for name in ("cache_len_ptr", "positions_ptr")}
    types |= {name: "*fp32" for name in ("partial_ptr", "lse_ptr", "inv_freq_ptr", "cos_ptr", "sin_ptr")}
    types |= {name: "*fp32" if job.window else None for name in ("q_norm_ptr", "k_norm_ptr")}
    types |= {name: "fp32" for name in ("scale_log2", "eps", "attention_factor")}
    if job.kernel == "split" and not job.rope:
        types |= dict.fromkeys(("k_new", "v_new", "cos_ptr", "sin_ptr"))
    return types


def compile_job(job):
    """Compile one kernel as its launcher would; what the machine code looks like, as a dict."""
    from kernels.flash_decode_plan import plan_for_chip

    plan = plan_for_chip(8, job.head_dim, element_of(job)[1], SHARED_MEMORY[job.capability])
    kernel, constants, options = kernel_of(job, plan)
    types = types_of(job, plan)
    plain = {"turns", *(name for name in kernel.arg_names if name not in types)}
    signature, values, attributes = signature_of(kernel, types, constants, plain)
    compiled = compile_for(job.capability, kernel, signature, values, attributes, **options)
    seen = read_machine_code(compiled.asm["cubin"])
    seen["prefetches"] = compiled.asm["ptx"].count("cp.async.c")
    return dict(shared=compiled.metadata.shared, programs=plan.programs, warps=plan.warps, **seen)


def main():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(json.dumps(pool.map(compile_job, JOBS, chunksize=1)))


@pytest.fixture(scope="module")
def compiled():
    return dict(zip(JOBS, from_own_process("tests.test_decode_lint"), strict=True))


@described
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
