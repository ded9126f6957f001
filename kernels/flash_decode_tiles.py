"""What one program of flash decoding does with one chunk of the cache: bring it nearer, put the new tokens into it,
load tiles of it, attend.

The kernels that call these functions are in flash_decode_kernels.py, and the whole is told in flash_decode.py. A tensor
is a tuple here, its pointer and the strides of all dimensions but the last.

Bytes become numbers. The tensor core wants int8 values in 16 bits, and the V of a product lies across the threads such
that each reads a byte here and a byte there. So V is read as words of four channels (int32 [B, G, S, D / 4]), and one
product of D columns becomes four of D / 4, which are put back in order once, at the end of a chunk. (The bytes of a
cache have a sign; those of weights are stored without one, see unpack.py.)
"""

import triton
import triton.language as tl

import kernels.interpreter  # noqa: F401  (corrects the interpreter before its first use)
from kernels.rope_cache import normalise, store_heads, turn


@triton.jit
def row_pointers(source, batch, kv_head, rows, group, tokens, dims):
    """Addresses of query rows of `[B, H, T, D]`."""
    pointer, batch_stride, head_stride, token_stride = source
    head = tl.cast(kv_head * group + rows // tokens, tl.int64)
    offset = tl.cast(batch, tl.int64) * batch_stride + head * head_stride + (rows % tokens) * token_stride
    return pointer + offset[:, None] + dims[None, :]


@triton.jit
def load_keys(source, batch, kv_head, start, length, dims, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Keys or values start .. start + BLOCK_N of a cache `[B, G, S, D]`; zeros from `length` on."""
    pointer, batch_stride, head_stride, slot_stride = source
    # 64 bits up to the tile, since a cache may hold more than 2^31 elements; 32 bits inside it.
    first = tl.cast(batch, tl.int64) * batch_stride + tl.cast(kv_head, tl.int64) * head_stride
    base = pointer + first + tl.cast(start, tl.int64) * slot_stride
    slot = tl.arange(0, BLOCK_N)[:, None]
    inside = slot < length - start
    if dims.shape[0] != HEAD_DIM:
        inside = inside & (dims < HEAD_DIM)[None, :]
    return tl.load(base + slot * slot_stride + dims[None, :], mask=inside, other=0.0)


@triton.jit
def load_scales(source, batch, kv_head, start, length, BLOCK_N: tl.constexpr):
    """Scales `[B, G, S]` of the keys start .. start + BLOCK_N; zeros from `length` on."""
    pointer, batch_stride, head_stride = source
    key = start + tl.arange(0, BLOCK_N)
    base = pointer + tl.cast(batch, tl.int64) * batch_stride + tl.cast(kv_head, tl.int64) * head_stride
    return tl.load(base + key, mask=key < length, other=0.0)


@triton.jit
def prefetch_keys(source, batch, kv_head, lo, hi, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Ask for the first KEYS keys of [lo, hi) to be brought into the L2 cache. That is where memory is coherent: a
    request may come too early or be for naught, it does no harm."""
    pointer, batch_stride, head_stride, slot_stride = source
    SIZE: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = triton.next_power_of_2((HEAD_DIM * SIZE + 127) // 128)
    first = tl.cast(batch, tl.int64) * batch_stride + tl.cast(kv_head, tl.int64) * head_stride
    base = pointer + first + tl.cast(lo, tl.int64) * slot_stride
    slot = tl.minimum(tl.arange(0, KEYS), tl.maximum(hi - lo - 1, 0))[:, None]
    line = tl.minimum(tl.arange(0, LINES) * (128 // SIZE), HEAD_DIM - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [base + slot * slot_stride + line],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def turned_queries(
    q, batch, kv_head, rows, group, tokens, exists, cos_ptr, sin_ptr, norm_ptr, eps, HEAD_DIM: tl.constexpr
):
    """Query rows of the projection [BLOCK_M, D], normalised if there is a norm, turned: as `rope_and_cache` does."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype = q[0].dtype.element_ty
    dims = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    others = tl.where(dims < HALF, dims + HALF, dims - HALF)  # the other channel of the pair
    mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
    x = tl.load(row_pointers(q, batch, kv_head, rows, group, tokens, dims), mask=mask, other=0.0).to(tl.float32)
    y = tl.load(row_pointers(q, batch, kv_head, rows, group, tokens, others), mask=mask, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        squares = tl.sum(x * x, 1)
        x = normalise(
            x, squares, tl.load(norm_ptr + dims, mask=dims < HEAD_DIM, other=0.0)[None, :], eps, HEAD_DIM, dtype
        )
        y = normalise(
            y, squares, tl.load(norm_ptr + others, mask=dims < HEAD_DIM, other=0.0)[None, :], eps, HEAD_DIM, dtype
        )
    angle = ((batch * tokens + rows % tokens) * HALF)[:, None] + tl.where(dims < HALF, dims, dims - HALF)[None, :]
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
    return turn(x, y * tl.where(dims < HALF, -1.0, 1.0)[None, :], cos, sin).to(dtype)


@triton.jit
def store_new(
    k_new, v_new, k, v, k_scale, v_scale, batch, kv_head, start, lo, hi, tokens, cos_ptr, sin_ptr, norm_ptr, eps,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Those of the new keys and values `[B, G, T, D]` that stand in [lo, hi) into the cache, as `rope_and_cache` does.

    BLOCK_M tokens at a time whatever T is: another shape might add the squares of a norm in another order."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype = k_new[0].dtype.element_ty
    dims = tl.arange(0, triton.next_power_of_2(HALF))
    inside = dims < HALF
    for first in tl.range(0, tokens, BLOCK_M, num_stages=1):
        token = first + tl.arange(0, BLOCK_M)
        position = start + token
        mine = (token < tokens) & (start >= 0) & (position >= lo) & (position < hi)
        mask = mine[:, None] & inside[None, :]
        pointers = row_pointers(k_new, batch, kv_head, token, 1, tokens, dims)
        left = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
            weight = tl.load(norm_ptr + dims, mask=inside, other=0.0)[None, :]
            left = normalise(left, squares, weight, eps, HEAD_DIM, dtype)
            weight = tl.load(norm_ptr + HALF + dims, mask=inside, other=0.0)[None, :]
            right = normalise(right, squares, weight, eps, HEAD_DIM, dtype)
        angle = ((batch * tokens + token) * HALF)[:, None] + dims[None, :]
        cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
        new_left, new_right = turn(left, -right, cos, sin).to(dtype), turn(right, left, cos, sin).to(dtype)
        new_left, new_right = new_left.to(tl.float32), new_right.to(tl.float32)
        store_heads(k, k_scale, batch, kv_head, position, new_left, new_right, dims, mine, HALF)
        pointers = row_pointers(v_new, batch, kv_head, token, 1, tokens, dims)
        left = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)
        store_heads(v, v_scale, batch, kv_head, position, left, right, dims, mine, HALF)


@triton.jit
def unpack_bytes(words, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """int32 [...] -> its four int8 as numbers of DTYPE, lowest first.

    In PTX, for bf16, two numbers at once: 0x43 above a byte is a bf16 number, 128 + its low 7 bits with the sign bit
    cleared, 128 or 256 with the others cleared; the difference is the int8.
    """
    if PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, s, t, minus;
            mov.b32 minus, 0xbf80bf80;
            prmt.b32 low, $4, $5, 0x5140;
            prmt.b32 high, $4, $5, 0x7362;
            prmt.b32 s, low, 0x43434343, 0x4140;
            and.b32 t, s, 0xff80ff80;
            and.b32 s, s, 0xff7fff7f;
            fma.rn.bf16x2 $0, t, minus, s;
            prmt.b32 s, low, 0x43434343, 0x4342;
            and.b32 t, s, 0xff80ff80;
            and.b32 s, s, 0xff7fff7f;
            fma.rn.bf16x2 $1, t, minus, s;
            prmt.b32 s, high, 0x43434343, 0x4140;
            and.b32 t, s, 0xff80ff80;
            and.b32 s, s, 0xff7fff7f;
            fma.rn.bf16x2 $2, t, minus, s;
            prmt.b32 s, high, 0x43434343, 0x4342;
            and.b32 t, s, 0xff80ff80;
            and.b32 s, s, 0xff7fff7f;
            fma.rn.bf16x2 $3, t, minus, s;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a, b = ((words << 24) >> 24).to(DTYPE), ((words << 16) >> 24).to(DTYPE)
        c, d = ((words << 8) >> 24).to(DTYPE), (words >> 24).to(DTYPE)
    return a, b, c, d


@triton.jit
def attend_chunk(
    q_tiles, positions, k, v, v_words, k_scale, v_scale, batch, kv_head, lo, hi, window, scale_log2,
    HEAD_DIM: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Online softmax (see flash_attention_forward.py) of every tile over the keys [lo, hi); K and V are read
    once for all tiles. Returns tuples acc, row_max, row_sum with an entry for each tile."""
    PARTS: tl.constexpr = 1 if v_words is None else 4
    PADDED: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    dtype = q_tiles[0].dtype
    dims = tl.arange(0, PADDED)
    accs, maxima, sums = (), (), ()
    for _ in tl.static_range(TILES):
        for _ in tl.static_range(PARTS):
            accs = accs + (tl.zeros([BLOCK_M, PADDED // PARTS], tl.float32),)
        maxima = maxima + (tl.full([BLOCK_M], float("-inf"), tl.float32),)
        # Column by column; added up across threads once, at the end.
        sums = sums + (tl.zeros([BLOCK_M, BLOCK_N], tl.float32),)
    for start in tl.range(lo, hi, BLOCK_N):
        k_tile = tl.trans(load_keys(k, batch, kv_head, start, hi, dims, BLOCK_N, HEAD_DIM).to(dtype))
        if v_words is not None:
            words = tl.arange(0, PADDED // 4)
            words = load_keys(v_words, batch, kv_head, start, hi, words, BLOCK_N, HEAD_DIM // 4)
            values = unpack_bytes(words, dtype, PTX)
        else:
            values = (load_keys(v, batch, kv_head, start, hi, dims, BLOCK_N, HEAD_DIM).to(dtype),)
        key = (start + tl.arange(0, BLOCK_N))[None, :]
        k_factor = scale_log2
        if k_scale is not None:  # one scale a key: on the scores for K, on the weights for V, never on the tile
            k_factor = load_scales(k_scale, batch, kv_head, start, hi, BLOCK_N)[None, :] * scale_log2
            v_factor = load_scales(v_scale, batch, kv_head, start, hi, BLOCK_N)[None, :]
        all_scores = ()  # all products before the first maximum: there is more to do while one waits for another
        for i in tl.static_range(TILES):
            scores = tl.dot(q_tiles[i], k_tile, input_precision="ieee") * k_factor
            seen = key <= positions[i][:, None]
            if WINDOW:
                seen = seen & (key > positions[i][:, None] - window)
            all_scores = all_scores + (tl.where(seen, scores, float("-inf")),)
        new_accs, new_maxima, new_sums = (), (), ()
        for i in tl.static_range(TILES):
            row_max = tl.maximum(maxima[i], tl.max(all_scores[i], 1))
            # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN: subtract 0 instead.
            shift = tl.where(row_max == float("-inf"), 0.0, row_max)
            weights = tl.exp2(all_scores[i] - shift[:, None])
            rescale = tl.exp2(maxima[i] - shift)
            row_sum = tl.fma(sums[i], tl.broadcast_to(rescale[:, None], weights.shape), weights)
            if k_scale is not None:
                weights = weights * v_factor
            weights = weights.to(dtype)
            for j in tl.static_range(PARTS):
                acc = accs[PARTS * i + j] * rescale[:, None]
                new_accs = new_accs + (tl.dot(weights, values[j], acc, input_precision="ieee"),)
            new_maxima, new_sums = new_maxima + (row_max,), new_sums + (row_sum,)
        accs, maxima, sums = new_accs, new_maxima, new_sums

    totals = ()
    for i in tl.static_range(TILES):
        totals = totals + (tl.sum(sums[i], 1),)
    if v_words is not None:  # column c of part j is channel 4 c + j
        wholes = ()
        for i in tl.static_range(TILES):
            even, odd = tl.join(accs[4 * i], accs[4 * i + 2]), tl.join(accs[4 * i + 1], accs[4 * i + 3])
            wholes = wholes + (tl.reshape(tl.join(even, odd), [BLOCK_M, PADDED]),)
        accs = wholes
    return accs, maxima, totals
