"""Compile decode_linear and its kernel for 8 and 4 bits for GPUs that are not here, and read the machine code.

Read are registers spilled, shared memory, tensor core instructions, and of the loop: loads that wait where they stand
(LDG) instead of arriving ahead of time (LDGSTS), where one costs a trip to memory at each step; and in the kernel for
quantised weights, whose LDGs are some steps ahead, anything that moves weights between lanes.
See machine_code.py for how; ring_linear.py has a file of its own.
"""

import json
import multiprocessing
import re
from collections import namedtuple

import pytest

pytest.importorskip("triton")

from tests.machine_code import (  # noqa: E402
    SHARED_MEMORY,
    compile_for,
    described,
    from_own_process,
    instructions,
    read_machine_code,
    signature_of,
)

Job = namedtuple("Job", "capability bits entry rows fusion even group", defaults=(True, 64))
FUSIONS = {"norm+swiglu": ("norm",), "residual": ("residual",), "norm+bias": ("norm", "bias")}
# `entry`: of TABLE. bits 32: x and weights in fp32.
JOBS = (
    [Job(90, 16, entry, rows, "norm+swiglu") for entry in (0, 1) for rows in (8, 16)]
    + [Job(90, 16, 0, 8, "norm+bias", even=False), Job(90, 16, 0, 8, "residual"), Job(90, 32, 0, 16, "norm+swiglu")]
    + [Job(80, 16, 1, 16, "norm+swiglu")]
)
QUANTISED_JOBS = (
    [Job(c, bits, entry, 8, "norm+swiglu") for c in (80, 86, 89, 90, 120) for bits in (8, 4) for entry in range(4)]
    + [Job(90, bits, entry, 16, "norm+swiglu") for bits in (8, 4) for entry in range(4)]
    + [Job(90, bits, entry, 8, "residual") for bits in (8, 4) for entry in (1, 3)]
    + [Job(90, bits, 0, 8, "norm+bias", even=False) for bits in (8, 4)]
    + [Job(90, 4, 0, 8, "norm+swiglu", group=group) for group in (32, 128)]
)
# Bytes that each thread may spill; outside this list, none.
SPILLS = {Job(c, 8, 0, 8, "norm+swiglu"): 8 for c in (86, 89)}
UNPACKERS = (8, 4)


def compiled_code(kernel, arguments, capability, **options):
    compiled = compile_for(capability, kernel, *arguments, **options)
    cubin = compiled.asm["cubin"]
    return dict(shared=compiled.metadata.shared, **in_the_loop(cubin), **read_machine_code(cubin))


def in_the_loop(cubin):
    """Instructions inside the loop that holds the matrix instructions, the longest if it was written out (0 where
    there is none): `loads` from memory that wait where they stand; `shuffles` between lanes, or by shared memory."""
    lines = instructions(cubin)
    body = []
    for address, operation in lines:
        target = re.search(r"BRA.* 0x([0-9a-f]+)", operation)
        if target and int(target[1], 16) < address:
            loop = [op for a, op in lines if int(target[1], 16) <= a <= address]
            body = max(body, [op for op in loop if any("HMMA" in op for op in loop)], key=len)
    return dict(
        loads=sum("LDG.E" in op for op in body),
        shuffles=sum(bool(re.search(r"\b(SHFL|STS|LDS|LDSM|BAR)\b", op)) for op in body),
    )


def compile_job(job):
    from kernels.decode_linear import FP32, TABLE, decode_linear_kernel, stages_for

    tiling = FP32 if job.bits == 32 else TABLE[job.entry]
    stages = stages_for(tiling, SHARED_MEMORY[job.capability])
    dtype = "*fp32" if job.bits == 32 else "*bf16"
    pointers = dict(x=dtype, out=dtype, w=dtype)
    pointers |= {name: dtype if name in FUSIONS[job.fusion] else None for name in ("norm", "bias", "residual")}
    constants = dict(
        BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, SLICES=tiling.slices, ROWS=job.rows, STAGES=stages,
        SWIGLU="swiglu" in job.fusion, EVEN=job.even, OVERLAP=job.capability >= 90,
    )  # fmt: skip
    arguments = signature_of(decode_linear_kernel, pointers, constants, plain={"M"})
    return compiled_code(
        decode_linear_kernel, arguments, job.capability, num_warps=tiling.warps, num_stages=stages,
        launch_pdl=constants["OVERLAP"],
    )  # fmt: skip


