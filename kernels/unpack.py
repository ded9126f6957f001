"""From weights of 8 and 4 bits to numbers: in registers, for quantized_linear.py, and a whole matrix at once.

Unpacking. A number n < 256 in the low byte of a bf16 is a subnormal, n 2^-133: the format is linear from 0 up to 2^-125
(so 255 is no exception), and n need not be converted, only scaled. For two weights at once, an AND and a multiply-add
with a power of two:

    int8, stored u = q + 128    u 2^-133 * 2^126 - 1   = q / 128
    int4, stored n = q + 8      n 2^-133 * 2^127 - 1/8 = q / 64      the high half: 16 n 2^-133 * 2^123 - 1/8

Both are exact: results have at most 8 significant bits, which is what bf16 has, and the multiply-add rounds once. 128
or 64 goes back into the scale. PTX's fma.rn.bf16x2 keeps subnormals, by its definition.

A whole matrix is wanted for a prompt: with hundreds of rows arithmetic sets the time of a product, PyTorch's are then
the best, and writing W out for one costs less than a slower product would.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interpreter import INTERPRETED
from kernels.quantize import CHUNK_WORDS, Weight

UNPACKED_CHUNKS = 8  # of one panel, in a program that writes a matrix out


@triton.jit
def unpack_int4(w):
    """int32 [...], eight weights a word -> eight bf16 [...], q / 64: columns 0 ... 3 of the low halves, then of the
    high ones."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 odd, a, b, c, d, up, up_high, eighth;
        mov.b32 up, 0x7F007F00;
        mov.b32 up_high, 0x7D007D00;
        mov.b32 eighth, 0xBE00BE00;
        shr.u32 odd, $8, 8;
        and.b32 a, $8, 0x000F000F;
        and.b32 b, odd, 0x000F000F;
        and.b32 c, $8, 0x00F000F0;
        and.b32 d, odd, 0x00F000F0;
        fma.rn.bf16x2 a, a, up, eighth;
        fma.rn.bf16x2 b, b, up, eighth;
        fma.rn.bf16x2 c, c, up_high, eighth;
        fma.rn.bf16x2 d, d, up_high, eighth;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        mov.b32 {$4, $5}, c;
        mov.b32 {$6, $7}, d;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [w],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def unpack_int8(w):
    """int32 [...], four weights a word -> four bf16 [...], q / 128."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, up, one;
        mov.b32 up, 0x7E807E80;
        mov.b32 one, 0xBF80BF80;
        and.b32 a, $4, 0x00FF00FF;
        prmt.b32 b, $4, 0, 0x4341;
        fma.rn.bf16x2 a, a, up, one;
        fma.rn.bf16x2 b, b, up, one;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        }
        """,
        "=h,=h,=h,=h,r",
        [w],
        dtype=(tl.bfloat16,) * 4,
        is_pure=True,
        pack=1,
    )


