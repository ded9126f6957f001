"""Hugging Face model folders, in and out: config.json, safetensors in one file or many, and the tokenizer's files.

Our rotary positions have the layout of transformers, so a tensor is copied under another name and nothing else. Files
that only pickle can read (`pytorch_model.bin`) are refused: a pickle can run any program.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import checkpoint
from data import UserError
from formats.gguf_tokenizer import QWEN2_PATTERN
from formats.huggingface_config import read_config, write_config
from formats.target import new_folder, refuse_existing, weight_shapes, write_checkpoint, write_safetensors
from formats.tokenizers import read_tokenizer, write_tokenizer
from model import ModelConfig

INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BEGINNINGS = {"layers": "model.layers", "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
MODULES = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attention": "self_attn"}
BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # old files hold what config.json says


def their_name(name: str) -> str:
    """Our name of a tensor -> its name in transformers."""
    beginning, *rest = name.split(".")
    return ".".join([BEGINNINGS[beginning], *(MODULES.get(part, part) for part in rest)])


def convert_from(source: str, out: str | os.PathLike, dtype: torch.dtype | None = None) -> ModelConfig:
    """Make the checkpoint directory `out` of a Hugging Face folder, or of a model on the hub by its name.

    Args:
        dtype: of the stored tensors; None keeps theirs (the widest, where they differ).

    Raises:
        UserError: the folder is incomplete or damaged, or holds what this decoder cannot represent.
    """
    refuse_existing(out)
    folder = find_folder(source)
    config = read_config(_read_json(folder / "config.json"), str(folder / "config.json"))
    files = find_tensors(folder)
    stored = _check_names(files, config, folder)
    tokenizer = read_tokenizer(folder, f"hf:{Path(source).resolve().name}")
    tensors = read_tensors(files, {their_name(name): name for name in weight_shapes(config)})
    write_checkpoint(out, config, tensors, tokenizer, dtype or stored, source)
    return config


def find_folder(source: str) -> Path:
    """The folder of a model: `source` itself, or where the hub's library puts the model of that name."""
    if Path(source).is_dir():
        return Path(source)
    if Path(source).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", source) or source.startswith("."):
        raise UserError(f"{source} is no folder with a config.json, and no name on the hub, such as Qwen/Qwen3-0.6B")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"there is no folder {source}; to download it by that name, `pip install huggingface_hub` first"
        ) from None
    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
    try:
        return Path(snapshot_download(source, allow_patterns=wanted, ignore_patterns=["consolidated*", "original/*"]))
    except (OSError, ValueError) as error:  # what the hub's library raises is one or the other
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"there is no folder {source}, and the hub did not give a model of that name: {reason}"
        ) from None


def _read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} is missing: name the folder of a Hugging Face model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no JSON object")
    return content


def find_tensors(folder: Path) -> dict[str, Path]:
    """Name of each tensor in the folder's safetensors -> the file that holds it."""
    if (folder / INDEX).is_file():
        return _read_index(folder)
    single = folder / "model.safetensors"
    if single.is_file():
        return dict.fromkeys(_names_in(single), single)
    pickled = sorted(folder.glob("*.bin"))
    if pickled:
        raise UserError(
            f"{folder} has its weights in {pickled[0].name}, a pickle, which could run any program: convert it to "
            "safetensors first (load the model in transformers and call save_pretrained)"
        )
    raise UserError(f"{folder} has no weights that can be read: it lacks model.safetensors and {INDEX}")


def _read_index(folder) -> dict[str, Path]:
    index = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(shard, str) for shard in index.values()):
        raise UserError(f"{folder / INDEX} has no weight_map from tensors to files")
    held = {}
    for shard in sorted(set(index.values())):
        if Path(shard).name != shard:
            raise UserError(f"{folder / INDEX} names a file outside its folder: {shard}")
        if not (folder / shard).is_file():
            raise UserError(f"{folder / shard} is missing, and {INDEX} needs it")
        held |= dict.fromkeys(_names_in(folder / shard), folder / shard)
    for name, shard in index.items():
        if held.get(name) != folder / shard:
            raise UserError(f"{INDEX} says that {name} is in {shard}, and it is not there")
    return held


def _opened(file):
    try:
        return safe_open(file, "pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is damaged or not whole: {error}") from None


def _names_in(file) -> list[str]:
    with _opened(file) as tensors:
        return list(tensors.keys())


