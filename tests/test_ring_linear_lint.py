"""Compile kernels/ring_linear.py for GPUs that are not here, and read the machine code.

What makes this kernel fast is nowhere said to the compiler: that a lane multiplies what it has loaded, 16 bytes at a
time, with nothing moved between lanes; that the first weights are asked for before the kernel before is waited for; and
that all of x is on its way before the first product, where the loop is written out. A compiler that lays out registers
otherwise is still right, and slow. So the order of instructions is read here.
See machine_code.py for how.
"""

import json
import multiprocessing
import re
from collections import namedtuple

import pytest

pytest.importorskip("triton")

from tests.machine_code import (  # noqa: E402
    compile_for,
    described,
    from_own_process,
    instructions,
    read_machine_code,
    signature_of,
)
from tests.test_decode_linear_lint import FUSIONS  # noqa: E402

Job = namedtuple("Job", "capability entry rows fusion K dtype", defaults=("bf16",))
# What the entries of TABLE are for: a fusion and K.
USES = (
    ("norm", 768), ("norm+swiglu", 768), ("residual", 2048), ("residual", 8192), ("norm", 2048), ("norm+swiglu", 2048)
)  # fmt: skip
JOBS = [
    Job(capability, entry, rows, *use)
    for capability in (80, 86, 89, 90, 120)
    for rows in (8, 16)
    for entry, use in enumerate(USES)
]
JOBS += [Job(90, entry, 8, "norm+bias", K) for entry, K in ((0, 576), (2, 1536), (3, 3072 + 16))]
JOBS += [Job(90, 1, 16, "norm", 1024), Job(90, 0, 8, "norm", 768, "fp16"), Job(90, 5, 8, "norm+swiglu", 2048, "fp16")]


def compile_job(job):
    """What the machine code looks like, as a dict: loads of 16 bytes `early`, before the wait, and `late`, after the
    first matrix instruction; narrower loads, and moves between lanes, before the last one; and `wanted` early."""
    import triton.language as tl

    from kernels.ring_linear import TABLE, constants, ring_linear_kernel

    tiling = TABLE[job.entry][2]
    shape = constants(tiling, job.rows, job.K)
    given = ("norm",) if job.fusion == "norm" else FUSIONS[job.fusion]
    pointers = dict(x="*i32", w="*i32", norm="*i32" if "norm" in given else None, out="*" + job.dtype)
    pointers |= {name: "*" + job.dtype if name in given else None for name in ("bias", "residual")}
    fixed = dict(
        SWIGLU="swiglu" in job.fusion, OVERLAP=job.capability >= 90, PTX=True,
        DTYPE=tl.float16 if job.dtype == "fp16" else tl.bfloat16, **shape,
    )  # fmt: skip
    arguments = signature_of(ring_linear_kernel, pointers, fixed, plain={"M", "stride_x", "stride_w"})
    options = dict(num_warps=tiling.slices, num_stages=1, launch_pdl=job.capability >= 90)
    compiled = compile_for(job.capability, ring_linear_kernel, *arguments, **options)
    code = [operation for _, operation in instructions(compiled.asm["cubin"])]
    loads, products = ([i for i, op in enumerate(code) if word in op] for word in ("LDG", "HMMA"))
    wide = [i for i in loads if "LDG.E.128" in code[i]]
    wait = next((i for i, op in enumerate(code) if "ACQBULK" in op), 0)
    steps = shape["STEPS"] or shape["AHEAD"]
    return dict(
        early=sum(i < wait for i in wide),
        wanted=steps * shape["PANELS"] * shape["CHUNKS"] + ("norm" in given) * shape["STEPS"] * shape["CHUNKS"],
        late=sum(i > products[0] for i in wide),
        narrow=sum(i < products[-1] and i not in wide for i in loads),
        moves=sum(bool(re.search(r"\b(SHFL|STS|LDS|LDSM|STSM|PRMT)\b", op)) for op in code[: products[-1]]),
        whole=shape["STEPS"] > 0,
        shared=compiled.metadata.shared,
        **read_machine_code(compiled.asm["cubin"]),
    )


def main():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(json.dumps(pool.map(compile_job, JOBS, chunksize=4)))


@pytest.fixture(scope="module")
def compiled():
    return dict(zip(JOBS, from_own_process("tests.test_ring_linear_lint"), strict=True))


@described
@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(map(str, job)))
def test_machine_code(job, compiled):
    seen = compiled[job]
    assert seen["mma"] > 0 and seen["shared"] <= 16 * 1024, seen
    assert seen["spilled"] == 0, seen
    # Some sums may be on their way to shared memory before the last product; operands that are moved take dozens.
    assert seen["narrow"] == 0 and seen["moves"] <= 8, seen
    if job.capability >= 90:
        assert seen["early"] == seen["wanted"], seen
        assert seen["late"] == 0 or not seen["whole"], seen


if __name__ == "__main__":
    main()
