"""Finding a filter's threshold over a whole row by many programs; sample.py says when and why.

Let d = -l be a token's depth below the likeliest one. A filter keeps all tokens down to some depth: top-k the smallest
depth that k tokens reach, top-p the smallest one whose tokens have the mass p. Bits of floats from 0 up order as the
floats do, so the search runs over the integers of 31 bits, 64 ways at a time:

    narrow   level 0     |-------|-------|-------|-------|   mass no deeper than each of 64 depths, by block
             level 1             |.|.|.|.|                    the gap in which it is reached, and 64 depths in it
             ...                  ^                           after LEVELS of them it is one depth
    draw                 every block's best token of those that are kept

Each level adds up what the blocks of the level before left, every program for itself, always in the same order.
"""

import triton
import triton.language as tl

from kernels.overlap import wait_for_the_kernel_before
from kernels.sample_kernels import (
    EVERYTHING,
    GREEDY_BELOW,
    LOG_MIN_P,
    MAX,
    PARTIAL,
    PENALTY,
    SETTINGS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    depth,
    draw,
    load_logits,
    stream_of,
)

WAYS = tl.constexpr(64)
WAY_BITS = tl.constexpr(6)
AT_ONCE = tl.constexpr(16)  # ways whose masses a program has in its registers
LEVELS = tl.constexpr(5)
# From 2^-122, which stands for 0, to 64: so many bits. Deeper tokens are never chosen, whatever their noise.
LOWEST = tl.constexpr(0x42800000 - (1 << 30))


@triton.jit
def search(settings, sums, state, level, V, parts, WEIGHTED: tl.constexpr, PARTS: tl.constexpr):
    """Where a row's search stands before a level: the depth that is too small, and the mass that is wanted."""
    low = LOWEST
    wanted = tl.minimum(tl.load(settings + TOP_K), V.to(tl.float32))
    if level > 0:
        part, way = tl.arange(0, PARTS), tl.arange(0, WAYS)
        left = sums + ((level - 1) % 2) * parts * WAYS + part[:, None] * WAYS + way[None, :]
        mass = tl.sum(tl.load(left, mask=part[:, None] < parts, other=0.0), 0)  # [WAYS]
        if WEIGHTED:
            if level == 1:  # the last of the depths is below all
                wanted = tl.load(settings + TOP_P) * tl.sum(tl.where(way == WAYS - 1, mass, 0.0), 0)
            else:
                wanted = tl.load(state + LEVELS).to(tl.float32, bitcast=True)
        if level > 1:
            low = tl.load(state + level - 1)
        low += tl.sum((mass < wanted).to(tl.int32), 0) << (WAY_BITS * (LEVELS - level))
    return low, wanted


