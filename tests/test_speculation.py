"""Speculation: the text is that of plain decoding, whatever is guessed and however much of it; and it stops when it
does not pay. On the small golden model, whose draft models are itself in four bits and a smaller one trained here."""

import random
from itertools import product
from pathlib import Path

import pytest
import torch
from test_engine import GREEDY, Scripted, chi_square_excess, slow_filter, tiny_model

import checkpoint
from data.tokenizer import ByteTokenizer, CharTokenizer
from decoding import Decoder
from engine import Engine, Sampling
from model import ModelConfig, Transformer
from rounds import Round, Rounds, common_prefix
from speculation import CHOICES, MODEL, AdaptiveDrafts, FixedDrafts, SpeculationStats

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
BYTES = ByteTokenizer()
PROMPTS = [
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y",
    "import os\nimport sys\nimport re\nimport ",
    "def area(self):\n    return self.width * self.height\n\ndef volume(self):\n    return self.",
    "for i in range(10):\n    for j in range(10):\n        for k in",
]
SAMPLINGS = [
    GREEDY,
    Sampling(0.8),
    Sampling(0.6, top_p=0.9),
    Sampling(1.0, top_k=30, min_p=0.02),
    Sampling(0.7, repetition_penalty=1.15),
    Sampling(0, repetition_penalty=1.1),
]


@pytest.fixture(scope="module")
def golden():
    return checkpoint.load_model(GOLDEN, dtype=torch.float32), checkpoint.load_tokenizer(GOLDEN)


