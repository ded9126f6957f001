"""Compile the kernels of flash attention for GPUs that are not here, and read the machine code.

What is read: shared memory, registers spilled to memory, the tensor core instructions (wgmma on Hopper, mma elsewhere),
and how often a wgmma is waited for: as many waits as instructions means that ptxas serialised them, which costs half
the speed and is said nowhere. The kernels of decoding have files of their own; all of them use machine_code.py.
"""

import json
import multiprocessing
from collections import namedtuple

import pytest

triton = pytest.importorskip("triton")

from tests.machine_code import (  # noqa: E402
    ALIGNED,
    SHARED_MEMORY,
    compile_for,
    described,
    from_own_process,
    read_machine_code,
)

Job = namedtuple("Job", "capability phase head_dim dtype mask")
MASKS = {"causal": (True, False, False), "full": (False, False, False), "window+documents": (True, True, True)}
PHASES = ("forward", "dkdv", "dq")
JOBS = (
    [Job(90, phase, d, "bf16", mask) for phase in PHASES for d in (64, 128) for mask in MASKS]
    + [Job(90, phase, d, "bf16", "causal") for phase in PHASES for d in (16, 32, 80, 256)]
    + [Job(90, phase, 256, "bf16", "window+documents") for phase in PHASES]
    + [Job(90, phase, 128, "fp16", "causal") for phase in PHASES]
    + [Job(90, phase, d, "fp32", "causal") for phase in PHASES for d in (64, 128)]
    + [Job(c, phase, d, "bf16", "causal") for c in (80, 86, 89, 120) for phase in PHASES for d in (64, 128)]
)
# Bytes that each thread may spill; outside this list, none. The kernel for dk and dv holds two results of head_dim
# columns, and with three loops over masks some of the rest no longer fits; fp32 is for exactness, not for speed.
SPILLS = {
    Job(90, "dkdv", 128, "bf16", "window+documents"): 88,
    Job(90, "dq", 128, "bf16", "window+documents"): 16,
    Job(90, "dkdv", 256, "bf16", "causal"): 16,
    Job(90, "dkdv", 256, "bf16", "window+documents"): 112,
    Job(90, "dkdv", 128, "fp32", "causal"): 304,
    Job(90, "dq", 128, "fp32", "causal"): 264,
}


def compile_job(job):
    """Compile one kernel as the launcher would for contiguous tensors; what the machine code looks like, as a dict."""
    from kernels.flash_attention_backward import dkdv_kernel, dq_kernel
    from kernels.flash_attention_forward import forward_kernel
    from kernels.tiles import tile_for_chip

    kernel = {"forward": forward_kernel, "dkdv": dkdv_kernel, "dq": dq_kernel}[job.phase]
    tile = tile_for_chip(job.phase, job.head_dim, 4 if job.dtype == "fp32" else 2, SHARED_MEMORY[job.capability])
    causal, window, documents = MASKS[job.mask]
    constants = dict(HEAD_DIM=job.head_dim, BLOCK_M=tile.rows, BLOCK_N=tile.keys, TMA=tile.tma)
    constants |= dict(CAUSAL=causal, WINDOW=window, DOCUMENTS=documents)
    rows = dict(q=tile.rows, dout=tile.rows, k=tile.keys, v=tile.keys)
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        elif name in ("doc_start_ptr", "last_rows_ptr") and not documents:
            signature[name], values[(i,)] = "constexpr", None
        elif name in ("doc_start_ptr", "last_rows_ptr"):
            signature[name], attributes[(i,)] = "*i32", ALIGNED
        elif name in rows and tile.tma:
            width = triton.next_power_of_2(job.head_dim)
            signature[name] = f"tensordesc<{job.dtype}[1,1,{rows[name]},{width}]>"
        elif name in ("q", "k", "v", "dout", "out", "dq", "dk", "dv"):
            signature[name] = ("*" + job.dtype, "i32", "i32", "i32")
            attributes |= {(i, j): ALIGNED for j in range(4)}
        elif name in ("lse2", "delta") and tile.tma:
            signature[name] = f"tensordesc<fp32[{tile.rows}]>"
        elif name in ("lse2", "delta") or name.endswith("_ptr"):
            signature[name], attributes[(i,)] = "*fp32", ALIGNED
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"

    options = dict(num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers)
    compiled = compile_for(job.capability, kernel, signature, values, attributes, **options)
    return dict(tma=tile.tma, shared=compiled.metadata.shared, **read_machine_code(compiled.asm["cubin"]))


def main():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(json.dumps(pool.map(compile_job, JOBS, chunksize=1)))


@pytest.fixture(scope="module")
def compiled():
    return dict(zip(JOBS, from_own_process("tests.test_kernel_lint"), strict=True))


@described
@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"sm{job[0]}-{job[1]}-d{job[2]}-{job[3]}-{job[4]}")
def test_machine_code(job, compiled):
    seen = compiled[job]
    assert seen["shared"] <= SHARED_MEMORY[job.capability]
    assert seen["spilled"] <= SPILLS.get(job, 0), seen
    if job.dtype == "fp32":  # exact products on the plain units
        assert seen["wgmma"] == seen["mma"] == 0, seen
    elif job.capability == 90:
        assert seen["wgmma"] > 0 and seen["mma"] == 0, seen
        assert 2 * seen["waits"] <= seen["wgmma"], f"ptxas serialised the wgmma: {seen}"
        assert (seen["tma_loads"] > 0) == seen["tma"], seen
    else:
        assert seen["mma"] > 0, seen


if __name__ == "__main__":
    main()
