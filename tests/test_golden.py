"""A small model of our own: 131,392 parameters, GQA 4/2, tied, a BPE of 512, trained on the standard library.

Its text and its loss are pinned: whatever breaks the arithmetic of the decoder, of the cache or of the tokenizer, in a
way that the other tests do not see, shows here.
"""

from pathlib import Path

import pytest
import torch

import checkpoint
from engine import Engine, Sampling

GOLDEN = Path(__file__).parent / "golden"
GREEDY = """:
            return ['system']
        if not self.tk.call():
            return self.tk.get_offset()

    def __init__(self, **kw):
        return self.__class__
        self.__class__ = self.__class__"""
LOSS = 3.199919  # nats per token of the line below
# At every step the likeliest token leads by at least 0.06 in its logit, far above what another CPU's rounding moves.


@pytest.fixture(scope="module")
def golden():
    return checkpoint.load_model(GOLDEN, dtype=torch.float32), checkpoint.load_tokenizer(GOLDEN)


def test_its_greedy_text(golden):
    text = Engine(*golden).complete(["class Error"], Sampling(temperature=0), 100)[0].text
    assert text.startswith(GREEDY)


def test_its_loss(golden):
    model, tokenizer = golden
    tokens = torch.tensor([tokenizer.encode("def area(self):\n    return self.width * self.height\n")])
    with torch.no_grad():
        assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(LOSS, abs=1e-4)