@triton.jit
def field(w, SHIFT: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """One weight of each word by shifts, scaled as above: for dtypes other than bf16, and without a GPU."""
    half: tl.constexpr = 1 << (BITS - 1)
    n = (w >> SHIFT) & (2 * half - 1)
    return ((n - half).to(tl.float32) * (1 / 128 if BITS == 8 else 1 / 64)).to(DTYPE)


@triton.jit
def unpack(w, BITS: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """int32 [...] -> a tuple for the low halves and, with 4 bits, one for the high ones: columns c ... c + 3 [...]."""
    if BITS == 4:
        if PTX:
            a, b, c, d, e, f, g, h = unpack_int4(w)
        else:
            a, b = field(w, 0, 4, DTYPE), field(w, 16, 4, DTYPE)
            c, d = field(w, 8, 4, DTYPE), field(w, 24, 4, DTYPE)
            e, f = field(w, 4, 4, DTYPE), field(w, 20, 4, DTYPE)
            g, h = field(w, 12, 4, DTYPE), field(w, 28, 4, DTYPE)
        return (a, b, c, d), (e, f, g, h)
    else:
        if PTX:
            a, b, c, d = unpack_int8(w)
        else:
            a, b = field(w, 0, 8, DTYPE), field(w, 16, 8, DTYPE)
            c, d = field(w, 8, 8, DTYPE), field(w, 24, 8, DTYPE)
        return ((a, b, c, d),)


@triton.jit
def load_chunks(w, panel, stride_w, start, chunks, SLICES: tl.constexpr):
    """Chunks start ... start + SLICES of each panel [SLICES, PANELS, 128]. Past the last one nothing is read: whatever
    the registers hold unpacks to finite numbers, and x is zero there."""
    chunk = start + tl.arange(0, SLICES)
    at = panel.to(tl.int64)[None, :, None] * stride_w + chunk[:, None, None] * 128 + tl.arange(0, 128)[None, None, :]
    return tl.load(w + at, mask=(chunk < chunks)[:, None, None], eviction_policy="evict_first")


@triton.jit
def natural_order(v, CHUNKS: tl.constexpr):
    """Columns c ... c + 3 of each word of one panel [CHUNKS, 1, 128] -> [16, CHUNKS, 32]."""
    v = tl.join(tl.join(v[0], v[1]), tl.join(v[2], v[3]))  # chunk, panel, word, k, a
    v = tl.reshape(v, [CHUNKS, 8, 4, 2, 2, 2, 2])  # chunk, r, j, s, m, k, a
    v = tl.permute(v, (4, 1, 0, 2, 3, 6, 5))  # m, r, chunk, j, s, a, k
    return tl.reshape(v, [16, CHUNKS, 32])


@triton.jit
def unpack_kernel(
    w, scales, out, N, K, stride_w, BITS: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Program (i, j): chunks CHUNKS i ... of panel j into rows of `out`."""
    HALVES: tl.constexpr = 2 if GROUP else 1
    padded_n = (N + 15) // 16 * 16
    panel = tl.program_id(1) + tl.arange(0, 1)
    chunks = (K + 32 * HALVES - 1) // (32 * HALVES)
    packed = load_chunks(w, panel, stride_w, tl.program_id(0) * CHUNKS, chunks, CHUNKS)
    parts = unpack(packed, BITS, out.dtype.element_ty, PTX)
    v = natural_order(parts[0], CHUNKS)
    if HALVES == 2:
        v = tl.join(v, natural_order(parts[1], CHUNKS))  # row, chunk, column, half
        v = tl.permute(v, (0, 1, 3, 2))
    v = tl.reshape(v, [16, CHUNKS * HALVES, 32]).to(tl.float32)
    row = tl.program_id(1) * 16 + tl.arange(0, 16)
    block = tl.program_id(0) * CHUNKS * HALVES + tl.arange(0, CHUNKS * HALVES)  # of 32 columns
    if GROUP:
        index = tl.arange(0, 16)
        place = tl.program_id(1) * 16 + index % 8 * 2 + index // 8
        at = scales + (block * 32 // GROUP)[None, :] * padded_n + place[:, None]
        scale = tl.load(at, mask=(block * 32 < K)[None, :], other=0.0).to(tl.float32) * 64.0
        v = v * scale[:, :, None]
    else:
        v = v * (tl.load(scales + row, mask=row < N, other=0.0) * 128.0)[:, None, None]
    k = block[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    at = out + row.to(tl.int64)[:, None, None] * K + k
    tl.store(at, v.to(out.dtype.element_ty), mask=(row < N)[:, None, None] & (k < K))


def unpacked(weight: Weight, dtype: torch.dtype) -> Tensor:
    """A quantised matrix on a GPU as [N, K] in dtype, rounded from fp32, at the speed of memory: for products with so
    many rows that the matrix unit, and not memory, sets the time. PyTorch's own is kernels.quantize.dequantize."""
    N, K = weight.shape
    out = weight.scales.new_empty(N, K, dtype=dtype)
    panels = weight.values.shape[0]
    blocks = triton.cdiv(weight.values.shape[1] // CHUNK_WORDS, UNPACKED_CHUNKS)
    unpack_kernel[(blocks, panels)](
        weight.values, weight.scales, out, N, K, weight.values.stride(0), BITS=weight.bits,
        GROUP=weight.group or 0, CHUNKS=UNPACKED_CHUNKS,
        PTX=out.is_cuda and not INTERPRETED and dtype == torch.bfloat16,
    )  # fmt: skip
    return out
