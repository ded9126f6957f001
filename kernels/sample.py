"""Choosing one token for each row of logits, in two launches or more: penalty, temperature, filters and noise.

The definition is `sample` in sampling.py; this is the same choice made where the logits are, without sorting them.
With l = (logit - largest logit) / temperature, every filter keeps the tokens above some value of l, and then the token
with the largest l + Gumbel noise is the sample. So all that has to be found is one threshold.

    scan     many programs a row   ┌────────┬────────┬────────┬─────  logits, read once
                                   │ max    │ max    │ max    │       of every BLOCK columns: the maximum, and the best
                                   │ best   │ best   │ best   │       candidate (all that a row without filters needs)
                                   └┬─┬─┬─┬─┴┬─┬─┬─┬─┴─              or the maxima of up to 4096 runs of neighbours
    pick     one program a row     the best of the candidates

A top-k of at most FEW is applied by `pick` too: the k-th largest of the runs' maxima is a lower bound of the k-th
largest logit. Only the runs that reach it are read again; what reaches it in them, a little more than k tokens, fits
into the registers of one program. It draws, and counts how many tokens are above the drawn one; if those are k, it
draws again. (Of more than FEW tokens it finds the threshold first, by bisection on the bits of l. With more than
CANDIDATES, which only many equal logits bring, it reads the whole row for each bit.)

Any other filter may keep any number of tokens. Its threshold is searched for by many programs between the two:

    narrow   many programs a row   5 launches for top-k, 5 for top-p, none for min-p alone: see sample_narrow.py
    draw     many programs a row   the best candidate of every BLOCK columns

Sums run in a fixed order, no atomics: a row's token depends on its own logits, seed and position alone. Everything that
may change between calls is read from memory, so a captured CUDA graph serves every setting of one kind of filters.
"""

import math

import torch
import triton
from torch import Tensor

from kernels import sample_kernels
from kernels.interpreter import INTERPRETED
from kernels.overlap import launch_options
from kernels.sample_kernels import CANDIDATES, CHOSEN_RUNS, PARTIAL, RUNS_OF_A_GROUP, pick_kernel, scan_kernel
from kernels.sample_narrow import LEVELS, WAYS, draw_kernel, narrow_kernel

RUNS = 4096  # runs of neighbouring columns, at most
BLOCK = 512  # columns of one scanning program
NARROW_BLOCK = 1024  # of one narrowing program
SCAN_WARPS, PICK_WARPS, NARROW_WARPS = 4, 16, 8
FEW = sample_kernels.FEW.value
KINDS = ("none", "few", "min_p", "top_p", "any")


