"""FlashAttention backward: gradients by recomputation, with nothing of size T x T kept from the forward pass.

The mathematics. The forward pass left out and lse. With s = scale * q.k and p = exp(s - lse) the softmax weights come
back exactly, one tile at a time, and for an upstream gradient do:

    dv_j = sum_i p_ij do_i                                     delta_i = do_i . out_i
    ds_ij = p_ij (do_i . v_j - delta_i)                        (the softmax Jacobian; delta replaces its row sum)
    dk_j = scale * sum_i ds_ij q_i                             dq_i = scale * sum_j ds_ij k_j

The tiling (Dao et al. 2022, appendix B; Dao 2023, section 3.1.2). dk and dv sum over queries, dq sums over keys, so
there are two kernels, each owning what it sums into: no atomics, and the same bits every time.

    dk, dv: a program owns BLOCK_N keys of one KV head and        dq: a program owns BLOCK_M queries of one head
    walks every query head of its group, BLOCK_M queries          and walks the keys, exactly as the forward does
    at a time:
                keys                                                          keys ->
              ┌──────┐                                                  ┌──────┬──────┬──────┐
      queries │ mask │ diagonal                                 queries │      no mask       │ mask
         |    ├──────┤                                                  └──────┴──────┴──────┘
         v    │ no   │ x every head of the group
              │ mask │
              └──────┘

Grouped heads cost nothing here: K and V stay in place while the heads that share them stream past, and the sum over
the group happens in the registers of dk and dv.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.flash_attention_forward import (
    LOG2_E,
    SIZES,
    empty_heads,
    fits_tma,
    key_bounds,
    load_tile,
    program_tile,
    source,
    store_tile,
    visible,
)
from kernels.tiles import Tile, heads_in_l2, programs_to_fill, tile_for

LOG2_E_ = tl.constexpr(LOG2_E)
PADDING = 128  # a multiple of every tile's rows
PREPARE_ROWS = 32


@triton.jit(do_not_specialize=SIZES)
def prepare_kernel(
    out, dout, lse_ptr, lse2_ptr, delta_ptr, heads_q, tokens_q, padded,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What the other kernels need of each query, fp32, every head padded to `padded` rows: delta, and lse in powers
    of two. A row that saw nothing (lse -inf) and a row of padding get +inf: their weights exp2(s - inf) are 0
    without a mask, and so are their gradients."""
    program = tl.program_id(0)
    tiles = padded // ROWS
    batch_head = tl.cast(program // tiles, tl.int64)
    first_row = program % tiles * ROWS
    rows = first_row + tl.arange(0, ROWS)
    batch = batch_head // heads_q
    head = batch_head % heads_q
    out_tile = load_tile(out, batch, head, first_row, tokens_q, ROWS, HEAD_DIM, True, False).to(tl.float32)
    dout_tile = load_tile(dout, batch, head, first_row, tokens_q, ROWS, HEAD_DIM, True, False).to(tl.float32)
    tl.store(delta_ptr + batch_head * padded + rows, tl.sum(out_tile * dout_tile, 1))
    lse = tl.load(lse_ptr + batch_head * tokens_q + rows, mask=rows < tokens_q, other=float("-inf"))
    tl.store(lse2_ptr + batch_head * padded + rows, tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E_))


@triton.jit
def load_rows(vector, start, ROWS: tl.constexpr, TMA: tl.constexpr):
    """ROWS numbers of lse2 or delta, as `prepare_kernel` laid them out, from a descriptor or a pointer."""
    if TMA:
        values = vector.load([tl.cast(start, tl.int32)])
    else:
        values = tl.load(vector + start + tl.arange(0, ROWS))
    return values


