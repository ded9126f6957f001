"""Compile the kernels of kernels/round.py for a GPU that is not here; see machine_code.py."""

import json

import pytest

from kernels import round as steps

pytest.importorskip("triton")

from tests.machine_code import compile_for, from_own_process, read_machine_code, signature_of  # noqa: E402

POINTERS = {name: "*i32" for name in ("tokens", "position", "limit", "drafts", "shift", "match", "start", "lengths")}
POINTERS |= {name: "*i32" for name in ("log", "place", "ring_log")}
POINTERS |= {
    name: "*i64" for name in ("seeds", "out_seeds", "out_positions", "chosen", "stamp", "stamps", "ring_times")
}
POINTERS |= dict(embed="*bf16", x="*bf16", logprobs="*fp32", ring_logprobs="*fp32", turns=("i32",) * 5)
INTEGERS = ("stride_tokens", "stride_drafts", "stride_match", "stride_log", "width", "first", "C")
INTEGERS += ("log_size", "logprobs_size")


def compile_steps():
    """Every kernel of kernels/round.py for sm_90, as the launcher would; registers, spills and shared memory."""
    gather = dict(NOWHERE=steps.NOWHERE, BLOCK=4096, OVERLAP=True)
    cases = [
        (steps.gather_kernel, gather | dict(match=match, shift=shift, stamp=stamp), 8)
        for match, shift, stamp in ((None, None, None), (None, "*i32", "*i64"), ("*i32", None, "*i64"))
    ]
    cases += [(steps.accept_kernel, dict(WIDTH=width, OVERLAP=True), 1) for width in (1, 9, 17)]
    cases += [(steps.look_up_kernel, dict(LONGEST=4, INDEX_BITS=28, BLOCK=steps.LOOK_UP_BLOCK, OVERLAP=True), 4)]
    cases += [
        (steps.publish_kernel, dict(logprobs=logprobs, PLACES=3, BLOCK=128, OVERLAP=True), 1)
        for logprobs in (None, "*fp32")
    ]
    results = []
    for kernel, constants, warps in cases:
        given = {name: constants.get(name, kind) for name, kind in POINTERS.items()}
        fixed = {name: value for name, value in constants.items() if name not in POINTERS}
        signature = signature_of(kernel, given, fixed, plain=(*INTEGERS, "turns"))
        compiled = compile_for(90, kernel, *signature, num_warps=warps)
        code = read_machine_code(compiled.asm["cubin"])
        results.append(dict(name=kernel.__name__, shared=compiled.metadata.shared, **code))
    return results


def test_kernels_compile_for_hopper_without_spills():
    results = from_own_process("tests.test_round_lint")
    assert len(results) == 9
    for seen in results:
        assert seen["spilled"] == 0 and seen["registers"] <= 64 and seen["shared"] <= 1024, seen


if __name__ == "__main__":
    print(json.dumps(compile_steps()))
