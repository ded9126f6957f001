"""Prepare a dataset: text in, token shards out.

    python -m data.prepare stdlib                                    the default text, nothing to download
    python -m data.prepare files input.txt --tokenizer char          your own text: files and folders

The result is data/shards/<name> (or --out FOLDER) and is used as dataset=<name>. The work is done in a hidden folder
beside it, which gets the final name when all is written, on disk, read back and found equal to the text: an interrupted
prepare leaves nothing that looks finished. A second call with the same text and settings sees that and returns.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm

from .errors import UserError, exit_cleanly
from .shards import (
    DATASET_FILE,
    SPLITS,
    ShardWriter,
    dataset_folder,
    is_plain_name,
    open_dataset,
    open_split,
    read_dataset_file,
)
from .sources import READ_BYTES, Corpus, Document, files_corpus, pieces, read_text, stdlib_corpus
from .tokenizer import TIKTOKEN_FILES, ByteTokenizer, CharTokenizer, Tokenizer, named_encoding, train_bpe

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no such locks: there, two prepares of one dataset must not run at once
    fcntl = None

VERSION = 1  # raised when the same text and settings would give other shards
DEFAULT_TOKENIZER = "bpe:4096"
BPE_SAMPLE_BYTES = 64 << 20  # text that a BPE is trained on, at most
VERIFY_TOKENS = 1 << 18  # tokens decoded in one go when a split is read back
TOKENIZERS = f"bytes, char, bpe:N, {', '.join(TIKTOKEN_FILES)}"


def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    if args.source == "stdlib":
        read_corpus, name = stdlib_corpus, args.name or "stdlib"
    else:
        read_corpus, name = lambda: files_corpus(args.paths), args.name or args.paths[0].resolve().stem
    if args.out is None and not is_plain_name(name):
        raise UserError(f"{name!r} cannot name a dataset: give --name with letters, digits, '_', '-' and '.'")
    folder = args.out.resolve() if args.out else dataset_folder(name)
    prepare(read_corpus, args.tokenizer, folder, _command(args), overwrite=args.overwrite)


def prepare_stdlib() -> Path:
    """Prepare the default dataset, "stdlib", unless one of that name is there. Returns its folder."""
    folder = dataset_folder("stdlib")
    if not (folder / DATASET_FILE).is_file():
        prepare(stdlib_corpus, DEFAULT_TOKENIZER, folder, "python -m data.prepare stdlib")
    return folder


def prepare(
    read_corpus: Callable[[], Corpus],
    tokenizer: str,
    folder: Path,
    command: str,
    overwrite: bool = False,
    workers: int | None = None,
) -> None:
    """Tokenise a corpus into `folder`, unless it already holds exactly that.

    tokenizer: "bytes", "char", "bpe:N" or the name of a tiktoken encoding
    command: what the user would type to get this dataset; errors about it recommend it
    overwrite: replace a dataset of other contents in that folder
    workers: threads that tokenise (default: one a core); the shards do not depend on it

    Raises UserError for text that cannot be used, for a folder in the way, and when a disk refuses or is full.
    """
    start = time.perf_counter()
    check_tokenizer_name(tokenizer)
    try:
        corpus = read_corpus()
        with _locked(folder):
            key = _json_hash([VERSION, tokenizer, corpus.hash])
            done = _is_prepared(folder, key, overwrite)
            if not done:
                _prepare_beside(corpus, tokenizer, folder, {"key": key, "command": command}, workers or _n_cores())
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror or error}; nothing was prepared") from error
    _announce(corpus, read_dataset_file(folder, command))
    seconds = time.perf_counter() - start
    print(f"{folder} {'is already prepared' if done else 'prepared'} ({seconds:.1f} s)", flush=True)


def check_tokenizer_name(spec: str) -> None:
    """UserError unless `spec` names a tokenizer that can be made."""
    if spec in ("bytes", "char", *TIKTOKEN_FILES):
        return
    if not re.fullmatch(r"bpe:[0-9]+", spec):
        raise UserError(f"unknown tokenizer {spec!r}; there are {TOKENIZERS}")
    if not 257 <= int(spec[4:]) <= 1_000_000:
        raise UserError(f"{spec} is not possible: N counts the 256 bytes, the end of text and the merges (257 to 10^6)")


def _is_prepared(folder: Path, key: str, overwrite: bool) -> bool:
    """Whether `folder` holds the dataset of this key, whole. UserError if it holds something that has to stay."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if not (folder / DATASET_FILE).is_file():
        raise UserError(f"{folder} exists and is not a dataset, so it stays; choose another --name or --out")
    try:
        same = read_dataset_file(folder, "")["key"] == key
        if same:
            open_dataset(folder)
    except UserError as error:
        print(f"preparing it again: {error.__cause__ or error}")
        return False
    if not same and not overwrite:
        raise UserError(
            f"{folder} holds other text or settings; add --overwrite to replace it, or choose another --name"
        )
    return same


