"""The training configuration: its fields, the presets beside this file, and the command line over them.

A preset is a Python file of plain assignments, `n_kv_head = 2`. Its names and those of the command line are read
against the fields of `TrainConfig` and `ModelConfig`, so a misspelt one is an error that names the nearest match.
Order of precedence: command line, preset, defaults; on `--resume`, command line, then the saved run. With `init_from`
the shape of the model is the checkpoint's, and whoever says otherwise, preset or command line, is refused.
"""

import argparse
import difflib
import math
import runpy
import types
import typing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch

from config.gpus import GPU, find_gpu  # noqa: F401  (part of this package's face)
from data import UserError
from model import ModelConfig, option
from rope import stretched

CHOICES = {
    "device": ("auto", "cpu", "cuda", "mps"),
    "dtype": ("auto", "float32", "bfloat16"),
    "attention": ("auto", "triton", "torch", "naive"),
    "optimizer": ("adamw", "muon"),
    "schedule": ("cosine", "linear", "wsd", "constant"),
}


@dataclass(frozen=True)
class TrainConfig:
    """One training run. `model` holds the shape of the decoder; presets and the command line set both alike."""

    model: ModelConfig = field(default_factory=ModelConfig)

    out_dir: str | None = option(None, "where the run is written (none: out/<name of the preset>)")
    dataset: str = option("stdlib", "name under data/shards, or a folder; several with weights: a:0.7,b:0.3")
    doc_mask: bool = option(
        False, "each document sees itself alone (false: whatever stands before it in the window too)"
    )
    seed: int = option(1337, "of the weights, the order of the data and the dropout")
    device: str = option("auto", "auto takes cuda, then mps, then cpu")
    dtype: str = option("auto", "of activations; auto is bfloat16 on GPUs that have it (sm_80 on), else float32")
    compile: bool | None = option(None, "torch.compile, without graph breaks (none: on cuda only)")
    deterministic: bool = option(False, "repeat a run bit for bit on a GPU too; slower (a CPU always does)")
    attention: str = option("auto", "implementation: auto chooses for the device; naive keeps the T x T matrix")

    max_steps: int = option(1000, "optimizer steps in the whole run")
    tokens_per_step: int = option(8192, "tokens in one optimizer step; gradient accumulation follows from it")
    micro_batch_size: int = option(16, "sequences of block_size in one forward pass")
    optimizer: str = option("adamw", "adamw, or muon for the matrices with adamw for the rest")
    learning_rate: float = option(1e-3, "at the top of the schedule")
    min_lr: float = option(0.0, "at the end of the schedule")
    warmup_steps: int = option(20, "linear climb to learning_rate")
    schedule: str = option("cosine", "after warm-up: cosine or linear down, wsd (flat, then linear over 40%), constant")
    weight_decay: float = option(0.1, "decoupled, on matrices alone")
    beta1: float = option(0.9, "decay of the first moment: AdamW's, and Muon's momentum")
    beta2: float = option(0.95, "decay of AdamW's second moment")
    grad_clip: float = option(1.0, "largest norm of the gradient (0: no clipping)")

    eval_interval: int = option(100, "steps between evaluations, each with a sample and a checkpoint")
    eval_tokens: int | None = option(
        None, "validation tokens read, the same evenly spaced windows each time (none: all)"
    )
    sample_prompt: str = option("\n", "what the sample at each evaluation continues")
    keep_checkpoints: int = option(0, "numbered checkpoints kept beside `last` and `best`")
    resume: bool | str = option(False, "continue out_dir, or the run or checkpoint at PATH")
    init_from: str | None = option(
        None, "start from the weights of this run or checkpoint; they fix the model's shape, and the tokenizer"
    )
    wandb: bool = option(False, "also log to Weights & Biases")

    def __post_init__(self):
        for name in ("max_steps", "tokens_per_step", "micro_batch_size", "eval_interval", "eval_tokens"):
            if (getattr(self, name) or 0) >= 2**40:
                raise UserError(f"{name}={getattr(self, name)} is beyond any machine")
        if self.seed >= 2**63:
            raise UserError(f"seed={self.seed} must be below 2**63")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(f"{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")
        for name in ("max_steps", "tokens_per_step", "micro_batch_size", "eval_interval"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("warmup_steps", "keep_checkpoints", "weight_decay", "grad_clip", "min_lr", "seed"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must lie in [0, 1)")
        if self.init_from == "":
            raise UserError("init_from names no run or checkpoint: it is empty")
        if self.learning_rate <= 0:
            raise UserError(f"learning_rate={self.learning_rate} must be above 0")
        if self.min_lr > self.learning_rate:
            raise UserError(f"min_lr={self.min_lr} is above learning_rate={self.learning_rate}")
        if self.eval_tokens is not None and self.eval_tokens < self.model.block_size:
            raise UserError(f"eval_tokens={self.eval_tokens} is less than one window of {self.model.block_size} tokens")
        self.accumulation_steps()  # refuses what does not divide

    def accumulation_steps(self, world_size: int = 1) -> int:
        """Forward and backward passes of each process whose gradients make one optimizer step.

        Raises:
            UserError: tokens_per_step is not a whole number of passes; the sentence names the two nearest that are.
        """
        unit = self.micro_batch_size * self.model.block_size * world_size
        if self.tokens_per_step % unit:
            below = self.tokens_per_step // unit * unit
            fits = f"{below} or {below + unit}" if below else str(unit)
            factors = f"{self.micro_batch_size} x {self.model.block_size}"
            names = "micro_batch_size x block_size"
            if world_size > 1:
                factors, names = f"{factors} x {world_size}", f"{names} x processes"
            raise UserError(
                f"tokens_per_step={self.tokens_per_step} is not a multiple of {names} = {factors} = {unit}: use {fits}"
            )
        return self.tokens_per_step // unit

    def with_vocab_size(self, vocab_size: int) -> "TrainConfig":
        """The same run on a tokenizer of `vocab_size` ids. A preset may leave room for more ids, never for fewer."""
        if self.model.vocab_size is None:
            return replace(self, model=replace(self.model, vocab_size=vocab_size))
        if self.model.vocab_size < vocab_size:
            raise UserError(
                f"vocab_size={self.model.vocab_size} is too small for the tokenizer of dataset {self.dataset!r}, "
                f"which has {vocab_size} ids: leave vocab_size out, or prepare the data with another tokenizer"
            )
        return self

    def flat(self) -> dict:
        """Every setting by its name, model and run together: what presets, `build` and checkpoints speak."""
        run = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}
        return {f.name: getattr(self.model, f.name) for f in fields(self.model)} | run


MODEL_FIELDS = {f.name: f for f in fields(ModelConfig)}
RUN_FIELDS = {f.name: f for f in fields(TrainConfig) if f.name != "model"}
FIELDS = MODEL_FIELDS | RUN_FIELDS
TYPES = typing.get_type_hints(ModelConfig) | typing.get_type_hints(TrainConfig)

# What a checkpoint cannot follow: the tensors it holds have these shapes, or belong to this optimizer.
FIXED_ON_RESUME = (set(MODEL_FIELDS) - {"dropout"}) | {"optimizer", "init_from"}
# What a run may choose anew although it starts from given weights: none of them depends on it.
FREE_ON_INIT = {"dropout", "block_size", "rope_scaling"}


def build(values: dict) -> TrainConfig:
    """A TrainConfig from settings by name. Raises UserError for unknown names, wrong types and impossible values."""
    values = {name: convert(name, value) for name, value in values.items()}
    try:
        model = ModelConfig(**{name: value for name, value in values.items() if name in MODEL_FIELDS})
    except ValueError as error:
        raise UserError(str(error)) from None
    return TrainConfig(model=model, **{name: value for name, value in values.items() if name in RUN_FIELDS})


def convert(name: str, value):
    """`value`, from a preset or a command line (then a string), as the type of field `name`."""
    if name not in FIELDS:
        near = difflib.get_close_matches(name, FIELDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "`python train.py --help` lists every setting"
        raise UserError(f"unknown setting {name!r}: {hint}")
    kinds = _kinds(name)
    text = value.strip().lower() if isinstance(value, str) else value
    if types.NoneType in kinds and (value is None or text == "none"):
        return None
    if bool in kinds and (isinstance(value, bool) or text in ("true", "false")):
        return value if isinstance(value, bool) else text == "true"
    if str in kinds and isinstance(value, str):
        return value
    for kind, parse in ((int, _whole_number), (float, _finite_number)):
        if kind in kinds and not isinstance(value, bool):
            try:
                return parse(value)
            except (TypeError, ValueError, OverflowError):
                continue
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "none"}
    raise UserError(f"{name} expects {' or '.join(words[kind] for kind in kinds)}, got {value!r}")


def _kinds(name: str) -> tuple:
    """The types that field `name` may have."""
    return typing.get_args(TYPES[name]) if isinstance(TYPES[name], types.UnionType) else (TYPES[name],)


def _whole_number(value) -> int:
    """int, from 1000, "1_000", "1e3" or 1000.0; ValueError for the rest."""
    try:
        number = int(value) if isinstance(value, (int, str)) else float(value)
    except ValueError:
        number = float(value)
    if number != int(number):
        raise ValueError(value)
    return int(number)


def _finite_number(value) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def read_preset(path: str) -> dict:
    """The assignments of a preset file, and `out_dir` named after it unless it sets one."""
    if not Path(path).is_file():
        here = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in ("__init__", "gpus"))
        raise UserError(f"no preset at {path}: config/ has {', '.join(here)}")
    try:
        names = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:  # a preset is the user's own code: whatever it raises is theirs to read
        raise UserError(f"{path} could not be read: {type(error).__name__}: {error}") from None
    values = {k: v for k, v in names.items() if not k.startswith("_") and not isinstance(v, types.ModuleType)}
    try:
        values = {name: convert(name, value) for name, value in values.items()}
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return {"out_dir": f"out/{Path(path).stem}"} | _without_empty_out_dir(values)