@triton.jit
def add_queries(
    dk, dv, k_tile, v_tile, q, dout, lse2, delta, doc_start_ptr, batch, first_head, first_key, lo, hi, group, heads_q,
    padded, tokens_q, tokens_k, window, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv what the queries [lo, hi) of `group` heads give. Scores are kept transposed, keys by queries:
    the weights are then already the left operand of the products that make dv and dk."""
    # One loop over (head, tile) and not two nested ones: the pipeline of loads never drains between heads.
    tiles = tl.cdiv(max(hi - lo, 0), BLOCK_M)
    if not CAUSAL:
        # Every query counts, so the loop runs. Said aloud, because a way around it that leaves dk and dv at zero makes
        # ptxas wait after every single wgmma (its warning C7515).
        tl.assume(tiles * group > 0)
    for step in tl.range(0, tiles * group):
        head = first_head + step // tiles
        first_row = lo + step % tiles * BLOCK_M
        rows = first_row + tl.arange(0, BLOCK_M)
        start = (tl.cast(batch, tl.int64) * heads_q + head) * padded + first_row
        q_tile = load_tile(q, batch, head, first_row, tokens_q, BLOCK_M, HEAD_DIM, True, TMA)
        lse_rows = load_rows(lse2, start, BLOCK_M, TMA)
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
        weights = tl.exp2(scores * scale_log2 - lse_rows[None, :])
        if MASKED:
            position = rows + tokens_k - tokens_q
            key = first_key + tl.arange(0, BLOCK_N)
            doc_start = rows
            if DOCUMENTS:
                doc_pointers = doc_start_ptr + tl.cast(batch, tl.int64) * tokens_q + rows
                doc_start = tl.load(doc_pointers, mask=rows < tokens_q, other=0)
            seen = visible(
                position[None, :], key[:, None], doc_start[None, :], tokens_k, window, CAUSAL, WINDOW, DOCUMENTS
            )
            weights = tl.where(seen, weights, 0.0)  # after exp2: a hidden score may lie far above lse
        dout_tile = load_tile(dout, batch, head, first_row, tokens_q, BLOCK_M, HEAD_DIM, True, TMA)
        dweights = tl.dot(v_tile, tl.trans(dout_tile), input_precision="ieee")
        delta_rows = load_rows(delta, start, BLOCK_M, TMA)
        # Between the products of dweights and dk: the tensor cores work on dv while dscores is computed.
        dv = tl.dot(weights.to(dout_tile.dtype), dout_tile, dv, input_precision="ieee")
        dscores = weights * (dweights - delta_rows[None, :])
        dk = tl.dot(dscores.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def dkdv_kernel(
    q, k, v, dout, lse2, delta, doc_start_ptr, last_rows_ptr, dk, dv, heads, heads_q, heads_kv, group, splits, padded,
    tokens_q, tokens_k, window, section, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dk and dv are `[splits * B, H_kv, T_k, D]`: `splits` cuts the group of heads, see `key_gradients`."""
    # Under a causal mask the first key tile has the most queries: no reversal here.
    key_tiles = tl.cdiv(tokens_k, BLOCK_N)
    tile, kv_head_split = program_tile(key_tiles, heads, section, False)
    split = kv_head_split % splits
    kv_head = kv_head_split // splits % heads_kv
    batch = kv_head_split // (splits * heads_kv)
    batches = heads // (splits * heads_kv)
    first_head = kv_head * group + split * (group // splits)
    first_key = tile * BLOCK_N

    # The queries that see this tile, as lo <= full_lo <= full_hi <= hi, in the way of `key_bounds`.
    last_key = min(first_key + BLOCK_N, tokens_k) - 1
    ahead = tokens_k - tokens_q  # position of a query = its row + ahead
    lo = 0
    full_lo = 0
    full_hi = tokens_q
    hi = tokens_q
    if CAUSAL:
        lo = max(first_key - ahead, 0)
        full_lo = max(last_key - ahead, 0)
    if WINDOW:
        full_hi = min(full_hi, first_key + window - ahead)
        hi = min(hi, last_key + window - ahead)
    if DOCUMENTS:
        last_rows = last_rows_ptr + (tl.cast(batch, tl.int64) * key_tiles + tile) * 2
        full_hi = min(full_hi, tl.load(last_rows))
        hi = min(hi, tl.load(last_rows + 1))
    if WINDOW or DOCUMENTS:  # else the middle runs to the end: rows of padding have weight 0
        full_hi = max(full_hi, 0) // BLOCK_M * BLOCK_M
    lo = lo // BLOCK_M * BLOCK_M
    hi = max(hi, lo)
    full_lo = min(tl.cdiv(full_lo, BLOCK_M) * BLOCK_M, hi)
    bounds = (lo, full_lo, max(full_hi, full_lo), hi)

    # Keys past the end need no mask: what they add lands in rows of dk and dv that are not stored.
    k_tile = load_tile(k, batch, kv_head, first_key, tokens_k, BLOCK_N, HEAD_DIM, True, TMA)
    v_tile = load_tile(v, batch, kv_head, first_key, tokens_k, BLOCK_N, HEAD_DIM, True, TMA)
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for part in tl.static_range(3):  # masked diagonal, mask-free middle, masked edge of a window or document
        if part == 1 or (part == 0 and CAUSAL) or (part == 2 and (WINDOW or DOCUMENTS)):
            dk_tile, dv_tile = add_queries(
                dk_tile, dv_tile, k_tile, v_tile, q, dout, lse2, delta, doc_start_ptr,
                batch, first_head, first_key, bounds[part], bounds[part + 1], group // splits, heads_q,
                padded, tokens_q, tokens_k, window, scale_log2,
                HEAD_DIM, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, DOCUMENTS, TMA, part != 1,
            )  # fmt: skip
    store_tile(dk, split * batches + batch, kv_head, first_key, tokens_k, dk_tile * scale, BLOCK_N, HEAD_DIM)
    store_tile(dv, split * batches + batch, kv_head, first_key, tokens_k, dv_tile, BLOCK_N, HEAD_DIM)


@triton.jit
def add_keys(
    dq, q_tile, dout_tile, lse_rows, delta_rows, k, v, batch, kv_head, position, doc_start, lo, hi, tokens_k, window,
    scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add to dq what the keys [lo, hi) give."""
    for start in tl.range(lo, hi, BLOCK_N):
        k_tile = load_tile(k, batch, kv_head, start, tokens_k, BLOCK_N, HEAD_DIM, MASKED, TMA)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        weights = tl.exp2(scores * scale_log2 - lse_rows[:, None])
        if MASKED:
            key = start + tl.arange(0, BLOCK_N)
            seen = visible(
                position[:, None], key[None, :], doc_start[:, None], tokens_k, window, CAUSAL, WINDOW, DOCUMENTS
            )
            weights = tl.where(seen, weights, 0.0)
        v_tile = load_tile(v, batch, kv_head, start, tokens_k, BLOCK_N, HEAD_DIM, MASKED, TMA)
        dweights = tl.dot(dout_tile, tl.trans(v_tile), input_precision="ieee")
        dscores = weights * (dweights - delta_rows[:, None])
        dq = tl.dot(dscores.to(k_tile.dtype), k_tile, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=SIZES)
def dq_kernel(
    q, k, v, dout, lse2_ptr, delta_ptr, doc_start_ptr, dq, heads, heads_q, group, padded, tokens_q, tokens_k, window,
    section, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    tile, batch_head = program_tile(tl.cdiv(tokens_q, BLOCK_M), heads, section, CAUSAL)
    batch = batch_head // heads_q
    head = batch_head % heads_q
    kv_head = head // group
    first_row = tile * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    position = rows + tokens_k - tokens_q
    doc_start = rows  # unused without documents
    if DOCUMENTS:
        doc_start = tl.load(doc_start_ptr + tl.cast(batch, tl.int64) * tokens_q + rows, mask=rows < tokens_q, other=0)
    q_tile = load_tile(q, batch, head, first_row, tokens_q, BLOCK_M, HEAD_DIM, True, TMA)
    dout_tile = load_tile(dout, batch, head, first_row, tokens_q, BLOCK_M, HEAD_DIM, True, TMA)
    start = tl.cast(batch_head, tl.int64) * padded + first_row
    lse_rows = load_rows(lse2_ptr, start, BLOCK_M, False)
    delta_rows = load_rows(delta_ptr, start, BLOCK_M, False)

    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    bounds = key_bounds(first_row, tokens_q, tokens_k, window, doc_start, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, DOCUMENTS)
    for part in tl.static_range(3):  # masked edge, mask-free middle, masked end
        if part > 0 or WINDOW or DOCUMENTS:
            dq_tile = add_keys(
                dq_tile, q_tile, dout_tile, lse_rows, delta_rows, k, v, batch, kv_head, position, doc_start,
                bounds[part], bounds[part + 1], tokens_k, window, scale_log2,
                HEAD_DIM, BLOCK_N, CAUSAL, WINDOW, DOCUMENTS, TMA, part != 1,
            )  # fmt: skip
    store_tile(dq, batch, head, first_row, tokens_q, dq_tile * scale, BLOCK_M, HEAD_DIM)


def rows_by_document(doc_start: Tensor, tokens_k: int, block: int) -> Tensor:
    """For each tile of `block` keys: how many rows have a document that starts at or before its first key, and at or
    before its last key. int32 `[B, tiles, 2]`. `doc_start` grows along a row, so both are binary searches."""
    first = torch.arange(0, tokens_k, block, dtype=torch.int32, device=doc_start.device)
    edges = torch.stack([first, first + block - 1], dim=1).flatten()
    edges = edges.expand(doc_start.shape[0], -1).contiguous()
    return torch.searchsorted(doc_start, edges, right=True, out_int32=True)


def prepare(out: Tensor, dout: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """lse in powers of two and delta, fp32 vectors with every head padded to a multiple of PADDING rows."""
    batch, heads_q, tokens_q, head_dim = out.shape
    padded = triton.cdiv(tokens_q, PADDING) * PADDING
    lse2, delta = lse.new_empty(2, batch * heads_q * padded)
    prepare_kernel[(padded // PREPARE_ROWS * batch * heads_q,)](
        source(out), source(dout), lse, lse2, delta, heads_q, tokens_q, padded, HEAD_DIM=head_dim, ROWS=PREPARE_ROWS
    )
    return lse2, delta


def key_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, prepared: tuple[Tensor, Tensor],
    doc_start: Tensor | None, causal: bool, window: int | None, scale: float, tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dk and dv, like k and v. `tile` replaces the table's entry."""
    batch, heads_q, tokens_q, head_dim = q.shape
    heads_kv, tokens_k = k.shape[1], k.shape[2]
    group = heads_q // heads_kv
    padded = prepared[0].numel() // (batch * heads_q)
    tile = tile or tile_for("dkdv", head_dim, q.dtype, q.device)
    tma = tile.tma and all(map(fits_tma, (q, k, v, dout))) and prepared[0].numel() < 2**31
    key_tiles = triton.cdiv(tokens_k, tile.keys)
    # One program sums a whole group. With few KV heads and a short sequence that leaves the chip idle: then cut the
    # group into `splits`, keep their sums apart in fp32 and add them up in a fixed order. Only launches smaller than
    # the chip do this, so the extra memory has a bound that no size of input moves.
    wanted = programs_to_fill(q.device) / (key_tiles * batch * heads_kv)
    splits = next((s for s in range(1, group) if group % s == 0 and s >= wanted), group)
    dk, dv = (empty_heads(k, tokens_k, heads_kv) for _ in range(2))
    parts = (dk, dv)
    if splits > 1:
        parts = k.new_empty(2, splits * batch, heads_kv, tokens_k, head_dim, dtype=torch.float32)
    dkdv_kernel[(key_tiles * batch * heads_kv * splits,)](
        source(q, tile.rows, tma), source(k, tile.keys, tma), source(v, tile.keys, tma), source(dout, tile.rows, tma),
        *(TensorDescriptor(x, [x.numel()], [1], [tile.rows]) if tma else x for x in prepared),
        doc_start, None if doc_start is None else rows_by_document(doc_start, tokens_k, tile.keys), *map(source, parts),
        batch * heads_kv * splits, heads_q, heads_kv, group, splits, padded, tokens_q, tokens_k, window or 0,
        splits * heads_in_l2(batch * heads_kv, group * tokens_q * head_dim, q), scale, scale * LOG2_E,
        HEAD_DIM=head_dim, BLOCK_M=tile.rows, BLOCK_N=tile.keys,
        CAUSAL=causal, WINDOW=window is not None, DOCUMENTS=doc_start is not None, TMA=tma,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
    if splits > 1:
        for total, part in zip((dk, dv), parts, strict=True):
            total.copy_(part.view(splits, *total.shape).sum(dim=0))
    return dk, dv


def query_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, prepared: tuple[Tensor, Tensor],
    doc_start: Tensor | None, causal: bool, window: int | None, scale: float, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """dq, like q. `tile` replaces the table's entry."""
    batch, heads_q, tokens_q, head_dim = q.shape
    tokens_k, group = k.shape[2], heads_q // k.shape[1]
    padded = prepared[0].numel() // (batch * heads_q)
    tile = tile or tile_for("dq", head_dim, q.dtype, q.device)
    tma = tile.tma and all(map(fits_tma, (q, k, v, dout)))
    dq = empty_heads(q, tokens_q, heads_q)
    dq_kernel[(triton.cdiv(tokens_q, tile.rows) * batch * heads_q,)](
        source(q, tile.rows, tma), source(k, tile.keys, tma), source(v, tile.keys, tma), source(dout, tile.rows, tma),
        *prepared, doc_start, source(dq),
        batch * heads_q, heads_q, group, padded, tokens_q, tokens_k, window or 0,
        group * heads_in_l2(batch * heads_q // group, tokens_k * head_dim, q), scale, scale * LOG2_E,
        HEAD_DIM=head_dim, BLOCK_M=tile.rows, BLOCK_N=tile.keys,
        CAUSAL=causal, WINDOW=window is not None, DOCUMENTS=doc_start is not None, TMA=tma,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
    return dq


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    doc_start: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes and dtypes of q, k, v, from the inputs and results of `forward`."""
    if out.numel() == 0 or k.numel() == 0:
        return tuple(empty_heads(x, x.shape[2], x.shape[1]).zero_() for x in (q, k, v))
    prepared = prepare(out, dout, lse)
    dk, dv = key_gradients(q, k, v, dout, prepared, doc_start, causal, window, scale)
    return query_gradients(q, k, v, dout, prepared, doc_start, causal, window, scale), dk, dv
