"""Flash decoding: attention of a few new tokens over a long KV cache, at the speed of memory.

The mathematics. The cache is cut into chunks of fixed length. Each chunk c gives, for each query row, its own softmax:
a result out_c and the logarithm of its sum of exponentials lse_c. Any order puts them together exactly,

    out = sum_c w_c out_c / sum_c w_c        with w_c = exp(lse_c - max lse)

so one row's cache can be read by the whole chip at once (split-KV). One token does two operations for each number it
reads, a hundred times too few to keep the arithmetic busy: all that counts is that every byte of the cache is read
once, and that enough of them are on their way at any time.

The tiling. All query heads that share a KV head, times the T new tokens, are the rows of tiles of 16; a program keeps
up to four such tiles and streams one chunk past them:

                      chunk 0        chunk 1        chunk 2    cache_len      slots
    row 0  ┌      ┌──────────────┬──────────────┬───────────┐┈┈┈┊┈┈┈┈┈┈┈┈┈┈┈┈┈┊     row = head in group * T + token
      ...  │ 16   │   out_0      │   out_1      │   out_2   │   not read       ┊
    row 15 └      └──────────────┴──────────────┴───────────┘┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┊     then: combine

Lengths are read on the device, so a captured CUDA graph is right at every length. The grid is what the chip holds at
once; its programs share out the chunks that exist, and those that get none leave. A second kernel combines; its
programs stand ready when the last chunk is read (overlap.py).

Short chunks keep the chip busy while the text is short, long ones cost less to combine when it is long. So chunks grow
with the position of the first new token: they have 64 keys, and twice as many from each of a model's `turning_points`
on. With 8 KV heads of 128 channels, and correspondingly later with fewer channels in all:

    first new token from    0   1,536   3,072   6,144   16,384   65,536  on
    keys of a chunk        64     128     256     512    1,024    2,048

A row's bits depend on its own query and the keys before it, on nothing else: chunks begin at fixed positions, a tile
always has 16 rows, and a key that a row does not see adds an exact zero. One token alone, as one of five, in a batch
of 32 or in a larger cache gives the same bits, which is what makes speculation and batches exact; but the five must
lie on one side of a turning point. Whoever verifies drafts accepts none beyond it.

In a decoding step the work of rope_cache.py can ride along (`rope_and_attend`): a program turns the queries it needs,
and whoever reads the chunk in which new tokens stand puts their keys and values there first.

Source: Flash-Decoding, Dao et al. 2023 (crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

import math
import warnings
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kernels import reference
from kernels.flash_decode_plan import RUN, Plan, combine_options, plan_for

try:
    import triton
except ImportError:  # no Triton for this system: plain PyTorch does the work
    triton = None
else:
    from kernels.flash_attention_forward import LOG2_E, empty_heads
    from kernels.flash_decode_kernels import combine_kernel, split_kernel
    from kernels.interpreter import INTERPRETED
    from kernels.overlap import launch_options
    from kernels.tiles import MAX_HEAD_DIM, MIN_HEAD_DIM, device_limits

ROWS = reference.DECODE_ROWS
MAX_TILES = 4  # tiles of ROWS query rows that one program keeps in registers
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def as_words(v_cache: Tensor) -> Tensor | None:
    """An int8 cache `[B, G, S, D]` as int32 `[B, G, S, D / 4]`, where its place in memory allows and a quarter of the
    channels is enough for the four warps of a program."""
    if v_cache.dtype != torch.int8 or v_cache.shape[3] <= 64 or v_cache.shape[3] % 4:
        return None
    fits = not any(x % 4 for x in (v_cache.data_ptr(), v_cache.storage_offset(), *v_cache.stride()[:3]))
    return v_cache.view(torch.int32) if fits else None


@dataclass(frozen=True)
class NewTokens:
    """What `rope_and_attend` adds to an attention: k and v of the new tokens `[B, G, T, D]`, not yet in the cache and
    not yet turned, nor is q; the angles (see `rope_angles`); and the norms."""

    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_len: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    new: NewTokens | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """`flash_decode` by the Triton kernels, on a GPU or in the interpreter, and with `new` tokens `rope_and_attend`;
    `plan` in place of `plan_for`'s choice."""
    batch, heads_q, tokens, head_dim = q.shape
    heads_kv, slots = k_cache.shape[1], k_cache.shape[2]
    group = heads_q // heads_kv
    out = empty_heads(q, tokens, heads_q)
    if out.numel() == 0 or slots == 0:
        return out.zero_()
    plan = plan or plan_for(heads_kv, head_dim, k_cache.element_size(), q.device)
    tiles = triton.cdiv(group * tokens, ROWS)
    tiles_each = min(triton.next_power_of_2(tiles), MAX_TILES if head_dim <= 128 else 1)
    blocks = triton.cdiv(tiles, tiles_each)
    chunks = plan.chunks.room(slots, tokens)
    partial = q.new_empty(batch, heads_q, tokens, chunks, head_dim, dtype=torch.float32)
    lse = q.new_empty(batch, heads_q, tokens, chunks, dtype=torch.float32)

    on_gpu = q.device.type == "cuda"
    sizes = dict(heads_kv=heads_kv, group=group, tokens=tokens, slots=slots, chunks=chunks, window=window or 0)
    sizes |= dict(shortest=plan.chunks.shortest, turns=plan.chunks.turns)
    constants = dict(HEAD_DIM=head_dim, WINDOW=window is not None, **launch_options(q.device))
    # More tiles take more registers, and no more than two programs of a multiprocessor have them.
    limit = dict(maxnreg=plan.registers) if plan.registers and tiles_each == 1 and on_gpu else {}
    programs = plan.programs if tiles_each == 1 else min(plan.programs, 2)
    processors = device_limits(q.device.index)[2] if on_gpu else 3  # in the interpreter: few, so that each has several
    # Tasks up to which combine_kernel may come early: one a multiprocessor, of half as many channels two.
    early = processors * 128 // head_dim
    rows = [strided(x, 3) for x in (q, k_cache, v_cache, as_words(v_cache))]
    fresh = [None] * 6 + [0.0]
    if new is not None:
        fresh = [strided(new.k, 3), strided(new.v, 3), new.cos, new.sin, new.q_norm, new.k_norm, new.eps]
    split_kernel[(min(programs * processors, batch * heads_kv * blocks * chunks),)](
        *rows, strided(k_scale, 2), strided(v_scale, 2), strided(out, 3), cache_len, partial, lse, *fresh,
        batches=batch, blocks=blocks, scale_log2=(1.0 / math.sqrt(head_dim) if scale is None else scale) * LOG2_E,
        **sizes, **constants, TILES=tiles_each, BLOCK_M=ROWS, BLOCK_N=plan.keys, BLOCK_B=triton.next_power_of_2(batch),
        early=early, PTX=on_gpu and q.dtype == torch.bfloat16, num_warps=plan.warps,
        num_stages=plan.stages, **limit,
    )  # fmt: skip
    block_d, log_runs, options = combine_options(chunks, head_dim)
    combine_kernel[(batch * heads_q * tokens, triton.cdiv(head_dim, block_d))](
        strided(out, 3), cache_len, partial, lse, **sizes, **constants, RUN=RUN, LOG_RUNS=log_runs, BLOCK_D=block_d,
        **options,
    )  # fmt: skip
    return out


