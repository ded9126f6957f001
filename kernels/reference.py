"""The kernels of this package written as plain PyTorch: the definitions that tests compare with.

Nothing here is clever and nothing here is fast on a GPU. `attention` is softmax(Q K^T) V with the whole
T_q x T_k matrix in memory, which is exactly what FlashAttention avoids; keep it to see what the kernel saves
(`backend="naive"`). Every tensor is `[batch, heads, tokens, head_dim]`.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.quantize import PANEL, Weight, dequantize

DECODE_ROWS = 16  # query rows of one matrix product in `flash_decode`; see there
LINEAR_ELEMENTS = 2**20  # weights that `decode_linear` unpacks at a time: 4 MB in fp32


def visible_keys(
    tokens_q: int,
    tokens_k: int,
    *,
    causal: bool,
    window: int | None = None,
    doc_start: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor | None:
    """Boolean mask, True where query i may look at key j; None when every query sees every key.

    Shape `[T_q, T_k]`, or `[B, 1, T_q, T_k]` with `doc_start`. The last query is aligned with the last key
    (bottom-right), so query i sits at position `p = i + T_k - T_q` of the keys and sees key j when
    `j <= p` (causal), `j > p - window`, and `j >= doc_start[b, i]`.
    """
    if not causal:
        return None
    position = torch.arange(tokens_q, device=device)[:, None] + (tokens_k - tokens_q)
    key = torch.arange(tokens_k, device=device)[None, :]
    mask = key <= position
    if window is not None:
        mask = mask & (key > position - window)
    if doc_start is not None:
        mask = mask & (key >= doc_start[:, None, :, None])
    return mask


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over the last dimension; a row that sees nothing gives zeros."""
    if mask is None:
        return scores.softmax(dim=-1)
    seen = mask.any(dim=-1, keepdim=True)
    # An all -inf row would make softmax 0/0. Give it finite scores, then erase its weights: no NaN either way,
    # in the values or in the gradients.
    scores = scores.masked_fill(~mask, float("-inf")).masked_fill(~seen, 0.0)
    return scores.softmax(dim=-1) * seen