@triton.jit(do_not_specialize=["level", "parts", "programs", "rows"])
def narrow_kernel(
    logits, stride, seen, stride_seen, settings, seeds, positions, partial, sums, state, V, programs, parts, rows,
    level, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, PARTS: tl.constexpr, TOP_K_TOO: tl.constexpr,
    WEIGHTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (i, b): columns i of row b, for one level. WEIGHTED: the search for top-p, of what top-k has left if
    TOP_K_TOO; else that for top-k."""
    wait_for_the_kernel_before(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1)
    settings += row * SETTINGS
    temperature = tl.load(settings + TEMPERATURE)
    top_k = tl.load(settings + TOP_K)
    if WEIGHTED:
        used = tl.load(settings + TOP_P) < 1
    else:
        used = top_k > 0
    if used & (temperature >= GREEDY_BELOW):
        logits += row.to(tl.int64) * stride
        if seen is not None:
            seen += row.to(tl.int64) * stride_seen
        program = tl.arange(0, PROGRAMS)
        part_max = tl.load(partial + row * PARTIAL * programs + MAX * programs + program, mask=program < programs,
                           other=float("-inf"))  # fmt: skip
        column = part * BLOCK + tl.arange(0, BLOCK)
        x = load_logits(logits, seen, tl.load(settings + PENALTY), column, column < V)[1]
        deep = depth(x, column < V, tl.max(part_max, 0), temperature)
        if WEIGHTED:
            weight = tl.exp(0.0 - deep.to(tl.float32, bitcast=True))
            if TOP_K_TOO:
                if top_k > 0:
                    limit = search(settings, *of_row(sums, state, row, rows, parts, 0), LEVELS, V, parts, False, PARTS)
                    weight = tl.where(deep <= limit[0] + 1, weight, 0.0)
        else:
            weight = tl.full([BLOCK], 1.0, tl.float32)
        sums, state = of_row(sums, state, row, rows, parts, 1 if WEIGHTED else 0)
        low, wanted = search(settings, sums, state, level, V, parts, WEIGHTED, PARTS)
        if part == 0:
            tl.store(state + level, low)
            if level == 1:
                tl.store(state + LEVELS, wanted.to(tl.int32, bitcast=True))
        sums += ((level % 2) * parts + part) * WAYS
        for first in range(0, WAYS, AT_ONCE):
            way = first + tl.arange(0, AT_ONCE)
            depths = low + ((way + 1) << (WAY_BITS * (LEVELS - 1 - level)))
            mass = tl.where(deep[:, None] <= depths[None, :], weight[:, None], 0.0)  # [BLOCK, AT_ONCE]
            tl.store(sums + way, tl.sum(mass, 0))


@triton.jit
def of_row(sums, state, row, rows, parts, search_of):
    """What belongs to a row's search for top-k (0) or top-p (1): sums [2, parts, WAYS] of a level and of the one
    before; state [LEVELS + 1], where each level began, and the wanted mass."""
    at = search_of * rows + row
    return sums + at.to(tl.int64) * 2 * parts * WAYS, state + at * (LEVELS + 1)


@triton.jit(do_not_specialize=["parts", "programs", "rows"])
def draw_kernel(
    logits, stride, seen, stride_seen, settings, seeds, positions, partial, best_token, sums, state, V, programs, parts,
    rows, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, PARTS: tl.constexpr, BY_TOP_K: tl.constexpr,
    BY_TOP_P: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (i, b): columns i of row b. BY_TOP_K, BY_TOP_P: whether these were searched for."""
    wait_for_the_kernel_before(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1)
    settings += row * SETTINGS
    temperature = tl.load(settings + TEMPERATURE)
    greedy = temperature < GREEDY_BELOW
    temperature = tl.where(greedy, 1.0, temperature)
    logits += row.to(tl.int64) * stride
    if seen is not None:
        seen += row.to(tl.int64) * stride_seen
    partial += row * PARTIAL * programs
    program = tl.arange(0, PROGRAMS)
    part_max = tl.load(partial + MAX * programs + program, mask=program < programs, other=float("-inf"))
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits, seen, tl.load(settings + PENALTY), column, column < V)[1]
    deep = depth(x, column < V, tl.max(part_max, 0), temperature)
    limit = EVERYTHING
    if greedy == 0:
        limit = (0.0 - tl.load(settings + LOG_MIN_P)).to(tl.int32, bitcast=True)
        if BY_TOP_K:
            if tl.load(settings + TOP_K) > 0:
                mine = of_row(sums, state, row, rows, parts, 0)
                limit = tl.minimum(limit, search(settings, *mine, LEVELS, V, parts, False, PARTS)[0] + 1)
        if BY_TOP_P:
            if tl.load(settings + TOP_P) < 1:
                mine = of_row(sums, state, row, rows, parts, 1)
                limit = tl.minimum(limit, search(settings, *mine, LEVELS, V, parts, True, PARTS)[0] + 1)
    scaled = 0.0 - deep.to(tl.float32, bitcast=True)
    draw(
        x, scaled, deep <= limit, column, greedy, stream_of(seeds, positions, row), partial + part,
        best_token + row * programs + part, programs, PTX,
    )  # fmt: skip
