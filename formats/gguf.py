"""GGUF, the format of llama.cpp: metadata, tokenizer and (quantised) tensors in one file, for the Llama family.

The `gguf` package parses the file, which stays on the disk, and dequantises one tensor at a time. Every key that the
metadata has for the model's architecture is read here or refused by name: one that is not understood may change the
maths.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data import UserError
from model import ModelConfig
from rope import rope_frequencies

from .gguf_tokenizer import read_tokenizer, value
from .interleaved_rope import to_half_split
from .target import refuse_existing, write_checkpoint

ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}  # whether q and k rows pair neighbouring channels

NAMES = {
    "token_embd": "embed",
    "output_norm": "norm",
    "output": "head",
    "attn_norm": "attention_norm",
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_output": "attention.o_proj",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's scaling, as what each frequency is divided by
# What Llama 3.1 (8) and 3.2 (32) were trained with; the file has the divisors only.
LLAMA3_SCALINGS = ("llama3:8:1:4:8192", "llama3:32:1:4:8192")
TYPES = {"F32": torch.float32, "F16": torch.float16}


def convert(file: str | os.PathLike, out: str | os.PathLike, dtype: torch.dtype | None = None) -> ModelConfig:
    """Write a GGUF file as a checkpoint directory; returns the model's shape.

    dtype: what to store the weights as; None keeps float32 and float16, and makes the others bfloat16.

    Raises:
        UserError: not a whole GGUF file, or a model that the decoder cannot represent.
    """
    refuse_existing(out)
    reader = open_gguf(Path(file))
    config = read_config(reader)
    tokenizer = read_tokenizer(reader, name=f"gguf:{Path(file).stem}")
    if dtype is None:
        embedding = next(t for t in reader.tensors if t.name == "token_embd.weight")
        dtype = TYPES.get(embedding.tensor_type.name, torch.bfloat16)
    write_checkpoint(out, config, read_tensors(reader, config), tokenizer, dtype, source=f"gguf:{Path(file).name}")
    return config


def open_gguf(file: Path):
    """A `gguf.GGUFReader` of the file."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise UserError("reading GGUF needs the package gguf: pip install gguf") from None
    try:
        with open(file, "rb") as opened:
            magic = opened.read(4)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    if magic != b"GGUF":
        raise UserError(f"{file} is not a GGUF file: it does not begin with GGUF")
    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError):  # whatever it meets past the end
        raise UserError(f"{file} breaks off or is damaged: fetch it again") from None
    if value(reader, "split.count", 1) > 1:
        raise UserError(f"{file} is one part of several: put them together with `llama-gguf-split --merge`")
    return reader


class _Keys:
    """The metadata of one architecture, `llama.block_count` and so on, with a record of what was read."""

    def __init__(self, reader, architecture: str):
        self.prefix, self.read = f"{architecture}.", set()
        self.values = {
            key.removeprefix(self.prefix): value(reader, key) for key in reader.fields if key.startswith(self.prefix)
        }

    def get(self, key: str, default=None):
        self.read.add(key)
        return self.values.get(key, default)

    def number(self, key: str, default=None):
        found = self.get(key, default)
        if found is None:
            raise UserError(f"the GGUF file lacks {self.prefix}{key}")
        if not isinstance(found, (int, float)):
            raise UserError(f"{self.prefix}{key} is {type(found).__name__}: layers that differ are not supported")
        return found

    def refuse_unread(self):
        unread = {key: found for key, found in self.values.items() if key not in self.read and found not in (0, None)}
        if unread:
            named = ", ".join(f"{self.prefix}{key}={found}" for key, found in sorted(unread.items()))
            raise UserError(f"the GGUF file has settings that this decoder does not know: {named}")


