"""Choosing one token for each row of logits, in two launches: penalty, temperature, top-k, top-p, min-p and noise.

The definition is `sample` in sampling.py; this is the same choice made where the logits are, without sorting them.
With l = (logit - largest logit) / temperature, every filter keeps the tokens above some value of l, and then the token
with the largest l + Gumbel noise is the sample. So all that has to be found is one threshold.

    scan   many programs a row     ┌────────┬────────┬────────┬─────  logits, read once
                                   │ max    │ max    │ max    │       of every BLOCK columns: maximum, sum of exponents,
                                   │ best   │ best   │ best   │       best candidate (all a row without filters needs)
                                   └┬─┬─┬─┬─┴┬─┬─┬─┬─┴─              and the maxima of up to 4096 runs of neighbours
    pick   one program a row       The k-th largest of the runs' maxima is a lower bound of the k-th largest logit.
                                   Only the runs that reach it are read again; what reaches it in them, a little more
                                   than k tokens, fits into the registers of one program, which finds the threshold
                                   by bisection on the bits of l, and draws.

If more tokens than CANDIDATES are left (equal logits, a large k, or a flat distribution under top_p), `pick` searches
that way over the whole row instead: right, but with up to 62 passes over the logits.

Sums run in a fixed order, no atomics: a row's token depends on its own logits, seed and position alone. Everything that
may change between calls is read from memory, so a captured CUDA graph serves every setting.
"""

import math

import torch
import triton
from torch import Tensor

from kernels.interpreter import INTERPRETED
from kernels.overlap import launch_options
from kernels.sample_kernels import CANDIDATES, CHOSEN_RUNS, pick_kernel, scan_kernel

RUNS = 4096  # runs of neighbouring columns, at most
BLOCK = 1024  # columns of one scanning program


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
    filters: bool = True,
    logprobs: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """One token for each row: int64 [B], the choice of `sampling.sample`. Two launches; a CUDA graph can hold them.

    Args:
        logits: [B, V'], any float dtype, columns contiguous.
        params: fp32 [B, 5] from `parameters`, read at each launch.
        seeds, positions: int64 [B] (positions may be int32): the row's seed, and where the chosen token will stand.
        vocab_size: columns that take part, from the first (None: all).
        seen: bool or 8-bit [B, V], not 0 for the tokens under the repetition penalty.
        filters: False promises that no row uses top_k, top_p or min_p, and saves their work.
        logprobs: also return fp32 [B], the chosen token's log-probability under the model's own distribution:
            temperature 1, no penalty, no filter.
        out: int64 [B] to write the tokens into.

    Returns tokens, or (tokens, logprobs).
    """
    B = logits.shape[0]
    V = vocab_size or logits.shape[1]
    if logits.stride(1) != 1 or params.shape != (B, 5) or not params.is_contiguous() or V > logits.shape[1]:
        raise ValueError(f"choose: logits [{B}, >= {V}] with contiguous rows and params [{B}, 5] are needed")
    run = max(16, triton.next_power_of_2(triton.cdiv(V, RUNS)))
    programs, runs = triton.cdiv(V, BLOCK), triton.cdiv(V, run)
    new = logits.new_empty
    partial = new(B, 6, programs, dtype=torch.float32)
    best_token = new(B, programs, dtype=torch.int32)
    run_max = new(B, runs, dtype=torch.float32) if filters else None
    run_list = new(B, CHOSEN_RUNS.value, dtype=torch.int32) if filters else None
    candidates = new(B, CANDIDATES.value, dtype=torch.int32) if filters else None
    candidate_tokens = new(B, CANDIDATES.value, dtype=torch.int32) if filters else None
    out = new(B, dtype=torch.int64) if out is None else out
    chances = new(B, dtype=torch.float32) if logprobs else None
    if seen is not None and seen.dtype == torch.bool:
        seen = seen.view(torch.uint8)
    row = (logits, logits.stride(0), seen, 0 if seen is None else seen.stride(0), params, seeds, positions)
    flags = dict(RUN=run, FILTERS=filters, PTX=logits.is_cuda and not INTERPRETED, **launch_options(logits.device))
    with torch.cuda.device_of(logits):
        scan_kernel[(programs, B)](
            *row, partial, best_token, run_max, V, programs, runs, BLOCK=BLOCK, **flags, num_warps=4
        )  # fmt: skip
        pick_kernel[(B,)](
            *row, partial, best_token, run_max, run_list, candidates, candidate_tokens, out, chances, V, programs, runs,
            PROGRAMS=triton.next_power_of_2(programs), RUNS=triton.next_power_of_2(runs), **flags, num_warps=8,
        )  # fmt: skip
    return (out, chances) if logprobs else out
