"""Checkpoints come back whole, whatever happens while they are written, and say what is wrong when they do not."""

import errno
import json
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoint
from config import build
from data import UserError
from data.files import place_of_old
from data.tokenizer import ByteTokenizer
from model import Transformer
from optim import make_optimizers
from tests.conftest import ROOT


def make_run(optimizer="muon", **settings):
    values = dict(vocab_size=257, n_layer=1, n_head=2, n_kv_head=1, n_embd=16, block_size=8, optimizer=optimizer)
    config = build(values | settings)
    model = Transformer(config.model).init_weights(torch.Generator().manual_seed(0))
    return config, model, make_optimizers(model, config)


def take_step(model, optimizers, seed):
    tokens = torch.randint(257, (2, 9), generator=torch.Generator().manual_seed(seed))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def save(run, step, config, model, optimizers, **options):
    state = {"step": step, "seconds": 0.0, "config": config.flat()}
    checkpoint.save(run, state, model, optimizers, ByteTokenizer(), **options)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_training_goes_on_bit_for_bit(tmp_path, optimizer, tie_embeddings):
    config, model, optimizers = make_run(optimizer, tie_embeddings=tie_embeddings)
    take_step(model, optimizers, 1)
    save(tmp_path, 1, config, model, optimizers)
    take_step(model, optimizers, 2)

    _, again, others = make_run(optimizer, tie_embeddings=tie_embeddings)
    checkpoint.load_weights(tmp_path / "last", again)
    checkpoint.load_optimizers(tmp_path / "last", again, others)
    take_step(again, others, 2)
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_load_model_from_a_run_and_from_a_checkpoint(tmp_path):
    config, model, optimizers = make_run()
    save(tmp_path, 1, config, model, optimizers, best=True)
    take_step(model, optimizers, 1)
    save(tmp_path, 2, config, model, optimizers)
    assert checkpoint.load_state(checkpoint.resolve(tmp_path))["step"] == 1  # the best one
    assert checkpoint.load_state(checkpoint.resolve(tmp_path, prefer="last"))["step"] == 2
    loaded = checkpoint.load_model(tmp_path / "last")
    assert torch.equal(loaded.head.weight, model.head.weight) and not loaded.training
    assert checkpoint.load_model(tmp_path, dtype=torch.bfloat16).embed.weight.dtype == torch.bfloat16
    assert checkpoint.load_tokenizer(tmp_path).name == "bytes"


