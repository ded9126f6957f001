"""Runs that start from given weights: whose shape counts, whose tokenizer, and what a fine-tuned chat then says."""

import io
import json
import sys
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import checkpoint
import generate
import train
from config import build, init_config
from data import UserError, open_dataset
from data.loader import IGNORE_INDEX, Loader
from data.prepare import main as prepare_main
from model import ModelConfig
from optim import make_optimizers
from parallel import World
from rope import original_length
from runlog import read_metrics
from tests.chat_models import CHATML, chat_tokenizer, write_chat_model, write_chats

PACE = """
max_steps = 4
tokens_per_step = 256
micro_batch_size = 4
block_size = 32
warmup_steps = 0
eval_interval = 2
device = "cpu"
"""
TWO_CHATS = [["Who are you?", "A small decoder."], ["What is 2 + 2?", "4, says 🙂"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint in bf16, as convert.py writes one. Its block_size is 64."""
    return write_chat_model(tmp_path_factory.mktemp("model"), tie_embeddings=False)


@pytest.fixture(scope="module")
def text(model, tmp_path_factory):
    """A dataset of plain text with the model's tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    prepare_main(["files", str(folder / "a.txt"), "--tokenizer", str(model), "--out", str(folder / "shards")])
    return folder / "shards"


@pytest.fixture
def tune(run_train, model, text, tmp_path):
    """Runs train.py from `model` on `text` into tmp_path/run -> (exit code, stdout, stderr)."""
    (tmp_path / "pace.py").write_text(PACE, encoding="utf-8")

    def run(*words):
        settings = [f"--init_from={model}", f"--dataset={text}", f"--out_dir={tmp_path / 'run'}"]
        return run_train(tmp_path / "pace.py", *settings, *words)

    return run


def test_the_first_loss_is_the_checkpoints(tune, model, text, tmp_path):
    """With a learning rate that changes nothing, what is validated and saved is the checkpoint in fp32."""
    weights = load_file(model / "model.safetensors")
    noise = torch.Generator().manual_seed(3)
    for tensor in weights.values():
        tensor += torch.randn(tensor.shape, generator=noise).to(tensor.dtype) / 8
    other = tmp_path / "other"
    other.mkdir()
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    save_file(weights, other / "model.safetensors")
    code, out, err = tune(f"--init_from={other}", "--learning_rate=1e-300", "--weight_decay=0", "--max_steps=2")
    assert code == 0, err
    saved = load_file(tmp_path / "run/last/model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    assert saved.keys() == weights.keys() and all(torch.equal(saved[name], weights[name].float()) for name in weights)
    exact = checkpoint.load_model(other, dtype=torch.float32)
    inputs, targets = Loader(open_dataset(text).train, 32, 8, 1337, "cpu", 8).micro_batch(0, 0)
    with torch.no_grad():
        assert read_metrics(tmp_path / "run/metrics.jsonl")[0]["loss"] == pytest.approx(exact(inputs, targets).item())


def test_shape_is_the_checkpoints_and_block_size_is_free(tune, tmp_path):
    assert tune()[0] == 0
    config = checkpoint.load_state(tmp_path / "run/last")["config"]
    assert (config["n_layer"], config["n_embd"], config["n_kv_head"], config["block_size"]) == (2, 32, 2, 32)
    assert config["tie_embeddings"] is False and "init_from" in config
    assert checkpoint.load_tokenizer(tmp_path / "run").chat_template == CHATML


def test_who_contradicts_the_checkpoint_is_refused(tune, tmp_path, model):
    for word, sentence in (
        ("--n_layer=3", f"n_layer=3 contradicts init_from={model}, whose weights have n_layer=2: leave n_layer out"),
        ("--n_kv_head=4", "n_kv_head=4 contradicts"),
        ("--tie_embeddings", "tie_embeddings=true contradicts"),
        ("--init_from=nowhere", "nowhere does not exist"),
        ("--init_from=", "init_from names no run or checkpoint: it is empty"),
    ):
        code, _, err = tune(word)
        assert code == 1 and sentence in err and "Traceback" not in err, err
        assert not (tmp_path / "run").exists()
    assert tune("--n_layer=2", "--dropout=0.1", "--max_steps=1")[0] == 0  # what agrees may be said


def test_a_preset_is_held_to_it_too(model):
    shape = {"n_layer": 2, "n_embd": 32, "block_size": 64, "dropout": 0.0}
    with pytest.raises(UserError, match="n_embd=48 contradicts init_from=x, whose weights have n_embd=32"):
        init_config("x", shape, {"n_embd": 48, "n_layer": 2})
    config = init_config("x", shape, {"n_embd": None, "micro_batch_size": 4, "block_size": 128, "dropout": 0.2})
    assert (config.model.n_embd, config.model.block_size, config.model.dropout) == (32, 128, 0.2)
    assert build({}).init_from is None


def test_the_dataset_must_have_its_tokenizer(tune, dataset, model, tmp_path):
    code, _, err = tune(f"--dataset={dataset}")
    assert code == 1 and f"has another tokenizer than init_from={model}" in err
    assert f"python -m data.prepare files PATH... --tokenizer {model}" in err
    assert not (tmp_path / "run").exists()


def test_resume_does_without_the_checkpoint(tmp_path, run_train, text):
    """And goes on bit for bit; another init_from is refused."""
    start = write_chat_model(tmp_path / "start", tie_embeddings=False).parent
    (tmp_path / "pace.py").write_text(PACE, encoding="utf-8")
    words = [tmp_path / "pace.py", f"--dataset={text}", f"--init_from={start}", "--schedule=constant"]
    assert run_train(*words, f"--out_dir={tmp_path / 'whole'}")[0] == 0
    assert run_train(*words, f"--out_dir={tmp_path / 'run'}", "--max_steps=2")[0] == 0
    start.rename(tmp_path / "gone")
    code, _, err = run_train("--resume", tmp_path / "run", "--max_steps=4", "--init_from=elsewhere")
    assert code == 1 and "cannot change init_from" in err
    code, _, err = run_train("--resume", tmp_path / "run", "--max_steps=4")
    assert code == 0, err
    weights = [(tmp_path / name / "last/model.safetensors").read_bytes() for name in ("whole", "run")]
    assert weights[0] == weights[1]


def test_loss_of_a_chat_is_that_of_its_answers(model, tmp_path):
    """A step's loss, divided into micro-batches or not, is the mean over the answers' tokens, computed by hand."""
    chats = write_chats(tmp_path / "talk.jsonl", [[f"{i}?", "x" * (1 + 3 * i % 11), "So?", "Yes."] for i in range(20)])
    prepare_main(["files", str(chats), "--chat", "--tokenizer", str(model), "--out", str(tmp_path / "shards")])
    train_split = open_dataset(tmp_path / "shards").train
    losses = []
    for micro_batch_size in (8, 2, 1):
        loader = Loader(train_split, 32, 8, 5, "cpu", micro_batch_size)
        config = build({"block_size": 32, "tokens_per_step": 256, "micro_batch_size": micro_batch_size, "n_embd": 32})
        tuned = checkpoint.load_model(model, dtype=torch.float32).requires_grad_(True)
        with torch.no_grad():
            tuned.head.weight.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
            nats, counted = 0.0, 0
            for m in range(8 // micro_batch_size):
                inputs, targets = loader.micro_batch(3, m)
                chosen = F.log_softmax(tuned(inputs).double(), -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
                if loader.weight(3, m) > 0:  # else its one target is there to keep the mean finite
                    nats -= chosen[targets != IGNORE_INDEX].sum().item()
                    counted += int((targets != IGNORE_INDEX).sum())
        optimizers = make_optimizers(tuned, config)
        loss, norm = train.update_weights(tuned, optimizers, loader, 3, 1e-3, config, World())
        assert loss.item() == pytest.approx(nats / counted, rel=1e-5)
        losses.append((loss.item(), norm.item(), counted))
    assert 0 < losses[0][2] < 8 * 32 / 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A run that learnt two chats by heart."""
    folder = tmp_path_factory.mktemp("tuned")
    start = write_chat_model(folder / "start", n_embd=64, n_layer=2, block_size=128, tie_embeddings=False)
    chats = write_chats(folder / "talk.jsonl", [*TWO_CHATS * 10, *TWO_CHATS])
    prepare_main(["files", str(chats), "--chat", "--tokenizer", str(start), "--out", str(folder / "shards")])
    settings = {
        "dataset": folder / "shards", "out_dir": folder / "run", "init_from": start, "device": "cpu", "doc_mask": True,
        "block_size": 128, "micro_batch_size": 4, "tokens_per_step": 512, "max_steps": 150, "eval_interval": 150,
        "learning_rate": 5e-3, "warmup_steps": 5, "sample_prompt": "none",
    }  # fmt: skip
    train.main([f"--{name}={value}" for name, value in settings.items()])
    return folder / "run"


def test_a_fine_tuned_model_answers(tuned, capsys):
    last = read_metrics(tuned / "metrics.jsonl")[-1]
    assert last["val_loss"] < 0.01 and last["loss"] < 0.1  # a window may begin behind its question
    for question, reply in TWO_CHATS:
        words = ["--chat", "--checkpoint", str(tuned), "--prompt", question, "--temperature", "0", "--device", "cpu"]
        generate.main(words)
        assert capsys.readouterr().out.splitlines()[0] == reply
        generate.main([*words, "--json"])
        assert json.loads(capsys.readouterr().out.splitlines()[0])["text"] == reply


def test_a_conversation_keeps_its_history(tuned, capsys, monkeypatch):
    asked = []
    real = generate.prompt_ids
    monkeypatch.setattr(
        generate, "prompt_ids", lambda tokenizer, messages: asked.append(messages) or real(tokenizer, messages)
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Who are you?\nWhat is 2 + 2?\n")))
    generate.main(
        ["--chat", "--system", "Be brief.", "--checkpoint", str(tuned), "--temperature", "0", "--device", "cpu"]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == TWO_CHATS[0][1]
    system = {"role": "system", "content": "Be brief."}
    first = [system, {"role": "user", "content": TWO_CHATS[0][0]}]
    answered = {"role": "assistant", "content": TWO_CHATS[0][1]}
    assert asked[1:] == [first, [*first, answered, {"role": "user", "content": TWO_CHATS[1][0]}]]


def test_an_interrupted_turn_is_forgotten(tuned, monkeypatch):
    args = generate.build_parser().parse_args(["--chat", "--checkpoint", str(tuned), "--seed", "1", "--device", "cpu"])
    chat = generate.Chat(generate.load(args), args, generate.Sampling(temperature=0))
    chat.reply("Who are you?", 1)
    before = list(chat.messages)
    assert [message["role"] for message in before] == ["user", "assistant"]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        chat.reply("What is 2 + 2?", 2)
    assert chat.messages == before


def test_a_turn_that_does_not_fit_is_forgotten(tuned, capsys, monkeypatch):
    lines = "x" * 300 + "\nWho are you?\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    generate.main(["--chat", "--checkpoint", str(tuned), "--temperature", "0", "--device", "cpu"])
    out, err = capsys.readouterr()
    assert "block_size of 128" in err and out.splitlines()[0] == TWO_CHATS[0][1]


def test_what_cannot_be_a_chat(tuned, tmp_path):
    plain = write_chat_model(tmp_path / "plain", chat_tokenizer(None))
    strict = write_chat_model(tmp_path / "strict", chat_tokenizer("{{ raise_exception('no system, please') }}"))
    for words, sentence in (
        (["--chat", "--checkpoint", str(plain)], "has no chat template"),
        (["--chat", "--checkpoint", str(strict), "--system", "x"], "refuses this chat: no system, please"),
        (["--system", "x", "--checkpoint", str(tuned)], "add --chat"),
        (["--chat", "--num_samples", "2", "--checkpoint", str(tuned)], "goes on from one answer"),
    ):
        with pytest.raises(UserError, match=sentence):
            generate.main([*words, "--device", "cpu"])


def test_rope_scaling_counts_from_the_checkpoints_length():
    shape = asdict(ModelConfig(vocab_size=64, n_layer=1, n_head=2, n_embd=32, block_size=64))
    stretched = init_config("x", shape, {"rope_scaling": "yarn:4"}).model
    assert stretched.block_size == 256 and original_length(stretched) == 64
    short = init_config("x", shape, {"rope_scaling": "yarn:4", "block_size": 128}).model
    assert short.block_size == 128 and original_length(short) == 64
    with pytest.raises(UserError, match="rope_scaling"):
        init_config("x", shape, {"rope_scaling": "nonsense:4"})


def test_rope_scaling_at_generation(tuned, capsys):
    """Twice the positions: what was too long for block_size fits; the words are checked by the model's own rules."""
    words = ["--checkpoint", str(tuned), "--prompt", "x" * 150, "--max_new_tokens", "2", "--device", "cpu"]
    with pytest.raises(UserError, match="block_size of 128"):
        generate.main(words)
    generate.main([*words, "--rope_scaling", "linear:2"])
    assert "2 new tokens" in capsys.readouterr().out
    with pytest.raises(UserError, match="rope_scaling"):
        generate.main([*words, "--rope_scaling", "nonsense:2"])
