"""Files that cannot be used: one sentence naming the file and the place in it, and no shard left behind."""

import errno
import gzip
import os
import sys
from pathlib import Path

import pytest
from test_data_prepare import fill, leftovers, refused, text_of

from data import open_dataset, reading, shards
from data.prepare import main


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty place for datasets, and an empty current folder."""
    monkeypatch.setattr(shards, "SHARDS_FOLDER", tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    return tmp_path


LINE = b'{"text": "some text"}\n'


def lines(n, bad, after=3):
    """JSON Lines of which line n is bad."""
    return LINE * (n - 1) + bad + b"\n" + LINE * after


def table(rows=200, **columns):
    """A parquet file of many rows, as bytes."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    made = columns or {"text": [f"text {row} " * 50 for row in range(rows)]}
    parquet.write_table(pyarrow.table(made), sink, row_group_size=50, compression="none", use_dictionary=False)
    return sink.getvalue().to_pybytes()


def damaged(content):
    """A parquet file whose end, which says where everything is, is whole, and whose middle is not."""
    middle = len(content) // 2
    return content[:middle] + b"\xff" * 6000 + content[middle + 6000 :]


# name of the file, its content, what the sentence says
BAD = {
    "missing": ("my.txt", None, "^my.txt does not exist$"),
    "no bytes": ("my.txt", b"", "^my.txt is empty$"),
    "one token": ("my.txt", b"x", "the text of my.txt is too short: nothing is left for its train split"),
    "nothing but a byte order mark": ("my.txt", b"\xef\xbb\xbf", "the text of my.txt is too short"),
    "latin-1": ("my.txt", b"caf\xe9 au lait", "^my.txt is not UTF-8: byte 0xe9 at offset 3$"),
    "a bad byte far in": ("my.txt", "ä".encode() * 2_000_000 + b"\xff", "my.txt .* byte 0xff at offset 4,000,000"),
    "a character across two reads": (
        "my.txt",
        ("x" + "ä" * 600_000).encode() + b"\xc3" + b"z" * 400_000,
        "my.txt is not UTF-8: byte 0xc3 at offset 1,200,001",
    ),
    "half a character at the end": ("my.txt", b"text " * 100 + b"\xc3", "my.txt .* byte 0xc3 at offset 500"),
    "a NUL byte": ("my.txt", b"text" * 300_000 + b"\0text", "my.txt .* has a NUL byte at offset 1,200,000"),
    "utf-16": ("my.txt", "text".encode("utf-16-le"), "my.txt is not a text file: it has a NUL byte at offset 1"),
    "compressed": ("my.txt", gzip.compress(b"text " * 100, mtime=0), "^my.txt is not"),
    "broken json on line 5,000,001": (
        "my.jsonl",
        LINE + b"\n" * 4_999_999 + b'{"text": "some\n' + LINE,
        "^line 5,000,001 of my.jsonl is not JSON: Unterminated string starting at its character 10$",
    ),
    "a json line in latin-1": (
        "my.jsonl",
        lines(7, b'{"text": "caf\xe9"}'),
        "line 7 of my.jsonl is not UTF-8: byte 0xe9 at its offset 13",
    ),
    "a json line without the field": (
        "my.jsonl",
        lines(20, b'{"body": "x", "id": 1}'),
        "line 20 of my.jsonl has no field 'text' .its fields: 'body', 'id'.; name the one with the text by --field",
    ),
    "a json field that is no text": (
        "my.jsonl",
        lines(2, b'{"text": 7}'),
        "line 2 of my.jsonl has no text in its field 'text', but a value of type int",
    ),
    "a json line that is a list": ("my.jsonl", lines(3, b'["x"]'), "line 3 of my.jsonl is not a JSON object"),
    "json nested too deeply": ("my.jsonl", lines(3, b"[" * 200_000), "line 3 of my.jsonl is "),
    "a json line of 200 MB": (
        "my.jsonl",
        lines(2, b'{"text": "' + b"x" * 200_000_000 + b'"}'),
        "line 2 of my.jsonl is longer than 64 MiB; JSON Lines has one object, one document, a line",
    ),
    "nothing but blank lines": ("my.jsonl", b"\n \n" * 50, "the text of my.jsonl is too short"),
    "text called jsonl": ("my.jsonl", b"once upon a time\n", "line 1 of my.jsonl is not JSON"),
    "half a parquet": ("my.parquet", lambda: table()[:20_000], "^my.parquet is not a whole Parquet file: "),
    "a damaged parquet": ("my.parquet", lambda: damaged(table()), "^my.parquet is not a whole Parquet file near row "),
    "text called parquet": (
        "my.parquet",
        lambda: table() and b"once upon a time",
        "^my.parquet is not a whole Parquet file: ",
    ),
    "a parquet without the column": (
        "my.parquet",
        lambda: table(body=["x"], id=[1]),
        "my.parquet has no column 'text' .its columns: 'body', 'id'.; name the one by --field",
    ),
    "a parquet column that is no text": (
        "my.parquet",
        lambda: table(text=[1, 2]),
        "my.parquet has no text in its column 'text', but values of type int64",
    ),
    "a parquet without rows": ("my.parquet", lambda: table(text=[""] * 3), "the text of my.parquet is too short"),
}


