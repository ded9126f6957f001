"""A few rows times a weight matrix, at the speed of memory: y = x W^T, with what surrounds it in a decoder.

Generating a token multiplies one row (or the few of a batch, or of a speculation) by every weight of the model. Two
operations for each number that is read: the arithmetic is free, and all that counts is that every byte of W is read
once and that enough of them are on their way at any time.

The tiling. A program owns BLOCK_N rows of W, all of K, and a tile of ROWS rows of x. It walks K in steps; each step is
cut into SLICES, and every slice has a product and an accumulator of its own:

                  K ->        step 0                      step 1
                   | slice 0 | slice 1 | ... | slice 0 | slice 1 | ...        acc[0] += W[:, slice 0] x[:, slice 0]^T
      BLOCK_N rows | ░░░░░░░ | ▒▒▒▒▒▒▒ |     | ░░░░░░░ | ▒▒▒▒▒▒▒ |            acc[1] += W[:, slice 1] x[:, slice 1]^T
                                                                              y = acc[0] + acc[1] + ...

A warp takes whole slices. So K is split over the warps of a program, not over programs: a narrow matrix still keeps
many warps busy with short chains of products, the sum at the end never leaves the chip, and no memory has to be
cleared or counted between launches. Tiles of W come by asynchronous copies, several steps ahead.

What is fused. RMSNorm on the way in: scaling a row commutes with the product, so x * norm is multiplied while x^2 is
summed, and the row is divided by its root mean square at the end. On the way out: bias, SwiGLU (rows of gate and up in
turn, see `pack_gate_up`), residual. Quantised weights become bf16 in registers; their scales multiply the sums.

A row's bits never depend on how many rows there are: rows are columns of the matrix instruction (m16n8k16), each with
its own sums, in an order that is a function of the matrix alone. One token decoded alone and the same token verified
as one of five agree to the last bit, which makes speculation exact.
"""

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels import reference
from kernels.quantize import Weight

try:
    import triton
except ImportError:  # no Triton for this system: plain PyTorch does the work
    triton = None
else:
    import triton.language as tl

    from kernels.interpreter import INTERPRETED
    from kernels.overlap import launch_options, wait_for_the_kernel_before
    from kernels.tiles import device_limits, family

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MULTIPLE = 16  # N and K must be multiples of it: one matrix instruction, and copies of 16 bytes


