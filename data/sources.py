"""Where text comes from: which files, and which of their parts belong to which split.

- The text files of a folder are split by name: those whose relative path hashes to a multiple of 20 validate, so adding
  a file never moves another one across. Where that leaves a split empty, because there are few files, each file is
  split like a single one.
- A single file is split by position: its last tenth validates. So is every .jsonl and .parquet file, since it holds
  many documents. No more than HOLDOUT_BYTES validate this way, over all files.
"""

import hashlib
import json
import os
import platform
import struct
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from .errors import UserError
from .reading import BYTE_ORDER_MARK, SPLITS, Part, line_start, parquet_rows, pieces

HOLDOUT_BYTES = 64 << 20  # enough to measure a loss by, and little to spare from a large corpus
STDLIB_SKIPPED = frozenset({"site-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"})
TEXT_SUFFIXES = frozenset(
    ".txt .text .md .rst .org .tex .html .htm .srt .py .pyi .c .h .cc .cpp .hpp .cu .cuh .rs .go .java .kt .scala .cs "
    ".swift .js .jsx .ts .tsx .css .sh .rb .pl .php .lua .sql .r .jl .hs .ml .el .lisp .clj .ex .exs .erl .zig".split()
)
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}  # by ending; all else is text
STDIN_LABEL = "standard input"


@dataclass(frozen=True)
class Corpus:
    """Parts in the order they are tokenised, all of them read once and found to be text.

    n_bytes, n_documents: of each split
    text_sha256: of each split's text in UTF-8, documents joined without anything between
    boundaries: hash of the lengths of the documents, where a part has several
    remarks: what the user should know about the files
    """

    parts: tuple[Part, ...]
    n_bytes: dict[str, int]
    n_documents: dict[str, int]
    text_sha256: dict[str, str]
    boundaries: str | None
    remarks: tuple[str, ...]

    @property
    def is_chat(self) -> bool:
        return self.parts[0].format == "chat"

    @property
    def hash(self) -> str:
        """Hex digest of the text and of where its documents begin and end."""
        cuts = [(part.split, part.name, part.stop - part.start) for part in self.parts]
        content = [cuts, self.text_sha256, *([self.boundaries] if self.boundaries else [])]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode("ascii")).hexdigest()

    def split(self, split: str) -> list[Part]:
        return [part for part in self.parts if part.split == split]