@pytest.mark.parametrize("name, content, match", BAD.values(), ids=BAD.keys())
def test_bad_files(home, name, content, match):
    if content is not None:
        Path(name).write_bytes(content() if callable(content) else content)
    refused(match, "files", name, "--tokenizer", "bytes", "--name", "mine")
    assert not (home / "shards").exists() or leftovers(home / "shards") == []


def test_files_that_only_look_bad(home, capsys):
    """A byte order mark, line ends of two characters and one endless line are used, and the first two are said."""
    Path("bom.txt").write_bytes(b"\xef\xbb\xbf" + b"one\r\ntwo\r\n" * 50)
    main(["files", "bom.txt", "--tokenizer", "bytes"])
    said = capsys.readouterr().out
    assert "bom.txt: line 1 begins with a byte order mark, which is dropped" in said
    assert "bom.txt: lines end in CR LF, and both stay in the text" in said
    dataset = open_dataset("bom")
    assert text_of(dataset, "train") + text_of(dataset, "val") == "one\r\ntwo\r\n" * 50

    Path("line.txt").write_bytes(b"x" * 20_000_000)
    main(["files", "line.txt", "--tokenizer", "bytes"])
    assert len(open_dataset("line").train) == 18_000_001 and "line.txt:" not in capsys.readouterr().out


def test_pyarrow_that_is_missing(home, monkeypatch):
    Path("my.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    refused(
        "reading my.parquet takes the package pyarrow, which is missing: pip install pyarrow", "files", "my.parquet"
    )


def test_a_parquet_that_cannot_be_opened(home, monkeypatch):
    pytest.importorskip("pyarrow")
    Path("my.parquet").write_bytes(table())
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    Path("my.parquet").chmod(0)
    refused("my.parquet.*Permission denied", "files", "my.parquet")


def test_bad_file_in_a_folder_is_named(home):
    fill(home / "text")
    Path("text/part1/bad.txt").write_bytes(b"ok\n\xff")
    refused("text/part1/bad.txt is not UTF-8: byte 0xff at offset 3", "files", "text")


def test_folder_without_text(home):
    for name in ("a.png", "b.jpg"):
        Path("images", name).parent.mkdir(exist_ok=True)
        Path("images", name).write_bytes(b"\x89PNG\r\n\0")
    Path("nothing").mkdir()
    refused("images has no text file among its 2 files", "files", "images")
    refused("nothing has no text file among its 0 files", "files", "nothing")


def test_unreadable(home):
    Path("my.txt").write_text("text", encoding="utf-8")
    os.mkfifo("pipe")
    refused("pipe is not a file or folder", "files", "pipe")
    if os.geteuid() != 0:
        Path("my.txt").chmod(0)
        refused("my.txt: Permission denied", "files", "my.txt")


def test_unreadable_even_for_root(home, monkeypatch):
    """Root may read everything, so the refusal is played."""
    Path("my.txt").write_text("text", encoding="utf-8")

    def refuse(path, mode):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(reading, "open", refuse, raising=False)
    refused("my.txt: Permission denied; nothing was prepared", "files", "my.txt")


@pytest.mark.parametrize(
    "tokenizer, match",
    [
        ("word", "unknown tokenizer 'word'; there are bytes, char, bpe:N, gpt2, cl100k_base, o200k_base"),
        ("bpe", "unknown tokenizer"),
        ("bpe:many", "unknown tokenizer"),
        ("bpe:256", r"bpe:256 is not possible: N counts .* \(257 to 10\^6\)"),
    ],
)
def test_bad_tokenizers(home, tokenizer, match):
    Path("my.txt").write_text("some text", encoding="utf-8")
    refused(match, "files", "my.txt", "--tokenizer", tokenizer)


@pytest.mark.parametrize("name", ["a/b", "a:0.7", "a,b", "..", ".hidden", "", "my text"])
def test_names_that_are_none(home, name):
    Path("my.txt").write_text("some text", encoding="utf-8")
    if name:
        refused("cannot name a dataset", "files", "my.txt", "--name", name)
    else:
        Path("my text.txt").write_text("some text", encoding="utf-8")
        refused("give --name", "files", "my text.txt")
