"""Checkpoints: directories that hold everything a run needs, and that are whole at every instant.

    out/<run>/last          the newest state; `--resume` continues it
    out/<run>/best          the state of lowest validation loss; generation reads it
    out/<run>/step_000500   numbered ones, when keep_checkpoints asks for them

Each holds `model.safetensors`, `optimizer.safetensors`, `tokenizer.json` and `state.json` (step, settings, versions).
A checkpoint is written under a temporary name, flushed to the disk, then renamed. Where an old one has to make room
it is renamed to `.last.old` first, so a kill between the two renames leaves that one, and `find` knows it.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from config import FIELDS, MODEL_FIELDS
from data import UserError
from data import load_tokenizer as read_tokenizer
from data.files import move_into_place, place_of_old, sync
from model import ModelConfig, Transformer
from rope import stretched

STATE = "state.json"
OPTIMIZER_STATE = {"AdamW": ("step", "exp_avg", "exp_avg_sq"), "Muon": ("momentum",)}  # what each keeps of a parameter


def save(run: Path, state: dict, model, optimizers, tokenizer, best: bool = False, keep: int = 0):
    """Make the present state the run's `last` checkpoint, and `best` too when told.

    Args:
        run: the run's directory.
        state: JSON data: `step`, `config` (flat), and what else the run wants back.
        model: the Transformer, not its compiled wrapper.
        keep: how many numbered checkpoints to leave.

    Raises:
        UserError: the disk is full or cannot be written; the checkpoints that were there still are.
    """
    temporary = run / "saving.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(_weights(model), temporary / "model.safetensors")
        save_file(_optimizer_tensors(model, optimizers), temporary / "optimizer.safetensors")
        tokenizer.save(temporary)
        (temporary / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        for path in temporary.iterdir():
            sync(path)
        # `last` goes last: if a kill comes before it, the resumed run meets this step again and renews the others.
        if best:
            move_into_place(_linked_copy(temporary, run / "best.tmp"), run / "best")
        if keep:
            name = f"step_{state['step']:06d}"
            move_into_place(_linked_copy(temporary, run / f"{name}.tmp"), run / name)
            for outdated in numbered(run)[keep:]:
                shutil.rmtree(outdated)
        move_into_place(temporary, run / "last")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"could not save to {run}: {error}; the earlier checkpoints there are intact") from None


def _weights(model) -> dict:
    tied = model.config.tie_embeddings
    return {name: t.contiguous() for name, t in model.state_dict().items() if not (tied and name == "head.weight")}


def _optimizer_tensors(model, optimizers) -> dict:
    """Optimizer state by parameter name, `layers.0.mlp.up_proj.weight/exp_avg`: independent of group order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{key}": tensor.contiguous()
        for optimizer in optimizers
        for parameter, entries in optimizer.state.items()
        for key, tensor in entries.items()
    }


def _linked_copy(source: Path, target: Path) -> Path:
    """The same files under another directory without a second copy on the disk, where the file system can."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in source.iterdir():
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copy2(path, target / path.name)
    return target


def find(run: Path, name: str) -> Path | None:
    """The checkpoint `name` of a run, or the one that was making room for it when the run was killed."""
    return next((path for path in (run / name, place_of_old(run / name)) if (path / STATE).is_file()), None)


def numbered(run: Path) -> list[Path]:
    """The numbered checkpoints of a run, the one saved last first. (A run may have gone back: names do not tell.)"""
    found = [path for path in run.glob("step_*") if path.name[5:].isdigit() and (path / STATE).is_file()]
    return sorted(found, key=lambda path: (path / STATE).stat().st_mtime_ns, reverse=True)


def find_any(run: Path, prefer: str) -> Path | None:
    """The preferred checkpoint of a run, or else another one: last, the newest numbered one, best."""
    return find(run, prefer) or find(run, "last") or next(iter(numbered(run)), None) or find(run, "best")


def resolve(path, prefer: str = "best") -> Path:
    """The checkpoint directory for a run directory (its `prefer`red one) or for a checkpoint directory itself."""
    path = Path(path)
    if (path / STATE).is_file():
        return path
    found = find_any(path, prefer) or find(path.parent, path.name)
    if found is None and (path / "metrics.jsonl").exists():
        raise UserError(f"the run {path} has saved no checkpoint yet: start it again without --resume")
    if found is None:
        what = "is not a checkpoint or a run directory" if path.exists() else "does not exist"
        raise UserError(
            f"{path} {what}: name a directory that `python train.py config/small.py` wrote, such as out/small"
        )
    return found


def newest_run(folder="out") -> Path | None:
    """The run under `folder` that was saved last, or None."""
    found = [find(run, "last") for run in Path(folder).glob("*") if run.is_dir()]
    saved = [checkpoint for checkpoint in found if checkpoint]
    return max(saved, key=lambda c: (c / STATE).stat().st_mtime).parent if saved else None


def load_state(path) -> dict:
    """The `state.json` of a checkpoint directory."""
    file = Path(path) / STATE
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        return state | {"config": dict(state["config"]), "step": int(state["step"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}): use another checkpoint of the run") from None


def _load_tensors(file: Path, device="cpu") -> dict:
    try:
        return load_file(file, device=str(device))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is missing or damaged ({error}): use another checkpoint of the run") from None


def model_config(state: dict) -> ModelConfig:
    """The shape of the model that a checkpoint's state describes."""
    unknown = set(state["config"]) - set(FIELDS)
    if unknown:
        raise UserError(f"the checkpoint has settings this version does not know: {', '.join(sorted(unknown))}")
    try:
        config = ModelConfig(**{name: value for name, value in state["config"].items() if name in MODEL_FIELDS})
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"the checkpoint describes no model: {error}") from None
    if config.vocab_size is None:
        raise UserError("the checkpoint describes no model: it has no vocab_size")
    return config


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is missing or damaged ({error}): use another checkpoint of the run") from None


