"""The kernels of flash decoding: one that reads the cache chunk by chunk, one that puts many chunks together.

What they compute, and how the work is cut, is told in flash_decode.py. Lengths are read on the device: the grid of
`split_kernel` is what the chip holds at once, its programs share out the chunks that exist, and those that get none
leave. Where there are few chunks the last program to arrive at a row merges them (`fold`); where there are many,
`combine_kernel` does, over the whole chip.
"""

import triton
import triton.language as tl

import kernels.interpreter  # noqa: F401  (corrects the interpreter before its first use)
from kernels.overlap import wait_for_the_kernel_before

# Arguments that change from call to call: a kernel must not be compiled anew because one is a multiple of 16.
SIZES = ["batches", "heads_kv", "group", "tokens", "slots", "chunks", "blocks", "window"]


@triton.jit
def visible_chunks(length, tokens, window, chunking, WINDOW: tl.constexpr):
    """Keys of a row's chunks, the first of them that any of the new tokens sees, and how many. An empty row still has
    one, which says that it saw nothing."""
    near, middle, far, near_end, middle_end = chunking
    start = length - tokens
    chunk_keys = tl.where(start < near_end, near, tl.where(start < middle_end, middle, far))
    first = length * 0
    if WINDOW:
        first = tl.maximum(length - tokens - window + 1, 0) // chunk_keys
    return chunk_keys, first, tl.maximum(tl.cdiv(length, chunk_keys) - first, 1)


