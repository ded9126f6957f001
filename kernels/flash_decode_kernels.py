"""The kernels of flash decoding: one that reads the cache chunk by chunk, one that puts the chunks together.

What they compute, and how the work is cut, is told in flash_decode.py; what a program does with a chunk is in
flash_decode_tiles.py. Lengths are read on the device: the grid of `split_kernel` is what the chip holds at once, its
programs share out the chunks that exist, and those that get none leave.
"""

import triton
import triton.language as tl

from kernels.flash_decode_tiles import attend_chunk, prefetch_keys, row_pointers, store_new, turned_queries
from kernels.overlap import wait_for_the_kernel_before

# Arguments that change from call to call: a kernel must not be compiled anew because one is a multiple of 16.
SIZES = ["batches", "heads_kv", "group", "tokens", "slots", "chunks", "blocks", "window", "shortest", "early"]


@triton.jit
def visible_chunks(lengths, tokens, slots, window, shortest, turns, WINDOW: tl.constexpr):
    """Of rows with so many tokens: how many are in the cache, the keys of a chunk, the first chunk that any of the new
    tokens sees, and how many. An empty row still has one chunk, which says that it saw nothing."""
    start = lengths - tokens
    filled = tl.minimum(tl.maximum(lengths, 0), slots)
    chunk_keys = lengths * 0 + shortest
    for i in tl.static_range(len(turns)):
        chunk_keys = tl.where(start < turns[i], chunk_keys, 2 * chunk_keys)
    first = lengths * 0
    if WINDOW:
        first = tl.maximum(start - window + 1, 0) // chunk_keys
    return filled, chunk_keys, first, tl.maximum(tl.cdiv(filled, chunk_keys) - first, 1)


