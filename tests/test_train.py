"""The training run: the same numbers however it is interrupted, and one sentence for what cannot be run."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoint
import train
from config import build, parse_command_line
from data import open_dataset
from data.loader import validation_batches
from data.prepare import main as prepare_main
from runlog import COLUMNS, read_metrics
from tests.conftest import ROOT

SAME = ("step", "tokens", "loss", "val_loss", "val_bpb", "lr", "grad_norm")  # every logged number but clocks and memory


def numbers(run):
    return [tuple(row[name] for name in SAME) for row in read_metrics(run / "metrics.jsonl")]


def start(preset, *options):
    """train.py as a process of its own, for the tests that send it signals."""
    command = [sys.executable, "train.py", str(preset), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition, seconds=60):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


def has_step(run, step):
    return (run / "metrics.jsonl").exists() and any(r["step"] >= step for r in read_metrics(run / "metrics.jsonl"))


def test_a_run_from_start_to_end(preset, run_train, tmp_path):
    code, out, err = run_train(preset)
    run = tmp_path / "run"
    assert code == 0, err
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert all(tuple(row) == COLUMNS for row in rows)
    assert [row["step"] for row in rows if row["val_loss"] is not None] == [10, 20]
    assert abs(rows[0]["loss"] - math.log(257)) < 0.05
    assert rows[-1]["val_loss"] < rows[9]["val_loss"] < math.log(257)
    assert rows[-1]["val_bpb"] == pytest.approx(rows[-1]["val_loss"] / math.log(2), rel=0.01)  # one byte a token
    assert rows[-1]["tokens"] == 20 * 256 and rows[-1]["mfu"] is None and rows[-1]["memory"] > 1e6
    # tokens/s times seconds must be tokens: the steps' own time cannot exceed the run's.
    assert sum(256 / row["tokens_per_s"] for row in rows) < rows[-1]["seconds"]
    assert rows[-1]["seconds"] < 120
    assert (run / "loss_curve.png").stat().st_size > 1000
    saved = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert saved["config"]["n_kv_head"] == 2 and saved["versions"]["torch"] == torch.__version__
    assert "256 tokens = 2 accumulated x 4 sequences x 32 tokens" in out
    assert "GQA 4/2 heads of 8" in out and "step 20: loss" in out and "  | " in out
    assert checkpoint.load_state(run / "last")["step"] == 20


@pytest.mark.parametrize("options", [["--optimizer=adamw", "--dropout=0.1"], ["--optimizer=muon", "--n_kv_head=1"]])
def test_twenty_steps_are_ten_and_ten(preset, run_train, tmp_path, options):
    assert run_train(preset, *options)[0] == 0
    whole = numbers(tmp_path / "run")
    weights = (tmp_path / "run/last/model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "run")

    with start(preset, "--eval_interval=10", "--max_steps=20", *options) as process:
        wait_for(lambda: checkpoint.find(tmp_path / "run", "last"))  # step 10's
        process.send_signal(signal.SIGKILL)
    code, out, err = run_train(preset, "--resume")
    assert code == 0, err
    assert numbers(tmp_path / "run") == whole
    assert (tmp_path / "run/last/model.safetensors").read_bytes() == weights


def test_a_polite_stop_at_any_step_changes_nothing(preset, run_train, tmp_path):
    settings = ["--max_steps=400", "--eval_interval=200", "--schedule=constant"]
    run = tmp_path / "run"
    with start(preset, *settings) as process:
        wait_for(lambda: has_step(run, 7))
        process.send_signal(signal.SIGTERM)
        out = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM
    step = checkpoint.load_state(run / "last")["step"]
    assert 7 <= step < 400 and step == numbers(run)[-1][0]
    assert f"continue with --resume={run}" in out
    target = step + 5
    code, out, err = run_train("--resume", run, "--max_steps", target, "--eval_interval", 10_000)
    assert code == 0, err
    assert f"max_steps: 400 -> {target}" in out
    stopped = numbers(run)
    shutil.rmtree(run)
    assert run_train(preset, *settings, "--max_steps", target, "--eval_interval", 10_000)[0] == 0
    assert numbers(run) == stopped


def test_how_often_it_is_evaluated_changes_no_training_number(preset, run_train, tmp_path):
    logs = []
    for interval in (20, 3):
        assert run_train(preset, "--eval_interval", interval, "--dropout=0.1")[0] == 0
        logs.append([(row[0], row[2], row[6]) for row in numbers(tmp_path / "run")])
        shutil.rmtree(tmp_path / "run")
    assert logs[0] == logs[1]


def test_accumulation_is_the_same_step_in_pieces(preset, run_train, tmp_path):
    logs = []
    for size in (8, 2):
        assert run_train(preset, "--micro_batch_size", size, "--max_steps=5")[0] == 0
        logs.append([row[2] for row in numbers(tmp_path / "run")])
        shutil.rmtree(tmp_path / "run")
    assert logs[0] == pytest.approx(logs[1], abs=1e-5)


def test_an_existing_run_is_not_overwritten(preset, run_train):
    assert run_train(preset, "--max_steps=3")[0] == 0
    code, _, err = run_train(preset, "--max_steps=3")
    assert code == 1 and "already holds a run: continue it with --resume" in err
    code, out, _ = run_train(preset, "--resume")
    assert code == 0 and "nothing to do: all 3 steps are done" in out
    assert run_train(preset, "--resume", "--max_steps=4")[0] == 0


def test_resume_refuses_another_model_and_another_tokenizer(preset, run_train, tmp_path):
    assert run_train(preset, "--max_steps=2")[0] == 0
    code, _, err = run_train(preset, "--resume", "--max_steps=4", "--n_embd=64")
    assert code == 1 and "cannot change n_embd: 32 -> 64" in err
    (tmp_path / "words.txt").write_text("other text, other letters. " * 200, encoding="utf-8")
    prepare_main(["files", str(tmp_path / "words.txt"), "--tokenizer", "char", "--out", str(tmp_path / "chars")])
    code, _, err = run_train(preset, "--resume", "--max_steps=4", "--dataset", tmp_path / "chars")
    assert code == 1 and "has another tokenizer than the checkpoint" in err
    assert numbers(tmp_path / "run")[-1][0] == 2  # nothing was damaged


def test_resume_without_a_checkpoint_says_so(preset, run_train):
    code, _, err = run_train(preset, "--resume")
    assert code == 1 and "does not exist" in err


def test_a_run_that_saved_nothing_may_start_again(preset, run_train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 99}\n', encoding="utf-8")
    code, _, err = run_train(preset, "--resume")
    assert code == 1 and "has saved no checkpoint yet: start it again without --resume" in err
    assert run_train(preset, "--max_steps=2")[0] == 0
    assert [row[0] for row in numbers(tmp_path / "run")] == [1, 2]


def test_it_stops_at_the_first_number_that_is_not_finite(preset, run_train, tmp_path):
    assert run_train(preset, "--max_steps=2")[0] == 0
    code, _, err = run_train(preset, "--resume", "--max_steps=40", "--learning_rate=1e20", "--grad_clip=0")
    assert code == 1
    step = int(err.split(" at step ")[1].split(",")[0])
    assert 3 <= step <= 5 and "is intact" in err
    assert checkpoint.load_state(tmp_path / "run/last")["step"] == 2


def test_mistakes_end_before_anything_is_written(preset, run_train, tmp_path):
    for words, sentence in (
        (["--dataset=nowhere"], "python -m data.prepare"),
        (["--vocab_size=100"], "too small for the tokenizer"),
        (["--block_size=100000", "--tokens_per_step=400000"], "fewer than one window"),
        (["--device=cuda:9" if torch.cuda.is_available() else "--device=cuda"], "device"),
    ):
        code, _, err = run_train(preset, *words)
        assert code == 1 and sentence in err and "Traceback" not in err, (words, err)
    assert not (tmp_path / "run").exists()


def test_keep_checkpoints_and_best(preset, run_train, tmp_path):
    assert run_train(preset, "--eval_interval=5", "--keep_checkpoints=2")[0] == 0
    names = sorted(p.name for p in (tmp_path / "run").iterdir() if p.is_dir())
    assert names == ["best", "last", "step_000015", "step_000020"]


def test_documents_can_be_kept_apart(preset, run_train, tmp_path):
    (tmp_path / "notes").mkdir()
    for i in range(40):
        (tmp_path / f"notes/{i}.txt").write_text(f"note {i} of forty, {i * i} words long. " * 2, encoding="utf-8")
    prepare_main(["files", str(tmp_path / "notes"), "--tokenizer", "bytes", "--out", str(tmp_path / "shards")])
    logs = []
    for mask in ("true", "false"):
        assert run_train(preset, "--dataset", tmp_path / "shards", "--doc_mask", mask)[0] == 0
        logs.append(numbers(tmp_path / "run"))
        shutil.rmtree(tmp_path / "run")
    masked, plain = logs
    assert masked[0][2] == pytest.approx(plain[0][2], abs=1e-6)  # the first blocks are the identity
    assert all(a[2] != b[2] for a, b in zip(masked[5:], plain[5:], strict=True))
    assert masked[-1][3] < masked[9][3] < masked[0][2]


def test_a_mixture_is_validated_by_its_weights(preset, dataset, run_train, tmp_path):
    (tmp_path / "words.txt").write_text("the same old words again. " * 400, encoding="utf-8")
    prepare_main(["files", str(tmp_path / "words.txt"), "--tokenizer", "bytes", "--out", str(tmp_path / "words")])
    code, _, err = run_train(preset, "--dataset", f"{dataset}:0.75,{tmp_path / 'words'}:0.25")
    assert code == 0, err
    model = checkpoint.load_model(tmp_path / "run/last")
    losses = []
    for folder in (dataset, tmp_path / "words"):
        nats, count = 0.0, 0
        for tokens, targets in validation_batches(open_dataset(folder).val, 32, 4, "cpu"):
            n = int((targets != -100).sum())
            nats, count = nats + model(tokens, targets).item() * n, count + n
        losses.append(nats / count)
    assert abs(losses[0] - losses[1]) > 0.02
    assert numbers(tmp_path / "run")[-1][3] == pytest.approx(0.75 * losses[0] + 0.25 * losses[1], rel=1e-5)


def test_a_prompt_that_cannot_be_sampled_does_not_end_the_run(preset, run_train, tmp_path):
    (tmp_path / "words.txt").write_text("the same old words again. " * 400, encoding="utf-8")
    prepare_main(["files", str(tmp_path / "words.txt"), "--tokenizer", "char", "--out", str(tmp_path / "words")])
    code, out, _ = run_train(preset, "--dataset", tmp_path / "words", "--sample_prompt=QED", "--max_steps=2")
    assert code == 0 and "samples will start from nothing, not from sample_prompt='QED'" in out
    shutil.rmtree(tmp_path / "run")
    code, out, _ = run_train(preset, "--sample_prompt", "x" * 32, "--max_steps=2")
    assert code == 0 and "it fills block_size" in out


def test_weights_that_are_not_finite_are_never_saved(preset, run_train, tmp_path):
    """The first loss is finite, the update is not: what is saved must be checked and not only what was logged."""
    wild = ["--learning_rate=1e38", "--warmup_steps=0", "--grad_clip=0", "--eval_interval=1"]
    code, _, err = run_train(preset, *wild)
    assert code == 1 and "at step 1, so the run stops; no checkpoint had been saved yet" in err
    assert checkpoint.find_any(tmp_path / "run", "last") is None
    assert run_train(preset, "--max_steps=2")[0] == 0
    code, _, err = run_train(preset, "--resume", "--max_steps=9", *wild)
    assert code == 1 and "is intact" in err
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "run/last/model.safetensors").values())


def test_a_closed_output_does_not_stop_a_run(preset, tmp_path, monkeypatch):
    class Closed:
        encoding, errors = "utf-8", "strict"

        def write(self, text):
            raise BrokenPipeError

        flush = isatty = lambda self: None

    monkeypatch.setattr(sys, "stdout", Closed())
    train.main([str(preset), "--max_steps=3"])
    assert checkpoint.load_state(tmp_path / "run/last")["step"] == 3


def test_a_run_can_be_continued_elsewhere_but_not_over_another(preset, run_train, tmp_path):
    assert run_train(preset, "--max_steps=3")[0] == 0
    elsewhere = ["--resume", tmp_path / "run", "--out_dir", tmp_path / "fork"]
    assert run_train(*elsewhere, "--max_steps=5")[0] == 0
    assert [row[0] for row in numbers(tmp_path / "fork")] == [1, 2, 3, 4, 5]
    assert len(numbers(tmp_path / "run")) == 3
    code, _, err = run_train(*elsewhere, "--max_steps=7")
    assert code == 1 and "already holds another run" in err


def test_without_last_a_run_goes_on_from_what_there_is(preset, run_train, tmp_path):
    assert run_train(preset, "--max_steps=4", "--eval_interval=2")[0] == 0
    shutil.rmtree(tmp_path / "run/last")
    code, _, err = run_train(preset)
    assert code == 1 and "already holds a run" in err
    code, out, _ = run_train(preset, "--resume", "--max_steps=6")
    assert code == 0 and "best at step" in out


def test_going_back_keeps_the_best_and_the_newest(preset, run_train, tmp_path):
    assert run_train(preset, "--eval_interval=5", "--keep_checkpoints=4")[0] == 0
    best = checkpoint.load_state(tmp_path / "run/best")
    again = ["--eval_interval=1", "--max_steps=6", "--keep_checkpoints=2", "--learning_rate=1e-9"]
    assert run_train("--resume", tmp_path / "run/step_000005", *again)[0] == 0
    assert checkpoint.load_state(tmp_path / "run/best")["best_val_loss"] == best["best_val_loss"]
    assert "step_000006" in {p.name for p in checkpoint.numbered(tmp_path / "run")}


def test_a_damaged_log_is_told_and_left_alone(preset, run_train, tmp_path):
    assert run_train(preset, "--max_steps=3")[0] == 0
    log = tmp_path / "run/metrics.jsonl"
    whole = log.read_text(encoding="utf-8")
    for garbage in ("garbage", "5", "[]", '{"a": 1}', '{"step": null}'):
        log.write_text(garbage + "\n" + whole, encoding="utf-8")
        code, _, err = run_train(preset, "--resume", "--max_steps=5")
        assert code == 1 and "metrics.jsonl is damaged in line 1" in err
        assert log.read_text(encoding="utf-8") == garbage + "\n" + whole
    log.write_text(whole + '{"step": 4, "lo', encoding="utf-8")  # a kill cut the last line short
    assert run_train(preset, "--resume", "--max_steps=5")[0] == 0
    assert [row[0] for row in numbers(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_two_processes_cannot_share_a_run(preset, run_train, tmp_path):
    with start(preset, "--max_steps=100000", "--eval_interval=100000") as process:
        wait_for(lambda: has_step(tmp_path / "run", 1))
        code, _, err = run_train(preset)
        process.kill()
    assert code == 1 and "another process is writing to" in err


def test_a_changed_text_is_noticed(preset, run_train, tmp_path):
    folder = tmp_path / "shards"
    for text in ("one text of many. ", "another text, alike. "):
        (tmp_path / "t.txt").write_text(text * 300, encoding="utf-8")
        words = ["files", str(tmp_path / "t.txt"), "--tokenizer", "bytes", "--out", str(folder), "--overwrite"]
        prepare_main(words)
        options = ["--dataset", folder, "--max_steps", 2 if "one" in text else 3]
        code, out, err = run_train(preset, *options, *([] if "one" in text else ["--resume"]))
        assert code == 0, err
        assert ("is not what" in out) == ("another" in text)


def test_an_optimizer_without_its_state_is_refused(preset, run_train, tmp_path):
    assert run_train(preset, "--max_steps=2")[0] == 0
    file = tmp_path / "run/last/optimizer.safetensors"
    state = load_file(file)
    for kept in ({}, {k: v for k, v in state.items() if "exp_avg_sq" not in k}, state | {"x/y": torch.zeros(1)}):
        save_file(kept, file)
        code, _, err = run_train(preset, "--resume", "--max_steps=4")
        assert code == 1 and "optimizer.safetensors does not fit this run" in err


def test_triton_is_refused_on_a_cpu_before_anything_is_written(preset, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "train.py", str(preset), "--attention=triton"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: attention=triton cannot run here")
    assert not (tmp_path / "run").exists()


def test_out_dir_none_is_the_default(preset, monkeypatch):
    preset_values, overrides = parse_command_line([str(ROOT / "config/small.py"), "--out_dir=none"])
    assert build(preset_values | overrides).out_dir == "out/small"


def test_wandb_that_cannot_start_is_one_sentence(preset):
    pytest.importorskip("wandb")
    command = [sys.executable, "train.py", str(preset), "--wandb", "--max_steps=3"]
    environment = os.environ | {"WANDB_MODE": "bogus"}  # in a process of its own: wandb remembers its settings
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "error: wandb could not start" in done.stderr
    assert "Traceback" not in done.stderr


def test_wandb_offline(preset, run_train, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    pytest.importorskip("wandb")
    assert run_train(preset, "--wandb", "--max_steps=3")[0] == 0
    (record,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    assert b"grad_norm" in record.read_bytes()
    assert checkpoint.load_state(tmp_path / "run/last")["wandb"] in record.name


def test_the_picture_is_left_out_with_a_word_where_matplotlib_is_missing(preset, run_train, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, _ = run_train(preset, "--max_steps=2")
    assert code == 0 and "matplotlib is not installed" in out
    assert not (tmp_path / "run/loss_curve.png").exists()


def test_a_readonly_place_is_one_sentence(preset, run_train, tmp_path):
    if os.geteuid() == 0:
        (tmp_path / "run").write_text("a file where the run's directory should be", encoding="utf-8")
    else:
        tmp_path.chmod(0o500)
    code, _, err = run_train(preset, "--max_steps=2")
    tmp_path.chmod(0o700)
    assert code == 1 and err.startswith("error: ") and err.count("\n") == 1
