"""Where converted models go: folders written tensor by tensor, under a temporary name until they are whole.

A safetensors file begins with the name, type, shape and place of every tensor. All of that follows from the
ModelConfig, so the header is written first and each tensor then goes to its place as it comes: memory holds one at a
time.
"""

import json
import math
import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from data import Tokenizer, UserError
from data.files import move_into_place, sync
from model import ModelConfig, Transformer

DTYPE_CODES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in `model.safetensors` of a checkpoint; a tied head is not stored."""
    with torch.device("meta"):
        weights = Transformer(config).state_dict()
    return {n: tuple(t.shape) for n, t in weights.items() if not (config.tie_embeddings and n == "head.weight")}


def write_checkpoint(
    out: str | os.PathLike,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: Tokenizer,
    dtype: torch.dtype,
    source: str,
) -> None:
    """Write a checkpoint directory like those of `train.py`, without an optimizer's state.

    Args:
        out: the directory; it must not exist. It appears when all of it is on the disk, or not at all.
        config: the shape of the model; `vocab_size` is the number of rows that the embedding has in the source.
        tensors: (our name, tensor), each once, in any order, as float tensors of the shapes of `weight_shapes`. The
            embedding and the head may come without the rows that pad the vocabulary: these become zeros.
        dtype: what to store them as.
        source: where the model came from, kept in `state.json`.

    Raises:
        UserError: `out` exists, a tensor is missing, unknown, of another shape, not finite or too large for `dtype`,
            the tokenizer has ids without a row in the embedding, or the disk is full.
    """
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"the tokenizer of {source} has {tokenizer.vocab_size} ids but the embedding only "
            f"{config.vocab_size} rows: they do not belong together"
        )
    padded = (_padded(name, tensor, config) for name, tensor in tensors)
    with new_folder(out) as folder:
        write_safetensors(folder / "model.safetensors", weight_shapes(config), padded, dtype)
        tokenizer.save(folder)
        state = {"step": 0, "config": asdict(config), "source": source}
        (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")


def _padded(name, tensor, config):
    if name in ("embed.weight", "head.weight") and tensor.shape == (config.vocab_size, config.n_embd):
        tensor = torch.nn.functional.pad(tensor, (0, 0, 0, config.padded_vocab_size - config.vocab_size))
    return name, tensor


def refuse_existing(out: str | os.PathLike) -> None:
    """Raise UserError if `out` exists, so that nobody waits for a conversion that cannot be stored."""
    if os.path.lexists(Path(out)):  # "" is the present folder to Path
        raise UserError(f"{out or Path(out)} exists already: name a new directory, or remove that one first")


@contextmanager
def new_folder(out: str | os.PathLike) -> Iterator[Path]:
    """A folder to fill, which becomes `out` if all goes well and is removed if not.

    Raises:
        UserError: `out` exists, or the disk refuses.
    """
    refuse_existing(out)
    out = Path(out)
    partial = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a process of the same number that was killed
        partial.mkdir(parents=True)
        yield partial
        for path in partial.iterdir():
            sync(path)
        refuse_existing(out)  # it may have come while we were writing
        move_into_place(partial, out)
    except OSError as error:
        raise UserError(f"could not write {out}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_safetensors(
    file: Path,
    shapes: dict[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write the tensors to one safetensors file as they come, with a progress bar.

    Args:
        shapes: what the file will hold; `tensors` brings each of these names once, in any order.
        metadata: texts for the file's header.

    Raises:
        UserError: a tensor is missing, unknown, of another shape, not finite or too large for `dtype`.
    """
    header, places, end = ({"__metadata__": metadata} if metadata else {}), {}, 0
    for name, shape in shapes.items():
        places[name], end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [places[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    with open(file, "wb") as f, tqdm(total=end, unit="B", unit_scale=True, desc="tensors", dynamic_ncols=True) as bar:
        f.write(struct.pack("<Q", len(text)) + text)
        start = f.tell()
        for name, tensor in tensors:
            if name not in places:
                raise UserError(f"the model has a tensor {name} (or has it twice) that its configuration does not know")
            f.seek(start + places.pop(name))
            stored = _checked(name, tensor, shapes[name], dtype)
            f.write(stored.view(torch.uint8).numpy())
            bar.update(stored.nbytes)
    if places:
        raise UserError(
            f"the model lacks {len(places)} of its {len(shapes)} tensors, the first is {next(iter(places))}"
        )


def _checked(name, tensor, shape, dtype) -> Tensor:
    """The tensor as it is stored: on the CPU, contiguous, in `dtype`."""
    if tensor.shape != shape:
        raise UserError(f"{name} has the shape {list(tensor.shape)}, but the configuration asks for {list(shape)}")
    if not _is_finite(tensor):
        raise UserError(f"{name} holds NaN or infinity: the model is damaged")
    stored = tensor.detach().cpu().to(dtype).contiguous()
    if dtype == torch.float16 and not _is_finite(stored):
        raise UserError(f"{name} has values too large for float16: store the model with --dtype bfloat16")
    return stored


def _is_finite(tensor) -> bool:
    """Whether no value is NaN or infinite; the extremes tell, without a second tensor as large as this one."""
    return all(math.isfinite(extreme) for extreme in torch.stack(tensor.aminmax()).tolist())
