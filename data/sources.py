"""Where text comes from: which files, which of their bytes belong to which split, and how they are read.

- The files of a folder are split by name: those whose relative path hashes to a multiple of 20 validate, so adding a
  file never moves another one across. Where that leaves a split empty, because there are few files, each file is split
  like a single one.
- A single file is split by position: its last tenth validates.
- Text is UTF-8. A byte order mark at the start of a file is not text and is dropped; line ends stay as they are.
- A NUL byte means that a file is not text.
"""

import codecs
import hashlib
import json
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .errors import UserError

READ_BYTES = 1 << 20  # bytes read in one go, and characters in a piece of text
SPLITS = ("train", "val")
STDLIB_SKIPPED = frozenset({"site-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"})
TEXT_SUFFIXES = frozenset(
    ".txt .text .md .rst .org .tex .html .htm .srt .py .pyi .c .h .cc .cpp .hpp .cu .cuh .rs .go .java .kt .scala .cs "
    ".swift .js .jsx .ts .tsx .css .sh .rb .pl .php .lua .sql .r .jl .hs .ml .el .lisp .clj .ex .exs .erl .zig".split()
)


@dataclass(frozen=True)
class Document:
    """Bytes [start, stop) of a file, one document of a split. `name` is the file's relative posix path."""

    path: Path
    name: str
    split: str
    start: int
    stop: int


@dataclass(frozen=True)
class Corpus:
    """Documents in the order they are tokenised, all of them read once and found to be text.

    text_sha256: of each split's text in UTF-8, documents joined without anything between
    remarks: what the user should know about the choice of files
    """

    documents: tuple[Document, ...]
    text_sha256: dict[str, str]
    remarks: tuple[str, ...]

    @property
    def hash(self) -> str:
        """Hex digest of the text and of where its documents begin and end."""
        cuts = [(document.split, document.name, document.stop - document.start) for document in self.documents]
        return hashlib.sha256(json.dumps([cuts, self.text_sha256], sort_keys=True).encode("ascii")).hexdigest()

    def split(self, split: str) -> list[Document]:
        return [document for document in self.documents if document.split == split]


