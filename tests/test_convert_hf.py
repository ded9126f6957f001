"""Models of transformers in and out: the same logits, the same text, the same bytes after a round trip."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoint
import convert
from data import UserError, exit_cleanly
from data.tokenizer import ByteTokenizer
from engine import Engine, Sampling
from formats import write_checkpoint
from formats.huggingface_config import read_config, write_config
from model import KVCache, ModelConfig, Transformer
from tests.conftest import ROOT

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

VOCAB = 259  # of the tokenizer below
PROMPT = "def main(argv):"
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=258,
    initializer_range=0.2,
)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
MODELS = {
    "llama-mha": ("llama", dict(num_key_value_heads=4, tie_word_embeddings=False)),
    "llama-gqa-tied": ("llama", dict(num_key_value_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-5)),
    "llama-llama3-theta": ("llama", dict(num_key_value_heads=2, rope_parameters=LLAMA3 | {"rope_theta": 500.0})),
    "llama-linear": ("llama", dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4))),
    "llama-dynamic": ("llama", dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4))),
    "llama-yarn": ("llama", dict(rope_parameters=YARN | {"rope_theta": 1e4})),
    "llama-yarn-options": (
        "llama",
        dict(
            rope_parameters=YARN | dict(rope_theta=1e4, beta_fast=8.0, truncate=False, mscale=0.7, mscale_all_dim=0.3)
        ),
    ),
    "llama-head-dim": ("llama", dict(head_dim=16, num_key_value_heads=1)),
    "mistral-window-mqa": ("mistral", dict(num_key_value_heads=1, sliding_window=7)),
    "mistral-no-window": (
        "mistral",
        dict(num_key_value_heads=2, sliding_window=None, num_attention_heads=6, head_dim=10),
    ),
    "qwen2-tied": ("qwen2", dict(num_key_value_heads=2, tie_word_embeddings=True, rope_parameters={"rope_theta": 1e6})),
    "qwen2-window": (
        "qwen2",
        dict(num_key_value_heads=4, use_sliding_window=True, sliding_window=9, max_window_layers=0),
    ),
    "qwen3": ("qwen3", dict(num_key_value_heads=2, head_dim=24, rope_parameters=YARN | {"rope_theta": 1e6})),
}


def their_model(family, **settings):
    """A random model; its norms and biases are random too, since ones and zeros would hide a mistake in them."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **SHAPE | settings))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, std = (1.0, 0.3) if "norm" in name else (0.0, 0.3)
            parameter.normal_(mean, std, generator=generator)
    return model.eval()


@pytest.fixture(scope="module")
def their_tokenizer():
    """A byte-level BPE of a few ids."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    alphabet = sorted(byte_level.alphabet())
    model = tokenizers.models.BPE(
        vocab={c: i for i, c in enumerate(alphabet)} | {"ma": 256, "in": 257}, merges=[("m", "a"), ("i", "n")]
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<|end|>", special=True)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@pytest.fixture
def run(capsys):
    """Runs convert.py's main in this process -> (exit code, stdout, stderr)."""

    def run(*arguments):
        code = 0
        try:
            with exit_cleanly():
                convert.main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def save(tmp_path, their_tokenizer):
    """Saves a random model and the tokenizer as transformers does -> (the model, its folder)."""

    def save(key="llama-gqa-tied", dtype=torch.float32, vocab_size=VOCAB, **options):
        family, settings = MODELS[key]
        model = their_model(family, **settings | {"vocab_size": vocab_size}).to(dtype)
        model.save_pretrained(tmp_path / "theirs", **options)
        their_tokenizer.save_pretrained(tmp_path / "theirs")
        return model, tmp_path / "theirs"

    return save


def cached_logits(model, tokens):
    """Logits of tokens [B, T] read in three parts through a cache."""
    cache = KVCache(model.config, tokens.shape[0], tokens.shape[1])
    cuts = (0, 17, 18, tokens.shape[1])
    parts = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        positions = torch.arange(start, stop).expand(tokens.shape[0], -1)
        parts.append(model.decode(tokens[:, start:stop], positions, cache))
    return torch.cat(parts, 1)


