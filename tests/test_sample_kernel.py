"""The sampling kernel in the interpreter, token for token against its definition in sampling.py."""

from dataclasses import asdict

import pytest
import torch

pytest.importorskip("triton")

from kernels import sample as kernel  # noqa: E402
from sampling import Sampling, filtered, gumbel, sample  # noqa: E402


def agree(logits, sampling, seed=0, vocab_size=None, filters=None):
    """Kernel and definition choose the same tokens, for random seeds, positions and seen tokens; returns them.

    filters: None takes both the kind that the sampling has and "any"."""
    B, width = logits.shape
    V = vocab_size or width
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (B,), generator=generator)
    positions = torch.randint(0, 2**17, (B,), generator=generator)
    penalised = sampling.repetition_penalty != 1
    seen = torch.rand(B, V, generator=generator) < 0.2 if penalised else None
    params = kernel.parameters(B, "cpu", **asdict(sampling))
    cut = logits[:, :V].float()
    expected = sample(cut, sampling, seeds, positions, seen).tolist()
    for kind in {sampling.filters, "any"} if filters is None else {filters}:
        got, logprobs = kernel.choose(
            logits, params, seeds, positions, vocab_size=V, seen=seen, filters=kind, logprobs=True
        )
        assert got.tolist() == expected, kind
    torch.testing.assert_close(logprobs, cut.log_softmax(-1).gather(1, got[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    return got


SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(temperature=0, top_k=5, repetition_penalty=1.5),
    Sampling(temperature=1),
    Sampling(temperature=1e-5),
    Sampling(temperature=0.7, repetition_penalty=0.8),
    Sampling(temperature=0.8, top_k=1),
    Sampling(temperature=0.8, top_k=200),
    Sampling(temperature=1.3, top_k=10_000),
    Sampling(temperature=0.9, top_p=0.9),
    Sampling(temperature=0.9, top_p=1e-6),
    Sampling(temperature=1.1, min_p=0.05),
    Sampling(temperature=1.1, min_p=1),
    Sampling(temperature=1.2, top_k=30, top_p=0.8, min_p=0.02, repetition_penalty=1.2),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_same_tokens(sampling):
    generator = torch.Generator().manual_seed(3)
    for case, (V, scale) in enumerate(((2500, 2.0), (65, 4.0), (3, 0.1))):
        agree(torch.randn(4 if V < 100 else 2, V, generator=generator) * scale, sampling, case)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_ties(sampling):
    """Logits of a few values: ties with the k-th token, with the best, and more candidates than fit into registers."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randint(-2, 3, (2, 3000), generator=generator).float()
    logits[1] = 1.5
    agree(logits, sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS[6:], ids=str)
def test_flat_rows_and_tokens_that_are_ruled_out(sampling):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 3000, generator=generator) * 0.05  # top_p keeps thousands
    logits[1, 7:] = -torch.inf
    tokens = agree(logits, sampling)
    assert tokens[1] < 7


def test_one_kind_of_row_beside_another():
    """Rows with and without filters, in one call with `filters`, choose what they choose alone; so does a row twice."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(1, 1500, generator=generator).repeat(4, 1) * 3
    options = [dict(temperature=0.0), dict(temperature=1.0), dict(temperature=0.7, top_k=9), dict(temperature=1.0)]
    params = torch.cat([kernel.parameters(1, "cpu", **option) for option in options])
    seeds, positions = torch.tensor([5, 6, 7, 6]), torch.tensor([100, 0, 3, 0], dtype=torch.int32)
    together = kernel.choose(logits, params, seeds, positions)
    assert torch.equal(together, kernel.choose(logits, params, seeds, positions, filters="few"))
    for row, option in enumerate(options):
        one = slice(row, row + 1)
        alone = sample(logits[one], Sampling(**option), seeds[one], positions[one].long())
        assert together[row] == alone and together[row] == kernel.choose(
            logits[one], params[one], seeds[one], positions[one], filters="few" if "top_k" in option else "none"
        )
    assert together[1] == together[3]


def test_padding_dtypes_and_out():
    logits = torch.randn(2, 600) * 3
    logits[:, 500:] = 99.0  # the padding of the vocabulary must not win
    for sampling in (Sampling(temperature=0), Sampling(temperature=1), Sampling(temperature=1, top_k=5)):
        for dtype in (torch.float32, torch.float16):
            assert (agree(logits.to(dtype), sampling, vocab_size=500) < 500).all()
    out, zeros = torch.full((2,), -1), torch.zeros(2, dtype=torch.int64)
    wide = torch.randn(2, 1200)[:, 300:900]  # rows that do not follow each other in memory
    got = kernel.choose(wide, kernel.parameters(2, "cpu", temperature=0.0), zeros, zeros, out=out, filters="none")
    assert got is out and torch.equal(out, wide.argmax(-1))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
def test_nothing_but_nan_stays_inside_the_vocabulary():
    zeros = torch.zeros(1, dtype=torch.int64)
    for option in (dict(temperature=0.0), dict(temperature=1.0, top_k=3)):
        logits = torch.full((1, 100), torch.nan)
        assert 0 <= kernel.choose(logits, kernel.parameters(1, "cpu", **option), zeros, zeros)[0] < 100


def test_distribution():
    """Chi-square of 150 draws against softmax(logits / temperature); seeds are fixed, so it passes or it does not."""
    logits, draws = torch.tensor([1.0, 0.5, 0.0, -1.0]), 150
    params = kernel.parameters(draws, "cpu", temperature=1.2)
    positions = torch.full((draws,), 17)
    tokens = kernel.choose(logits.repeat(draws, 1), params, torch.arange(draws), positions, filters="none")
    expected = filtered(logits[None], Sampling(temperature=1.2)).softmax(-1)[0] * draws
    assert ((torch.bincount(tokens, minlength=4) - expected) ** 2 / expected).sum() < 16.3  # 99.9%, 3 degrees


def test_noise_is_the_definition():
    """Equal logits at temperature 1: what wins is the largest noise, over long rows."""
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    positions = torch.tensor([0, 1, 131_071, 5])
    params = kernel.parameters(4, "cpu", temperature=1.0)
    got = kernel.choose(torch.zeros(4, 20_000), params, seeds, positions, filters="none")
    assert torch.equal(got, gumbel(seeds, positions, 20_000).argmax(-1))


def test_what_does_not_fit_is_refused():
    zeros = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="params"):
        kernel.choose(torch.zeros(2, 64), kernel.parameters(1, "cpu"), zeros, zeros)
    with pytest.raises(ValueError, match=">= 65"):
        kernel.choose(torch.zeros(2, 64), kernel.parameters(2, "cpu"), zeros, zeros, vocab_size=65)
    with pytest.raises(ValueError, match="one of none, few"):
        kernel.choose(torch.zeros(2, 64), kernel.parameters(2, "cpu"), zeros, zeros, filters="all")