def stdlib_corpus() -> Corpus:
    """The Python files of the running interpreter's standard library, without its tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted((path.relative_to(root).as_posix(), path) for path in root.rglob("*.py"))
    documents = [
        _whole(path, name)
        for name, path in files
        if not STDLIB_SKIPPED.intersection(name.split("/")) and _is_nonempty_text(path)
    ]
    remark = f"the standard library of Python {platform.python_version()}: {len(documents)} files in {root}"
    return _read_through(documents, [remark])


def files_corpus(paths: list[Path]) -> Corpus:
    """Text files and folders of text files, in the order given.

    Raises UserError for what does not exist, cannot be read, holds no text, or is not text in UTF-8.
    """
    documents: list[Document] = []
    remarks: list[str] = []
    for path in paths:
        if path.is_dir():
            documents += _folder_documents(path, remarks)
        elif not path.is_file():
            raise UserError(f"{path} is not a file or folder" if path.exists() else f"{path} does not exist")
        elif path.stat().st_size == 0:
            raise UserError(f"{path} is empty")
        else:
            documents += _by_position(path, path.name)
    return _read_through(documents, remarks)


def _folder_documents(folder: Path, remarks: list[str]) -> list[Document]:
    files = sorted((path.relative_to(folder).as_posix(), path) for path in _walk(folder))
    texts = [(name, path) for name, path in files if path.suffix.lower() in TEXT_SUFFIXES and path.stat().st_size]
    if not texts:
        raise UserError(
            f"{folder} has no text file among its {len(files)} files (by the endings .txt, .md, .py and the like, and "
            f"not empty); a file named on the command line is taken whatever its ending"
        )
    if len(texts) < len(files):
        remarks.append(f"{folder}: {len(files) - len(texts)} files left out, empty or without the ending of a text")
    documents = [_whole(path, name) for name, path in texts]
    if {document.split for document in documents} == set(SPLITS):
        return documents
    remarks.append(f"{folder}: too few files to split by name, so the last tenth of each file validates")
    return [part for name, path in texts for part in _by_position(path, name)]


def _walk(folder: Path) -> Iterator[Path]:
    """The files below `folder`, but for hidden ones and those in hidden folders."""

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (path for name in names if not name.startswith(".") and (path := Path(parent, name)).is_file())


def _whole(path: Path, name: str) -> Document:
    validates = int(hashlib.sha256(os.fsencode(name)).hexdigest(), 16) % 20 == 0
    return Document(path, name, "val" if validates else "train", 0, path.stat().st_size)


def _by_position(path: Path, name: str) -> list[Document]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        cut = _character_start(file, size * 9 // 10)
    return [Document(path, name, "train", 0, cut), Document(path, name, "val", cut, size)]


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


def _read_through(documents: list[Document], remarks: list[str]) -> Corpus:
    digests = {split: hashlib.sha256() for split in SPLITS}
    for document in documents:
        for text in read_text(document):
            digests[document.split].update(text.encode("utf-8"))
    hashes = {split: digest.hexdigest() for split, digest in digests.items()}
    return Corpus(tuple(documents), hashes, tuple(remarks))


def pieces(documents: Iterable[Document]) -> Iterator[tuple[str, bool]]:
    """The text of `documents` in pieces, see `read_text`, each with whether it ends its document."""
    for document in documents:
        text = ""
        for following in read_text(document):
            if text:
                yield text, False
            text = following
        yield text, True


def read_text(document: Document) -> Iterator[str]:
    """The text of a document in pieces of READ_BYTES characters or a little more, none of them empty.

    A piece ends where no token crosses (see `cut_point`), so the ids of the pieces are the ids of the whole, and a file
    need not fit in memory. A text that offers no such place is one piece.
    Raises UserError, naming file and offset, for a file that is not UTF-8.
    """
    held, searched = "", READ_BYTES
    for text in _decoded(document):
        held += text
        while len(held) > searched:
            cut = cut_point(held, searched)
            if cut is None:
                searched = len(held) - 1  # do not search the same text again when more of it has come
                break
            yield held[:cut]
            held, searched = held[cut:], READ_BYTES
    if held:
        yield held


# Cuts that every tokenizer here makes anyway: after a line end between a visible character and one that is neither a
# space nor "/" (in o200k_base punctuation swallows the line ends and slashes behind it); or else before the space
# between two ASCII letters. Line ends of two characters do not count: gpt2 takes them apart, but not at the end.
_AFTER_LINE = re.compile(r"(?<=\S\n)(?=[^\s/])")
_BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")


def cut_point(text: str, start: int) -> int | None:
    """The first place from `start` on where `text` may be cut, or None."""
    match = _AFTER_LINE.search(text, start) or _BETWEEN_WORDS.search(text, start)
    return match.start() if match else None


def _decoded(document: Document) -> Iterator[str]:
    """The text of a document as it comes, READ_BYTES bytes at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = document.start
    with open(document.path, "rb") as file:
        file.seek(position)
        while position < document.stop:
            block = file.read(min(READ_BYTES, document.stop - position))
            if not block:
                raise UserError(f"{document.path} became shorter while it was read")
            nul = block.find(b"\0")
            if nul >= 0:
                raise UserError(f"{document.path} is not a text file: it has a NUL byte at offset {position + nul:,}")
            held_back = len(decoder.getstate()[0])  # bytes of a character that the block before began
            try:
                text = decoder.decode(block, final=position + len(block) == document.stop)
            except UnicodeDecodeError as error:
                offset = position - held_back + error.start
                byte = error.object[error.start]
                raise UserError(f"{document.path} is not UTF-8: byte 0x{byte:02x} at offset {offset:,}") from error
            yield text.removeprefix("\ufeff") if position == 0 else text
            position += len(block)
