"""A few rows times a weight matrix, at the speed of memory: y = x W^T, with what surrounds it in a decoder.

Generating a token multiplies one row (or the few of a batch, or of a speculation) by every weight of the model. Two
operations for each number that is read: the arithmetic is free, and all that counts is that every byte of W is read
once and that enough of them are on their way at any time.

There are three kernels. Which one it is follows from the matrix, never from x:

    8 and 4 bits                      quantized_linear.py    stored in the matrix unit's order, straight to registers
    16 bits, in small models          ring_linear.py         stored row after row, straight to registers
    16 bits, in large ones; fp32      this file              stored row after row, by a pipeline through shared memory

Registers are the shortest way: a matrix of a few megabytes has been read before a pipeline is full. But shared memory
has room for more that is on its way, and the longer a matrix is, the more that counts. On an H200 the four products of
a layer of 768, 2048 and 4096 columns take 8.0, 36 and 119 us from registers, 11.1, 44 and 116 by the pipeline. The line
is between the last two (`ring_linear.fits`).

The tiling of all three. A program owns BLOCK_N rows of W, all of K, and a tile of ROWS rows of x. It walks K in steps;
each step is cut into SLICES, and every slice has a product and an accumulator of its own:

                  K ->        step 0                      step 1
                   | slice 0 | slice 1 | ... | slice 0 | slice 1 | ...        acc[0] += W[:, slice 0] x[:, slice 0]^T
      BLOCK_N rows | ░░░░░░░ | ▒▒▒▒▒▒▒ |     | ░░░░░░░ | ▒▒▒▒▒▒▒ |            acc[1] += W[:, slice 1] x[:, slice 1]^T
                                                                              y = acc[0] + acc[1] + ...

A warp takes whole slices. So K is split over the warps of a program, not over programs: a narrow matrix still keeps
many warps busy with short chains of products, the sum at the end never leaves the chip, and no memory has to be
cleared or counted between launches. In this file tiles of W come by asynchronous copies, several steps ahead.

What is fused. RMSNorm on the way in: scaling a row commutes with the product, so x * norm is multiplied while x^2 is
summed, and the row is divided by its root mean square at the end. On the way out: bias, SwiGLU (rows of gate and up in
turn, see `pack_gate_up`), residual: the code of linear_epilogue.py, the same for all three.

A row's bits never depend on how many rows there are: rows of x are columns of the matrix instruction (m16n8k16), or its
rows, each with its own sums, in an order that is a function of the matrix alone. One token decoded alone and the same
token verified as one of five agree to the last bit, which makes speculation exact.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import reference
from kernels.quantize import Weight, dequantize

try:
    import triton
except ImportError:  # no Triton for this system: plain PyTorch does the work
    triton = None
else:
    import triton.language as tl

    from kernels import quantized_linear, ring_linear, unpack
    from kernels.linear_epilogue import add_slices, finish
    from kernels.overlap import launch_options, wait_for_the_kernel_before
    from kernels.tiles import device_limits, family

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MULTIPLE = 16  # N and K must be multiples of it: one matrix instruction, and copies of 16 bytes


@dataclass(frozen=True)
class Tiling:
    """block_n: rows of W a program owns. block_k: columns of a slice. slices: slices of a step. warps, stages: of a
    program and its pipeline."""

    block_n: int
    block_k: int
    slices: int
    warps: int
    stages: int


# A function of the matrix alone, never of x: it decides in which order a row's terms are added. The class of a matrix
# is the first of CLASSES, the largest N, that it fits into. `python -m bench.decode_linear --sweep` times candidates.
CLASSES = (12288, 2**31)
TABLE = (Tiling(16, 128, 4, 4, 3), Tiling(32, 128, 4, 4, 3))  # for weights of 16 bits
FP32 = Tiling(16, 32, 4, 4, 1)  # x in fp32: plain multiply-adds, for exactness and not for speed


def class_of(N: int) -> int:
    """Index into CLASSES."""
    return next(i for i, most_rows in enumerate(CLASSES) if N <= most_rows)


def tiling_for(weight: Weight, norm: Tensor | None = None):
    """For a matrix that is not quantised: a Tiling of the kernel that takes it, this file's or ring_linear.py's."""
    if weight.values.dtype == torch.float32:
        return FP32
    if ring_linear.fits(weight.values, norm):
        return ring_linear.tiling_for(*weight.shape)
    return TABLE[class_of(weight.shape[0])]


def stages_for(tiling: Tiling, shared_memory: int) -> int:
    """Steps in flight on a chip with this much shared memory a program, in bytes. They change no bits."""
    return tiling.stages if family(shared_memory) == "hopper" else min(tiling.stages, 2)


if triton is not None:

    @triton.jit
    def load_x(x, norm, start, offsets, row, stride_x, M, K, squares, NORM: tl.constexpr, EVEN: tl.constexpr):
        """A step of x [SLICES, ROWS, columns] times the norm's weight; its products with itself join `squares`.

        Sums of squares are the diagonal of x x^T. The matrix unit makes them, like the result, in an order that no
        choice of layout can change.
        """
        column = start + offsets
        inside = (row < M)[None, :, None]
        if not EVEN:
            inside = inside & (column < K)[:, None, :]
        tile = tl.load(x + row.to(tl.int64)[None, :, None] * stride_x + column[:, None, :], mask=inside, other=0.0)
        if NORM:
            if EVEN:
                factor = tl.load(norm + column)
            else:
                factor = tl.load(norm + column, mask=column < K, other=0.0)
            squares = tl.dot(tile, tl.permute(tile, (0, 2, 1)), squares, input_precision="ieee")
            tile = (tile.to(tl.float32) * factor.to(tl.float32)[:, None, :]).to(tile.dtype)
        return tile, squares

    @triton.jit(do_not_specialize=["M"])
    def decode_linear_kernel(
        x, w, norm, bias, residual, out, M, N, K, stride_x, stride_w, stride_residual, stride_out, eps,
        BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr,
        SWIGLU: tl.constexpr, EVEN: tl.constexpr, OVERLAP: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """Program (i, j): rows i of x with rows j of W; the programs that share a part of W run together, so that it
        is read from memory once. `norm`, `bias`, `residual`: None for without."""
        NORM: tl.constexpr = norm is not None
        block = tl.program_id(1)
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        first_row = tl.program_id(0) * ROWS
        row = first_row + tl.arange(0, ROWS)
        # Past the end the last row is read again: cheaper than a mask, and nothing of it is stored.
        w_rows = w + tl.minimum(n, N - 1).to(tl.int64)[None, :, None] * stride_w
        k = tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        wait_for_the_kernel_before(OVERLAP)
        acc = tl.zeros([SLICES, BLOCK_N, ROWS], tl.float32)
        squares = tl.zeros([SLICES, ROWS, ROWS], tl.float32)
        for start in tl.range(0, K, SLICES * BLOCK_K, num_stages=STAGES):
            at = start + k
            if EVEN:
                w_tile = tl.load(w_rows + at[:, None, :])
            else:
                w_tile = tl.load(w_rows + at[:, None, :], mask=(at < K)[:, None, :], other=0)
            x_tile, squares = load_x(x, norm, start, k, row, stride_x, M, K, squares, NORM, EVEN)
            acc = tl.dot(w_tile, tl.permute(x_tile, (0, 2, 1)), acc, input_precision="ieee")
        y = add_slices(acc, SLICES, BLOCK_N, ROWS)  # [BLOCK_N, ROWS]
        finish(
            y, squares, bias, residual, out, block, first_row, M, N, K, stride_residual, stride_out, eps,
            SLICES, BLOCK_N, ROWS, NORM, SWIGLU,
        )  # fmt: skip


def launch(x, weight, norm, eps, bias, residual, swiglu, out, tiling=None):
    """The kernel for the weight, on checked arguments; `tiling` replaces its table's entry. Returns `out`."""
    if weight.scales is not None:
        return quantized_linear.launch(x, weight, norm, eps, bias, residual, swiglu, out, tiling)
    tiling = tiling or tiling_for(weight, norm)
    if isinstance(tiling, ring_linear.Tiling):
        return ring_linear.launch(x, weight.values, norm, eps, bias, residual, swiglu, out, tiling)
    M, (N, K) = x.shape[0], weight.shape
    # Eight columns are the instruction's width. Sixteen read W once for up to sixteen rows, with the same sums.
    rows = 8 if M <= 8 else 16
    stages = stages_for(tiling, device_limits(x.device.index)[0]) if x.is_cuda else 1
    decode_linear_kernel[(triton.cdiv(M, rows), triton.cdiv(N, tiling.block_n))](
        x, weight.values, norm, bias, residual, out, M, N, K,
        x.stride(0), weight.values.stride(0), 0 if residual is None else residual.stride(0), out.stride(0), eps,
        BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, SLICES=tiling.slices, ROWS=rows, SWIGLU=swiglu,
        EVEN=K % (tiling.slices * tiling.block_k) == 0, STAGES=stages,
        num_warps=tiling.warps, num_stages=stages, **launch_options(x.device),
    )  # fmt: skip
    return out