@triton.jit
def locate(
    task, rows_of_batch, batch_ids, tokens, window, heads_kv, blocks, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):
    """Which row, KV head, block of query rows and chunk a task is; the chunk's keys [lo, hi); the row's length and how
    many chunks it has."""
    lengths, filled, chunk_keys, firsts, counts = rows_of_batch
    ends = tl.cumsum(counts, 0)
    block = task % blocks  # blocks of rows read the same keys: side by side, one of them finds them in L2
    kv_head = task // blocks % heads_kv
    number = task // (blocks * heads_kv)
    batch = tl.sum((ends <= number).to(tl.int32), 0)
    mine = batch_ids == batch
    length = tl.sum(tl.where(mine, lengths, 0), 0)
    count = tl.sum(tl.where(mine, counts, 0), 0)
    keys = tl.sum(tl.where(mine, chunk_keys, 0), 0)
    chunk = number + tl.sum(tl.where(mine, firsts + counts - ends, 0), 0)
    lo = chunk * keys
    hi = tl.minimum(lo + keys, tl.sum(tl.where(mine, filled, 0), 0))
    if WINDOW:
        lo = tl.maximum(lo, tl.maximum(length - tokens - window + 1, 0) // BLOCK_N * BLOCK_N)
    return batch, kv_head, block, chunk, lo, hi, length, count


@triton.jit(do_not_specialize=SIZES)
def split_kernel(
    q, k, v, v_words, k_scale, v_scale, out, cache_len_ptr, partial_ptr, lse_ptr,
    k_new, v_new, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    batches, heads_kv, group, tokens, slots, chunks, blocks, window, shortest, turns, early, scale_log2,
    HEAD_DIM: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
    WINDOW: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Chunks of all rows of the batch, numbered one after another and shared out among the programs.

    With k_new and v_new `[B, G, T, D]` (None: they are in the cache) it is `rope_and_attend`: q and k have still to be
    turned, and a chunk that new tokens stand in is read by the programs that put them there, so nobody waits for
    anybody. `chunks` is the room for partial results, the most that a row can have. v_words: v as int32, or None.
    """
    ROPE: tl.constexpr = k_new is not None
    if OVERLAP and not ROPE:
        tl.extra.cuda.gdc_wait()
    batch_ids = tl.arange(0, BLOCK_B)
    lengths = tl.load(cache_len_ptr + batch_ids, mask=batch_ids < batches, other=0)
    filled, chunk_keys, firsts, counts = visible_chunks(lengths, tokens, slots, window, shortest, turns, WINDOW)
    counts = tl.where(batch_ids < batches, counts, 0)
    rows_of_batch = (lengths, filled, chunk_keys, firsts, counts)
    tasks = tl.sum(counts, 0) * heads_kv * blocks
    if OVERLAP:
        if ROPE:  # the kernel before writes qkv alone: lengths and old keys are there already
            if tl.program_id(0) < tasks:
                batch, kv_head, block, chunk, lo, hi, length, count = locate(
                    tl.program_id(0), rows_of_batch, batch_ids, tokens, window, heads_kv, blocks, BLOCK_N, WINDOW
                )
                prefetch_keys(k, batch, kv_head, lo, hi, BLOCK_N, HEAD_DIM)
                prefetch_keys(v, batch, kv_head, lo, hi, BLOCK_N, HEAD_DIM)
            tl.extra.cuda.gdc_wait()
        # Programs of combine_kernel that come now wait where this kernel's could read. They are worth it where there
        # is room for them beside the chunks; otherwise they come when these have gone.
        if tasks <= early:
            tl.extra.cuda.gdc_launch_dependents()

    dims = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    for task in tl.range(tl.program_id(0), tasks, tl.num_programs(0), num_stages=1):
        batch, kv_head, block, chunk, lo, hi, length, count = locate(
            task, rows_of_batch, batch_ids, tokens, window, heads_kv, blocks, BLOCK_N, WINDOW
        )
        start = length - tokens
        if ROPE:
            if hi > start:
                store_new(
                    k_new, v_new, k, v, k_scale, v_scale, batch, kv_head, start, lo, hi, tokens,
                    cos_ptr, sin_ptr, k_norm_ptr, eps, HEAD_DIM, BLOCK_M,
                )  # fmt: skip
                tl.debug_barrier()  # what each of these threads wrote the others will read
        q_tiles, positions, tile_rows = (), (), ()
        for i in tl.static_range(TILES):
            rows = (block * TILES + i) * BLOCK_M + tl.arange(0, BLOCK_M)
            exists = rows < group * tokens
            if ROPE:
                tile = turned_queries(
                    q, batch, kv_head, rows, group, tokens, exists, cos_ptr, sin_ptr, q_norm_ptr, eps, HEAD_DIM
                )
            else:
                pointers = row_pointers(q, batch, kv_head, rows, group, tokens, dims)
                tile = tl.load(pointers, mask=exists[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
            q_tiles = q_tiles + (tile,)
            # Rows that pad the tile stand before every key.
            positions = positions + (tl.where(exists, start + rows % tokens, -1),)
            tile_rows = tile_rows + (rows,)
        accs, maxima, sums = attend_chunk(
            q_tiles, positions, k, v, v_words, k_scale, v_scale, batch, kv_head, lo, hi, window, scale_log2,
            HEAD_DIM, TILES, BLOCK_M, BLOCK_N, WINDOW, PTX,
        )  # fmt: skip

        line = (tl.cast(batch, tl.int64) * heads_kv + kv_head) * group * tokens
        for i in tl.static_range(TILES):
            rows = tile_rows[i]
            mask = (rows < group * tokens)[:, None] & (dims < HEAD_DIM)[None, :]
            nothing = sums[i] == 0.0
            divisor = tl.where(nothing, 1.0, sums[i])
            result = accs[i] / divisor[:, None]
            if count == 1:  # nothing to combine: the same bits, since its weight would be 1
                pointers = row_pointers(out, batch, kv_head, rows, group, tokens, dims)
                tl.store(pointers, result.to(out[0].dtype.element_ty), mask=mask)
            else:
                cell = (line + rows) * chunks + chunk
                tl.store(partial_ptr + (cell * HEAD_DIM)[:, None] + dims[None, :], result, mask=mask)
                lse = tl.where(nothing, float("-inf"), maxima[i] + tl.log2(divisor))
                tl.store(lse_ptr + cell, lse, mask=rows < group * tokens)


@triton.jit
def add_pairs(x):
    """The sums of neighbours along the first dimension: [2 n, D] -> [n, D]."""
    left, right = tl.split(tl.permute(tl.reshape(x, [x.shape[0] // 2, 2, x.shape[1]]), [0, 2, 1]))
    return left + right


@triton.jit(do_not_specialize=SIZES)
def combine_kernel(
    out, cache_len_ptr, partial_ptr, lse_ptr, heads_kv, group, tokens, slots, chunks, window, shortest, turns,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, RUN: tl.constexpr, LOG_RUNS: tl.constexpr,
    BLOCK_D: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of one query row, for BLOCK_D of its channels: 2^LOG_RUNS runs of RUN chunks side by side,
    within each one chunk after another, then the runs by pairs. A row of one chunk has its result already. STEPS: the
    most chunks of a run."""
    RUNS: tl.constexpr = 1 << LOG_RUNS
    row = tl.program_id(0) % (group * tokens)
    batch_head = tl.program_id(0) // (group * tokens)
    batch = batch_head // heads_kv
    length = tl.load(cache_len_ptr + batch)  # before the wait: split_kernel does not write it
    _, _, first, count = visible_chunks(length, tokens, slots, window, shortest, turns, WINDOW)
    last = first + count
    wait_for_the_kernel_before(OVERLAP)
    if count > 1:
        dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        line = tl.program_id(0).to(tl.int64) * chunks
        every = tl.arange(0, RUNS * RUN)
        seen = (every >= first) & (every < last)
        row_max = tl.max(tl.load(lse_ptr + line + every, mask=seen, other=float("-inf")), 0)
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)

        acc = tl.zeros([RUNS, BLOCK_D], tl.float32)
        total = tl.zeros([RUNS, 1], tl.float32)
        # STEPS is a constant: where the compiler does not know how often a loop runs, it saves registers and waits for
        # each chunk by itself.
        for start in tl.range(0, STEPS, UNROLL, num_stages=1):
            if start < last:  # what lies behind adds exact zeros
                partials, logs = (), ()  # all loads, then all sums: as many on their way as registers hold
                for j in tl.static_range(UNROLL):
                    chunk = tl.arange(0, RUNS) * RUN + start + j
                    inside = (chunk >= first) & (chunk < last)
                    pointers = partial_ptr + ((line + chunk) * HEAD_DIM)[:, None] + dims[None, :]
                    mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
                    partials = partials + (tl.load(pointers, mask=mask, other=0.0),)
                    logs = logs + (tl.load(lse_ptr + line + chunk, mask=inside, other=float("-inf")),)
                for j in tl.static_range(UNROLL):
                    weight = tl.exp2(logs[j] - shift)[:, None]
                    acc = tl.fma(partials[j], tl.broadcast_to(weight, partials[j].shape), acc)
                    total += weight
        # Pairs, then pairs of pairs: runs of zeros at the end change no bit, so the size of the cache does not.
        accs, totals = acc, total
        for _pairs in tl.static_range(LOG_RUNS):
            accs, totals = add_pairs(accs), add_pairs(totals)
        # [1, BLOCK_D]; a row that saw nothing is 0
        result = (accs / tl.where(totals == 0.0, 1.0, totals)).to(out[0].dtype.element_ty)
        pointers = row_pointers(out, batch, batch_head % heads_kv, row + tl.arange(0, 1), group, tokens, dims)
        tl.store(pointers, result, mask=(dims < HEAD_DIM)[None, :])
