"""Weights in 8 and 4 bits, for generation: a token's time is the time to read every weight once.

int8: one scale for each output row, w = scale * q with q in -127 .. 127. `bench.quality` saw it change a
perplexity by less than 0.3%, so rounding to the nearest is enough.

int4: one scale for each group of 32, 64 or 128 neighbours in a row, w = scale * q with q in -8 .. 7. The scale has a
sign, so that the largest weight of a group, of whichever sign, can take the -8; and it is searched for, since clipping
one large weight a little often saves more on all the others. A zero point for each group was measured and left out: its
bits are better spent on smaller groups. Squared error relative to the weights', at the same number of bits:

                              4.25 bits                    4.5 bits
    normal weights      g=64  0.0083  (0.0091)       g=32  0.0069  (0.0077)     in brackets: twice the group,
    Student's t, 5      g=64  0.0150  (0.0161)       g=32  0.0109  (0.0118)     with a zero point

The layout of both is that of the tensor core's left operand, so that what a lane of a warp reads in one load of 16
bytes is what it multiplies, with nothing to shuffle (kernels/quantized_linear.py draws it). Words of 32 bits
[panel, chunk, lane, word]; a chunk is 16 rows x 32 bytes, its bytes are

    int8: column i of 32: q + 128        int4: columns i and i + 32 of 64: low four bits q[i] + 8, high q[i + 32] + 8

and byte i = 8 j + 4 s + 2 a + k of row 8 m + r goes to word 2 s + m of lane 4 r + j, there to byte 2 k + a. Rows are
padded to whole panels of 16, columns to whole chunks. The scales of int4 are stored [groups, rows], the sixteen rows of
a panel in the order 0, 8, 1, 9 ... in which lanes hold them.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPS = (32, 64, 128)
PANEL = 16  # rows of a chunk
CHUNK_COLUMNS = {8: 32, 4: 64}  # by the bits of a weight
CHUNK_WORDS = PANEL * 32 // 4  # 16 rows x 32 bytes
CHUNK_ELEMENTS = 2**24  # weights converted at a time: 64 MB for each fp32 copy
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)  # candidates for a group's scale, relative to no clipping


@dataclass(frozen=True)
class Weight:
    """A matrix [N, K] as it is stored: values, and the scales that make numbers of them.

    values: bf16, fp16 or fp32 [N, K]; or int32 [ceil(N / 16), words], in the order described above.
    scales: None; fp32 [N] with int8; bf16 [groups, 16 ceil(N / 16)] with int4.
    group: of int4, weights that share a scale.
    packed_shape: of quantised values, the N and K before padding.
    """

    values: Tensor
    scales: Tensor | None = None
    group: int | None = None
    packed_shape: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed_shape or tuple(self.values.shape)

    @property
    def bits(self) -> int:
        """Bits of one weight, without its share of a scale."""
        return 8 * self.values.element_size() if self.scales is None else 4 if self.group else 8

    @property
    def nbytes(self) -> int:
        """Bytes in memory, scales included: what one pass over the matrix reads."""
        return sum(x.numel() * x.element_size() for x in (self.values, self.scales) if x is not None)

    def to(self, device) -> "Weight":
        scales = None if self.scales is None else self.scales.to(device)
        return replace(self, values=self.values.to(device), scales=scales)


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
    if bits not in ("int8", "int4"):
        raise ValueError(f"quantize: bits={bits!r} must be 'int8', 'int4' or None")
    N, K = weight.shape
    if bits == "int4" and (group not in GROUPS or K % group):
        fits = [g for g in GROUPS if K % g == 0]
        raise ValueError(f"quantize: int4 groups of {group} do not fit rows of {K}; {fits or 'none'} would")
    values = weight.new_empty(-(-N // PANEL), packed_words(K, bits), dtype=torch.int32)
    if bits == "int8":
        packed = Weight(values, weight.new_empty(N, dtype=torch.float32), None, (N, K))
    else:
        groups = -(-K // CHUNK_COLUMNS[4]) * CHUNK_COLUMNS[4] // group
        packed = Weight(values, weight.new_zeros(groups, len(values) * PANEL, dtype=torch.bfloat16), group, (N, K))
    rows = max(1, CHUNK_ELEMENTS // max(1, K * PANEL)) * PANEL
    for start in range(0, N, rows):
        _quantize_rows(packed, weight[start : start + rows].float(), start)
    if not packed.scales.isfinite().all():
        raise ValueError("quantize: the weight holds NaN or infinity, which have no place in a few bits")
    return packed


def packed_words(K: int, bits: str) -> int:
    """Words of 32 bits in a panel of 16 rows of K weights."""
    return -(-K // CHUNK_COLUMNS[4 if bits == "int4" else 8]) * CHUNK_WORDS


def _quantize_rows(packed, w, start):
    """fp32 [n, K], rows `start` ... of the matrix (a whole number of panels in), into their place in `packed`."""
    n, K = w.shape
    panels = slice(start // PANEL, -(-(start + n) // PANEL))
    padding = (0, -K % CHUNK_COLUMNS[packed.bits], 0, -n % PANEL)
    if packed.group is None:
        q, packed.scales[start : start + n] = _int8(w)
        rows_of_bytes = F.pad(q, padding).view(torch.uint8) + 128
    else:
        q, scales = _int4(w, packed.group)  # int8 [n, K], bf16 [n, K / group]
        halves = F.pad(q, padding).add_(8).view(torch.uint8).unflatten(1, (-1, 2, 32))
        rows_of_bytes = (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)
        scales = F.pad(scales, (0, 0, 0, -n % PANEL)).view(-1, 2, PANEL // 2, scales.shape[1])
        scales = scales.transpose(1, 2).flatten(0, 2)  # the order of lanes
        packed.scales[: scales.shape[1], start : start + len(scales)] = scales.t()
    packed.values[panels] = _to_fragments(rows_of_bytes)


def _to_fragments(rows: Tensor) -> Tensor:
    """uint8 [n, bytes], multiples of 16 and 32 -> int32 [n / 16, 4 bytes], the order at the top of this file."""
    n, width = rows.shape
    x = rows.view(n // PANEL, 2, 8, width // 32, 4, 2, 2, 2)  # panel, m, r, chunk, j, s, a, k
    return x.permute(0, 3, 2, 4, 5, 1, 7, 6).reshape(n // PANEL, 16 * width).view(torch.int32)


def _from_fragments(values: Tensor) -> Tensor:
    """The inverse of `_to_fragments`."""
    chunks = values.shape[1] // CHUNK_WORDS
    x = values.view(len(values), chunks, 8, 4, 2, 2)  # panel, chunk, r, j, s, m
    x = x.permute(0, 5, 2, 1, 3, 4).reshape(len(values) * PANEL, 8 * chunks)  # words of rows: chunk, j, s
    middle = ((x >> 8) & 0xFF00) | ((x & 0xFF00) << 8)  # byte 2 k + a -> 2 a + k: these two change places
    return ((x & ~0xFFFF00) | middle).view(torch.uint8)


def _int8(w):
    """fp32 [n, K] -> int8 [n, K], fp32 [n]. A row of zeros gets the scale 1."""
    scale = w.abs().amax(1) / 127
    scale = torch.where(scale == 0, 1.0, scale)
    return (w / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


def _int4(w, group):
    """fp32 [n, K] -> int8 [n, K], bf16 [n, K / group]."""
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
    return _round_to_4_bits(w, best_scale).to(torch.int8).view(n, K), best_scale.squeeze(-1).to(torch.bfloat16)


def _round_to_4_bits(w, scale):
    return (w / scale).round_().clamp_(-8, 7)


def dequantize(weight: Weight, rows: slice = slice(None), dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that are stored, [N, K] or the given rows of it; exact in fp32."""
    if weight.scales is None:
        return weight.values[rows].to(dtype)
    N, K = weight.shape
    start, stop, _ = rows.indices(N)
    panels = slice(start // PANEL, -(-stop // PANEL))
    wanted = slice(start - panels.start * PANEL, stop - panels.start * PANEL)
    packed = _from_fragments(weight.values[panels])[wanted]  # [n, bytes]
    if weight.group is None:
        return packed[:, :K].float().sub_(128).mul_(weight.scales[start:stop, None]).to(dtype)
    packed = packed.unflatten(1, (-1, 1, 32))
    q = torch.cat((packed & 15, packed >> 4), dim=2).flatten(1).unflatten(1, (-1, weight.group))  # [n, groups, group]
    scales = weight.scales[:, panels.start * PANEL : panels.stop * PANEL].unflatten(1, (-1, PANEL // 2, 2))
    scales = scales.transpose(2, 3).flatten(1)[:, wanted].t()  # [n, groups]
    return q.float().sub_(8).mul_(scales.float()[..., None]).flatten(1)[:, :K].to(dtype)


def pack_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """The two input matrices of SwiGLU [F, K] as one [2F, K], row by row in turn: gate 0, up 0, gate 1, up 1 ...

    A program that owns a few neighbouring rows then has both factors of its outputs.
    """
    return torch.stack((gate, up), dim=1).flatten(0, 1)