@triton.jit
def row_pointers(source, batch, kv_head, rows, group, tokens, dims):
    """Addresses of query rows in a tuple (pointer, batch stride, head stride, token stride) of `[B, H, T, D]`."""
    pointer, batch_stride, head_stride, token_stride = source
    head = tl.cast(kv_head * group + rows // tokens, tl.int64)
    offset = tl.cast(batch, tl.int64) * batch_stride + head * head_stride + (rows % tokens) * token_stride
    return pointer + offset[:, None] + dims[None, :]


@triton.jit
def fold(
    out, partial_ptr, lse_ptr, batch, kv_head, first_row, end_row, first, last, heads_kv, group, tokens, chunks,
    HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Merge the chunks [first, last) of BLOCK_R query rows of one KV head, one after another."""
    BLOCK_C: tl.constexpr = 32
    rows = first_row + tl.arange(0, BLOCK_R)
    inside = rows < end_row
    dims = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    line = ((tl.cast(batch, tl.int64) * heads_kv + kv_head) * group * tokens + rows) * chunks
    row_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
    # ".cg" reads past the L1 cache, which knows nothing of what other multiprocessors wrote.
    for start in tl.range(first, last, BLOCK_C, num_stages=1):
        chunk = (start + tl.arange(0, BLOCK_C))[None, :]
        mask = inside[:, None] & (chunk < last)
        lse = tl.load(lse_ptr + line[:, None] + chunk, mask=mask, other=float("-inf"), cache_modifier=".cg")
        row_max = tl.maximum(row_max, tl.max(lse, 1))
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)

    acc = tl.zeros([BLOCK_R, triton.next_power_of_2(HEAD_DIM)], tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    for start in tl.range(first, last, UNROLL, num_stages=1):
        for i in tl.static_range(UNROLL):
            cell = line + start + i
            mask = inside & (start + i < last)
            lse = tl.load(lse_ptr + cell, mask=mask, other=float("-inf"), cache_modifier=".cg")
            pointers = partial_ptr + (cell * HEAD_DIM)[:, None] + dims[None, :]
            mask = mask[:, None] & (dims < HEAD_DIM)[None, :]
            partial = tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg")
            weight = tl.exp2(lse - shift)
            acc = tl.fma(partial, tl.broadcast_to(weight[:, None], partial.shape), acc)
            total += weight
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a row that saw nothing is 0
    pointers = row_pointers(out, batch, kv_head, rows, group, tokens, dims)
    mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(pointers, result.to(out[0].dtype.element_ty), mask=mask)


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
def attend_chunk(
    q_tiles, positions, k, v, k_scale, v_scale, batch, kv_head, lo, hi, window, scale_log2,
    HEAD_DIM: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Online softmax (see flash_attention_forward.py) of every tile over the keys [lo, hi); K and V are read
    once for all tiles. Returns tuples acc, row_max, row_sum with an entry for each tile."""
    dims = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    accs, maxima, sums = (), (), ()
    for _ in tl.static_range(TILES):
        accs = accs + (tl.zeros([BLOCK_M, triton.next_power_of_2(HEAD_DIM)], tl.float32),)
        maxima = maxima + (tl.full([BLOCK_M], float("-inf"), tl.float32),)
        sums = sums + (tl.zeros([BLOCK_M], tl.float32),)
    for start in tl.range(lo, hi, BLOCK_N):
        k_tile = tl.trans(load_keys(k, batch, kv_head, start, hi, dims, BLOCK_N, HEAD_DIM).to(q_tiles[0].dtype))
        v_tile = load_keys(v, batch, kv_head, start, hi, dims, BLOCK_N, HEAD_DIM).to(q_tiles[0].dtype)
        key = (start + tl.arange(0, BLOCK_N))[None, :]
        if QUANTIZED:  # one scale a key: on the scores for K, on the weights for V, never on the tile
            k_factor = load_scales(k_scale, batch, kv_head, start, hi, BLOCK_N)[None, :] * scale_log2
            v_factor = load_scales(v_scale, batch, kv_head, start, hi, BLOCK_N)[None, :]
        else:
            k_factor = scale_log2
        new_accs, new_maxima, new_sums = (), (), ()
        for i in tl.static_range(TILES):
            scores = tl.dot(q_tiles[i], k_tile, input_precision="ieee") * k_factor
            seen = key <= positions[i][:, None]
            if WINDOW:
                seen = seen & (key > positions[i][:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            row_max = tl.maximum(maxima[i], tl.max(scores, 1))
            # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN: subtract 0 instead.
            shift = tl.where(row_max == float("-inf"), 0.0, row_max)
            weights = tl.exp2(scores - shift[:, None])
            rescale = tl.exp2(maxima[i] - shift)
            row_sum = sums[i] * rescale + tl.sum(weights, 1)
            if QUANTIZED:
                weights = weights * v_factor
            acc = tl.dot(weights.to(v_tile.dtype), v_tile, accs[i] * rescale[:, None], input_precision="ieee")
            new_accs, new_maxima, new_sums = new_accs + (acc,), new_maxima + (row_max,), new_sums + (row_sum,)
        accs, maxima, sums = new_accs, new_maxima, new_sums
    return accs, maxima, sums


@triton.jit(do_not_specialize=SIZES)
def split_kernel(
    q, k, v, k_scale, v_scale, out, cache_len_ptr, partial_ptr, lse_ptr, counter_ptr, batches, heads_kv, group,
    tokens, slots, chunks, blocks, window, chunking, scale_log2,
    HEAD_DIM: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, WINDOW: tl.constexpr, QUANTIZED: tl.constexpr,
    SINGLE: tl.constexpr, FUSED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Chunks of all rows of the batch, numbered one after another and shared out among the programs.

    `chunks` is the room for partial results, the most that a row can have; SINGLE says that it is one.
    """
    wait_for_the_kernel_before(OVERLAP)
    batch_ids = tl.arange(0, BLOCK_B)
    lengths = tl.load(cache_len_ptr + batch_ids, mask=batch_ids < batches, other=0)
    lengths = tl.minimum(tl.maximum(lengths, 0), slots)
    keys_of_chunks, firsts, counts = visible_chunks(lengths, tokens, window, chunking, WINDOW)
    counts = tl.where(batch_ids < batches, counts, 0)
    ends = tl.cumsum(counts, 0)
    dims = tl.arange(0, triton.next_power_of_2(HEAD_DIM))

    tasks = tl.sum(counts, 0) * heads_kv * blocks
    for task in tl.range(tl.program_id(0), tasks, tl.num_programs(0), num_stages=1):
        block = task % blocks  # blocks of rows read the same keys: side by side, one of them finds them in L2
        kv_head = task // blocks % heads_kv
        number = task // (blocks * heads_kv)
        batch = tl.sum((ends <= number).to(tl.int32), 0)
        mine = batch_ids == batch
        length = tl.sum(tl.where(mine, lengths, 0), 0)
        first = tl.sum(tl.where(mine, firsts, 0), 0)
        count = tl.sum(tl.where(mine, counts, 0), 0)
        chunk_keys = tl.sum(tl.where(mine, keys_of_chunks, 0), 0)
        chunk = first + number - tl.sum(tl.where(mine, ends - counts, 0), 0)

        lo = chunk * chunk_keys
        hi = tl.minimum(lo + chunk_keys, length)
        if WINDOW:
            lo = tl.maximum(lo, tl.maximum(length - tokens - window + 1, 0) // BLOCK_N * BLOCK_N)
        q_tiles, positions, tile_rows = (), (), ()
        for i in tl.static_range(TILES):
            rows = (block * TILES + i) * BLOCK_M + tl.arange(0, BLOCK_M)
            exists = rows < group * tokens
            pointers = row_pointers(q, batch, kv_head, rows, group, tokens, dims)
            mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
            q_tiles = q_tiles + (tl.load(pointers, mask=mask, other=0.0),)
            # Rows that pad the tile stand before every key.
            positions = positions + (tl.where(exists, length - tokens + rows % tokens, -1),)
            tile_rows = tile_rows + (rows,)
        accs, maxima, sums = attend_chunk(
            q_tiles, positions, k, v, k_scale, v_scale, batch, kv_head, lo, hi, window, scale_log2,
            HEAD_DIM, TILES, BLOCK_M, BLOCK_N, WINDOW, QUANTIZED,
        )  # fmt: skip

        line = (tl.cast(batch, tl.int64) * heads_kv + kv_head) * group * tokens
        for i in tl.static_range(TILES):
            rows = tile_rows[i]
            mask = (rows < group * tokens)[:, None] & (dims < HEAD_DIM)[None, :]
            nothing = sums[i] == 0.0
            divisor = tl.where(nothing, 1.0, sums[i])
            result = accs[i] / divisor[:, None]
            if SINGLE:
                pointers = row_pointers(out, batch, kv_head, rows, group, tokens, dims)
                tl.store(pointers, result.to(out[0].dtype.element_ty), mask=mask)
            else:
                cell = (line + rows) * chunks + chunk
                tl.store(partial_ptr + (cell * HEAD_DIM)[:, None] + dims[None, :], result, mask=mask)
                lse = tl.where(nothing, float("-inf"), maxima[i] + tl.log2(divisor))
                tl.store(lse_ptr + cell, lse, mask=rows < group * tokens)
        if FUSED:
            # The barrier puts the stores of all threads before the one that counts them. Whoever counts last sees
            # the stores of everyone, and leaves the counter at zero for the next launch.
            counter = counter_ptr + (batch * heads_kv + kv_head) * blocks + block
            tl.debug_barrier()
            if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                end_row = tl.minimum(group * tokens, (block + 1) * TILES * BLOCK_M)
                for row in tl.range(block * TILES * BLOCK_M, end_row, BLOCK_R, num_stages=1):
                    fold(
                        out, partial_ptr, lse_ptr, batch, kv_head, row, end_row, first, first + count,
                        heads_kv, group, tokens, chunks, HEAD_DIM, BLOCK_R, 16 if BLOCK_R <= 4 else 64 // BLOCK_R,
                    )  # fmt: skip
                tl.store(counter, 0)


@triton.jit
def add_pairs(x):
    """The sums of neighbours along the first dimension: [2 n, D] -> [n, D]."""
    left, right = tl.split(tl.permute(tl.reshape(x, [x.shape[0] // 2, 2, x.shape[1]]), [0, 2, 1]))
    return left + right


@triton.jit(do_not_specialize=SIZES)
def combine_kernel(
    out, cache_len_ptr, partial_ptr, lse_ptr, heads_kv, group, tokens, slots, chunks, window, chunking,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, RUN: tl.constexpr, LOG_RUNS: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of one query row, for BLOCK_D of its channels: 2^LOG_RUNS runs of RUN chunks side by side,
    within each one chunk after another as `fold` does, then the runs by pairs."""
    wait_for_the_kernel_before(OVERLAP)
    RUNS: tl.constexpr = 1 << LOG_RUNS
    row = tl.program_id(0) % (group * tokens)
    batch_head = tl.program_id(0) // (group * tokens)
    batch = batch_head // heads_kv
    length = tl.minimum(tl.maximum(tl.load(cache_len_ptr + batch), 0), slots)
    _, first, count = visible_chunks(length, tokens, window, chunking, WINDOW)
    last = first + count
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    line = tl.program_id(0).to(tl.int64) * chunks

    every = tl.arange(0, RUNS * RUN)
    seen = (every >= first) & (every < last)
    row_max = tl.max(tl.load(lse_ptr + line + every, mask=seen, other=float("-inf")), 0)
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)

    acc = tl.zeros([RUNS, BLOCK_D], tl.float32)
    total = tl.zeros([RUNS], tl.float32)
    for i in tl.range(0, RUN, num_stages=STAGES):
        chunk = tl.arange(0, RUNS) * RUN + i
        inside = (chunk >= first) & (chunk < last)
        lse = tl.load(lse_ptr + line + chunk, mask=inside, other=float("-inf"))
        pointers = partial_ptr + ((line + chunk) * HEAD_DIM)[:, None] + dims[None, :]
        partial = tl.load(pointers, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        weight = tl.exp2(lse - shift)
        acc = tl.fma(partial, tl.broadcast_to(weight[:, None], partial.shape), acc)
        total += weight
    # Pairs, then pairs of pairs: runs of zeros at the end change no bit, so the size of the cache does not.
    accs, totals = acc, total[:, None]
    for _ in tl.static_range(LOG_RUNS):
        accs, totals = add_pairs(accs), add_pairs(totals)
    result = (accs / tl.where(totals == 0.0, 1.0, totals)).to(out[0].dtype.element_ty)  # [1, BLOCK_D]
    pointers = row_pointers(out, batch, batch_head % heads_kv, row + tl.arange(0, 1), group, tokens, dims)
    tl.store(pointers, result, mask=(dims < HEAD_DIM)[None, :])
