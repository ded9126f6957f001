"""Presets and the command line: what is accepted, what is refused, and that every setting is read."""

import re
from dataclasses import fields

import pytest

from config import (
    FIELDS,
    TrainConfig,
    build,
    convert,
    find_gpu,
    parse_command_line,
    pick_device,
    read_preset,
    resume_config,
)
from data import UserError
from tests.conftest import ROOT

PRESETS = sorted(p for p in (ROOT / "config").glob("*.py") if p.stem not in ("__init__", "gpus"))


def command_line(*words):
    preset, overrides = parse_command_line([str(word) for word in words])
    return build(preset | overrides)


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_every_preset_builds(path):
    assert command_line(path).out_dir == f"out/{path.stem}"


def test_presets_of_the_comparison_differ_in_kv_heads_alone():
    flat = [build(read_preset(ROOT / f"config/{name}.py")).flat() for name in ("mha", "gqa", "mqa")]
    different = {key for other in flat[1:] for key in flat[0] if flat[0][key] != other[key]}
    assert different == {"n_kv_head", "out_dir"}
    assert [f["n_kv_head"] for f in flat] == [8, 2, 1]


def test_both_spellings_and_types():
    config = command_line(
        ROOT / "config/small.py", "--n_kv_head=1", "--max_steps", "200", "--learning_rate", 1, "--wandb",
        "--compile=false", "--eval_tokens=none", "--out_dir=a=b",
    )  # fmt: skip
    assert (config.model.n_kv_head, config.max_steps, config.wandb, config.compile) == (1, 200, True, False)
    assert config.learning_rate == 1.0 and isinstance(config.learning_rate, float)
    assert config.eval_tokens is None and config.out_dir == "a=b"


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--n_kv_heads=2"], "unknown setting 'n_kv_heads': did you mean n_kv_head"),
        (["--max_step", "5"], "did you mean max_steps"),
        (["--max_steps=many"], "max_steps expects a whole number, got 'many'"),
        (["--max_steps=1.5"], "max_steps expects a whole number"),
        (["--learning_rate=fast"], "learning_rate expects a number"),
        (["--learning_rate=nan"], "learning_rate expects a number"),
        (["--wandb=maybe"], "wandb expects true or false"),
        (["--optimizer=sgd"], "optimizer='sgd' is not one of adamw, muon"),
        (["--n_head=8", "--n_kv_head=3"], "n_kv_head=3 does not divide n_head=8: choose one of 1, 2, 4, 8"),
        (["--tokens_per_step=5000"], "use 4096 or 8192"),
        (["--tokens_per_step=100"], "use 4096"),
        (["--learning_rate=-1"], "must be above 0"),
        (["--min_lr=2"], "above learning_rate"),
        (["--max_steps=0"], "at least 1"),
        (["--max_steps=1e15"], "beyond any machine"),
        (["--seed=1e30"], r"below 2\*\*63"),
        (["--n_embd=1e11", "--n_head=1"], r"below 2\*\*31"),
        (["--sliding_window=1e20"], r"below 2\*\*31"),
        (["--beta2=1"], r"must lie in \[0, 1\)"),
        (["--eval_tokens=10"], "less than one window"),
        (["config/smal.py"], "no preset at config/smal.py: config/ has .*gpt2_124m"),
        (["config/small.py", "stray"], "unexpected argument 'stray'"),
    ],
)
def test_mistakes_on_the_command_line_get_a_sentence(words, sentence, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=sentence):
        command_line(*words)


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("n_kv_heads = 2", "unknown setting 'n_kv_heads': did you mean n_kv_head"),
        ("learning_rate = '3e-4x'", "learning_rate expects a number"),
        ("max_steps = True", "max_steps expects a whole number"),
        ("max_steps =", "could not be read: SyntaxError"),
        ("max_steps = undefined", "could not be read: NameError"),
        ("import sys; sys.exit(0)", "could not be read: SystemExit"),
    ],
)
def test_mistakes_in_a_preset_name_the_file(line, sentence, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(UserError, match=f"mine.py.*{sentence}"):
        read_preset(path)


def test_none_and_numbers():
    assert convert("n_kv_head", "none") is None
    assert convert("max_steps", "1e3") == convert("max_steps", "1_000") == convert("max_steps", 1000.0) == 1000
    assert convert("seed", str(2**61 + 1)) == 2**61 + 1
    assert convert("resume", "some/run") == "some/run"
    assert convert("resume", True) is True


def test_help_lists_every_setting_with_its_default(capsys):
    with pytest.raises(SystemExit) as exit:
        parse_command_line(["--help"])
    text = capsys.readouterr().out
    assert exit.value.code == 0
    for name in FIELDS:
        assert f"--{name} " in text
    assert "(default: 0.001)" in text and "[adamw, muon]" in text


def test_every_setting_is_read_by_something():
    """A key that is accepted and never read is a promise broken in silence."""
    sources = {p: p.read_text(encoding="utf-8") for p in ROOT.glob("*.py")}
    sources[ROOT / "config/__init__.py"] = (ROOT / "config/__init__.py").read_text(encoding="utf-8")
    for name in FIELDS:
        readers = [p for p, text in sources.items() if re.search(rf"(?:self|config|c)\.{name}\b|get\(\"{name}\"", text)]
        assert readers, f"nothing reads {name}"


def test_flat_survives_a_round_trip():
    config = build(read_preset(ROOT / "config/gpt2_124m.py"))
    assert build(config.flat()) == config


def test_vocabulary_comes_from_the_tokenizer_or_leaves_room():
    assert build({}).with_vocab_size(300).model.vocab_size == 300
    assert build({"vocab_size": 50257}).with_vocab_size(300).model.vocab_size == 50257
    with pytest.raises(UserError, match="vocab_size=100 is too small"):
        build({"vocab_size": 100}).with_vocab_size(300)


def test_resume_takes_the_saved_run_and_lists_what_changes():
    saved = build({"max_steps": 100, "n_embd": 64, "seed": 5}).flat()
    config, notes = resume_config(saved, {"seed": 6}, {"max_steps": 200, "resume": True})
    assert (config.max_steps, config.seed, config.model.n_embd) == (200, 5, 64)
    assert notes == [
        "changed by the command line: max_steps: 100 -> 200",
        "the preset now says seed=6; this run keeps 5",
    ]


@pytest.mark.parametrize("change", [{"n_embd": 128}, {"n_kv_head": 1}, {"optimizer": "muon"}, {"rope_theta": 5e5}])
def test_resume_refuses_what_the_checkpoint_cannot_follow(change):
    saved = build({"n_embd": 64}).flat()
    with pytest.raises(UserError, match=f"cannot change {next(iter(change))}"):
        resume_config(saved, {}, change)


def test_accumulation_is_derived():
    config = build({"tokens_per_step": 8192, "micro_batch_size": 4, "block_size": 256})
    assert (config.accumulation_steps(), config.accumulation_steps(4)) == (8, 2)
    with pytest.raises(UserError, match="4 x 256 x 3 = 3072: use 6144 or 9216"):
        config.accumulation_steps(3)


def test_defaults_are_valid():
    assert {f.name for f in fields(TrainConfig)} - {"model"} <= set(FIELDS)
    build({})


@pytest.mark.parametrize(
    "device, name",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100 pcie"),
        ("NVIDIA H100 NVL", "h100 nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100 80gb"),
        ("NVIDIA A100 80GB PCIe", "a100 80gb pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx 4090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10G", "a10g"),
    ],
)
def test_gpus_are_found_by_their_device_names(device, name):
    assert find_gpu(device).name == name


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA GeForce GTX 1080",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3080 Ti",
        "NVIDIA GeForce RTX 4080 SUPER",
        "NVIDIA H200 NVL",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    ],
)
def test_an_unknown_gpu_has_no_peak(device):
    assert find_gpu(device) is None


def test_a_switch_needs_no_value():
    assert command_line("--compile").compile is True
    assert command_line("--doc_mask", "--deterministic=false").doc_mask is True


def test_a_preset_may_say_no_to_resuming(tmp_path):
    (tmp_path / "p.py").write_text("resume = 'false'", encoding="utf-8")
    assert read_preset(tmp_path / "p.py")["resume"] is False


def test_a_device_that_is_not_there_is_refused():
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="device=cuda is not available here: use one of"):
            pick_device("cuda")