def assert_same_model(theirs, ours, tolerance=1e-4):
    tokens = torch.randint(theirs.config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        for logits in (ours(tokens), cached_logits(ours, tokens)):
            assert logits.shape == expected.shape
            assert (logits - expected).abs().max() < tolerance
    assert expected.std() > 0.3  # there is something to compare


@pytest.mark.parametrize("key", MODELS)
def test_in_and_out(key, save, run, tmp_path):
    theirs, folder = save(key)
    assert run("hf", folder, tmp_path / "ours")[0] == 0
    ours = checkpoint.load_model(tmp_path / "ours")
    assert_same_model(theirs, ours)

    tokenizer = checkpoint.load_tokenizer(tmp_path / "ours")
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    text = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=258
    )
    completion = Engine(ours, tokenizer).complete([PROMPT], Sampling(temperature=0), 20)[0]
    assert completion.token_ids == text[0, ids.shape[1] :].tolist()

    assert run("to-hf", tmp_path / "ours", tmp_path / "back")[0] == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert again.config.model_type == theirs.config.model_type
    assert_same_model(again, ours)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    before = {name: tensor for name, tensor in before.items() if name in after}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert back(PROMPT).input_ids == ids[0].tolist() and back.eos_token_id == 258

    assert run("hf", tmp_path / "back", tmp_path / "again")[0] == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("ours", "again")]
    assert weights[0] == weights[1] and checkpoint.load_tokenizer(tmp_path / "again").hash == tokenizer.hash
    first, second = (checkpoint.load_state(tmp_path / name)["config"] for name in ("ours", "again"))
    assert first == second


