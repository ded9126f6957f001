"""Exact attention, softmax(scale * Q K^T + mask) V, without ever storing the T_q x T_k matrix.

Why it is fast. The arithmetic is the textbook's; what is saved is memory traffic. The textbook writes T^2 scores to
memory, reads them for the softmax, writes T^2 weights, reads them again, and keeps them for the backward pass. Here a
tile of scores lives and dies in the registers of one program:

            K, V streamed in tiles (shared memory) ->                    kept for the backward pass:
           ┌────────┬────────┬────────┬────────┐                         q, k, v, out and, for each query,
   Q tile  │ scores │ scores │ scores │ diag.  │  -> running maximum,    one number: the logarithm of its
  (stays)  └────────┴────────┴────────┴────────┘     sum and result      sum of exponentials (lse)

so memory grows with T instead of T^2. The longer the sequence, the more that saves.

    flash_attention_forward.py    the forward kernel (online softmax)
    flash_attention_backward.py   the backward kernels (recomputation)
    tiles.py                      tile sizes for each chip
    this file                     registration with PyTorch, and the choice between implementations:

    "triton"  the kernels: any Nvidia GPU from compute capability 8.0 on, or the CPU with TRITON_INTERPRET=1
    "torch"   F.scaled_dot_product_attention (sdpa.py)
    "naive"   the textbook definition with its T x T matrix (reference.py)
    None      choose, once for each device, by trying: `describe_backend()` says what and why

Sources: FlashAttention, Dao et al. 2022; FlashAttention-2, Dao 2023.
"""

import math
import subprocess
import warnings
from functools import cache

import torch
from torch import Tensor

from kernels import reference
from kernels.sdpa import sdpa_attention

try:
    import triton
except ImportError:  # no Triton for this system: plain PyTorch does the work
    triton = None
else:
    from kernels.flash_attention_backward import backward
    from kernels.flash_attention_forward import empty_heads, forward
    from kernels.interpreter import INTERPRETED
    from kernels.tiles import MAX_HEAD_DIM, MIN_HEAD_DIM

BACKENDS = ("triton", "torch", "naive")
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


