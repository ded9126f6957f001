"""One attention case: its inputs, its reference, and the rule by which a result passes.

The rule is FlashAttention's own: against the same mathematics in higher precision, the kernel may be wrong at most
twice as much as plain PyTorch in the kernel's dtype, plus a rounding of the result.
"""

import math
import os
from dataclasses import dataclass

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, when the kernels are imported

from kernels import flash_attention  # noqa: E402
from kernels.interpreter import INTERPRETED  # noqa: E402
from kernels.reference import masked_softmax, visible_keys  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
# Where the exact result is 0 by cancellation (one key: dq = 0), sums in another order leave a few ulp of fp32.
FLOOR = 2e-5
HEADS = [(6, 6), (6, 3), (6, 2), (8, 2), (6, 1)]
MASKS = ["full", "causal", "window", "documents", "window+documents"]
LAYOUTS = ["bhtd", "bthd", "packed", "padded", "offset"]


@dataclass(frozen=True)
class Case:
    heads: tuple[int, int] = (2, 1)
    tokens: tuple[int, int] = (64, 64)
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    mask: str = "causal"
    layout: str = "bthd"
    batch: int = 1

    def __str__(self):
        heads, tokens = ("{}x{}".format(*pair) for pair in (self.heads, self.tokens))
        dtype = str(self.dtype).removeprefix("torch.")
        return f"b{self.batch}-h{heads}-t{tokens}-d{self.head_dim}-{dtype}-{self.mask}-{self.layout}"


def mask_options(mask, batch, tokens_q, tokens_k, generator, device=DEVICE):
    """Keyword arguments of one mask. Documents are of random length, of length 1 too; some start past the keys that
    their queries may see, so that those see nothing."""
    options = dict(causal=mask != "full")
    if "window" in mask:
        options["window"] = max(1, tokens_k // 3)
    if "documents" in mask:
        starts = torch.rand(batch, tokens_q, generator=generator) < 8.0 / tokens_q
        position = torch.arange(tokens_q) + tokens_k - tokens_q + (torch.arange(tokens_q) % 7 == 0).long()
        options["doc_start"] = torch.where(starts, position, 0).cummax(dim=1).values.to(torch.int32).to(device)
    return options


def lay_out(x, layout):
    """The same `[B, H, T, D]` values in another memory layout."""
    batch, heads, tokens, dim = x.shape
    if layout == "bhtd":
        return x.contiguous()
    if layout == "bthd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed":  # a slice of a fused qkv projection
        home = x.new_full((batch, tokens, 3, heads, dim), math.nan)
        home[:, :, 1] = x.transpose(1, 2)
        return home[:, :, 1].transpose(1, 2)
    if layout == "padded":  # rows longer than head_dim
        home = x.new_full((batch, heads, tokens, dim + 8), math.nan)
        home[..., :dim] = x
        return home[..., :dim]
    home = x.new_full((x.numel() + 1,), math.nan)  # "offset": no address is a multiple of 16 bytes
    home[1:] = x.flatten()
    return home[1:].view_as(x)


def inputs(case, device=DEVICE, seed=0):
    """q, k, v (leaves), dout, and the keyword arguments of the mask."""
    generator = torch.Generator().manual_seed(seed)
    (heads_q, heads_kv), (tokens_q, tokens_k) = case.heads, case.tokens
    shapes = [(heads_q, tokens_q), (heads_kv, tokens_k), (heads_kv, tokens_k), (heads_q, tokens_q)]
    q, k, v, dout = (
        lay_out(torch.randn(case.batch, *s, case.head_dim, generator=generator).to(device, case.dtype), case.layout)
        for s in shapes
    )
    options = mask_options(case.mask, case.batch, tokens_q, tokens_k, generator, device)
    return [x.detach().requires_grad_() for x in (q, k, v)], dout, options


def textbook(q, k, v, dout, options, dtype, scale_k, backward=True):
    """out, dq, dk, dv with every step in `dtype`; `scale_k` scales k before the product instead of the scores."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    scale = 1.0 / math.sqrt(q.shape[3])
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    if scale_k:
        scores = q @ (wide_k * scale).transpose(-2, -1)
    else:
        scores = q @ wide_k.transpose(-2, -1) * scale
    mask = visible_keys(q.shape[2], k.shape[2], device=q.device, **options)
    out = masked_softmax(scores, mask) @ wide_v
    return [out, *torch.autograd.grad(out, (q, k, v), dout.to(dtype))] if backward else [out.detach()]


def run(q, k, v, dout, options, backward=True):
    """The kernel, with every buffer it allocates full of NaN beforehand."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        out = flash_attention(q, k, v, backend="triton", **options)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)] if backward else [out.detach()]
    finally:
        torch.use_deterministic_algorithms(deterministic)


def check(case, device=DEVICE, backward=True):
    """Assert that the kernel passes the rule; returns (error, allowed) of out and of the gradients."""
    (q, k, v), dout, options = inputs(case, device)
    got = run(q, k, v, dout, options, backward)
    high = torch.float64 if case.dtype == torch.float32 else torch.float32
    exact = textbook(q, k, v, dout, options, high, False, backward)
    plain = textbook(q, k, v, dout, options, case.dtype, True, backward)
    report = []
    for name, x, reference, other in zip(("out", "dq", "dk", "dv"), got, exact, plain, strict=False):
        assert x.dtype == case.dtype and x.shape == reference.shape, name
        assert x.isfinite().all(), f"{case}: {name} is not finite"
        if x.numel() == 0:
            continue
        rounded = reference.to(case.dtype)
        allowed = 2 * (other.to(high) - reference).abs().max() + 2 * (rounded + 0.3 - 0.3 - rounded).abs().max()
        allowed = allowed + FLOOR
        error = (x.to(high) - reference).abs()
        assert error.max() <= allowed, f"{case}: {name} is wrong by {error.max():.2e}, allowed {allowed:.2e}"
        # A single wrong row hides below a maximum taken elsewhere, not below the mean.
        mean_allowed = (
            2 * (other.to(high) - reference).abs().mean() + (rounded + 0.3 - 0.3 - rounded).abs().mean() + FLOOR
        )
        assert error.mean() <= mean_allowed, f"{case}: {name} is wrong by {error.mean():.2e} in the mean"
        report.append((error.max().item(), allowed.item()))
    return report
