"""torchrun on the CPU (gloo): the same run on 1, 2 and 4 processes, and what happens when one of them dies."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

import checkpoint
from tests.conftest import ROOT
from tests.test_train import has_step, numbers, wait_for


def torchrun(n, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", "train.py"]
    return subprocess.Popen(
        [*command, *(str(argument) for argument in arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    out, _ = process.communicate(timeout=120)
    return process.returncode, out


def assert_close(ours, theirs, tolerance):
    """Every logged number, val_loss and bits per byte included, within `tolerance`."""
    assert [row[0] for row in ours] == [row[0] for row in theirs]
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x == y or abs(x - y) <= tolerance, (a, b)


@pytest.mark.parametrize("optimizer, tolerance", [("adamw", 1e-5), ("muon", 1e-3)])
def test_one_two_and_four_processes_train_alike(preset, run_train, tmp_path, optimizer, tolerance):
    options = ["--optimizer", optimizer, "--micro_batch_size=2"]
    assert run_train(preset, *options)[0] == 0
    alone = numbers(tmp_path / "run")
    for n in (2, 4):
        shutil.rmtree(tmp_path / "run")
        code, out = finish(torchrun(n, preset, *options))
        assert code == 0, out
        assert f"256 tokens = {4 // n} accumulated x 2 sequences x 32 tokens x {n} processes" in out
        assert out.count("step 20: loss") == 1  # rank 0 alone speaks
        assert_close(numbers(tmp_path / "run"), alone, tolerance)


def test_a_run_may_change_its_number_of_processes(preset, run_train, tmp_path):
    options = ["--micro_batch_size=2", "--schedule=constant"]
    assert run_train(preset, *options, "--max_steps=10")[0] == 0
    code, out = finish(torchrun(2, preset, "--resume", "--max_steps=20"))
    assert code == 0, out
    resumed = numbers(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert run_train(preset, *options)[0] == 0
    assert_close(resumed, numbers(tmp_path / "run"), 1e-5)


def worker_pids(process):
    """The ranks' processes, children of torchrun."""
    out = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout
    return [int(pid) for pid in out.split()]


def test_a_killed_rank_ends_the_job_and_leaves_a_whole_checkpoint(preset, run_train, tmp_path):
    settings = ["--max_steps=3000", "--eval_interval=10", "--schedule=constant", "--micro_batch_size=2"]
    process = torchrun(2, preset, *settings)
    wait_for(lambda: has_step(tmp_path / "run", 15))
    os.kill(worker_pids(process)[1], signal.SIGKILL)
    began = time.time()
    code, out = finish(process)
    assert code != 0 and time.time() - began < 60
    assert re.search(r"exitcode\s*: -9", out) or "SIGKILL" in out, out
    step = checkpoint.load_state(checkpoint.resolve(tmp_path / "run", prefer="last"))["step"]
    assert step >= 10
    code, _, err = run_train("--resume", tmp_path / "run", "--max_steps", step + 5)
    assert code == 0, err
    resumed = numbers(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert run_train(preset, *settings, "--max_steps", step + 5)[0] == 0
    assert_close(resumed, numbers(tmp_path / "run"), 1e-5)


def test_a_mistake_is_told_once(preset):
    code, out = finish(torchrun(2, preset, "--micro_batch_size=8"))
    assert code != 0
    assert out.count("error: tokens_per_step=256 is not a multiple") == 1
    assert "8 x 32 x 2 = 512: use 512" in out
