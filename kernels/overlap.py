"""Programmatic dependent launch: a kernel's programs take their places while the kernel before still runs.

Between two kernels of a captured graph a GPU loses about a microsecond: the last programs of one must be gone before
the first of the next are launched. A decoding step of a small model is some hundred kernels of a few microseconds each.
From Hopper on a kernel may be launched early and wait, in its first instruction, until what came before has finished
and its results can be seen. Every kernel that does so waits before it lets the next one in, so the order of all is
kept. Ahead of its wait a kernel may read what the one right before it does not write: all before that one is complete.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.interpreter import INTERPRETED


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether the kernels of a decoding step overlap on this device."""
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict:
    """What a launch of a kernel that begins with `wait_for_the_kernel_before` adds to its arguments."""
    return {"OVERLAP": True, "launch_pdl": True} if can_overlap(device) else {"OVERLAP": False}


@triton.jit
def wait_for_the_kernel_before(OVERLAP: tl.constexpr):
    """Before the first read of memory; then the next kernel's programs may come."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
