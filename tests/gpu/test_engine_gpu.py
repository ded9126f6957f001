"""Decoding on a GPU: captured graphs, rows together, speculation. The text is the same in every combination, bit for
bit in bf16, which is what fixed tiles and splits by position are for."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

import checkpoint
from data import UserError
from data.tokenizer import ByteTokenizer
from decoding import Decoder
from engine import Engine, Sampling
from model import ModelConfig, Transformer
from rounds import Rounds
from sampling import sample
from tests.conftest import ROOT
from tests.test_decoding import compare_kernels
from tests.test_speculation import PROMPTS, SAMPLINGS, Wandering

pytestmark = pytest.mark.gpu
BYTES = ByteTokenizer()
SHAPE = dict(vocab_size=300, n_layer=4, n_head=8, n_kv_head=2, n_embd=512, head_dim=64, block_size=9000)


@pytest.fixture(scope="module")
def golden():
    return checkpoint.load_model(ROOT / "tests/golden", "cuda", torch.bfloat16), checkpoint.load_tokenizer(
        ROOT / "tests/golden"
    )


def random_model(dtype=torch.bfloat16, seed=0, **shape):
    model = Transformer(ModelConfig(**{**SHAPE, **shape})).cuda().eval().requires_grad_(False)
    generator = torch.Generator("cuda").manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.normal_(
                0, 1.0 if name == "embed.weight" else 1.5 * parameter.shape[-1] ** -0.5, generator=generator
            )
    return model.to(dtype)


@pytest.fixture
def captures(monkeypatch):
    """The graphs of rounds that are made; those of prompts, one for each number of chunks, do not count."""
    made, capture = [], Rounds._capture

    def counted(self, work):
        made.extend([work] if work.func.__name__ == "_verify" else [])
        return capture(self, work)

    monkeypatch.setattr(Rounds, "_capture", counted)
    return made


@pytest.mark.parametrize("seed", range(6))
def test_kernels_of_a_round_are_their_plain_functions(seed):
    compare_kernels(random.Random(seed), "cuda")


@pytest.mark.parametrize(
    "shape", [dict(n_kv_head=8), dict(), dict(n_kv_head=1, sliding_window=100, qk_norm=True, qkv_bias=True)]
)
@pytest.mark.parametrize("prompt", [1, 2, 127, 128, 129, 130, 257, 4097, 5000])
def test_logits_are_the_models(shape, prompt):
    """Chunks of prefill at their edges, the long one too, then steps of one and of three tokens; in fp32."""
    model = random_model(torch.float32, **shape)
    decoder, tokens = Decoder.of(model), torch.randint(256, (1, prompt + 8), device="cuda")
    with torch.no_grad():
        expected = model(tokens)[0, prompt - 1 :]
    cache = decoder.cache(1, 8192)
    decoder.prefill(tokens[0, : prompt - 1].tolist(), cache, 0)
    parts, at = [], prompt - 1
    for width in (1, 3, 1, 3, 1):
        start = torch.tensor([at], dtype=torch.int32, device="cuda")
        parts.append(decoder.step(decoder.embed[tokens[0, at : at + width]], start, start + width, cache))
        at += width
    torch.testing.assert_close(torch.cat(parts)[:, :300], expected, rtol=2e-3, atol=2e-3 * float(expected.std()))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("draft", [False, True], ids=["lookup", "draft"])
def test_a_graph_is_its_eager_round(sampling, draft, monkeypatch):
    model = random_model()
    texts = []
    for eager in (False, True):
        if eager:
            monkeypatch.setattr(Rounds, "_capture", lambda self, work: SimpleNamespace(replay=work))
        engine = Engine(model, BYTES, draft=(Decoder.of(model, "int4"), BYTES) if draft else None)
        engine.policy = Wandering()
        texts.append(engine.complete(["abcabc", "x" * 300, "hello"], sampling, 60, seed=1, logprobs=True))
    assert [row.token_ids for row in texts[0]] == [row.token_ids for row in texts[1]]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0, top_p=0.9), Sampling(1.0, min_p=0.05), Sampling(1.0, top_k=300, top_p=0.9)], ids=str
)
def test_every_kind_of_filter_in_a_graph(sampling, captures):
    """The device's token after token is what the definition chooses from the model's own logits."""
    model = random_model(torch.float32)
    engine = Engine(model, BYTES, speculate=0)
    ids = engine.complete(["abcabc"], sampling, 40, seed=7)[0].token_ids
    assert len(captures) == 1
    text = torch.tensor([[*b"abcabc", *ids]], device="cuda")
    with torch.no_grad():
        logits = model(text)[0, 5:-1, : BYTES.vocab_size].float().cpu()
    seeds, positions = torch.full((len(ids),), 7), torch.arange(6, 6 + len(ids))
    chosen = sample(logits, sampling, seeds, positions)
    assert (chosen == torch.tensor(ids)).float().mean() > 0.9  # but where rounding decides


@pytest.mark.parametrize("options", [dict(), dict(quant="int8", kv="int8"), dict(quant="int4")], ids=str)
def test_batch_is_its_singles(options):
    engine = Engine(random_model(), BYTES, **options)
    prompts = ["a", "the quick brown fox " * 20, "x" * 1000, "\N{SNOWMAN} "]
    for sampling in SAMPLINGS:
        singles = [engine.complete([p], sampling, 50, seed=9 + i, stop=["q"])[0] for i, p in enumerate(prompts)]
        assert engine.complete(prompts, sampling, 50, seed=9, stop=["q"]) == singles


def test_speculative_text_is_plain_text(golden):
    model, tokenizer = golden
    plain = Engine(model, tokenizer, speculate=0)
    drafters = {"lookup": None, "four bits": (Decoder.of(model, "int4"), tokenizer), "itself": (model, tokenizer)}
    combinations, passes, added = 0, 0, 0
    for seed, sampling in enumerate(SAMPLINGS):
        expected = [plain.complete([p], sampling, 40, seed=seed)[0] for p in PROMPTS]
        for (name, draft), k in itertools.product(drafters.items(), (1, 4, 8, None)):
            engine = Engine(model, tokenizer, draft=draft, speculate=k or "auto")
            engine.policy = engine.policy if k else Wandering(seed)
            for batch in (1, 4):
                for i in range(0, 4, batch):
                    rows = engine.complete(PROMPTS[i : i + batch], sampling, 40, row_seeds=[seed] * batch)
                    assert rows == expected[i : i + batch], (name, k, sampling, batch)
                    combinations += batch
                    passes, added = passes + 1, added + engine.report.speculation["tokens_per_pass"]
    print(f"\n{combinations} combinations, {added / passes:.2f} tokens a round")
    assert combinations >= 200 and added / passes > 1.3


@pytest.mark.parametrize("options", [dict(quant="int8"), dict(kv="int8"), dict(quant="int4", kv="int8")], ids=str)
def test_it_holds_when_quantised(golden, options):
    model, tokenizer = golden
    for sampling in SAMPLINGS[:3]:
        expected = Engine(model, tokenizer, speculate=0, **options).complete(PROMPTS, sampling, 40)
        assert Engine(model, tokenizer, speculate=4, **options).complete(PROMPTS, sampling, 40) == expected


def test_graphs_are_kept_from_call_to_call(captures):
    engine = Engine(random_model(), BYTES, speculate=0)
    first = engine.complete(["a"], Sampling(0.8), 20)
    assert len(captures) == 1
    for prompt, sampling in [("a", Sampling(0.8)), ("b" * 500, Sampling(0.3)), ("", Sampling(0))]:
        engine.complete([prompt], sampling, 40)
    assert len(captures) == 1  # other lengths and temperatures are read from memory
    assert engine.complete(["a"], Sampling(0.8), 20) == first
    engine.complete(["a"], Sampling(0.8, top_k=5), 20)
    assert len(captures) == 2
    engine.complete(["a", "b"], Sampling(0.8), 20)
    assert len(captures) == 3


def test_a_graph_captured_at_a_short_length_is_right_at_a_long_one():
    model = random_model()
    engine = Engine(model, BYTES, speculate=0)
    engine.complete(["a"], Sampling(0), 2000)  # slots for 2048
    ids = engine.complete(["b"], Sampling(0), 2000)[0].token_ids
    ids = [ord("b"), *ids]
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]], device="cuda"))[0].float()
    chosen = logits.gather(1, torch.tensor(ids[1:], device="cuda")[:, None])[:, 0]
    assert float((logits.amax(1) - chosen).max()) < 0.05 * float(logits.std())  # the likeliest, but for rounding


def test_a_conversation_keeps_its_cache(golden):
    model, tokenizer = golden
    for draft in (None, (Decoder.of(model, "int4"), tokenizer)):
        texts = []
        for speculate in (0, 4):
            engine = Engine(model, tokenizer, draft=draft, speculate=speculate)
            turn, said = tokenizer.encode(PROMPTS[0]), []
            for seed in range(3):
                said.append(engine.complete([turn], Sampling(0.7), 12, seed=seed, reuse=True)[0].token_ids)
                turn = turn + said[-1] + tokenizer.encode("\nself.x")
            texts.append(said)
        assert texts[0] == texts[1]


def test_random_weights_are_never_there_twice():
    config = ModelConfig(
        vocab_size=32000,
        n_layer=8,
        n_head=32,
        n_kv_head=8,
        n_embd=4096,
        d_ff=14336,
        block_size=8192,
        tie_embeddings=False,
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decoder = Decoder.random(config, "cuda", torch.bfloat16, "int8")
    peak = torch.cuda.max_memory_allocated() - before
    layer = 2 * 3 * 4096 * 14336  # the largest part in bf16 while it is quantised, and its copies
    assert peak < decoder.weight_bytes() + decoder.embed.nbytes + 3 * layer


def test_a_cache_too_large_is_refused():
    shape = dict(SHAPE, n_layer=80, n_head=64, n_kv_head=64, n_embd=64, head_dim=128, block_size=131072)
    engine = Engine(Decoder.random(ModelConfig(**shape), "cuda"), BYTES)
    before = torch.cuda.memory_allocated()
    with pytest.raises(UserError, match="needs 320.0 GiB"):
        engine.complete(["a"], Sampling(), 131071)
    assert torch.cuda.memory_allocated() == before


def test_report():
    engine = Engine(random_model(), BYTES)
    engine.complete(["a" * 300], Sampling(), 300)
    report = engine.report
    assert report.peak_memory_bytes > report.kv_cache_bytes > 0
    assert 0 < report.read_tb_per_s < 10 and report.time_to_first_token_s < report.seconds
    assert report.prefill_tokens_per_s > 299 / report.time_to_first_token_s