def log_sum_exp(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Over the last dimension, without gradients; -inf for a row that sees nothing."""
    scores = scores.detach()
    return (scores if mask is None else scores.masked_fill(~mask, float("-inf"))).logsumexp(dim=-1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    doc_start: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Textbook attention: `softmax(scale * Q K^T + mask) V`.

    q `[B, H_q, T_q, D]`, k and v `[B, H_kv, T_k, D]`; query head h reads KV head `h // (H_q // H_kv)`.
    The products run in the inputs' dtype, the softmax in fp32 (fp64 for fp64). Returns `[B, H_q, T_q, D]`, and
    with `return_lse` also the natural-log sum of exponentials, fp32 `[B, H_q, T_q]`, not differentiable.
    Masks as in `visible_keys`. Source: Vaswani et al. 2017, section 3.2.1; grouped heads: Ainslie et al. 2023.
    """
    batch, heads_q, tokens_q, head_dim = q.shape
    heads_kv, tokens_k = k.shape[1], k.shape[2]
    group = heads_q // heads_kv
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale

    # All the queries that share a KV head become the rows of one product, so K and V are never repeated.
    rows = q.reshape(batch, heads_kv, group * tokens_q, head_dim)
    scores = (rows @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    scores = scores.view(batch, heads_q, tokens_q, tokens_k)
    mask = visible_keys(tokens_q, tokens_k, causal=causal, window=window, doc_start=doc_start, device=q.device)
    weights = masked_softmax(scores, mask)
    weights = weights.to(v.dtype).view(batch, heads_kv, group * tokens_q, tokens_k)
    out = (weights @ v).view(batch, heads_q, tokens_q, head_dim)
    return (out, log_sum_exp(scores, mask)) if return_lse else out


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
    """Attention of the T newest tokens of each row over a KV cache of fixed size.

    q `[B, H_q, T, D]`, caches `[B, H_kv, S, D]`, `cache_len` int32 `[B]`: valid tokens of each row, the T new ones
    included. Query t of row b stands at position `p = cache_len[b] - T + t` and sees keys `j <= p`, and
    `j > p - window`. Slots past `cache_len` may hold anything, NaN included. int8 caches come with `k_scale` and
    `v_scale`, fp32 `[B, H_kv, S]`: the scale of K goes on the scores, that of V on the weights. Returns
    `[B, H_q, T, D]`.

    The query rows are walked in tiles of 16 with the last one padded: a matrix product of another height may add
    its terms in another order, and one token decoded alone would then differ in its last bits from the same token
    decoded as one of five.
    """
    batch, heads_q, tokens, head_dim = q.shape
    heads_kv, slots = k_cache.shape[1], k_cache.shape[2]
    group = heads_q // heads_kv
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale

    key = torch.arange(slots, device=q.device)
    position = cache_len[:, None] - tokens + torch.arange(tokens, device=q.device)  # [B, T]
    mask = key <= position[..., None]
    if window is not None:
        mask = mask & (key > position[..., None] - window)
    # 0 * NaN is NaN: weights of zero do not protect from what an unused slot holds.
    unused = (key >= cache_len[:, None])[:, None]  # [B, 1, S]
    k_cache, v_cache = k_cache.to(q.dtype), v_cache.to(q.dtype).masked_fill(unused[..., None], 0.0)
    if v_scale is not None:
        v_scale = v_scale.masked_fill(unused, 0.0)[:, :, None]

    total = group * tokens
    padding = -total % DECODE_ROWS
    rows = F.pad(q.reshape(batch, heads_kv, total, head_dim), (0, 0, 0, padding))
    mask = F.pad(mask.repeat(1, group, 1), (0, 0, 0, padding))[:, None]
    tiles = []
    for start in range(0, total + padding, DECODE_ROWS):
        tile = slice(start, start + DECODE_ROWS)
        scores = (rows[:, :, tile] @ k_cache.transpose(-2, -1)).float() * scale
        if k_scale is not None:
            scores = scores * k_scale[:, :, None]
        weights = masked_softmax(scores, mask[:, :, tile])
        if v_scale is not None:
            weights = weights * v_scale
        tiles.append(weights.to(v_cache.dtype) @ v_cache)
    return torch.cat(tiles, dim=2)[:, :, :total].reshape(batch, heads_q, tokens, head_dim)


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 with one scale for each head vector: x `[..., D]` -> int8 `[..., D]`, fp32 `[...]`; x is about int8 * scale.

    The largest magnitude becomes 127, halves are rounded up, and a vector of zeros has scale 0.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1)
    factor = torch.where(largest > 0, 127.0 / largest, 0.0)
    return torch.floor(x * factor[..., None] + 0.5).to(torch.int8), largest / 127.0


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
    """Split the fused projection, turn q and k, store k and v; arguments and result as in `kernels.rope_and_cache`."""
    batch, tokens, _ = qkv.shape
    n_kv_head, slots, head_dim = k_cache.shape[1:]
    heads = qkv.unflatten(2, (n_head + 2 * n_kv_head, head_dim)).transpose(1, 2)  # [B, heads, T, D]
    turned, v = heads.split([n_head + n_kv_head, n_kv_head], dim=1)
    if q_norm is not None:
        parts = zip(turned.split([n_head, n_kv_head], dim=1), (q_norm, k_norm), strict=True)
        turned = torch.cat([F.rms_norm(x.float(), (head_dim,), w.float(), eps).to(x.dtype) for x, w in parts], dim=1)
    position = positions[:, None] + torch.arange(tokens, device=qkv.device)  # [B, T]
    angles = position[:, None, :, None].float() * inv_freq
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    left, right = turned.float().chunk(2, dim=-1)
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(qkv.dtype)
    q, k = turned.split([n_head, n_kv_head], dim=1)

    for x, cache, scales in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if scales is not None:
            x, scale = quantize_heads(x)
        for row, start in enumerate(positions.tolist()):
            if 0 <= start < slots:
                room = slots - start
                cache[row, :, start : start + tokens] = x[row, :, :room]
                if scales is not None:
                    scales[row, :, start : start + tokens] = scale[row, :, :room]
    return q


def decode_linear(
    x: Tensor,
    weight: Weight,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
) -> Tensor:
    """act(rmsnorm(x) W^T + bias) + residual in fp32, arguments as in `kernels.decode_linear`. Returns fp32 [M, N'].

    RMSNorm (Zhang and Sennrich 2019) divides by the root mean square after the product, which it commutes with, as
    the kernel does. Quantised weights are unpacked a block of rows at a time.

    Rows go through it one at a time: a product or a mean of another height may add its terms in another order, and a
    token decoded alone would then differ in its last bits from the same token as one of five. (A fixed height of 8
    would do too, and makes a single row 2 to 5 times slower on a CPU.)
    """
    N, K = weight.shape
    rows = (x if norm is None else (x.float() * norm.float()).to(x.dtype)).float()
    step = N if weight.values.dtype == torch.float32 else max(1, LINEAR_ELEMENTS // (K * PANEL)) * PANEL
    blocks = []
    for start in range(0, N, step):
        block = dequantize(weight, slice(start, start + step))
        blocks.append(each_row(lambda row, block=block: F.linear(row, block), rows))
    y = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
    if norm is not None:
        y = y * torch.rsqrt(each_row(lambda row: row.square().mean(1, keepdim=True), x.float()) + eps)
    if bias is not None:
        y = y + bias.float()
    if swiglu:
        y = F.silu(y[:, 0::2]) * y[:, 1::2]
    return y if residual is None else y + residual.float()


def each_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function of every row [1, K] of x by itself, one under another. Each is copied, so that all begin at the same
    place of a cache line: PyTorch's products may add up in another order otherwise."""
    return function(x) if len(x) == 1 else torch.cat([function(row.clone()) for row in x.split(1)])