def _prepare_beside(corpus: Corpus, spec: str, folder: Path, info: dict, workers: int) -> None:
    """Write the dataset into a hidden folder beside `folder`, then give it its name. `info` goes into dataset.json."""
    partial = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a prepare that was killed: we hold the lock
    partial.mkdir()
    try:
        tokenizer = make_tokenizer(spec, corpus)
        tokenizer.save(partial)
        splits = _write_splits(corpus, tokenizer, partial, workers)
        shards = [shard["sha256"] for split in SPLITS for shard in splits[split]["shards"]]
        info |= {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
        info |= {"hash": _json_hash([tokenizer.hash, *shards]), "splits": splits}
        _write_synced(partial / DATASET_FILE, json.dumps(info, indent=1) + "\n")
        _move_into_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # nothing there after success; after an error or Ctrl-C, leavings


def make_tokenizer(spec: str, corpus: Corpus) -> Tokenizer:
    """The tokenizer that `spec` names, trained on the corpus where it has to be."""
    if spec == "bytes":
        return ByteTokenizer()
    if spec == "char":
        return CharTokenizer(_alphabet(corpus))
    if spec.startswith("bpe:"):
        tokenizer = train_bpe(_sample(corpus.split("train"), BPE_SAMPLE_BYTES), int(spec[4:]))
        if tokenizer.name != spec:
            print(f"the text is too small for {spec}: the vocabulary has {tokenizer.vocab_size} ids")
        return tokenizer
    return named_encoding(spec)


def _alphabet(corpus: Corpus) -> set[str]:
    characters: set[str] = set()
    for text, _ in pieces(corpus.documents):
        characters.update(text)
    return characters


def _sample(documents: list[Document], limit: int) -> Iterator[str]:
    """About `limit` bytes of the documents' text, evenly spread over them; all of it if there is no more."""
    share = min(1.0, limit / max(1, sum(document.stop - document.start for document in documents)))
    due = 0.0  # characters that could have been taken so far and were not
    for document in documents:
        for text in read_text(document):
            due += len(text) * share
            if due >= min(len(text), READ_BYTES) - 0.5:
                yield text[: round(due)]
                due = max(0.0, due - len(text))


def _write_splits(corpus: Corpus, tokenizer: Tokenizer, folder: Path, workers: int) -> dict[str, dict]:
    total = sum(document.stop - document.start for document in corpus.documents)
    with tqdm(total=total, desc="tokenising", unit="B", unit_scale=True, disable=None) as bar:
        return {split: _write_split(corpus, split, tokenizer, folder, workers, bar) for split in SPLITS}


def _write_split(
    corpus: Corpus, split: str, tokenizer: Tokenizer, folder: Path, workers: int, bar: tqdm
) -> dict[str, int | str | list[dict]]:
    """Tokenise one split, read it back and compare. Returns what dataset.json says about it."""
    documents = corpus.split(split)
    with ShardWriter(folder, split, tokenizer) as writer:
        encoded = _ordered_map(lambda batch: _encode(batch, tokenizer), _batches(documents), workers)
        for n_bytes, tokens in encoded:
            writer.write(tokens)
            bar.update(n_bytes)
    entry = {
        "documents": len(documents),
        "bytes": sum(header["n_bytes"] for header in writer.headers),
        "tokens": sum(header["n_tokens"] for header in writer.headers),
        "text_sha256": corpus.text_sha256[split],
        "shards": writer.headers,
    }
    if entry["bytes"] == 0:
        raise UserError(f"the text is too short: nothing is left for its {split} split")
    _verify(folder, split, entry, tokenizer, workers)
    return entry


Batch = list[tuple[str, bool]]  # pieces of text, each with whether it ends its document


def _batches(documents: list[Document]) -> Iterator[Batch]:
    """The pieces of the documents, in batches of READ_BYTES characters or a little more."""
    batch: Batch = []
    size = 0
    for text, ends_document in pieces(documents):
        batch.append((text, ends_document))
        size += len(text)
        if size >= READ_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(batch: Batch, tokenizer: Tokenizer) -> tuple[int, np.ndarray]:
    """Bytes and ids of a batch, with eot_id after each document's end."""
    eot = np.array([tokenizer.eot_id], dtype=np.uint32)
    parts = []
    for text, ends_document in batch:
        parts.append(tokenizer.encode_to_numpy(text))
        if ends_document:
            parts.append(eot)
    return sum(len(text.encode("utf-8")) for text, _ in batch), np.concatenate(parts)


def _ordered_map(function: Callable, items: Iterable, workers: int) -> Iterator:
    """`map` on threads, in order, with few items in flight. Threads will do: tokenising leaves the interpreter lock."""
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _verify(folder: Path, split: str, entry: dict, tokenizer: Tokenizer, workers: int) -> None:
    """Read a written split back: it must decode to the text that was first read, with one eot_id per document."""
    tokens = open_split(folder, split, entry["shards"], tokenizer)

    def decoded(start: int) -> tuple[bytes, int]:
        block = tokens.read(start, start + VERIFY_TOKENS)
        return tokenizer.decode_array(block), int((block == tokenizer.eot_id).sum())

    digest, n_eot = hashlib.sha256(), 0
    for text, n in _ordered_map(decoded, range(0, len(tokens), VERIFY_TOKENS), workers):
        digest.update(text)
        n_eot += n
    if digest.hexdigest() != entry["text_sha256"] or n_eot != entry["documents"]:
        raise UserError(
            f"the {split} split does not decode to the text that was read first: did a file change meanwhile?"
        )


def _announce(corpus: Corpus, info: dict) -> None:
    for remark in corpus.remarks:
        print(remark)
    for split in SPLITS:
        entry = info["splits"][split]
        print(
            f"  {split:<5} {entry['documents']:>7,} documents {entry['bytes']:>14,} bytes {entry['tokens']:>13,} tokens"
            f"  {entry['bytes'] / entry['tokens']:.2f} bytes/token  text sha256 {entry['text_sha256'][:12]}"
        )
    print(f"  tokenizer {info['tokenizer']}, {info['vocab_size']:,} ids  content hash {info['hash'][:12]}")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the right to write `folder`: two runs that both miss the default data must not prepare it at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w", encoding="utf-8") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process that prepares {folder}", flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield  # the kernel lets go of the lock when the file closes, however the process ends


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _move_into_place(partial: Path, folder: Path) -> None:
    """Give a finished folder its name. What had the name before goes only now."""
    _sync_folder(partial)
    old = folder.parent / f".{folder.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(partial, folder)
    _sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _n_cores() -> int:
    return os.cpu_count() or 1


def _json_hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode("ascii")).hexdigest()


