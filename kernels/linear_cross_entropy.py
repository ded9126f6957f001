"""Cross-entropy of a linear layer, without keeping the matrix of its logits.

The last layer of a language model makes the largest tensor of a step, tokens x vocabulary, only to reduce it to one
number. Its gradient needs no more than a few rows of it at a time: with p = softmax(x W^T) and N counted targets,

    loss = 1/N sum_i (log sum_v exp(x_i . w_v) - x_i . w_target(i))
    dx_i = 1/N (sum_v p_iv w_v - w_target(i))          dW_v = 1/N sum_i (p_iv - [v = target(i)]) x_i

so rows are taken in chunks small enough for the processor's cache, and both gradients are made at once, in the forward
pass; the backward pass multiplies them by the gradient of the loss. (Liger Kernel, Hsu et al. 2024, section 3.2.)

On a CPU this runs as written. Elsewhere the definition is left to torch.compile, which fuses it but keeps the logits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ELEMENTS = 2**20  # logits held at a time: 4 MB in fp32


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, n_classes: int | None = None, ignore_index: int = -100
) -> Tensor:
    """Mean of -log softmax(x weight^T)[target] over the targets that count.

    Args:
        x: `[N, C]`.
        weight: `[V, C]`, in x's dtype.
        targets: int64 `[N]`; rows with `ignore_index` do not count.
        n_classes: rows of weight that take part, from the first; the rest is padding (None: all).

    Returns the loss in nats, an fp32 scalar, differentiable in x and weight (once).
    """
    if x.device.type != "cpu":  # the product keeps its padding there: it is what makes its size even
        return F.cross_entropy(F.linear(x, weight)[:, :n_classes].float(), targets, ignore_index=ignore_index)
    with_gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _Chunked.apply(x, weight[:n_classes], targets, ignore_index, with_gradients)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, ignore_index, with_gradients):
        counted = targets != ignore_index
        scale = 1.0 / counted.sum()
        rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
        losses = []
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, x.shape[0], rows):
            part = slice(start, start + rows)
            logits = F.linear(x[part], weight).float()  # [rows, V]
            target = targets[part].clamp(min=0)[:, None]
            shifted = logits.sub_(logits.amax(1, keepdim=True))
            chosen = shifted.gather(1, target)
            weights = shifted.exp_()
            total = weights.sum(1, keepdim=True)
            losses.append(((total.log() - chosen).squeeze(1) * counted[part]).sum())
            if with_gradients:
                row_scale = (scale * counted[part])[:, None]
                dlogits = weights.mul_(row_scale / total).scatter_add_(1, target, -row_scale).to(x.dtype)
                dx[part] = dlogits @ weight
                dweight.addmm_(dlogits.float().t(), x[part].float())
        if with_gradients:
            ctx.save_for_backward(dx, dweight.to(weight.dtype))
        return torch.stack(losses).sum() * scale

    @staticmethod
    def backward(ctx, dloss):
        dx, dweight = ctx.saved_tensors
        return dx * dloss, dweight * dloss, None, None, None
