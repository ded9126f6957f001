"""`compare.py eval`: the loss of a text is what the definition says, window by window, for any tokenizer."""

import json
import math
import shutil
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import checkpoint
import compare
from data import UserError
from data.tokenizer import ByteTokenizer, CharTokenizer
from evaluation import strided_windows, text_loss
from model import ModelConfig, Transformer
from tests.chat_models import chat_tokenizer, write_chat_model
from tests.conftest import ROOT

TEXT = (ROOT / "LICENSE").read_text(encoding="utf-8")[:400] + " é🙂"


def write_model(folder, tokenizer, **shape):
    """A model whose logits differ from position to position: every weight random, the head too."""
    shape = {
        "n_layer": 2,
        "n_head": 2,
        "n_kv_head": 1,
        "n_embd": 16,
        "block_size": 64,
        "tie_embeddings": False,
        **shape,
    }
    config = ModelConfig(vocab_size=tokenizer.vocab_size, **shape)
    model, noise = Transformer(config), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=noise)
    checkpoint.save(folder, {"step": 0, "config": asdict(config)}, model, [], tokenizer)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    write_model(folder / "bytes", ByteTokenizer())
    write_model(folder / "chars", CharTokenizer(TEXT), block_size=32)
    return folder


def by_hand(folder, text, window, stride):
    """Nats of the text, token by token: each alone, with the context that the window which counts it gives it."""
    model, tokenizer = checkpoint.load_model(folder), checkpoint.load_tokenizer(folder)
    first = tokenizer.eot_id if tokenizer.bos_id is None else tokenizer.bos_id
    ids, nats, contexts = [first, *tokenizer.encode(text)], 0.0, []
    for position in range(1, len(ids)):
        windows_before = 0 if position <= window else math.ceil((position - window) / stride)
        context = ids[windows_before * stride : position]
        contexts.append(len(context))
        logits = model(torch.tensor([context]))[0, -1].double()
        nats -= F.log_softmax(logits, -1)[ids[position]].item()
    return nats, contexts


@pytest.mark.parametrize("window, stride", [(64, 64), (64, 32), (48, 5), (7, 1), (1, 1)])
@pytest.mark.parametrize("name", ["bytes", "chars"])
def test_loss_is_the_definition(runs, name, window, stride):
    window = min(window, 32) if name == "chars" else window
    stride = min(window, stride)
    text = TEXT[:150] + TEXT[-2:]
    nats, contexts = by_hand(runs / name, text, window, stride)
    model, tokenizer = checkpoint.load_model(runs / name), checkpoint.load_tokenizer(runs / name)
    for batch_size in (1, 5):
        loss = text_loss(model, tokenizer, text, window, stride, batch_size)
        assert loss.n_tokens == len(contexts) == len(tokenizer.encode(text))
        assert loss.nats_per_token == pytest.approx(nats / loss.n_tokens, rel=1e-5)
        assert loss.n_bytes == len(text.encode("utf-8"))
        assert loss.bits_per_byte == pytest.approx(nats / math.log(2) / loss.n_bytes, rel=1e-5)
        assert loss.perplexity == pytest.approx(math.exp(loss.nats_per_token))
    # The first context token is the one that begins a text, so context counts it.
    assert min(contexts[window:]) >= window - stride + 1 and max(contexts) <= window


@pytest.mark.parametrize("n_tokens", [1, 5, 8, 9, 16, 17, 100])
@pytest.mark.parametrize("window, stride", [(8, 8), (8, 3), (8, 1), (1, 1)])
def test_windows_count_each_token_once(n_tokens, window, stride):
    windows = strided_windows(n_tokens, window, stride)
    counted = [token for start, stop, first in windows for token in range(first, stop)]
    assert counted == list(range(n_tokens))
    assert all(stop - start <= window and stop <= n_tokens for start, stop, _ in windows)
    assert all(first - start >= window - stride for start, _, first in windows[1:])


def test_a_text_begins_with_bos_where_there_is_one(tmp_path):
    tokenizer = chat_tokenizer()
    folder = write_model(tmp_path / "chat", tokenizer)
    assert tokenizer.bos_id == 1 != tokenizer.eot_id
    nats, _ = by_hand(folder, "hello", 64, 64)
    loss = text_loss(checkpoint.load_model(folder), tokenizer, "hello", 64, 64)
    assert loss.nats_per_token * loss.n_tokens == pytest.approx(nats, rel=1e-5)


