"""Text in pieces: the ids of the pieces are the ids of the whole, and what the formats say is what is read."""

import itertools
import json
import random
import subprocess

import pytest
from test_data_prepare import COMMAND, ENVIRONMENT, documents_of, text_of
from test_data_tokenizer import TORTURE, code

from data import UserError, open_dataset, open_datasets, reading, shards, sources
from data import prepare as prepare_module
from data.prepare import main, prepare
from data.reading import cut_point, cut_text, decoded, pieces
from data.sources import files_corpus
from data.tokenizer import SPLIT_PATTERN, BPETokenizer


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty place for datasets, and an empty current folder."""
    monkeypatch.setattr(shards, "SHARDS_FOLDER", tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("read_bytes", [7, 64, 1000])
def test_pieces_are_the_text(tmp_path, monkeypatch, read_bytes):
    text = "\ufeff" + TORTURE + code()[:20_000]
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    documents = files_corpus([tmp_path / "a.txt", tmp_path / "b.txt"]).parts
    monkeypatch.setattr(reading, "READ_BYTES", read_bytes)
    assert "".join(text for document in documents[:2] for text in cut_text(decoded(document))) == text[1:]
    flags = [ends for _, ends in pieces(documents)]
    assert flags.count(True) == 4 and flags[-1] and len(flags) > 20


def test_a_file_that_comes_twice_is_refused(tmp_path):
    """Whole in the training text through its folder, its end in the validation text by its name."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("some words " * 50, encoding="utf-8")
    with pytest.raises(UserError, match="a.txt was named twice"):
        files_corpus([tmp_path / "notes", tmp_path / "notes/../notes/a.txt"])


# The split patterns of the encodings that tests cannot download, from tiktoken_ext/openai_public.py.
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


@pytest.mark.parametrize("pattern", ["own", "cl100k", "o200k", "gpt2"])
def test_no_token_crosses_a_cut(pattern):
    """Encoding the two sides of every cut gives the ids of the whole, on hostile random text too."""
    chosen = {"own": SPLIT_PATTERN, "cl100k": CL100K, "o200k": O200K, "gpt2": GPT2}[pattern]
    singles = [bytes([value]) for value in range(256)]
    pairs = [(a + b).encode() for a, b in itertools.product("aB1 \n\t/.'\rs", repeat=2)]  # merge whatever may merge
    tokenizer = BPETokenizer("test", [*singles, *pairs, b""], 256 + len(pairs), chosen)
    rng = random.Random(0)
    alphabet = list("aB1 \n\t/.'\r") + ["s", "中", "é", "\u0301", "😀", "\u2028", "\x1c", "\u00a0", "٣", "\ufeff"]
    texts = ["".join(rng.choices(alphabet, k=60)) for _ in range(3000)] + [TORTURE, code()[:30_000]]
    n_cuts = 0
    for text in texts:
        cut = cut_point(text, rng.randrange(1, 30))
        if cut is not None:
            n_cuts += 1
            assert tokenizer.encode(text[:cut]) + tokenizer.encode(text[cut:]) == tokenizer.encode(text)
    assert n_cuts > 1000


