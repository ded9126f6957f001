"""llama2.c checkpoints: files written here from models of transformers, and the real stories260K where it is given."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_hf_tokenizer import sentencepiece_like

import checkpoint
import convert
from data import UserError
from engine import Engine, Sampling

LAYERS, HEADS, KV_HEADS, DIM, SEQ = 2, 4, 2, 32, 40


def tokenizer_file(path, library, size=None):
    """As llama2.c's tokenizer.py writes it: spaces for U+2581, and line ends about the names of bos and eos."""
    vocab = library.get_vocab()
    pieces = sorted(vocab, key=vocab.__getitem__)[:size]
    content = struct.pack("<i", max(len(piece.encode()) for piece in pieces))
    for i, piece in enumerate(pieces):
        text = f"\n{piece}\n" if i in (1, 2) else piece.replace("▁", " ")
        content += struct.pack("<fi", -float(i), len(text.encode())) + text.encode()
    path.write_bytes(content)
    return path


def model_file(path, model):
    """llama2.c's legacy_export: q and k rows in neighbouring pairs."""
    config, layers = model.config, model.model.layers
    tied = config.tie_word_embeddings
    shape = (DIM, config.intermediate_size, LAYERS, HEADS, config.num_key_value_heads)
    parts = [model.model.embed_tokens.weight]
    parts += [layer.input_layernorm.weight for layer in layers]
    for name, heads in (("q_proj", HEADS), ("k_proj", config.num_key_value_heads)):
        weights = [getattr(layer.self_attn, name).weight for layer in layers]
        parts += [w.reshape(heads, 2, -1, DIM).transpose(1, 2).reshape(w.shape) for w in weights]
    parts += [layer.self_attn.v_proj.weight for layer in layers]
    parts += [layer.self_attn.o_proj.weight for layer in layers]
    parts += [layer.post_attention_layernorm.weight for layer in layers]
    for name in ("gate_proj", "down_proj", "up_proj"):
        parts += [getattr(layer.mlp, name).weight for layer in layers]
    parts += [model.model.norm.weight, torch.zeros(SEQ * DIM // HEADS)]
    parts += [] if tied else [model.lm_head.weight]
    data = np.concatenate([part.detach().flatten().numpy() for part in parts]).astype("<f4")
    path.write_bytes(struct.pack("<7i", *shape, config.vocab_size * (1 if tied else -1), SEQ) + data.tobytes())
    return path


@pytest.fixture(scope="module")
def library():
    return sentencepiece_like()


def random_model(library, tied, kv_heads=KV_HEADS):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=library.get_vocab_size(),
        hidden_size=DIM,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    return model.eval()


def run(model, tokenizer, out, *options):
    convert.main(["llama2c", str(model), "--tokenizer", str(tokenizer), str(out), *options])


@pytest.mark.parametrize("tied, kv_heads", [(True, 2), (False, 1), (True, 4)])
def test_logits_are_those_of_transformers(tmp_path, library, tied, kv_heads):
    model = random_model(library, tied, kv_heads)
    run(model_file(tmp_path / "m.bin", model), tokenizer_file(tmp_path / "t.bin", library), tmp_path / "out")
    ours = checkpoint.load_model(tmp_path / "out")
    tokens = torch.randint(0, library.get_vocab_size(), (2, SEQ), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (ours(tokens) - model(tokens).logits).abs().max() < 1e-4
    assert ours.config.tie_embeddings == tied and ours.config.block_size == SEQ
    tokenizer = checkpoint.load_tokenizer(tmp_path / "out")
    text = "def f(x):\n  return '👍🏽'"
    assert tokenizer.encode(text) == library.encode(text).ids and tokenizer.decode(library.encode(text).ids) == text
    assert tokenizer.encode_prompt("") == [1] and tokenizer.stop_ids == {1, 2}


def test_files_that_do_not_fit_are_refused(tmp_path, library):
    model = model_file(tmp_path / "m.bin", random_model(library, True))
    tokens = tokenizer_file(tmp_path / "t.bin", library)
    whole, table = model.read_bytes(), tokens.read_bytes()
    before = sorted(tmp_path.iterdir())

    def refused(message, m=whole, t=table):
        model.write_bytes(m)
        tokens.write_bytes(t)
        with pytest.raises(UserError, match=message):
            run(model, tokens, tmp_path / "out")
        assert sorted(tmp_path.iterdir()) == before

    refused("bytes, and a model of the shape in its header", m=whole[:-4])
    refused("bytes, and a model of the shape in its header", m=whole + b"\0")
    refused("legacy layout", m=whole[:20])
    refused("legacy layout", m=b"ak42" + whole[4:])
    refused("legacy layout", m=b"once upon a time, there was no model")
    refused("n_kv_head=3 does not divide", m=whole[:16] + struct.pack("<i", 3) + whole[20:])
    nan = np.frombuffer(whole[28:], "<f4").copy()
    nan[5] = np.nan
    refused("NaN", m=whole[:28] + nan.tobytes())
    refused("breaks off or is damaged at token", t=table[:-1])
    refused("breaks off or is damaged at token 4", t=table[:60] + b"\xff" * 40 + table[100:])
    refused("more than the", t=table + table[-20:])
    tokenizer_file(tokens, library, size=400)
    refused("breaks off or is damaged at token 400", t=tokens.read_bytes())
    refused("256 bytes as ids 3 to 258", t=table.replace(b"<0x41>", b"<0y41>"))
    with pytest.raises(UserError, match="cannot read"):
        run(tmp_path / "none.bin", tokens, tmp_path / "out")


# The real model, and what it wrote: the text of `./run stories260K.bin -z tok512.bin -t 0` (run.c of llama2.c).
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, let's go to the park.\" "
    "Lily was sad and didn't know what to do. She said, \"I want to play with your ball, but I can't find it.\"\nLily "
    "was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know what to do.\"\nLily didn't want to "
    "help her mom, so she said, \"I'm sorry, mom. I didn't know what to do.\" Her mom said, \"Don't worry, Lily. We "
    "can help you."
)


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    if not os.environ.get("STORIES260K"):
        pytest.skip("set STORIES260K to a folder with stories260K.bin and tok512.bin of llama2.c")
    folder, out = Path(os.environ["STORIES260K"]), tmp_path_factory.mktemp("stories") / "out"
    run(folder / "stories260K.bin", folder / "tok512.bin", out)
    return checkpoint.load_model(out), checkpoint.load_tokenizer(out)


def test_stories260k_tells_its_story(stories):
    model, tokenizer = stories
    ids = tokenizer.encode(STORY)
    assert len(ids) == 256 and tokenizer.decode(ids) == STORY
    completion = Engine(model, tokenizer).complete([""], Sampling(temperature=0.0), 256)[0]
    assert completion.token_ids == ids
    tokens = torch.tensor([[tokenizer.bos_id, *ids]])
    logits = model(tokens)
    assert torch.allclose(logits[0, 0, :4], torch.tensor([-6.22291, 8.40434, -6.22374, -6.22254]), atol=1e-4)
    assert F.cross_entropy(logits[0, :-1], tokens[0, 1:]).item() == pytest.approx(0.4573, abs=1e-4)