def test_one_table_for_several_checkpoints(runs, capsys):
    paths = [str(runs / "bytes"), str(runs / "chars" / "last")]
    words = ["eval", *paths, "--text", str(runs / "text.txt"), "--device", "cpu"]
    compare.main(words)
    first, head, *rows = capsys.readouterr().out.splitlines()
    n_bytes = len(TEXT.encode("utf-8"))
    assert first.endswith(f"{n_bytes} bytes; windows of 32 tokens, 16 apart; float32")
    assert head.split() == ["checkpoint", "tokens", "nats/token", "perplexity", "bits/byte"]
    compare.main([*words, "--json", "--batch_size", "3"])
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == len(objects) == 2 and len({len(line) for line in [head, *rows]}) == 1
    for row, found, name in zip(rows, objects, ("bytes", "chars"), strict=True):
        path, tokens, nats, perplexity, bits = row.split()
        assert path == found["checkpoint"] and name in path
        assert int(tokens) == found["n_tokens"] == len(checkpoint.load_tokenizer(runs / name).encode(TEXT))
        assert float(nats) == pytest.approx(found["nats_per_token"], abs=1e-4)
        assert float(perplexity) == pytest.approx(found["perplexity"], rel=1e-3)
        assert float(bits) == pytest.approx(found["bits_per_byte"], abs=1e-4)
        assert (found["window"], found["stride"], found["n_bytes"], found["dtype"]) == (32, 16, n_bytes, "float32")
        total = found["nats_per_token"] * found["n_tokens"]
        assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / n_bytes)


def test_a_bf16_checkpoint_and_a_model_that_knows_nothing(tmp_path, capsys):
    """Equal logits: ln(vocab_size) a token, in any dtype."""
    tokenizer = chat_tokenizer()
    path = write_chat_model(tmp_path / "chat", tokenizer, tie_embeddings=False)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    for dtype in ("float32", "bfloat16"):
        words = ["eval", str(path), "--text", str(tmp_path / "text.txt"), "--dtype", dtype, "--json"]
        compare.main([*words, "--device", "cpu"])
        found = json.loads(capsys.readouterr().out)
        assert found["nats_per_token"] == pytest.approx(math.log(tokenizer.vocab_size), abs=1e-3)
        assert found["dtype"] == dtype


def test_a_tokenizer_that_loses_text_is_named(tmp_path, capsys):
    """The bytes stay the text's: bits per byte would otherwise favour who drops what is hard."""
    tokenizer = chat_tokenizer(missing="é")
    path = write_chat_model(tmp_path / "chat", tokenizer)
    for text, noted in (("plain", False), ("\u9280 is e9 8a 80", True)):
        (tmp_path / "text.txt").write_text(text, encoding="utf-8")
        compare.main(["eval", str(path), "--text", str(tmp_path / "text.txt"), "--json", "--device", "cpu"])
        out, err = capsys.readouterr()
        assert json.loads(out)["n_bytes"] == len(text.encode("utf-8"))
        assert (f"the tokenizer of {path} loses some of this text" in err) == noted


def test_weights_that_are_not_numbers_have_no_loss(runs, tmp_path):
    folder = shutil.copytree(runs / "bytes", tmp_path / "bytes")
    file = folder / "last" / "model.safetensors"
    weights = load_file(file)
    weights["norm.weight"][0] = math.nan
    save_file(weights, file)
    with pytest.raises(UserError, match="the loss of .*bytes.* is nan: its weights are damaged"):
        compare.main(["eval", str(folder), "--text", str(runs / "text.txt"), "--json", "--device", "cpu"])


def test_refusals(runs, tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    run, text = str(runs / "bytes"), str(runs / "text.txt")
    for words, sentence in (
        ([run, "--text", text, "--window", "65"], "window=65 is past the block_size of .*bytes.*, 64: use --window 64"),
        ([run, "--text", text, "--window", "8", "--stride", "9"], "stride=9 must be .* at most window=8"),
        ([run, "--text", text, "--stride", "0"], "must be a whole number, at least 1"),
        ([run, "--text", str(tmp_path / "empty.txt")], "the text is empty"),
        ([run, "--text", str(tmp_path / "latin.txt")], "is not UTF-8 text: byte 3 is 0xe9"),
        ([run, "--text", str(tmp_path / "none.txt")], "cannot read .*none.txt: No such file"),
        ([str(tmp_path), "--text", text], "is not a checkpoint or a run"),
        ([run], "--text"),
        ([], "required: CHECKPOINT, --text"),
    ):
        with pytest.raises(UserError, match=sentence) as error:
            compare.main(["eval", *words])
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="COMMAND"):
        compare.main([])