# Registration. Both passes are opaque operators to PyTorch: torch.compile keeps them whole, and activation
# checkpointing, DDP and FSDP see one node with a gradient.
if triton is not None:

    @torch.library.custom_op("kernels::flash_attention", mutates_args=())
    def forward_op(
        q: Tensor, k: Tensor, v: Tensor, doc_start: Tensor | None, causal: bool, window: int | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        doc_start = None if doc_start is None else doc_start.contiguous()
        with torch.cuda.device_of(q):  # Triton launches on the current device, wherever the tensors are
            return forward(q, k, v, doc_start, causal, window, scale)

    @forward_op.register_fake
    def _(q, k, v, doc_start, causal, window, scale):
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        return empty_heads(q, q.shape[2], q.shape[1]), lse

    @torch.library.custom_op("kernels::flash_attention_backward", mutates_args=())
    def backward_op(
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
        # dout comes from anywhere: a sum gives it strides of 0, a transposed consumer any order.
        dout, q, k, v, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (dout, q, k, v, out))
        doc_start = None if doc_start is None else doc_start.contiguous()
        with torch.cuda.device_of(q):
            return backward(dout, q, k, v, out, lse.contiguous(), doc_start, causal, window, scale)

    @backward_op.register_fake
    def _(dout, q, k, v, out, lse, doc_start, causal, window, scale):
        return tuple(empty_heads(x, x.shape[2], x.shape[1]) for x in (q, k, v))

    def _save_for_backward(ctx, inputs, output):
        q, k, v, doc_start, *ctx.options = inputs
        out, lse = output
        ctx.save_for_backward(q, k, v, out, lse, doc_start)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)

    def _backward(ctx, dout, dlse):
        if dout is None:
            return (None,) * 7
        return *backward_op(dout, *ctx.saved_tensors, *ctx.options), None, None, None, None

    forward_op.register_autograd(_backward, setup_context=_save_for_backward)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    doc_start: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of every query over the keys it may see, differentiable in q, k and v.

    Args:
        q: `[B, H_q, T_q, D]`; any strides, the last dimension contiguous.
        k, v: `[B, H_kv, T_k, D]` with `H_q % H_kv == 0`; query head h reads KV head `h // (H_q // H_kv)`, and
            K and V are never repeated in memory.
        causal: query i, at position `p = i + T_k - T_q`, sees keys `j <= p` (the last query is aligned with the
            last key).
        window: number of keys a query sees, itself included: `j > p - window`. Needs `causal`.
        doc_start: int32 `[B, T_q]`, non-decreasing along T_q: index of the first key of the document that each query
            belongs to; key j is visible only if `j >= doc_start[b, i]`. Needs `causal`.
        scale: positive factor on the scores, `1 / sqrt(D)` when None.
        return_lse: also return the natural logarithm of each row's sum of exponentials, fp32 `[B, H_q, T_q]`, not
            differentiable. Not with backend "torch".
        backend: one of `BACKENDS`, or None to choose.

    Returns `[B, H_q, T_q, D]` in q's dtype, or `(out, lse)`. A query that sees no key gives out 0 and lse -inf.
    Raises ValueError, with what would fit, for shapes, dtypes or options that do not.

    The mathematics is the textbook's; floating point is not associative, so backends differ by rounding.
    Source: Dao 2023 (FlashAttention-2), algorithms 1 and 2; grouped heads: Ainslie et al. 2023.
    """
    _check(q, k, v, causal, window, doc_start, scale, backend)
    if window is not None and window >= k.shape[2]:
        window = None
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    if backend is None:
        backend = choose_backend(q.device.type, q.device.index, int(q.shape[3]), q.dtype)
        if return_lse and backend == "torch":
            backend = "naive"

    if backend == "naive":
        return reference.attention(
            q, k, v, causal=causal, window=window, doc_start=doc_start, scale=scale, return_lse=return_lse
        )
    if backend == "triton":
        reason = why_not_triton(q.device.type, int(q.shape[3]), q.dtype)
        if reason:
            raise ValueError(f'flash_attention: backend "triton" cannot run here: {reason}; use "torch" or "naive"')
        out, lse = forward_op(q, k, v, doc_start, causal, window, scale)
        return (out, lse) if return_lse else out
    if return_lse:
        raise ValueError('flash_attention: backend "torch" cannot return lse; use "triton" or "naive"')
    return sdpa_attention(q, k, v, causal=causal, window=window, doc_start=doc_start, scale=scale)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    doc_start: Tensor | None,
    scale: float | None,
    backend: str | None,
) -> None:
    def refuse(sentence: str) -> None:
        raise ValueError(f"flash_attention: {sentence}")

    if backend is not None and backend not in BACKENDS:
        refuse(f"backend {backend!r} does not exist; use one of {', '.join(BACKENDS)}, or None to choose")
    if not (q.dim() == k.dim() == v.dim() == 4):
        got = f"{q.dim()}, {k.dim()} and {v.dim()} dimensions"
        refuse(f"q, k and v must be [batch, heads, tokens, head_dim]; got {got}")
    if k.shape != v.shape:
        refuse(f"k and v must have one shape; got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        refuse(f"k must be [{q.shape[0]}, heads, tokens, {q.shape[3]}] to fit q; got {tuple(k.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        fits = [h for h in range(1, q.shape[1] + 1) if q.shape[1] % h == 0]
        refuse(f"{q.shape[1]} query heads cannot share {k.shape[1]} KV heads; {fits} would fit")
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        refuse(f"q, k and v must have one floating-point dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
    if not (q.device == k.device == v.device):
        refuse(f"q, k and v must be on one device; got {q.device}, {k.device} and {v.device}")
    if scale is not None and not 0.0 < scale < math.inf:
        refuse(f"scale must be a positive number, or None for 1 / sqrt(head_dim); got {scale}")
    if window is not None and (not causal or window < 1):
        refuse(f"window={window} needs causal=True and at least 1 key (the query itself)")
    if doc_start is not None:
        if not causal:
            refuse("doc_start needs causal=True: it bounds only the first key a query sees")
        if doc_start.shape != (q.shape[0], q.shape[2]) or doc_start.dtype != torch.int32:
            wanted = f"int32 [{q.shape[0]}, {q.shape[2]}], one entry a query"
            refuse(f"doc_start must be {wanted}; got {doc_start.dtype} {tuple(doc_start.shape)}")
        if doc_start.device != q.device:
            refuse(f"doc_start must be on {q.device} like q; it is on {doc_start.device}")


def why_not_triton(device_type: str, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot even be tried, or None."""
    if triton is None:
        return "Triton is not installed"
    if device_type != "cuda" and not INTERPRETED:
        return f"Triton kernels need a GPU, or TRITON_INTERPRET=1; the tensors are on {device_type}"
    if dtype not in TRITON_DTYPES:
        return f"{dtype} is not one of bfloat16, float16, float32"
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        return f"head_dim {head_dim} is outside {MIN_HEAD_DIM} .. {MAX_HEAD_DIM}"
    return None