def test_numbered_checkpoints_are_kept_up_to_a_count(tmp_path):
    config, model, optimizers = make_run()
    for step in (10, 20, 30):
        save(tmp_path, step, config, model, optimizers, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "step_000020", "step_000030"]
    assert checkpoint.load_state(tmp_path / "step_000020")["step"] == 20


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    config, model, optimizers = make_run()
    save(tmp_path, 1, config, model, optimizers)

    def no_space(tensors, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", no_space)
    with pytest.raises(UserError, match="No space left on device; the earlier checkpoints there are intact"):
        save(tmp_path, 2, config, model, optimizers)
    assert [p.name for p in tmp_path.iterdir()] == ["last"]
    assert checkpoint.load_state(tmp_path / "last")["step"] == 1
    checkpoint.load_model(tmp_path)


def test_a_kill_between_the_two_renames_is_survived(tmp_path):
    config, model, optimizers = make_run()
    save(tmp_path, 1, config, model, optimizers)
    (tmp_path / "last").rename(place_of_old(tmp_path / "last"))  # where `move_into_place` was when the kill came
    assert checkpoint.load_state(checkpoint.resolve(tmp_path))["step"] == 1
    assert checkpoint.newest_run(tmp_path.parent) is not None
    save(tmp_path, 2, config, model, optimizers)
    assert [p.name for p in tmp_path.iterdir()] == ["last"]
    assert checkpoint.load_state(tmp_path / "last")["step"] == 2


SAVE_FOREVER = """
import sys; sys.path.insert(0, {root!r})
from pathlib import Path
from tests.test_checkpoint import make_run, save, take_step
run = make_run()
take_step(*run[1:], 1)
for step in range(1, 10_000):
    save(Path({folder!r}), step, *run, best=step % 2 == 0, keep=2)
    print(step, flush=True)
"""


def test_killed_at_any_instant_a_whole_checkpoint_remains(tmp_path):
    """SIGKILL while a process saves again and again; every time the newest finished step, or the next, is there."""
    draw = random.Random(0)
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        script = SAVE_FOREVER.format(root=str(ROOT), folder=str(folder))
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "1\n"
            time.sleep(draw.uniform(0.02, 0.3))
            process.send_signal(signal.SIGKILL)
            printed = [1] + [int(line) for line in process.stdout if line.strip()]
        path = checkpoint.resolve(folder, prefer="last")
        assert checkpoint.load_state(path)["step"] in (printed[-1], printed[-1] + 1)
        config, model, optimizers = make_run()
        checkpoint.load_weights(path, model)
        checkpoint.load_optimizers(path, model, optimizers)
        checkpoint.load_tokenizer(path)
        assert checkpoint.find(folder, "best") is None or checkpoint.load_model(folder)
        save(folder, 10_000, config, model, optimizers)  # and the next save goes through
        assert checkpoint.load_state(folder / "last")["step"] == 10_000


@pytest.fixture
def saved(tmp_path):
    config, model, optimizers = make_run()
    take_step(model, optimizers, 1)
    save(tmp_path / "run", 1, config, model, optimizers)
    return tmp_path / "run" / "last"


def test_what_is_not_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist: name a directory that"):
        checkpoint.load_model(tmp_path / "nothing")
    with pytest.raises(UserError, match="is not a checkpoint or a run directory"):
        checkpoint.load_model(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("size", [0, 5, 300])
def test_truncated_tensors_are_refused(saved, name, size):
    file = saved / name
    file.write_bytes(file.read_bytes()[:size])
    config, model, optimizers = make_run()
    with pytest.raises(UserError, match=f"{name} is missing or damaged"):
        checkpoint.load_weights(saved, model)
        checkpoint.load_optimizers(saved, model, optimizers)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1}', '{"step": "x", "config": {}}'])
def test_a_damaged_state_is_refused(saved, text):
    (saved / "state.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="state.json is damaged"):
        checkpoint.load_model(saved)


@pytest.mark.parametrize("change", [{"vocab_size": None}, {"rope_scaling": 3}, {"n_layer": "2"}])
def test_a_state_of_no_model_is_refused(saved, change):
    state = json.loads((saved / "state.json").read_text(encoding="utf-8"))
    (saved / "state.json").write_text(json.dumps(state | {"config": state["config"] | change}), encoding="utf-8")
    with pytest.raises(UserError, match="the checkpoint describes no model"):
        checkpoint.load_model(saved)


def test_weights_of_another_model_are_refused(saved):
    weights = load_file(saved / "model.safetensors")
    save_file(weights | {"norm.weight": torch.zeros(3)}, saved / "model.safetensors")
    with pytest.raises(UserError, match="another model than its state.json describes: see norm.weight"):
        checkpoint.load_model(saved)
    del weights["norm.weight"]
    save_file(weights, saved / "model.safetensors")
    with pytest.raises(UserError, match="see norm.weight"):
        checkpoint.load_model(saved)


def test_settings_of_a_newer_version_are_refused(saved):
    state = json.loads((saved / "state.json").read_text(encoding="utf-8"))
    state["config"]["n_expert"] = 8
    (saved / "state.json").write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(UserError, match="does not know: n_expert"):
        checkpoint.load_model(saved)


def test_newest_run(tmp_path):
    assert checkpoint.newest_run(tmp_path) is None
    run = make_run()
    for name in ("a", "b", "c"):
        save(tmp_path / name, 1, *run)
    save(tmp_path / "b", 2, *run)
    assert checkpoint.newest_run(tmp_path) == tmp_path / "b"