def test_shards(save, run, tmp_path):
    theirs, folder = save("llama-mha", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    code, out, err = run("hf", folder, tmp_path / "ours")
    assert code == 0 and "parameters, up to 64 tokens" in out and "tensors: 100%" in err
    assert_same_model(theirs, checkpoint.load_model(tmp_path / "ours"))


def test_bf16_is_kept_and_dtype_changes_it(save, run, tmp_path):
    _, folder = save("qwen2-tied", dtype=torch.bfloat16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for dtype, expected in (("keep", torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16)):
        assert run("hf", folder, tmp_path / dtype, "--dtype", dtype)[0] == 0
        assert checkpoint.load_model(tmp_path / dtype).embed.weight.dtype == expected
        ours = checkpoint.load_model(tmp_path / dtype, dtype=torch.float32)
        assert_same_model(theirs, ours, 1e-4 if expected != torch.float16 else 1e-2)
    assert run("to-hf", tmp_path / "keep", tmp_path / "back")[0] == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto").dtype == torch.bfloat16


def test_weights_of_two_kinds_are_kept_as_the_wider(save, run, tmp_path):
    _, folder = save(dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.linspace(0.9, 1.1, 32)
    save_file(tensors, folder / "model.safetensors")
    assert run("hf", folder, tmp_path / "ours")[0] == 0
    ours = checkpoint.load_model(tmp_path / "ours")
    assert ours.dtype is None and torch.equal(ours.norm.weight, tensors["model.norm.weight"])
    assert torch.equal(ours.embed.weight[:VOCAB], tensors["model.embed_tokens.weight"].float())


def test_old_spelling_of_config(save, run, tmp_path):
    theirs, folder = save("llama-llama3-theta")
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": config.pop("dtype")}
    (folder / "config.json").write_text(json.dumps(config))
    assert run("hf", folder, tmp_path / "ours")[0] == 0
    assert_same_model(theirs, checkpoint.load_model(tmp_path / "ours"))


def test_a_model_of_our_own_goes_out(run, tmp_path):
    golden = ROOT / "tests/golden"
    assert run("to-hf", golden, tmp_path / "theirs", "--dtype", "float32")[0] == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    ours, tokenizer = checkpoint.load_model(golden, dtype=torch.float32), checkpoint.load_tokenizer(golden)
    assert theirs.get_input_embeddings().weight.shape[0] == ours.config.vocab_size
    assert_same_model(theirs, ours)
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")(
        "class Error(ValueError): \u00e9\U0001f600"
    ).input_ids
    assert ids == tokenizer.encode("class Error(ValueError): \u00e9\U0001f600")


@pytest.mark.parametrize("rope_scaling", ["ntk:4", "dynamic:4:16", "linear:2", "yarn:4:attention_factor=1.3"])
def test_stretched_models_go_out(rope_scaling, run, tmp_path):
    """Those that only change the base as that base: transformers has no name for ntk, and reads dynamic otherwise."""
    shutil.copytree(ROOT / "tests/golden", tmp_path / "ours")
    state = checkpoint.load_state(tmp_path / "ours")
    state["config"]["rope_scaling"] = rope_scaling
    (tmp_path / "ours/state.json").write_text(json.dumps(state))
    assert run("to-hf", tmp_path / "ours", tmp_path / "theirs", "--dtype", "float32")[0] == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert_same_model(theirs, checkpoint.load_model(tmp_path / "ours", dtype=torch.float32))


def test_what_transformers_has_no_model_for(run, tmp_path):
    shutil.copytree(ROOT / "tests/golden", tmp_path / "ours")
    state = checkpoint.load_state(tmp_path / "ours")
    state["config"] |= {"qk_norm": True, "qkv_bias": True}
    (tmp_path / "ours/state.json").write_text(json.dumps(state))
    assert_refused(run("to-hf", tmp_path / "ours", tmp_path / "theirs"), "has no counterpart", tmp_path / "theirs")


def test_a_qwen2_model_with_another_tokenizer_says_how_to_load_it(run, tmp_path):
    """transformers 5 ignores the tokenizer_class of a qwen2 folder and would cut text in Qwen's way."""
    tokenizer = checkpoint.load_tokenizer(ROOT / "tests/golden")
    config = ModelConfig(tokenizer.vocab_size, n_layer=1, n_head=2, n_embd=32, qkv_bias=True)
    model = Transformer(config).init_weights(torch.Generator().manual_seed(3))
    weights = [(name, p) for name, p in model.named_parameters() if name != "head.weight"]
    write_checkpoint(tmp_path / "ours", config, weights, tokenizer, torch.float32, "a test")
    code, _, err = run("to-hf", tmp_path / "ours", tmp_path / "theirs")
    assert code == 0 and "PreTrainedTokenizerFast" in err
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "theirs")
    assert fast("it's 1234567 lines").input_ids == tokenizer.encode("it's 1234567 lines")
    assert "PreTrainedTokenizerFast" not in run("to-hf", ROOT / "tests/golden", tmp_path / "golden")[2]


# What the hub has under these names, without the weights, and how many parameters each is known to have.
PUBLISHED = {
    "SmolLM2-135M": (
        134_515_008,
        """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false,
        "rope_scaling": null, "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
        "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 49152}""",
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0",
        "use_cache": true, "vocab_size": 128256}""",
    ),
    "TinyLlama-1.1B": (
        1_100_048_384,
        """{"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 2048,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 22, "num_key_value_heads": 4,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "tie_word_embeddings": false,
        "torch_dtype": "float32", "transformers_version": "4.31.0.dev0", "use_cache": true, "vocab_size": 32000}""",
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        """{"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0", "use_cache": true, "vocab_size": 32000}""",
    ),
    "Qwen2.5-0.5B": (
        494_032_768,
        """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1", "use_cache": true, "use_mrope": false, "use_sliding_window": false,
        "vocab_size": 151936}""",
    ),
    "Qwen3-0.6B": (
        596_049_920,
        """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
        "sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}""",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    parameters, text = PUBLISHED[name]
    config = read_config(json.loads(text), "config.json")
    assert config.n_params() == parameters
    assert config.block_size == json.loads(text)["max_position_embeddings"]
    assert config.sliding_window == (4096 if name == "Mistral-7B-v0.1" else None)
    assert config.rope_scaling == (
        "llama3:32:low_freq_factor=1:high_freq_factor=4:original=8192" if "3.2" in name else None
    )
    again = read_config(write_config(config, torch.bfloat16, 1, [2]), "config.json")
    assert again == config


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_config_json_leaves_out_is_as_in_transformers(family):
    shape = dict(vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=32)
    theirs = transformers.AutoConfig.for_model(family, **shape)
    ours = read_config({"model_type": family, **shape}, "config.json")
    assert ours.norm_eps == theirs.rms_norm_eps and ours.n_kv_head == theirs.num_key_value_heads
    assert ours.block_size == theirs.max_position_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.head_dim == getattr(theirs, "head_dim", 8) and ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"] and ours.rope_scaling is None


@pytest.mark.parametrize("outside", [{}, {"rope_theta": 500.0}])
def test_a_scaling_written_into_a_newer_file_counts(outside):
    """As the makers of models advise: rope_scaling added by hand, beside the rope_parameters of transformers 5."""
    shape = dict(vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=32)
    shape |= outside | {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}
    shape["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    theirs = transformers.AutoConfig.for_model("llama", **copy.deepcopy(shape)).rope_parameters
    ours = read_config({"model_type": "llama", **shape}, "config.json")
    assert (theirs["rope_type"], theirs["factor"]) == ("linear", 2.0) and ours.rope_scaling == "linear:2"
    assert ours.rope_theta == theirs["rope_theta"]


def test_a_window_that_is_switched_off():
    values = json.loads(PUBLISHED["Qwen2.5-0.5B"][1])
    assert read_config(values | {"max_window_layers": 0}, "config.json").sliding_window is None
    assert read_config(values | {"max_window_layers": 21}, "config.json").sliding_window is None  # 21 of 24 layers
    on = {"max_window_layers": 0, "use_sliding_window": True, "sliding_window": 4096}
    assert read_config(values | on, "config.json").sliding_window == 4096


def test_the_length_that_qwen_advises():
    """yarn added to config.json, with max_position_embeddings as it was."""
    values = json.loads(PUBLISHED["Qwen3-0.6B"][1])
    values["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert read_config(values, "config.json").block_size == 131072


def test_a_full_disk_leaves_nothing(monkeypatch, tmp_path):
    def full(self, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ByteTokenizer, "save", full)
    config = ModelConfig(vocab_size=257, n_layer=1, n_head=2, n_embd=16)
    weights = Transformer(config).init_weights().state_dict()
    del weights["head.weight"]
    with pytest.raises(UserError, match="could not write .*ours: No space left on device"):
        write_checkpoint(tmp_path / "ours", config, weights.items(), ByteTokenizer(), torch.float32, "a test")
    with pytest.raises(UserError, match="norm.weight \\(or has it twice\\)"):
        twice = [*weights.items(), ("norm.weight", weights["norm.weight"])]
        write_checkpoint(tmp_path / "ours", config, twice, ByteTokenizer(), torch.float32, "a test")
    assert not list(tmp_path.iterdir())


def assert_refused(result, hint, out):
    """One sentence on stderr, exit code 1, and nothing left of the output, not even under a temporary name."""
    code, _, err = result
    message = err[err.index("error: ") :].strip()  # a progress bar may stand before it
    assert code == 1 and hint in message and "\n" not in message and "Traceback" not in err
    assert not out.exists() and not list(out.parent.glob(".*.tmp"))


def set_config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))

    return change


def set_tokenizer_config(**changes):
    def change(folder):
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def add_token(token_id):
    def change(folder):
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append({"id": token_id, "content": "<far>", "special": True, **flags})
        (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")

    return change


def set_tensors(**changes):
    """Change tensors of model.safetensors: name -> function of the old one, None to drop it."""

    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        for key, function in changes.items():
            name = "model." + key.replace("__", ".") + ".weight"
            tensors[name] = function(tensors.get(name))
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors")

    return change


def cut(folder, keep=0.7):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_value(value):
    def change(tensor):
        tensor[-1] = value
        return tensor

    return change


BAD = {
    "cut": (cut, "is damaged or not whole"),
    "cut header": (lambda folder: cut(folder, 0.0), "is damaged or not whole"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights that can be read"),
    "pickle": (pickled, "a pickle, which could run any program"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
    "nan": (set_tensors(layers__1__mlp__up_proj=with_value(float("nan"))), "layers.1.mlp.up_proj.weight holds NaN"),
    "inf": (set_tensors(norm=with_value(float("inf"))), "norm.weight holds NaN or infinity"),
    "shape": (
        set_tensors(norm=lambda t: t[:5].clone()),
        "norm.weight has the shape [5], but the configuration asks for [32]",
    ),
    "transposed": (set_tensors(layers__0__mlp__up_proj=lambda t: t.T.contiguous()), "has the shape [32, 48]"),
    "missing tensor": (set_tensors(norm=lambda t: None), "lacks 1 tensors"),
    "foreign tensor": (set_tensors(router=lambda t: torch.ones(3)), "no place for, such as model.router.weight"),
    "integers": (set_tensors(norm=lambda t: t.to(torch.int8)), "of type I8"),
    "other head": (
        lambda folder: save_file(
            (tensors := load_file(folder / "model.safetensors"))
            | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
            folder / "model.safetensors",
        ),
        "holds a head that differs",
    ),
    "more ids than rows": (
        lambda folder: (
            set_tensors(embed_tokens=lambda t: t[:200].clone())(folder),
            set_config(vocab_size=200)(folder),
        ),
        "has 259 ids but the embedding only 200 rows",
    ),
    "moe": (set_config(model_type="mixtral"), "describes a 'mixtral' model"),
    "mla": (set_config(model_type="deepseek_v2"), "describes a 'deepseek_v2' model"),
    "no type": (set_config(model_type="absent"), "describes a None model"),
    "classifier": (set_config(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
    "activation": (set_config(hidden_act="gelu"), "hidden_act='gelu'"),
    "o_proj bias": (set_config(attention_bias=True), "attention_bias=True"),
    "mlp bias": (set_config(mlp_bias=True), "mlp_bias=True"),
    "partial rotary": (set_config(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    "softcap": (set_config(final_logit_softcapping=30.0), "final_logit_softcapping=30.0"),
    "quantised": (set_config(quantization_config={"bits": 4}), "quantization_config="),
    "unknown key": (set_config(residual_multiplier=0.2), "'residual_multiplier', unknown to this program"),
    "rope kind": (set_config(rope_parameters={"rope_type": "longrope", "factor": 2.0}), "rope_type='longrope'"),
    "rope key": (
        set_config(rope_parameters={"rope_type": "linear", "factor": 2.0, "mrope": 3}),
        "rope_type='linear' with mrope",
    ),
    "rope per layer": (set_config(rope_parameters={"full_attention": {"rope_type": "default"}}), "differ by layer"),
    "text for number": (set_config(hidden_size="32"), "must give hidden_size as a number"),
    "heads": (set_config(num_key_value_heads=3), "n_kv_head=3 does not divide n_head=4"),
    "lacks key": (set_config(num_hidden_layers="absent"), "must give num_hidden_layers as a number"),
    "a million layers": (set_config(num_hidden_layers=10**6), "too few for 1000000 layers"),
    "eos is no text": (set_tokenizer_config(eos_token=5), "and has 5"),
    "template is no text": (set_tokenizer_config(chat_template=3), "is no text but 3"),
    "added tokens": (set_tokenizer_config(added_tokens_decoder={"x": {}}), "added_tokens_decoder of"),
    "vast token id": (add_token(10**9), "the id 1000000000, beyond any vocabulary"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders_are_refused_in_one_sentence(name, save, run, tmp_path):
    _, folder = save()
    damage, hint = BAD[name]
    damage(folder)
    assert_refused(run("hf", folder, tmp_path / "ours"), hint, tmp_path / "ours")


def test_layers_that_see_differently_are_refused(save, run, tmp_path):
    _, folder = save("qwen2-window")
    set_config(layer_types="absent", max_window_layers=1)(folder)
    assert_refused(run("hf", folder, tmp_path / "ours"), "layers of different kinds", tmp_path / "ours")


def test_bad_shards(save, run, tmp_path):
    _, folder = save("llama-mha", max_shard_size="20KB")
    shards, index = sorted(folder.glob("*.safetensors")), folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": whole["weight_map"] | {"model.norm.bias": shards[0].name}}))
    assert_refused(run("hf", folder, tmp_path / "ours"), "says that model.norm.bias is in", tmp_path / "ours")
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    assert_refused(run("hf", folder, tmp_path / "ours"), "outside its folder", tmp_path / "ours")
    index.write_text(json.dumps(whole))
    shards[1].unlink()
    assert_refused(run("hf", folder, tmp_path / "ours"), f"{shards[1].name} is missing", tmp_path / "ours")


def test_too_large_for_float16(save, run, tmp_path):
    _, folder = save()
    set_tensors(norm=with_value(1e6))(folder)
    result = run("hf", folder, tmp_path / "ours", "--dtype", "float16")
    assert_refused(result, "too large for float16", tmp_path / "ours")


def test_an_existing_output_is_left_alone(save, run, tmp_path):
    _, folder = save()
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/mine.txt").write_text("keep")
    for command, source in (("hf", folder), ("to-hf", ROOT / "tests/golden")):
        code, _, err = run(command, source, tmp_path / "ours")
        assert code == 1 and "exists already" in err
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["mine.txt"]


def test_an_output_without_a_name(save, run, tmp_path, monkeypatch):
    _, folder = save()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, _, err = run("hf", folder, "")
    assert code == 1 and "error: . exists already" in err and "tensors:" not in err  # before any work
    assert sorted(tmp_path.rglob("*")) == before


def test_a_tied_model_may_hold_a_copy_and_old_files_their_buffers(save, run, tmp_path):
    theirs, folder = save()
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors")
    assert run("hf", folder, tmp_path / "ours")[0] == 0
    assert_same_model(theirs, checkpoint.load_model(tmp_path / "ours"))


def test_rows_past_the_tokenizer_never_win(save, run, tmp_path):
    """Qwen's embeddings have more rows than its tokenizer has ids; here the rows are the likeliest by far."""
    _, folder = save("llama-mha", vocab_size=300)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][VOCAB:] = 100 * tensors["lm_head.weight"][:1]
    save_file(tensors, folder / "model.safetensors")
    assert run("hf", folder, tmp_path / "ours")[0] == 0
    ours, tokenizer = checkpoint.load_model(tmp_path / "ours"), checkpoint.load_tokenizer(tmp_path / "ours")
    completions = Engine(ours, tokenizer).complete([PROMPT], Sampling(temperature=1.0), 30, num_samples=3)
    assert ours.config.vocab_size == 300 and all(id < VOCAB for c in completions for id in c.token_ids)


@pytest.mark.parametrize("source", ["no-such-folder", "./owner/model", "pyproject.toml", "a/b/c"])
def test_no_such_source(source, run, tmp_path):
    assert_refused(run("hf", source, tmp_path / "ours"), "is no folder with a config.json", tmp_path / "ours")


def test_a_name_asks_the_hub(run, save, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    _, folder = save()
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: str(folder))
    assert run("hf", "owner/model", tmp_path / "ours")[0] == 0

    def offline(name, **options):
        raise hub.errors.LocalEntryNotFoundError("no network and nothing cached\nand more")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    result = run("hf", "owner/model", tmp_path / "other")
    assert_refused(result, "the hub did not give a model of that name: no network", tmp_path / "other")


def test_command_line(run, tmp_path):
    assert_refused(run("hf", "x"), "OUT", tmp_path / "none")
    assert_refused(run("melt", "x", "y"), "invalid choice", tmp_path / "none")
    assert_refused(run("hf", "x", "y", "--dtype", "int8"), "invalid choice", tmp_path / "none")
