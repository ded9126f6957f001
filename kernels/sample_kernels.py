"""The two kernels behind sample.py, which says what they do and why."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from kernels.overlap import wait_for_the_kernel_before

GREEDY_BELOW = tl.constexpr(1e-6)  # temperatures under this are 0
CHOSEN_RUNS = tl.constexpr(1024)  # runs that are read again, at most
CANDIDATES = tl.constexpr(1024)  # tokens kept in registers, at most
RUNS_AT_A_TIME = tl.constexpr(128)
STRIDE = tl.constexpr(4096)  # columns of one step over a whole row
# Under top_p alone, the tokens above this many runs' maxima are tried first.
FIRST_RUNS = tl.constexpr(512)
# Noise lies between -2.9 and 44.4: a token further than this below the likeliest one can never be chosen.
FARTHEST = tl.constexpr(-64.0)
TEMPERATURE, TOP_K, TOP_P, LOG_MIN_P, PENALTY = (tl.constexpr(i) for i in range(5))
# What a scanning program leaves behind, as rows of `partial` [B, 6, programs].
MAX, SUM, RAW_MAX, RAW_SUM, BEST, NOISE = (tl.constexpr(i) for i in range(6))


@triton.jit
def splitmix64(state, n):
    """Output n of the SplitMix64 generator seeded with `state`, both uint64 (Steele, Lea and Flood 2014)."""
    z = state + (n + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def gumbel(stream, token, PTX: tl.constexpr):
    """-log(-log(1 - u)) with u from the token-th number of a row's stream: sampling.gumbel, operation by operation."""
    bits = splitmix64(stream, token.to(tl.uint64)) >> 1
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 1.0842021724855044e-19, 1 - 5.9604644775390625e-08)
    if PTX:
        exponential = -libdevice.log1p(-u)
        noise = -libdevice.log(exponential)
    else:  # the interpreter has no log1p; log(w) / (w - 1) forgives the rounding of w = 1 - u (Kahan)
        w = 1.0 - u
        near = w == 1.0
        exponential = tl.where(near, u, tl.log(w) * u / tl.where(near, 1.0, w - 1.0))
        noise = -tl.log(exponential)
    return noise


@triton.jit
def stream_of(seeds, positions, row):
    """The state of the row's noise at its position."""
    seed = tl.load(seeds + row).to(tl.uint64)
    return splitmix64(seed, tl.load(positions + row).to(tl.int64).to(tl.uint64))


@triton.jit
def load_logits(logits, seen, penalty, column, inside):
    """Raw and penalised logits in fp32, -inf outside. `logits`, `seen`: where the row starts."""
    raw = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    if seen is None:
        penalised = raw
    else:
        repeated = tl.load(seen + column, mask=inside, other=0) != 0
        less = tl.where(raw > 0, tl.div_rn(raw, penalty), raw * penalty)
        penalised = tl.where(repeated & inside, less, raw)
    return raw, penalised