@pytest.fixture(scope="module")
def small(golden):
    """A draft model of a quarter of the size, trained on this repository for two seconds."""
    tokenizer = golden[1]
    text = "".join((ROOT / f"{name}.py").read_text(encoding="utf-8") for name in ("train", "model", "checkpoint"))
    ids = torch.tensor(tokenizer.encode(text))
    config = ModelConfig(vocab_size=512, n_layer=1, n_head=2, n_kv_head=1, n_embd=32, block_size=128)
    generator = torch.Generator().manual_seed(0)
    model = Transformer(config).init_weights(generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        windows = ids[torch.randint(len(ids) - 65, (16, 1), generator=generator) + torch.arange(65)]
        model(windows[:, :-1], windows[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.requires_grad_(False)


@pytest.fixture
def fates(monkeypatch):
    """For each row: whether a draft of it has stood, and whether one has not. Cleared by the test before each call."""
    seen, collect = {}, Rounds.collect

    def spy(self):
        done = collect(self)
        for row, new in enumerate(done.tokens):
            if new and done.drafts and (self.draft or done.match[row]):
                stood, fell = seen.get(row, (False, False))
                ended = self.positions[row] == self.limits[row]  # the end cut the round: no draft was refused
                seen[row] = (stood or len(new) > 1, fell or (len(new) <= done.drafts and not ended))
        return done

    monkeypatch.setattr(Rounds, "collect", spy)
    return seen


class Wandering:
    """In place of a policy: another k in every round, none at times, and more than there is room for."""

    def __init__(self, seed=0):
        self.chance = random.Random(seed)

    def choose(self, sources, room):
        return min(self.chance.choice([0, 0, 1, 2, 4, 7, 8, 16]), room)

    def observe(self, done, sources, added):
        pass


# ----- the same text


def test_speculative_text_is_plain_text(golden, small, fates):
    """Over a thousand combinations of seed, prompt, sampling, drafter, k and batch; at least half of them with both a
    draft that stands and one that does not."""
    model, tokenizer = golden
    plain = Engine(model, tokenizer, speculate=0)
    drafters = {"lookup": None, "four bits": (Decoder.of(model, "int4"), tokenizer), "small": (small, tokenizer)}
    counts = {"combinations": 0, "both": 0, "only stood": 0, "only fell": 0, "neither": 0}
    expected = {}
    for s, prompt in product(range(len(SAMPLINGS)), range(4)):
        for seed in range(3):
            done = plain.complete([PROMPTS[prompt]], SAMPLINGS[s], 13, seed=seed)[0]
            expected[s, prompt, seed] = done
    assert len({tuple(row.token_ids) for row in expected.values()}) > 40
    for (name, draft), k in product(drafters.items(), (1, 2, 5, 8, None)):
        engine = Engine(model, tokenizer, draft=draft, speculate=k or "auto")
        engine.policy = engine.policy if k else Wandering()
        for s, batch in product(range(len(SAMPLINGS)), (1, 2, 4)):
            seed = batch % 3
            groups = [list(range(4))[i : i + batch] for i in range(0, 4, batch)]
            for group in groups:
                fates.clear()
                prompts = [PROMPTS[i] for i in group]
                rows = engine.complete(prompts, SAMPLINGS[s], 13, row_seeds=[seed] * len(group))
                for row, prompt in enumerate(group):
                    wanted = expected[s, prompt, seed]
                    assert rows[row] == wanted, (name, k, SAMPLINGS[s], group, prompt)
                    stood, fell = fates.get(row, (False, False))
                    fate = {(1, 1): "both", (1, 0): "only stood", (0, 1): "only fell", (0, 0): "neither"}[stood, fell]
                    counts["combinations"] += 1
                    counts[fate] += 1
    print(f"\n{counts}")
    assert counts["combinations"] >= 1000
    assert counts["both"] >= counts["combinations"] / 2


@pytest.mark.parametrize("draft", [False, True], ids=["lookup", "draft"])
@pytest.mark.parametrize("options", [dict(quant="int8"), dict(kv="int8"), dict(quant="int4", kv="int8")], ids=str)
def test_it_holds_with_quantised_weights_and_cache(golden, small, options, draft):
    model, tokenizer = golden
    plain = Engine(model, tokenizer, speculate=0, **options)
    engine = Engine(model, tokenizer, draft=(small, tokenizer) if draft else None, speculate=3, **options)
    for sampling in SAMPLINGS[:3]:
        expected = plain.complete(PROMPTS, sampling, 16, seed=1)
        assert engine.complete(PROMPTS, sampling, 16, seed=1) == expected


@pytest.mark.parametrize(
    "shape", [dict(n_kv_head=4), dict(n_kv_head=1, qkv_bias=True), dict(sliding_window=6, qk_norm=True)]
)
def test_it_holds_for_every_kind_of_attention(shape):
    """On random models, where nothing is accepted but by accident; twenty prompts in one batch, across chunks."""
    model = tiny_model(block_size=600, **shape)
    prompts = ["".join(random.Random(i).choices("abcd ", k=10 + 25 * i)) for i in range(11)]
    expected = Engine(model, BYTES, speculate=0).complete(prompts, Sampling(0.4), 16, seed=1)
    engine = Engine(model, BYTES, draft=(Decoder.of(model, "int8"), BYTES))
    engine.policy = Wandering(1)
    assert engine.complete(prompts, Sampling(0.4), 16, seed=1) == expected
    assert engine.report.speculation["tokens_per_pass"] > 1.2
    engine = Engine(model, BYTES)
    engine.policy = Wandering(2)
    assert engine.complete(prompts, Sampling(0.4), 16, seed=1) == expected


@pytest.mark.parametrize("draft", [False, True], ids=["lookup", "draft"])
def test_it_holds_when_the_host_reads_late(golden, small, draft, monkeypatch):
    """As on a GPU: two rounds are in the queue, and what the host knows of matches and ends is two rounds old."""
    model, tokenizer = golden
    begin = Rounds.begin

    def late(self, *arguments, **options):
        self.ahead = 2
        return begin(self, *arguments, **options)

    stops = ["self", "\n"]
    expected = [Engine(model, tokenizer, speculate=0).complete(PROMPTS, s, 20, seed=1, stop=stops) for s in SAMPLINGS]
    assert len({row.finish_reason for rows in expected for row in rows}) > 1
    monkeypatch.setattr(Rounds, "begin", late)
    for k in (0, 1, 4, None):
        engine = Engine(
            model, tokenizer, draft=(small, tokenizer) if draft else None, speculate="auto" if k is None else k
        )
        engine.policy = engine.policy if k is not None else Wandering()
        for sampling, rows in zip(SAMPLINGS, expected, strict=True):
            assert engine.complete(PROMPTS, sampling, 20, seed=1, stop=stops) == rows
            assert engine.complete(PROMPTS, sampling, 1, seed=1)[0].token_ids == rows[0].token_ids[:1]


def test_streaming_and_conversations_are_the_same(golden):
    model, tokenizer = golden
    texts = []
    for speculate in (0, 4):
        engine = Engine(model, tokenizer, speculate=speculate)
        turn, said = tokenizer.encode(PROMPTS[0]), []
        for seed in range(3):
            pieces = list(engine.generate([turn], Sampling(0.7), 12, seed=seed, reuse=True, stop=["\n\n"]))
            said.append("".join(piece.text for piece in pieces))
            turn = turn + [i for piece in pieces for i in piece.token_ids] + tokenizer.encode("\nself.x")
        texts.append(said)
    assert texts[0] == texts[1]


# ----- the edges


def scripted(text, prompt="?", **options):
    """An engine whose model says `text` after a prompt of one token."""
    return Engine(Scripted([*(text if isinstance(text, bytes) else text.encode()), 0]), BYTES, **options)


@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("draft", [False, True], ids=["lookup", "draft"])
class TestEdges:
    """With a draft model that always knows, and with matches of a text that repeats."""

    text = "abcd" * 12

    def engine(self, said, k, draft):
        model = Scripted([*said, 0], block_size=100)
        return Engine(model, BYTES, draft=(model, BYTES) if draft else None, speculate=k)

    def run(self, said, k, draft, new, **options):
        pieces = list(self.engine(said, k, draft).generate(["?"], GREEDY, new, **options))
        ids = [i for piece in pieces for i in piece.token_ids]
        assert sum(piece.finish_reason is not None for piece in pieces) == 1 == (pieces[-1].finish_reason is not None)
        return "".join(piece.text for piece in pieces), ids, pieces

    def test_every_length_ends_where_it_should(self, k, draft):
        """The limit falls on every place of a run; k is often larger than what is left."""
        for new in (1, 2, 3, 7, 8, 9, 10, 11, 12, 30):
            text, ids, pieces = self.run(self.text.encode(), k, draft, new)
            assert text == self.text[:new] and len(ids) == new and pieces[-1].finish_reason == "length"

    def test_runs_are_accepted(self, k, draft):
        _, _, pieces = self.run(self.text.encode(), k, draft, 40)
        assert max(len(piece.token_ids) for piece in pieces) == k + 1

    def test_the_end_token_inside_a_run(self, k, draft):
        for length in range(1, 20):
            said = [*self.text[:length].encode(), BYTES.eot_id, *self.text.encode()]
            text, ids, pieces = self.run(said, k, draft, 40)
            assert text == self.text[:length] and ids == said[: length + 1] and pieces[-1].finish_reason == "eot"

    def test_a_stop_string_inside_a_run(self, k, draft):
        for length in range(8, 20):
            said = self.text[:length] + "xyz" + self.text
            text, ids, pieces = self.run(said.encode(), k, draft, 40, stop=["dx" if said[length - 1] == "d" else "xy"])
            end = said.index("dx") if said[length - 1] == "d" else said.index("xy")
            assert text == said[:end] and bytes(ids).decode() == said[: end + 2] and pieces[-1].finish_reason == "stop"

    def test_emoji_inside_a_run(self, k, draft):
        said = "a\N{GRINNING FACE}b" * 6
        text, _, pieces = self.run(said.encode(), k, draft, len(said.encode()))
        assert text == said and all("\ufffd" not in piece.text for piece in pieces)

    def test_the_context_ends_inside_a_run(self, k, draft):
        said = (self.text * 3).encode()
        text, ids, _ = self.run(said, k, draft, 99)
        assert ids == list(said[:99])

    def test_rows_end_in_different_rounds(self, k, draft):
        engine = self.engine(self.text.encode(), k, draft)
        for stop in ([], ["cda"]):
            rows = engine.complete(["?", "!"], GREEDY, 21, stop=stop)
            assert [row.text for row in rows] == [self.text[:21] if not stop else "ab"] * 2


def test_the_last_slots_of_the_cache(golden):
    """block_size is a multiple of a chunk, so nothing is left behind the last position."""
    model = tiny_model(block_size=256)
    prompt = [*b"ab" * 100]
    plain = Engine(model, BYTES, speculate=0).complete([prompt], Sampling(0.5), 56, seed=2)
    for draft in (None, (Decoder.of(model, "int8"), BYTES)):
        engine = Engine(model, BYTES, speculate=8, draft=draft)
        assert engine.complete([prompt], Sampling(0.5), 56, seed=2) == plain
        assert engine.rounds.slots == 256


# ----- the distribution


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.4), Sampling(1.0, top_p=0.8)], ids=str)
def test_speculation_samples_the_models_distribution(sampling):
    """Pairs of tokens against their exact probabilities, drafted by a model that is a little off."""
    letters = CharTokenizer("abcdefg")
    model = tiny_model(vocab_size=8, head_dim=16)
    draft = tiny_model(vocab_size=8, head_dim=16, seed=0)
    for parameter in draft.parameters():
        parameter += 0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * parameter.std()
    engine = Engine(model, letters, draft=(draft, letters), speculate=2)
    count = 1200
    rows = engine.complete(["gab"], sampling, 2, num_samples=count)
    prompt = letters.encode("gab")
    first = slow_filter(model(torch.tensor([prompt]))[0, -1, :8].tolist(), sampling)
    expected = torch.zeros(8, 8, dtype=torch.float64)
    for a in range(8):
        then = slow_filter(model(torch.tensor([[*prompt, a]]))[0, -1, :8].tolist(), sampling)
        expected[a] = first[a] * torch.tensor(then, dtype=torch.float64)
    expected[letters.eot_id, 1:] = 0  # a row ends there: one cell for all that would follow
    expected[letters.eot_id, 0] = first[letters.eot_id]
    counts = torch.zeros(8, 8)
    for row in rows:
        counts[row.token_ids[0], row.token_ids[1] if len(row.token_ids) > 1 else 0] += 1
    assert (counts[expected == 0] == 0).all()
    assert abs(chi_square_excess(counts.flatten(), expected.flatten() * count)) < 4
    accepted = engine.report.speculation["acceptance"][0]
    assert 0.3 < accepted < 0.97, accepted


