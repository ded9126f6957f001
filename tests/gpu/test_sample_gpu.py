"""The kernels behind kernels/sample.py on silicon, token for token against sampling.py."""

from dataclasses import asdict

import pytest
import torch

pytest.importorskip("triton")

from kernels import sample as kernel  # noqa: E402
from sampling import Sampling, sample  # noqa: E402

pytestmark = pytest.mark.gpu

SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(temperature=1),
    Sampling(temperature=1e-4),
    Sampling(temperature=0.8, top_k=200),
    Sampling(temperature=1.0, top_k=5000),
    Sampling(temperature=0.9, top_p=0.9),
    Sampling(temperature=1.1, min_p=0.05),
    Sampling(temperature=1.2, top_k=30, top_p=0.8, min_p=0.02, repetition_penalty=1.2),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("rows, V, scale", [(16, 50304, 2.0), (4, 128256, 3.0), (4, 3000, 0.05), (4, 65, 1.0)])
def test_the_same_tokens_as_the_definition(sampling, rows, V, scale):
    logits = (torch.randn(rows, V) * scale).bfloat16()
    seeds, positions = torch.randint(-(2**62), 2**62, (rows,)), torch.randint(0, 2**17, (rows,))
    seen = torch.rand(rows, V) < 0.2 if sampling.repetition_penalty != 1 else None
    params = kernel.parameters(rows, "cuda", **asdict(sampling))
    state = (logits.cuda(), params, seeds.cuda(), positions.cuda())
    seen_there = None if seen is None else seen.cuda()
    got, logprobs = kernel.choose(*state, seen=seen_there, filters=sampling.filters, logprobs=True)
    assert torch.equal(got, kernel.choose(*state, seen=seen_there))
    want = sample(logits, sampling, seeds, positions, seen)
    assert got.tolist() == want.tolist()
    expected = logits.float().log_softmax(-1).gather(1, want[:, None])[:, 0]
    torch.testing.assert_close(logprobs.cpu(), expected, rtol=1e-4, atol=1e-4)
    one = slice(1, 2)
    alone = kernel.choose(*(x[one] for x in state), seen=None if seen is None else seen_there[one])
    assert alone == got[1]


def test_sampling_in_a_graph_follows_its_parameters():
    logits = torch.randn(2, 50304, device="cuda") * 3
    seeds, positions = torch.arange(2, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    params = kernel.parameters(2, "cuda", temperature=0.0)
    kernel.choose(logits, params, seeds, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = kernel.choose(logits, params, seeds, positions)
    for sampling in (Sampling(temperature=0), Sampling(temperature=1, top_k=20), Sampling(temperature=2, top_p=0.7)):
        params.copy_(kernel.parameters(2, "cuda", **asdict(sampling)))
        for position in (0, 5, 99):
            positions.fill_(position)
            graph.replay()
            want = sample(logits.cpu(), sampling, seeds.cpu(), positions.cpu())
            assert tokens.tolist() == want.tolist()


def test_chi_square():
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5], device="cuda")
    draws = 100_000
    params = kernel.parameters(draws, "cuda", temperature=1.2)
    seeds = torch.arange(draws, device="cuda")
    tokens = kernel.choose(logits.repeat(draws, 1), params, seeds, torch.full_like(seeds, 9), filters="none")
    expected = (logits / 1.2).softmax(-1) * draws
    assert ((torch.bincount(tokens, minlength=8) - expected) ** 2 / expected).sum() < 24.3  # 99.9%, 7 degrees
