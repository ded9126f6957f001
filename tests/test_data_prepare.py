"""`python -m data.prepare`: which text goes where, what happens when it is cut short, and what it refuses."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
from test_data_tokenizer import TORTURE, gpt2

from data import UserError, open_dataset, shards, tokenise
from data import prepare as prepare_module
from data.prepare import main, prepare, prepare_stdlib
from data.sources import files_corpus, stdlib_corpus

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "data.prepare"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def program(*arguments, cwd, check=0):
    """Run the program as a user would, and return what it said: (stdout, stderr)."""
    done = subprocess.run([*COMMAND, *map(str, arguments)], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == check, done.stderr
    return done.stdout, done.stderr


def refused(match, *arguments):
    """main(arguments) raises a UserError of one sentence."""
    with pytest.raises(UserError, match=match) as error:
        main([str(argument) for argument in arguments])
    assert "\n" not in str(error.value)


def text_of(dataset, split):
    tokens = getattr(dataset, split)
    return dataset.tokenizer.decode(tokens.read(0, len(tokens)).tolist())


def documents_of(dataset, split):
    tokens = getattr(dataset, split)
    ids = tokens.read(0, len(tokens))
    ends = np.flatnonzero(ids == dataset.tokenizer.eot_id) + 1
    assert ends[-1] == len(ids), "every document ends with eot"
    return [dataset.tokenizer.decode(part.tolist()) for part in np.split(ids, ends[:-1])]


def fill(folder, n_files=60):
    """A folder of small texts, some of them in subfolders."""
    for i in range(n_files):
        path = folder / f"part{i % 3}" / f"{i:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"file {i}\n" * (i + 1), encoding="utf-8")
    return folder


def validates(name):
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty place for datasets, and an empty current folder."""
    monkeypatch.setattr(shards, "SHARDS_FOLDER", tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------- the default text


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stdlib") / "stdlib"
    start = time.perf_counter()
    stdout, stderr = program("stdlib", "--out", folder, cwd=folder.parent)
    return folder, stdout, time.perf_counter() - start


def test_stdlib_is_announced_and_fast(stdlib):
    folder, stdout, seconds = stdlib
    info = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
    assert seconds < 30
    for split in ("train", "val"):
        entry = info["splits"][split]
        line = next(line for line in stdout.splitlines() if line.split()[0] == split)
        assert f"{entry['documents']:,} documents" in line and f"{entry['bytes']:,} bytes" in line
        assert f"{entry['tokens']:,} tokens" in line and entry["text_sha256"][:12] in line
    assert info["hash"][:12] in stdout and "bpe:4096, 4,096 ids" in stdout


def test_stdlib_is_the_text_of_the_design(stdlib):
    dataset = open_dataset(stdlib[0])
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
    expected = {"train": [], "val": []}
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        content = (root / name).read_bytes()
        if not skipped & set(name.split("/")) and content:
            expected["val" if validates(name) else "train"].append(content.removeprefix(b"\xef\xbb\xbf"))
    for split, contents in expected.items():
        assert len(contents) > 10
        assert text_of(dataset, split).encode() == b"".join(contents)
        assert [len(text.encode()) for text in documents_of(dataset, split)] == [len(content) for content in contents]
    assert dataset.tokenizer.name == "bpe:4096" and dataset.tokenizer.vocab_size == 4096


def test_second_call_is_a_look(stdlib):
    folder, stdout, _ = stdlib
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    start = time.perf_counter()
    again, _ = program("stdlib", "--out", folder, cwd=folder.parent)
    assert time.perf_counter() - start < 5
    assert "already prepared" in again and again.splitlines()[:-1] == stdout.splitlines()[:-1]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_stdlib_skips_what_is_not_utf8(tmp_path, monkeypatch):
    (tmp_path / "test").mkdir()
    for name, content in {
        "good.py": b"x = 1\n",
        "latin.py": b"# caf\xe9\n",
        "nul.py": b"\0",
        "empty.py": b"",
        "test/t.py": b"t\n",
        "data.txt": b"x",
    }.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [document.name for document in stdlib_corpus().parts] == ["good.py"]


def test_prepare_stdlib_prepares_once(home, monkeypatch):
    small = fill(home / "text")
    monkeypatch.setattr(prepare_module, "stdlib_corpus", lambda: files_corpus([small]))
    assert prepare_stdlib() == home / "shards" / "stdlib"
    digest = open_dataset("stdlib").hash
    (small / "part0" / "new.txt").write_text("new", encoding="utf-8")
    prepare_stdlib()  # another interpreter's library: what is there stays
    assert open_dataset("stdlib").hash == digest


# ---------------------------------------------------------------- your own text


def test_a_single_file_is_split_by_position(home):
    Path("my.txt").write_text("0123456789" * 100, encoding="utf-8")
    main(["files", "my.txt", "--tokenizer", "char"])
    dataset = open_dataset("my")
    assert documents_of(dataset, "train") == ["0123456789" * 90]
    assert documents_of(dataset, "val") == ["0123456789" * 10]
    assert dataset.tokenizer.vocab_size == 11


@pytest.mark.parametrize("shift", range(4))
def test_the_cut_never_breaks_a_character(home, shift):
    text = "x" * shift + "😀" * 1000
    Path("my.txt").write_text(text, encoding="utf-8")
    main(["files", "my.txt", "--tokenizer", "bytes"])
    dataset = open_dataset("my")
    assert text_of(dataset, "train") + text_of(dataset, "val") == text
    assert "\ufffd" not in text_of(dataset, "val")


def test_a_folder_is_split_by_the_names_of_its_files(home):
    folder = fill(home / "text")
    main(["files", "text", "--tokenizer", "bytes", "--name", "folder"])
    dataset = open_dataset("folder")
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.txt"))
    for split in ("train", "val"):
        chosen = [name for name in names if validates(name) == (split == "val")]
        assert documents_of(dataset, split) == [(folder / name).read_text(encoding="utf-8") for name in chosen]
        assert chosen


def test_a_folder_of_few_files_is_split_by_position(home, capsys):
    folder = fill(home / "text", 2)
    main(["files", str(folder), "--tokenizer", "bytes"])
    assert "too few files" in capsys.readouterr().out
    dataset = open_dataset("text")
    assert len(documents_of(dataset, "train")) == len(documents_of(dataset, "val")) == 2


def test_files_and_folders_together_in_the_order_given(home):
    fill(home / "text")
    Path("z.unknown").write_text("z" * 100, encoding="utf-8")  # named, so its ending does not matter
    main(["files", "z.unknown", "text", "--tokenizer", "bytes"])
    documents = documents_of(open_dataset("z"), "train")
    assert documents[0] == "z" * 90 and documents[1].startswith("file")


def test_a_folder_gives_its_text_files_only(home, capsys):
    folder = fill(home / "text")
    for name in ("image.png", ".hidden.txt", ".git/config.txt", "noending", "empty.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"" if name == "empty.txt" else b"\x89PNG\0")
    main(["files", "text", "--tokenizer", "bytes"])
    assert "3 files left out" in capsys.readouterr().out
    dataset = open_dataset("text")
    assert len(documents_of(dataset, "train")) + len(documents_of(dataset, "val")) == 60


def test_line_ends_stay_and_the_byte_order_mark_goes(home):
    Path("my.txt").write_bytes(b"\xef\xbb\xbf" + b"one\r\ntwo\rthree\n\xef\xbb\xbf" * 20)
    main(["files", "my.txt", "--tokenizer", "char"])
    dataset = open_dataset("my")
    assert text_of(dataset, "train") + text_of(dataset, "val") == "one\r\ntwo\rthree\n\ufeff" * 20


@pytest.mark.parametrize("tokenizer", ["bytes", "char", "bpe:300", "gpt2"])
def test_torture_survives_every_tokenizer(home, tokenizer):
    if tokenizer == "gpt2":
        gpt2()  # skips where it is not to be had
    Path("my.txt").write_text(TORTURE * 20, encoding="utf-8", newline="")
    main(["files", "my.txt", "--tokenizer", tokenizer])
    dataset = open_dataset("my")
    assert text_of(dataset, "train") + text_of(dataset, "val") == TORTURE * 20
    assert dataset.tokenizer.name == tokenizer


def test_changed_text_settings_and_damage_are_noticed(home, capsys):
    Path("my.txt").write_text("some text\n" * 100, encoding="utf-8")
    main(["files", "my.txt", "--tokenizer", "bytes"])
    first = open_dataset("my").hash
    main(["files", "my.txt", "--tokenizer", "bytes"])
    assert "already prepared" in capsys.readouterr().out

    refused("my holds other text or settings; add --overwrite", "files", "my.txt", "--tokenizer", "char")
    Path("my.txt").write_text("some text\n" * 99 + "some next\n", encoding="utf-8")
    refused("--overwrite", "files", "my.txt", "--tokenizer", "bytes")
    assert open_dataset("my").hash == first
    main(["files", "my.txt", "--tokenizer", "bytes", "--overwrite"])
    second = open_dataset("my").hash
    assert second != first

    (home / "shards/my/val-00000.bin").write_bytes(b"")
    capsys.readouterr()
    main(["files", "my.txt", "--tokenizer", "bytes"])  # same text: mended without being asked
    assert "preparing it again" in capsys.readouterr().out
    assert open_dataset("my").hash == second
    assert sorted(path.name for path in (home / "shards").iterdir()) == [".my.lock", "my"]


def test_a_folder_that_is_no_dataset_is_never_replaced(home):
    Path("my.txt").write_text("some text\n" * 100, encoding="utf-8")
    precious = fill(home / "precious", 1)
    for place in (precious, home / "my.txt"):
        refused("is not a dataset, so it stays", "files", "my.txt", "--out", place, "--overwrite")
    assert (precious / "part0" / "000.txt").is_file()
    (home / "empty").mkdir()
    main(["files", "my.txt", "--tokenizer", "bytes", "--out", "empty"])
    open_dataset(home / "empty")


# ---------------------------------------------------------------- interruption


def leftovers(parent):
    """What lies in a folder besides lock files."""
    return sorted(path.name for path in parent.iterdir() if not path.name.endswith(".lock"))


def start_and_wait_for(condition, out):
    """Start a prepare that takes some seconds, and return its process as soon as `condition` holds."""
    command = [*COMMAND, "stdlib", "--out", str(out)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.002)
    return process


def test_killed_at_work_it_leaves_nothing_that_looks_finished(tmp_path):
    out = tmp_path / "mine"
    process = start_and_wait_for((tmp_path / ".mine.partial").exists, out)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert leftovers(tmp_path) == [".mine.partial"]
    with pytest.raises(UserError, match="no dataset in"):
        open_dataset(out)
    Path(tmp_path, "my.txt").write_text("some text\n" * 100, encoding="utf-8")
    main(["files", str(tmp_path / "my.txt"), "--tokenizer", "bytes", "--out", str(out)])
    assert leftovers(tmp_path) == ["mine", "my.txt"]
    open_dataset(out)


KILL_ITSELF = """
import os, signal, sys
from data.prepare import main

def counting(function):
    def count(*arguments):
        global calls
        calls += 1
        if calls == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return count

calls = 0
os.fsync, os.rename = counting(os.fsync), counting(os.rename)
main(["files", "my.txt", "--tokenizer", "bytes", "--out", "mine", "--overwrite"])
"""


@pytest.mark.parametrize("old", [False, True])
def test_killed_before_any_write_to_disk_it_is_whole_or_missing(home, old):
    """Kill it at every fsync and every rename in turn, with and without an older dataset in the place."""
    Path("old.txt").write_text("old text\n" * 100, encoding="utf-8")
    Path("my.txt").write_text("some text\n" * 100, encoding="utf-8")
    states = []
    for moment in range(1, 20):
        shutil.rmtree("mine", ignore_errors=True)
        if old:
            main(["files", "old.txt", "--tokenizer", "bytes", "--out", "mine"])
        done = subprocess.run([sys.executable, "-c", KILL_ITSELF, str(moment)], env=ENVIRONMENT, capture_output=True)
        try:
            states.append(text_of(open_dataset(home / "mine"), "val")[:3])
        except UserError as error:
            assert "no dataset in" in str(error)
            states.append("")
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    main(["files", "my.txt", "--tokenizer", "bytes", "--out", "mine"])
    assert leftovers(home) == ["mine", "my.txt", "old.txt"]
    assert len(states) >= 9 and states == sorted(states, key=["old", "", "som"].index)
    assert states.count("") <= 1 if old else "old" not in states


def test_ctrl_c_cleans_up_and_says_one_line(tmp_path):
    process = start_and_wait_for((tmp_path / ".mine.partial" / "tokenizer.json").exists, tmp_path / "mine")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
    assert process.returncode == 130
    assert stderr.strip().splitlines()[-1] == "interrupted" and "Traceback" not in stderr
    assert leftovers(tmp_path) == []


def test_an_overwrite_cut_short_keeps_the_old_dataset(home, monkeypatch):
    Path("my.txt").write_text("some text\n" * 100, encoding="utf-8")
    main(["files", "my.txt", "--tokenizer", "bytes"])
    before = open_dataset("my").hash

    def full_disk(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full_disk)
            arguments = ["files", "my.txt", "--tokenizer", "char", "--overwrite"]
            refused("No space left on device; nothing was prepared", *arguments)
        assert open_dataset("my").hash == before
        assert leftovers(home / "shards") == ["my"]


def test_two_at_once_wait_for_each_other(tmp_path):
    command = [*COMMAND, "stdlib", "--tokenizer", "bytes", "--out", str(tmp_path / "mine")]
    both = [subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted("already prepared" in text for text in said) == [False, True]
    open_dataset(tmp_path / "mine")


def test_a_file_that_changes_meanwhile_is_noticed(home, monkeypatch):
    Path("my.txt").write_text("some text\n" * 100, encoding="utf-8")

    def corpus():
        found = files_corpus([Path("my.txt")])
        Path("my.txt").write_text("other tex\n" * 100, encoding="utf-8")
        return found

    with pytest.raises(UserError, match="did a file change meanwhile"):
        prepare(corpus, "bytes", home / "mine", "")
    Path("my.txt").write_text("some text\n" * 100, encoding="utf-8")

    def shrinking():
        found = files_corpus([Path("my.txt")])
        Path("my.txt").write_text("some", encoding="utf-8")
        return found

    with pytest.raises(UserError, match="became shorter"):
        prepare(shrinking, "bytes", home / "mine", "")
    assert leftovers(home) == ["my.txt"]


def test_shards_that_do_not_decode_to_the_text_are_refused(home, monkeypatch):
    Path("my.txt").write_text("some text\n" * 100, encoding="utf-8")

    def wrong(batch, tokenizer):
        n_bytes, tokens = encode(batch, tokenizer)
        return n_bytes, tokens[::-1]

    encode = tokenise.encode
    monkeypatch.setattr(tokenise, "encode", wrong)
    refused("does not decode to the text", "files", "my.txt", "--tokenizer", "bytes")
    assert leftovers(home / "shards") == []


def test_an_error_in_a_worker_is_not_swallowed(home, monkeypatch):
    Path("my.txt").write_text("some text\n" * 100, encoding="utf-8")

    def broken(batch, tokenizer):
        raise RuntimeError("worker broke")

    monkeypatch.setattr(tokenise, "encode", broken)
    with pytest.raises(RuntimeError, match="worker broke"):
        main(["files", "my.txt", "--tokenizer", "bytes"])
    assert leftovers(home / "shards") == []


# ---------------------------------------------------------------- the program


def test_program_says_one_sentence_and_exits_1(tmp_path):
    stdout, stderr = program("files", "nowhere.txt", cwd=tmp_path, check=1)
    assert (stdout, stderr) == ("", "error: nowhere.txt does not exist\n")


def test_help_and_usage(tmp_path):
    stdout, _ = program("--help", cwd=tmp_path)
    for word in ("stdlib", "files", "shakespeare", "tinystories", "fineweb_edu", "openwebtext"):
        assert word in stdout
    stdout, _ = program("files", "--help", cwd=tmp_path)
    for word in ("PATH", "--field", "--tokenizer", "bytes, char, bpe:N, gpt2", "--name", "--out", "--overwrite"):
        assert word in stdout
    program("nothing", cwd=tmp_path, check=2)
    program("files", cwd=tmp_path, check=2)


def test_importing_the_package_does_not_import_torch(tmp_path):
    script = "import data, data.prepare, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=ENVIRONMENT).returncode == 0


def test_bad_folders_are_left_as_they_were(home):
    """Whatever fails, fails before anything of the user's is touched."""
    Path("my.txt").write_text("some text\n" * 100, encoding="utf-8")
    main(["files", "my.txt", "--tokenizer", "bytes"])
    copy = shutil.copytree(home / "shards" / "my", home / "copy")
    refused("does not exist", "files", "other.txt", "--name", "my", "--overwrite")
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == {
        p.name: p.read_bytes() for p in (home / "shards/my").iterdir()
    }
