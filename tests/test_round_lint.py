"""Compile the kernels of kernels/round.py for a GPU that is not here; see test_kernel_lint.py."""

import json
import os
import subprocess
import sys

import pytest

from kernels import round as steps

triton = pytest.importorskip("triton")


def compile_steps():
    """Every kernel of kernels/round.py for sm_90, as the launcher would; registers, spills and shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tests.test_kernel_lint import read_machine_code

    pointers = dict(seeds="*i64", embed="*bf16", x="*bf16", out_seeds="*i64", out_positions="*i64", chosen="*i64")
    pointers |= dict(stamps="*i64", ring_times="*i64", logprobs="*fp32", ring_logprobs="*fp32")
    integers = (
        "stride_tokens",
        "stride_drafts",
        "stride_match",
        "stride_log",
        "width",
        "first",
        "C",
        "size",
        "chances",
    )
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
        signature, values, attributes = {}, {}, {}
        for i, name in enumerate(kernel.arg_names):
            if name in constants and not str(constants[name]).startswith("*"):
                signature[name], values[(i,)] = "constexpr", constants[name]
            elif name == "turns":
                signature[name] = ("i32",) * 5
            elif name in integers:
                signature[name] = "i32"
            else:
                signature[name], attributes[(i,)] = (
                    constants.get(name) or pointers.get(name, "*i32"),
                    [["tt.divisibility", 16]],
                )
        source = ASTSource(kernel, signature, values, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps))
        code = read_machine_code(compiled.asm["cubin"])
        results.append(dict(name=kernel.__name__, shared=compiled.metadata.shared, **code))
    return results


def test_kernels_compile_for_hopper_without_spills():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.test_round_lint"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout)
    assert len(results) == 9
    for seen in results:
        assert seen["spilled"] == 0 and seen["registers"] <= 64 and seen["shared"] <= 1024, seen


if __name__ == "__main__":
    print(json.dumps(compile_steps()))