# ----- how much to guess


class Machine:
    """A clock and dice in place of a model: rounds of time t(k), drafts that stand with probability a."""

    def __init__(self, seconds, seed=0):
        self.seconds, self.chance, self.elapsed, self.tokens, self.used = seconds, random.Random(seed), 0.0, 0, []

    def run(self, policy, rounds, acceptance, source=MODEL, rows=1):
        for _ in range(rounds):
            k = policy.choose([source] * rows, 16)
            added = []
            for _ in range(rows):
                stood = 0
                while source and stood < k and self.chance.random() < acceptance:
                    stood += 1
                added.append(1 + stood)
            seconds = self.seconds(k) * self.chance.choice([1.0, 1.0, 1.02, 1.05])
            policy.observe(Round(k, [], None, [], 0.0, seconds), [source] * rows, added)
            self.elapsed, self.tokens = self.elapsed + seconds, self.tokens + sum(added) / rows
            self.used.append(k)
        return self

    def speedup(self):
        return self.tokens / self.elapsed * self.seconds(0) * 1.0175  # the mean of the noise above


def tiles(k):
    """t(k) of a 306M model on an H200 (bench/speculate.py): kernels work in tiles of 4, 8 or 16 rows."""
    return 1 + 0.03 * (k > 0) + 0.1 * (k > 3) + 0.57 * (k > 7)


