"""Token files: what is written is read, over any number of shards, and whatever is wrong is found and named."""

import json
import re

import numpy as np
import pytest

from data import Tokens, UserError, open_dataset, shards
from data.prepare import prepare
from data.shards import HEADER_BYTES, ShardWriter, dataset_folder, open_split, pack_header, read_header, shard_name
from data.sources import files_corpus
from data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer

COMMAND = "python -m data.prepare files text.txt --out dataset"


class WideTokenizer(Tokenizer):
    """Too many ids for uint16."""

    kind = "bpe"

    def __init__(self):
        super().__init__("wide", [b"x"] * 70_000 + [b""], eot_id=70_000)


@pytest.fixture
def folder(tmp_path):
    """A small dataset of bytes: 900 and 100 characters."""
    text = tmp_path / "text.txt"
    text.write_text("0123456789" * 100, encoding="utf-8")
    prepare(lambda: files_corpus([text]), "bytes", tmp_path / "dataset", COMMAND)
    return tmp_path / "dataset"


def write(folder, tokens, tokenizer, shard_tokens=100, chunk=37):
    with ShardWriter(folder, "train", tokenizer, shard_tokens) as writer:
        for start in range(0, len(tokens), chunk):
            writer.write(tokens[start : start + chunk])
    return writer.headers


@pytest.mark.parametrize("tokenizer, dtype", [(ByteTokenizer(), np.uint16), (WideTokenizer(), np.uint32)])
@pytest.mark.parametrize("n", [1, 99, 100, 101, 350])
def test_what_is_written_is_read(tmp_path, tokenizer, dtype, n):
    tokens = np.random.default_rng(n).integers(tokenizer.vocab_size, size=n)
    headers = write(tmp_path, tokens, tokenizer)
    assert [header["n_tokens"] for header in headers] == [100] * (n // 100) + [n % 100] * (n % 100 > 0)
    assert sum(header["n_bytes"] for header in headers) == (tokens != tokenizer.eot_id).sum()
    assert sorted(path.name for path in tmp_path.iterdir()) == [shard_name("train", i) for i in range(len(headers))]
    assert read_header(tmp_path / "train-00000.bin") == headers[0]
    if n > 1:
        read = open_split(tmp_path, "train", headers, tokenizer)
        assert {array.dtype for array in read.arrays} == {np.dtype(dtype)}
        assert len(read) == n and np.array_equal(read.read(0, n), tokens)


def test_the_file_is_a_header_and_little_endian_tokens(tmp_path):
    write(tmp_path, np.array([1, 2, 256]), ByteTokenizer())
    content = (tmp_path / "train-00000.bin").read_bytes()
    assert content[:8] == b"TOKSHARD" and content[HEADER_BYTES:] == b"\x01\x00\x02\x00\x00\x01"


def test_an_interrupted_writer_leaves_no_shard(tmp_path):
    with pytest.raises(KeyboardInterrupt), ShardWriter(tmp_path, "train", ByteTokenizer(), 100) as writer:
        writer.write(np.zeros(150, dtype=np.int64))
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.glob("*.bin")] == ["train-00000.bin"]  # the one that was full
    for path in tmp_path.glob("*.partial"):
        with pytest.raises(UserError, match="not a token file"):
            read_header(path)


def test_tokens_read_across_shards():
    whole = np.arange(1000, dtype=np.uint16)
    tokens = Tokens(np.split(whole, [1, 10, 500, 503]))
    assert len(tokens) == 1000
    for start, stop in [(0, 1000), (0, 1), (0, 2), (9, 11), (499, 504), (502, 503), (990, 2000), (5, 5)]:
        assert np.array_equal(tokens.read(start, stop), whole[start:stop])
    starts = np.array([0, 1, 0, 9, 10, 480, 484, 496, 499, 501, 503, 984, 5])
    windows = tokens.windows(starts, 16)
    assert windows.dtype == np.int64
    assert np.array_equal(windows, starts[:, None] + np.arange(16))


def test_a_plain_name_lives_beside_the_package_and_a_path_where_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the current folder has no say
    assert dataset_folder("stdlib") == shards.SHARDS_FOLDER / "stdlib"
    assert shards.SHARDS_FOLDER.parent.joinpath("shards.py").is_file()
    assert str(dataset_folder("./here")) == "here"
    assert dataset_folder(tmp_path / "x") == tmp_path / "x"


