"""FlashAttention forward: one pass over K and V, no T x T matrix.

The mathematics. For one query row with scores s_j = scale * q.k_j, softmax needs m = max s_j and l = sum exp(s_j - m)
before it can weigh the values. Both can be kept up to date while the keys stream past (online softmax, Milakov and
Gimelshein 2018): after a tile of keys with its own maximum, with a = exp(m_old - m_new),

    l   <- a * l   + sum_j exp(s_j - m_new)
    acc <- a * acc + sum_j exp(s_j - m_new) v_j           finally   out = acc / l,   lse = m + log(l)

so only a tile of scores exists at any time, in registers. Everything below works in powers of two, because the chip
has an exp2 and no exp: scale * log2(e) is folded into one multiply-add per score.

The tiling. A program owns BLOCK_M queries of one head and walks the keys they may see, BLOCK_N at a time:

              keys ->     lo         full_lo                    full_hi       hi
                          |  masked     |     no mask at all       |  masked   |
      BLOCK_M queries     | ░░▒▒▓▓████  | ███████████████████████  | ██▓▓▒▒░░  |
                          | window and  |                          | diagonal, |
                          | document    |                          | ragged    |
                          | edges       |                          | end       |

Most tiles lie in the middle, where every query sees every key, and pay nothing for masks.

What FlashAttention-2 (Dao 2023, section 3) changed over the first version is marked FA2 in the code: (1) fewer
operations that are no matrix products, (2) a grid over the sequence, (3) work split between warps by query rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

import kernels.interpreter  # noqa: F401  (corrects the interpreter before its first use)
from kernels.tiles import Tile, heads_in_l2, tile_for

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
# Arguments that change with the batch: a kernel must not be compiled anew because one became a multiple of 16.
SIZES = ["heads", "heads_q", "heads_kv", "group", "splits", "padded", "tokens_q", "tokens_k", "window", "section"]


@triton.jit
def program_tile(tiles, heads, section, HEAVY_LAST: tl.constexpr):
    """Which tile of which head this program owns, on a grid of `tiles * heads` programs.

    Heads go in sections whose K and V fit in the L2 cache together; inside a section all heads do the same tile
    before the next one. Under a causal mask the last query tile has the most keys: it starts first, so that short
    ones fill the end of the launch (longest processing time first).
    """
    program = tl.program_id(0)
    first = program // (section * tiles) * section
    width = min(section, heads - first)
    within = program - first * tiles
    tile = within // width
    if HEAVY_LAST:
        tile = tiles - 1 - tile
    return tile, first + within % width


@triton.jit
def load_tile(
    source, batch, head, start, tokens,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, CHECK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + ROWS of one head, [ROWS, HEAD_DIM rounded up to a power of two]; zeros outside.

    `source` is a TMA descriptor of `[B, H, T, D]` (Hopper's copy engine computes addresses and bounds by itself), or
    else a tuple (pointer, batch stride, head stride, row stride). CHECK: rows may lie past `tokens`.
    """
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    if TMA:
        tile = source.load([batch, head, start, 0]).reshape(ROWS, BLOCK_D)
    else:
        pointers, inside = tile_pointers(source, batch, head, start, tokens, ROWS, HEAD_DIM)
        if CHECK or BLOCK_D != HEAD_DIM:
            tile = tl.load(pointers, mask=inside, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def tile_pointers(source, batch, head, start, tokens, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Addresses of a tile, and which of them exist."""
    pointer, batch_stride, head_stride, row_stride = source
    # 64 bits up to the tile, since a tensor may hold more than 2^31 elements; 32 bits inside it.
    first = tl.cast(batch, tl.int64) * batch_stride + tl.cast(head, tl.int64) * head_stride
    base = pointer + first + tl.cast(start, tl.int64) * row_stride
    rows = tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
    return base + rows * row_stride + dims, (rows < tokens - start) & (dims < HEAD_DIM)


@triton.jit
def store_tile(target, batch, head, start, tokens, tile, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The inverse of `load_tile`, into a tuple (pointer, batch stride, head stride, row stride), in its dtype."""
    pointers, inside = tile_pointers(target, batch, head, start, tokens, ROWS, HEAD_DIM)
    tl.store(pointers, tile.to(target[0].dtype.element_ty), mask=inside)


@triton.jit
def visible(
    position, key, doc_start, tokens_k, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Mask of a tile; `position` and `doc_start` broadcast along keys, `key` along queries."""
    if CAUSAL:
        seen = key <= position
    else:
        seen = key < tokens_k
    if WINDOW:
        seen = seen & (key > position - window)
    if DOCUMENTS:
        seen = seen & (key >= doc_start)
    return seen


@triton.jit
def key_bounds(
    first_row, tokens_q, tokens_k, window, doc_start,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """The keys that queries first_row .. first_row + BLOCK_M see, as lo <= full_lo <= full_hi <= hi: none outside
    [lo, hi), and in [full_lo, full_hi) every query sees every key. Each range starts at a multiple of BLOCK_N."""
    first = first_row + tokens_k - tokens_q
    last = min(first_row + BLOCK_M, tokens_q) - 1 + tokens_k - tokens_q
    lo = 0
    full_lo = 0
    full_hi = tokens_k
    hi = tokens_k
    if CAUSAL:
        full_hi = max(first + 1, 0)
        hi = max(last + 1, 0)
    if WINDOW:
        lo = max(first - window + 1, 0)
        full_lo = max(last - window + 1, 0)
    if DOCUMENTS:
        rows = first_row + tl.arange(0, BLOCK_M)
        lo = max(lo, tl.min(tl.where(rows < tokens_q, doc_start, tokens_k)))
        full_lo = max(full_lo, tl.max(doc_start))
    lo = lo // BLOCK_N * BLOCK_N
    hi = max(hi, lo)
    full_lo = min(tl.cdiv(full_lo, BLOCK_N) * BLOCK_N, hi)
    full_hi = max(full_hi // BLOCK_N * BLOCK_N, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def attend(
    acc, row_max, row_sum, q, k, v, batch, kv_head, position, doc_start, lo, hi, tokens_k, window, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [lo, hi), tile by tile."""
    for start in tl.range(lo, hi, BLOCK_N):
        k_tile = load_tile(k, batch, kv_head, start, tokens_k, BLOCK_N, HEAD_DIM, MASKED, TMA)
        scores = tl.dot(q, tl.trans(k_tile), input_precision="ieee")
        if MASKED:
            key = start + tl.arange(0, BLOCK_N)
            seen = visible(
                position[:, None], key[None, :], doc_start[:, None], tokens_k, window, CAUSAL, WINDOW, DOCUMENTS
            )
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN: subtract 0 instead.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.exp2(scores * scale_log2 - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        # FA2 (1): acc stays unnormalised, it is rescaled here and divided by the sum once, after the last tile.
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        v_tile = load_tile(v, batch, kv_head, start, tokens_k, BLOCK_N, HEAD_DIM, MASKED, TMA)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, out, lse_ptr, doc_start_ptr, heads, heads_q, group, tokens_q, tokens_k, window, section, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    # FA2 (2): the grid runs over the tiles of the sequence as well as over batch and heads, so a long sequence with
    # few heads still fills the chip.
    tile, batch_head = program_tile(tl.cdiv(tokens_q, BLOCK_M), heads, section, CAUSAL)
    batch = batch_head // heads_q
    head = batch_head % heads_q
    kv_head = head // group  # grouped heads share K and V by reading the same addresses
    first_row = tile * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    position = rows + tokens_k - tokens_q
    doc_start = rows  # unused without documents
    if DOCUMENTS:
        doc_start = tl.load(doc_start_ptr + tl.cast(batch, tl.int64) * tokens_q + rows, mask=rows < tokens_q, other=0)

    # FA2 (3): q stays put, split by rows over the warps; every warp reads the whole K and V tile from shared memory
    # and owns its rows of the result, so warps never exchange partial sums.
    q_tile = load_tile(q, batch, head, first_row, tokens_q, BLOCK_M, HEAD_DIM, True, TMA)

    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    bounds = key_bounds(first_row, tokens_q, tokens_k, window, doc_start, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, DOCUMENTS)
    for part in tl.static_range(3):  # masked edge, mask-free middle, masked end
        if part > 0 or WINDOW or DOCUMENTS:
            acc, row_max, row_sum = attend(
                acc, row_max, row_sum, q_tile, k, v, batch, kv_head, position, doc_start,
                bounds[part], bounds[part + 1], tokens_k, window, scale_log2,
                HEAD_DIM, BLOCK_N, CAUSAL, WINDOW, DOCUMENTS, TMA, part != 1,
            )  # fmt: skip

    # FA2 (1) again: the only division. Rows that saw nothing have row_sum 0: out 0, lse -inf.
    nothing = row_sum == 0.0
    divisor = tl.where(nothing, 1.0, row_sum)
    store_tile(out, batch, head, first_row, tokens_q, acc / divisor[:, None], BLOCK_M, HEAD_DIM)
    lse = tl.where(nothing, float("-inf"), (row_max + tl.log2(divisor)) * LN_2)
    tl.store(lse_ptr + tl.cast(batch_head, tl.int64) * tokens_q + rows, lse, mask=rows < tokens_q)


def empty_heads(like: Tensor, tokens: int, heads: int) -> Tensor:
    """Uninitialised `[B, heads, tokens, D]` in memory order `[B, tokens, heads, D]`, so that the model's
    `transpose(1, 2).reshape(B, tokens, heads * D)` is free. The strides depend on nothing but the shape."""
    return like.new_empty(like.shape[0], tokens, heads, like.shape[3]).transpose(1, 2)


def fits_tma(x: Tensor) -> bool:
    """The copy engine wants addresses and strides in multiples of 16 bytes, and no stride of zero."""
    return x.data_ptr() % 16 == 0 and all(s > 0 and s * x.element_size() % 16 == 0 for s in x.stride()[:-1])


def source(x: Tensor, rows: int = 0, tma: bool = False):
    """What `load_tile` and `store_tile` take for a tensor `[B, H, T, D]`, for tiles of `rows` rows."""
    if tma:
        block = [1, 1, rows, triton.next_power_of_2(x.shape[3])]
        return TensorDescriptor(x, list(x.shape), list(x.stride()), block)
    return (x, *x.stride()[:3])


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc_start: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """out `[B, H_q, T_q, D]` in q's dtype and lse fp32 `[B, H_q, T_q]`. `tile` replaces the table's entry."""
    batch, heads_q, tokens_q, head_dim = q.shape
    heads_kv, tokens_k = k.shape[1], k.shape[2]
    group = heads_q // heads_kv
    out = empty_heads(q, tokens_q, heads_q)
    lse = q.new_empty(batch, heads_q, tokens_q, dtype=torch.float32)
    if out.numel() == 0 or k.numel() == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    tile = tile or tile_for("forward", head_dim, q.dtype, q.device)
    tma = tile.tma and all(map(fits_tma, (q, k, v)))
    forward_kernel[(triton.cdiv(tokens_q, tile.rows) * batch * heads_q,)](
        source(q, tile.rows, tma), source(k, tile.keys, tma), source(v, tile.keys, tma), source(out), lse, doc_start,
        batch * heads_q, heads_q, group, tokens_q, tokens_k, window or 0,
        group * heads_in_l2(batch * heads_kv, tokens_k * head_dim, q), scale * LOG2_E,
        HEAD_DIM=head_dim, BLOCK_M=tile.rows, BLOCK_N=tile.keys,
        CAUSAL=causal, WINDOW=window is not None, DOCUMENTS=doc_start is not None, TMA=tma,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
    return out, lse
