"""Optimizers and the learning-rate schedule of the training run."""

import math
from collections import defaultdict

import torch

EMBEDDING_RATE = 3.0  # with Muon: a row of the embedding moves only when its token occurs, so it may move further
WSD_COOLDOWN = 0.4  # share of the run over which the wsd schedule falls


@torch.no_grad()
def orthogonalize(matrices, steps: int = 5):
    """The nearest semi-orthogonal matrix to each of `matrices` [N, rows, columns], roughly (singular values near 1).

    Newton-Schulz iteration of degree five with the coefficients of Jordan et al. 2024 ("Muon"), which trade
    exactness for speed. Runs in bf16 on GPUs and in fp32 elsewhere, where bf16 is emulated and slow.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT  # the product below is then the smaller square
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # the iteration converges for singular values up to 1
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (Jordan et al. 2024), for matrices alone.

    The update is scaled by 0.2 sqrt(max(rows, columns)), which gives it the root mean square of an AdamW step
    (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2): one learning rate and one weight decay
    then serve both optimizers. Matrices of one shape go through the iteration together, which is why this is not
    torch.optim.Muon: that one walks them one by one, and in bf16 on the CPU too.
    """

    def __init__(self, params, lr: float, weight_decay: float, momentum: float):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for (rows, columns), parameters in by_shape.items():
                momenta = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in parameters]
                gradients = [p.grad for p in parameters]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                nesterov = torch._foreach_lerp(gradients, momenta, group["momentum"])
                update = orthogonalize(torch.stack(nesterov)) * (0.2 * math.sqrt(max(rows, columns)))
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(update.unbind()), alpha=-group["lr"])


def parameter_groups(model) -> dict[str, list]:
    """Every parameter in exactly one group: the matrices of the blocks, the embedding, the head, the vectors."""
    groups = {"matrices": [], "embedding": [], "head": [], "vectors": []}
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            groups["vectors"].append(parameter)  # norms and biases
        elif name == "embed.weight":
            groups["embedding"].append(parameter)  # the head too, where they are tied
        elif name == "head.weight":
            groups["head"].append(parameter)
        else:
            groups["matrices"].append(parameter)
    return groups


def make_optimizers(model, config) -> list[torch.optim.Optimizer]:
    """The optimizers of a run. `set_learning_rate` sets their rates at each step; vectors are never decayed."""
    groups = parameter_groups(model)
    muon = config.optimizer == "muon"
    rate_of = {"embedding": EMBEDDING_RATE if muon else 1.0}
    decay_of = {"vectors": 0.0}
    adamw_groups = [
        {"params": members, "rate": rate_of.get(kind, 1.0), "weight_decay": decay_of.get(kind, config.weight_decay)}
        for kind, members in groups.items()
        if members and not (muon and kind == "matrices")
    ]
    betas = (config.beta1, config.beta2)
    optimizers = [torch.optim.AdamW(adamw_groups, lr=config.learning_rate, betas=betas, fused=True)]
    if muon:
        muon_group = {"params": groups["matrices"], "rate": 1.0}
        optimizers.append(Muon([muon_group], config.learning_rate, config.weight_decay, momentum=config.beta1))
    return optimizers


def set_learning_rate(optimizers, lr: float):
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["rate"]


def learning_rate_at(step: int, config) -> float:
    """The rate of update `step` (from 0): a linear climb over warmup_steps, then the schedule down to min_lr."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    progress = min(progress, 1.0)
    remaining = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "wsd": min(1.0, (1 - progress) / WSD_COOLDOWN),
        "constant": 1.0,
    }[config.schedule]
    return config.min_lr + (config.learning_rate - config.min_lr) * remaining