def test_open_dataset(folder):
    dataset = open_dataset(folder)
    assert dataset.name == "dataset" and dataset.folder == folder and len(dataset.hash) == 64
    assert (len(dataset.train), len(dataset.val)) == (901, 101)
    assert dataset.tokenizer.decode(dataset.val.read(0, 101).tolist()) == "0123456789" * 10
    with pytest.raises(ValueError, match="read-only"):
        dataset.train.arrays[0][0] = 1


@pytest.mark.parametrize(
    "name, command",
    [
        ("stdlib", "python -m data.prepare stdlib"),
        ("shakespeare_char", "python -m data.prepare shakespeare --tokenizer char --name shakespeare_char"),
        ("novels", "python -m data.prepare files PATH... --name novels"),
        ("./novels", "python -m data.prepare files PATH... --out ./novels"),
    ],
)
def test_missing_dataset_names_the_command(name, command, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARDS_FOLDER", tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"no dataset in .*: {re.escape(command)}$"):
        open_dataset(name)


def refused(folder, match):
    """Opening fails with one sentence that says what is wrong and which command mends it."""
    with pytest.raises(UserError, match=match) as error:
        open_dataset(folder)
    assert COMMAND in str(error.value) and "\n" not in str(error.value)


def rewrite(path, change, seal=True):
    """Change a shard's tokens in place; `seal` makes the hash in its header right again."""
    header = read_header(path)
    tokens = np.frombuffer(path.read_bytes()[HEADER_BYTES:], dtype="<u2").copy()
    change(tokens)
    if seal:
        header["sha256"] = shards.hashlib.sha256(tokens).hexdigest()
    path.write_bytes(pack_header(header) + tokens.tobytes())


def test_truncated_and_overlong_shards(folder):
    path = folder / "train-00000.bin"
    content = path.read_bytes()
    for n in (len(content) - 1, HEADER_BYTES + 2, HEADER_BYTES):
        path.write_bytes(content[:n])
        refused(folder, "train-00000.bin is truncated")
    path.write_bytes(content + b"\0\0")
    refused(folder, "train-00000.bin is too long")
    for n in (HEADER_BYTES - 1, 10, 0):
        path.write_bytes(content[:n])
        refused(folder, "train-00000.bin is not a token file")


def test_missing_shard(folder):
    (folder / "val-00000.bin").unlink()
    refused(folder, "val-00000.bin is missing")


def test_foreign_files(folder):
    path = folder / "val-00000.bin"
    content = path.read_bytes()
    path.write_bytes(np.arange(5000, dtype=np.uint16).tobytes())  # a nanoGPT .bin has tokens and nothing else
    refused(folder, "val-00000.bin is not a token file")
    path.write_bytes(content[:8] + b"\x09" + content[9:])
    refused(folder, "val-00000.bin has format version 9, and this program reads version 1")
    for header in ({}, {"n_tokens": 101}, {**read_header_of(content), "dtype": "float64"}, [1], "x"):
        path.write_bytes(pack_header(header) + content[HEADER_BYTES:])
        refused(folder, "val-00000.bin has a damaged header")
    path.write_bytes(content[:40] + b"\xff" + content[41:])
    refused(folder, "val-00000.bin has a damaged header")


def read_header_of(content):
    return json.loads(content[16:HEADER_BYTES].decode("ascii").rstrip())


def test_shard_of_another_tokenizer(folder):
    (folder / "train-00000.bin").unlink()
    write(folder, np.zeros(901, dtype=np.int64), CharTokenizer("abc"), shard_tokens=1000)
    refused(folder, r"train-00000.bin was made with another tokenizer \(char\) than bytes")


def test_ids_past_the_vocabulary(folder):
    def change(tokens):
        tokens[500] = 257

    rewrite(folder / "train-00000.bin", change)
    refused(folder, "train-00000.bin holds the id 257, and bytes has only 257 ids")


def test_changed_tokens(folder):
    def change(tokens):
        tokens[500] ^= 1

    rewrite(folder / "train-00000.bin", change, seal=False)
    refused(folder, "train-00000.bin is damaged")
    rewrite(folder / "train-00000.bin", change)
    open_dataset(folder)  # twice changed is unchanged
    rewrite(folder / "train-00000.bin", change)
    refused(folder, "train-00000.bin is not the file that dataset.json lists")


def test_missing_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    refused(folder, "tokenizer.json is missing")


def test_damaged_dataset_file(folder):
    path = folder / "dataset.json"
    info = json.loads(path.read_text(encoding="utf-8"))
    for text in (json.dumps({**info, "splits": {}}), json.dumps({**info, "hash": 3}), "[]", "{", ""):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match="dataset.json is damaged; prepare it again: python -m data.prepare"):
            open_dataset(folder)