def parameters(
    rows: int,
    device,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """fp32 [rows, 5], what `choose` reads. None switches a filter off, as in Sampling; rows may differ: stack them."""
    log_min_p = math.log(min_p) if min_p else -math.inf
    row = [temperature, top_k or 0, 1.0 if top_p is None else top_p, log_min_p, repetition_penalty]
    return torch.tensor([row] * rows, dtype=torch.float32, device=device)


def choose(
    logits: Tensor,
    params: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    vocab_size: int | None = None,
    seen: Tensor | None = None,
    filters: str = "any",
    logprobs: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """One token for each row: int64 [B], the choice of `sampling.sample`. A CUDA graph can hold the launches.

    Args:
        logits: [B, V'], any float dtype, columns contiguous.
        params: fp32 [B, 5] from `parameters`, read at each launch.
        seeds, positions: int64 [B] (positions may be int32): the row's seed, and where the chosen token will stand.
        vocab_size: columns that take part, from the first (None: all).
        seen: bool or 8-bit [B, V], not 0 for the tokens under the repetition penalty.
        filters: what all rows promise, which saves work: "none" (no filter), "few" (no filter, or a top_k of at most
            FEW and perhaps others), "min_p" (at most that), "top_p" (no top_k), "any".
        logprobs: also return fp32 [B], the chosen token's log-probability under the model's own distribution:
            temperature 1, no penalty, no filter.
        out: int64 [B] to write the tokens into.

    Returns tokens, or (tokens, logprobs).
    """
    B = logits.shape[0]
    V = vocab_size or logits.shape[1]
    if logits.stride(1) != 1 or params.shape != (B, 5) or not params.is_contiguous() or V > logits.shape[1]:
        raise ValueError(f"choose: logits [{B}, >= {V}] with contiguous rows and params [{B}, 5] are needed")
    if filters not in KINDS:
        raise ValueError(f"choose: filters={filters!r} must be one of {', '.join(KINDS)}")
    few, drawn_last = filters == "few", filters not in ("none", "few")
    run = max(16, triton.next_power_of_2(triton.cdiv(V, RUNS)))
    programs, runs = triton.cdiv(V, BLOCK), triton.cdiv(V, run)
    new = logits.new_empty
    partial = new(B, PARTIAL.value, programs, dtype=torch.float32)
    best_token = new(B, programs, dtype=torch.int32)
    run_max = new(B, runs, dtype=torch.float32) if few else None
    run_list = new(B, CHOSEN_RUNS.value, dtype=torch.int32) if few else None
    candidates = new(B, CANDIDATES.value, dtype=torch.float32) if few else None
    candidate_tokens = new(B, CANDIDATES.value, dtype=torch.int32) if few else None
    out = new(B, dtype=torch.int64) if out is None else out
    chosen_logprobs = new(B, dtype=torch.float32) if logprobs else None
    if seen is not None and seen.dtype == torch.bool:
        seen = seen.view(torch.uint8)
    row = (logits, logits.stride(0), seen, 0 if seen is None else seen.stride(0), params, seeds, positions)
    ptx, overlap = logits.is_cuda and not INTERPRETED, launch_options(logits.device)
    holds = triton.next_power_of_2(programs)
    with torch.cuda.device_of(logits):
        scan_kernel[(programs, B)](
            *row, partial, best_token, run_max, V, programs, runs, BLOCK=BLOCK, RUN=run, DRAW=not drawn_last,
            FILTERS=few, LOGPROBS=logprobs, PTX=ptx, num_warps=SCAN_WARPS, **overlap,
        )  # fmt: skip
        if drawn_last:
            parts = triton.cdiv(V, NARROW_BLOCK)
            sums = new(2, B, 2, parts, WAYS.value, dtype=torch.float32)
            state = new(2, B, LEVELS.value + 1, dtype=torch.int32)
            sizes = dict(PROGRAMS=holds, PARTS=triton.next_power_of_2(parts), **overlap)
            searches = dict(min_p=(), top_p=(True,), any=(False, True))[filters]  # whether for top-p
            for weighted in searches:
                for level in range(LEVELS.value):
                    narrow_kernel[(parts, B)](
                        *row, partial, sums, state, V, programs, parts, B, level, BLOCK=NARROW_BLOCK,
                        TOP_K_TOO=filters == "any", WEIGHTED=weighted, num_warps=NARROW_WARPS, **sizes,
                    )  # fmt: skip
            draw_kernel[(programs, B)](
                *row, partial, best_token, sums, state, V, programs, parts, B, BLOCK=BLOCK, BY_TOP_K=filters == "any",
                BY_TOP_P=filters != "min_p", PTX=ptx, num_warps=SCAN_WARPS, **sizes,
            )  # fmt: skip
        pick_kernel[(B,)](
            *row, partial, best_token, run_max, run_list, candidates, candidate_tokens, out, chosen_logprobs, V,
            programs, runs, PROGRAMS=holds, RUNS=max(RUNS_OF_A_GROUP.value, triton.next_power_of_2(runs)), RUN=run,
            FILTERS=few, PTX=ptx, num_warps=PICK_WARPS, **overlap,
        )  # fmt: skip
    return (out, chosen_logprobs) if logprobs else out
