"""The first and the last kernel of a choice, and what the two of sample_narrow.py share with them: see sample.py."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from kernels.overlap import wait_for_the_kernel_before

GREEDY_BELOW = tl.constexpr(1e-6)  # temperatures under this are 0
CHOSEN_RUNS = tl.constexpr(1024)  # runs that are read again, at most
CANDIDATES = tl.constexpr(1024)  # tokens kept in registers, at most
FEW = tl.constexpr(256)  # that are compared with one another, at most
COMPARED = tl.constexpr(32)  # with all of them at a time
TOKENS_AT_A_TIME = tl.constexpr(4096)  # of the runs that are read again
RUNS_OF_A_GROUP = tl.constexpr(8)  # whose places among the chosen are found together
STRIDE = tl.constexpr(4096)  # columns of one step over a whole row
# Noise lies between -2.9 and 44.4: a token further than this below the likeliest one can never be chosen.
FARTHEST = tl.constexpr(-64.0)
EVERYTHING = tl.constexpr(0x7F800000)  # a depth, that of -inf
# Columns of what a row's `settings` are, as `sample.parameters` makes them.
TEMPERATURE, TOP_K, TOP_P, LOG_MIN_P, PENALTY = (tl.constexpr(i) for i in range(5))
SETTINGS = tl.constexpr(5)
# What a scanning program leaves behind, as rows of `partial` [B, 5, programs].
MAX, RAW_MAX, RAW_SUM, BEST, NOISE = (tl.constexpr(i) for i in range(5))
PARTIAL = tl.constexpr(5)


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
def draw(x, scaled, kept, column, greedy, stream, partial, best_token, programs, PTX: tl.constexpr):
    """Leave the best of the columns that are kept: its logit, noise and token."""
    noise = tl.where(greedy, 0.0, gumbel(stream, column, PTX))
    token = first_of_largest(tl.where(kept, scaled + noise, float("-inf")), column)[1]
    mine = (column == token) & kept
    tl.store(partial + BEST * programs, tl.max(tl.where(mine, x, float("-inf")), 0))
    tl.store(partial + NOISE * programs, tl.max(tl.where(mine, noise, float("-inf")), 0))
    tl.store(best_token, token)


@triton.jit
def scan_kernel(
    logits, stride, seen, stride_seen, settings, seeds, positions, partial, best_token, run_max, V, programs, runs,
    BLOCK: tl.constexpr, RUN: tl.constexpr, DRAW: tl.constexpr, FILTERS: tl.constexpr, LOGPROBS: tl.constexpr,
    PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (i, b): columns i of row b. DRAW: rows without filters; FILTERS: and leave the maxima of runs."""
    wait_for_the_kernel_before(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1)
    settings += row * SETTINGS
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
    partial += row * PARTIAL * programs + part
    tl.store(partial + MAX * programs, largest)
    if LOGPROBS:
        raw_largest = tl.max(raw, 0)
        # A block of -inf alone has nothing to add: subtract 0 instead, since -inf - -inf is NaN.
        raw_shift = tl.where(raw_largest == float("-inf"), 0.0, raw_largest)
        tl.store(partial + RAW_MAX * programs, raw_largest)
        tl.store(partial + RAW_SUM * programs, tl.sum(tl.exp(raw - raw_shift), 0))
    if FILTERS:
        run = part * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN)
        tl.store(run_max + row * runs + run, tl.max(tl.reshape(x, [BLOCK // RUN, RUN]), 1), mask=run < runs)
    if DRAW:
        if not FILTERS or not has_filter(settings, greedy):
            scaled = tl.div_rn(x - tl.where(largest == float("-inf"), 0.0, largest), temperature)
            draw(
                x, scaled, inside, column, greedy, stream_of(seeds, positions, row), partial,
                best_token + row * programs + part, programs, PTX,
            )  # fmt: skip


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
    settings += row * SETTINGS
    temperature = tl.load(settings + TEMPERATURE)
    greedy = temperature < GREEDY_BELOW
    temperature = tl.where(greedy, 1.0, temperature)
    logits += row.to(tl.int64) * stride
    if seen is not None:
        seen += row.to(tl.int64) * stride_seen
    partial += row * PARTIAL * programs
    part = tl.arange(0, PROGRAMS)
    there = part < programs
    part_max = tl.load(partial + MAX * programs + part, mask=there, other=float("-inf"))
    largest = tl.max(part_max, 0)
    if FILTERS and has_filter(settings, greedy):
        token = filtered_token(
            logits, seen, settings, stream_of(seeds, positions, row), run_max + row * runs,
            run_list + row * CHOSEN_RUNS, candidates + row * CANDIDATES, candidate_tokens + row * CANDIDATES,
            V, runs, largest, temperature, RUNS, RUN, PTX,
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
    logits, seen, settings, stream, run_max, run_list, candidates, candidate_tokens, V, runs, largest, temperature,
    RUNS: tl.constexpr, RUN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The token of one row with top-k, and perhaps other filters."""
    penalty = tl.load(settings + PENALTY)
    top_k = tl.minimum(tl.load(settings + TOP_K), V.to(tl.float32)).to(tl.int32)
    top_p = tl.load(settings + TOP_P)
    log_min_p = tl.load(settings + LOG_MIN_P)

    # A lower bound that at least k tokens reach, since the maxima of as many runs do.
    run = tl.arange(0, RUNS)
    top = tl.load(run_max + run, mask=run < runs, other=float("-inf"))
    pair = tl.max(tl.reshape(top, [RUNS // 2, 2]), 1)
    low, third = largest + FARTHEST * temperature, temperature * (-FARTHEST / 3)
    for _ in range(8):  # to 1/100
        counts = tl.sum((pair >= low + third).to(tl.int32) + ((pair >= low + 2 * third).to(tl.int32) << 16), 0)
        enough = ((counts & 0xFFFF) >= top_k).to(tl.int32) + ((counts >> 16) >= top_k).to(tl.int32)
        low += third * enough
        third /= 3
    low -= 1e-6 * (largest - low + tl.abs(low))  # logits so near may have the same l

    # The runs that reach it, and in them the tokens that do.
    reaches = tl.reshape((top >= low).to(tl.int32), [RUNS // RUNS_OF_A_GROUP, RUNS_OF_A_GROUP])
    place, chosen_runs = places(reaches)
    run = tl.reshape(run, [RUNS // RUNS_OF_A_GROUP, RUNS_OF_A_GROUP])
    tl.store(run_list + place, run, mask=(reaches != 0) & (place < CHOSEN_RUNS))
    tl.debug_barrier()
    found = 0
    for start in range(0, tl.minimum(chosen_runs, CHOSEN_RUNS), TOKENS_AT_A_TIME // RUN):
        index = start + tl.arange(0, TOKENS_AT_A_TIME // RUN)
        which = tl.load(run_list + index, mask=index < chosen_runs, other=0)
        column = which[:, None] * RUN + tl.arange(0, RUN)[None, :]
        inside = (index < chosen_runs)[:, None] & (column < V)
        x = load_logits(logits, seen, penalty, column, inside)[1]
        keep = (inside & (x >= low)).to(tl.int32)
        slot, kept = places(keep)
        slot += found
        found += kept
        keep = (keep != 0) & (slot < CANDIDATES)
        tl.store(candidates + slot, x, mask=keep)
        tl.store(candidate_tokens + slot, column, mask=keep)
    tl.debug_barrier()

    fit = (chosen_runs <= CHOSEN_RUNS) & (found <= CANDIDATES)
    if fit & (found <= FEW):
        tokens, deep = candidate(candidates, candidate_tokens, tl.arange(0, FEW), found, largest, temperature)
        kept = deep <= (0.0 - log_min_p).to(tl.int32, bitcast=True)
        if top_p < 1:
            kept = kept & few_that_stay(run_list, deep, found, top_k, top_p)
        token = first_in_top_k(noisy(deep, kept, tokens, stream, PTX), deep, tokens, top_k)
    elif fit:
        tokens, deep = candidate(candidates, candidate_tokens, tl.arange(0, CANDIDATES), found, largest, temperature)
        limit = threshold(deep, logits, seen, penalty, V, largest, temperature, top_k, top_p, log_min_p, True)
        token = first_of_largest(noisy(deep, deep <= limit, tokens, stream, PTX), tokens)[1]
    else:
        everything = tl.zeros([1], tl.int32)  # not looked at
        limit = threshold(everything, logits, seen, penalty, V, largest, temperature, top_k, top_p, log_min_p, False)
        best, token = float("-inf"), 2147483647
        for start in range(0, V, STRIDE):
            column = start + tl.arange(0, STRIDE)
            there = depth_there(logits, seen, penalty, column, column < V, largest, temperature)
            scores = noisy(there, there <= limit, column, stream, PTX)
            there_best, there_token = first_of_largest(scores, column)
            token = tl.where(there_best > best, there_token, token)
            best = tl.maximum(best, there_best)
    return token


@triton.jit
def places(chosen):
    """Where each chosen element comes among the chosen, and how many there are; chosen: 0 or 1, [groups, members]."""
    of_group = tl.sum(chosen, 1)
    before = tl.cumsum(of_group, 0) - of_group
    return before[:, None] + tl.cumsum(chosen, 1) - chosen, tl.sum(of_group, 0)


@triton.jit
def candidate(candidates, candidate_tokens, rank, found, largest, temperature):
    """Tokens and depths of some candidates; where there is none, the depth is deeper than -inf."""
    x = tl.load(candidates + rank, mask=rank < found, other=float("-inf"))
    tokens = tl.load(candidate_tokens + rank, mask=rank < found, other=2147483647)
    return tokens, depth(x, rank < found, largest, temperature)


@triton.jit
def first_in_top_k(score, deep, tokens, top_k):
    """The token of the largest score among those that fewer than k are above. Nearly always it is the first tried, so
    this costs less than to find the k first."""
    best, token = first_of_largest(score, tokens)
    above = tl.sum((deep < tl.max(tl.where(tokens == token, deep, 0), 0)).to(tl.int32), 0)
    while (above >= top_k) & (best > float("-inf")):
        score = tl.where(tokens == token, float("-inf"), score)
        best, token = first_of_largest(score, tokens)
        above = tl.sum((deep < tl.max(tl.where(tokens == token, deep, 0), 0)).to(tl.int32), 0)
    return token


@triton.jit
def few_that_stay(depths, deep, found, top_k, top_p):
    """Which of at most FEW candidates top-p keeps, each compared with all: those that less than p is above, of the
    mass of those that fewer than k are above. `depths` has room for them."""
    tl.store(depths + tl.arange(0, FEW), deep)
    tl.debug_barrier()
    above, mass = tl.zeros([COMPARED, FEW], tl.int32), tl.zeros([COMPARED, FEW], tl.float32)
    for start in range(0, FEW, COMPARED):
        index = start + tl.arange(0, COMPARED)
        other = tl.load(depths + index)
        weight = tl.where(index < found, tl.exp(0.0 - other.to(tl.float32, bitcast=True)), 0.0)
        lower = other[:, None] < deep[None, :]
        above += lower.to(tl.int32)
        mass += tl.where(lower, weight[:, None], 0.0)
    in_top_k = (tl.sum(above, 0) < top_k) & (tl.arange(0, FEW) < found)
    total = tl.sum(tl.where(in_top_k, tl.exp(0.0 - deep.to(tl.float32, bitcast=True)), 0.0), 0)
    return tl.sum(mass, 0) < top_p * total


@triton.jit
def depth(x, inside, largest, temperature):
    """-l of logits, at least 0, as the integer whose order is the same: the bits of the float.

    Outside it is deeper than -inf."""
    deep = (0.0 - tl.div_rn(x - largest, temperature)).to(tl.int32, bitcast=True)
    return tl.where(inside, deep, 0x7FFFFFFF)


@triton.jit
def depth_there(logits, seen, penalty, column, inside, largest, temperature):
    """`depth` of some columns."""
    return depth(load_logits(logits, seen, penalty, column, inside)[1], inside, largest, temperature)


@triton.jit
def noisy(deep, kept, token, stream, PTX: tl.constexpr):
    """l + noise of the tokens that are kept; -inf of the others."""
    scaled = 0.0 - deep.to(tl.float32, bitcast=True)
    return tl.where(kept, scaled + gumbel(stream, token, PTX), float("-inf"))


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
    deep, logits, seen, penalty, V, largest, temperature, limit, WEIGHTED: tl.constexpr, FIT: tl.constexpr
):  # fmt: skip
    """`mass_in` of the candidates (FIT), or of the whole row block by block, in a fixed order."""
    if FIT:
        mass = mass_in(deep, limit, WEIGHTED)
    else:
        mass = 0.0 if WEIGHTED else 0
        for start in range(0, V, STRIDE):
            column = start + tl.arange(0, STRIDE)
            there = depth_there(logits, seen, penalty, column, column < V, largest, temperature)
            mass += mass_in(there, limit, WEIGHTED)
    return mass


@triton.jit
def shallowest(
    deep, logits, seen, penalty, V, largest, temperature, wanted, limit, WEIGHTED: tl.constexpr, FIT: tl.constexpr
):  # fmt: skip
    """The smallest depth above which the wanted mass lies, by bisection on its bits; `limit` if none smaller does."""
    low = -1
    for _ in range(31):
        middle = low + (limit - low) // 2
        enough = mass_above(deep, logits, seen, penalty, V, largest, temperature, middle, WEIGHTED, FIT) >= wanted
        low = tl.where(enough, low, middle)
        limit = tl.where(enough, middle, limit)
    return limit


@triton.jit
def threshold(
    deep, logits, seen, penalty, V, largest, temperature, top_k, top_p, log_min_p, FIT: tl.constexpr
):  # fmt: skip
    """How deep the last token lies that top-k, then top-p, then min-p keep."""
    limit = EVERYTHING
    limit = shallowest(deep, logits, seen, penalty, V, largest, temperature, top_k, limit, False, FIT)
    if top_p < 1:
        total = mass_above(deep, logits, seen, penalty, V, largest, temperature, limit, True, FIT)
        limit = shallowest(deep, logits, seen, penalty, V, largest, temperature, top_p * total, limit, True, FIT)
    return tl.minimum(limit, (0.0 - log_min_p).to(tl.int32, bitcast=True))
