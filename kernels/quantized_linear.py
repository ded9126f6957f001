"""decode_linear's kernel for weights of 8 and 4 bits: from memory to the matrix unit with nothing to shuffle.

Half the bytes, or a quarter, are to be read in half the time, or a quarter; with the same unpacking, address arithmetic
and trips through shared memory for each weight they would not be. So the weights lie in memory in the order in which
the lanes of a warp hold the left operand of the matrix instruction (m16n8k16), and each lane loads its own into
registers, 16 bytes at a time, some steps ahead. Shared memory is used once, to add up the warps' sums.

The layout. A chunk is 16 rows x 32 bytes, 512 bytes that a warp reads with one instruction. Two instructions multiply
it (int4: four). The terms of a product may be taken in any order, so a lane's columns are chosen to be neighbours:

                    columns (bytes) of a chunk                       the 16 bytes of lane 4 r + j
                 0 ... 7 | 8 ... 15 | 16 ... 23 | 24 ... 31
     row r       lane 4r |  4r + 1  |  4r + 2   |  4r + 3            row r:      8 j + 0 ... 7      as two words
     row r + 8   lane 4r |  4r + 1  |  4r + 2   |  4r + 3            row r + 8:  8 j + 0 ... 7      as two words

    a word: columns c, c + 2, c + 1, c + 3 from its lowest byte on, c = 8 j or 8 j + 4

so that an AND leaves two weights with 16 bits for each, as the instruction wants them; unpack.py makes numbers of them
that are a power of two too small, which goes back into the scale. Columns 8 j ... 8 j + 7 of row r of x are what the
lane needs of the right operand: in its natural order, also one load of 16 bytes.

Bits. A row of x is a column of the matrix instruction; its sum over K is cut into slices as in decode_linear.py. For
more than eight rows the same weights are multiplied once more, by a product of their own. So a row's bits depend on the
number of slices alone; panels, steps ahead, rows of x and their number change nothing.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kernels.interpreter import INTERPRETED
from kernels.linear_epilogue import add_slices, finish
from kernels.overlap import launch_options, wait_for_the_kernel_before
from kernels.quantize import CHUNK_COLUMNS, Weight
from kernels.unpack import load_chunks, unpack

ROWS = 8  # of x in a product: columns of the matrix instruction


@dataclass(frozen=True)
class Tiling:
    """panels: of 16 rows that a program owns. slices: chunks of a step, each with a warp of its own. ahead: steps of
    W on their way to registers while one is multiplied. unroll: steps written out in the loop, so that registers need
    not be moved down the queue. registers: limit for each thread, so that one more program shares a multiprocessor."""

    panels: int
    slices: int
    ahead: int
    unroll: int = 1
    registers: int | None = None


# As in decode_linear.py: the class of a matrix [N, K] is the first that it fits into, and decides the slices.
# `python -m bench.decode_linear --sweep` times the candidates.
CLASSES = ((4096, 1024), (4096, 2**31), (12288, 2**31), (2**31, 2**31))
TABLE = {  # bits of a weight -> a Tiling for each class
    8: (Tiling(1, 8, 4, 2), Tiling(1, 16, 4, 2), Tiling(2, 8, 4, 4), Tiling(4, 4, 2, 2, registers=128)),
    4: (Tiling(1, 4, 8, 4), Tiling(2, 16, 2), Tiling(1, 8, 4, 2), Tiling(2, 4, 4, 2)),
}  # fmt: skip
FP32 = Tiling(1, 4, 1)  # x in fp32: plain multiply-adds, for exactness and not for speed


def class_of(N: int, K: int) -> int:
    """Index into CLASSES."""
    return next(i for i, (most_rows, most_columns) in enumerate(CLASSES) if N <= most_rows and K <= most_columns)


def tiling_for(weight: Weight, dtype: torch.dtype) -> Tiling:
    """The entry of TABLE for a matrix and the dtype of x."""
    return FP32 if dtype == torch.float32 else TABLE[weight.bits][class_of(*weight.shape)]


def for_rows(tiling: Tiling, rows: int) -> Tiling:
    """The same for so many rows of x: more than eight take twice the registers. Slices, so bits, stay."""
    return tiling if rows <= ROWS else replace(tiling, panels=max(1, tiling.panels // 2), registers=None)


# The letters below: a chunk has rows 8 m + r and columns 8 j + 4 s + 2 a + k. r and j: the lanes of the matrix
# instruction; m, a and k: registers of a lane; s: the first instruction or the second. Permutations rename registers.


@triton.jit
def left_operand(v, SLICES: tl.constexpr, PANELS: tl.constexpr):
    """Columns c ... c + 3 of each word [SLICES, PANELS, 128] -> [SLICES, 16 PANELS, 32]."""
    v = tl.join(tl.join(v[0], v[1]), tl.join(v[2], v[3]))  # slice, panel, word, k, a
    v = tl.reshape(v, [SLICES, PANELS, 8, 4, 2, 2, 2, 2])  # slice, panel, r, j, s, m, k, a
    v = tl.permute(v, (0, 1, 5, 2, 7, 3, 4, 6))  # slice, panel, m, r, a, j, s, k
    return tl.reshape(v, [SLICES, PANELS * 16, 32])


@triton.jit
def right_operand(x, SLICES: tl.constexpr):
    """x [8, SLICES, 32] -> [SLICES, 32, 8], its columns in the order of `left_operand`."""
    x = tl.reshape(x, [8, SLICES, 4, 2, 2, 2])  # row, slice, j, s, a, k
    x = tl.permute(x, (1, 4, 2, 3, 5, 0))  # slice, a, j, s, k, row
    return tl.reshape(x, [SLICES, 32, 8])


@triton.jit
def add_squares(total, x, SLICES: tl.constexpr):
    """total [SLICES, 8, 8] + x x^T. The diagonal is wanted; the matrix unit adds in an order that no layout changes."""
    x = tl.reshape(x, [8, SLICES, 4, 2, 2, 2])  # row, slice, j, s, a, k
    x = tl.permute(x, (1, 3, 4, 2, 5, 0))  # slice, s, a, j, k, row: registers again, for an operand loaded as it is
    x = tl.reshape(x, [SLICES, 32, 8])
    return tl.dot(tl.permute(x, (0, 2, 1)), x, total, input_precision="ieee")


@triton.jit
def load_x(x, norm, row, k, stride_x, M, K, TILES: tl.constexpr, HALVES: tl.constexpr, EVEN: tl.constexpr):
    """Columns k [SLICES, 32] of x, of eight rows at a time [8, SLICES, 32]: a tuple over TILES of rows and, within,
    over HALVES of a chunk, 32 columns apart. And those of the norm's weight, a tuple over HALVES."""
    tiles = ()
    factors = ()
    for half in tl.static_range(HALVES):
        column = (k + 32 * half)[None, :, :]
        if norm is not None:
            at = norm + column + tl.zeros([8, 1, 1], tl.int32)
            if EVEN:
                factors = factors + (tl.load(at),)
            else:
                factors = factors + (tl.load(at, mask=column < K, other=0.0),)
    for tile in tl.static_range(TILES):
        for half in tl.static_range(HALVES):
            column = (k + 32 * half)[None, :, :]
            at = x + (row + 8 * tile).to(tl.int64)[:, None, None] * stride_x + column
            inside = (row + 8 * tile < M)[:, None, None]
            if not EVEN:
                inside = inside & (column < K)
            tiles = tiles + (tl.load(at, mask=inside, other=0.0),)
    return tiles, factors


