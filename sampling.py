"""Choosing one token from its logits: the filters, and noise that is a function and not a stream.

Shapes in the comments: B rows, V vocabulary. Row r draws the token at position p with noise of (seed of r, p) and
nothing else. That is why a row's text depends neither on its neighbours nor on how the engine got there, and why a
smaller model given the same noise guesses what this one will choose (rounds.py).
"""

import math
from dataclasses import asdict, dataclass

import torch

try:
    from kernels import sample as sample_kernel
except ImportError:  # no Triton for this system: the functions below do the work
    sample_kernel = None

GREEDY_BELOW = 1e-6  # a temperature under this is 0: dividing fp32 logits by it would only make infinities


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from its logits. None, 0 (min_p) or 1 (top_p, repetition_penalty) switches a step off.

    Args:
        temperature: logits are divided by it; 0 takes the likeliest token, the lowest id on ties.
        top_k: keep the k likeliest tokens, and all that tie with the last of them.
        top_p: keep the fewest likeliest tokens whose probability reaches p (Holtzman et al. 2020), and all that
            tie with the last of them.
        min_p: keep tokens at least min_p times as probable as the likeliest one (Nguyen et al. 2024).
        repetition_penalty: divide positive and multiply negative logits of tokens already in the row, prompt
            included (Keskar et al. 2019, as in Hugging Face transformers).

    Raises:
        ValueError: a value out of range.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be 0 (the likeliest token) or above")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must lie between 0 and 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0 (1 is none)")

    @property
    def filters(self) -> str:
        """The kind of filters in use, as `kernels.sample.choose` tells them apart."""
        if self.temperature < GREEDY_BELOW:
            return "none"
        if self.top_k is not None:
            return "few" if sample_kernel and self.top_k <= sample_kernel.FEW else "any"
        if (self.top_p or 1) < 1:
            return "top_p"
        return "min_p" if self.min_p else "none"


def penalise(logits, seen, penalty):
    """logits fp32 [B, V], seen bool [B, V]: make the seen tokens less likely (more likely if penalty < 1)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits, k):
    last = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < last, -math.inf)


def keep_top_p(logits, p):
    ordered = logits.sort(descending=True).values
    mass = ordered.softmax(-1).cumsum(-1)  # [B, V]: probability of the 1, 2, 3 ... likeliest tokens
    last = (mass < p).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)  # rank of the token that reaches p
    return logits.masked_fill(logits < ordered.gather(-1, last), -math.inf)


def keep_min_p(logits, p):
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -math.inf)


def filtered(logits, sampling: Sampling):
    """Temperature, top-k, top-p, min-p, in this order: fp32 [B, V] whose softmax is what is sampled; -inf is never."""
    # Their maximum becomes 0 first, so that no temperature can overflow to inf - inf.
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p:
        logits = keep_min_p(logits, sampling.min_p)
    return logits


def shift_right(x, n):
    """x >> n for int64 read as unsigned: torch's own shift would copy the sign bit."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def splitmix64(state, n):
    """Output n = 0, 1, 2 ... of the SplitMix64 generator seeded with `state`; int64 tensors that broadcast.

    Steele, Lea and Flood 2014, with the constants of Vigna's splitmix64.c; products wrap modulo 2**64.
    """
    z = state + (n + 1) * (0x9E3779B97F4A7C15 - 2**64)
    z = (z ^ shift_right(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ shift_right(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ shift_right(z, 31)


def uniform(seeds, positions, vocab_size):
    """Numbers in (0, 1), fp32 [B, V], each a pure function of (row seed, position, token id).

    seeds, positions: int64 [B]. Position p of a row is the start of a stream of its own, token v its v-th number.
    63 random bits are rounded to a float, so small numbers stay fine-grained down to 2**-64 and none is 0 or 1. The
    bits are the same on every device.
    """
    token = torch.arange(vocab_size, device=seeds.device)
    bits = splitmix64(splitmix64(seeds, positions)[:, None], token)
    return ((shift_right(bits, 1).float() + 0.5) * 2.0**-63).clamp(max=1 - 2.0**-24)


def gumbel(seeds, positions, vocab_size):
    """Standard Gumbel noise, fp32 [B, V], finite, from -2.9 to 44.4: argmax(logits + gumbel) samples softmax(logits).

    -log(-log(1 - u)) puts the fine end of u on the large values, the ones that let an unlikely token win. Adding
    noise to logits, where a filtered token is -inf, never draws a token of probability 0 (dividing probabilities
    by exponential noise can: 0 / 0).
    """
    return -torch.log(-torch.log1p(-uniform(seeds, positions, vocab_size)))


def sample(logits, sampling: Sampling, seeds, positions, seen=None):
    """Choose one token per row: int64 [B].

    logits: [B, V] in any float dtype. seeds, positions: int64 [B], the row's seed and where in it the chosen token will
    stand. seen: bool [B, V], the tokens under the repetition penalty (None: no penalty).
    """
    logits = logits.float()
    if seen is not None:
        logits = penalise(logits, seen, sampling.repetition_penalty)
    if sampling.temperature < GREEDY_BELOW:
        return logits.argmax(-1)  # torch: the first of equals
    return (filtered(logits, sampling) + gumbel(seeds, positions, logits.shape[-1])).argmax(-1)


def log_probabilities(logits, tokens):
    """ln of the probability that the model itself gives each token, before temperature, filters and penalty: fp32 [B].

    logits: [B, V] in any float dtype. tokens: int64 [B].
    """
    return logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def has_kernel(device) -> bool:
    return torch.device(device).type == "cuda" and sample_kernel is not None


def parameters(sampling: Sampling, rows: int, device):
    """What the kernel behind `choose` reads of a Sampling, fp32 [rows, 5] of the host's memory; None where `device` has
    no such kernel."""
    if not has_kernel(device):
        return None
    return sample_kernel.parameters(rows, "cpu", **asdict(sampling))


def choose(logits, sampling: Sampling, params, seeds, positions, seen=None, logprobs: bool = False):
    """`sample`, and the log-probabilities of the tokens if asked (else None). params: of `parameters`.

    A GPU has a kernel for it, which reads `params` in place of `sampling`, so that a CUDA graph of it serves every
    setting with the same `filters`. Elsewhere rows go one by one: an elementwise function may end a long tensor
    with other instructions than it began it with, and a row's noise would depend on how many rows stand before it.
    """
    if has_kernel(logits.device):
        options = dict(seen=seen, filters=sampling.filters, logprobs=logprobs)
        chosen = sample_kernel.choose(logits, params, seeds, positions, **options)
        return chosen if logprobs else (chosen, None)
    rows = [slice(row, row + 1) for row in range(len(logits))]
    tokens = torch.cat(
        [sample(logits[r], sampling, seeds[r], positions[r], None if seen is None else seen[r]) for r in rows]
    )
    return tokens, log_probabilities(logits, tokens) if logprobs else None
