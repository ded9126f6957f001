"""Token files, and the datasets made of them.

A dataset is a folder:

    dataset.json       written last: what was prepared, from what, how much of it
    tokenizer.json     see tokenizer.py
    train-00000.bin, train-00001.bin, ..., val-00000.bin, ...

A token file ("shard") is a header of HEADER_BYTES and then nothing but tokens, little-endian uint16 or uint32, so that
it can be memory-mapped. The header is the magic, the version (uint32) and the length (uint32) of the JSON that follows:

    dtype, vocab_size, tokenizer, tokenizer_hash, eot_id, n_tokens, n_bytes (of text), sha256 (of the tokens)

A shard of chats has `"marked": true` too. Its tokens are uint32, and the two highest bits are marks: ANSWER on what the
loss is taken of, ENDS_DOCUMENT on the last token of each chat.

Everything wrong with a dataset is found when it is opened, before a training step is spent on it.
"""

import hashlib
import json
import os
import re
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .download import PUBLIC_SETS
from .errors import UserError
from .reading import SPLITS
from .tokenizer import Tokenizer, load_tokenizer

ANSWER, ENDS_DOCUMENT = 1 << 31, 1 << 30
ID_MASK = ENDS_DOCUMENT - 1

MAGIC = b"TOKSHARD"
VERSION = 1
HEADER_BYTES = 1024
PREFIX = struct.Struct("<8sII")  # magic, version, length of the JSON

DATASET_FILE = "dataset.json"
SHARD_TOKENS = 1 << 27  # tokens in a full shard: 256 MiB as uint16
SCAN_TOKENS = 1 << 20  # tokens looked at in one go when a shard is checked
SHARDS_FOLDER = Path(__file__).resolve().parent / "shards"


class Tokens:
    """The tokens of one split, memory-mapped, read as one sequence over all its shards.

    `source` names the split in error messages. Where it is `marked`, the tokens carry ANSWER and ENDS_DOCUMENT.
    """

    def __init__(self, arrays: Sequence[np.ndarray], source: str = "the tokens", marked: bool = False):
        self.source = source
        self.marked = marked
        self.arrays = [np.asarray(array) for array in arrays]
        self._ends = np.cumsum([len(array) for array in self.arrays], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), copied."""
        parts = []
        for array, end in zip(self.arrays, self._ends, strict=True):
            first = int(end) - len(array)
            if start < end and stop > first:
                parts.append(array[max(start - first, 0) : stop - first])
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The windows [start, start + length) for each of `starts` [n], as int64 [n, length].

        Every window must lie inside the sequence. It may cross from one shard into the next.
        """
        out = np.empty((len(starts), length), dtype=np.int64)
        shard_of = np.searchsorted(self._ends, starts, side="right")
        for shard in np.unique(shard_of):
            array, end = self.arrays[shard], int(self._ends[shard])
            inside = (shard_of == shard) & (starts + length <= end)
            if inside.any():
                local = starts[inside] - (end - len(array))
                out[inside] = np.lib.stride_tricks.sliding_window_view(array, length)[local]
            for row in np.flatnonzero((shard_of == shard) & ~inside):
                out[row] = self.read(int(starts[row]), int(starts[row]) + length)
        return out


@dataclass(frozen=True)
class Dataset:
    """A prepared and checked dataset. `hash` is the content hash of tokenizer and tokens, hex."""

    name: str
    folder: Path
    hash: str
    tokenizer: Tokenizer
    train: Tokens
    val: Tokens