def test_a_text_without_a_place_to_cut_is_one_piece(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x" * 1000 + "\r\n" * 1000, encoding="utf-8", newline="")
    monkeypatch.setattr(reading, "READ_BYTES", 10)
    assert [len(text) for text in cut_text(decoded(files_corpus([tmp_path / "a.txt"]).parts[0]))] == [2700]


@pytest.mark.parametrize("limit, taken", [(10**9, 94_200), (20_000, 20_000)])
def test_the_sample_is_bounded_and_spread(tmp_path, limit, taken):
    for i in range(1000):
        (tmp_path / f"{i:04d}.txt").write_text(f"{i:04d} " * 20, encoding="utf-8")
    corpus = files_corpus([tmp_path])
    sample = list(prepare_module._sample(corpus, limit))
    assert abs(sum(map(len, sample)) - taken) <= 100  # 942 of the 1,000 files train
    assert len({int(text[:4]) // 100 for text in sample}) == 10


def test_a_text_without_a_place_to_cut_is_cut_all_the_same(monkeypatch):
    monkeypatch.setattr(reading, "READ_BYTES", 10)
    monkeypatch.setattr(reading, "MAX_PIECE", 100)
    text = "x" * 1055
    parts = list(cut_text(text[i : i + 10] for i in range(0, len(text), 10)))
    assert "".join(parts) == text and [len(part) for part in parts] == [100] * 10 + [55]


# ---------------------------------------------------------------- many documents in a file


def records(n=100):
    return [f"document {i}\n{TORTURE[:i]}" for i in range(n)]


@pytest.fixture(params=["jsonl", "parquet"])
def many(request, home):
    """A file of 100 documents, with blanks and nulls between."""
    texts = [*records()[:50], "", None, *records()[50:]]
    path = home / f"many.{request.param}"
    if request.param == "jsonl":
        lines = [json.dumps({"id": i, "body": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
        path.write_text("\n\n".join(lines), encoding="utf-8", newline="")  # blank lines, and no line end at the end
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        table = pyarrow.table({"id": range(len(texts)), "body": pyarrow.array(texts, pyarrow.large_string())})
        parquet.write_table(table, path, row_group_size=8)
    return path


def test_every_record_is_a_document(many):
    main(["files", many.name, "--field", "body", "--tokenizer", "bytes"])
    dataset = open_dataset("many")
    train, val = documents_of(dataset, "train"), documents_of(dataset, "val")
    assert [*train, *val] == records() and 5 <= len(val) <= 25


@pytest.mark.parametrize("limit, least, most", [(200, 1, 590), (1 << 26, 600, 2000)])
def test_no_more_than_the_limit_validates(many, monkeypatch, limit, least, most):
    monkeypatch.setattr(sources, "HOLDOUT_BYTES", limit)
    corpus = files_corpus([many], "body")
    assert least <= corpus.n_bytes["val"] <= most and sum(corpus.n_documents.values()) == 100


@pytest.mark.parametrize("read_bytes, rows", [(1 << 20, 256), (50, 3)])
def test_reading_in_small_steps_changes_nothing(many, monkeypatch, read_bytes, rows):
    monkeypatch.setattr(reading, "READ_BYTES", read_bytes)
    monkeypatch.setattr(reading, "PARQUET_ROWS", rows)
    texts, held = [], ""
    for text, ends in pieces(files_corpus([many], "body").parts):
        held += text
        if ends:
            texts.append(held)
            held = ""
    assert texts == records()


def test_the_same_text_cut_elsewhere_is_another_corpus(home):
    corpora = []
    for texts in (["one", "two"] * 20, ["onetwo"] * 20):
        (home / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
        corpora.append(files_corpus([home / "a.jsonl"]))
    assert corpora[0].boundaries != corpora[1].boundaries and corpora[0].hash != corpora[1].hash


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_change_nothing(many, workers):
    prepare(lambda: files_corpus([many], "body"), "bpe:300", many.parent / "one", "", workers=1)
    prepare(lambda: files_corpus([many], "body"), "bpe:300", many.parent / "more", "", workers=workers)
    one, more = ({p.name: p.read_bytes() for p in (many.parent / name).iterdir()} for name in ("one", "more"))
    assert one == more


def test_what_json_can_spell(home):
    texts = ["a\0b", "\ud800 alone", "\U0001f600", "\r\n\u2028", "<|endoftext|>"]
    (home / "a.jsonl").write_bytes(
        b"\xef\xbb\xbf" + b"".join(json.dumps({"text": t}).encode() + b"\r\n" for t in texts)
    )
    main(["files", "a.jsonl", "--tokenizer", "bytes"])
    dataset = open_dataset("a")
    texts[1] = "\ufffd alone"  # half a surrogate pair has no UTF-8 form
    assert documents_of(dataset, "train") + documents_of(dataset, "val") == texts


def test_files_of_all_kinds_in_a_folder(home):
    (home / "text").mkdir()
    for i in range(3):
        (home / f"text/{i}.txt").write_text(f"text {i} " * 10, encoding="utf-8")
    (home / "text/many.jsonl").write_text("".join(f'{{"text": "j{i}"}}\n' for i in range(20)), encoding="utf-8")
    main(["files", "text", "--tokenizer", "bytes", "--name", "mixed"])
    dataset = open_dataset("mixed")
    documents = documents_of(dataset, "train") + documents_of(dataset, "val")
    assert sorted(documents) == sorted([f"text {i} " * 10 for i in range(3)] + [f"j{i}" for i in range(20)])


@pytest.mark.parametrize("start", [0, 1, 5, 6, 11, 12, 17])
def test_line_starts(tmp_path, monkeypatch, start):
    monkeypatch.setattr(reading, "READ_BYTES", 4)
    (tmp_path / "a").write_bytes(b"12345\n12345\n12345\n")
    assert reading.line_start(tmp_path / "a", start) == start // 6 * 6


# ---------------------------------------------------------------- standard input


def piped(text, *arguments, cwd):
    """The program with `text` on its standard input -> (exit code, stderr)."""
    done = subprocess.run(
        [*COMMAND, "files", "-", *arguments], cwd=cwd, env=ENVIRONMENT, input=text, capture_output=True
    )
    return done.returncode, done.stderr.decode()


def test_standard_input(home):
    text = "some text\r\n" * 500
    assert piped(text.encode(), "--tokenizer", "bytes", "--out", "mine", cwd=home) == (0, "")
    dataset = open_dataset(home / "mine")
    assert text_of(dataset, "train") + text_of(dataset, "val") == text
    assert sorted(path.name for path in home.iterdir()) == [".mine.lock", ".mine.stdin.lock", "mine"]


def test_json_lines_on_standard_input(home):
    text = "".join(json.dumps({"body": f"document {i}"}) + "\n" for i in range(20)).encode()
    assert piped(text, "--field", "body", "--tokenizer", "bytes", "--out", "mine", cwd=home) == (0, "")
    dataset = open_dataset(home / "mine")
    assert documents_of(dataset, "train") + documents_of(dataset, "val") == [f"document {i}" for i in range(20)]


@pytest.mark.parametrize(
    "text, arguments, said",
    [
        (b"", ["--out", "mine"], "error: standard input is empty\n"),
        (b"caf\xe9", ["--out", "mine"], "error: standard input is not UTF-8: byte 0xe9 at offset 3\n"),
        (b"text", ["--field", "text", "--out", "mine"], "error: line 1 of standard input is not JSON: "),
        (b"text", [], "error: text from standard input needs a name: give --name or --out\n"),
        (
            b"text",
            ["more.txt", "--out", "mine"],
            "error: standard input (-) cannot be mixed with files; give it alone\n",
        ),
    ],
)
def test_bad_standard_input(home, text, arguments, said):
    code, stderr = piped(text, *arguments, cwd=home)
    assert code == 1 and stderr.startswith(said) and stderr.count("\n") == 1
    assert [path.name for path in home.iterdir() if not path.name.endswith(".lock")] == []


# ---------------------------------------------------------------- another dataset's tokenizer


def test_two_datasets_with_one_trained_tokenizer(home):
    (home / "a.txt").write_text(code()[:100_000], encoding="utf-8")
    (home / "b.txt").write_text(TORTURE * 10, encoding="utf-8", newline="")
    main(["files", "a.txt", "--tokenizer", "bpe:600"])
    main(["files", "b.txt", "--tokenizer", "like:a"])
    a, b = open_dataset("a"), open_dataset("b")
    assert b.tokenizer.hash == a.tokenizer.hash and b.tokenizer.name == "bpe:600"
    assert text_of(b, "train") + text_of(b, "val") == TORTURE * 10
    assert open_datasets("a:0.5,b:0.5").tokenizer.hash == a.tokenizer.hash


def test_a_tokenizer_of_no_dataset_and_one_that_became_another(home):
    (home / "a.txt").write_text("some text " * 100, encoding="utf-8")
    with pytest.raises(UserError, match="there is no dataset in .*nowhere; prepare it: python -m data.prepare"):
        main(["files", "a.txt", "--tokenizer", "like:nowhere"])
    main(["files", "a.txt", "--tokenizer", "bytes"])
    main(["files", "a.txt", "--tokenizer", "like:a", "--name", "b"])
    main(["files", "a.txt", "--tokenizer", "like:a", "--name", "b"])  # a look
    main(["files", "a.txt", "--tokenizer", "char", "--name", "a", "--overwrite"])
    with pytest.raises(UserError, match="b holds other text or settings"):
        main(["files", "a.txt", "--tokenizer", "like:a", "--name", "b"])
