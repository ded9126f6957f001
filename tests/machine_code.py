"""Compiling kernels for GPUs that are not here, and reading what came out: for the tests named *_lint.py.

Triton compiles for any Nvidia GPU without one. The compiler runs in a process of its own (`from_own_process`), where
TRITON_INTERPRET is not set.
"""

import json
import os
import re
import subprocess
import sys
import tempfile

import pytest

triton = pytest.importorskip("triton")

SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 120: 101_376}  # bytes a program can have
REGISTERS = 65_536  # of a multiprocessor
ALIGNED = [["tt.divisibility", 16]]

described = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="the machine code of Triton 3.6 is described here"
)


def from_own_process(module):
    """What `python -m module` prints, which is JSON."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", module], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def signature_of(kernel, types, constants, plain=()):
    """What ASTSource wants of a kernel's arguments.

    types: name -> type, or a tuple of them for a pointer with its strides; None for an absent argument. constants:
    name -> value. All others are integers, and `eps` a float; `plain` names what is not known to be a multiple of 16.
    """
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants or (name in types and types[name] is None):
            signature[name], values[(i,)] = "constexpr", constants.get(name)
        else:
            kind = signature[name] = types.get(name, "fp32" if name == "eps" else "i32")
            if isinstance(kind, tuple) and name not in plain:
                attributes |= {(i, j): ALIGNED for j in range(len(kind))}
            elif kind != "fp32" and name not in plain:
                attributes[(i,)] = ALIGNED
    return signature, values, attributes


def compile_for(capability, kernel, signature, values, attributes, **options):
    """A kernel as the launcher would compile it on such a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def dump(cubin, *flags):
    """What cuobjdump says of a cubin, for each flag."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = [[triton.knobs.nvidia.cuobjdump.path, flag, file.name] for flag in flags]
        return [subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in commands]


def instructions(cubin):
    """(address, instruction) one after another."""
    (code,) = dump(cubin, "-sass")
    found = re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+(.*);", code, re.MULTILINE)
    return [(int(address, 16), operation) for address, operation in found]


def read_machine_code(cubin):
    """Registers of a thread, bytes that each spills, and instructions of a few kinds."""
    usage, code = dump(cubin, "-res-usage", "-sass")

    def count(pattern):
        return len(re.findall(pattern, code))

    return dict(
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        spilled=int(re.search(r"STACK:(\d+)", usage)[1]),
        wgmma=count(r"\bHGMMA\."),
        waits=count(r"WARPGROUP\.DEPBAR"),
        mma=count(r"\bHMMA\."),
        tma_loads=count("UTMALDG"),
    )