class ShardWriter:
    """Writes one split as shards of at most `shard_tokens` tokens; a context manager.

    A shard gets its name only when it is whole and on disk; leaving the context finishes the last one, unless an
    exception is on its way. `headers` are those of the finished shards.
    """

    def __init__(
        self, folder: Path, split: str, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS, marked: bool = False
    ):
        self.headers: list[dict] = []
        self._folder = folder
        self._split = split
        self._tokenizer = tokenizer
        self._shard_tokens = shard_tokens
        self._byte_lengths = tokenizer.token_byte_lengths()
        self._marked = marked
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 and not marked else "<u4")
        self._file = None

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, exception_type: type | None, *_: object) -> None:
        if self._file is not None:
            if exception_type is None:
                self._finish()
            else:
                self._file.close()

    def write(self, tokens: np.ndarray) -> None:
        """Append ids, with their marks if the split is marked, any integer dtype [n]."""
        while len(tokens):
            if self._file is None:
                self._open()
            room = self._shard_tokens - self._n_tokens
            self._append(tokens[:room])
            tokens = tokens[room:]
            if self._n_tokens == self._shard_tokens:
                self._finish()

    def _open(self) -> None:
        self._path = self._folder / shard_name(self._split, len(self.headers))
        self._partial = self._path.with_suffix(".partial")
        self._file = open(self._partial, "wb")
        self._file.write(bytes(HEADER_BYTES))  # no magic yet, so it is no shard yet
        self._n_tokens = self._n_bytes = 0
        self._sha256 = hashlib.sha256()

    def _append(self, tokens: np.ndarray) -> None:
        data = tokens.astype(self._dtype).tobytes()
        self._file.write(data)
        self._sha256.update(data)
        self._n_tokens += len(tokens)
        self._n_bytes += int(self._byte_lengths[tokens & ID_MASK].sum(dtype=np.int64))

    def _finish(self) -> None:
        header = {
            "dtype": "uint16" if self._dtype.itemsize == 2 else "uint32",
            "vocab_size": self._tokenizer.vocab_size,
            "tokenizer": self._tokenizer.name,
            "tokenizer_hash": self._tokenizer.hash,
            "eot_id": self._tokenizer.eot_id,
            "n_tokens": self._n_tokens,
            "n_bytes": self._n_bytes,
            "sha256": self._sha256.hexdigest(),
            **({"marked": True} if self._marked else {}),
        }
        self._file.seek(0)
        self._file.write(pack_header(header))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        os.rename(self._partial, self._path)
        self.headers.append(header)


def shard_name(split: str, index: int) -> str:
    return f"{split}-{index:05d}.bin"


def pack_header(header: dict) -> bytes:
    """The HEADER_BYTES that open a shard."""
    content = json.dumps(header).encode("ascii")
    if PREFIX.size + len(content) > HEADER_BYTES:
        raise ValueError(f"a header of {len(content)} bytes does not fit {HEADER_BYTES}")
    return (PREFIX.pack(MAGIC, VERSION, len(content)) + content).ljust(HEADER_BYTES)


def read_header(path: Path) -> dict:
    """The header of a shard. UserError unless magic, version and the size that it promises are right."""
    with open(path, "rb") as file:
        start = file.read(HEADER_BYTES)
    if len(start) < HEADER_BYTES or not start.startswith(MAGIC):
        raise UserError(f"{path} is not a token file of this project")
    _, version, length = PREFIX.unpack_from(start)
    if version != VERSION:
        raise UserError(f"{path} has format version {version}, and this program reads version {VERSION}")
    try:
        header = json.loads(start[PREFIX.size : PREFIX.size + length])
        expected = HEADER_BYTES + header["n_tokens"] * {"uint16": 2, "uint32": 4}[header["dtype"]]
        intact = {"tokenizer", "tokenizer_hash", "sha256"} <= header.keys() and header["n_tokens"] > 0
    except (AttributeError, KeyError, TypeError, ValueError):
        intact = False
    if not intact:
        raise UserError(f"{path} has a damaged header")
    size = path.stat().st_size
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise UserError(f"{path} is {what}: it has {size:,} bytes and its header promises {expected:,}")
    return header


