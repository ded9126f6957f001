"""The definition (`reference.attention`) against a loop in fp64, and backend "torch" against the definition."""

import math

import pytest
import torch

from tests.attention_cases import HEADS, MASKS, mask_options  # isort: skip (before the kernels are imported)

from kernels import flash_attention, flash_decode

LENGTHS = [(1, 1), (3, 3), (1, 17), (17, 1), (5, 40), (40, 5), (33, 33), (64, 48), (48, 64)]


def options_of(mask, batch, tokens_q, tokens_k, generator):
    return mask_options(mask, batch, tokens_q, tokens_k, generator, "cpu")


def attention_by_hand(q, k, v, causal, window=None, doc_start=None, scale=None):
    """One query at a time, one key at a time, in fp64 and in plain Python."""
    batch, heads, tokens_q, dim = q.shape
    tokens_k, group = k.shape[2], heads // k.shape[1]
    scale = scale or 1 / math.sqrt(dim)
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h // group].double(), v[b, h // group].double()
            for i in range(tokens_q):
                position = i + tokens_k - tokens_q
                seen = []
                for j in range(tokens_k):
                    if causal and j > position:
                        continue
                    if window is not None and j <= position - window:
                        continue
                    if doc_start is not None and j < doc_start[b, i]:
                        continue
                    seen.append(j)
                if seen:
                    scores = keys[seen] @ q[b, h, i].double() * scale
                    lse[b, h, i] = scores.exp().sum().log()
                    out[b, h, i] = (scores - lse[b, h, i]).exp() @ values[seen]
    return out, lse


def inputs(batch, heads, tokens_q, tokens_k, dim, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads[0], tokens_q), (heads[1], tokens_k), (heads[1], tokens_k)]
    return [torch.randn(batch, h, t, dim, generator=generator).to(dtype).requires_grad_() for h, t in shapes]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(1, 1), (3, 9), (9, 3), (12, 12)])
def test_definition_is_the_loop(mask, lengths):
    for heads in [(4, 4), (4, 2), (3, 1)]:
        q, k, v = inputs(2, heads, *lengths, 8)
        options = options_of(mask, 2, *lengths, torch.Generator().manual_seed(1))
        expected_out, expected_lse = attention_by_hand(q.detach(), k.detach(), v.detach(), **options)
        out, lse = flash_attention(q, k, v, backend="naive", return_lse=True, **options)
        torch.testing.assert_close(out.double(), expected_out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_torch_backend_is_the_definition(heads, mask):
    for lengths in LENGTHS:
        options = options_of(mask, 2, *lengths, torch.Generator().manual_seed(2))
        results = []
        for backend in ("torch", "naive"):
            q, k, v = inputs(2, heads, *lengths, 16)
            out = flash_attention(q, k, v, backend=backend, **options)
            assert out.shape == q.shape and out.dtype == q.dtype
            results.append((out, *torch.autograd.grad(out, (q, k, v), torch.cos(torch.arange(16.0)).expand_as(out))))
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("backend", ["torch", "naive"])
def test_rows_that_see_nothing(backend):
    q, k, v = inputs(1, (2, 1), 9, 4, 16)
    out = flash_attention(q, k, v, backend=backend)
    assert torch.equal(out[:, :, :5], torch.zeros(1, 2, 5, 16))
    assert out[:, :, 5:].abs().min() > 0
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert grad.isfinite().all()
    _, lse = flash_attention(q, k, v, return_lse=True, backend="naive")
    assert torch.equal(lse.isneginf(), torch.arange(9).expand(1, 2, 9) < 5)
    empty_k = k.detach()[:, :, :0]
    assert torch.equal(flash_attention(q, empty_k, empty_k, backend=backend), torch.zeros_like(q))
    assert flash_attention(q[:, :, :0], k, v, backend=backend).shape == (1, 2, 0, 16)


def test_scale_window_and_lse_choice():
    q, k, v = inputs(1, (2, 2), 10, 10, 16)
    for backend in ("torch", "naive"):
        wide = flash_attention(q, k, v, window=10, backend=backend)
        torch.testing.assert_close(wide, flash_attention(q, k, v, backend=backend))
        one = flash_attention(q, k, v, window=1, backend=backend)
        torch.testing.assert_close(one, v.expand_as(one))
        scaled = flash_attention(q, k, v, scale=0.5, backend=backend)
        torch.testing.assert_close(scaled, flash_attention(q * 2.0, k, v, backend=backend))  # 0.5 = 2 / sqrt(16)
    out, lse = flash_attention(q, k, v, return_lse=True)
    assert out.requires_grad and not lse.requires_grad


def test_torch_backend_compiles_whole():
    for mask in MASKS:
        options = options_of(mask, 2, 12, 12, torch.Generator().manual_seed(3))
        q, k, v = inputs(2, (4, 2), 12, 12, 16)
        compiled = torch.compile(flash_attention, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q, k, v, **options), flash_attention(q, k, v, **options))


