"""The engine: cached logits, batches, sampling, stop strings and characters, all on tiny random models in fp32."""

import dataclasses
import json
import math
import random
import re
import time

import pytest
import torch

import decoding
import engine as engine_module
import sampling as sampling_module
from data import UserError
from data.tokenizer import ByteTokenizer, CharTokenizer
from decoding import Decoder
from engine import Completion, Engine, Row, Sampling
from model import KVCache, ModelConfig, Transformer
from sampling import (
    filtered,
    gumbel,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise,
    sample,
    splitmix64,
    uniform,
)
from textstream import TextStream

BYTES = ByteTokenizer()
BLOCK = 48
GREEDY = Sampling(temperature=0)
HEADS = {"mha": 4, "gqa": 2, "mqa": 1}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_model(n_kv_head=2, vocab_size=257, block_size=BLOCK, seed=0, **options):
    """A model in which every weight matters: `init_weights` would start each block as the identity."""
    config = ModelConfig(
        vocab_size=vocab_size, n_layer=2, n_head=4, n_kv_head=n_kv_head, n_embd=32, block_size=block_size, **options
    )
    model = Transformer(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.normal_(0, 1.0 if name == "embed.weight" else 0.25, generator=generator)
    return model


def tiny_engine(**options):
    return Engine(tiny_model(**options), BYTES)


class Scripted(Decoder):
    """Stands in for a model: says the given ids, whatever it is asked, and remembers what it was fed."""

    def __init__(self, ids, vocab_size=257, block_size=200):
        self.config = ModelConfig(
            vocab_size=vocab_size, n_layer=1, n_head=1, n_embd=2, head_dim=2, block_size=block_size
        )
        self.embed, self.dtype, self.device = torch.zeros(vocab_size, 2), torch.float32, torch.device("cpu")
        self.ids, self.calls, self.prompt_length = ids, [], 1

    def weight_bytes(self):
        return 0

    def prefill(self, tokens, cache, row, start=0):
        self.prompt_length = len(tokens) + 1

    def step(self, x, start, lengths, cache):
        self.calls.append((len(start), len(x) // len(start)))
        places = [place + t for place in start.tolist() for t in range(len(x) // len(start))]
        said = torch.tensor([self.ids[min(place + 1 - self.prompt_length, len(self.ids) - 1)] for place in places])
        return torch.nn.functional.one_hot(said, self.config.vocab_size).float()


def say(text, stop=(), max_new_tokens=None, tokenizer=BYTES, tail=()):
    """Greedy generation by a model that says `text`; the pieces."""
    ids = [*(text if isinstance(text, bytes) else text.encode()), *tail]
    model = Scripted(ids + [0], vocab_size=300)
    return list(Engine(model, tokenizer, speculate=0).generate(["?"], GREEDY, max_new_tokens or len(ids), stop=stop))


def joined(pieces):
    return "".join(piece.text for piece in pieces)


# ----- cached == uncached


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("prompt", [1, BLOCK - 1, BLOCK])
def test_cached_logits_are_the_uncached_ones_at_every_position(heads, prompt):
    model = tiny_model(HEADS[heads])
    tokens = torch.randint(257, (2, BLOCK), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens)
        cache = KVCache(model.config, 2, BLOCK)
        positions = torch.arange(BLOCK).expand(2, BLOCK)
        parts = [model.decode(tokens[:, :prompt], positions[:, :prompt], cache)]
        for t in range(prompt, BLOCK):
            parts.append(model.decode(tokens[:, t : t + 1], positions[:, t : t + 1], cache))
    assert expected.std() > 0.5  # logits that could not tell positions apart would prove nothing
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 5, "qk_norm": True}], ids=["full", "window"])
def test_greedy_text_is_that_of_the_whole_forward(heads, options):
    """Prefill, decode, positions and cache views together, against no cache at all, over the whole context."""
    model = tiny_model(HEADS[heads], **options)
    ids = list(b"ab")
    with torch.inference_mode():
        while len(ids) < BLOCK:
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
            if ids[-1] == BYTES.eot_id:
                break
    assert len(ids) > 20
    done = Engine(model, BYTES).complete(["ab"], GREEDY, BLOCK - 2)
    assert done[0].token_ids == ids[2:]


def test_long_prompts_and_texts_cross_chunks():
    """Prompt and text both go past 128 tokens, where prefill takes another chunk and the cache view grows."""
    model = tiny_model(block_size=700)
    prompt = "".join(random.Random(3).choices("abcdefgh ", k=300))
    done = Engine(model, BYTES).complete([prompt], GREEDY, 260)[0]
    ids = [*prompt.encode(), *done.token_ids]
    with torch.inference_mode():
        best = model(torch.tensor([ids]))[0].topk(2)
    assert len(done.token_ids) == 260
    for t, token in enumerate(done.token_ids):
        values, indices = best.values[299 + t], best.indices[299 + t]
        assert token == indices[0] or (values[0] - values[1] < 1e-4 and token == indices[1])


# ----- the end of the context


def test_last_position_works_and_the_next_is_refused():
    engine = tiny_engine()
    done = engine.complete(["x" * (BLOCK - 1)], GREEDY, 1)
    assert len(done[0].token_ids) == 1
    assert engine.room("x" * (BLOCK - 1)) == 1
    assert engine.room("") == BLOCK - 1
    engine.decoder.step = None  # any work would fail
    for length, new in [(BLOCK - 1, 2), (BLOCK, 1), (BLOCK + 5, 3), (1, BLOCK), (BLOCK + 1, BLOCK + 1)]:
        with pytest.raises(UserError) as error:
            engine.generate(["a", "x" * length], GREEDY, new)
        message = str(error.value)
        assert f"a prompt of {length} tokens and max_new_tokens={new} make {length + new}" in message
        assert f"block_size of {BLOCK}" in message and "\n" not in message
        assert (f"max_new_tokens of at most {BLOCK - length}" in message) == (length < BLOCK)
        assert (f"a prompt of at most {BLOCK - new} tokens" in message) == (new < BLOCK)


def test_empty_prompt_starts_from_eot():
    engine = tiny_engine()
    for prompt in ("", []):
        done = engine.complete([prompt], GREEDY, 2)[0]
        assert engine.rounds.tokens[0, :3].tolist() == [BYTES.eot_id, *done.token_ids]


def test_a_prompt_may_be_ids():
    engine = tiny_engine()
    text, ids = engine.complete(["abc", list(b"abc")], None, 20, row_seeds=[1, 1])
    assert (text.text, text.token_ids) == (ids.text, ids.token_ids) and ids.prompt == list(b"abc")
    assert engine.room(list(b"abc")) == engine.room("abc")
    for bad in ([1, -1], [257]):
        with pytest.raises(ValueError, match="ids outside 0 .. 256"):
            engine.generate([bad])


# ----- batches

PROMPTS = ["a", "the quick brown", "x" * 30, "\N{SNOWMAN} "]
SAMPLINGS = {
    "greedy": GREEDY,
    "plain": Sampling(),
    "all": Sampling(0.9, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_batch_is_its_singles(heads, sampling):
    """Ragged positions, rows that end beside others that run, a seed for each."""
    engine = tiny_engine(n_kv_head=HEADS[heads])
    stop = ["e", "\x10"]
    singles = [
        engine.complete([prompt], SAMPLINGS[sampling], 15, row_seeds=[40 + i], stop=stop)[0]
        for i, prompt in enumerate(PROMPTS)
    ]
    batch = engine.complete(PROMPTS, SAMPLINGS[sampling], 15, seed=40, stop=stop)
    assert batch == singles
    assert len({tuple(row.token_ids) for row in batch}) == 4


def end_rows_at(monkeypatch, lengths):
    """From now on row i of a batch meets the end of text as its token number lengths[i]."""
    accept = Row.accept

    def ending(row, tokens, log_probabilities=None):
        here = lengths[row.index] - 1 - row.new_tokens
        tokens = [BYTES.eot_id if i == here else token for i, token in enumerate(tokens)]
        return accept(row, tokens, log_probabilities)

    monkeypatch.setattr(Row, "accept", ending)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]], ids=str)
def test_rows_together_may_end_in_any_order(order, monkeypatch):
    """A row that ended is carried along between two that run. One prompt is longer than a chunk of the cache."""
    engine = tiny_engine(block_size=400)
    prompts = ["a", "x" * 300, "bc", "y" * 20]
    plain = engine.complete(prompts, Sampling(), 18, seed=3)
    assert [len(row.token_ids) for row in plain] == [18] * 4
    lengths = [2 + 5 * turn for turn in order]
    end_rows_at(monkeypatch, lengths)
    done = engine.complete(prompts, Sampling(), 18, seed=3)
    for row, length in enumerate(lengths):
        assert done[row].token_ids == [*plain[row].token_ids[: length - 1], BYTES.eot_id]
        assert done[row].finish_reason == "eot"


def test_on_a_cpu_rows_that_ended_cost_nothing(monkeypatch):
    engine = tiny_engine()
    end_rows_at(monkeypatch, [1, 3, 5, 7])
    rows, linear = [], decoding.linear
    monkeypatch.setattr(
        decoding, "linear", lambda x, *rest, **options: rows.append(len(x)) or linear(x, *rest, **options)
    )
    engine.complete(PROMPTS, Sampling(), 7)
    products = 2 * 4 + 1  # in two layers and the head
    assert rows == [n for n in (4, 3, 3, 2, 2, 1, 1) for _ in range(products)]


def test_samples_of_a_prompt_are_single_runs_with_seed_plus_row(monkeypatch):
    engine = tiny_engine()
    read, prefill = [], Decoder.prefill
    monkeypatch.setattr(Decoder, "prefill", lambda self, ids, *rest: read.append(len(ids)) or prefill(self, ids, *rest))
    rows = engine.complete(["hello", "you"], Sampling(), 8, seed=11, num_samples=3)
    assert read == [4, 2]  # each prompt was read once, but for its last token
    assert [row.prompt for row in rows] == ["hello"] * 3 + ["you"] * 3
    for i, row in enumerate(rows):
        assert engine.complete([row.prompt], Sampling(), 8, seed=11 + i) == [row]


def test_seeds():
    engine = tiny_engine()
    texts = {seed: engine.complete(["hi"], Sampling(), 20, seed=seed)[0].token_ids for seed in range(6)}
    assert texts[3] == engine.complete(["hi"], Sampling(), 20, seed=3)[0].token_ids
    assert len({tuple(ids) for ids in texts.values()}) == 6
    torch.manual_seed(0)
    state = torch.get_rng_state()
    engine.complete(["hi"], Sampling(), 5, seed=1)
    assert torch.equal(torch.get_rng_state(), state)  # no global generator is touched
    huge = 2**64 + 3  # wraps
    assert engine.complete(["hi"], Sampling(), 20, seed=huge)[0].token_ids == texts[3]
    assert engine.complete(["hi"], Sampling(), 20, seed=-1)[0].token_ids != texts[0]


# ----- noise


def test_splitmix64_is_the_published_one():
    """First outputs for seed 1234567 of Vigna's splitmix64.c."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    outputs = splitmix64(torch.tensor(1234567), torch.arange(4))
    assert [n % 2**64 for n in outputs.tolist()] == published


def chi_square_excess(counts, expected):
    """Standard deviations by which chi-square passes its mean; cells of fewer than 5 expected are pooled."""
    small = expected < 5
    counts, expected = (torch.cat((x[~small], x[small].sum()[None])) for x in (counts.double(), expected.double()))
    counts, expected = counts[expected > 0], expected[expected > 0]
    degrees = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


@pytest.mark.parametrize("along", ["tokens", "positions", "seeds"])
def test_noise_is_uniform_and_independent_along_every_axis(along):
    count = 200_000
    steps, zeros = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    u = {
        "tokens": lambda: uniform(torch.tensor([5]), torch.tensor([9]), count)[0],
        "positions": lambda: uniform(zeros + 5, steps, 1)[:, 0],
        "seeds": lambda: uniform(steps, zeros + 9, 1)[:, 0],
    }[along]()
    cells = torch.full((1000,), count / 1000)
    assert abs(chi_square_excess((u * 1000).long().bincount(minlength=1000), cells)) < 4
    for lag in (1, 2, 7):  # pairs of neighbours fill the unit square evenly
        pairs = (u[:-lag] * 30).long() * 30 + (u[lag:] * 30).long()
        expected = torch.full((900,), len(pairs) / 900)
        assert abs(chi_square_excess(pairs.bincount(minlength=900), expected)) < 4


def test_noise_depends_on_nothing_else():
    seeds, positions = torch.tensor([3, 4, 3]), torch.tensor([10, 10, 11])
    together = uniform(seeds, positions, 500)
    for row in range(3):
        alone = uniform(seeds[row : row + 1], positions[row : row + 1], 300)
        assert torch.equal(alone[0], together[row, :300])
    assert len(together.unique()) > 1490


@pytest.mark.parametrize(("bits", "noise"), [(0, 44.361), (2**63 - 1, 0.3665), (-1, -2.811)])
def test_noise_at_its_limits(bits, noise, monkeypatch):
    """All 64 bits 0, all but the highest 1, all 1: the largest value, the middle, the smallest."""
    monkeypatch.setattr(sampling_module, "splitmix64", lambda state, n: torch.full((1, 4), bits))
    got = gumbel(torch.tensor([0]), torch.tensor([0]), 4)
    torch.testing.assert_close(got, torch.full((1, 4), noise), rtol=0, atol=2e-3)


def test_noise_has_the_moments_of_a_gumbel():
    noise = gumbel(torch.arange(1000), torch.arange(1000), 2000).double()
    assert abs(noise.mean() - 0.57722) < 0.005 and abs(noise.var() - math.pi**2 / 6) < 0.01
    assert noise.max() > 13


# ----- sampling

LOGITS = torch.randn(1, 40, generator=torch.Generator().manual_seed(5)) * 2


def draws(logits, sampling, count=40_000):
    seeds, positions = torch.arange(count), torch.full((count,), 17)
    return sample(logits.expand(count, -1), sampling, seeds, positions).bincount(minlength=logits.shape[-1])


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.6), Sampling(1.5), Sampling(0.8, top_p=0.8), Sampling(1.0, top_k=7, min_p=0.05)],
    ids=str,
)
def test_draws_follow_the_distribution(sampling):
    probabilities = slow_filter(LOGITS[0].tolist(), sampling)
    counts = draws(LOGITS, sampling)
    expected = torch.tensor(probabilities, dtype=torch.float64) * counts.sum()
    assert (counts[expected == 0] == 0).all()
    assert abs(chi_square_excess(counts, expected)) < 4


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((1, 64), -math.inf)
    logits[0, 50] = -3.0
    assert draws(logits, Sampling(1.0), 2000)[50] == 2000
    assert draws(torch.randn(1, 64), Sampling(5.0, top_k=1), 2000).max() == 2000


def slow_filter(logits, sampling):
    """The filters by their definitions, token by token in Python floats: probabilities."""
    scaled = [x / sampling.temperature for x in logits]

    def probabilities(kept):
        top = max(scaled[i] for i in kept)
        weights = {i: math.exp(scaled[i] - top) for i in kept}
        return {i: w / sum(weights.values()) for i, w in weights.items()}

    kept = set(range(len(logits)))
    if sampling.top_k is not None:  # fewer than k tokens are likelier
        kept = {i for i in kept if sum(scaled[j] > scaled[i] for j in kept) < sampling.top_k}
    if sampling.top_p is not None:  # the likelier ones do not reach p without it
        p = probabilities(kept)
        kept = {i for i in kept if sum(p[j] for j in kept if scaled[j] > scaled[i]) < sampling.top_p}
    if sampling.min_p is not None:
        p = probabilities(kept)
        kept = {i for i in kept if p[i] >= sampling.min_p * max(p.values())}
    p = probabilities(kept)
    return [p.get(i, 0.0) for i in range(len(logits))]


def test_filters_are_their_definitions():
    chance = random.Random(6)
    sizes = set()
    for case in range(400):
        size = chance.randint(1, 60)
        logits = [chance.gauss(0, 3) for _ in range(size)]
        if case % 3 == 0:  # many ties
            logits = [round(x) for x in logits]
        sampling = Sampling(
            temperature=chance.choice([0.3, 1.0, 2.5]),
            top_k=chance.choice([None, 1, 2, 5, 40, 1000]),
            top_p=chance.choice([None, 0.01, 0.5, 0.9, 0.999, 1.0]),
            min_p=chance.choice([None, 0.0, 0.03, 0.5, 1.0]),
        )
        got = filtered(torch.tensor([logits], dtype=torch.float32), sampling)[0].softmax(-1)
        torch.testing.assert_close(got, torch.tensor(slow_filter(logits, sampling)), rtol=1e-4, atol=1e-6)
        sizes.add(int((got > 0).sum()))
    assert len(sizes) > 25


def test_ties_survive_together():
    logits = torch.tensor([[3.0, 1.0, 3.0, 2.0, 2.0, 0.0]])

    def survivors(kept):
        return kept.isfinite()[0].nonzero().flatten().tolist()

    assert survivors(keep_top_k(logits, 1)) == [0, 2]
    assert survivors(keep_top_k(logits, 2)) == [0, 2]
    assert survivors(keep_top_k(logits, 3)) == [0, 2, 3, 4]
    assert survivors(keep_top_k(logits, 99)) == [0, 1, 2, 3, 4, 5]
    assert survivors(keep_top_p(logits, 0.01)) == [0, 2]
    assert survivors(keep_top_p(logits, 0.75)) == [0, 2, 3, 4]
    assert survivors(keep_min_p(logits, 1.0)) == [0, 2]
    untied = torch.randn(1, 500, generator=torch.Generator().manual_seed(7))
    for k in (1, 17, 499, 500):
        assert len(survivors(keep_top_k(untied, k))) == k


def test_temperature_zero_is_argmax_lowest_id_on_ties():
    logits = torch.tensor([[1.0, 4.0, 2.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    for temperature in (0, 1e-9, 1e-300):
        assert sample(logits, Sampling(temperature), torch.tensor([1, 2]), torch.tensor([5, 6])).tolist() == [1, 0]
    huge = LOGITS * 1e35  # divided by 1e-5 it would be infinite
    for sampling in (Sampling(1e-5), Sampling(1e-5, top_p=0.9)):
        assert sample(huge, sampling, torch.tensor([1]), torch.tensor([5])).tolist() == [int(LOGITS.argmax())]


def test_repetition_penalty_by_hand():
    logits = torch.tensor([[3.0, -1.0, 2.0, 0.0, -4.0]])
    seen = torch.tensor([[True, True, False, True, False]])
    assert penalise(logits, seen, 2.0).tolist() == [[1.5, -2.0, 2.0, 0.0, -4.0]]
    assert penalise(logits, seen, 0.5).tolist() == [[6.0, -0.5, 2.0, 0.0, -4.0]]
    where = torch.tensor([0]), torch.tensor([0])
    assert sample(logits, Sampling(0, repetition_penalty=2.0), *where, seen).tolist() == [2]  # greedy is penalised too


def test_penalty_counts_prompt_and_text():
    """The model likes 'a' best, then 'b', 'c' ...; a strong penalty makes it say each once, and none of the prompt."""

    class Ranking(Scripted):
        def step(self, x, start, lengths, cache):
            logits = torch.zeros(len(x), 257)
            logits[:, ord("a") : ord("a") + 8] = torch.linspace(4, 3, 8)
            return logits

    for prompts, expected in [(["b"], ["acdef"]), (["?", "ca"], ["abcde", "bdefg"])]:
        done = Engine(Ranking([]), BYTES).complete(prompts, Sampling(0, repetition_penalty=2.0), 5)
        assert [row.text for row in done] == expected
    done = Engine(Ranking([]), BYTES).complete(["b"], GREEDY, 3)
    assert done[0].text == "aaa"


def test_ids_past_the_tokenizer_are_never_sampled():
    tokenizer = CharTokenizer("abc")  # 4 ids with eot; the model has 257
    engine = Engine(tiny_model(), tokenizer)
    ids = [i for row in engine.complete(["ab"] * 20, Sampling(5.0), 10) for i in row.token_ids]
    assert set(ids) == {0, 1, 2, 3}
    with pytest.raises(UserError, match="257 ids but the model only 64"):
        Engine(tiny_model(vocab_size=64), BYTES)


@pytest.mark.parametrize(
    "bad",
    [
        dict(temperature=-0.1),
        dict(temperature=math.nan),
        dict(temperature=math.inf),
        dict(top_k=0),
        dict(top_k=-3),
        dict(top_p=0.0),
        dict(top_p=1.01),
        dict(top_p=math.nan),
        dict(min_p=-0.01),
        dict(min_p=1.5),
        dict(repetition_penalty=0.0),
        dict(repetition_penalty=math.nan),
        dict(repetition_penalty=-1.0),
    ],
    ids=str,
)
def test_impossible_sampling_is_refused(bad):
    with pytest.raises(ValueError, match=f"^{next(iter(bad))}=[^\n]* must [^\n]*$"):
        Sampling(**bad)


def test_impossible_calls_are_refused_at_once():
    engine = tiny_engine()
    for options in [
        dict(max_new_tokens=0),
        dict(max_new_tokens=-1),
        dict(num_samples=0),
        dict(stop=["a", ""]),
        dict(stop="ab"),
        dict(prompts=[]),
        dict(prompts="ab"),
        dict(row_seeds=[1, 2]),
    ]:
        with pytest.raises(ValueError):
            engine.generate(**{"prompts": ["a"], "max_new_tokens": 4, **options})


# ----- text


def test_eot_ends_a_row():
    pieces = say("hello", max_new_tokens=20, tail=[BYTES.eot_id, ord("x")])
    assert joined(pieces) == "hello"
    assert pieces[-1].finish_reason == "eot" and pieces[-1].token_ids == [BYTES.eot_id]
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * 5


def test_every_token_reaches_the_caller_as_it_comes():
    pieces = say("hello")
    assert [piece.text for piece in pieces] == list("hello")  # the first one too
    assert [piece.token_ids for piece in pieces] == [[ord(c)] for c in "hello"]
    assert pieces[-1].finish_reason == "length"


def test_emoji_are_streamed_whole():
    text = "a\N{GRINNING FACE}\N{SNOWMAN}é\N{FAMILY}!"
    pieces = say(text)
    assert joined(pieces) == text
    assert all(piece.text == "" or piece.text in text for piece in pieces)
    assert "\ufffd" not in joined(pieces)
    assert max(len(piece.text) for piece in pieces) == 1


def test_broken_characters_are_replaced_and_the_tail_is_flushed():
    smile = "\N{GRINNING FACE}".encode()
    assert joined(say(b"a" + smile[:3])) == "a\ufffd"  # cut short by max_new_tokens
    assert joined(say(b"a" + smile[:2] + b"b")) == "a\ufffdb"
    assert joined(say(b"a" + smile[:2], max_new_tokens=9, tail=[BYTES.eot_id])) == "a\ufffd"
    chance = random.Random(8)
    for _ in range(300):
        data = bytes(chance.choice(b"\x00az\x80\xbf\xc3\xe2\x98\x83\xf0\x9f\xff") for _ in range(12))
        assert joined(say(data)) == data.decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    ("said", "stop", "text"),
    [
        ("aaab tail", ["aab"], "a"),  # the overlapping prefix
        ("ababac tail", ["abac"], "ab"),
        ("hello\n\nworld", ["\n\n"], "hello"),
        ("one. two", ["two", ". "], "one"),
        ("xabcd", ["abcd", "bc"], "xa"),  # the one complete first
        ("xabc", ["bc", "abc"], "x"),  # both at once: the longer one
        ("stop", ["stop"], ""),
        ("caf\u00e9 au lait", ["\u00e9 a"], "caf"),
        ("a\N{SNOWMAN}b", ["\N{SNOWMAN}"], "a"),
    ],
)
def test_stop_strings(said, stop, text):
    pieces = say(said, stop=stop)
    assert joined(pieces) == text
    assert pieces[-1].finish_reason == "stop"
    assert len(pieces) < len(said.encode()) or said.endswith(tuple(stop))
    whole = TextStream(BYTES, stop)  # all in one token
    assert whole.feed(said.encode()) + whole.finish() == text and whole.stopped


def test_stop_string_that_does_not_come():
    for said in ["aaaa", "a\naab", "aa"]:
        pieces = say(said, stop=["aabb", "\n\n"])
        assert joined(pieces) == said  # held back, then released
        assert pieces[-1].finish_reason == "length"
    pieces = say("ab-", stop=["ab!"])
    assert [piece.text for piece in pieces] == ["", "", "ab-"]
    pieces = say("xaa", stop=["aab"], max_new_tokens=9, tail=[BYTES.eot_id])
    assert joined(pieces) == "xaa" and pieces[-1].finish_reason == "eot"


def test_stop_strings_against_plain_search():
    chance = random.Random(9)
    stopped = 0
    for _ in range(400):
        said = "".join(chance.choices("ab\N{SNOWMAN}", k=14))
        stop = ["".join(chance.choices("ab\N{SNOWMAN}", k=chance.randint(1, 5))) for _ in range(chance.randint(1, 3))]
        ends = [n for n in range(len(said) + 1) if said[:n].endswith(tuple(stop))]
        expected = said
        if ends:
            expected = min((said[: ends[0] - len(s)] for s in stop if said[: ends[0]].endswith(s)), key=len)
        stream, data = TextStream(BYTES, stop), said.encode()
        text = ""
        while data and not stream.stopped:  # cut into tokens anywhere, inside characters too
            cut = chance.randint(1, 4)
            text, data = text + stream.feed(data[:cut]), data[cut:]
        text += stream.finish()
        assert text == expected and stream.stopped == bool(ends)
        stopped += stream.stopped
    assert 100 < stopped < 390


# ----- the report, and leaving things as they were


def test_report():
    engine = tiny_engine()
    start, pieces = time.perf_counter(), engine.generate(["abc", "defgh"], Sampling(), 6, num_samples=2)
    tokens = [*next(pieces).token_ids]
    first = time.perf_counter()
    tokens += [token for piece in pieces for token in piece.token_ids]
    report, config = engine.report, engine.config
    assert report.prompt_tokens == 8
    assert report.new_tokens == len(tokens) == 24
    assert report.kv_cache_bytes == config.kv_cache_bytes(4, 128, 4)
    assert 0 < report.time_to_first_token_s <= first - start < report.seconds <= time.perf_counter() - start
    assert report.tokens_per_s == pytest.approx(report.new_tokens / report.seconds)
    assert report.prefill_tokens_per_s > 6 / report.time_to_first_token_s
    later = (report.new_tokens - 4) / (report.seconds - report.time_to_first_token_s)
    assert report.decode_tokens_per_s == pytest.approx(later)
    assert report.decode_tokens_per_s_per_row == pytest.approx(later / 4)
    # Every weight but the biases and the embedding, which is the head as well here; padded to 320 rows.
    assert report.weight_bytes == config.n_params() * 4
    assert report.kv_bytes == config.kv_cache_bytes(1, 6, 4) * 2 + config.kv_cache_bytes(1, 8, 4) * 2
    assert report.read_tb_per_s > 0 and report.gpu_read_tb_per_s is None
    assert report.peak_memory_bytes is None
    assert f"{report.tokens_per_s:.1f} tokens/s" in str(report) and "\n" not in str(report)
    json.dumps(dataclasses.asdict(report))


def test_a_report_says_how_fast_a_prompt_was_read_only_if_one_was():
    """The last token of a prompt is the first round's: of a prompt of one, nothing is read before."""
    engine = tiny_engine()
    list(engine.generate(["a"], Sampling(), 4))
    assert "; prompt of 1; reading" in str(engine.report)
    list(engine.generate(["abc"], Sampling(), 4))
    assert re.search(r"; prompt of 3 at [1-9]\d* tokens/s; reading", str(engine.report))


def test_the_report_on_speculation():
    for speculate, said in [(4, "abcabcabcabcabc"), (0, "abc"), ("auto", "abc")]:
        engine = Engine(Scripted([*said.encode(), 0]), BYTES, speculate=speculate)
        engine.complete(["?"], GREEDY, len(said))
        summary = engine.report.speculation
        if speculate == 4:  # a, b, c, a, b: the match comes with the second "ab"; then five and five tokens a round
            assert summary["rounds_by_k"] == {4: 7}
            assert summary["tokens_per_pass"] == pytest.approx(15 / 7)
            assert summary["acceptance"] == [1.0] * 4 and summary["verify_seconds"] > 0
            assert "2.14 tokens a round" in str(engine.report)
        elif speculate == 0:
            assert summary is None and "round" not in str(engine.report)
        else:
            assert summary["rounds_by_k"] == {0: 3} and summary["acceptance"] == []


def test_abandoned_generation_reports():
    model = tiny_model().train()
    engine = Engine(model, BYTES, speculate=0)
    pieces = engine.generate(["abc"], Sampling(), 20)
    next(pieces), next(pieces)
    assert engine.report is None
    pieces.close()
    assert model.training and engine.report.new_tokens == 2
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


def test_only_the_last_call_may_go_on():
    engine = tiny_engine()
    first = engine.generate(["abc"], Sampling(), 20)
    next(first)
    second = engine.complete(["abc"], Sampling(), 20)
    with pytest.raises(RuntimeError, match="another call"):
        next(first)
    assert second == engine.complete(["abc"], Sampling(), 20)


def test_generation_does_not_disturb_training():
    """In train mode with dropout: the same text as in eval mode, and the same noise for training afterwards."""
    model = tiny_model(dropout=0.5)
    expected = Engine(model, BYTES).complete(["abc"], Sampling(), 10)
    model.train()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert Engine(model, BYTES).complete(["abc"], Sampling(), 10) == expected
    assert torch.equal(torch.get_rng_state(), state) and model.training and model.layers[0].dropout.training


@pytest.mark.parametrize("how", ["parameters", "compute"])
def test_bfloat16(how):
    """bf16 parameters, and fp32 parameters computed in bf16 as in training: the cache follows the activations."""
    model = tiny_model()
    if how == "parameters":
        model = model.to(torch.bfloat16)
    else:
        model.dtype = torch.bfloat16
    engine = Engine(model, BYTES)
    rows = engine.complete(["abc", "de"], Sampling(), 10)
    assert [len(row.token_ids) for row in rows] == [10, 10] and isinstance(rows[0], Completion)
    assert engine.report.kv_cache_bytes == model.config.kv_cache_bytes(2, 128, 2)


def test_the_cache_is_allocated_once_and_kept(monkeypatch):
    made, cache = [], Decoder.cache
    monkeypatch.setattr(Decoder, "cache", lambda self, *args: made.append(args[:2]) or cache(self, *args))
    engine = tiny_engine(block_size=600)
    engine.complete(["a" * 100, "b"], GREEDY, 400)
    assert made == [(2, 512)]
    engine.complete(["a", "bc"], GREEDY, 4)  # fits in
    assert len(made) == 1
    engine.complete(["a"], GREEDY, 4)  # another number of rows does not
    engine.complete(["a"], GREEDY, 300)
    assert made[1:] == [(1, 128), (1, 384)]
    engine = tiny_engine(block_size=6000)
    for length in (10, 500, 900, 1100, 2000):  # a conversation
        engine.complete(["a" * length], GREEDY, 20, reuse=True)
    assert made[3:] == [(1, 1024), (1, 2048)]


def test_a_cache_too_large_is_refused_before_it_is_made(monkeypatch):
    engine = tiny_engine(block_size=4096)
    assert engine.config.kv_cache_bytes(2, 4096, 4) == 2 * 2**20
    for module in (decoding, engine_module):
        monkeypatch.setattr(module, "memory_left", lambda device: 1_600_000)
    monkeypatch.setattr(torch, "zeros", None)  # any allocation would fail
    with pytest.raises(UserError) as error:
        engine.complete(["a", "b"], GREEDY, 4000)
    message = str(error.value)
    assert "2 x 4096 tokens needs 0.0 GiB" in message and "3072 tokens a row would" in message
    assert "--kv int8" in message and "1 rows would" in message and "\n" not in message


@pytest.mark.parametrize("speculate", [0, 3])
def test_log_probabilities_are_the_models_own(speculate):
    model = tiny_model()
    sampling = Sampling(0.7, top_k=20, repetition_penalty=1.3)
    engine = Engine(model, BYTES, speculate=speculate)
    rows = engine.complete(["abab", "hello"], sampling, 12, logprobs=True)
    assert rows == [
        dataclasses.replace(row, log_probabilities=logs.log_probabilities)
        for row, logs in zip(engine.complete(["abab", "hello"], sampling, 12), rows, strict=True)
    ]
    for row in rows:
        ids = [*row.prompt.encode(), *row.token_ids]
        with torch.no_grad():
            logs = model(torch.tensor([ids]))[0].log_softmax(-1)
        expected = [float(logs[t - 1, ids[t]]) for t in range(len(row.prompt), len(ids))]
        assert row.log_probabilities == pytest.approx(expected, abs=1e-4)


def test_reuse_reads_only_what_is_new(monkeypatch):
    model, read, prefill = tiny_model(block_size=300), [], Decoder.read
    monkeypatch.setattr(Decoder, "read", lambda self, ids, *rest: read.append(len(ids)) or prefill(self, ids, *rest))
    engine = Engine(model, BYTES)
    first = engine.complete(["hello there"], Sampling(), 20, seed=1)[0]
    turn = [*b"hello there", *first.token_ids, *b" and then"]
    read.clear()
    again = engine.complete([turn], Sampling(), 30, seed=2, reuse=True)[0]
    assert sum(read) == len(b" and then")  # all but the last token, which is the next round's, and the first answer's
    read.clear()
    assert engine.complete([turn], Sampling(), 30, seed=2)[0] == again
    assert sum(read) == len(turn) - 1
    other = [*turn[:15], 7, 7, 7]
    read.clear()
    done = engine.complete([other], Sampling(), 30, seed=3, reuse=True)[0]
    assert sum(read) == 2
    assert Engine(model, BYTES).complete([other], Sampling(), 30, seed=3)[0] == done


def test_an_interrupt_while_a_prompt_is_read_leaves_nothing_to_reuse(monkeypatch):
    model = tiny_model(block_size=300)
    engine, turn = Engine(model, BYTES), list(b"hello there, and then")

    def interrupted(*arguments):
        raise KeyboardInterrupt

    engine.complete(["something else"], Sampling(), 5, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "prefill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.complete([turn], Sampling(), 30, seed=2, reuse=True)
    again = engine.complete([turn], Sampling(), 30, seed=2, reuse=True, logprobs=True)
    assert again == Engine(model, BYTES).complete([turn], Sampling(), 30, seed=2, logprobs=True)


def test_more_rows_than_any_memory_are_refused_at_once():
    for num_samples in (10**9, 10**20):
        with pytest.raises(UserError, match=f"a KV cache of {num_samples} x 128 tokens needs"):
            tiny_engine().generate(["a"], num_samples=num_samples, max_new_tokens=5)


def test_a_text_from_nothing_loses_the_space_that_its_tokenizer_puts_before_it():
    tokenizer = ByteTokenizer()
    tokenizer.leading_space = True
    cases = (("", (), " hi"), ([], (), " hi"), ("a", (), "  hi"), ("", (" ",), ""), ("", ("h",), " "))
    for prompt, stop, text in cases:
        done = Engine(Scripted([*b"  hi", 0]), tokenizer).complete([prompt], GREEDY, 4, stop=stop)[0]
        assert done.text == text
    assert Engine(Scripted([*b"  hi", 0]), BYTES).complete([""], GREEDY, 4)[0].text == "  hi"


def test_a_draft_model_must_have_the_tokenizer():
    model = tiny_model()
    with pytest.raises(UserError, match="draft model's tokenizer .char. is not the model's .bytes."):
        Engine(model, BYTES, draft=(model, CharTokenizer("abc")))
    with pytest.raises(UserError, match="257 ids but the model only 100"):
        Engine(model, BYTES, draft=(tiny_model(vocab_size=100), BYTES))
    for speculate in (-1, 17, 2.5, "always"):
        with pytest.raises(ValueError, match="speculate="):
            Engine(model, BYTES, speculate=speculate)
    for options in (dict(quant="int3"), dict(kv="fp8")):
        with pytest.raises(ValueError, match="must be one of"):
            Engine(model, BYTES, **options)
