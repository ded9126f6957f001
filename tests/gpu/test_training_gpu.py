"""Training on a GPU: compiled without graph breaks, with our kernels and no others, to the losses of SDPA."""

import math
import shutil

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from config import build, read_preset
from kernels import choose_backend
from model import Transformer
from runlog import read_metrics
from tests.conftest import ROOT

pytestmark = pytest.mark.gpu


def losses(run):
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl")]


def test_a_compiled_run_matches_sdpa(preset, run_train, tmp_path):
    """fullgraph=True in train.py turns any graph break into an error, so a run that ends had none."""
    curves = {}
    for attention in ("triton", "torch"):
        code, _, err = run_train(preset, "--device=cuda", "--head_dim=32", "--attention", attention)
        assert code == 0, err
        curves[attention] = losses(tmp_path / "run")
        rows = read_metrics(tmp_path / "run/metrics.jsonl")
        assert all(0 < row["tokens_per_s"] < 1e9 for row in rows)
        shutil.rmtree(tmp_path / "run")
    assert abs(curves["triton"][0] - math.log(257)) < 0.05
    assert curves["triton"] == pytest.approx(curves["torch"], abs=0.02)
    assert curves["triton"][-1] < curves["triton"][0] - 0.3


def test_a_training_step_runs_our_attention_kernels_alone():
    assert choose_backend("cuda", 0, 64, torch.bfloat16) == "triton"
    config = build(read_preset(ROOT / "config/small.py") | {"head_dim": 64}).with_vocab_size(512).model
    model = Transformer(config, dtype=torch.bfloat16).init_weights().cuda()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    tokens = torch.randint(512, (4, 256), device="cuda")
    compiled(tokens, tokens).backward()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        compiled(tokens, tokens).backward()
        torch.cuda.synchronize()
    names = [event.key.lower() for event in trace.key_averages()]
    for kernel in ("forward_kernel", "dkdv_kernel", "dq_kernel"):
        assert any(kernel in name for name in names), names
    assert not any(
        word in name for name in names for word in ("flash_fwd", "flash_bwd", "cudnn", "fmha", "softmax_warp")
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_is_exact_on_one_gpu(preset, run_train, tmp_path, optimizer):
    options = ["--device=cuda", "--head_dim=32", "--schedule=constant", "--optimizer", optimizer, "--dropout=0.1"]
    options.append("--deterministic")
    assert run_train(preset, *options)[0] == 0
    whole = losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert run_train(preset, *options, "--max_steps=10")[0] == 0
    code, _, err = run_train(preset, "--resume", "--max_steps=20")
    assert code == 0, err
    assert losses(tmp_path / "run") == whole
