"""The measurements of generation: what they count, and that they run. Tiny models on a CPU: the numbers are a GPU's."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import decode, ladder, speculate, train_code
from bench.decode import Case, Machine
from bench.models import SAMPLING, Ids, config_of, fill, random_ids
from data import UserError
from decoding import Decoder
from engine import Engine
from kernels import reference
from model import ModelConfig

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
CPU = torch.device("cpu")
TINY = ModelConfig(vocab_size=64, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, d_ff=64, block_size=64)


@pytest.fixture
def decoder():
    return Decoder.random(TINY, CPU, torch.float32)


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(
    "name, parameters, cache",
    [("1b", 1.236e9, 4 * 2**30), ("8b", 8.030e9, 16 * 2**30), ("70b", 70.55e9, 42_949_672_960)],
)
def test_llama_presets_have_the_published_sizes(name, parameters, cache):
    config = config_of(name)
    assert config.n_params() == pytest.approx(parameters, rel=1e-3)
    assert config.kv_cache_bytes(1, 131_072) == cache


def test_a_draft_model_is_ten_to_twenty_times_smaller():
    target, draft = (config_of(str(ROOT / f"config/{name}.py")) for name in (train_code.TARGET, train_code.DRAFT))
    sizes = [replace(config, vocab_size=8192).n_params() for config in (target, draft)]
    assert 10 < sizes[0] / sizes[1] < 20


def test_prefill_flops_by_hand():
    # q, k, v: 32 x (4 + 2 + 2) x 8; with o and the MLP a layer; the last layer ends with q, k and v.
    qkv, o, mlp = 32 * 64, 32 * 32, 3 * 32 * 64
    products = 2 * 10 * (2 * qkv + o + mlp)
    attention = 4 * 4 * 8 * 10 * 10 // 2
    assert decode.prefill_flops(TINY, 10) == products + attention


def test_a_filled_cache_is_not_read_again(decoder):
    engine = Engine(decoder, Ids(64), speculate=0)
    prompt = random_ids(TINY, 1, 40)[0]
    fill(engine, prompt, 2, 8)
    before = engine.rounds.cache.k[:, :, :, :39].clone()
    assert before.std() == pytest.approx(1, abs=0.1)
    for _ in range(2):
        done = engine.complete([prompt], SAMPLING, 8, num_samples=2, reuse=True)
        assert [len(row.token_ids) for row in done] == [8, 8]
        assert engine.report.prefill_tokens_per_s == 0
        assert torch.equal(engine.rounds.cache.k[:, :1, :, :39], before[:, :1])


def test_decode_table_and_an_error_in_one_row(tmp_path, capsys):
    preset = tmp_path / "tiny.py"
    preset.write_text("n_layer = 1\nn_head = 2\nn_embd = 32\nd_ff = 64\nvocab_size = 64\nblock_size = 64\n")
    options = ["--device", "cpu", "--models", str(preset), "--prompt", "60", "8", "--batch", "1", "2", "--new", "8"]
    decode.main([*options, "--quant", "none", "int8"])
    rows = last_line(capsys)["rows"]
    assert [(row["quant"], row["prompt"], row["batch"]) for row in rows] == [
        (quant, prompt, batch) for quant in (None, "int8") for prompt in (60, 8) for batch in (1, 2)
    ]
    for row in rows:
        assert ("past this model's block_size" in row.get("error", "")) == (row["prompt"] == 60)
        assert row["prompt"] == 60 or row["tokens_per_s"] > 0
    weights = {row["quant"]: row["weight_bytes"] for row in rows if row["prompt"] == 8}
    assert weights[None] > 3 * weights["int8"]


def test_decode_prefill_row(decoder):
    row = decode.measure_prefill(decoder, Case("tiny", prompt=32, prefill=True), Machine("cpu"))
    assert set(row["seconds"]) == {"ours", "torch", "naive"} and min(row["seconds"].values()) > 0
    assert decoder.attention is None


def test_a_model_at_full_context(tmp_path, capsys):
    preset = tmp_path / "tiny.py"
    preset.write_text("n_layer = 2\nn_head = 4\nn_kv_head = 2\nn_embd = 32\nvocab_size = 64\nblock_size = 64\n")
    row = decode.seventy(Machine("cpu"), str(preset), "int8", new=8)
    assert row["tokens_per_s"] > 0 and row["mha_refused"] is None and row["prefill_whole_s"] > 0


def test_full_heads_in_the_70b_model_are_refused_before_allocation(capsys):
    row = decode.refused_with_full_heads(config_of("70b"), CPU, torch.bfloat16)
    assert "320.0 GiB" in row["mha_refused"]


def test_unknown_models_are_named(capsys):
    with pytest.raises(UserError, match="no model 'config/nope.py'"):
        decode.main(["--device", "cpu", "--models", "config/nope.py"])


def test_loops():
    assert speculate.loops([*range(8), 99, *range(8), 98, *range(8)])
    assert not speculate.loops([*range(8), 99, *range(8)])
    assert not speculate.loops([1, 2, 3])


def row_of(**changes) -> dict:
    row = dict(prompt="a", kind="code", temperature=0.0, mode="draft 3", tokens=100, loops=False, plain_seconds=2.0)
    row |= dict(seconds=1.0, speedup=2.0, same=True, draft_s=0.1, verify_s=0.6, plain_round_s=0.5, tokens_per_pass=2.0)
    return row | dict(acceptance=[0.5, 0.5], rounds_by_k={4: 50}) | changes


def test_loops_do_not_count():
    rows = [row_of(), row_of(seconds=3.0, acceptance=[1.0, 0.0]), row_of(loops=True, seconds=0.01)]
    (summary,) = speculate.summarise(rows)
    assert (summary["counted"], summary["loops"], summary["speedup"]) == (2, 1, 1.0)
    assert summary["acceptance"] == [0.75, 0.25]
    assert summary["tokens_per_s"] == 50 and summary["rounds_by_k"] == {4: 100}


def test_projection_by_hand(tmp_path, capsys):
    times = [dict(model="1b", replay_us=100.0), dict(model="8b", replay_us=1000.0), dict(model="8b", replay_us=1.0)]
    others = [dict(quant=None, context=0, prefill=False)] * 2 + [dict(quant="int8", context=0, prefill=False)]
    decoding, measured = tmp_path / "decode.txt", tmp_path / "speculate.txt"
    decoding.write_text("a table\n" + json.dumps(dict(rows=[a | b for a, b in zip(times, others, strict=True)])))
    rows = [row_of(acceptance=[0.8, 0.5])]
    measured.write_text(json.dumps(dict(rows=rows, summaries=speculate.summarise(rows))) + "\na warning\n")
    speculate.main(["--project", str(measured), str(decoding)])
    (found,) = last_line(capsys)["projection"]
    # k = 1: 1.8 tokens in 100 + 1.2 x 1000 us; k = 2: 2.2 in 200 + 1200. Plain: 1 in 1000.
    assert found["drafts"] == 2 and found["speedup"] == pytest.approx(2.2 * 1000 / 1400)
    for wrong in (tmp_path / "none.txt", decoding):
        with pytest.raises(UserError):
            speculate.main(["--project", str(wrong), str(decoding)])


@pytest.fixture
def two_prompts(tmp_path, monkeypatch):
    (tmp_path / "code_a.txt").write_text("class Error(Exception):\n    def __init__(self, name):\n")
    monkeypatch.setattr(speculate, "PROMPTS", tmp_path)
    monkeypatch.setattr(speculate, "CALLS", 1)


def test_speculation_is_measured_and_its_texts_compared(two_prompts, capsys):
    options = ["--target", str(GOLDEN), "--draft", str(GOLDEN), "--device", "cpu", "--new", "10", "--seeds", "1"]
    speculate.main(options)
    summary = last_line(capsys)
    assert summary["exactness"] | {"mixed": 0} == dict(combinations=64, mixed=0, mismatches=0, wrong=[])
    assert all(row["same"] for row in summary["rows"]) and len(summary["rows"]) == 2 * 2 * 4
    own = [row for row in summary["rows"] if row["mode"] == "draft 3"]
    assert all(row["tokens_per_pass"] > 2 for row in own)  # the model guesses itself; the context's end has no room


def test_another_text_fails(two_prompts, monkeypatch, capsys):
    wrong = dict(combinations=64, mixed=9, mismatches=1, wrong=[])
    monkeypatch.setattr(speculate, "exactness", lambda *_: wrong)
    with pytest.raises(SystemExit, match="1 speculative texts"):
        speculate.main(["--target", str(GOLDEN), "--device", "cpu", "--new", "4"])


def test_a_wrong_text_is_found(two_prompts, monkeypatch):
    models = speculate.Models(str(GOLDEN), None, CPU, None)
    plain = Engine.complete

    def off_by_one(self, *arguments, **options):
        done = plain(self, *arguments, **options)
        if self.speculate == 0:
            return done
        return [replace(c, token_ids=[*c.token_ids[:-1], c.token_ids[-1] ^ 1]) for c in done]

    monkeypatch.setattr(Engine, "complete", off_by_one)
    monkeypatch.setattr(speculate, "EXACT_SAMPLINGS", (SAMPLING,))
    found = speculate.exactness(models, 4, 1)
    assert found["mismatches"] == found["combinations"] == 8


def test_a_run_that_is_there_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(train_code, "ROOT", tmp_path)
    (tmp_path / "out" / train_code.DRAFT).mkdir(parents=True)
    with pytest.raises(UserError, match="is there already"):
        train_code.train(1)


@pytest.mark.parametrize("window", [None, 5])
def test_naive_attention_is_attention(window):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 8, generator=generator) for h, n in ((4, 3), (2, 20), (2, 20)))
    length = torch.tensor([3, 17], dtype=torch.int32)
    expected = reference.flash_decode(q, k, v, length, window=window)
    assert torch.allclose(ladder.naive_decode(q, k, v, length, window=window), expected, atol=1e-5)


def test_ladder(capsys):
    options = ["--target", str(GOLDEN), "--draft", str(GOLDEN), "--device", "cpu", "--new", "8", "--prompt", "20"]
    ladder.main(options)
    rows = last_line(capsys)["rows"]
    assert [row["step"] for row in rows] == list(ladder.STEPS)
    assert rows[-1]["total"] == pytest.approx(rows[-1]["tokens_per_s"] / rows[0]["tokens_per_s"])


def test_the_slow_and_the_fast_steps_of_the_ladder_say_the_same():
    model = ladder.checkpoint.load_model(GOLDEN)
    prompt = random_ids(model.config, 1, 20)[0]
    fast = Engine(model, Ids(model.config.vocab_size), speculate=0).complete([prompt], ladder.GREEDY, 10)[0].token_ids
    assert ladder.eager(model, prompt, 10) == fast
    with ladder.attention_in_decode(ladder.naive_decode):
        assert ladder.eager(model, prompt, 10) == fast
