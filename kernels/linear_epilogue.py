"""What the kernels of decode_linear do after their products: one code for all weights, so that fusions agree."""

import triton
import triton.language as tl


@triton.jit
def add_slices(partial, SLICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[SLICES, ROWS, COLUMNS] -> [ROWS, COLUMNS] by halves: an order written down; tl.sum's is the layout's."""
    total = tl.permute(partial, (1, 2, 0))
    for level in tl.static_range(6):
        if SLICES >> level > 1:
            even, odd = tl.split(tl.reshape(total, [ROWS, COLUMNS, SLICES >> (level + 1), 2]))
            total = even + odd
    return tl.reshape(total, [ROWS, COLUMNS])


@triton.jit
def finish(
    y, squares, bias, residual, out, block, first_row, M, N, K, stride_residual, stride_out, eps,
    SLICES: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """Divide by the root mean square, add the bias, gate, add the residual, store.

    y [BLOCK_N, ROWS]: sums of outputs `block` * BLOCK_N ... for rows `first_row` ... of x.
    squares [SLICES, ROWS, ROWS]: x x^T, whose diagonal holds the sums of squares. Read with NORM only.
    """
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = first_row + tl.arange(0, ROWS)
    if NORM:
        index = tl.arange(0, ROWS)
        products = add_slices(squares, SLICES, ROWS, ROWS)
        diagonal = tl.sum(tl.where(index[:, None] == index[None, :], products, 0.0), 0)
        y = y * tl.rsqrt(diagonal / K + eps)[None, :]
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(y, [BLOCK_N // 2, 2, ROWS]), (0, 2, 1)))
        y = gate / (1.0 + tl.exp(-gate)) * up
        n = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        N = N // 2
    stored = (n < N)[:, None] & (row < M)[None, :]
    wide_row = row.to(tl.int64)[None, :]
    if residual is not None:
        y += tl.load(residual + wide_row * stride_residual + n[:, None], mask=stored, other=0.0).to(tl.float32)
    tl.store(out + wide_row * stride_out + n[:, None], y.to(out.dtype.element_ty), mask=stored)