@triton.jit
def load_scales(scales, panel, start, chunks, N, SLICES: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr):
    """int4's scales for chunks start ... [SLICES, PANELS, 64 (r, j, m)], those of one j being equal: a tuple of one, or
    with groups of 32 of two, for the halves of the chunks."""
    lane = tl.arange(0, 64)
    column = panel[None, :, None] * 16 + (lane // 8 * 2 + lane % 2)[None, None, :]
    chunk = (start + tl.arange(0, SLICES))[:, None, None]
    found = ()
    for half in tl.static_range(2 if GROUP == 32 else 1):
        at = scales + (chunk * 64 + 32 * half) // GROUP * N + column
        if EVEN:
            found = found + (tl.load(at),)
        else:
            found = found + (tl.load(at, mask=chunk < chunks, other=0.0),)
    return found


@triton.jit
def scale_of_sums(scale, SLICES: tl.constexpr, PANELS: tl.constexpr):
    """Scales as loaded -> fp32 [SLICES, 16 PANELS, 8], for sums of eight rows, of which a lane holds two."""
    scale = tl.permute(tl.reshape(scale, [SLICES, PANELS, 8, 4, 2]), (0, 1, 4, 2, 3))  # slice, panel, m, r, j
    scale = tl.reshape(scale, [SLICES, PANELS * 16, 4, 1])
    scale = tl.broadcast_to(scale, [SLICES, PANELS * 16, 4, 2])
    return tl.reshape(scale, [SLICES, PANELS * 16, 8]).to(tl.float32)


@triton.jit
def times(x, factor):
    """x * factor, rounded once, to x's dtype."""
    return (x.to(tl.float32) * factor.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize=["M"])
def quantized_linear_kernel(
    x, w, scales, norm, bias, residual, out, M, N, K, stride_x, stride_w, stride_residual, stride_out, eps,
    PANELS: tl.constexpr, SLICES: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr, SWIGLU: tl.constexpr,
    EVEN: tl.constexpr, AHEAD: tl.constexpr, UNROLL: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (i, j): rows 8 TILES i ... of x with panels PANELS j ... of W, so that the programs that share a part of
    W run together and one reads it from memory. GROUP: 0 for int8."""
    NORM: tl.constexpr = norm is not None
    BITS: tl.constexpr = 4 if GROUP else 8
    HALVES: tl.constexpr = 2 if GROUP else 1  # parts of a chunk, 32 columns each
    WIDTH: tl.constexpr = 32 * HALVES
    BLOCK_N: tl.constexpr = 16 * PANELS
    padded_n = (N + 15) // 16 * 16
    first = tl.program_id(0) * (8 * TILES)
    row = first + tl.arange(0, 8)
    panel = tl.minimum(tl.program_id(1) * PANELS + tl.arange(0, PANELS), padded_n // 16 - 1)
    chunks = (K + WIDTH - 1) // WIDTH
    k = tl.arange(0, SLICES)[:, None] * WIDTH + tl.arange(0, 32)[None, :]

    # No kernel writes weights between two steps, so their first ones are asked for while the kernel before still runs.
    ring = (load_chunks(w, panel, stride_w, 0, chunks, SLICES),)
    for i in tl.static_range(1, AHEAD):
        ring = ring + (load_chunks(w, panel, stride_w, i * SLICES, chunks, SLICES),)
    wait_for_the_kernel_before(OVERLAP)
    next_x, next_factors = load_x(x, norm, row, k, stride_x, M, K, TILES, HALVES, EVEN)
    next_scales = ()
    if GROUP:
        next_scales = load_scales(scales, panel, 0, chunks, padded_n, SLICES, GROUP, EVEN)

    zero = tl.zeros([SLICES, BLOCK_N, 8], tl.float32)
    sums = (zero,) * TILES
    squares = (tl.zeros([SLICES, 8, 8], tl.float32),) * TILES
    last = (chunks - 1) // SLICES * SLICES
    for start in tl.range(0, chunks, SLICES, num_stages=1, loop_unroll_factor=UNROLL):
        packed = ring[0]
        ring = ring[1:] + (load_chunks(w, panel, stride_w, start + AHEAD * SLICES, chunks, SLICES),)
        tiles, factors, group_scales = next_x, next_factors, next_scales
        after = tl.minimum(start + SLICES, last)
        next_x, next_factors = load_x(x, norm, row, after * WIDTH + k, stride_x, M, K, TILES, HALVES, EVEN)
        if GROUP:
            next_scales = load_scales(scales, panel, after, chunks, padded_n, SLICES, GROUP, EVEN)

        new_squares = ()
        rights = ()
        for tile in tl.static_range(TILES):
            square = squares[tile]
            for half in tl.static_range(HALVES):
                right = tiles[tile * HALVES + half]
                if NORM:
                    square = add_squares(square, right, SLICES)
                    right = times(right, factors[half])
                rights = rights + (right_operand(right, SLICES),)
            new_squares = new_squares + (square,)
        squares = new_squares

        parts = unpack(packed, BITS, x.dtype.element_ty, PTX)
        new_sums = ()
        for tile in tl.static_range(TILES):
            total = sums[tile]
            product = zero
            for half in tl.static_range(HALVES):
                left = left_operand(parts[half], SLICES, PANELS)
                right = rights[tile * HALVES + half]
                if GROUP == 0:
                    total = tl.dot(left, right, total, input_precision="ieee")
                elif GROUP == 32:
                    product = tl.dot(left, right, zero, input_precision="ieee")
                    total += product * scale_of_sums(group_scales[half], SLICES, PANELS)
                else:
                    product = tl.dot(left, right, product, input_precision="ieee")
            if GROUP > 32:
                total += product * scale_of_sums(group_scales[0], SLICES, PANELS)
            new_sums = new_sums + (total,)
        sums = new_sums

    for tile in tl.static_range(TILES):
        y = add_slices(sums[tile], SLICES, BLOCK_N, 8)
        if GROUP:
            y = y * 64.0
        else:
            n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
            y = y * 128.0 * tl.load(scales + n, mask=n < N, other=0.0)[:, None]
        finish(
            y, squares[tile], bias, residual, out, tl.program_id(1), first + 8 * tile, M, N, K, stride_residual,
            stride_out, eps, SLICES, BLOCK_N, 8, NORM, SWIGLU,
        )  # fmt: skip


def launch(x, weight, norm, eps, bias, residual, swiglu, out, tiling=None):
    """The kernel, on checked arguments; `tiling` replaces the table's entry. Returns `out`."""
    M, (N, K) = x.shape[0], weight.shape
    tiling = for_rows(tiling or tiling_for(weight, x.dtype), M)
    tiles = 1 if M <= ROWS else 2
    width = CHUNK_COLUMNS[weight.bits]
    panels = weight.values.shape[0]
    options = launch_options(x.device)
    if tiling.registers is not None:
        options["maxnreg"] = tiling.registers
    quantized_linear_kernel[(triton.cdiv(M, ROWS * tiles), triton.cdiv(panels, tiling.panels))](
        x, weight.values, weight.scales, norm, bias, residual, out, M, N, K,
        x.stride(0), weight.values.stride(0), 0 if residual is None else residual.stride(0), out.stride(0), eps,
        PANELS=tiling.panels, SLICES=tiling.slices, TILES=tiles, GROUP=weight.group or 0, SWIGLU=swiglu,
        EVEN=K % (tiling.slices * width) == 0, AHEAD=tiling.ahead, UNROLL=tiling.unroll,
        PTX=x.is_cuda and not INTERPRETED and x.dtype == torch.bfloat16, num_warps=tiling.slices, **options,
    )  # fmt: skip
    return out
