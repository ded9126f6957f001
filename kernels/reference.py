"""The kernels of this package written as plain PyTorch: the definitions that tests compare with.

Nothing here is clever and nothing here is fast on a GPU. `attention` is softmax(Q K^T) V with the whole
T_q x T_k matrix in memory, which is exactly what FlashAttention avoids; keep it to see what the kernel saves
(`backend="naive"`). Every tensor is `[batch, heads, tokens, head_dim]`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

DECODE_ROWS = 16  # query rows of one matrix product in `flash_decode`; see there


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


def softmax_and_lse(scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension and its log-sum-exp; a row that sees nothing gives zeros and -inf."""
    if mask is None:
        return scores.softmax(dim=-1), scores.logsumexp(dim=-1)
    scores = scores.masked_fill(~mask, float("-inf"))
    seen = mask.any(dim=-1)
    # An all -inf row would make softmax 0/0. Give it finite scores, then erase its weights: no NaN either way,
    # in the values or in the gradients.
    weights = scores.masked_fill(~seen[..., None], 0.0).softmax(dim=-1) * seen[..., None]
    return weights, scores.detach().logsumexp(dim=-1)


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
    weights, lse = softmax_and_lse(scores, mask)
    weights = weights.to(v.dtype).view(batch, heads_kv, group * tokens_q, tokens_k)
    out = (weights @ v).view(batch, heads_q, tokens_q, head_dim)
    return (out, lse.detach()) if return_lse else out


def flash_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_len: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of the T newest tokens of each row over a KV cache of fixed size.

    q `[B, H_q, T, D]`, caches `[B, H_kv, S, D]`, `cache_len` int32 `[B]`: valid tokens of each row, the T new ones
    included. Query t of row b stands at position `p = cache_len[b] - T + t` and sees keys `j <= p`, and
    `j > p - window`. Slots past `cache_len` may hold anything, NaN included. Returns `[B, H_q, T, D]`.

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
    v_cache = v_cache.masked_fill((key >= cache_len[:, None])[:, None, :, None], 0.0)

    total = group * tokens
    padding = -total % DECODE_ROWS
    rows = F.pad(q.reshape(batch, heads_kv, total, head_dim), (0, 0, 0, padding))
    mask = F.pad(mask.repeat(1, group, 1), (0, 0, 0, padding))[:, None]
    tiles = []
    for start in range(0, total + padding, DECODE_ROWS):
        tile = slice(start, start + DECODE_ROWS)
        scores = (rows[:, :, tile] @ k_cache.transpose(-2, -1)).float() * scale
        weights, _ = softmax_and_lse(scores, mask[:, :, tile])
        tiles.append(weights.to(v_cache.dtype) @ v_cache)
    return torch.cat(tiles, dim=2)[:, :, :total].reshape(batch, heads_q, tokens, head_dim)