def _check_names(files: dict[str, Path], config: ModelConfig, folder: Path) -> torch.dtype:
    """Refuse a folder with other tensors than the config asks for, before anything is written; returns their dtype."""
    if config.n_layer > len(files):  # before so many layers are made, to name their tensors
        raise UserError(f"{folder} has {len(files)} tensors, too few for {config.n_layer} layers as in its config.json")
    wanted = {their_name(name) for name in weight_shapes(config)}
    missing = sorted(wanted - files.keys())
    if missing:
        raise UserError(f"{folder} lacks {len(missing)} tensors that its config.json asks for, such as {missing[0]}")
    extra = sorted(name for name in files.keys() - wanted if name != "lm_head.weight" and not BUFFERS.fullmatch(name))
    if extra:
        raise UserError(f"{folder} has tensors that this decoder has no place for, such as {extra[0]}")
    if "lm_head.weight" in files.keys() - wanted:
        _check_tied(files, folder)
    dtypes = set()
    for file in sorted(set(files.values())):
        with _opened(file) as tensors:
            for name in wanted.intersection(tensors.keys()):
                code = tensors.get_slice(name).get_dtype()
                if code not in DTYPES:
                    raise UserError(f"{name} in {file} is of type {code}: only {', '.join(DTYPES)} can be read")
                dtypes.add(DTYPES[code])
    return dtypes.pop() if len(dtypes) == 1 else torch.float32  # which holds both 16-bit kinds exactly


def _check_tied(files, folder):
    """A head in the files of a model that ties it: harmless as a copy of the embedding, otherwise which one counts?"""
    pair = {name: files[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors = dict(read_tensors(pair, {name: name for name in pair}))
    if not torch.equal(*tensors.values()):
        raise UserError(f"{folder} ties the head to the embedding in config.json but holds a head that differs from it")


def read_tensors(files: dict[str, Path], names: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """(new name, tensor) of every tensor in `names` (its name in the files -> new name), one after another.

    `files` tells the file of each tensor, as `find_tensors` does. Memory holds one tensor at a time.
    """
    for file in sorted(set(files.values())):
        with _opened(file) as tensors:
            for name in tensors.keys():
                if name in names:
                    yield names[name], tensors.get_tensor(name)


def convert_to(run: str, out: str | os.PathLike, dtype: torch.dtype | None = None) -> str | None:
    """Write a run or checkpoint as a folder that `transformers`, and what reads its files, can load.

    Args:
        dtype: of the stored tensors; None keeps those of the checkpoint.

    Returns:
        what the user has to know to load it right, or None.

    Raises:
        UserError: no checkpoint, or a model or tokenizer that has no counterpart there.
    """
    refuse_existing(out)
    path = checkpoint.resolve(run)
    config, tokenizer = checkpoint.model_config(checkpoint.load_state(path)), checkpoint.load_tokenizer(path)
    dtype = dtype or checkpoint.stored_dtype(path)
    eos_ids = [tokenizer.eot_id, *sorted(tokenizer.stop_ids - {tokenizer.eot_id})]
    values = write_config(config, dtype, tokenizer.bos_id, eos_ids)
    rows = {"model.embed_tokens.weight": config.vocab_size, "lm_head.weight": config.vocab_size}  # without the padding
    names = {name: their_name(name) for name in weight_shapes(config)}
    shapes = {names[n]: (rows.get(names[n], shape[0]), *shape[1:]) for n, shape in weight_shapes(config).items()}
    weights = path / "model.safetensors"
    tensors = read_tensors(dict.fromkeys(_names_in(weights), weights), names)
    trimmed = ((name, tensor[: rows.get(name)]) for name, tensor in tensors)
    with new_folder(out) as folder:
        write_safetensors(folder / "model.safetensors", shapes, trimmed, dtype, metadata={"format": "pt"})
        _write_json(folder / "config.json", values)
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": values["eos_token_id"]}
        _write_json(
            folder / "generation_config.json", {name: value for name, value in ids.items() if value is not None}
        )
        write_tokenizer(tokenizer, folder)
    if values["model_type"] == "qwen2" and tokenizer.pattern != QWEN2_PATTERN:
        return (
            "transformers 5 cuts the text of every qwen2 model (here: qkv_bias=true) as Qwen does: load this tokenizer "
            "with PreTrainedTokenizerFast.from_pretrained, not with AutoTokenizer"
        )
    return None


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