@triton.jit
def first_of_largest(score, token):
    """The largest score and its token, the lowest of equals."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, token, 2147483647), 0)


@triton.jit
def scan_kernel(
    logits, stride, seen, stride_seen, settings, seeds, positions, partial, best_token, run_max, V, programs, runs,
    BLOCK: tl.constexpr, RUN: tl.constexpr, FILTERS: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (i, b): columns i of row b."""
    wait_for_the_kernel_before(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1)
    settings += row * 5
    temperature = tl.load(settings + TEMPERATURE)
    greedy = temperature < GREEDY_BELOW
    temperature = tl.where(greedy, 1.0, temperature)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    logits += row.to(tl.int64) * stride
    if seen is not None:
        seen += row.to(tl.int64) * stride_seen
    raw, x = load_logits(logits, seen, tl.load(settings + PENALTY), column, inside)
    largest = tl.max(x, 0)
    # A block of -inf alone has nothing to add: subtract 0 instead, since -inf - -inf is NaN.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    scaled = tl.div_rn(x - shift, temperature)
    raw_largest = tl.max(raw, 0)
    raw_shift = tl.where(raw_largest == float("-inf"), 0.0, raw_largest)
    partial += row * 6 * programs + part
    tl.store(partial + MAX * programs, largest)
    tl.store(partial + SUM * programs, tl.sum(tl.exp(scaled), 0))
    tl.store(partial + RAW_MAX * programs, raw_largest)
    tl.store(partial + RAW_SUM * programs, tl.sum(tl.exp(raw - raw_shift), 0))
    if FILTERS:
        run = part * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN)
        tl.store(run_max + row * runs + run, tl.max(tl.reshape(x, [BLOCK // RUN, RUN]), 1), mask=run < runs)
    if not FILTERS or not has_filter(settings, greedy):
        noise = gumbel(stream_of(seeds, positions, row), column, PTX)
        noise = tl.where(greedy, 0.0, noise)
        token = first_of_largest(tl.where(inside, scaled + noise, float("-inf")), column)[1]
        mine = column == token
        tl.store(partial + BEST * programs, tl.max(tl.where(mine, x, float("-inf")), 0))
        tl.store(partial + NOISE * programs, tl.max(tl.where(mine, noise, float("-inf")), 0))
        tl.store(best_token + row * programs + part, token)


@triton.jit
def has_filter(settings, greedy):
    top_k, top_p, log_min_p = tl.load(settings + TOP_K), tl.load(settings + TOP_P), tl.load(settings + LOG_MIN_P)
    return ((top_k > 0) | (top_p < 1) | (log_min_p > float("-inf"))) & (greedy == 0)


@triton.jit
def pick_kernel(
    logits, stride, seen, stride_seen, settings, seeds, positions, partial, best_token, run_max, run_list, candidates,
    candidate_tokens, out, logprobs, V, programs, runs,
    PROGRAMS: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr, FILTERS: tl.constexpr, PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program b: row b. PROGRAMS, RUNS: powers of two that hold `programs`, `runs`."""
    wait_for_the_kernel_before(OVERLAP)
    row = tl.program_id(0)
    settings += row * 5
    temperature = tl.load(settings + TEMPERATURE)
    greedy = temperature < GREEDY_BELOW
    temperature = tl.where(greedy, 1.0, temperature)
    logits += row.to(tl.int64) * stride
    if seen is not None:
        seen += row.to(tl.int64) * stride_seen
    partial += row * 6 * programs
    part = tl.arange(0, PROGRAMS)
    there = part < programs
    part_max = tl.load(partial + MAX * programs + part, mask=there, other=float("-inf"))
    largest = tl.max(part_max, 0)
    if FILTERS and has_filter(settings, greedy):
        share = tl.where(part_max == float("-inf"), 0.0, tl.exp(tl.div_rn(part_max - largest, temperature)))
        total = tl.sum(tl.load(partial + SUM * programs + part, mask=there, other=0.0) * share, 0)
        token = filtered_token(
            logits, seen, settings, stream_of(seeds, positions, row), run_max + row * runs,
            run_list + row * CHOSEN_RUNS, candidates + row * CANDIDATES, candidate_tokens + row * CANDIDATES,
            V, runs, largest, total, temperature, RUNS, RUN, PTX,
        )  # fmt: skip
    else:
        x = tl.load(partial + BEST * programs + part, mask=there, other=float("-inf"))
        noise = tl.load(partial + NOISE * programs + part, mask=there, other=0.0)
        tokens = tl.load(best_token + row * programs + part, mask=there, other=2147483647)
        token = first_of_largest(tl.div_rn(x - largest, temperature) + noise, tokens)[1]
    token = tl.minimum(token, V - 1)  # a row of NaN must not send anybody outside the vocabulary
    tl.store(out + row, token.to(tl.int64))
    if logprobs is not None:
        raw_max = tl.load(partial + RAW_MAX * programs + part, mask=there, other=float("-inf"))
        raw_sum = tl.load(partial + RAW_SUM * programs + part, mask=there, other=0.0)
        top = tl.max(raw_max, 0)
        mass = tl.sum(tl.where(raw_max == float("-inf"), 0.0, raw_sum * tl.exp(raw_max - top)), 0)
        tl.store(logprobs + row, tl.load(logits + token).to(tl.float32) - top - tl.log(mass))


@triton.jit
def filtered_token(
    logits, seen, settings, stream, run_max, run_list, candidates, candidate_tokens, V, runs, largest, total,
    temperature, RUNS: tl.constexpr, RUN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The token of one row with filters. `total`: the sum of exp(l) over the vocabulary."""
    penalty = tl.load(settings + PENALTY)
    top_k = tl.minimum(tl.load(settings + TOP_K), V.to(tl.float32)).to(tl.int32)
    top_p = tl.load(settings + TOP_P)
    log_min_p = tl.load(settings + LOG_MIN_P)

    # A lower bound that at least `wanted` tokens reach, since the maxima of as many runs do.
    run = tl.arange(0, RUNS)
    top = tl.load(run_max + run, mask=run < runs, other=float("-inf"))
    top = tl.where(top == float("-inf"), top, tl.div_rn(top - largest, temperature))
    wanted = tl.where(top_k > 0, top_k, FIRST_RUNS)
    low, high = FARTHEST, 0.0
    for _ in range(16):
        middle = (low + high) * 0.5
        enough = tl.sum((top >= middle).to(tl.int32), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    if (top_k == 0) & (top_p >= 1):
        low = tl.maximum(log_min_p, FARTHEST)

    # The runs that reach it, and in them the tokens that do.
    reaches = top >= low
    place = tl.cumsum(reaches.to(tl.int32), 0) - 1
    chosen_runs = tl.sum(reaches.to(tl.int32), 0)
    tl.store(run_list + place, run, mask=reaches & (place < CHOSEN_RUNS))
    tl.debug_barrier()
    found = 0
    for start in range(0, tl.minimum(chosen_runs, CHOSEN_RUNS), RUNS_AT_A_TIME):
        index = start + tl.arange(0, RUNS_AT_A_TIME)
        which = tl.load(run_list + index, mask=index < chosen_runs, other=0)
        column = which[:, None] * RUN + tl.arange(0, RUN)[None, :]
        inside = (index < chosen_runs)[:, None] & (column < V)
        deep = depth(logits, seen, penalty, column, inside, largest, temperature)
        deep = tl.reshape(deep, [RUNS_AT_A_TIME * RUN])
        keep = 0.0 - deep.to(tl.float32, bitcast=True) >= low
        slot = found + tl.cumsum(keep.to(tl.int32), 0) - 1
        found += tl.sum(keep.to(tl.int32), 0)
        keep = keep & (slot < CANDIDATES)
        tl.store(candidates + slot, deep, mask=keep)
        tl.store(candidate_tokens + slot, tl.reshape(column, [RUNS_AT_A_TIME * RUN]), mask=keep)
    tl.debug_barrier()

    rank = tl.arange(0, CANDIDATES)
    deep = tl.load(candidates + rank, mask=rank < found, other=0x7FFFFFFF)  # deeper than -inf: takes no part
    few = (chosen_runs <= CHOSEN_RUNS) & (found <= CANDIDATES)
    if (top_k == 0) & (top_p < 1):
        few = few & (mass_in(deep, 0x7F800000, True) >= top_p * total)
    if few:
        limit = threshold(
            deep, logits, seen, penalty, V, largest, temperature, top_k, top_p, log_min_p, total, True
        )  # fmt: skip
        tokens = tl.load(candidate_tokens + rank, mask=rank < found, other=2147483647)
        token = first_of_largest(noisy(deep, limit, tokens, stream, PTX), tokens)[1]
    else:
        limit = threshold(
            deep, logits, seen, penalty, V, largest, temperature, top_k, top_p, log_min_p, total, False
        )  # fmt: skip
        best, token = float("-inf"), 2147483647
        for start in range(0, V, STRIDE):
            column = start + tl.arange(0, STRIDE)
            deep_there = depth(logits, seen, penalty, column, column < V, largest, temperature)
            there_best, there_token = first_of_largest(noisy(deep_there, limit, column, stream, PTX), column)
            token = tl.where(there_best > best, there_token, token)
            best = tl.maximum(best, there_best)
    return token


@triton.jit
def depth(logits, seen, penalty, column, inside, largest, temperature):
    """-l of some columns, at least 0, as the integer whose order is the same: the bits of the float.

    Outside it is deeper than -inf."""
    x = load_logits(logits, seen, penalty, column, inside)[1]
    deep = (0.0 - tl.div_rn(x - largest, temperature)).to(tl.int32, bitcast=True)
    return tl.where(inside, deep, 0x7FFFFFFF)


@triton.jit
def noisy(deep, limit, token, stream, PTX: tl.constexpr):
    """l + noise of the tokens no deeper than `limit`; -inf of the others."""
    scaled = 0.0 - deep.to(tl.float32, bitcast=True)
    return tl.where(deep <= limit, scaled + gumbel(stream, token, PTX), float("-inf"))


@triton.jit
def mass_in(deep, limit, WEIGHTED: tl.constexpr):
    """How many tokens, or how much of the sum of exp(l), lie no deeper than `limit`."""
    if WEIGHTED:
        mass = tl.sum(tl.where(deep <= limit, tl.exp(0.0 - deep.to(tl.float32, bitcast=True)), 0.0), 0)
    else:
        mass = tl.sum((deep <= limit).to(tl.int32), 0)
    return mass


@triton.jit
def mass_above(
    deep, logits, seen, penalty, V, largest, temperature, limit, WEIGHTED: tl.constexpr, FEW: tl.constexpr
):  # fmt: skip
    """`mass_in` of the candidates (FEW), or of the whole row block by block, in a fixed order."""
    if FEW:
        mass = mass_in(deep, limit, WEIGHTED)
    else:
        mass = 0.0 if WEIGHTED else 0
        for start in range(0, V, STRIDE):
            column = start + tl.arange(0, STRIDE)
            deep_there = depth(logits, seen, penalty, column, column < V, largest, temperature)
            mass += mass_in(deep_there, limit, WEIGHTED)
    return mass


@triton.jit
def shallowest(
    deep, logits, seen, penalty, V, largest, temperature, wanted, limit, WEIGHTED: tl.constexpr, FEW: tl.constexpr
):  # fmt: skip
    """The smallest depth above which the wanted mass lies, by bisection on its bits; `limit` if none smaller does."""
    low = -1
    for _ in range(31):
        middle = low + (limit - low) // 2
        enough = mass_above(deep, logits, seen, penalty, V, largest, temperature, middle, WEIGHTED, FEW) >= wanted
        low = tl.where(enough, low, middle)
        limit = tl.where(enough, middle, limit)
    return limit


@triton.jit
def threshold(
    deep, logits, seen, penalty, V, largest, temperature, top_k, top_p, log_min_p, total, FEW: tl.constexpr
):  # fmt: skip
    """How deep the last token lies that top-k, then top-p, then min-p keep."""
    limit = 0x7F800000  # as deep as -inf: everything
    if top_k > 0:
        limit = shallowest(deep, logits, seen, penalty, V, largest, temperature, top_k, limit, False, FEW)
        total = mass_above(deep, logits, seen, penalty, V, largest, temperature, limit, True, FEW)
    if top_p < 1:
        limit = shallowest(deep, logits, seen, penalty, V, largest, temperature, top_p * total, limit, True, FEW)
    return tl.minimum(limit, (0.0 - log_min_p).to(tl.int32, bitcast=True))