COSTS = {f"{cost} a draft": lambda k, cost=cost: 1 + cost * k for cost in (0.02, 0.1, 0.3, 1.0)} | {"tiles": tiles}


@pytest.mark.parametrize("source", [2, 4, MODEL])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("acceptance", [0.0, 0.05])
def test_hopeless_text_costs_three_percent_at_most(source, cost, acceptance):
    for seed, rounds in product(range(10), (150, 500)):
        machine = Machine(COSTS[cost], seed).run(AdaptiveDrafts(), rounds, acceptance, source)
        assert machine.speedup() > 0.97, (seed, rounds, machine.speedup())


@pytest.mark.parametrize(
    ("cost", "acceptance", "least"),
    [
        ("0.02 a draft", 0.9, 4.5),
        ("0.1 a draft", 0.8, 2.0),
        ("0.1 a draft", 0.6, 1.4),
        ("0.3 a draft", 0.8, 1.3),
        ("tiles", 0.95, 5.5),
        ("tiles", 0.7, 2.4),
    ],
)
def test_it_pays_where_it_can(cost, acceptance, least):
    """Within a tenth of the best fixed k."""
    for seed in range(5):
        best = max((1 - acceptance ** (k + 1)) / (1 - acceptance) / COSTS[cost](k) for k in CHOICES)
        assert best > least
        machine = Machine(COSTS[cost], seed).run(AdaptiveDrafts(), 600, acceptance)
        assert machine.speedup() > 0.9 * best, (machine.speedup(), best)


