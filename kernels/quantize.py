"""Weights in 8 and 4 bits, for generation: a token's time is the time to read every weight once.

int8: one scale for each output row, w = scale * q with q in -127 .. 127. Measured elsewhere to change a model's
perplexity by less than 0.2%, so rounding to the nearest is enough.

int4: one scale for each group of 32, 64 or 128 neighbours in a row, w = scale * q with q in -8 .. 7. The scale has a
sign, so that the largest weight of a group, of whichever sign, can take the -8; and it is searched for, since clipping
one large weight a little often saves more on all the others. A zero point for each group was measured and left out: its
bits are better spent on smaller groups. Squared error relative to the weights', at the same number of bits:

                              4.25 bits                    4.5 bits
    normal weights      g=64  0.0083  (0.0091)       g=32  0.0069  (0.0077)     in brackets: twice the group,
    Student's t, 5      g=64  0.0150  (0.0161)       g=32  0.0109  (0.0118)     with a zero point

The layout of int4. A byte holds two weights that lie 16 columns apart, inside a block of 32 columns:

    byte j of a block:   low four bits: q[j] + 8     high four bits: q[j + 16] + 8        j = 0 .. 15

so the low halves of a row of bytes are sixteen neighbours, as many as one tensor core instruction multiplies, and the
kernel takes the two halves to two products without ever shuffling them together. Scales are stored [K / group, N]:
what one program reads of them, a few groups of many rows, is then contiguous.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUPS = (32, 64, 128)
HALF = 16  # columns between the two weights of a byte
CHUNK_ELEMENTS = 2**24  # weights converted at a time: 64 MB for each fp32 copy
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)  # candidates for a group's scale, relative to no clipping


@dataclass(frozen=True)
class Weight:
    """A matrix [N, K] as it is stored: values, and the scales that make numbers of them.

    values: bf16, fp16 or fp32 [N, K]; int8 [N, K]; or, with a group, int8 [N, K / 2], two weights a byte.
    scales: None; fp32 [N]; or, with a group, bf16 [K / group, N].
    """

    values: Tensor
    scales: Tensor | None = None
    group: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns * 2 if self.group else columns

    @property
    def bits(self) -> int:
        """Bits of one weight, without its share of a scale."""
        return 4 if self.group else 8 * self.values.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes in memory, scales included: what one pass over the matrix reads."""
        return sum(x.numel() * x.element_size() for x in (self.values, self.scales) if x is not None)

    def to(self, device) -> "Weight":
        return Weight(self.values.to(device), None if self.scales is None else self.scales.to(device), self.group)


def quantize(weight: Tensor, bits: str | None, group: int = 64) -> Weight:
    """Store a matrix in fewer bits, on the device where it is; a few rows at a time, so memory stays flat.

    Args:
        weight: [N, K] in bf16, fp16 or fp32.
        bits: "int8", "int4", or None to keep the matrix as it is (not copied).
        group: for int4, neighbours in a row that share a scale: 32, 64 or 128; K must be a multiple of it.

    Raises ValueError, with what would fit, for shapes and options that do not, and for NaN or infinity.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"quantize: the weight must be a matrix of floats; got {weight.dtype} {tuple(weight.shape)}")
    if bits is None:
        return Weight(weight)
    N, K = weight.shape
    rows = max(1, CHUNK_ELEMENTS // max(1, K))
    if bits == "int8":
        values = torch.empty(N, K, dtype=torch.int8, device=weight.device)
        scales = torch.empty(N, dtype=torch.float32, device=weight.device)
        for part in (slice(start, start + rows) for start in range(0, N, rows)):
            values[part], scales[part] = _int8(weight[part].float())
        packed = Weight(values, scales)
    elif bits == "int4":
        if group not in GROUPS or K % group:
            fits = [g for g in GROUPS if K % g == 0]
            raise ValueError(f"quantize: int4 groups of {group} do not fit rows of {K}; {fits or 'none'} would")
        values = torch.empty(N, K // 2, dtype=torch.int8, device=weight.device)
        scales = torch.empty(K // group, N, dtype=torch.bfloat16, device=weight.device)
        for part in (slice(start, start + rows) for start in range(0, N, rows)):
            values[part], scales[:, part] = _int4(weight[part].float(), group)
        packed = Weight(values, scales, group)
    else:
        raise ValueError(f"quantize: bits={bits!r} must be 'int8', 'int4' or None")
    if not packed.scales.isfinite().all():
        raise ValueError("quantize: the weight holds NaN or infinity, which have no place in a few bits")
    return packed


def _int8(w):
    """fp32 [n, K] -> int8 [n, K], fp32 [n]. A row of zeros gets the scale 1."""
    scale = w.abs().amax(1) / 127
    scale = torch.where(scale == 0, 1.0, scale)
    return (w / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


def _int4(w, group):
    """fp32 [n, K] -> int8 [n, K / 2], bf16 [K / group, n]."""
    n, K = w.shape
    w = w.view(n, K // group, group)
    extreme = w.gather(-1, w.abs().argmax(-1, keepdim=True))  # [n, K / group, 1], with its sign
    best_error = best_scale = None
    for shrink in SHRINK:
        # Rounded to bf16 before it is judged: the kernel will multiply by the rounded one.
        scale = (extreme * (-shrink / 8)).to(torch.bfloat16).float()
        scale = torch.where(scale == 0, 1.0, scale)
        error = (_round_to_4_bits(w, scale).mul_(scale).sub_(w)).square_().sum(-1, keepdim=True)
        if best_error is None:
            best_error, best_scale = error, scale
        else:
            better = error < best_error
            best_error, best_scale = torch.where(better, error, best_error), torch.where(better, scale, best_scale)
    q = _round_to_4_bits(w, best_scale).add_(8).to(torch.uint8).view(n, K // (2 * HALF), 2, HALF)
    packed = q[:, :, 0] | (q[:, :, 1] << 4)  # [n, K / 32, 16]
    return packed.reshape(n, K // 2).view(torch.int8), best_scale.squeeze(-1).to(torch.bfloat16).t()


def _round_to_4_bits(w, scale):
    return (w / scale).round_().clamp_(-8, 7)


def dequantize(weight: Weight, rows: slice = slice(None), dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that are stored, [N, K] or the given rows of it; exact in fp32."""
    values = weight.values[rows]
    if weight.scales is None:
        return values.to(dtype)
    if weight.group is None:
        return (values.float() * weight.scales[rows, None]).to(dtype)
    n, half = values.shape
    block = values.view(torch.uint8).view(n, half // HALF, HALF)
    q = torch.stack((block & 15, block >> 4), dim=2).view(n, -1, weight.group)  # [n, K / group, group]
    scales = weight.scales[:, rows].t().float()[..., None]
    return ((q.float() - 8) * scales).view(n, 2 * half).to(dtype)


def pack_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """The two input matrices of SwiGLU [F, K] as one [2F, K], row by row in turn: gate 0, up 0, gate 1, up 1 ...

    A program that owns a few neighbouring rows then has both factors of its outputs.
    """
    return torch.stack((gate, up), dim=1).flatten(0, 1)
