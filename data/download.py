"""Public texts by name: where they are, and a download that survives a bad connection.

A download goes into <file>.part and gets its name when it is whole and, where a checksum is known, right. Cut off, it
goes on where it stopped, at once or in the next run, if the server can do that and the file can be told to be the same.
"""

import errno
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from .errors import UserError
from .files import locked

ATTEMPTS = 5  # in a row without a new byte
WAIT_SECONDS = 1.0  # before the second attempt, and twice as long before each further one
TIMEOUT_SECONDS = 30.0  # without a word from the server
BLOCK_BYTES = 1 << 20
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOENT}


@dataclass(frozen=True)
class RemoteFile:
    """One file of a public text. `split`: the split that all of it belongs to; None to split it by position."""

    url: str
    sha256: str | None = None
    split: str | None = None

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]


@dataclass(frozen=True)
class PublicSet:
    """A public text. `format`: see reading.py; None to go by the files' endings."""

    about: str
    files: tuple[RemoteFile, ...]
    format: str | None = None


_HUB = "https://huggingface.co/datasets"
_STORIES = f"{_HUB}/roneneldan/TinyStories/resolve/f54c09fd23315a6f9c86f9dc80f725de7d8f9c64/TinyStoriesV2-GPT4"
_FINEWEB = f"{_HUB}/HuggingFaceFW/fineweb-edu/resolve/main/sample/10BT"
_OPENWEB = f"{_HUB}/Skylion007/openwebtext/resolve/79d93d786212f7344586290adb811d4ae6a1762c/plain_text"

PUBLIC_SETS = {
    "shakespeare": PublicSet(
        "Tiny Shakespeare, 1.1 MB",
        (
            RemoteFile(
                "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
                "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            ),
        ),
    ),
    "tinystories": PublicSet(
        "TinyStories, second version, written by GPT-4: 2.2 GB",
        (
            RemoteFile(
                f"{_STORIES}-train.txt", "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443", "train"
            ),
            RemoteFile(
                f"{_STORIES}-valid.txt", "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d", "val"
            ),
        ),
        "separated",
    ),
    "fineweb_edu": PublicSet(
        "FineWeb-Edu, its sample of 10 billion tokens: 14 parquet files, 28 GB",
        tuple(RemoteFile(f"{_FINEWEB}/{index:03d}_00000.parquet") for index in range(14)),
    ),
    "openwebtext": PublicSet(
        "OpenWebText, a copy of GPT-2's training text: 80 parquet files, 24 GB",
        tuple(RemoteFile(f"{_OPENWEB}/train-{index:05d}-of-00080.parquet") for index in range(80)),
    ),
}


class CutOff(Exception):
    """The connection ended before the file did."""


def fetch_set(set_name: str, folder: Path, n_files: int | None = None) -> list[tuple[RemoteFile, Path]]:
    """The files of a public text, or the first `n_files` of them, downloaded into `folder` unless they are there."""
    files = PUBLIC_SETS[set_name].files[:n_files]
    return [(file, download(file.url, folder / file.name, file.sha256)) for file in files]


def download(url: str, path: Path, sha256: str | None) -> Path:
    """Download `url` to `path`, unless that file is there. Returns `path`.

    Raises UserError, saying why in one sentence, when that is not possible and when the checksum is wrong.
    """
    with locked(path):
        if path.is_file():
            return path
        part = path.with_name(f"{path.name}.part")
        print(f"downloading {url} to {path}", flush=True)
        _until_whole(url, part, resume=sha256 is not None)
        found = _file_sha256(part)
        if sha256 is not None and found != sha256:
            _discard(part)
            raise UserError(
                f"{url} was thrown away: its sha256 is {found} and should be {sha256}; the download was spoilt, or "
                f"another file is there now"
            )
        if sha256 is None:
            print(f"no checksum is known for {path.name}; its sha256 is {found}", flush=True)
        os.rename(part, path)
        _etag_file(part).unlink(missing_ok=True)
    return path


def _until_whole(url: str, part: Path, resume: bool) -> None:
    """Receive until the file is whole, with new attempts as long as they bring something."""
    most, failures = _size(part), 0
    while True:
        try:
            return _receive(url, part, resume)
        except (OSError, http.client.HTTPException, CutOff) as error:
            if _is_local(error):
                raise
            failures = 1 if _size(part) > most else failures + 1
            most = max(most, _size(part))
            if failures >= ATTEMPTS or _is_refusal(error):
                kept = f"; {most:,} bytes are kept for the next attempt" if most else ""
                raise UserError(f"cannot download {url}: {_reason(error)}{kept}") from error
            time.sleep(WAIT_SECONDS * 2 ** (failures - 1))


def _receive(url: str, part: Path, resume: bool) -> None:
    """One attempt: append what is missing of `part`, or all of it where the server starts from the beginning."""
    etag = _etag_file(part).read_text(encoding="ascii") if _etag_file(part).is_file() else None
    have = _size(part) if resume or etag else 0
    headers = {"User-Agent": "data.prepare", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        headers |= {"If-Range": etag} if etag else {}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE or not have:
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return  # it was whole, and only its name was missing
        _discard(part)
        raise CutOff(f"the server has no bytes after {have:,}") from error
    with response:
        if response.status != http.client.PARTIAL_CONTENT:
            have = 0
            _keep_etag(part, response.headers.get("ETag"))
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            _discard(part)
            raise CutOff("the server sent other bytes than were asked for")
        length = response.headers.get("Content-Length")
        _append(response, part, have, have + int(length) if length else None)


def _append(response: http.client.HTTPResponse, part: Path, have: int, total: int | None) -> None:
    with open(part, "r+b" if have else "wb") as file, _bar(part, have, total) as bar:
        file.seek(have)
        for block in _blocks(response.read):
            file.write(block)
            bar.update(len(block))
        size = file.tell()
        os.fsync(file.fileno())
    if total is not None and size != total:
        raise CutOff(f"the connection ended after {size:,} of {total:,} bytes")


def _bar(part: Path, have: int, total: int | None) -> tqdm:
    name = part.name.removesuffix(".part")
    return tqdm(total=total, initial=have, desc=name, unit="B", unit_scale=True, disable=None)


def _blocks(read: Callable[[int], bytes]) -> Iterator[bytes]:
    while block := read(BLOCK_BYTES):
        yield block


def _etag_file(part: Path) -> Path:
    """Beside a part: what the server calls the version of the file that the part was taken from."""
    return part.with_name(f"{part.name}.etag")


def _keep_etag(part: Path, etag: str | None) -> None:
    if etag and etag.isascii() and not etag.startswith("W/"):  # a weak one does not promise the same bytes
        _etag_file(part).write_text(etag, encoding="ascii")
    else:
        _etag_file(part).unlink(missing_ok=True)


def _discard(part: Path) -> None:
    part.unlink()
    _etag_file(part).unlink(missing_ok=True)


def _is_local(error: Exception) -> bool:
    """Whether our own disk refused, which no further attempt can help."""
    return isinstance(error, OSError) and error.errno in DISK_ERRORS and not isinstance(error, urllib.error.URLError)


def _is_refusal(error: Exception) -> bool:
    """Whether the server said no, and will say it again."""
    return isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code != 429


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server says {error.code} {error.reason}"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return str(reason) or type(reason).__name__


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in _blocks(file.read):
            digest.update(block)
    return digest.hexdigest()
