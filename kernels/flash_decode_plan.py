"""How flash decoding reads a cache: where it is cut, and what a program of a chip takes on. Told in flash_decode.py.

Chunks, and tiles in them, decide in which order a row's sums are added up. So they follow from the model and the row's
position alone. Stages, programs and registers follow from the chip too, and change no bits.
"""

import math
from dataclasses import dataclass

import torch

try:
    import triton
except ImportError:  # no Triton for this system: where chunks double still counts
    triton = None
else:
    from kernels.tiles import device_limits

SHORTEST = 64  # keys of a chunk of a short text
TURNS, CHANNELS = (1536, 3072, 6144, 16_384, 65_536), 1024  # where they double, for so many channels of all KV heads
RUN = 32  # chunks that are merged one after another; more of them in runs side by side
OTHER_SHARED = 8 * 1024  # bytes of shared memory that a program needs beside its tiles


@dataclass(frozen=True)
class Chunks:
    """Keys of a chunk, by the position of the first new token: `shortest`, and twice as many from each of `turns` on.
    All are multiples of a tile's keys."""

    shortest: int
    turns: tuple[int, ...]

    def room(self, slots: int, tokens: int) -> int:
        """Chunks that a row of so many slots can have, when its last `tokens` are new: they may begin before a turning
        point and end behind it."""
        ends = [turn + tokens - 1 for turn in self.turns] + [slots]
        return max(math.ceil(min(slots, end) / (self.shortest << i)) for i, end in enumerate(ends))


def turning_points(heads_kv: int, head_dim: int) -> tuple[int, ...]:
    """Positions at which the chunks of a model double: the fewer channels it reads of a token, the more chunks it takes
    to occupy the chip."""
    return tuple(turn * CHANNELS // (heads_kv * head_dim) for turn in TURNS)


@dataclass(frozen=True)
class Plan:
    """How a cache is read: keys of its chunks and of a tile, warps of a program, stages of the pipeline that prefetches
    tiles, programs for each multiprocessor, and the limit on a thread's registers (None: the hardware's) under which
    so many programs of one tile of rows fit."""

    chunks: Chunks
    keys: int
    warps: int
    stages: int
    programs: int
    registers: int | None = None


# Small, so that short caches have several chunks, of several kinds.
INTERPRETER = Plan(Chunks(32, (96, 192, 384, 768, 1536)), keys=32, warps=4, stages=1, programs=1)


def tile_bytes(keys: int, head_dim: int, element_size: int) -> int:
    """Shared memory of one tile of K and of V."""
    return 2 * keys * triton.next_power_of_2(head_dim) * element_size


def programs_that_fit(keys: int, stages: int, head_dim: int, element_size: int, shared_memory: int) -> int:
    """Programs that one multiprocessor holds at a time by their tiles in shared memory, at most 4."""
    used = max(stages - 1, 1) * tile_bytes(keys, head_dim, element_size) + OTHER_SHARED
    return min(max(shared_memory // used, 1), 4)


def plan_for_chip(heads_kv: int, head_dim: int, element_size: int, shared_memory: int) -> Plan:
    """The Plan for a cache `[B, heads_kv, S, head_dim]` of elements of so many bytes, on a chip with so many bytes of
    shared memory a program.

    Nothing else may come in, or a row's bits would depend on the size of its batch or of its cache. Chosen by
    `python -m bench.decode_attention --sweep` on an H200.
    """
    keys = min(max(8192 // triton.next_power_of_2(head_dim), 32), 64)
    stages = 1  # fp32 is for exactness, not for speed
    if element_size < 4:  # one tile is being worked on, the others are on their way
        stages = min(3, 1 + (shared_memory - OTHER_SHARED) // tile_bytes(keys, head_dim, element_size))
    # Bytes become numbers by arithmetic, which wants more warps to wait with; the words of 16 bits want registers.
    most, registers = (4, 128) if element_size == 1 and 64 < head_dim <= 128 else (2, None)
    programs = min(programs_that_fit(keys, stages, head_dim, element_size, shared_memory), most)
    return Plan(Chunks(SHORTEST, turning_points(heads_kv, head_dim)), keys, 4, stages, programs, registers)


def plan_for(heads_kv: int, head_dim: int, element_size: int, device: torch.device) -> Plan:
    """`plan_for_chip` of the device a cache is on."""
    if device.type == "cpu":
        return INTERPRETER
    return plan_for_chip(heads_kv, head_dim, element_size, device_limits(device.index)[0])


def combine_options(chunks: int, head_dim: int) -> tuple[int, int, dict]:
    """Channels of a program of combine_kernel, log2 of its runs, and what else it is launched with: two numbers of each
    of 16 chunks in a thread's registers, where four warps are enough for that."""
    log_runs = max(0, (triton.cdiv(chunks, RUN) - 1).bit_length())
    block_d = min((64, 32, 32, 32, 16)[min(log_runs, 4)], triton.next_power_of_2(head_dim))
    steps = min(RUN, triton.next_power_of_2(chunks))
    warps = min(4, max(1, (block_d << log_runs) // 64))
    unroll = min(16, max(2, 1024 * warps // (block_d << log_runs)), steps)
    return block_d, log_runs, dict(STEPS=steps, UNROLL=unroll, num_warps=warps)
