"""Compile decode_linear and the sampling kernel for GPUs that are not here, and read the machine code.

Read are registers spilled, shared memory, tensor core instructions, and loads in the loop that wait where they stand
(LDG) instead of arriving ahead of time (LDGSTS): one such load in the loop costs a trip to memory at each step.
See tests/test_kernel_lint.py; this too compiles in a process of its own (`python -m tests.test_decode_linear_lint`).
"""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import namedtuple

import pytest

triton = pytest.importorskip("triton")

from tests.test_kernel_lint import SHARED_MEMORY, read_machine_code  # noqa: E402

Job = namedtuple("Job", "capability bits entry rows fusion group even prefetch", defaults=(64, True, False))
FUSIONS = {"norm+swiglu": ("norm",), "residual": ("residual",), "norm+bias": ("norm", "bias")}
# `entry`: of TABLE. Groups of 32 are not here: half a group is too short for the wide fragments of 8-bit operands, and
# their weights do wait in the loop. They are right, not fast.
JOBS = (
    [Job(90, bits, entry, 8, "norm+swiglu") for bits in (16, 8, 4) for entry in (0, 1, 3)]
    + [Job(90, bits, 3, 16, "norm+swiglu") for bits in (16, 8, 4)]
    + [Job(90, bits, 1, 8, "norm+bias", even=False) for bits in (16, 4)]
    + [Job(90, 8, 0, 8, "residual"), Job(90, 4, 0, 8, "norm+swiglu", 128), Job(90, 32, 0, 16, "norm+swiglu")]
    + [Job(90, 4, 0, 8, "residual", prefetch=True)]
    + [Job(90, 4, entry, 16, "norm+swiglu", 128) for entry in range(4)]
    + [Job(80, 16, 3, 16, "norm+swiglu"), Job(89, 4, 3, 16, "norm+swiglu")]
)
SAMPLERS = ("scan", "pick", "pick without filters")


def signature_of(kernel, pointers, constants, plain):
    """What ASTSource wants: `pointers` name -> type (None for an absent argument), other arguments are integers."""
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants or (name in pointers and pointers[name] is None):
            signature[name], values[(i,)] = "constexpr", constants.get(name)
        else:
            signature[name] = pointers.get(name, "fp32" if name == "eps" else "i32")
            if name != "eps" and name not in plain:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, values, attributes


def compiled_code(kernel, arguments, capability, **options):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(ASTSource(kernel, *arguments), target=target, options=options)
    cubin = compiled.asm["cubin"]
    return dict(shared=compiled.metadata.shared, loads=waiting_loads(cubin), **read_machine_code(cubin))


def waiting_loads(cubin):
    """LDG instructions inside the loop that holds the matrix instructions (0 where there is none)."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        tool = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        code = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    lines = [(int(a, 16), op) for a, op in re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+(.*);", code, re.MULTILINE)]
    loops = []
    for address, operation in lines:
        target = re.search(r"BRA.* 0x([0-9a-f]+)", operation)
        if target and int(target[1], 16) < address:
            body = [op for a, op in lines if int(target[1], 16) <= a <= address]
            if any("HMMA" in op for op in body):
                loops.append(sum("LDG.E" in op for op in body))
    return max(loops, default=0)


def compile_job(job):
    from kernels.decode_linear import FP32, TABLE, decode_linear_kernel, stages_for

    tiling = FP32 if job.bits == 32 else TABLE[job.bits][job.entry].for_group(job.group if job.bits == 4 else None)
    stages = stages_for(tiling, SHARED_MEMORY[job.capability])
    dtype = "*fp32" if job.bits == 32 else "*bf16"
    pointers = dict(x=dtype, out=dtype, w=dtype if job.bits >= 16 else "*i8")
    pointers["scales"] = {8: "*fp32", 4: "*bf16"}.get(job.bits)
    pointers |= {name: dtype if name in FUSIONS[job.fusion] else None for name in ("norm", "bias", "residual")}
    constants = dict(
        BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, SLICES=tiling.slices, ROWS=job.rows, STAGES=stages,
        GROUP=job.group if job.bits == 4 else 0, SWIGLU="swiglu" in job.fusion, EVEN=job.even, PTX=job.bits != 32,
        OVERLAP=job.capability >= 90,
        PREFETCH=job.prefetch,
    )  # fmt: skip
    arguments = signature_of(decode_linear_kernel, pointers, constants, plain={"M"})
    return compiled_code(
        decode_linear_kernel, arguments, job.capability, num_warps=tiling.warps, num_stages=stages,
        launch_pdl=constants["OVERLAP"],
    )  # fmt: skip


def compile_sampler(name):
    from kernels import sample

    filters = name != "pick without filters"
    kernel = sample.scan_kernel if name == "scan" else sample.pick_kernel
    pointers = dict(logits="*bf16", seen=None, settings="*fp32", seeds="*i64", positions="*i64", partial="*fp32")
    pointers |= dict(best_token="*i32", out="*i64", logprobs=None)
    pointers |= {x: t if filters else None for x, t in (("run_max", "*fp32"), ("run_list", "*i32"))}
    pointers |= {x: "*i32" if filters else None for x in ("candidates", "candidate_tokens")}
    constants = dict(BLOCK=sample.BLOCK, RUN=32, FILTERS=filters, PTX=True, PROGRAMS=128, RUNS=4096, OVERLAP=True)
    arguments = signature_of(kernel, pointers, constants, plain={"V", "programs", "runs"})
    return compiled_code(kernel, arguments, 90, num_warps=4 if name == "scan" else 8)


def main():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        linear = pool.map_async(compile_job, JOBS, chunksize=4)
        print(json.dumps([linear.get(), pool.map(compile_sampler, SAMPLERS, chunksize=1)]))


@pytest.fixture(scope="module")
def compiled():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.test_decode_linear_lint"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    linear, samplers = json.loads(done.stdout)
    return dict(zip(JOBS, linear, strict=True)) | dict(zip(SAMPLERS, samplers, strict=True))


described = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="the machine code of Triton 3.6 is described here"
)


@described
@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(map(str, job)))
def test_decode_linear(job, compiled):
    seen = compiled[job]
    assert seen["shared"] <= SHARED_MEMORY[job.capability], seen
    allowed = 16 if (job.bits, job.entry, job.rows) == (4, 3, 16) else 0  # bytes; sixteen rows of the widest int4 tile
    assert seen["spilled"] <= allowed or job.bits == 32, seen
    assert seen["loads"] == 0 or job.bits == 32, seen
    assert (seen["mma"] > 0) == (job.bits != 32), seen


@described
@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler(name, compiled):
    seen = compiled[name]
    assert seen["spilled"] == 0 and seen["shared"] <= 48 * 1024, seen


if __name__ == "__main__":
    main()