@torch.compiler.assume_constant_result
def choose_backend(
    device_type: str, index: int | None = None, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16
) -> str:
    """The backend that `backend=None` takes; settled once for a device, head_dim and dtype."""
    return _choose(device_type, index, head_dim, dtype)[0]


def describe_backend(
    device: torch.device | str = "cpu", head_dim: int = 64, dtype: torch.dtype = torch.bfloat16
) -> str:
    """One sentence: which backend `backend=None` takes on this device, and why."""
    device = torch.device(device)
    backend, reason = _choose(device.type, device.index, head_dim, dtype)
    return f"attention on {device}: {backend}, because {reason}"


@cache
def _choose(device_type: str, index: int | None, head_dim: int, dtype: torch.dtype) -> tuple[str, str]:
    if device_type != "cuda":
        return "torch", f"Triton kernels need a GPU and this is {device_type}"
    reason = why_not_triton(device_type, head_dim, dtype)
    device = torch.device(device_type, torch.cuda.current_device() if index is None else index)
    capability = torch.cuda.get_device_capability(device)
    if reason is None and capability < (8, 0):
        reason = f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    if reason is None:
        # Importing proves nothing: no C compiler, an old driver, a chip nobody tried. Launching does.
        launch_errors = (RuntimeError, OSError, subprocess.CalledProcessError, triton.errors.TritonError)
        try:
            errors = trial(device, head_dim, dtype)
        except launch_errors as error:
            reason = f"the kernels failed their trial launch ({type(error).__name__}: {error})"
        else:
            worst = max(errors)
            said = ", ".join(f"{e:.1e}" for e in errors)
            if worst <= TRIAL_TOLERANCE[dtype]:
                name = torch.cuda.get_device_name(device)
                return "triton", f"its trial on {name} agrees with the definition (out, dq, dk, dv within {said})"
            reason = f"the kernels' trial is wrong: out, dq, dk, dv differ from the definition by {said}"
    warnings.warn(f"flash_attention falls back to PyTorch's own attention on {device}: {reason}", stacklevel=2)
    return "torch", reason


TRIAL_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}


def trial(device: torch.device, head_dim: int, dtype: torch.dtype) -> list[float]:
    """Largest errors of out, dq, dk and dv against the definition in fp64, each relative to its largest entry."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        # Noise without a random number generator, whose state belongs to the program.
        steps = torch.arange(4 * 200 * head_dim, dtype=torch.float32, device=device).view(1, 4, 200, head_dim)
        q, k, v, dout = (torch.frac(torch.sin(steps * f) * 43758.5).to(dtype) * 2 for f in (0.71, 1.37, 2.11, 0.93))
        k, v = k[:, :2], v[:, :2]
        got = []
        for run, to in ((forward_op, dtype), (None, torch.float64)):
            inputs = [x.to(to).detach().requires_grad_() for x in (q, k, v)]
            if run is None:
                out = reference.attention(*inputs)
            else:
                out, _ = run(*inputs, None, True, None, 1.0 / math.sqrt(head_dim))
            got.append((out, *torch.autograd.grad(out, inputs, dout.to(to))))
        return [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(*got, strict=True)]