def stdlib_corpus() -> Corpus:
    """The Python files of the running interpreter's standard library, without its tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted((path.relative_to(root).as_posix(), path) for path in root.rglob("*.py"))
    parts = [
        _whole(path, name)
        for name, path in files
        if not STDLIB_SKIPPED.intersection(name.split("/")) and _is_nonempty_text(path)
    ]
    remark = f"the standard library of Python {platform.python_version()}: {len(parts)} files in {root}"
    return read_through(parts, [remark])


def files_corpus(paths: list[Path], field: str = "text", chat: bool = False) -> Corpus:
    """Files and folders, in the order given. `field` of .jsonl lines and of .parquet rows holds their text; with `chat`
    all files are .jsonl, and it holds lists of messages.

    Raises UserError for what does not exist, cannot be read, holds no text, or is not text in UTF-8.
    """
    remarks: list[str] = []
    chosen: list[tuple[str, Path, bool]] = []  # name, file, whether it is a document of a folder split by name
    for path in paths:
        if path.is_dir():
            chosen += _files_of_folder(path, remarks)
        elif not path.is_file():
            raise UserError(f"{path} is not a file or folder" if path.exists() else f"{path} does not exist")
        elif path.stat().st_size == 0:
            raise UserError(f"{path} is empty")
        else:
            chosen.append((path.name, path, False))
    _refuse_repeats([path for _, path, _ in chosen])
    if chat and (others := [path for _, path, _ in chosen if _format_of(path) != "jsonl"]):
        raise UserError(f"{others[0]} is no .jsonl file, and with --chat all files must be: one chat a line")
    limit = HOLDOUT_BYTES // max(1, sum(not by_name for _, _, by_name in chosen))
    parts: list[Part] = []
    for name, path, by_name in chosen:
        parts += [_whole(path, name)] if by_name else by_position(path, name, limit, "chat" if chat else None, field)
    return read_through(parts, [*remarks, *_peculiarities(parts)])


def _refuse_repeats(paths: list[Path]) -> None:
    """A file that came in twice could stand in the training text by one name, in the validation text by the other."""
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise UserError(f"{path} was named twice, directly or through a folder; name it once")
        seen.add(path.resolve())


def stdin_corpus(spooled: Path, field: str | None, chat: bool = False) -> Corpus:
    """What standard input said, copied to a file: text, or JSON Lines where a field is named; chats where asked."""
    if spooled.stat().st_size == 0:
        raise UserError(f"{STDIN_LABEL} is empty")
    format = "chat" if chat else "text" if field is None else "jsonl"
    return read_through(by_position(spooled, "stdin", HOLDOUT_BYTES, format, field or "text", STDIN_LABEL), [])


def _files_of_folder(folder: Path, remarks: list[str]) -> list[tuple[str, Path, bool]]:
    files = sorted((path.relative_to(folder).as_posix(), path) for path in _walk(folder))
    endings = TEXT_SUFFIXES | FORMATS.keys()
    texts = [(name, path) for name, path in files if path.suffix.lower() in endings and path.stat().st_size]
    if not texts:
        raise UserError(
            f"{folder} has no text file among its {len(files)} files (by the endings .txt, .md, .py, .jsonl, .parquet "
            f"and the like, and not empty); a file named on the command line is taken whatever its ending"
        )
    if len(texts) < len(files):
        remarks.append(f"{folder}: {len(files) - len(texts)} files left out, empty or without the ending of a text")
    documents = [_format_of(path) == "text" for _, path in texts]
    splits = {_split_of(name) for (name, _), is_document in zip(texts, documents, strict=True) if is_document}
    by_name = splits == set(SPLITS) or not all(documents)
    if not by_name:
        remarks.append(f"{folder}: too few files to split by name, so the last tenth of each file validates")
    return [(name, path, by_name and is_document) for (name, path), is_document in zip(texts, documents, strict=True)]


def _walk(folder: Path) -> Iterator[Path]:
    """The files below `folder`, but for hidden ones and those in hidden folders."""

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (path for name in names if not name.startswith(".") and (path := Path(parent, name)).is_file())


def _format_of(path: Path) -> str:
    return FORMATS.get(path.suffix.lower(), "text")


def _split_of(name: str) -> str:
    return "val" if int(hashlib.sha256(os.fsencode(name)).hexdigest(), 16) % 20 == 0 else "train"


def _whole(path: Path, name: str) -> Part:
    return whole_file(path, name, _split_of(name))


def whole_file(path: Path, name: str, split: str, format: str = "text") -> Part:
    """All of a file that is not parquet, for one split."""
    size = path.stat().st_size
    return Part(path, name, split, 0, size, size, str(path), format)


def by_position(
    path: Path, name: str, limit: int, format: str | None = None, field: str = "text", label: str | None = None
) -> list[Part]:
    """A file in two parts: its last tenth, but no more than about `limit` bytes of text, validates."""
    format = format or _format_of(path)
    label = label or str(path)
    if format == "parquet":
        stop, size = parquet_rows(path, field)
        cut = stop - min(stop - stop * 9 // 10, max(1, limit * stop // max(1, size)))
        sizes = [size * cut // max(1, stop), size * (stop - cut) // max(1, stop)]
    else:
        stop = path.stat().st_size
        cut = stop - min(stop - stop * 9 // 10, limit)
        if format in ("jsonl", "chat"):
            cut = line_start(path, cut)
        else:
            with open(path, "rb") as file:
                cut = _character_start(file, cut)
        sizes = [cut, stop - cut]
    return [
        Part(path, name, "train", 0, cut, sizes[0], label, format, field),
        Part(path, name, "val", cut, stop, sizes[1], label, format, field),
    ]


def _character_start(file: BinaryIO, position: int) -> int:
    """The first byte from `position` on that does not continue a UTF-8 character."""
    file.seek(position)
    for byte in file.read(3):
        if byte & 0xC0 != 0x80:
            break
        position += 1
    return position


def _is_nonempty_text(path: Path) -> bool:
    content = path.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return bool(content) and b"\0" not in content


def _peculiarities(parts: list[Part]) -> list[str]:
    """A sentence on files that are text but may surprise: with a byte order mark, with line ends of two characters."""
    marked, returns = [], []
    for part in parts:
        if part.format == "text" and part.start == 0:
            with open(part.path, "rb") as file:
                start = file.read(1 << 16)
            marked += [part.label] if start.startswith(BYTE_ORDER_MARK) else []
            returns += [part.label] if b"\r\n" in start else []
    said = [(marked, "line 1 begins with a byte order mark, which is dropped")]
    said += [(returns, "lines end in CR LF, and both stay in the text")]
    return [
        f"{names[0]}{f' and {len(names) - 1} other files' if names[1:] else ''}: {what}"
        for names, what in said
        if names
    ]


def read_through(parts: list[Part], remarks: list[str]) -> Corpus:
    """Read all parts once, to know that they can be read and what is in them."""
    counted = {split: _Counted() for split in SPLITS}
    total = sum(part.size for part in parts)
    with tqdm(total=total, desc="reading", unit="B", unit_scale=True, leave=False, disable=None) as bar:
        for part in parts:
            counted[part.split].read(part, bar)
    several = any(part.format != "text" for part in parts)
    boundaries = "".join(found.lengths.hexdigest() for found in counted.values()) if several else None
    return Corpus(
        tuple(parts),
        {split: found.n_bytes for split, found in counted.items()},
        {split: found.n_documents for split, found in counted.items()},
        {split: found.text.hexdigest() for split, found in counted.items()},
        boundaries,
        tuple(remarks),
    )


class _Counted:
    """What one split holds, counted while it is read."""

    def __init__(self):
        self.n_bytes = self.n_documents = 0
        self.text, self.lengths = hashlib.sha256(), hashlib.sha256()

    def read(self, part: Part, bar: tqdm) -> None:
        length = 0
        for text, ends_document in pieces([part]):
            data = text.encode("utf-8")
            self.text.update(data)
            length += len(data)
            if ends_document:
                self.lengths.update(struct.pack("<q", length))
                self.n_documents += 1
                self.n_bytes += length
                length = 0
            bar.update(len(data))
