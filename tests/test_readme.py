"""The README's commands are understood by the programs, and its line counts are those of the files."""

import re
import shlex

import pytest

from compare import build_parser as compare_parser
from config import build, parse_command_line
from convert import build_parser as convert_parser
from data.prepare import build_parser as prepare_parser
from generate import build_parser as generate_parser
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.strip()
    for block in re.findall(r"```\w*\n(.*?)```", README, re.S)
    for line in block.splitlines()
    if line.strip()
]


def arguments(program):
    return [shlex.split(c.split("#")[0])[len(program.split()) :] for c in COMMANDS if c.startswith(program)]


@pytest.mark.parametrize("words", arguments("python train.py"), ids=" ".join)
def test_train_commands(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    if "--help" not in words:
        preset, overrides = parse_command_line(words)
        build(preset | overrides)


@pytest.mark.parametrize("words", arguments("torchrun --nproc_per_node=4 train.py"), ids=" ".join)
def test_torchrun_commands(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    preset, overrides = parse_command_line(words)
    assert build(preset | overrides).accumulation_steps(4) >= 1


@pytest.mark.parametrize("words", arguments("python generate.py"), ids=" ".join)
def test_generate_commands(words):
    generate_parser().parse_args(words)


@pytest.mark.parametrize("words", arguments("python convert.py"), ids=" ".join)
def test_convert_commands(words):
    convert_parser().parse_args(words)


@pytest.mark.parametrize("words", arguments("python compare.py"), ids=" ".join)
def test_compare_commands(words):
    compare_parser().parse_args(words)


@pytest.mark.parametrize("words", arguments("python -m data.prepare"), ids=" ".join)
def test_prepare_commands(words):
    prepare_parser().parse_args(words)


def test_make_targets():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([\w-]+)", "\n".join(COMMANDS), re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_line_counts():
    counts = re.findall(r"^\| `(\w+\.py)` \| (\d+) \|", README, re.M)
    assert {name for name, _ in counts} >= {"model.py", "train.py", "engine.py", "generate.py"}
    for name, count in counts:
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) == int(count), name