def _without_empty_out_dir(values: dict) -> dict:
    """`out_dir=none` asks for the default, which is to leave it out."""
    return {name: value for name, value in values.items() if name != "out_dir" or value}


def parse_command_line(argv: list[str] | None = None) -> tuple[dict, dict]:
    """`[PRESET] [--name=value | --name value ...]` -> (settings of the preset, settings of the command line)."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        usage="python train.py [config/PRESET.py] [--name=value ...]",
        description="Train a decoder. Every setting below can stand in a preset or on the command line.",
        epilog="Example: python train.py config/small.py --n_kv_head=1 --max_steps 200",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=120),
    )
    parser.add_argument("preset", nargs="?", help="a file of assignments, as in config/")
    for title, members in (("model", MODEL_FIELDS), ("run", RUN_FIELDS)):
        group = parser.add_argument_group(title)
        for name, f in members.items():
            choices = f" [{', '.join(CHOICES[name])}]" if name in CHOICES else ""
            flag = {"nargs": "?", "const": True} if bool in _kinds(name) else {}
            text = f"{f.metadata['help']}{choices} (default: {_show(f.default)})".replace("%", "%%")
            group.add_argument(f"--{name}", help=text, metavar="X", default=argparse.SUPPRESS, **flag)
    known, unknown = parser.parse_known_args(argv)
    for word in unknown:
        if word.startswith("--"):
            convert(word[2:].split("=")[0], None)  # an unknown name: raises with the nearest match
        raise UserError(f"unexpected argument {word!r}: settings are written --name=value, after the preset")
    overrides = {name: convert(name, value) for name, value in vars(known).items() if name != "preset"}
    return (read_preset(known.preset) if known.preset else {}), _without_empty_out_dir(overrides)


def init_config(path: str, shape: dict, values: dict) -> TrainConfig:
    """The run that `values` describe, with the model that the checkpoint at `path` holds, of the fields `shape`.

    Raises:
        UserError: a value that the weights contradict; the sentence names the setting.
    """
    for name in sorted(values.keys() & (shape.keys() - FREE_ON_INIT)):
        if values[name] is not None and values[name] != shape[name]:
            raise UserError(
                f"{name}={_show(values[name])} contradicts init_from={path}, whose weights have "
                f"{name}={_show(shape[name])}: leave {name} out, or start without init_from"
            )
    chosen = {k: v for k, v in values.items() if k in FREE_ON_INIT or k not in shape}
    if scaling := chosen.get("rope_scaling"):
        try:  # against the length that the checkpoint was trained for, whatever block_size this run takes
            model = stretched(ModelConfig(**shape), str(scaling))
        except ValueError as error:
            raise UserError(str(error)) from None
        chosen = {"block_size": model.block_size} | chosen | {"rope_scaling": model.rope_scaling}
    return build(shape | chosen)


def resume_config(saved: dict, preset: dict, overrides: dict) -> tuple[TrainConfig, list[str]]:
    """The saved run with the command line over it, and a line for each difference worth telling.

    Raises:
        UserError: an override that the checkpoint cannot follow (another model, another optimizer).
    """
    notes = []
    for name, value in overrides.items():
        if name == "resume" or saved.get(name, FIELDS[name].default) == value:
            continue
        change = f"{name}: {_show(saved.get(name, FIELDS[name].default))} -> {_show(value)}"
        if name in FIXED_ON_RESUME:
            raise UserError(f"a resumed run cannot change {change}: start a new run with another --out_dir")
        notes.append(f"changed by the command line: {change}")
    for name, value in preset.items():
        if name not in overrides and name in saved and saved[name] != convert(name, value):
            notes.append(f"the preset now says {name}={_show(value)}; this run keeps {_show(saved[name])}")
    return build(saved | overrides), notes


def _show(value) -> str:
    """A setting as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) and not value.strip() else str(value)


def show(config: TrainConfig) -> str:
    """The resolved settings, one group a paragraph."""
    flat = config.flat()
    groups = (("model", MODEL_FIELDS), ("run", RUN_FIELDS))
    return "\n".join(
        f"{title}: " + " ".join(f"{name}={_show(flat[name])}" for name in names) for title, names in groups
    )


def pick_device(name: str = "auto") -> torch.device:
    """The torch.device for a `device` setting; UserError when the machine lacks it."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if available[kind])
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or not available.get(device.type, False):
        here = ", ".join(kind for kind, present in available.items() if present)
        raise UserError(f"device={name} is not available here: use one of {here}")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of activations for a `dtype` setting on a device."""
    if name == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if has_bf16 else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
