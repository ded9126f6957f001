"""What lies between the fused projection and attention, in one kernel: split q, k and v, normalise q and k head by head
(where the model does), turn them by their positions, and store k and v in the cache. Prompts are read with it; in a
step of a few tokens `rope_and_attend` (flash_decode.py) does this on the way, by the functions defined here.

The mathematics. Channels i and i + D/2 of a head are a point in the plane, turned by an angle that grows with the
position p (rotary positions, Su et al. 2021, in the half-split layout of Hugging Face):

    (left, right) -> (left cos a - right sin a, right cos a + left sin a)          a_i = p * inv_freq_i

always in fp32: at position 100,000 a bf16 angle would be off by whole turns. In an int8 cache each head vector has one
scale, its largest magnitude over 127, stored beside it (see `flash_decode`).

The tiling. One program for each token and BLOCK_H heads, in two halves of D / 2 channels: q, k and v take one launch
and one trip through memory instead of a dozen, and the angles are computed once for BLOCK_H heads.

    one token of qkv   ┌ q 0 ┬ q 1 ┬ ... ┬ k 0 ┬ ... ┬ v 0 ┬ ... ┐
                          │     │           │           │
                          └─────┴──> q      └──> k_cache[b, g, p]  └──> v_cache[b, g, p]
"""

import torch
from torch import Tensor

from kernels import reference

try:
    import triton
except ImportError:  # no Triton for this system: plain PyTorch does the work
    triton = None
else:
    import triton.language as tl

    from kernels.flash_attention_forward import empty_heads
    from kernels.interpreter import INTERPRETED
    from kernels.overlap import launch_options, wait_for_the_kernel_before

BLOCK_H = 4  # heads of a program, a warp each