def compile_quantised(job):
    from kernels.quantized_linear import TABLE, for_rows, quantized_linear_kernel

    tiling = for_rows(TABLE[job.bits][job.entry], job.rows)
    pointers = dict(x="*bf16", out="*bf16", w="*i32", scales={8: "*fp32", 4: "*bf16"}[job.bits])
    pointers |= {name: "*bf16" if name in FUSIONS[job.fusion] else None for name in ("norm", "bias", "residual")}
    constants = dict(
        PANELS=tiling.panels, SLICES=tiling.slices, TILES=job.rows // 8, GROUP=job.group if job.bits == 4 else 0,
        SWIGLU="swiglu" in job.fusion, EVEN=job.even, AHEAD=tiling.ahead, UNROLL=tiling.unroll, PTX=True,
        OVERLAP=job.capability >= 90,
    )  # fmt: skip
    arguments = signature_of(quantized_linear_kernel, pointers, constants, plain={"M"})
    return compiled_code(
        quantized_linear_kernel, arguments, job.capability, num_warps=tiling.slices, maxnreg=tiling.registers,
        launch_pdl=constants["OVERLAP"],
    )  # fmt: skip


def compile_unpacker(bits):
    from kernels.unpack import UNPACKED_CHUNKS, unpack_kernel

    pointers = dict(w="*i32", scales={8: "*fp32", 4: "*bf16"}[bits], out="*bf16")
    constants = dict(BITS=bits, GROUP=64 if bits == 4 else 0, CHUNKS=UNPACKED_CHUNKS, PTX=True)
    return compiled_code(unpack_kernel, signature_of(unpack_kernel, pointers, constants, plain=()), 90)


WORK = [(compile_job, JOBS), (compile_quantised, QUANTISED_JOBS), (compile_unpacker, UNPACKERS)]


def main():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        started = [pool.map_async(function, jobs, chunksize=4) for function, jobs in WORK]
        print(json.dumps([one for results in started for one in results.get()]))


@pytest.fixture(scope="module")
def compiled():
    jobs = [(function.__name__, job) for function, jobs in WORK for job in jobs]
    return dict(zip(jobs, from_own_process("tests.test_decode_linear_lint"), strict=True))


def name_of(job):
    return "-".join(map(str, job))


@described
@pytest.mark.parametrize("job", JOBS, ids=name_of)
def test_decode_linear(job, compiled):
    seen = compiled["compile_job", job]
    assert seen["shared"] <= SHARED_MEMORY[job.capability], seen
    assert seen["spilled"] == 0 or job.bits == 32, seen
    assert seen["loads"] == 0 or job.bits == 32, seen
    assert (seen["mma"] > 0) == (job.bits != 32), seen


@described
@pytest.mark.parametrize("job", QUANTISED_JOBS, ids=name_of)
def test_quantised(job, compiled):
    """Weights go from memory to registers to the matrix instruction; with a layout that is not the compiler's they
    would be shuffled, in the loop, and nothing would say so."""
    seen = compiled["compile_quantised", job]
    assert seen["shared"] <= 16 * 1024 and seen["mma"] > 0, seen
    assert seen["spilled"] <= SPILLS.get(job, 0), seen
    assert seen["shuffles"] == 0 and seen["loads"] > 0, seen


@described
@pytest.mark.parametrize("bits", UNPACKERS)
def test_unpacker(bits, compiled):
    seen = compiled["compile_unpacker", bits]
    assert seen["spilled"] == 0 and seen["shared"] <= 48 * 1024, seen


if __name__ == "__main__":
    main()
