"""How text is read: parts of files in, pieces of documents out, a bounded amount of them in memory at a time.

    text        the bytes [start, stop) of a file are one document
    separated   so are they many documents, with "<|endoftext|>" between them
    jsonl       every line is a JSON object, and one of its fields is a document
    parquet     one column of the rows [start, stop) has the documents
    chat        as jsonl, but the field is a list of messages; the document is its JSON text, for chat.py to render

- Text is UTF-8. A byte order mark at the start of a file is not text and is dropped; line ends stay as they are.
- A NUL byte means that a file is not text. (JSON can spell one out, and then it is text.)
- Blank lines of JSON Lines, empty documents and nulls are left out.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from .errors import UserError
from .tokenizer import EOT, well_formed

SPLITS = ("train", "val")
READ_BYTES = 1 << 20  # bytes read in one go, and characters in a piece of text
MAX_PIECE = 4 << 20  # characters in a piece that offers no place to be cut
MAX_LINE_BYTES = 64 << 20  # a line of JSON is read whole
PARQUET_ROWS = 256  # rows in memory at a time
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Part:
    """A part of a file that belongs to one split.

    name: the file's relative posix path
    start, stop: bytes, in a parquet file rows
    size: bytes of text in it, about (exact for text)
    format: text, separated, jsonl, parquet or chat
    field: the field or column that holds the text or the messages, in the last three
    label: what error messages call the file
    """

    path: Path
    name: str
    split: str
    start: int
    stop: int
    size: int
    label: str
    format: str = "text"
    field: str = "text"


def pieces(parts: Iterable[Part]) -> Iterator[tuple[str, bool]]:
    """The text of `parts` in pieces, see `cut_text`, each with whether it ends its document.

    Raises UserError, naming file and place, for what is not text in its format.
    """
    for part in parts:
        if part.format == "text":
            yield from _last_marked(cut_text(decoded(part)))
        else:
            for text in DOCUMENTS[part.format](part):
                if len(text) <= READ_BYTES or part.format == "chat":
                    yield text, True
                else:
                    yield from _last_marked(cut_text(_blocks(text)))


def _last_marked(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    held = ""
    for text in texts:
        if held:
            yield held, False
        held = text
    yield held, True


def _blocks(text: str) -> Iterator[str]:
    for start in range(0, len(text), READ_BYTES):
        yield text[start : start + READ_BYTES]


def cut_text(blocks: Iterable[str]) -> Iterator[str]:
    """A text that comes in blocks, in pieces of READ_BYTES characters or a little more, none of them empty.

    A piece ends where no token crosses (see `cut_point`), so the ids of the pieces are the ids of the whole, and a text
    need not fit in memory. Only a text that offers no such place in MAX_PIECE characters is cut there all the same.
    """
    held, searched = "", READ_BYTES
    for block in blocks:
        held += block
        while len(held) > searched:
            cut = cut_point(held, searched)
            if cut is None and len(held) < MAX_PIECE:
                searched = len(held) - 1  # do not search the same text again when more of it has come
                break
            cut = MAX_PIECE if cut is None else cut
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


def decoded(part: Part) -> Iterator[str]:
    """The text of the bytes of `part` as it comes, READ_BYTES bytes at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = part.start
    with open(part.path, "rb") as file:
        file.seek(position)
        while position < part.stop:
            block = file.read(min(READ_BYTES, part.stop - position))
            if not block:
                raise UserError(f"{part.label} became shorter while it was read")
            nul = block.find(b"\0")
            if nul >= 0:
                raise UserError(f"{part.label} is not a text file: it has a NUL byte at offset {position + nul:,}")
            held_back = len(decoder.getstate()[0])  # bytes of a character that the block before began
            try:
                text = decoder.decode(block, final=position + len(block) == part.stop)
            except UnicodeDecodeError as error:
                offset = position - held_back + error.start
                byte = error.object[error.start]
                raise UserError(f"{part.label} is not UTF-8: byte 0x{byte:02x} at offset {offset:,}") from error
            yield text.removeprefix("\ufeff") if position == 0 else text
            position += len(block)


def _separated_documents(part: Part) -> Iterator[str]:
    held = ""
    for text in decoded(part):
        *whole, held = (held + text).split(EOT)
        yield from filter(None, (document.strip("\n") for document in whole))
    if held.strip("\n"):
        yield held.strip("\n")


# ---------------------------------------------------------------- JSON Lines


def _jsonl_documents(part: Part) -> Iterator[str]:
    for position, line in _lines(part):
        if text := _text_of_line(part, position, line):
            yield text


def _chat_documents(part: Part) -> Iterator[str]:
    for position, line in _lines(part):
        messages = _field_of_line(part, position, line)
        if fault := fault_of_messages(messages):
            where = f"line {_line_number(part.path, position):,} of {part.label}"
            raise UserError(f"{where} has no chat in its field {part.field!r}: {fault}")
        yield well_formed(json.dumps(messages, ensure_ascii=False))