def test_it_changes_its_mind_both_ways():
    policy, machine = AdaptiveDrafts(), Machine(lambda k: 1 + 0.1 * k)
    machine.run(policy, 300, 0.9)
    assert sum(k >= 7 for k in machine.used[-50:]) > 40
    machine.run(policy, 300, 0.0)
    assert machine.used[-50:].count(0) > 45
    machine.run(policy, 2500, 0.9)
    assert sum(k >= 7 for k in machine.used[-50:]) > 40


def test_without_a_match_nothing_is_guessed():
    machine = Machine(lambda k: 1 + k).run(AdaptiveDrafts(), 100, 1.0, source=0)
    assert machine.used == [0] * 100
    policy = AdaptiveDrafts()
    Machine(lambda k: 1 + 0.02 * k).run(policy, 300, 0.9, source=4)
    assert policy.choose([4], 16) == 15 and policy.choose([4], 5) == 3 and policy.choose([4], 0) == 0
    assert policy.choose([0, 0], 16) == 0


def test_fixed_drafts_respect_the_room():
    assert [FixedDrafts(5).choose([0], room) for room in (4, 5, 16)] == [0, 5, 5]


def test_stats_by_hand():
    stats = SpeculationStats()
    stats.observe(Round(0, [], None, [], 0.0, 1.0), [3, 0], [1, 1])
    stats.observe(Round(2, [], None, [], 0.5, 2.0), [3, 0], [3, 1])
    stats.observe(Round(2, [], None, [], 0.5, 2.0), [3, 4], [2, 1])
    summary = stats.summary()
    assert summary["acceptance"] == [2 / 3, 1 / 3]
    assert summary["tokens_per_pass"] == 9 / 6
    assert summary["rounds_by_k"] == {0: 1, 2: 2}
    assert (summary["draft_seconds"], summary["verify_seconds"]) == (1.0, 4.0)
    assert summary["speedup"] == pytest.approx(1.5 / (5 / 3))


def test_common_prefix():
    assert [common_prefix(a, b) for a, b in [([], [1]), ([1, 2], [1, 2, 3]), ([1, 2], [1, 3]), ([5], [1])]] == [
        0,
        2,
        1,
        0,
    ]
