"""Optimizers and the learning-rate schedule."""

from types import SimpleNamespace

import pytest
import torch

from config import build
from model import Transformer
from optim import Muon, learning_rate_at, make_optimizers, orthogonalize, parameter_groups, set_learning_rate


def tiny(**settings):
    values = dict(vocab_size=65, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, qk_norm=True, qkv_bias=True)
    config = build(values | settings)
    return config, Transformer(config.model).init_weights(torch.Generator().manual_seed(0))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_every_parameter_is_in_exactly_one_group(optimizer, tie_embeddings):
    config, model = tiny(optimizer=optimizer, tie_embeddings=tie_embeddings)
    held = [p for o in make_optimizers(model, config) for group in o.param_groups for p in group["params"]]
    assert len(held) == len(set(held))
    assert set(held) == set(model.parameters())


def test_only_matrices_are_decayed():
    config, model = tiny(optimizer="adamw")
    (adamw,) = make_optimizers(model, config)
    for group in adamw.param_groups:
        assert (group["weight_decay"] == 0) == all(p.dim() == 1 for p in group["params"])
    assert all(p.dim() == 2 for p in parameter_groups(model)["matrices"])


@pytest.mark.parametrize("shape", [(16, 16), (16, 48), (48, 16)])
def test_orthogonalize_evens_out_the_singular_values(shape):
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(x))
    assert values.min() > 0.3 and values.max() < 1.3
    # The singular vectors stay: x and its orthogonal factor have a positive definite product.
    assert torch.linalg.eigvalsh(x @ orthogonalize(x).mT if shape[0] <= shape[1] else x.mT @ orthogonalize(x)).min() > 0


def test_muon_moves_by_the_size_of_an_adamw_step():
    weight = torch.nn.Parameter(torch.zeros(64, 256))
    weight.grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.9).step()
    assert weight.detach().square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)


def test_muon_treats_matrices_of_one_shape_like_single_ones():
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(2, 3, 8, 12, generator=generator)
    together = [torch.nn.Parameter(w.clone()) for w in start]
    alone = [torch.nn.Parameter(w.clone()) for w in start]
    for parameters in (together, alone):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
    Muon(together, lr=0.1, weight_decay=0.1, momentum=0.9).step()
    for parameter in alone:
        Muon([parameter], lr=0.1, weight_decay=0.1, momentum=0.9).step()
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b)


def schedule(name, **changes):
    settings = dict(schedule=name, learning_rate=1.0, min_lr=0.1, warmup_steps=10, max_steps=110)
    return SimpleNamespace(**(settings | changes))


@pytest.mark.parametrize("name, last", [("cosine", 0.1), ("linear", 0.1), ("wsd", 0.1), ("constant", 1.0)])
def test_schedules_at_their_ends(name, last):
    config = schedule(name)
    rates = [learning_rate_at(step, config) for step in range(111)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[110] == pytest.approx(last)
    assert min(rates) > 0 and max(rates) <= 1.0
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert learning_rate_at(10_000, config) == pytest.approx(last)  # never below, also past the end


def test_wsd_is_flat_until_its_last_two_fifths():
    config = schedule("wsd", min_lr=0.0)
    assert learning_rate_at(69, config) == 1.0
    assert learning_rate_at(90, config) == pytest.approx(0.5)


def test_schedule_without_warmup_or_length():
    assert learning_rate_at(0, schedule("cosine", warmup_steps=0)) == 1.0
    assert learning_rate_at(5, schedule("cosine", warmup_steps=10, max_steps=3)) == pytest.approx(0.6)


def test_learning_rate_reaches_every_group():
    config, model = tiny(optimizer="muon", tie_embeddings=False)
    optimizers = make_optimizers(model, config)
    set_learning_rate(optimizers, 0.5)
    rates = sorted(group["lr"] for o in optimizers for group in o.param_groups)
    assert rates == [0.5, 0.5, 0.5, 1.5]  # the embedding's is three times the others'