def _command(args: argparse.Namespace) -> str:
    parts = [args.source, *map(str, getattr(args, "paths", []))]
    if args.tokenizer != DEFAULT_TOKENIZER:
        parts += ["--tokenizer", args.tokenizer]
    parts += ["--name", args.name] if args.name else []
    parts += ["--out", str(args.out)] if args.out else []
    return f"python -m data.prepare {shlex.join(parts)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sources = parser.add_subparsers(dest="source", required=True, metavar="stdlib|files")
    sources.add_parser("stdlib", help="the standard library of this Python: code, 12 MB, no download")
    files = sources.add_parser("files", help="text files (UTF-8) and folders of them")
    files.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a text file, or a folder of text files")
    for source in sources.choices.values():
        source.add_argument("--tokenizer", default=DEFAULT_TOKENIZER, help=f"{TOKENIZERS} (default: %(default)s)")
        place = source.add_mutually_exclusive_group()
        place.add_argument("--name", help="name of the dataset (default: stdlib, or the first PATH's name)")
        place.add_argument("--out", type=Path, metavar="FOLDER", help="where to put it instead of data/shards/NAME")
        source.add_argument("--overwrite", action="store_true", help="replace a dataset of other contents")
    return parser


if __name__ == "__main__":
    with exit_cleanly():
        main()
