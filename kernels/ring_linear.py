"""decode_linear's kernel for 16-bit weights of small models: from memory straight into the matrix unit's registers.

A matrix of a small model is a few megabytes, which memory delivers in one or two microseconds. What takes longer is the
way: a pipeline through shared memory must fill, and each step through it is waited for. Here each lane loads the
weights that it multiplies itself, 16 bytes at a time, into a queue of registers, the ring. Weights depend on no kernel,
so the first steps of the ring are asked for before the kernel before is over (overlap.py); where K is short, that is
the program's whole share of W, and when x arrives only products remain. Shared memory is used once, to add up the
warps' sums.

The layout is PyTorch's own, row after row. A warp reads a chunk, 8 rows of W x 32 columns, with one instruction:

                    columns of a chunk
                 0 ... 7 | 8 ... 15 | 16 ... 23 | 24 ... 31
     row r       lane 4r |  4r + 1  |  4r + 2   |  4r + 3          16 bytes each, 64 neighbouring bytes of a row

The terms of a product may be taken in any order, so these are the operands of two matrix instructions (m16n8k16), if
column 8 j + 4 s + 2 a + k of the chunk is called column 8 a + 2 j + k of instruction s: the instruction wants of lane
4 r + j columns 2 j, 2 j + 1 and 8 + 2 j, 8 + 2 j + 1 of row r. x is read by the same picture, its rows in the place of
W's, and for a norm's weight all rows are the same. No number changes its lane between memory and product.

x is the left operand, y = x W^T as it is written. Of W then 8 rows fill an instruction, not 16, so that a matrix of 768
rows makes 96 programs; the words a lane has loaded are pairs of registers as the right operand wants them; and the left
operand has 16 rows, so that up to 16 rows of x cost no more instructions than one.

Bits. A row of x is a row of the matrix instruction, whatever the others hold. Its sum over K is cut into slices, one
for each warp, as in decode_linear.py, and goes through a slice's chunks in turn. So the bits depend on slices and
chunks alone, which follow from the matrix; panels, steps ahead, rows of x and their number change nothing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.interpreter import INTERPRETED
from kernels.linear_epilogue import add_slices, finish
from kernels.overlap import launch_options, wait_for_the_kernel_before

ROWS = 8  # of W in a chunk; of x too, and two such are the most that a program takes
COLUMNS = 32  # of a chunk
NARROW, LARGEST = 4096, 2**26  # a smaller side below this, and so many weights at most: what is faster here, see `fits`
ALIGNED = 16  # bytes that a lane loads at once


@dataclass(frozen=True)
class Tiling:
    """panels: of eight rows of W that a program owns. slices: of a step of K, each with a warp of its own. chunks: of a
    slice. ahead: steps of W on their way to registers while one is multiplied; None for all there are, before x is
    waited for. x_ahead: likewise of x and the norm's weight, which come from the L2 cache."""

    panels: int
    slices: int
    chunks: int
    ahead: int | None = None
    x_ahead: int = 0


# The class of a matrix [N, K] is the first line that it fits into, as (largest N, largest K), and decides its bits.
# Measured on an H200 in chains of the kernels of a layer; beside the lines the models whose matrices decided them.
# `python -m bench.decode_linear --sweep` times the candidates.
ANY = 2**31
TABLE = (
    (2560, 1024, Tiling(1, 8, 1)),  # 124M qkv, o
    (ANY, 1024, Tiling(4, 8, 1)),  # 124M gate and up, head
    (2560, 2048, Tiling(2, 16, 1)),  # 124M down, 1B o
    (2560, ANY, Tiling(1, 8, 2, ahead=4, x_ahead=2)),  # 1B down
    (8192, ANY, Tiling(2, 8, 1, ahead=4, x_ahead=1)),  # 1B qkv
    (ANY, ANY, Tiling(4, 4, 1, ahead=2)),  # 1B gate and up
)


def class_of(N: int, K: int) -> int:
    """Index into TABLE."""
    return next(i for i, (most_rows, most_columns, _) in enumerate(TABLE) if N <= most_rows and K <= most_columns)


