"""Tokenising streams: the same shards for any number of workers, and memory that does not grow with the text."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_data_prepare import ENVIRONMENT, fill
from test_data_tokenizer import TORTURE, code

from data import open_dataset, shards, tokenise
from data.prepare import main, prepare
from data.sources import files_corpus


def test_workers_and_batches_change_nothing(tmp_path, monkeypatch):
    folder = fill(tmp_path / "text")
    (folder / "big.txt").write_text(code() + TORTURE, encoding="utf-8")
    written = {}
    for workers, shard_tokens in [(1, 1 << 27), (2, 1 << 27), (5, 1 << 27), (2, 1000)]:
        monkeypatch.setattr(ShardWriterOf, "shard_tokens", shard_tokens)
        monkeypatch.setattr(tokenise, "ShardWriter", ShardWriterOf)
        out = tmp_path / f"out-{workers}-{shard_tokens}"
        prepare(lambda: files_corpus([folder]), "bpe:500", out, "", workers=workers)
        written[workers, shard_tokens] = {path.name: path.read_bytes() for path in out.iterdir()}
        tokens = open_dataset(out).train
        written[workers, shard_tokens, "tokens"] = tokens.read(0, len(tokens)).tobytes()
    assert written[1, 1 << 27] == written[2, 1 << 27] == written[5, 1 << 27]
    assert len(written[2, 1000]) > 20 and written[2, 1000, "tokens"] == written[1, 1 << 27, "tokens"]


class ShardWriterOf(shards.ShardWriter):
    shard_tokens = 0

    def __init__(self, folder, split, tokenizer, marked):
        super().__init__(folder, split, tokenizer, self.shard_tokens, marked)


PEAK = """
import sys, threading, time
from pathlib import Path
from data.prepare import main

def anonymous_kb():
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    global peak
    while True:
        peak = max(peak, anonymous_kb())
        time.sleep(0.005)

peak = before = anonymous_kb()
threading.Thread(target=watch, daemon=True).start()
main(["files", *sys.argv[1:], "--tokenizer", "bytes", "--out", "mine"])
print(peak - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon from Linux's /proc")
@pytest.mark.parametrize(
    "line, name", [(b'{"text": "' + b"some text " * 200 + b'"}\n', "a.jsonl"), (b"some text or other\n", "a.txt")]
)
def test_a_corpus_need_not_fit_in_memory(tmp_path, line, name):
    (tmp_path / name).write_bytes(line * (200_000_000 // len(line)))
    command = [sys.executable, "-c", PEAK, name]
    said = subprocess.check_output(command, cwd=tmp_path, env=ENVIRONMENT, text=True, stderr=subprocess.DEVNULL)
    assert int(said.splitlines()[-1]) < 120 << 10  # KiB; the text alone is 200 MB, what is queued some 60 to 90


def test_shards_have_a_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(ShardWriterOf, "shard_tokens", 1000)
    monkeypatch.setattr(tokenise, "ShardWriter", ShardWriterOf)
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("some text\n" * 1000, encoding="utf-8")
    main(["files", "my.txt", "--tokenizer", "bytes", "--out", "mine"])
    sizes = [path.stat().st_size for path in sorted((tmp_path / "mine").glob("train-*.bin"))]
    assert sizes == [1024 + 2 * 1000] * 9 + [1024 + 2] and shards.SHARD_TOKENS * 4 <= 512 << 20
