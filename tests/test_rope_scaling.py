"""Rotary frequencies: the same tables as transformers, and a length that follows from them."""

import math
from dataclasses import replace

import pytest
import torch

import checkpoint
from config import build
from data import UserError
from data.tokenizer import ByteTokenizer
from model import KVCache, ModelConfig, Transformer, rope_table
from rope import (
    KINDS,
    format_rope_scaling,
    original_length,
    parse_rope_scaling,
    rope_frequencies,
    stretched,
    stretched_theta,
)


def make_config(rope_scaling=None, **settings):
    shape = dict(vocab_size=257, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, head_dim=32, block_size=256)
    return ModelConfig(**(shape | settings), rope_scaling=rope_scaling)


def random_model(config):
    """Weights that let every part be seen in the logits, as a new model's, in which blocks add nothing, do not."""
    generator = torch.Generator().manual_seed(0)
    model = Transformer(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    return model


def theirs(config, kind, **parameters):
    """(inv_freq, attention factor) of transformers, for a model trained to 1024 tokens unless told otherwise."""
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    # Taken out: of `dynamic` transformers wants to know how long the text is now.
    seq_len = parameters.pop("seq_len", None)
    hub = LlamaConfig(
        hidden_size=config.n_embd * 4,
        num_attention_heads=4,
        head_dim=config.head_dim,
        max_position_embeddings=parameters.pop("max_position_embeddings", config.block_size),
        rope_parameters={"rope_type": kind, "rope_theta": config.rope_theta, **parameters},
    )
    return utils.ROPE_INIT_FUNCTIONS[kind](hub, "cpu", seq_len=seq_len)


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
YARN = dict(factor=4.0, original_max_position_embeddings=1024)
TABLES = {
    "linear:2.5": ("linear", dict(factor=2.5)),
    "llama3:8:1:4:8192": ("llama3", LLAMA3),
    "llama3:32:high_freq_factor=3:low_freq_factor=1.5:original=4096": (
        "llama3",
        dict(factor=32.0, low_freq_factor=1.5, high_freq_factor=3.0, original_max_position_embeddings=4096),
    ),
    "yarn:4:1024": ("yarn", YARN),
    "yarn:4:1024:beta_fast=16:beta_slow=2": ("yarn", YARN | dict(beta_fast=16, beta_slow=2)),
    "yarn:4:1024:attention_factor=0.9": ("yarn", YARN | dict(attention_factor=0.9)),
    "yarn:4:1024:mscale=0.7:mscale_all_dim=0.5": ("yarn", YARN | dict(mscale=0.7, mscale_all_dim=0.5)),
    "yarn:4:1024:truncate=false": ("yarn", YARN | dict(truncate=False)),
    "yarn:1:1024": ("yarn", YARN | dict(factor=1.0)),
}


@pytest.mark.parametrize("text", TABLES)
@pytest.mark.parametrize("head_dim, rope_theta", [(32, 10000.0), (128, 500000.0)])
def test_tables_of_transformers(text, head_dim, rope_theta):
    config = make_config(text, head_dim=head_dim, rope_theta=rope_theta)
    kind, parameters = TABLES[text]
    expected, expected_factor = theirs(config, kind, **parameters)
    inv_freq, factor = rope_frequencies(config)
    assert inv_freq.dtype == torch.float32 and inv_freq.shape == (head_dim // 2,)
    torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, abs=1e-12)
    plain, _ = rope_frequencies(replace(config, rope_scaling=None))
    assert text.startswith("yarn:1:") or (inv_freq / plain).min() < 0.5  # the scaling does something


@pytest.mark.parametrize("block_size", [512, 1024, 1500, 4096])
def test_dynamic_is_the_table_of_transformers_for_a_text_of_block_size(block_size):
    config = make_config("dynamic:4:1024", block_size=block_size)
    expected, factor = theirs(config, "dynamic", factor=4.0, max_position_embeddings=1024, seq_len=block_size)
    inv_freq, ours = rope_frequencies(config)
    torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0)
    assert ours == factor == 1.0


def test_ntk_is_its_formula():
    config = make_config("ntk:4", rope_theta=10000.0, head_dim=32)
    base = 10000.0 * 4 ** (32 / 30)
    expected = torch.tensor([base ** (-2 * i / 32) for i in range(16)])
    torch.testing.assert_close(rope_frequencies(config)[0], expected, rtol=1e-6, atol=0)
    assert stretched_theta(config) == base
    # Its purpose: the slowest pair turns `factor` times slower, the fastest one as before.
    plain = rope_frequencies(replace(config, rope_scaling=None))[0]
    ratio = plain / rope_frequencies(config)[0]
    assert ratio[0] == 1 and ratio[-1].item() == pytest.approx(4, rel=1e-5)