def load_weights(path, model) -> None:
    """Fill `model` with the weights of a checkpoint directory, one at a time; names and shapes must agree."""
    file, wanted = Path(path) / "model.safetensors", _weights(model)
    with _opened(file) as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}
        odd = [n for n in shapes.keys() | wanted.keys() if n not in wanted or shapes.get(n) != wanted[n].shape]
        if odd:
            raise UserError(f"{file} holds another model than its state.json describes: see {sorted(odd)[0]}")
        with torch.no_grad():
            for name, tensor in wanted.items():
                tensor.copy_(weights.get_tensor(name))


def stored_dtype(path) -> torch.dtype:
    """The dtype of the weights in a checkpoint directory: fp32 from `train.py`, and what `convert.py` was told."""
    with _opened(Path(path) / "model.safetensors") as weights:
        kinds = {weights.get_slice(name).get_dtype() for name in weights.keys()}
    return {frozenset({"BF16"}): torch.bfloat16, frozenset({"F16"}): torch.float16}.get(frozenset(kinds), torch.float32)


def load_optimizers(path, model, optimizers) -> None:
    """Give the optimizers the state they had when the checkpoint was saved."""
    file = Path(path) / "optimizer.safetensors"
    tensors = _load_tensors(file)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            for entry in OPTIMIZER_STATE[type(optimizer).__name__]:
                key = f"{names[parameter]}/{entry}"
                tensor = tensors.pop(key, None)
                if tensor is None or tensor.shape not in (parameter.shape, ()):
                    raise UserError(f"{file} does not fit this run: see {key}")
                optimizer.state[parameter][entry] = tensor.to(parameter.device)
    if tensors:
        raise UserError(f"{file} does not fit this run: it has {next(iter(tensors))}")


def load_model(
    path,
    device="cpu",
    dtype: torch.dtype | None = None,
    attention: str | None = None,
    rope_scaling: str | None = None,
) -> Transformer:
    """The model of a run or checkpoint directory, ready to generate.

    Args:
        path: a run directory (its best checkpoint is taken) or a checkpoint directory.
        device: where to put it.
        dtype: of its parameters; None keeps the stored one (fp32 for checkpoints of `train.py`).
        attention: the backend of `kernels.flash_attention`; None chooses for the device.
        rope_scaling: in place of the checkpoint's, as in `rope.py`, with block_size following ("none": without any).

    Raises:
        UserError: nothing there, a checkpoint that is damaged or of another kind, or no such rope_scaling.
    """
    path = resolve(path)
    config = model_config(load_state(path))
    if rope_scaling is not None:
        try:
            config = stretched(config, rope_scaling)
        except ValueError as error:
            raise UserError(str(error)) from None
    with torch.device("meta"):  # no memory yet, and no random numbers for weights that come from the file
        model = Transformer(config, attention=attention).to(dtype or stored_dtype(path))
    model.to_empty(device=device)
    if config.tie_embeddings:
        model.head.weight = model.embed.weight  # to_empty gave each its own
    load_weights(path, model)
    return model.eval().requires_grad_(False)


def load_tokenizer(path):
    """The tokenizer that the model of a run or checkpoint directory was trained with."""
    return read_tokenizer(resolve(path))