def strided(x: Tensor | None, dims: int) -> tuple | None:
    """A tensor as the kernels take it: its pointer and its first strides."""
    return None if x is None else (x, *x.stride()[:dims])


def flash_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_len: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attention of the T newest tokens of each row over a KV cache of fixed size. Not differentiable.

    Args:
        q: `[B, H_q, T, D]` in bfloat16, float16 or float32; any strides, the last dimension contiguous.
        k_cache, v_cache: `[B, H_kv, S, D]` in q's dtype, or int8 with scales; likewise. Query head h reads KV head
            `h // (H_q // H_kv)`. Slots past `cache_len` may hold anything, NaN included.
        cache_len: int32 `[B]` on the device: valid tokens of each row, the T new ones included. Query t stands at
            position `p = cache_len[b] - T + t` and sees keys `j <= p`. It is never read by the host.
        window: number of keys a query sees, itself included: `j > p - window`.
        scale: positive factor on the scores, `1 / sqrt(D)` when None.
        k_scale, v_scale: fp32 `[B, H_kv, S]` for int8 caches: the key is `k_cache * k_scale`, one scale for each token
            and KV head.

    Returns `[B, H_q, T, D]` in q's dtype; a query that sees no key gives 0.

    A row's bits depend on its query and on the keys it sees, not on B, T, S or other rows.
    In a captured CUDA graph it is right at every length. Call it once with the same shapes before the capture.
    Raises ValueError, with what would fit, for shapes, dtypes or options that do not.
    """
    _check(q, k_cache, v_cache, cache_len, window, scale, k_scale, v_scale)
    options = dict(window=window, scale=scale, k_scale=k_scale, v_scale=v_scale)
    if q.device.type == "cuda":
        reason = why_not_triton(q.device.index, q.shape[3], q.dtype)
        if reason is None:
            q, k_cache, v_cache = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k_cache, v_cache))
            with torch.cuda.device_of(q):  # Triton launches on the current device, wherever the tensors are
                return launch(q, k_cache, v_cache, cache_len, **options)
        _announce(reason)
    return reference.flash_decode(q, k_cache, v_cache, cache_len, **options)


def rope_and_attend(
    qkv: Tensor,
    lengths: Tensor,
    angles: tuple[Tensor, Tensor],
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    n_head: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    window: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`rope_and_cache` and `flash_decode` of T new tokens of each row in one: for a step of a few tokens, by the Triton
    kernels alone (see `why_not_triton`).

    Args:
        qkv: `[B, T, (n_head + 2 * n_kv_head) * D]`, query heads first, then keys, then values; the last dimension
            contiguous.
        lengths: int32 `[B]`: tokens of each row, the T new ones included, so the first of these stands at
            `lengths[b] - T`. Nothing is stored for a row where that is negative, nor for a token at or past S.
        angles: cosines and sines fp32 `[B, T, D / 2]`, by `rope_angles`.
        k_cache, v_cache: `[B, n_kv_head, S, D]` in qkv's dtype, or int8 with scales; written in place.
        n_head: query heads.
        q_norm, k_norm, eps: as for `rope_and_cache`.
        window, k_scale, v_scale: as for `flash_decode`; the scales are written in place.

    Returns `[B, n_head, T, D]` in qkv's dtype.

    The cache gets the bits that `rope_and_cache` would store (with norms, up to the order of a sum), and the result has
    those of `flash_decode` after it. On a GPU the kernel reads lengths, angles and older keys before the kernel in
    front of it has ended: that one may not write them, unless it is an ordinary kernel (one that lets no other in).
    Raises ValueError, with what would fit, for shapes, dtypes or options that do not.
    """

    def refuse(sentence: str) -> None:
        raise ValueError(f"rope_and_attend: {sentence}")

    if k_cache.dim() != 4 or k_cache.shape[3] % 2:
        refuse(f"the caches must be [B, n_kv_head, S, even D]; got {tuple(k_cache.shape)}")
    n_kv_head, head_dim = k_cache.shape[1], k_cache.shape[3]
    heads = n_head + 2 * n_kv_head
    if qkv.dim() != 3 or qkv.shape[2] != heads * head_dim or qkv.stride(2) != 1:
        got = f"{tuple(qkv.shape)} with strides {qkv.stride()}"
        refuse(f"qkv must be [B, T, {heads * head_dim}], the last dimension contiguous; got {got}")
    q, k, v = qkv.unflatten(2, (heads, head_dim)).transpose(1, 2).split([n_head, n_kv_head, n_kv_head], dim=1)
    options = dict(window=window, scale=None, k_scale=k_scale, v_scale=v_scale)
    _check(q, k_cache, v_cache, lengths, *options.values())
    wanted = (len(qkv), qkv.shape[1], head_dim // 2)
    for x in angles:
        if x.shape != wanted or x.dtype != torch.float32 or not x.is_contiguous() or x.device != qkv.device:
            refuse(f"angles must be fp32 {list(wanted)} on {qkv.device}; got {x.dtype} {tuple(x.shape)} on {x.device}")
    if (q_norm is None) != (k_norm is None) or any(x is not None and x.shape != (head_dim,) for x in (q_norm, k_norm)):
        refuse(f"q_norm and k_norm must both be [{head_dim}], or None")
    with torch.cuda.device_of(qkv):
        new = NewTokens(k, v, *angles, q_norm, k_norm, eps)
        return launch(q, k_cache, v_cache, lengths, **options, new=new)


@cache
def why_not_triton(index: int, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot run on this GPU, or None."""
    if triton is None:
        return "Triton is not installed"
    if INTERPRETED:
        return "TRITON_INTERPRET=1 is for tensors on the CPU"
    if dtype not in DTYPES:
        return f"{dtype} is not one of bfloat16, float16, float32"
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        return f"head_dim {head_dim} is outside {MIN_HEAD_DIM} .. {MAX_HEAD_DIM}"
    capability = torch.cuda.get_device_capability(index)
    return None if capability >= (8, 0) else f"compute capability {capability[0]}.{capability[1]} is below 8.0"


@cache
def _announce(reason: str) -> None:
    warnings.warn(f"flash_decode falls back to plain PyTorch, which reads the whole cache: {reason}", stacklevel=3)


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_len: Tensor,
    window: int | None,
    scale: float | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    def refuse(sentence: str) -> None:
        raise ValueError(f"flash_decode: {sentence}")

    if not (q.dim() == k_cache.dim() == 4 and k_cache.shape == v_cache.shape):
        shapes = f"{tuple(q.shape)}, {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        refuse(f"q must be [B, H_q, T, D] and both caches [B, H_kv, S, D]; got {shapes}")
    batch, heads_q, _, head_dim = q.shape
    heads_kv = k_cache.shape[1]
    if k_cache.shape[0] != batch or k_cache.shape[3] != head_dim:
        refuse(f"the caches must be [{batch}, heads, slots, {head_dim}] to fit q; got {tuple(k_cache.shape)}")
    if heads_kv == 0 or heads_q % heads_kv != 0:
        fits = [h for h in range(1, heads_q + 1) if heads_q % h == 0]
        refuse(f"{heads_q} query heads cannot share {heads_kv} KV heads; {fits} would fit")
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        refuse("the last dimension of the caches must be contiguous")
    if cache_len.shape != (batch,) or cache_len.dtype != torch.int32 or not cache_len.is_contiguous():
        refuse(f"cache_len must be int32 [{batch}], contiguous; got {cache_len.dtype} {tuple(cache_len.shape)}")
    quantized = k_cache.dtype == torch.int8
    if k_cache.dtype != v_cache.dtype or not (quantized or k_cache.dtype == q.dtype) or not q.is_floating_point():
        refuse(f"the caches must both be {q.dtype} like q, or int8; got {k_cache.dtype} and {v_cache.dtype}")
    for name, given in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (given is None) == quantized:
            refuse(f"{name} goes with int8 caches, and int8 caches need it; the caches are {k_cache.dtype}")
        if given is not None and (given.shape != k_cache.shape[:3] or given.dtype != torch.float32):
            got = f"{given.dtype} {tuple(given.shape)}"
            refuse(f"{name} must be float32 {list(k_cache.shape[:3])}, one for each token and KV head; got {got}")
        if given is not None and given.stride(-1) != 1:
            refuse(f"the last dimension of {name} must be contiguous")
    for given in (k_cache, v_cache, cache_len, k_scale, v_scale):
        if given is not None and given.device != q.device:
            refuse(f"all tensors must be on {q.device} like q; one is on {given.device}")
    if scale is not None and not 0.0 < scale < math.inf:
        refuse(f"scale must be a positive number, or None for 1 / sqrt(head_dim); got {scale}")
    if window is not None and window < 1:
        refuse(f"window={window} must be at least 1 key (the query itself)")