def tiling_for(N: int, K: int) -> Tiling:
    """The entry of TABLE for a matrix."""
    return TABLE[class_of(N, K)][2]


def fits(weight: torch.Tensor, norm: torch.Tensor | None) -> bool:
    """Whether the kernel takes this matrix, and the norm's weight with it. x has no say in it: with more rows, or other
    ones, it has to be the same kernel.

    The line is drawn by the narrower side, so that it runs between models and not through one: this kernel and the
    pipeline in turn are slower than either alone. (The products of a layer of 4096 columns on an H200: 119 us with this
    kernel, 116 with the pipeline, 124 with the pipeline for the largest matrix of the four.) A head with more weights
    than LARGEST takes the pipeline all the same: it comes once a step.
    """
    if weight.dtype not in (torch.bfloat16, torch.float16) or not aligned(weight):
        return False
    if min(weight.shape) >= NARROW or weight.numel() > LARGEST:
        return False
    return norm is None or (norm.dtype == weight.dtype and aligned(norm))


def aligned(x: torch.Tensor) -> bool:
    """Whether each row, contiguous in itself, begins where a lane's loads can."""
    steps = [stride * x.element_size() for stride in x.stride()[:-1]]
    return all(place % ALIGNED == 0 for place in (x.data_ptr(), *steps))


# The letters below: eight rows have the letter r, columns of a chunk are 8 j + 4 s + 2 a + k. r and j: lanes; s: the
# first matrix instruction or the second; a and k: registers of a lane. Permutations rename registers.