def decode_linear(
    x: Tensor,
    weight: Weight | Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = act(rmsnorm(x) W^T + bias) + residual for a few rows, without gradients; accumulated in fp32.

    A row of the result has the same bits whatever M is.

    Args:
        x: [M, K], bf16, fp16 or fp32, rows contiguous.
        weight: [N, K], quantised or in x's dtype. N and K are multiples of 16.
        norm: [K], weight of an RMSNorm of x, with `eps` under its root; x * norm is rounded to x's dtype.
        bias: [N].
        residual: [M, N'], added last.
        swiglu: the rows of weight are gate and up in turn (`pack_gate_up`); y = silu(gate) * up and N' = N / 2.
            Otherwise N' = N.
        out_dtype: of the result (None: x's).
        out: [M, N'] to write into instead; may be `residual` itself, in place.

    Returns [M, N']. Raises ValueError, with what would fit, for what does not.
    On a GPU this is one of the three kernels above; elsewhere its definition in reference.py.
    """
    if isinstance(weight, Tensor):
        weight = Weight(weight)
    _check(x, weight, norm, bias, residual, swiglu, out)
    width = weight.shape[0] // 2 if swiglu else weight.shape[0]
    if out is None:
        out = x.new_empty(x.shape[0], width, dtype=out_dtype or x.dtype)
    if x.shape[0] == 0:
        return out
    if x.is_cuda and triton is not None:
        with torch.cuda.device_of(x):  # Triton launches on the current device, wherever the tensors are
            return launch(x, weight, norm, eps, bias, residual, swiglu, out)
    if x.is_cuda:
        warnings.warn("decode_linear: Triton is not installed; PyTorch's own products take its place", stacklevel=2)
    return out.copy_(reference.decode_linear(x, weight, norm, eps, bias, residual, swiglu))


def unpacked(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] in dtype, for products with so many rows that PyTorch's are faster: as it is stored if it is
    not quantised, otherwise a copy, rounded from fp32."""
    if weight.scales is not None and weight.values.is_cuda and triton is not None:
        with torch.cuda.device_of(weight.values):
            return unpack.unpacked(weight, dtype)
    return dequantize(weight, dtype=dtype)


def _check(x, weight, norm, bias, residual, swiglu, out):
    def refuse(sentence):
        raise ValueError(f"decode_linear: {sentence}")

    N, K = weight.shape
    if x.dim() != 2 or x.shape[1] != K or x.stride(1) != 1:
        refuse(f"x must be [rows, {K}], each row contiguous; got {tuple(x.shape)} with strides {x.stride()}")
    if x.dtype not in DTYPES:
        refuse(f"x must be bfloat16, float16 or float32; got {x.dtype}")
    if weight.scales is None and weight.values.dtype != x.dtype:
        refuse(f"weight must have x's dtype, {x.dtype}, or be quantised; got {weight.values.dtype}")
    if weight.scales is None and weight.values.stride(1) != 1:
        refuse("the rows of weight must be contiguous")
    if N % MULTIPLE or K % MULTIPLE or min(N, K) < MULTIPLE:
        refuse(f"both sides of the weight must be multiples of {MULTIPLE}; got {(N, K)}")
    shape = (x.shape[0], N // 2 if swiglu else N)
    for name, tensor, wanted in (
        ("norm", norm, (K,)), ("bias", bias, (N,)), ("residual", residual, shape), ("out", out, shape)
    ):  # fmt: skip
        if tensor is not None and (tensor.shape != wanted or tensor.stride(-1) != 1 or tensor.device != x.device):
            refuse(f"{name} must be {wanted} on {x.device}, its last dimension contiguous; got {tuple(tensor.shape)}")
    if weight.values.device != x.device:
        refuse(f"weight must be on {x.device} like x; it is on {weight.values.device}")