def open_shard(path: Path, expected_sha256: str, tokenizer: Tokenizer) -> np.ndarray:
    """Memory-map the tokens of a shard, read-only, after reading all of them once. UserError if anything is wrong."""
    if not path.is_file():
        raise UserError(f"{path} is missing")
    header = read_header(path)
    if header["tokenizer_hash"] != tokenizer.hash:
        raise UserError(
            f"{path} was made with another tokenizer ({header['tokenizer']}) than {tokenizer.name} beside it"
        )
    dtype = np.dtype(header["dtype"]).newbyteorder("<")
    tokens = np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(header["n_tokens"],))
    largest, digest = 0, hashlib.sha256()
    for start in range(0, len(tokens), SCAN_TOKENS):
        block = tokens[start : start + SCAN_TOKENS]
        largest = max(largest, int((block & ID_MASK if header.get("marked") else block).max()))
        digest.update(block)
    if largest >= tokenizer.vocab_size:
        raise UserError(f"{path} holds the id {largest}, and {tokenizer.name} has only {tokenizer.vocab_size} ids")
    if digest.hexdigest() != header["sha256"]:
        raise UserError(f"{path} is damaged: its tokens do not match the hash in its header")
    if header["sha256"] != expected_sha256:
        raise UserError(f"{path} is not the file that {DATASET_FILE} lists: its content hash differs")
    return tokens


def open_split(folder: Path, split: str, shards: list[dict], tokenizer: Tokenizer) -> Tokens:
    """The tokens of a split, checked. `shards` are the headers that dataset.json lists."""

    def opened(index: int) -> np.ndarray:
        return open_shard(folder / shard_name(split, index), shards[index]["sha256"], tokenizer)

    with ThreadPoolExecutor() as pool:
        arrays = list(pool.map(opened, range(len(shards))))
    marked = any(read_header(folder / shard_name(split, index)).get("marked") for index in range(len(shards)))
    tokens = Tokens(arrays, source=f"the {split} split of {folder.name}", marked=marked)
    if len(tokens) < 2:
        raise UserError(f"{tokens.source} has {len(tokens)} tokens, and predicting one takes two")
    return tokens


def dataset_folder(name_or_path: str | os.PathLike) -> Path:
    """Where a dataset lives: a plain name means data/shards/<name> beside this file, anything else is a path."""
    text = os.fspath(name_or_path)
    return SHARDS_FOLDER / text if is_plain_name(text) else Path(text)


def is_plain_name(name: str) -> bool:
    """Whether `name` can name a dataset under data/shards."""
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) is not None


def prepare_command(name_or_path: str | os.PathLike) -> str:
    """The command that makes the dataset of this name, as far as the name tells."""
    name = os.fspath(name_or_path)
    if name == "stdlib" or name in PUBLIC_SETS:
        return f"python -m data.prepare {name}"
    if name == "shakespeare_char":  # of the presets so called, whose text and tokenizer are known
        return f"python -m data.prepare shakespeare --tokenizer char --name {name}"
    return f"python -m data.prepare files PATH... {'--name' if is_plain_name(name) else '--out'} {name}"


def open_dataset(name_or_path: str | os.PathLike) -> Dataset:
    """Open a prepared dataset by name ("stdlib") or folder, and check all of it.

    Raises UserError, naming the file and the command that mends it, when the dataset is missing or unfinished, when a
    shard is missing, truncated, altered, foreign or of another tokenizer, and when an id is past the vocabulary.
    """
    folder = dataset_folder(name_or_path)
    info = read_dataset_file(folder, prepare_command(name_or_path))
    try:
        tokenizer = load_tokenizer(folder)
        splits = {split: open_split(folder, split, info["splits"][split]["shards"], tokenizer) for split in SPLITS}
    except UserError as error:
        raise UserError(f"{error}; prepare it again: {info['command']}") from error
    return Dataset(folder.name, folder, info["hash"], tokenizer, splits["train"], splits["val"])


def read_dataset_file(folder: Path, command: str) -> dict:
    """dataset.json of a finished dataset. `command` is what the error recommends when there is none."""
    path = folder / DATASET_FILE
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        texts = [info["key"], info["hash"], info["command"]]
        texts += [shard["sha256"] for split in SPLITS for shard in info["splits"][split]["shards"]]
        intact = all(isinstance(text, str) for text in texts)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"there is no dataset in {folder}; prepare it: {command}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError):
        intact = False
    if not intact:
        raise UserError(f"{path} is damaged; prepare it again: {command}")
    return info