@triton.jit
def numbers(words, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """int32 [...], two numbers a word -> [..., 2]."""
    if PTX:
        low, high = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(DTYPE.value,) * 2, is_pure=True, pack=1
        )
    else:
        low = words.to(tl.int16).to(DTYPE, bitcast=True)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def times(x, factor, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Words of two numbers each: their products, rounded once. bf16 has no such instruction before sm_90, but one that
    adds as well, here -0."""
    if PTX:
        if DTYPE == tl.bfloat16:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }", "=r,r,r", [x, factor],
                dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, factor], dtype=tl.int32, is_pure=True, pack=1
            )
    else:
        product = numbers(x, DTYPE, PTX) * numbers(factor, DTYPE, PTX)
        low, high = tl.split(product.to(tl.int16, bitcast=True).to(tl.int32))
        return (low & 0xFFFF) | (high << 16)


@triton.jit
def left_operand(x, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Words [8, slices, tiles, chunks, 16] -> [slices, 8 tiles, 32 chunks]."""
    SLICES: tl.constexpr = x.shape[1]
    TILES: tl.constexpr = x.shape[2]
    CHUNKS: tl.constexpr = x.shape[3]
    x = tl.reshape(numbers(x, DTYPE, PTX), [8, SLICES, TILES, CHUNKS, 4, 2, 2, 2])  # r, slice, tile, chunk, j, s, a, k
    x = tl.permute(x, (1, 2, 0, 3, 6, 4, 5, 7))  # slice, tile, r, chunk, a, j, s, k
    return tl.reshape(x, [SLICES, 8 * TILES, 32 * CHUNKS])


@triton.jit
def right_operand(w, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Words [8, slices, panels, chunks, 16] -> [slices, 32 chunks, 8 panels], columns in the same order."""
    SLICES: tl.constexpr = w.shape[1]
    PANELS: tl.constexpr = w.shape[2]
    CHUNKS: tl.constexpr = w.shape[3]
    w = tl.reshape(numbers(w, DTYPE, PTX), [8, SLICES, PANELS, CHUNKS, 4, 2, 2, 2])  # as above, panel for tile
    w = tl.permute(w, (1, 3, 6, 4, 5, 7, 2, 0))  # slice, chunk, a, j, s, k, panel, r
    return tl.reshape(w, [SLICES, 32 * CHUNKS, 8 * PANELS])


@triton.jit
def load(rows, column, K, EVEN: tl.constexpr):
    """Words `column` [1, SLICES, 1, CHUNKS, 16] of some rows [8, 1, n, 1, 1], of K words each; zeros past their end."""
    if EVEN:
        return tl.load(rows + column)
    else:
        return tl.load(rows + column, mask=column < K, other=0)


@triton.jit
def load_ahead(rows, column, start, K, EVEN: tl.constexpr):
    """The same with a step that may begin past the end: then nothing is read, and nothing uses it."""
    if EVEN:
        return tl.load(rows + (start + column), mask=start < K)
    else:
        return tl.load(rows + (start + column), mask=(start + column) < K, other=0)


@triton.jit
def multiply(x, factor, w, sums, squares, NORM: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """One step: sums [slices, 8 tiles, 8 panels] of (x * factor) w^T, and x x^T, whose diagonal is wanted."""
    if NORM:
        left = left_operand(x, DTYPE, PTX)
        squares = tl.dot(left, tl.permute(left, (0, 2, 1)), squares, input_precision="ieee")
        factor, x = tl.broadcast(factor, x)
        x = times(x, factor, DTYPE, PTX)
    sums = tl.dot(left_operand(x, DTYPE, PTX), right_operand(w, DTYPE, PTX), sums, input_precision="ieee")
    return sums, squares


@triton.jit(do_not_specialize=["M"])
def ring_linear_kernel(
    x, w, norm, bias, residual, out, M, N, K, stride_x, stride_w, stride_residual, stride_out, eps,
    PANELS: tl.constexpr, SLICES: tl.constexpr, CHUNKS: tl.constexpr, TILES: tl.constexpr, STEPS: tl.constexpr,
    AHEAD: tl.constexpr, X_AHEAD: tl.constexpr, SWIGLU: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr,
    PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (i, j): rows 8 TILES i ... of x with panels PANELS j ... of W, as in quantized_linear.py. x, w and norm
    are words of two numbers, stride_x and stride_w count four words, so that every row is seen to begin where a lane's
    loads can. STEPS: all of K, if it is not a loop's; else 0."""
    NORM: tl.constexpr = norm is not None
    BLOCK_N: tl.constexpr = 8 * PANELS
    STEP: tl.constexpr = SLICES * CHUNKS * 16
    words = K // 2
    lane = tl.arange(0, 8)[:, None, None, None, None]
    column = (
        tl.arange(0, SLICES)[None, :, None, None, None] * (CHUNKS * 16)
        + tl.arange(0, CHUNKS)[None, None, None, :, None] * 16
        + tl.arange(0, 16)[None, None, None, None, :]
    )
    # Past the end of W, and of x, the last row is read again: cheaper than a mask, and nothing of it is stored.
    row = tl.program_id(1) * BLOCK_N + lane + tl.arange(0, PANELS)[None, None, :, None, None] * 8
    w_rows = w + tl.minimum(row, N - 1).to(tl.int64) * (stride_w * 4)
    norm_rows = None
    if NORM:
        norm_rows = norm + tl.zeros([8, 1, 1, 1, 1], tl.int32)  # eight times the same

    # No kernel writes weights between two steps, so they are asked for while the kernel before still runs.
    ring = ()
    factors = ()
    for i in tl.static_range(STEPS or AHEAD):
        ring = ring + (load(w_rows, i * STEP + column, words, EVEN),)
        if NORM and STEPS:
            factors = factors + (load(norm_rows, i * STEP + column, words, EVEN),)
    wait_for_the_kernel_before(OVERLAP)

    first = tl.program_id(0) * (8 * TILES)
    row = first + lane + tl.arange(0, TILES)[None, None, :, None, None] * 8
    x_rows = x + tl.minimum(row, M - 1).to(tl.int64) * (stride_x * 4)
    sums = tl.zeros([SLICES, 8 * TILES, BLOCK_N], tl.float32)
    squares = tl.zeros([SLICES, 8 * TILES, 8 * TILES], tl.float32)
    if STEPS:
        tiles = ()
        for i in tl.static_range(STEPS):
            tiles = tiles + (load(x_rows, i * STEP + column, words, EVEN),)
        # To save registers, ptxas would put each load where it is used, and one trip to the cache after another would
        # be waited for. So the first product is made to depend on all of them, by a zero that ptxas cannot know.
        every = tiles[0]
        for i in tl.static_range(1, STEPS):
            every = every | tiles[i]
        tiles = (tiles[0] | (every & (M >> 31)),) + tiles[1:]
        for i in tl.static_range(STEPS):
            factor = factors[i] if NORM else 0
            sums, squares = multiply(tiles[i], factor, ring[i], sums, squares, NORM, DTYPE, PTX)
    else:
        last = (words - 1) // STEP * STEP
        tiles = ()
        for i in tl.static_range(X_AHEAD):
            at = tl.minimum(i * STEP, last)
            tiles = tiles + (load(x_rows, at + column, words, EVEN),)
            if NORM:
                factors = factors + (load(norm_rows, at + column, words, EVEN),)
        # Written out AHEAD times: then each step has registers of its own, and no queue moves.
        for start in tl.range(0, words, STEP, num_stages=1, loop_unroll_factor=AHEAD):
            w_tile = ring[0]
            ring = ring[1:] + (load_ahead(w_rows, column, start + AHEAD * STEP, words, EVEN),)
            at = tl.minimum(start + X_AHEAD * STEP, last)
            tiles = tiles + (load(x_rows, at + column, words, EVEN),)
            x_tile = tiles[0]
            tiles = tiles[1:]
            factor = 0
            if NORM:
                factors = factors + (load(norm_rows, at + column, words, EVEN),)
                factor = factors[0]
                factors = factors[1:]
            sums, squares = multiply(x_tile, factor, w_tile, sums, squares, NORM, DTYPE, PTX)

    y = tl.trans(add_slices(sums, SLICES, 8 * TILES, BLOCK_N))  # [BLOCK_N, 8 TILES]
    finish(
        y, squares, bias, residual, out, tl.program_id(1), first, M, N, K, stride_residual, stride_out, eps,
        SLICES, BLOCK_N, 8 * TILES, NORM, SWIGLU,
    )  # fmt: skip


def constants(tiling: Tiling, rows: int, K: int) -> dict:
    """What a tiling means to the kernel, for so many rows of x and columns of W. More than eight rows of x take twice
    the registers, and go a step less ahead, so that as many programs share a multiprocessor."""
    step = tiling.slices * tiling.chunks * COLUMNS
    steps = triton.cdiv(K, step)
    tiles = 1 if rows <= ROWS else 2
    return dict(
        PANELS=tiling.panels, SLICES=tiling.slices, CHUNKS=tiling.chunks, TILES=tiles,
        STEPS=steps if tiling.ahead is None else 0, AHEAD=min(tiling.ahead or 0, steps),
        X_AHEAD=max(0, tiling.x_ahead + 1 - tiles), EVEN=K % step == 0,
    )  # fmt: skip


def launch(x, weight, norm, eps, bias, residual, swiglu, out, tiling=None):
    """The kernel, on checked arguments that it `fits`; `tiling` replaces the table's entry. Returns `out`.

    A lane loads 16 bytes of x at a time: rows that begin elsewhere are copied first, here.
    """
    M, (N, K) = x.shape[0], weight.shape
    tiling = tiling or tiling_for(N, K)
    if not aligned(x):
        x = x.clone(memory_format=torch.contiguous_format)
    shape = constants(tiling, M, K)
    words, weights = x.view(torch.int32), weight.view(torch.int32)
    ring_linear_kernel[(triton.cdiv(M, ROWS * shape["TILES"]), triton.cdiv(N, ROWS * tiling.panels))](
        words, weights, None if norm is None else norm.view(torch.int32), bias, residual, out, M, N, K,
        words.stride(0) // 4, weights.stride(0) // 4, 0 if residual is None else residual.stride(0), out.stride(0), eps,
        SWIGLU=swiglu, DTYPE=tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16,
        PTX=x.is_cuda and not INTERPRETED, num_warps=tiling.slices, num_stages=1, **shape, **launch_options(x.device),
    )  # fmt: skip
    return out
