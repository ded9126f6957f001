"""Compile the kernels behind kernels/sample.py for a GPU that is not here; see machine_code.py."""

import json

import pytest

pytest.importorskip("triton")

from kernels import sample, sample_kernels, sample_narrow  # noqa: E402
from tests.machine_code import (  # noqa: E402
    REGISTERS,
    compile_for,
    from_own_process,
    read_machine_code,
    signature_of,
)

POINTERS = dict(logits="*bf16", seen="*u8", seeds="*i64", positions="*i64", out="*i64")
POINTERS |= {name: "*i32" for name in ("best_token", "run_list", "candidate_tokens", "state")}
POINTERS |= {name: "*fp32" for name in ("settings", "partial", "sums", "run_max", "candidates", "logprobs")}
INTEGERS = ("stride", "stride_seen", "V", "programs", "parts", "rows", "level", "runs")
FEW = ("run_max", "run_list", "candidates", "candidate_tokens")


def compile_all():
    """Every kernel for sm_90 and a vocabulary of 128,256, as the launcher would: registers, spills, shared memory."""
    sizes = dict(PROGRAMS=256, PARTS=128, OVERLAP=True)
    scan = dict(BLOCK=sample.BLOCK, RUN=32, PTX=True, OVERLAP=True)
    pick = dict(PROGRAMS=256, RUNS=4096, RUN=32, PTX=True, OVERLAP=True)
    narrow = dict(BLOCK=sample.NARROW_BLOCK, **sizes)
    draw = dict(BLOCK=sample.BLOCK, PTX=True, **sizes)
    cases = [
        (sample_kernels.scan_kernel, scan | dict(DRAW=True, FILTERS=True, LOGPROBS=True), sample.SCAN_WARPS),
        (
            sample_kernels.scan_kernel,
            scan | dict(DRAW=False, FILTERS=False, LOGPROBS=False, run_max=None, seen=None),
            sample.SCAN_WARPS,
        ),
        (sample_kernels.pick_kernel, pick | dict(FILTERS=True), sample.PICK_WARPS),
        (
            sample_kernels.pick_kernel,
            pick | dict(FILTERS=False, logprobs=None, **dict.fromkeys(FEW)),
            sample.PICK_WARPS,
        ),
    ]
    for both, weighted, seen in ((True, True, None), (True, False, "*u8"), (False, True, None)):
        case = narrow | dict(TOP_K_TOO=both, WEIGHTED=weighted, seen=seen)
        cases.append((sample_narrow.narrow_kernel, case, sample.NARROW_WARPS))
        cases.append((sample_narrow.draw_kernel, draw | dict(BY_TOP_K=both, BY_TOP_P=weighted), sample.SCAN_WARPS))
    results = []
    for kernel, constants, warps in cases:
        given = {name: constants.get(name, kind) for name, kind in POINTERS.items()}
        fixed = {name: value for name, value in constants.items() if name not in POINTERS}
        compiled = compile_for(90, kernel, *signature_of(kernel, given, fixed, plain=INTEGERS), num_warps=warps)
        code = read_machine_code(compiled.asm["cubin"])
        results.append(dict(name=kernel.__name__, warps=warps, shared=compiled.metadata.shared, **code))
    return results


def test_kernels_compile_for_hopper_without_spills():
    results = from_own_process("tests.test_sample_lint")
    assert len(results) == 10
    for seen in results:
        assert seen["spilled"] == 0 and seen["registers"] * seen["warps"] * 32 <= REGISTERS, seen
        assert seen["shared"] <= 64 * 1024, seen


if __name__ == "__main__":
    print(json.dumps(compile_all()))
