"""Downloads, from a server on this machine that can be told to behave badly."""

import errno
import hashlib
import http.server
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from data import UserError, download, open_dataset, shards
from data import prepare as prepare_module
from data.download import PUBLIC_SETS, PublicSet, RemoteFile
from data.prepare import main

ROOT = Path(__file__).resolve().parent.parent
CONTENT = bytes(range(1, 256)) * 4000  # a megabyte
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; the other attributes make it misbehave."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {"/file.bin": CONTENT}
        self.cuts: list[int] = []  # bytes after which the coming answers end
        self.etag: str | None = '"v1"'
        self.has_ranges = self.says_length = True
        self.status: list[int] = []  # refusals of the coming requests
        self.redirect: dict[str, str] = {}
        self.seen: list[tuple[int, str | None]] = []  # (status, Range) of the answers so far

    def url(self, path="/file.bin"):
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, wanted = self.server, self.headers.get("Range")
        if server.status:
            return self.answer(server.status.pop(0), b"")
        if self.path in server.redirect:
            return self.answer(302, b"", {"Location": server.redirect[self.path]})
        if self.path not in server.files:
            return self.answer(404, b"")
        content = server.files[self.path]
        if wanted and server.has_ranges and self.headers.get("If-Range", server.etag) == server.etag:
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
            if start >= len(content):
                return self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            self.answer(206, content[start:], {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"})
        else:
            self.answer(200, content)

    def answer(self, status, body, headers=None):
        self.server.seen.append((status, self.headers.get("Range")))
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if self.server.etag:
            self.send_header("ETag", self.server.etag)
        if self.server.says_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.cuts.pop(0)] if self.server.cuts and body else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(download, "WAIT_SECONDS", 0.001)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def get(server, tmp_path, sha256=SHA256):
    path = download.download(server.url(), tmp_path / "file.bin", sha256)
    assert path.read_bytes() == CONTENT
    return path


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def refused(match, server, tmp_path, sha256=SHA256):
    with pytest.raises(UserError, match=match) as error:
        download.download(server.url(), tmp_path / "file.bin", sha256)
    assert "\n" not in str(error.value) and not (tmp_path / "file.bin").exists()
    return str(error.value)


def test_a_download_and_a_second_that_only_looks(server, tmp_path):
    get(server, tmp_path)
    get(server, tmp_path)
    assert server.seen == [(200, None)] and leftovers(tmp_path) == ["file.bin"]


def test_a_cut_download_goes_on_at_once(server, tmp_path):
    server.cuts = [300_000, 400_000]
    get(server, tmp_path)
    assert server.seen == [(200, None), (206, "bytes=300000-"), (206, "bytes=700000-")]
    assert leftovers(tmp_path) == ["file.bin"]


@pytest.mark.parametrize("etag, sha256", [('"v1"', None), (None, SHA256), ('"v1"', SHA256)])
def test_a_cut_download_goes_on_in_the_next_run(server, tmp_path, etag, sha256, monkeypatch):
    server.etag = etag
    server.cuts = [300_000]
    with monkeypatch.context() as patch:
        patch.setattr(download, "ATTEMPTS", 1)
        refused("the connection ended after 300,000 of 1,020,000 bytes", server, tmp_path, sha256)
    assert (tmp_path / "file.bin.part").stat().st_size == 300_000
    get(server, tmp_path, sha256)
    assert server.seen == [(200, None), (206, "bytes=300000-")] and leftovers(tmp_path) == ["file.bin"]


def test_a_part_of_who_knows_what_is_not_used(server, tmp_path):
    """Neither a checksum nor a version of the file: what came before may have been another one."""
    (tmp_path / "file.bin.part").write_bytes(b"something else")
    get(server, tmp_path, sha256=None)
    assert server.seen == [(200, None)]


def test_a_file_that_changed_meanwhile_is_taken_from_the_start(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(b"older text")
    (tmp_path / "file.bin.part.etag").write_text('"v0"', encoding="ascii")
    get(server, tmp_path, sha256=None)
    assert server.seen == [(200, "bytes=10-")] and leftovers(tmp_path) == ["file.bin"]


def test_a_server_without_ranges_starts_again(server, tmp_path):
    server.has_ranges = False
    server.cuts = [300_000]
    get(server, tmp_path)
    assert server.seen == [(200, None), (200, "bytes=300000-")]


def test_a_server_without_ranges_that_always_cuts_is_given_up(server, tmp_path):
    server.has_ranges = False
    server.cuts = [300_000, 200_000] * 50
    refused("ended after 300,000 of 1,020,000 bytes; 300,000 bytes are kept", server, tmp_path)
    assert len(server.seen) == 1 + download.ATTEMPTS - 1


def test_a_whole_part_only_lacks_its_name(server, tmp_path):
    """Killed between the last byte and the renaming."""
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    get(server, tmp_path)
    assert server.seen == [(416, "bytes=1020000-")]


def test_a_part_that_is_too_long_starts_again(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT + b"more")
    get(server, tmp_path)
    assert server.seen == [(416, "bytes=1020004-"), (200, None)]


def test_a_wrong_checksum_is_thrown_away(server, tmp_path):
    server.files["/file.bin"] = CONTENT[:-1] + b"\0"
    said = refused("was thrown away: its sha256 is .* and should be", server, tmp_path)
    assert SHA256 in said and server.url() in said and leftovers(tmp_path) == []
    server.files["/file.bin"] = CONTENT
    get(server, tmp_path)


def test_no_checksum_is_said(server, tmp_path, capsys):
    get(server, tmp_path, sha256=None)
    assert f"no checksum is known for file.bin; its sha256 is {SHA256}" in capsys.readouterr().out


def test_no_network(tmp_path):
    with socket.socket() as free:  # a port that nobody listens at
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/file.bin"
    with pytest.raises(UserError, match="^cannot download http://127.0.0.1:.*: Connection refused$"):
        download.download(url, tmp_path / "file.bin", SHA256)
    assert leftovers(tmp_path) == []


def test_a_host_that_is_not_found(tmp_path):
    with pytest.raises(UserError, match="^cannot download http://nowhere.invalid/file.bin: "):
        download.download("http://nowhere.invalid/file.bin", tmp_path / "file.bin", SHA256)


def test_a_silent_server(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(download, "ATTEMPTS", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/file.bin"
        with pytest.raises(UserError, match="timed out"):
            download.download(url, tmp_path / "file.bin", SHA256)


@pytest.mark.parametrize("status, match", [(404, "the server says 404 Not Found"), (403, "the server says 403")])
def test_a_refusal_is_not_asked_twice(server, tmp_path, status, match):
    server.status = [status]
    refused(match, server, tmp_path)
    assert len(server.seen) == 1


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_busy_server_is_asked_again(server, tmp_path, status):
    server.status = [status] * 3
    get(server, tmp_path)
    assert [seen for seen, _ in server.seen] == [status] * 3 + [200]


def test_a_redirect_keeps_the_range(server, tmp_path):
    server.files["/elsewhere"] = server.files.pop("/file.bin")
    server.redirect["/file.bin"] = server.url("/elsewhere")
    server.cuts = [300_000]
    get(server, tmp_path)
    assert server.seen == [(302, None), (200, None), (302, "bytes=300000-"), (206, "bytes=300000-")]


def test_no_length_but_a_checksum(server, tmp_path):
    server.says_length = False
    get(server, tmp_path)


def test_a_full_disk_is_not_the_networks_fault(server, tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        download.download(server.url(), tmp_path / "file.bin", SHA256)
    assert len(server.seen) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from data import download
def cut(response, part, have, total):
    part.write_bytes(response.read(250_000))
    os.kill(os.getpid(), signal.SIGKILL)
download._append = cut
download.download(sys.argv[1], Path(sys.argv[2]), None)
"""


def test_killed_while_it_downloads_it_goes_on(server, tmp_path):
    command = [sys.executable, "-c", KILLED, server.url(), str(tmp_path / "file.bin")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode < 0 and leftovers(tmp_path) == ["file.bin.part", "file.bin.part.etag"]
    get(server, tmp_path, sha256=None)
    assert server.seen[1:] == [(206, "bytes=250000-")]


# ---------------------------------------------------------------- the public texts


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARDS_FOLDER", tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def played(monkeypatch, server, name, contents):
    """The public text `name`, but with files of these contents from our server."""
    files = []
    for index, (file, content) in enumerate(zip(PUBLIC_SETS[name].files, contents, strict=False)):
        server.files[f"/{file.name}"] = content
        sha256 = file.sha256 and hashlib.sha256(content).hexdigest()
        files.append(RemoteFile(server.url(f"/{file.name}"), sha256, PUBLIC_SETS[name].files[index].split))
    small = PublicSet(PUBLIC_SETS[name].about, tuple(files), PUBLIC_SETS[name].format)
    monkeypatch.setitem(PUBLIC_SETS, name, small)


def documents_of(dataset, split):
    tokens = getattr(dataset, split)
    return dataset.tokenizer.decode(
        [10 if i == dataset.tokenizer.eot_id else i for i in tokens.read(0, len(tokens)).tolist()]
    ).splitlines()


def test_shakespeare(home, server, monkeypatch, capsys):
    played(monkeypatch, server, "shakespeare", [b"to be or not to be\n" * 100])
    main(["shakespeare", "--tokenizer", "char"])
    dataset = open_dataset("shakespeare")
    assert len(dataset.train) == 1711 and len(dataset.val) == 191
    main(["shakespeare", "--tokenizer", "bytes", "--name", "other"])
    assert [status for status, _ in server.seen] == [200]  # kept from the first time
    assert "Tiny Shakespeare, 1.1 MB: 1 files in" in capsys.readouterr().out


def test_tinystories_come_apart_at_their_separator(home, server, monkeypatch):
    train, val = b"\none\n<|endoftext|>\ntwo\n<|endoftext|>\n" * 3, b"three\n<|endoftext|>\n\n<|endoftext|>\nfour"
    played(monkeypatch, server, "tinystories", [train, val])
    main(["tinystories", "--tokenizer", "bytes"])
    dataset = open_dataset("tinystories")
    assert documents_of(dataset, "train") == ["one", "two"] * 3
    assert documents_of(dataset, "val") == ["three", "four"]


@pytest.mark.parametrize("name", ["fineweb_edu", "openwebtext"])
def test_parquet_sets_and_the_first_files_of_them(home, server, monkeypatch, name):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    contents = []
    for file in range(3):
        rows = {"text": [f"text {row} of {file}" for row in range(20)], "id": list(range(20))}
        parquet.write_table(pyarrow.table(rows), home / "made.parquet")
        contents.append((home / "made.parquet").read_bytes())
    played(monkeypatch, server, name, contents)
    main([name, "--files", "2", "--tokenizer", "bytes"])
    dataset = open_dataset(name)
    assert documents_of(dataset, "train") == [f"text {row} of {file}" for file in range(2) for row in range(18)]
    assert documents_of(dataset, "val") == [f"text {row} of {file}" for file in range(2) for row in (18, 19)]
    assert len(server.seen) == 2


@pytest.mark.parametrize("name", ["stdlib", *PUBLIC_SETS])
def test_who_lacks_it_is_told_the_command(home, name):
    with pytest.raises(UserError, match=f"prepare it: python -m data.prepare {name}$"):
        open_dataset(name)


def test_a_failed_download_prepares_nothing(home, server, monkeypatch):
    played(monkeypatch, server, "shakespeare", [b"text " * 100])
    server.status = [404]
    with pytest.raises(UserError, match="the server says 404"):
        main(["shakespeare"])
    assert leftovers(home / "shards") == [".downloads"]
    monkeypatch.setattr(prepare_module, "fetch_set", lambda *_: pytest.fail("a name that is none costs no download"))
    with pytest.raises(UserError, match="unknown tokenizer"):
        main(["shakespeare", "--tokenizer", "nonsense"])


def test_addresses_and_checksums_are_well_formed():
    for name, public in PUBLIC_SETS.items():
        names = [file.name for file in public.files]
        assert len(set(names)) == len(names) >= 1, name
        for file in public.files:
            assert re.fullmatch(r"https://[a-z.]+/[\w./-]+\.(txt|parquet)", file.url)
            assert file.sha256 is None or re.fullmatch("[0-9a-f]{64}", file.sha256)
    assert [len(PUBLIC_SETS[name].files) for name in ("fineweb_edu", "openwebtext")] == [14, 80]


@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_a_number_of_files_that_is_none(number, capsys):
    with pytest.raises(SystemExit):
        main(["fineweb_edu", f"--files={number}"])
    assert "is not a number of files" in capsys.readouterr().err