def fault_of_messages(messages: object) -> str | None:
    """What keeps a value of JSON from being a chat to learn from, in words, or None."""
    if not isinstance(messages, list) or not messages:
        return "it is not a list of messages"
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return 'every message must be an object with the texts "role" and "content"'
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        return "no message has the role assistant, so there is nothing to learn"
    return "it begins with an answer, and nobody asked" if roles[0] == "assistant" else None


def _lines(part: Part) -> Iterator[tuple[int, bytes]]:
    """The lines of `part` that are not blank, each with the byte of the file it starts at."""
    position = part.start
    with open(part.path, "rb") as file:
        file.seek(position)
        while position < part.stop:
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line:
                raise UserError(f"{part.label} became shorter while it was read")
            if not line.isspace():
                yield position, line
            position += len(line)


def _text_of_line(part: Part, position: int, line: bytes) -> str:
    """The document in the line of JSON that starts at byte `position` of the file."""
    text = _field_of_line(part, position, line)
    if text is not None and not isinstance(text, str):
        where = f"line {_line_number(part.path, position):,} of {part.label}"
        raise UserError(f"{where} has no text in its field {part.field!r}, but a value of type {type(text).__name__}")
    return well_formed(text or "")


def _field_of_line(part: Part, position: int, line: bytes) -> object:
    """The value of the field `part.field` in the line of JSON that starts at byte `position` of the file."""

    def refuse(what: str) -> UserError:
        return UserError(f"line {_line_number(part.path, position):,} of {part.label} {what}")

    if len(line) > MAX_LINE_BYTES:
        raise refuse(f"is longer than {MAX_LINE_BYTES >> 20} MiB; JSON Lines has one object, one document, a line")
    if position == 0:
        line = line.removeprefix(BYTE_ORDER_MARK)
    try:
        value = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise refuse(f"is not UTF-8: byte 0x{line[error.start]:02x} at its offset {error.start:,}") from error
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise refuse(f"is not JSON: {what} at its character {error.pos + 1:,}") from error
    except RecursionError as error:
        raise refuse("is nested too deeply to be read") from error
    if not isinstance(value, dict):
        raise refuse(f"is not a JSON object with a field {part.field!r}")
    if part.field not in value:
        fields = ", ".join(map(repr, value)) or "none"
        raise refuse(f"has no field {part.field!r} (its fields: {fields:.200}); name the one with the text by --field")
    return value[part.field]


def _line_number(path: Path, position: int) -> int:
    """The number of the line that starts at byte `position`: only errors need it, so only they count."""
    number = 1
    with open(path, "rb") as file:
        while position > 0 and (block := file.read(min(READ_BYTES, position))):
            number += block.count(b"\n")
            position -= len(block)
    return number


def line_start(path: Path, position: int) -> int:
    """The first byte of the line that byte `position` belongs to."""
    with open(path, "rb") as file:
        while position > 0:
            start = max(0, position - READ_BYTES)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            position = start
    return 0


# ---------------------------------------------------------------- Parquet


def _parquet_documents(part: Part) -> Iterator[str]:
    pyarrow = import_pyarrow(part.label)
    first = 0  # row of the file that the batch in hand starts with
    try:
        with pyarrow.parquet.ParquetFile(part.path) as file:
            for group in range(file.num_row_groups):
                n_rows = file.metadata.row_group(group).num_rows
                if first >= part.stop or first + n_rows <= part.start:
                    first += n_rows
                    continue
                for batch in file.iter_batches(PARQUET_ROWS, [group], [part.field], use_threads=False):
                    start, stop = max(0, part.start - first), min(len(batch), part.stop - first)
                    if start < stop:
                        yield from filter(None, batch.column(0)[start:stop].to_pylist())
                    first += len(batch)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(part.label, error, f" near row {first:,}") from error


def parquet_rows(path: Path, field: str) -> tuple[int, int]:
    """Rows of a parquet file and bytes of its text, about. UserError unless it is whole and has that text."""
    pyarrow = import_pyarrow(str(path))
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, PermissionError):
            raise
        raise _damaged(str(path), error) from error
    if field not in schema.names:
        columns = ", ".join(map(repr, schema.names))
        raise UserError(f"{path} has no column {field!r} (its columns: {columns:.200}); name the one by --field")
    kind = schema.field(field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise UserError(f"{path} has no text in its column {field!r}, but values of type {kind}")
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    column = paths.index(field)
    groups = [metadata.row_group(group).column(column) for group in range(metadata.num_row_groups)]
    return metadata.num_rows, sum(group.total_uncompressed_size for group in groups)


def _damaged(label: str, error: Exception, where: str = "") -> UserError:
    return UserError(f"{label} is not a whole Parquet file{where}: {str(error).splitlines()[0]:.200}")


def import_pyarrow(label: str) -> ModuleType:
    """pyarrow with what is used here. UserError, naming the file that wants it, when it is not installed."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise UserError(f"reading {label} takes the package pyarrow, which is missing: pip install pyarrow") from error
    return pyarrow


DOCUMENTS = {
    "separated": _separated_documents,
    "jsonl": _jsonl_documents,
    "parquet": _parquet_documents,
    "chat": _chat_documents,
}
