"""Which tile sizes each kernel runs with: a table, read by head size and by the chip's shared memory.

A table and not an autotuner: an autotuner inside the op would time kernels during the first step, choose differently
on different ranks, and change the order of sums from run to run. `python -m bench.attention --sweep` measures the
candidates on the GPU at hand.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton

PHASES = ("forward", "dkdv", "dq")
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


@dataclass(frozen=True)
class Tile:
    """Queries and keys of one tile, warps of a program, stages of the pipeline that prefetches tiles; `tma`: load
    tiles by Hopper's copy engine; `registers`: limit for each thread, so that two programs share a multiprocessor."""

    rows: int
    keys: int
    warps: int
    stages: int
    tma: bool = False
    registers: int | None = None


# family -> phase -> one Tile for each of COLUMNS (head_dim, rounded up to a power of two), for 16-bit inputs.
# hopper: 227 KB of shared memory a program; wgmma wants 64 rows of the left operand for every four warps. Head sizes 64
# and 128 are the winners of the sweep on an H200: small tiles, so that two or three programs share a multiprocessor and
# one computes its softmax while another keeps the tensor cores busy.
# ampere: 163 KB (A100). small: 99 KB (RTX 30, 40 and 50, L4, L40S). These two are chosen by what compiles without
# spilling registers (tests/test_kernel_lint.py), not timed.
COLUMNS = (32, 64, 128, 256)
TABLE = {
    "hopper": {
        "forward": (
            Tile(64, 128, 4, 2, tma=True),
            Tile(64, 128, 4, 2, tma=True),
            Tile(64, 64, 4, 3, tma=True),
            Tile(128, 64, 8, 2, tma=True),
        ),
        "dkdv": (
            Tile(64, 64, 4, 3, tma=True),
            Tile(64, 64, 4, 3, tma=True),
            Tile(64, 64, 4, 2, tma=True),
            Tile(32, 64, 8, 2, tma=True),
        ),
        "dq": (
            Tile(64, 64, 4, 2, tma=True),
            Tile(64, 64, 4, 2, tma=True),
            Tile(128, 32, 8, 3, tma=True, registers=128),
            Tile(64, 64, 8, 2, tma=True),
        ),
    },
    "ampere": {
        "forward": (Tile(128, 64, 8, 3), Tile(128, 64, 4, 2), Tile(128, 64, 8, 3), Tile(64, 64, 8, 2)),
        "dkdv": (Tile(64, 128, 8, 2), Tile(32, 128, 8, 3), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
        "dq": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    },
    "small": {
        "forward": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(64, 32, 8, 2)),
        "dkdv": (Tile(64, 128, 8, 2), Tile(32, 128, 8, 3), Tile(64, 64, 8, 2), Tile(16, 32, 4, 2)),
        "dq": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 64, 8, 2), Tile(32, 32, 4, 2)),
    },
}
# fp32 runs on the plain multiply-add units ("ieee": no tf32 rounding) with twice the bytes: the same small tiles on
# every chip and in every phase, for exactness and not for speed.
FP32 = (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 16, 4, 1))
# The interpreter has no limits; unequal sides make a swapped index show.
INTERPRETER = {"forward": Tile(64, 32, 4, 1), "dkdv": Tile(32, 64, 4, 1), "dq": Tile(64, 32, 4, 1)}


@cache
def device_limits(index: int) -> tuple[int, int, int]:
    """Shared memory of one program in bytes, L2 cache in bytes, and number of multiprocessors of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    return properties.shared_memory_per_block_optin, properties.L2_cache_size, properties.multi_processor_count


def family(shared_memory: int) -> str:
    """The part of the table for a chip with this much shared memory a program, in bytes."""
    return "hopper" if shared_memory >= 220_000 else "ampere" if shared_memory >= 160_000 else "small"


def tile_for_chip(phase: str, head_dim: int, element_size: int, shared_memory: int) -> Tile:
    """The entry for one kernel: phase of PHASES, bytes of an element, bytes of shared memory a program."""
    column = COLUMNS.index(max(COLUMNS[0], triton.next_power_of_2(head_dim)))
    return FP32[column] if element_size == 4 else TABLE[family(shared_memory)][phase][column]


def tile_for(phase: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """`tile_for_chip` of the device a tensor is on; on the CPU (interpreter) a fixed small tile."""
    if device.type == "cpu":
        return INTERPRETER[phase]
    return tile_for_chip(phase, head_dim, dtype.itemsize, device_limits(device.index)[0])


def heads_in_l2(heads: int, elements: int, like: torch.Tensor) -> int:
    """How many of these heads, with two tensors of `elements` each (K and V, or Q and dO), half the L2 cache holds."""
    l2 = 32 * 1024 if like.device.type == "cpu" else device_limits(like.device.index)[1]
    return max(1, min(heads, l2 // 2 // (2 * elements * like.element_size())))


def programs_to_fill(device: torch.device) -> int:
    """Programs that keep the whole chip busy: two for every multiprocessor, since they differ in length."""
    return 8 if device.type == "cpu" else 2 * device_limits(device.index)[2]