def read_config(reader) -> ModelConfig:
    """The ModelConfig that the metadata and the names of the tensors describe."""
    architecture = value(reader, "general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(f"the GGUF architecture {architecture!r} is not one of {', '.join(ARCHITECTURES)}")
    keys, names = _Keys(reader, architecture), {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in names:
        raise UserError("the GGUF file has no token_embd.weight")
    n_head, n_embd = keys.number("attention.head_count"), keys.number("embedding_length")
    head_dim = keys.number("attention.key_length", n_embd // max(n_head, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.number(key, head_dim) != head_dim:
            raise UserError(f"{keys.prefix}{key}={keys.get(key)} is not the head_dim of {head_dim}: not supported")
    keys.get("vocab_size")  # the embedding has as many rows as it has
    shape = dict(
        vocab_size=int(names["token_embd.weight"].shape[1]),
        n_layer=keys.number("block_count"),
        n_head=n_head,
        n_kv_head=keys.number("attention.head_count_kv", n_head),
        n_embd=n_embd,
        head_dim=head_dim,
        d_ff=keys.number("feed_forward_length"),
        block_size=keys.number("context_length"),
        rope_theta=_float32(keys.number("rope.freq_base", 10000.0)),
        norm_eps=_float32(keys.number("attention.layer_norm_rms_epsilon")),
        tie_embeddings="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        sliding_window=keys.get("attention.sliding_window") or None,
        rope_scaling=_rope_scaling(keys),
    )
    keys.refuse_unread()
    if shape["n_layer"] > len(names):  # before so many layers are made, to name their tensors
        raise UserError(f"the GGUF file has {len(names)} tensors, too few for {shape['n_layer']} layers")
    try:
        config = ModelConfig(**shape)
    except (ValueError, TypeError) as error:
        raise UserError(f"the GGUF file describes no model: {error}") from None
    return _llama3_scaled(config, names[ROPE_FACTORS]) if ROPE_FACTORS in names else config


def _float32(number: float) -> float:
    """1e-05, which GGUF keeps in 32 bits, and not 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def _rope_scaling(keys: _Keys) -> str | None:
    kind, factor = keys.get("rope.scaling.type", "none"), keys.get("rope.scaling.factor", 0.0)
    original = keys.get("rope.scaling.original_context_length")
    keys.get("rope.scaling.finetuned")  # whether it was trained so: a remark
    if kind == "none" or not factor:
        return None
    if kind not in ("linear", "yarn"):
        raise UserError(f"{keys.prefix}rope.scaling.type={kind!r} is not supported, only linear and yarn")
    return f"{kind}:{_float32(factor):g}" + (f":{original}" if original else "")


def _llama3_scaled(config: ModelConfig, factors) -> ModelConfig:
    """The config with that scaling of Llama 3 whose frequencies the file's divisors give."""
    divisors = torch.from_numpy(_dequantised(factors))
    plain, _ = rope_frequencies(config)
    for scaling in LLAMA3_SCALINGS:
        scaled = replace(config, rope_scaling=scaling)
        frequencies, _ = rope_frequencies(scaled)
        if divisors.shape == plain.shape and torch.allclose(plain / frequencies, divisors, rtol=1e-4):
            return scaled
    raise UserError(f"{ROPE_FACTORS} is not the rotary scaling of Llama 3.1 or 3.2: not supported")


def read_tensors(reader, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The weights under our names, dequantised one at a time, fp32."""
    interleaved = ARCHITECTURES[value(reader, "general.architecture")]
    for stored in reader.tensors:
        if stored.name == ROPE_FACTORS:
            continue
        name = our_name(stored.name)
        tensor = torch.from_numpy(_dequantised(stored))
        heads = {"q_proj": config.n_head, "k_proj": config.n_kv_head}.get(name.split(".")[-2])
        divides = heads is not None and tensor.shape[0] % (2 * heads) == 0  # else write_checkpoint refuses the shape
        yield name, to_half_split(tensor, heads) if interleaved and divides else tensor


def our_name(name: str) -> str:
    """blk.3.attn_q.weight -> layers.3.attention.q_proj.weight. UserError for a tensor the decoder has no place for."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in NAMES:
        raise UserError(f"the GGUF file has a tensor that this decoder has no place for: {name}")
    layer = f"layers.{match[1]}." if match[1] else ""
    return f"{layer}{NAMES[match[2]]}.{match[3]}"


def _dequantised(stored) -> np.ndarray:
    """fp32, a copy in memory, [out, in]."""
    from gguf import dequantize

    try:
        return np.array(dequantize(stored.data, stored.tensor_type), dtype=np.float32)
    except NotImplementedError:
        raise UserError(f"{stored.name} is stored as {stored.tensor_type.name}, which gguf cannot dequantise") from None
