"""Backend "torch": the same attention through `F.scaled_dot_product_attention` (SDPA).

SDPA is a front door to several kernels, and two of its habits need watching: it aligns a causal mask with the
first key instead of the last, and where no fused kernel fits it falls back, silently, to one that stores the
T_q x T_k matrix. Here the mask is our own wherever the alignments differ, and on a GPU the fallback is switched off.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.reference import visible_keys

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None,
    doc_start: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Attention by SDPA; arguments and result as in `reference.attention`.

    On CUDA only fused kernels may run: one that fits nothing raises PyTorch's "No available kernel" RuntimeError.
    A mask (window, doc_start, ragged causal) costs a boolean T_q x T_k tensor: SDPA knows no other way to say it.
    """
    tokens_q, tokens_k = q.shape[2], k.shape[2]
    if tokens_q == 0 or tokens_k == 0:
        return q @ k.transpose(-2, -1)[:, :1] @ v[:, :1]  # nothing to read: zeros, still in the autograd graph

    if causal and window is not None and window >= tokens_k:
        window = None
    square = tokens_q == tokens_k
    plain = window is None and doc_start is None and (not causal or square or tokens_q == 1)
    mask = empty = None
    if not plain:
        mask = visible_keys(tokens_q, tokens_k, causal=causal, window=window, doc_start=doc_start, device=q.device)
        if doc_start is not None or tokens_q > tokens_k:
            # Rows that see nothing: let them see everything, then erase the result (a softmax over nothing is NaN,
            # and so are its gradients).
            empty = ~mask.any(dim=-1, keepdim=True)
            mask = mask | empty

    is_causal = plain and causal and square and tokens_q > 1
    attend = _attend_cuda if q.is_cuda else _attend
    out = attend(q, k, v, mask, is_causal, scale)
    return out if empty is None else out.masked_fill(empty, 0.0)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """On CPU `enable_gqa` was the fastest of four ways to share KV heads, by 3 to 8%, forward and backward."""
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=gqa)


def _attend_cuda(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    batch, heads_q, tokens_q, head_dim = q.shape
    heads_kv, tokens_k = k.shape[1], k.shape[2]
    group = heads_q // heads_kv
    pad = -head_dim % 8
    if pad:  # the fused kernels read rows of 8 elements; zeros change no product, but the scale must stay
        scale = head_dim**-0.5 if scale is None else scale
        q, k, v = (F.pad(x, (0, pad)) for x in (q, k, v))

    if group > 1 and (mask is not None or q.dtype == torch.float32):
        # FlashAttention and cuDNN share KV heads by themselves but take no mask or no fp32; the memory-efficient
        # kernel takes both but knows no sharing. Move the KV heads into the batch and give it K and V with a
        # stride of zero over the query heads: shared, not repeated.
        q = q.reshape(batch * heads_kv, group, tokens_q, -1)
        k, v = (x.reshape(batch * heads_kv, 1, tokens_k, -1).expand(-1, group, -1, -1) for x in (k, v))
        if mask is not None and mask.dim() == 4:
            mask = mask.repeat_interleave(heads_kv, dim=0)
    with sdpa_kernel(FUSED):
        out = _attend(q, k, v, mask, is_causal, scale)
    return out.reshape(batch, heads_q, tokens_q, -1)[..., :head_dim]
