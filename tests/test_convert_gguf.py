"""GGUF files written here, as llama.cpp's converter lays them out, from models of transformers: the same logits."""

import json

import numpy as np
import pytest
import torch
from test_hf_tokenizer import CHAT, byte_level, sentencepiece_like

import checkpoint
import convert
from data import UserError, exit_cleanly
from formats.gguf_tokenizer import LLAMA3_PATTERN, QWEN2_PATTERN
from model import KVCache

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 64, 2
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SPM_SPECIALS = {"<unk>": 2, "<s>": 3, "</s>": 3}


def random_model(family, **settings):
    """A random model; its norms and biases are random too, since ones and zeros would hide a mistake in them."""
    shape = dict(
        vocab_size=903,
        hidden_size=DIM,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **shape | settings))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, std = (1.0, 0.3) if "norm" in name else (0.0, 0.2)
            parameter.normal_(mean, std, generator=generator)
    return model.eval()


def llama_cpp_order(rows, heads):
    """q or k rows as llama.cpp's converter permutes them for models of the architecture llama."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def their_name(name):
    for theirs, theirs_there in (
        ("model.layers.", "blk."),
        ("model.embed_tokens", "token_embd"),
        ("lm_head", "output"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
        ("model.norm", "output_norm"),
    ):
        name = name.replace(theirs, theirs_there)
    return name


def write_gguf(path, family, model, tokenizer=None, pre="gpt-2", quantise=None, drop=(), unused=(), **more):
    """`more`: further metadata; a value None takes a key away."""
    writer, config = gguf.GGUFWriter(path, family), model.config
    keys = {
        "block_count": LAYERS,
        "context_length": config.max_position_embeddings,
        "embedding_length": DIM,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    } | more
    for key, value in keys.items():
        kinds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        if value is not None:
            kinds[type(value)](f"{family}.{key}", value)
    write_tokenizer(writer, tokenizer or byte_level(None), pre, unused)
    for name, tensor in model.state_dict().items():
        if name in drop or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        array = tensor.float().numpy()
        if family == "llama" and "q_proj" in name:
            array = llama_cpp_order(array, config.num_attention_heads)
        elif family == "llama" and "k_proj" in name:
            array = llama_cpp_order(array, config.num_key_value_heads)
        array, kind = np.ascontiguousarray(array), quantise if array.ndim == 2 else None
        data = array if kind is None else gguf.quantize(array, kind)
        writer.add_tensor(their_name(name), data, raw_dtype=kind)
    return writer


def write_tokenizer(writer, tokenizer, pre, unused):
    spec, vocab = json.loads(tokenizer.to_str()), tokenizer.get_vocab()
    tokens = [*sorted(vocab, key=vocab.__getitem__), *unused]
    special = {t["content"]: 3 if t["special"] else 4 for t in spec["added_tokens"]}
    sentencepiece = "<unk>" in special
    writer.add_tokenizer_model("llama" if sentencepiece else "gpt2")
    writer.add_token_list(tokens)
    if sentencepiece:
        special |= SPM_SPECIALS | {f"<0x{value:02X}>": 6 for value in range(256)}
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
    else:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_token_types([5 if token in unused else special.get(token, 1) for token in tokens])
    writer.add_eos_token_id(vocab["</s>" if sentencepiece else "<|end|>"])
    writer.add_bos_token_id(vocab["<s>" if sentencepiece else "<|bos|>"])
    writer.add_chat_template(TEMPLATE)


def finished(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def run(capsys):
    def run(*arguments):
        code = 0
        try:
            with exit_cleanly():
                convert.main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code or 0
        return code, capsys.readouterr().err.splitlines()[-1:]

    return run


def converted(tmp_path, run, *options, **arguments):
    finished(write_gguf(tmp_path / "model.gguf", **arguments))
    code, error = run("gguf", tmp_path / "model.gguf", tmp_path / "out", *options)
    assert code == 0, error
    return checkpoint.load_model(tmp_path / "out")


def assert_same_logits(ours, theirs, tolerance=1e-4):
    tokens = torch.randint(0, 903, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        cache = KVCache(ours.config, 2, 64)
        halves = [ours.decode(tokens[:, part], torch.arange(40)[part].expand(2, -1), cache)
                  for part in (slice(0, 23), slice(23, 40))]  # fmt: skip
        for logits in (ours(tokens), torch.cat(halves, 1)):
            assert (logits - expected).abs().max() < tolerance


@pytest.mark.parametrize(
    "family, settings, more",
    [
        ("llama", dict(tie_word_embeddings=True), {"rope.dimension_count": 16, "vocab_size": 903}),
        ("llama", dict(tie_word_embeddings=False, num_key_value_heads=1), {}),
        ("llama", dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=500.0)),
         {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}),
        ("llama", dict(rope_parameters=dict(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=1e4)),
         {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}),
        ("qwen2", dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6)), {}),
        ("qwen3", dict(head_dim=24), {"attention.key_length": 24, "attention.value_length": 24}),
    ],
    ids=["llama-gqa", "llama-mqa-untied", "linear", "yarn", "qwen2", "qwen3"],
)  # fmt: skip
def test_logits_are_those_of_transformers(tmp_path, run, family, settings, more):
    model = random_model(family, **settings)
    assert_same_logits(converted(tmp_path, run, family=family, model=model, **more), model)


def test_llama3_scaling_is_found_in_its_divisors(tmp_path, run):
    rope = dict(
        rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192, rope_theta=500000.0,
    )  # fmt: skip
    model = random_model("llama", rope_parameters=rope, max_position_embeddings=131072)
    plain = rope["rope_theta"] ** (-torch.arange(0, 16, 2) / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq).float().numpy()
    assert divisors.max() > 30
    writer = write_gguf(tmp_path / "model.gguf", "llama", model)
    writer.add_tensor("rope_freqs.weight", divisors)
    finished(writer)
    assert run("gguf", tmp_path / "model.gguf", tmp_path / "out")[0] == 0
    ours = checkpoint.load_model(tmp_path / "out")
    assert ours.config.rope_scaling == "llama3:32:1:4:8192"
    assert_same_logits(ours, model)
    writer = write_gguf(tmp_path / "odd.gguf", "llama", model)
    writer.add_tensor("rope_freqs.weight", divisors * np.float32(1.1))
    finished(writer)
    code, (error,) = run("gguf", tmp_path / "odd.gguf", tmp_path / "odd")
    assert code == 1 and "not the rotary scaling of Llama 3.1 or 3.2" in error


@pytest.mark.parametrize("kind, dtype", [("Q8_0", None), ("Q4_1", "float32"), ("F16", None), ("BF16", None)])
def test_quantised_weights_are_those_that_gguf_gives(tmp_path, run, kind, dtype):
    kind = gguf.GGMLQuantizationType[kind]
    model = random_model("llama")
    options = ["--dtype", dtype] if dtype else []
    ours = converted(tmp_path, run, *options, family="llama", model=model, quantise=kind)
    weight = model.model.layers[1].mlp.down_proj.weight
    rounded = gguf.dequantize(gguf.quantize(weight.detach().numpy(), kind), kind)
    stored = {"Q8_0": torch.bfloat16, "Q4_1": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind.name]
    expected = torch.from_numpy(rounded.copy()).to(stored)
    assert torch.equal(ours.layers[1].mlp.down_proj.weight, expected)


@pytest.mark.parametrize(
    "pre, pattern, nfc",
    [("gpt-2", None, False), ("smollm", "digits", False), ("llama-bpe", LLAMA3_PATTERN, False),
     ("qwen2", QWEN2_PATTERN, True)],
)  # fmt: skip
def test_the_tokenizer_is_the_one_it_was(tmp_path, run, pre, pattern, nfc):
    options = dict(digits=True) if pattern == "digits" else dict(nfc=nfc)
    library = byte_level(None if pattern == "digits" else pattern, **options)
    converted(tmp_path, run, family="llama", model=random_model("llama"), tokenizer=library, pre=pre)
    tokenizer = checkpoint.load_tokenizer(tmp_path / "out")
    assert tokenizer.pattern is not None
    text = CHAT + "it's 12345 A\u030a  \n\n x"
    assert tokenizer.encode_with_specials(text) == library.encode(text).ids
    assert tokenizer.chat_template == TEMPLATE and tokenizer.stop_ids == {tokenizer.eot_id}
    assert tokenizer.special_tokens["<|bos|>"] == tokenizer.bos_id
    assert tokenizer.add_bos == (pre == "llama-bpe")


def test_a_sentencepiece_tokenizer_is_the_one_it_was(tmp_path, run):
    library = sentencepiece_like()
    model = random_model("llama", vocab_size=library.get_vocab_size())
    converted(tmp_path, run, family="llama", model=model, tokenizer=library)
    tokenizer = checkpoint.load_tokenizer(tmp_path / "out")
    text = "import x\n  def 👍🏽 "
    assert tokenizer.encode_prompt(text) == [1, *library.encode(text).ids]
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.eot_id == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"expert_count": 8}, r"does not know: llama.expert_count=8"),
        ({"attention.head_count_kv": [2, 4]}, "layers that differ"),
        ({"attention.head_count_kv": 3}, "n_kv_head=3 does not divide"),
        ({"rope.dimension_count": 8}, "not the head_dim of 16"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, "'longrope' is not supported"),
        ({"block_count": None}, "lacks llama.block_count"),
        ({"block_count": 3}, "lacks 9 of its"),
        ({"block_count": 1}, "its configuration does not know"),
        ({"block_count": 10**6}, "too few for 1000000 layers"),
        ({"attention.head_count": 8}, "has the shape"),
        ({"pre": "tekken"}, "cuts text by 'tekken'"),
        ({"drop": ["model.layers.1.mlp.up_proj.weight"]}, "lacks 1 of its"),
        ({"drop": ["model.embed_tokens.weight"]}, "no token_embd.weight"),
    ],
)
def test_what_the_decoder_cannot_be_is_refused_by_name(tmp_path, run, arguments, message):
    finished(write_gguf(tmp_path / "model.gguf", "llama", random_model("llama"), **arguments))
    code, (error,) = run("gguf", tmp_path / "model.gguf", tmp_path / "out")
    assert code == 1 and error.startswith("error: ")
    assert message in error
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_other_architectures_and_tensors_are_refused(tmp_path, run):
    finished(write_gguf(tmp_path / "model.gguf", "gemma", random_model("llama")))
    assert "'gemma' is not one of llama, qwen2, qwen3" in run("gguf", tmp_path / "model.gguf", tmp_path / "out")[1][0]
    writer = write_gguf(tmp_path / "odd.gguf", "llama", random_model("llama"))
    writer.add_tensor("blk.0.ffn_gate_inp.weight", np.ones((8, DIM), np.float32))
    finished(writer)
    error = run("gguf", tmp_path / "odd.gguf", tmp_path / "out")[1][0]
    assert "no place for: blk.0.ffn_gate_inp.weight" in error
    damaged = random_model("llama")
    damaged.model.norm.weight.data[3] = float("nan")
    finished(write_gguf(tmp_path / "nan.gguf", "llama", damaged))
    assert "NaN" in run("gguf", tmp_path / "nan.gguf", tmp_path / "out")[1][0]
    assert not (tmp_path / "out").exists()


def test_files_that_break_off_are_refused(tmp_path, run):
    finished(write_gguf(tmp_path / "model.gguf", "llama", random_model("llama")))
    whole = (tmp_path / "model.gguf").read_bytes()
    for size in (0, 3, 10, 500, 10_000, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        code, (error,) = run("gguf", tmp_path / "cut.gguf", tmp_path / "out")
        assert code == 1 and ("breaks off" in error or "not a GGUF file" in error)
    (tmp_path / "cut.gguf").write_bytes(whole.replace(b"gpt-2", b"gpt\xff2"))
    code, (error,) = run("gguf", tmp_path / "cut.gguf", tmp_path / "out")
    assert code == 1 and "tokenizer.ggml.pre is not UTF-8 text" in error
    assert run("gguf", tmp_path / "none.gguf", tmp_path / "out")[0] == 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="exists already"):
        convert.main(["gguf", str(tmp_path / "model.gguf"), str(tmp_path)])


def test_a_padded_vocabulary(tmp_path, run):
    """Qwen's embedding has more rows than its tokenizer has ids; llama.cpp fills up with unused tokens, not always."""
    library = byte_level(None)
    model = random_model("qwen2", vocab_size=960)
    ours = converted(tmp_path, run, family="qwen2", model=model, tokenizer=library, unused=["[PAD903]", "[PAD904]"])
    assert ours.config.vocab_size == 960
    tokenizer = checkpoint.load_tokenizer(tmp_path / "out")
    assert tokenizer.vocab_size == library.get_vocab_size() + 2 and tokenizer.pattern is not None
    assert tokenizer.encode("[PAD903]") == library.encode("[PAD903]").ids and tokenizer.decode([903, 904]) == ""