def test_the_attention_temperature_reaches_the_table():
    config = make_config("yarn:4:64")
    inv_freq, factor = rope_frequencies(config)
    cos, sin = rope_table(torch.tensor([0, 5]), config)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    torch.testing.assert_close(cos[0], torch.full((16,), factor))
    torch.testing.assert_close(sin[1], (5 * inv_freq).sin() * factor)


@pytest.mark.parametrize("text", ["linear:2", "ntk:4", "dynamic:4", "llama3:8", "yarn:4"])
def test_cached_logits_are_the_uncached_ones(text):
    config = make_config(text, block_size=64)
    model = random_model(config)
    tokens = torch.randint(257, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens)
        cache = KVCache(config, 2, 64)
        parts = [
            model.decode(tokens[:, a:b], torch.arange(a, b).expand(2, -1), cache)
            for a, b in ((0, 30), (30, 31), (31, 48))
        ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("text", ["linear:2", "dynamic:4:100", "llama3:8", "yarn:4"])
def test_no_graph_break(text):
    model = random_model(make_config(text))
    tokens = torch.randint(257, (1, 16))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens), model(tokens))


def test_strings_come_back():
    assert parse_rope_scaling("llama3:8:1:4:8192") == (
        "llama3",
        dict(factor=8, low_freq_factor=1, high_freq_factor=4, original=8192),
    )
    for kind, names in KINDS.items():
        values = {name: 1.5 + i for i, name in enumerate(names)}
        if kind == "yarn":
            values |= {"beta_fast": 9.0, "truncate": 0.0}
        assert parse_rope_scaling(format_rope_scaling(kind, values)) == (kind, values)


@pytest.mark.parametrize(
    "text, hint",
    [
        ("longrope:4", "no kind 'longrope', only linear, ntk"),
        ("yarn", "lacks its factor"),
        ("yarn:four", "'four', which is not a number"),
        ("yarn:0.5", "at least 1"),
        ("yarn:nan", "at least 1"),
        ("yarn:4:factor=2", "each once"),
        ("linear:2:64:7", "write linear:factor:original"),
        ("linear:2:beta_fast=3", "write linear:factor:original"),
        ("llama3:8:4:4", "below high_freq_factor"),
        ("yarn:4:64:1:2", "below beta_fast"),
    ],
)
def test_what_cannot_be_is_refused(text, hint):
    with pytest.raises(ValueError, match="rope_scaling") as refusal:
        make_config(text)
    assert hint in str(refusal.value) and "\n" not in str(refusal.value)


def test_it_is_a_setting_like_others():
    assert build({"rope_scaling": "yarn:4"}).model.rope_scaling == "yarn:4"
    assert build({"rope_scaling": "none"}).model.rope_scaling is None
    with pytest.raises(UserError, match="no kind 'yarm'"):
        build({"rope_scaling": "yarm:4"})
    with pytest.raises(ValueError, match="head_dim of at least 4"):
        make_config("ntk:2", head_dim=2)


def test_block_size_follows():
    config = make_config()  # 256 tokens
    longer = stretched(config, "yarn:4")
    assert (longer.block_size, original_length(longer)) == (1024, 256)
    assert stretched(longer, "linear:2").block_size == 512  # twice what it was before, not twice yarn's
    assert stretched(longer, "none") == config
    assert stretched(config, "dynamic:2:100").block_size == 200
    llama = make_config("llama3:8:1:4:8192", block_size=131072)
    assert stretched(llama, "llama3:8").block_size == 131072 and original_length(llama) == 8192
    assert original_length(make_config("yarn:4")) == 64  # block_size / factor, when it is not said


def test_a_checkpoint_is_stretched_when_it_is_loaded(tmp_path):
    values = dict(vocab_size=257, n_layer=1, n_head=2, n_embd=16, block_size=32)
    config = build(values)
    model = random_model(config.model)
    checkpoint.save(tmp_path, {"step": 1, "config": config.flat()}, model, [], ByteTokenizer())
    loaded = checkpoint.load_model(tmp_path, rope_scaling="yarn:4")
    assert loaded.config.block_size == 128 and loaded.config.rope_scaling == "yarn:4:original=32"
    tokens = torch.randint(257, (1, 100))
    expected = Transformer(loaded.config)
    expected.load_state_dict(model.state_dict())
    assert torch.equal(loaded(tokens), expected(tokens))
    assert not torch.allclose(loaded(tokens), checkpoint.load_model(tmp_path)(tokens))
    with pytest.raises(UserError, match="no kind 'yarm'"):
        checkpoint.load_model(tmp_path, rope_scaling="yarm:4")