@dataclass(frozen=True)
class Tiling:
    """block_n: rows of W a program owns. block_k: columns of a slice (int4: the group takes its place, and `slices`
    follows, so that a step stays as long). slices: slices of a step. warps, stages: of a program and its pipeline.
    prefetch: bring the first steps of W into the L2 cache while the kernel before still runs (Hopper, see overlap.py):
    it pays where a kernel is over before its pipeline is full."""

    block_n: int
    block_k: int
    slices: int
    warps: int
    stages: int
    prefetch: bool = False

    def for_group(self, group: int | None) -> "Tiling":
        if group is None:
            return self
        slices = max(1, self.block_k * self.slices // group)
        if self.stages == 1:
            return replace(self, block_k=group, slices=slices)
        # Two scales for each thread at least: copies of 2 bytes cannot be asynchronous.
        block_n = max(self.block_n, group // 4)
        slices = max(slices, 64 * self.warps // block_n)
        # With groups of 128 and sixteen rows of x a fourth step no longer fits into shared memory.
        stages = min(self.stages, 3) if group > 64 else self.stages
        return replace(self, block_n=block_n, block_k=group, slices=slices, stages=stages)


# A function of the matrix alone, never of x: it decides in which order a row's terms are added. The class of a matrix
# [N, K] is the first of CLASSES, as (largest N, largest K), that it fits into: a short one, which is all latency; one
# with few rows, which needs the narrowest programs to fill the chip; a middling one; a wide one.
# `python -m bench.decode_linear --sweep` times the candidates.
CLASSES = ((4096, 1024), (3072, 2**31), (12288, 2**31), (2**31, 2**31))
TABLE = {  # bits of a weight -> a Tiling for each class
    16: (
        Tiling(16, 64, 4, 4, 4, prefetch=True), Tiling(16, 128, 4, 4, 4), Tiling(16, 128, 4, 4, 3),
        Tiling(32, 128, 4, 4, 3),
    ),
    8: (Tiling(16, 64, 4, 4, 4), Tiling(16, 128, 4, 4, 5), Tiling(16, 128, 4, 4, 5), Tiling(64, 128, 4, 4, 3)),
    4: (Tiling(32, 128, 4, 4, 4), Tiling(16, 128, 8, 4, 4), Tiling(32, 128, 4, 4, 4), Tiling(64, 128, 4, 4, 3)),
}  # fmt: skip
FP32 = Tiling(16, 32, 4, 4, 1)  # x in fp32: plain multiply-adds, for exactness and not for speed


def class_of(N: int, K: int) -> int:
    """Index into CLASSES."""
    return next(i for i, (most_rows, most_columns) in enumerate(CLASSES) if N <= most_rows and K <= most_columns)


def tiling_for(weight: Weight, dtype: torch.dtype) -> Tiling:
    """The entry of TABLE for a matrix and the dtype of x."""
    tiling = FP32 if dtype == torch.float32 else TABLE[weight.bits][class_of(*weight.shape)]
    return tiling.for_group(weight.group)


def stages_for(tiling: Tiling, shared_memory: int) -> int:
    """Steps in flight on a chip with this much shared memory a program, in bytes. They change no bits."""
    return tiling.stages if family(shared_memory) == "hopper" else min(tiling.stages, 2)


if triton is not None:

    @triton.jit
    def unpack_int4(w, DTYPE: tl.constexpr, PTX: tl.constexpr):
        """int8 [...], two weights a byte -> their low and their high halves in DTYPE [...], minus 8.

        PTX: four bytes at once. 0x43 above a byte n < 16 is the bf16 number 128 + n, so that two weights cost a byte
        permutation and a subtraction (of 136) instead of two conversions from integers.
        """
        if PTX:
            low, high = tl.inline_asm_elementwise(
                """
                {
                .reg .b32 low, high, one, minus_136;
                mov.b32 one, 0x3F803F80;
                mov.b32 minus_136, 0xC308C308;
                and.b32 low, $4, 0x0F0F0F0F;
                shr.u32 high, $4, 4;
                and.b32 high, high, 0x0F0F0F0F;
                prmt.b32 $0, low, 0x43434343, 0x4140;
                prmt.b32 $1, low, 0x43434343, 0x4342;
                prmt.b32 $2, high, 0x43434343, 0x4140;
                prmt.b32 $3, high, 0x43434343, 0x4342;
                fma.rn.bf16x2 $0, $0, one, minus_136;
                fma.rn.bf16x2 $1, $1, one, minus_136;
                fma.rn.bf16x2 $2, $2, one, minus_136;
                fma.rn.bf16x2 $3, $3, one, minus_136;
                }
                """,
                "=&r,=&r,=&r,=&r,r",
                [w],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
        else:
            low = ((w & 15) - 8).to(DTYPE)
            high = (((w >> 4) & 15) - 8).to(DTYPE)
        return low, high

    @triton.jit
    def prefetch(w, row_offsets, COLUMNS: tl.constexpr, width):
        """Ask for the first COLUMNS values of some rows to be brought into the L2 cache, a request a line."""
        LINE: tl.constexpr = 128 * 8 // w.dtype.element_ty.primitive_bitwidth  # values in 128 bytes
        column = tl.minimum(tl.arange(0, triton.next_power_of_2(COLUMNS // LINE)) * LINE, width - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l",
            [w + row_offsets[:, None] + column[None, :]], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    @triton.jit
    def load_x(
        x, norm, start, offsets, row, stride_x, M, K, squares,
        NORM: tl.constexpr, EVEN: tl.constexpr, QUANTISED: tl.constexpr,
    ):  # fmt: skip
        """A step of x [SLICES, ROWS, columns] times the norm's weight; its products with itself join `squares`.

        Sums of squares are the diagonal of x x^T. The matrix unit makes them, like the result, in an order that no
        choice of layout can change.
        """
        column = start + offsets
        inside = (row < M)[None, :, None]
        if not EVEN:
            inside = inside & (column < K)[:, None, :]
        address = x + row.to(tl.int64)[None, :, None] * stride_x + column[:, None, :]
        tile = tl.load(address, mask=inside, other=0.0)
        if NORM:
            if EVEN:
                factor = tl.load(norm + column)
            else:
                factor = tl.load(norm + column, mask=column < K, other=0.0)
            raw = tile
            if QUANTISED:
                # Once more, with another hint so that it stays a load of its own: beside 8-bit weights the two products
                # want x in shared memory in two orders, and one copy for both would not be prefetched.
                raw = tl.load(address, mask=inside, other=0.0, eviction_policy="evict_last")
            squares = tl.dot(raw, tl.permute(raw, (0, 2, 1)), squares, input_precision="ieee")
            tile = (tile.to(tl.float32) * factor.to(tl.float32)[:, None, :]).to(tile.dtype)
        return tile, squares

    @triton.jit
    def add_slices(partial, SLICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        """[SLICES, ROWS, COLUMNS] -> [ROWS, COLUMNS] by halves: an order written down; tl.sum's is the layout's."""
        total = tl.permute(partial, (1, 2, 0))
        for level in tl.static_range(6):
            if SLICES >> level > 1:
                even, odd = tl.split(tl.reshape(total, [ROWS, COLUMNS, SLICES >> (level + 1), 2]))
                total = even + odd
        return tl.reshape(total, [ROWS, COLUMNS])

    @triton.jit(do_not_specialize=["M"])
    def decode_linear_kernel(
        x, w, scales, norm, bias, residual, out, M, N, K, stride_x, stride_w, stride_residual, stride_out, eps,
        BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
        SWIGLU: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
        PREFETCH: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """Program (i, j): rows i of W with rows j of x. `norm`, `bias`, `residual`, `scales`: None for without."""
        NORM: tl.constexpr = norm is not None
        DTYPE: tl.constexpr = x.dtype.element_ty
        QUANTISED: tl.constexpr = scales is not None
        PACKED: tl.constexpr = 2 if GROUP else 1  # weights in one value of w
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        # Past the end the last row is read again: cheaper than a mask, and nothing of it is stored.
        w_rows = w + tl.minimum(n, N - 1).to(tl.int64)[None, :, None] * stride_w
        slice = tl.arange(0, SLICES)[:, None]
        if OVERLAP and PREFETCH:  # weights do not depend on the kernel before
            prefetch(w, tl.minimum(n, N - 1).to(tl.int64) * stride_w, SLICES * BLOCK_K * STAGES // PACKED, K // PACKED)
        wait_for_the_kernel_before(OVERLAP)
        acc = tl.zeros([SLICES, BLOCK_N, ROWS], tl.float32)
        squares = tl.zeros([SLICES, ROWS, ROWS], tl.float32)

        if GROUP:
            BYTES: tl.constexpr = BLOCK_K // 2
            byte = tl.arange(0, BYTES)[None, :]
            low_k = slice * BLOCK_K + byte // 16 * 32 + byte % 16  # the column of a byte's low half; high: 16 further
            zero = tl.zeros([SLICES, BLOCK_N, ROWS], tl.float32)
            for start in tl.range(0, K, SLICES * BLOCK_K, num_stages=STAGES):
                at = start // 2 + slice * BYTES + byte
                group = start // BLOCK_K + slice
                inside = (n < N)[None, :]
                if EVEN:
                    packed = tl.load(w_rows + at[:, None, :])
                else:
                    packed = tl.load(w_rows + at[:, None, :], mask=(group * BLOCK_K < K)[:, None, :], other=0)
                    inside = inside & (group * BLOCK_K < K)
                scale = tl.load(scales + group * N + n[None, :], mask=inside, other=0.0)
                low, high = unpack_int4(packed, DTYPE, PTX)
                x_low, squares = load_x(x, norm, start, low_k, row, stride_x, M, K, squares, NORM, EVEN, QUANTISED)
                high_k = low_k + 16
                x_high, squares = load_x(x, norm, start, high_k, row, stride_x, M, K, squares, NORM, EVEN, QUANTISED)
                product = tl.dot(low, tl.permute(x_low, (0, 2, 1)), zero, input_precision="ieee")
                product = tl.dot(high, tl.permute(x_high, (0, 2, 1)), product, input_precision="ieee")
                acc += product * scale.to(tl.float32)[:, :, None]
        else:
            k = slice * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            for start in tl.range(0, K, SLICES * BLOCK_K, num_stages=STAGES):
                at = start + k
                if EVEN:
                    w_tile = tl.load(w_rows + at[:, None, :])
                else:
                    w_tile = tl.load(w_rows + at[:, None, :], mask=(at < K)[:, None, :], other=0)
                x_tile, squares = load_x(x, norm, start, k, row, stride_x, M, K, squares, NORM, EVEN, QUANTISED)
                acc = tl.dot(w_tile.to(DTYPE), tl.permute(x_tile, (0, 2, 1)), acc, input_precision="ieee")

        y = add_slices(acc, SLICES, BLOCK_N, ROWS)  # [BLOCK_N, ROWS]
        if scales is not None and not GROUP:
            y = y * tl.load(scales + n, mask=n < N, other=0.0)[:, None]
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
            n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            N = N // 2
        stored = (n < N)[:, None] & (row < M)[None, :]
        wide_row = row.to(tl.int64)[None, :]
        if residual is not None:
            y += tl.load(residual + wide_row * stride_residual + n[:, None], mask=stored, other=0.0).to(tl.float32)
        tl.store(out + wide_row * stride_out + n[:, None], y.to(out.dtype.element_ty), mask=stored)


def launch(x, weight, norm, eps, bias, residual, swiglu, out, tiling=None):
    """The kernel, on checked arguments; `tiling` replaces the table's entry. Returns `out`."""
    tiling = tiling or tiling_for(weight, x.dtype)
    M, (N, K) = x.shape[0], weight.shape
    # Eight columns are the instruction's width. Sixteen read W once for up to sixteen rows, with the same sums.
    rows = 8 if M <= 8 else 16
    compiled = x.is_cuda and not INTERPRETED
    stages = stages_for(tiling, device_limits(x.device.index)[0]) if x.is_cuda else 1
    decode_linear_kernel[(triton.cdiv(N, tiling.block_n), triton.cdiv(M, rows))](
        x, weight.values, weight.scales, norm, bias, residual, out, M, N, K,
        x.stride(0), weight.values.stride(0), 0 if residual is None else residual.stride(0), out.stride(0), eps,
        BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, SLICES=tiling.slices, ROWS=rows, GROUP=weight.group or 0,
        SWIGLU=swiglu, EVEN=K % (tiling.slices * tiling.block_k) == 0,
        PTX=compiled and x.dtype == torch.bfloat16, PREFETCH=tiling.prefetch, STAGES=stages,
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
    On a GPU this is the kernel above; elsewhere its definition in reference.py.
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
    if weight.values.stride(1) != 1:
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