if triton is not None:

    @triton.jit
    def normalise(x, squares, weight, eps, HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr):
        """RMSNorm of rows [M, ...] whose D channels have that sum of squares [M], rounded where model.RMSNorm does."""
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        return (x * inverse * weight.to(tl.float32)).to(DTYPE).to(tl.float32)

    @triton.jit
    def turn(x, y, cos, sin):
        """x cos + y sin, rounded alike wherever it is compiled: x is left and y is -right, or x is right and y left."""
        return tl.fma(x, tl.broadcast_to(cos, x.shape), y * sin)

    @triton.jit
    def cosine_sine(position, inv_freq_ptr, dims, inside, attention_factor):
        """Of the angles of one position, times attention_factor: [D / 2] each."""
        angle = position.to(tl.float32) * tl.load(inv_freq_ptr + dims, mask=inside, other=0.0)
        return tl.cos(angle) * attention_factor, tl.sin(angle) * attention_factor

    @triton.jit(do_not_specialize=["tokens"])
    def rope_angles_kernel(cos_ptr, sin_ptr, positions_ptr, inv_freq_ptr, tokens, attention_factor, HALF: tl.constexpr):
        dims = tl.arange(0, triton.next_power_of_2(HALF))
        inside = dims < HALF
        position = tl.load(positions_ptr + tl.program_id(0) // tokens) + tl.program_id(0) % tokens
        cos, sin = cosine_sine(position, inv_freq_ptr, dims, inside, attention_factor)
        target = tl.program_id(0) * HALF + dims
        tl.store(cos_ptr + target, cos, mask=inside)
        tl.store(sin_ptr + target, sin, mask=inside)

    @triton.jit
    def store_heads(cache, scales, batch, heads, slot, left, right, dims, mask, HALF: tl.constexpr):
        """Head vectors, their `left` and `right` halves [M, HALF], into a cache (pointer, batch, head and slot strides)
        where `mask` [M]; as int8 with their scales if there are `scales` (pointer, batch and head strides). batch,
        heads, slot: where each belongs, [M] or one for all."""
        pointer, batch_stride, head_stride, slot_stride = cache
        batch, heads, slot = batch.to(tl.int64), heads.to(tl.int64), slot.to(tl.int64)
        if scales is not None:
            largest = tl.maximum(tl.max(tl.abs(left), 1), tl.max(tl.abs(right), 1))
            factor = tl.where(largest > 0.0, tl.div_rn(127.0, tl.where(largest > 0.0, largest, 1.0)), 0.0)[:, None]
            left, right = tl.floor(left * factor + 0.5), tl.floor(right * factor + 0.5)
            scale_pointer, scale_batch_stride, scale_head_stride = scales
            scale_pointer += batch * scale_batch_stride + heads * scale_head_stride + slot
            tl.store(scale_pointer, tl.div_rn(largest, 127.0), mask=mask)
        target = pointer + (batch * batch_stride + heads * head_stride + slot * slot_stride)[:, None] + dims[None, :]
        mask = mask[:, None] & (dims < HALF)[None, :]
        tl.store(target, left.to(pointer.dtype.element_ty), mask=mask)
        tl.store(target + HALF, right.to(pointer.dtype.element_ty), mask=mask)

    @triton.jit(do_not_specialize=["tokens", "n_head", "n_kv_head", "slots"])
    def rope_cache_kernel(
        qkv, q, k_cache, v_cache, k_scale, v_scale, positions_ptr, inv_freq_ptr, q_norm_ptr, k_norm_ptr,
        tokens, n_head, n_kv_head, slots, eps, attention_factor, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):  # fmt: skip
        wait_for_the_kernel_before(OVERLAP)
        HALF: tl.constexpr = HEAD_DIM // 2
        pointer, batch_stride, token_stride = qkv
        dtype = pointer.dtype.element_ty
        batch = tl.program_id(0) // tokens
        token = tl.program_id(0) % tokens
        heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        is_q = heads < n_head
        exists = heads < n_head + 2 * n_kv_head
        dims = tl.arange(0, triton.next_power_of_2(HALF))
        inside = dims < HALF

        source = pointer + batch.to(tl.int64) * batch_stride + token.to(tl.int64) * token_stride
        source += heads[:, None] * HEAD_DIM + dims[None, :]
        mask = exists[:, None] & inside[None, :]
        left = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        v_left, v_right = left, right

        if q_norm_ptr is not None:
            squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
            norm = tl.where(is_q[:, None], q_norm_ptr + dims[None, :], k_norm_ptr + dims[None, :])
            left = normalise(left, squares, tl.load(norm, mask=mask, other=0.0), eps, HEAD_DIM, dtype)
            right = normalise(right, squares, tl.load(norm + HALF, mask=mask, other=0.0), eps, HEAD_DIM, dtype)

        start = tl.load(positions_ptr + batch)
        position = start + token
        cos, sin = cosine_sine(position, inv_freq_ptr, dims, inside, attention_factor)
        cos, sin = cos[None, :], sin[None, :]
        left, right = turn(left, -right, cos, sin).to(dtype), turn(right, left, cos, sin).to(dtype)

        pointer, batch_stride, head_stride, token_stride = q
        target = pointer + batch.to(tl.int64) * batch_stride + token.to(tl.int64) * token_stride
        target += heads[:, None] * head_stride + dims[None, :]
        mask = is_q[:, None] & inside[None, :]
        tl.store(target, left, mask=mask)
        tl.store(target + HALF, right, mask=mask)
        stored = exists & (start >= 0) & (position < slots)
        left, right = left.to(tl.float32), right.to(tl.float32)
        is_k = stored & (heads >= n_head) & (heads < n_head + n_kv_head)
        store_heads(k_cache, k_scale, batch, heads - n_head, position, left, right, dims, is_k, HALF)
        is_v = stored & (heads >= n_head + n_kv_head)
        store_heads(v_cache, v_scale, batch, heads - n_head - n_kv_head, position, v_left, v_right, dims, is_v, HALF)


def launch(
    qkv: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    n_head: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    attention_factor: float = 1.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`rope_and_cache` by the Triton kernel, on a GPU or in the interpreter."""
    batch, tokens, _ = qkv.shape
    _, n_kv_head, slots, head_dim = k_cache.shape
    q = empty_heads(qkv.new_empty(batch, 0, 0, head_dim), tokens, n_head)
    if q.numel() == 0:
        return q
    rope_cache_kernel[(batch * tokens, triton.cdiv(n_head + 2 * n_kv_head, BLOCK_H))](
        (qkv, *qkv.stride()[:2]), (q, *q.stride()[:3]), *((x, *x.stride()[:3]) for x in (k_cache, v_cache)),
        *(None if s is None else (s, *s.stride()[:2]) for s in (k_scale, v_scale)),
        positions, inv_freq, q_norm, k_norm, tokens, n_head, n_kv_head, slots, eps, attention_factor,
        HEAD_DIM=head_dim, BLOCK_H=BLOCK_H, num_warps=BLOCK_H, **launch_options(qkv.device),
    )  # fmt: skip
    return q


def rope_angles(
    positions: Tensor, tokens: int, inv_freq: Tensor, attention_factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, fp32 `[B, T, D / 2]` each, of T tokens of each row, the first at `positions` int32 `[B]`; by
    the same kernel code as in `rope_and_cache`, on a GPU or in the interpreter.

    The kernel does not let the next one in before it has ended, which `rope_and_attend` relies on.
    """
    half = len(inv_freq)
    cos, sin = (inv_freq.new_empty(len(positions), tokens, half) for _ in "cs")
    if cos.numel():
        with torch.cuda.device_of(cos):
            rope_angles_kernel[(len(positions) * tokens,)](
                cos, sin, positions, inv_freq, tokens, attention_factor, HALF=half, num_warps=1
            )
    return cos, sin


def rope_and_cache(
    qkv: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    n_head: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    attention_factor: float = 1.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Split the fused projection of T new tokens, turn q and k by their positions, store k and v in the cache.

    Args:
        qkv: `[B, T, (n_head + 2 * n_kv_head) * D]`, query heads first, then keys, then values; any strides, the last
            dimension contiguous.
        positions: int32 `[B]` on the device: position of the first of the T tokens of each row. Nothing is stored for
            a row whose position is negative (padding), nor for a token at or past S.
        inv_freq: fp32 `[D / 2]`, radians a token.
        k_cache, v_cache: `[B, n_kv_head, S, D]` in qkv's dtype, or int8 with scales; written in place.
        n_head: query heads.
        q_norm, k_norm: weights `[D]` of an RMSNorm on each head of q and k before they are turned (Qwen3), or None.
        eps: added under the root of that norm.
        attention_factor: factor on cosines and sines (YaRN).
        k_scale, v_scale: fp32 `[B, n_kv_head, S]` for int8 caches, written in place.

    Returns q, `[B, n_head, T, D]` in qkv's dtype (in memory `[B, T, n_head, D]`).
    Raises ValueError, with what would fit, for shapes, dtypes or options that do not.
    """
    _check(qkv, positions, inv_freq, k_cache, v_cache, n_head, q_norm, k_norm, k_scale, v_scale)
    options = dict(n_head=n_head, q_norm=q_norm, k_norm=k_norm, eps=eps, attention_factor=attention_factor)
    options |= dict(k_scale=k_scale, v_scale=v_scale)
    if qkv.device.type == "cuda" and triton is not None and not INTERPRETED:
        with torch.cuda.device_of(qkv):  # Triton launches on the current device, wherever the tensors are
            return launch(qkv, positions, inv_freq, k_cache, v_cache, **options)
    return reference.rope_and_cache(qkv, positions, inv_freq, k_cache, v_cache, **options)


def _check(qkv, positions, inv_freq, k_cache, v_cache, n_head, q_norm, k_norm, k_scale, v_scale):
    def refuse(sentence: str) -> None:
        raise ValueError(f"rope_and_cache: {sentence}")

    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.shape[3] % 2:
        refuse(f"the caches must be [B, n_kv_head, S, even D]; got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}")
    batch, n_kv_head, slots, head_dim = k_cache.shape
    width = (n_head + 2 * n_kv_head) * head_dim
    if qkv.dim() != 3 or qkv.shape[0] != batch or qkv.shape[2] != width:
        refuse(f"qkv must be [{batch}, T, {width}] for {n_head} query heads and these caches; got {tuple(qkv.shape)}")
    quantized = k_cache.dtype == torch.int8
    if k_cache.dtype != v_cache.dtype or not (quantized or k_cache.dtype == qkv.dtype):
        refuse(f"the caches must both be {qkv.dtype} like qkv, or int8; got {k_cache.dtype} and {v_cache.dtype}")
    if (q_norm is None) != (k_norm is None):
        refuse("q_norm and k_norm go together")
    if (k_scale is not None, v_scale is not None) != (quantized, quantized):
        refuse(f"k_scale and v_scale go with int8 caches, and int8 caches need them; the caches are {k_cache.dtype}")
    wanted = {
        "positions": (positions, (batch,), torch.int32),
        "inv_freq": (inv_freq, (head_dim // 2,), torch.float32),
        "q_norm": (q_norm, (head_dim,), None),
        "k_norm": (k_norm, (head_dim,), None),
        "k_scale": (k_scale, (batch, n_kv_head, slots), torch.float32),
        "v_scale": (v_scale, (batch, n_kv_head, slots), torch.float32),
    }
    for name, (given, shape, dtype) in wanted.items():
        if given is not None and (given.shape != shape or given.dtype != (dtype or given.dtype)):
            refuse(f"{name} must be {dtype or 'a tensor'} {list(shape)}; got {given.dtype} {list(given.shape)}")
    for given in (qkv, k_cache, v_cache, *(tensor for tensor, _, _ in wanted.values())):
        if given is not None and given.device != qkv.device:
            refuse(f"all tensors must be on {qkv.device} like qkv; one is on {given.device}")
        if given is not None and given.stride(-1) != 1:
            refuse("the last dimension of every tensor must be contiguous")