def test_refusals_say_what_would_fit():
    q, k, v = inputs(2, (6, 2), 8, 8, 16)
    doc_start = torch.zeros(2, 8, dtype=torch.int32)
    cases = [
        (dict(q=q[:, :5]), "5 query heads cannot share 2 KV heads; \\[1, 5\\] would fit"),
        (dict(q=q[0]), "must be \\[batch, heads, tokens, head_dim\\]"),
        (dict(v=v[:, :, :4]), "one shape"),
        (dict(q=q[..., :8]), "to fit q"),
        (dict(q=q[:1]), "to fit q"),
        (dict(q=q.half()), "one floating-point dtype"),
        (dict(q=q.int(), k=k.int(), v=v.int()), "one floating-point dtype"),
        (dict(q=q.to("meta")), "one device"),
        (dict(backend="flash"), "use one of triton, torch, naive"),
        (dict(window=0), "at least 1 key"),
        (dict(window=4, causal=False), "needs causal=True"),
        (dict(doc_start=doc_start, causal=False), "needs causal=True"),
        (dict(doc_start=doc_start.long()), "must be int32 \\[2, 8\\]"),
        (dict(doc_start=doc_start[:, :4]), "must be int32 \\[2, 8\\]"),
        (dict(backend="torch", return_lse=True), "cannot return lse"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            flash_attention(**{"q": q, "k": k, "v": v, **change})


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 7])
def test_decode_is_attention_over_the_valid_part(heads, window):
    lengths = [4, 5, 20, 33]
    for tokens in (1, 3, 4):
        q, k, v = (x.detach() for x in inputs(len(lengths), heads, tokens, 40, 16))
        for b, length in enumerate(lengths):
            k[b, :, length:] = math.nan
            v[b, :, length:] = math.nan
        out = flash_decode(q, k, v, torch.tensor(lengths, dtype=torch.int32), window=window)
        for b, length in enumerate(lengths):
            expected = flash_attention(
                q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length], window=window, backend="naive"
            )
            torch.testing.assert_close(out[b : b + 1], expected, rtol=1e-5, atol=1e-5)


def test_decode_bits_do_not_depend_on_company():
    """One token alone, as one of five, and in a batch: the same bits, in every head ratio."""
    for heads in HEADS:
        q, k, v = (x.detach() for x in inputs(3, heads, 5, 300, 64))
        length = torch.tensor([200, 7, 300], dtype=torch.int32)
        together = flash_decode(q, k, v, length)
        for b in range(3):
            row = slice(b, b + 1)
            assert torch.equal(flash_decode(q[row], k[row], v[row], length[row]), together[row])
            for t in range(5):
                alone = flash_decode(q[row, :, t : t + 1], k[row], v[row], length[row] - 4 + t)
                assert torch.equal(alone, together[row, :, t : t + 1])
