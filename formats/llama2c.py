"""llama2.c's legacy checkpoints (Karpathy 2023): one header, then every weight in fp32, in a fixed order.

    int32   dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size (negative: untied head), seq_len
    fp32    token embedding; then for all layers together attention norms, wq, wk, wv, wo, mlp norms, w1, w2, w3;
            the final norm, cosines and sines of RoPE (not needed here), the head if untied

Matrices are [out, in], and RoPE pairs neighbouring channels. The tokenizer is a file of its own: the length of the
longest token (int32), then for each token a score (fp32), a length in bytes (int32) and these bytes.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data import UserError
from data.hf_tokenizer import SPACE, HFTokenizer
from data.tokenizer import Specials
from model import ModelConfig

from . import sentencepiece
from .interleaved_rope import to_half_split
from .target import refuse_existing, write_checkpoint
from .tokenizers import from_library

HEADER = struct.Struct("<7i")
LARGEST = 1 << 24  # no number in a header is larger
UNKNOWN, BOS, EOS = "<unk>", "<s>", "</s>"  # ids 0, 1, 2


def convert(
    file: str | os.PathLike, tokenizer: str | os.PathLike, out: str | os.PathLike, dtype: torch.dtype | None = None
) -> ModelConfig:
    """Write a model and its tokenizer's file as a checkpoint directory; returns the model's shape.

    dtype: what to store the weights as (None: float32, as in the file).

    Raises:
        UserError: a file that is not what it should be, or the two do not belong together.
    """
    refuse_existing(out)
    file = Path(file)
    config = read_config(file)
    tokens = read_tokenizer(Path(tokenizer), config.vocab_size)
    source = f"llama2c:{file.name}"
    write_checkpoint(out, config, read_tensors(file, config), tokens, dtype or torch.float32, source)
    return config


def read_config(file: Path) -> ModelConfig:
    """The shape in the header, checked against the size of the file."""
    try:
        with open(file, "rb") as opened:
            header = opened.read(HEADER.size)
        size = file.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    shape = HEADER.unpack(header) if len(header) == HEADER.size else (0,)
    if not all(0 < abs(number) <= LARGEST for number in shape):  # text, or its later versions, which begin with "ak42"
        raise UserError(f"{file} is not a checkpoint in llama2.c's legacy layout (version 0 of its export.py)")
    dim, hidden, layers, heads, kv_heads, vocab, seq_len = shape
    try:
        config = ModelConfig(
            vocab_size=abs(vocab),
            n_layer=layers,
            n_head=heads,
            n_kv_head=kv_heads,
            n_embd=dim,
            d_ff=hidden,
            block_size=seq_len,
            rope_theta=10000.0,
            norm_eps=1e-5,
            tie_embeddings=vocab > 0,
        )
    except (ValueError, ZeroDivisionError) as error:
        raise UserError(f"{file} is not a checkpoint in llama2.c's legacy layout: {error}") from None
    expected = HEADER.size + 4 * sum(int(np.prod(shape)) for _, shape in _layout(config))
    if size != expected:
        raise UserError(f"{file} has {size:,} bytes, and a model of the shape in its header has {expected:,}")
    return config


def _layout(config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """What follows the header, in order: our name, with * for all layers, and shape."""
    L, C, V = config.n_layer, config.n_embd, config.vocab_size
    q, kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    parts = [
        ("embed.weight", (V, C)),
        ("layers.*.attention_norm.weight", (L, C)),
        ("layers.*.attention.q_proj.weight", (L, q, C)),
        ("layers.*.attention.k_proj.weight", (L, kv, C)),
        ("layers.*.attention.v_proj.weight", (L, kv, C)),
        ("layers.*.attention.o_proj.weight", (L, C, q)),
        ("layers.*.mlp_norm.weight", (L, C)),
        ("layers.*.mlp.gate_proj.weight", (L, config.d_ff, C)),
        ("layers.*.mlp.down_proj.weight", (L, C, config.d_ff)),
        ("layers.*.mlp.up_proj.weight", (L, config.d_ff, C)),
        ("norm.weight", (C,)),
        ("", (2, config.block_size, config.head_dim // 2)),  # cosines, then sines
    ]
    return parts if config.tie_embeddings else [*parts, ("head.weight", (V, C))]


def read_tensors(file: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The weights under our names, one at a time."""
    offset = HEADER.size
    for name, shape in _layout(config):
        stored = np.memmap(file, dtype="<f4", mode="r", offset=offset, shape=shape)
        offset += stored.nbytes
        if "*" in name:
            yield from ((name.replace("*", str(i)), _renamed(name, layer, config)) for i, layer in enumerate(stored))
        elif name:
            yield name, _renamed(name, stored, config)


def _renamed(name: str, stored: np.ndarray, config: ModelConfig) -> Tensor:
    tensor = torch.from_numpy(np.array(stored, dtype=np.float32))  # a copy: the file is mapped read-only
    heads = {"q_proj": config.n_head, "k_proj": config.n_kv_head}.get(name.split(".")[-2])
    return tensor if heads is None else to_half_split(tensor, heads)


def read_tokenizer(file: Path, vocab_size: int) -> HFTokenizer:
    """The tokenizer in llama2.c's file: SentencePiece's pieces and scores, with the 256 bytes as ids 3 to 258."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    pieces, scores, offset = [], [], 4
    try:
        for _ in range(vocab_size):
            score, length = struct.unpack_from("<fi", content, offset)
            piece = content[offset + 8 : offset + 8 + length]
            if not 0 <= length == len(piece):
                raise ValueError
            pieces.append(piece.decode("utf-8").replace(" ", SPACE))
            scores.append(score)
            offset += 8 + length
    except (struct.error, ValueError):
        raise UserError(
            f"{file} is not a tokenizer of {vocab_size} tokens in llama2.c's layout: it breaks off or is damaged at "
            f"token {len(pieces)}"
        ) from None
    if offset != len(content):
        raise UserError(f"{file} has more than the {vocab_size} tokens of the model: they do not belong together")
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    if pieces[3:259] != byte_tokens:
        raise UserError(f"{file} does not have the 256 bytes as ids 3 to 258, as llama2.c's tokenizers do")
    pieces[:3] = [UNKNOWN, BOS, EOS]  # the file decorates them, "\n<s>\n"
    if len(set(pieces)) != len(pieces):
        raise UserError(f"{file} has a token twice")
    library = sentencepiece.library_tokenizer(pieces, scores, UNKNOWN, {UNKNOWN, BOS, EOS})
    # A story ends where the next would begin: these models were trained on stories that each start with bos.
    specials = Specials({UNKNOWN: 0, BOS: 1, EOS: 2}, bos_id=1, add_bos=True, stop_ids=frozenset({1}))
    return from_library(f"llama2c:{file.name}", library.to_str(), eot_id=2, specials=specials)
