"""linear_cross_entropy against its definition, with gradients."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from kernels import linear_cross_entropy

module = importlib.import_module("kernels.linear_cross_entropy")  # the name itself is the function


def case(n=50, channels=12, vocab=37, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, channels, generator=generator).mul(scale).to(dtype).requires_grad_()
    weight = torch.randn(vocab, channels, generator=generator).to(dtype).requires_grad_()
    return x, weight, torch.randint(vocab, (n,), generator=generator)


def definition(x, weight, targets):
    return F.cross_entropy(F.linear(x.double(), weight.double()), targets)


@pytest.mark.parametrize("chunk_elements", [1, 37 * 7, 2**20])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_loss_and_gradients(monkeypatch, chunk_elements, scale):
    """Chunks of one row, of seven (the last one short), and one for all."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
    x, weight, targets = case(scale=scale)
    targets[[0, 3, 49]] = -100
    loss = linear_cross_entropy(x, weight, targets)
    expected = definition(x, weight, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    ours = torch.autograd.grad(loss * 3, (x, weight))
    theirs = torch.autograd.grad(expected * 3, (x, weight))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert not ours[0][[0, 3, 49]].any()


def test_bf16_is_as_exact_as_torch():
    x, weight, targets = case(dtype=torch.bfloat16)
    loss = linear_cross_entropy(x, weight, targets)
    torch.testing.assert_close(loss.double(), definition(x, weight, targets), rtol=2e-2, atol=2e-2)
    dx, dweight = torch.autograd.grad(loss, (x, weight))
    exact = torch.autograd.grad(definition(x, weight, targets), (x, weight))
    assert dx.dtype == dweight.dtype == torch.bfloat16
    for ours, theirs in zip((dx, dweight), exact, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 2e-2


def test_without_gradients_none_are_made(monkeypatch):
    x, weight, targets = case()
    expected = linear_cross_entropy(x, weight, targets)

    def refuse(*_):
        raise AssertionError("a gradient was computed")

    monkeypatch.setattr(torch.Tensor, "scatter_add_", refuse)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(x, weight, targets), expected.detach())


def test_padding_takes_no_part():
    x, weight, targets = case(vocab=40)
    targets %= 37
    with torch.no_grad():
        weight[37:] += 50.0
    loss = linear_cross_entropy(x, weight, targets, n_classes=37)
    torch.testing.assert_close(loss.double(), definition(x, weight[:37], targets), rtol=1e-5, atol=1e-6)
    loss.backward()
    assert not weight.grad[37:].any() and weight.grad[:37].any()


def test_gradients_of_a_frozen_head():
    x, weight, targets = case()
    weight = weight.detach()
    (dx,) = torch.autograd.grad(linear_cross_entropy(x, weight, targets), (x,))
    (expected,) = torch.autograd.grad(definition(x, weight, targets), (x,))
    torch.testing.assert_close(dx, expected, rtol=1e-4, atol=1e-5)


def test_compiles_whole():
    x, weight, targets = case()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    loss = compiled(x, weight, targets)
    torch.testing.assert_close(loss, linear_cross_entropy(x, weight, targets))
    ours, theirs = (torch.autograd.grad(value, (x, weight)) for value in (loss, definition(x, weight, targets)))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_other_devices_take_the_definition():
    """What a GPU runs, tried here: on the meta device for its shapes, and on the CPU's numbers."""
    x, weight, targets = (tensor.detach().to("meta") for tensor in case(vocab=40))
    assert linear_cross_entropy(x, weight, targets, n_classes=37).shape == ()
    x, weight, targets = case(vocab=40)
    targets %= 37
    ours = linear_cross_entropy(x, weight, targets, n_classes=37)

    class Elsewhere(torch.Tensor):
        device = torch.device("meta")

    theirs = linear_cross_entropy(x.as_subclass(Elsewhere), weight, targets, n_classes=37)
    torch.testing.assert_close(ours, theirs.as_subclass(torch.Tensor), rtol=1e-5, atol=1e-6)
