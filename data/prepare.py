"""Prepare a dataset: text in, token shards out.

    python -m data.prepare stdlib                                    the default text, nothing to download
    python -m data.prepare files input.txt --tokenizer char          your own text: files and folders
    python -m data.prepare files news.jsonl web.parquet --field body --name web
    zcat big.txt.gz | python -m data.prepare files - --name big      standard input; with --field, JSON Lines
    python -m data.prepare tinystories --tokenizer gpt2              a public text, downloaded once
    python -m data.prepare files talk.jsonl --chat --tokenizer out/smollm2   chats, for a model with a chat template

Files are text in UTF-8, .jsonl (one object, one document, a line) or .parquet (one document a row; needs pyarrow).
A tokenizer may be a folder: a run, a checkpoint or a dataset, whose tokenizer is taken. With --chat, every line of the
.jsonl files is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}; the
loss is then taken on the assistant's answers alone.
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
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .download import PUBLIC_SETS, fetch_set
from .errors import UserError, exit_cleanly
from .files import locked, move_into_place, write_synced
from .reading import READ_BYTES, SPLITS, pieces
from .shards import (
    DATASET_FILE,
    dataset_folder,
    is_plain_name,
    open_dataset,
    prepare_command,
    read_dataset_file,
)
from .sources import (
    HOLDOUT_BYTES,
    STDIN_LABEL,
    Corpus,
    by_position,
    files_corpus,
    read_through,
    stdin_corpus,
    stdlib_corpus,
    whole_file,
)
from .tokenise import write_splits
from .tokenizer import FILE_NAME as TOKENIZER_FILE
from .tokenizer import (
    TIKTOKEN_FILES,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    load_tokenizer,
    named_encoding,
    train_bpe,
)

VERSION = 1  # raised when the same text and settings would give other shards
DEFAULT_TOKENIZER = "bpe:4096"
BPE_SAMPLE_BYTES = 64 << 20  # text that a BPE is trained on, at most
TOKENIZERS = f"bytes, char, bpe:N, {', '.join(TIKTOKEN_FILES)}, like:DATASET, the folder of a run or checkpoint"


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    name = args.name or (_default_name(args) if args.out is None else "")
    if args.out is None and not is_plain_name(name):
        raise UserError(f"{name!r} cannot name a dataset: give --name with letters, digits, '_', '-' and '.'")
    folder = args.out.resolve() if args.out else dataset_folder(name)
    if getattr(args, "chat", False):
        _check_chat_tokenizer(args.tokenizer)
    with _corpus_reader(args, folder) as read_corpus:
        prepare(read_corpus, args.tokenizer, folder, _command(args), overwrite=args.overwrite)


def _default_name(args: argparse.Namespace) -> str:
    if args.source != "files":
        return args.source
    if str(args.paths[0]) == "-":
        raise UserError("text from standard input needs a name: give --name or --out")
    return args.paths[0].resolve().stem


@contextmanager
def _corpus_reader(args: argparse.Namespace, folder: Path) -> Iterator[Callable[[], Corpus]]:
    """What reads the corpus that the arguments name."""
    if args.source == "stdlib":
        yield stdlib_corpus
    elif args.source in PUBLIC_SETS:
        yield lambda: public_corpus(args.source, args.files)
    elif "-" not in map(str, args.paths):
        yield lambda: files_corpus(args.paths, args.field or ("messages" if args.chat else "text"), args.chat)
    elif len(args.paths) > 1:
        raise UserError("standard input (-) cannot be mixed with files; give it alone")
    else:
        with _spooled(folder) as path:
            yield lambda: stdin_corpus(path, args.field or ("messages" if args.chat else None), args.chat)


@contextmanager
def _spooled(folder: Path) -> Iterator[Path]:
    """Standard input as a file beside the dataset: the text is read more than once, and may not fit in memory."""
    path = folder.parent / f".{folder.name}.stdin"
    with locked(path.with_name(path.name[1:])):
        try:
            try:
                with open(path, "wb") as file:
                    shutil.copyfileobj(sys.stdin.buffer, file, READ_BYTES)
            except OSError as error:
                what = error.strerror or error
                raise UserError(f"{error.filename or STDIN_LABEL}: {what}; nothing was prepared") from error
            yield path
        finally:
            path.unlink(missing_ok=True)


def public_corpus(name: str, n_files: int | None = None) -> Corpus:
    """A public text, or the first `n_files` of its files, downloaded where it has to be."""
    format = PUBLIC_SETS[name].format
    folder = dataset_folder(name).parent / ".downloads" / name  # kept, for the next time this text is prepared
    fetched = fetch_set(name, folder, n_files)
    parts = []
    for file, path in fetched:
        if file.split:
            parts.append(whole_file(path, file.name, file.split, format or "text"))
        else:
            parts += by_position(path, file.name, HOLDOUT_BYTES // len(fetched), format)
    return read_through(parts, [f"{PUBLIC_SETS[name].about}: {len(fetched)} files in {folder}"])


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

    tokenizer: "bytes", "char", "bpe:N", the name of a tiktoken encoding, or "like:DATASET" for that dataset's; or the
        folder of a run, a checkpoint or a dataset, for the tokenizer in it
    command: what the user would type to get this dataset; errors about it recommend it
    overwrite: replace a dataset of other contents in that folder
    workers: threads that tokenise (default: one a core); the shards do not depend on it

    Raises UserError for text that cannot be used, for a folder in the way, and when a disk refuses or is full.
    """
    start = time.perf_counter()
    check_tokenizer_name(tokenizer)
    try:
        corpus = read_corpus()
        _check_splits(corpus)
        with locked(folder):
            template = [make_tokenizer(tokenizer, None).chat_template] if corpus.is_chat else []
            key = _json_hash([VERSION, _content_of(tokenizer), corpus.hash, *template])
            done = _is_prepared(folder, key, overwrite)
            if not done:
                _prepare_beside(corpus, tokenizer, folder, {"key": key, "command": command}, workers or _n_cores())
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror or error}; nothing was prepared") from error
    _announce(corpus, read_dataset_file(folder, command))
    seconds = time.perf_counter() - start
    print(f"{folder} {'is already prepared' if done else 'prepared'} ({seconds:.1f} s)", flush=True)


def _check_splits(corpus: Corpus) -> None:
    labels = list(dict.fromkeys(part.label for part in corpus.parts))
    others = f" and {len(labels) - 1} other files" if labels[1:] else ""
    for split in SPLITS:
        if corpus.n_bytes[split] == 0:
            raise UserError(f"the text of {labels[0]}{others} is too short: nothing is left for its {split} split")


def check_tokenizer_name(spec: str) -> None:
    """UserError unless `spec` names a tokenizer that can be made."""
    if spec in ("bytes", "char", *TIKTOKEN_FILES):
        return
    if spec.startswith("like:"):
        read_dataset_file(dataset_folder(spec[5:]), prepare_command(spec[5:]))
        return
    if _is_existing(spec):
        _tokenizer_folder(spec)
        return
    if not re.fullmatch(r"bpe:[0-9]+", spec):
        raise UserError(f"unknown tokenizer {spec!r}; there are {TOKENIZERS}")
    if not 257 <= int(spec[4:]) <= 1_000_000:
        raise UserError(f"{spec} is not possible: N counts the 256 bytes, the end of text and the merges (257 to 10^6)")


def _is_existing(spec: str) -> bool:
    """Whether `spec` names a tokenizer in a folder, and not one to be made."""
    return spec.startswith("like:") or (spec not in ("bytes", "char", *TIKTOKEN_FILES) and Path(spec).is_dir())


def _tokenizer_folder(spec: str) -> Path:
    """Where the tokenizer is in a folder: of a checkpoint or a dataset there, of a run in one of its checkpoints."""
    for folder in (Path(spec), Path(spec, "best"), Path(spec, "last")):
        if (folder / TOKENIZER_FILE).is_file():
            return folder
    raise UserError(f"{spec} holds no {TOKENIZER_FILE}: name a run, a checkpoint or a dataset")


def _check_chat_tokenizer(spec: str) -> None:
    """UserError unless the tokenizer of this name can be asked for chats before any text is read."""
    check_tokenizer_name(spec)
    if not _is_existing(spec) or not make_tokenizer(spec, None).chat_template:
        raise UserError(
            f"--chat takes a tokenizer with a chat template, and {spec} has none: name the checkpoint of a converted "
            f"model, --tokenizer OUT"
        )


def _content_of(spec: str) -> str:
    """What decides about the ids: the name of a tokenizer, but for one in a folder its content."""
    return f"like:{make_tokenizer(spec, None).hash}" if _is_existing(spec) else spec


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
        splits = write_splits(corpus, tokenizer, partial, workers)
        shards = [shard["sha256"] for split in SPLITS for shard in splits[split]["shards"]]
        info |= {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
        info |= {"hash": _json_hash([tokenizer.hash, *shards]), "splits": splits}
        write_synced(partial / DATASET_FILE, json.dumps(info, indent=1) + "\n")
        move_into_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # nothing there after success; after an error or Ctrl-C, leavings


def make_tokenizer(spec: str, corpus: Corpus | None) -> Tokenizer:
    """The tokenizer that `spec` names, trained on the corpus where it has to be."""
    if spec.startswith("like:"):
        return load_tokenizer(dataset_folder(spec[5:]))
    if _is_existing(spec):
        return load_tokenizer(_tokenizer_folder(spec))
    if spec == "bytes":
        return ByteTokenizer()
    if spec == "char":
        return CharTokenizer(_alphabet(corpus))
    if spec.startswith("bpe:"):
        tokenizer = train_bpe(_sample(corpus, BPE_SAMPLE_BYTES), int(spec[4:]))
        if tokenizer.name != spec:
            print(f"the text is too small for {spec}: the vocabulary has {tokenizer.vocab_size} ids")
        return tokenizer
    return named_encoding(spec)


def _alphabet(corpus: Corpus) -> set[str]:
    characters: set[str] = set()
    for text, _ in pieces(corpus.parts):
        characters.update(text)
    return characters


def _sample(corpus: Corpus, limit: int) -> Iterator[str]:
    """About `limit` bytes of the training text, evenly spread over it; all of it if there is no more."""
    share = min(1.0, limit / max(1, corpus.n_bytes["train"]))
    due = 0.0  # characters that could have been taken so far and were not
    for text, _ in pieces(corpus.split("train")):
        due += len(text) * share
        if text and due >= min(len(text), READ_BYTES) - 0.5:
            yield text[: round(due)]
            due = max(0.0, due - len(text))


def _announce(corpus: Corpus, info: dict) -> None:
    for remark in corpus.remarks:
        print(remark)
    for split in SPLITS:
        entry = info["splits"][split]
        print(
            f"  {split:<5} {entry['documents']:>7,} documents {entry['bytes']:>14,} bytes {entry['tokens']:>13,} tokens"
            f"  {entry['bytes'] / entry['tokens']:.2f} bytes/token  text sha256 {entry['text_sha256'][:12]}"
        )
        if "answer_tokens" in entry:
            share = entry["answer_tokens"] / entry["tokens"]
            print(f"        {entry['answer_tokens']:,} of the tokens ({share:.0%}) are answers: the loss is theirs")
    print(f"  tokenizer {info['tokenizer']}, {info['vocab_size']:,} ids  dataset hash {info['hash'][:12]}")


def _n_cores() -> int:
    return os.cpu_count() or 1


def _json_hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode("ascii")).hexdigest()


def _command(args: argparse.Namespace) -> str:
    parts = [args.source, *map(str, getattr(args, "paths", []))]
    for option in ("files", "field", "name", "out"):
        if (value := getattr(args, option, None)) is not None:
            parts += [f"--{option}", str(value)]
    if getattr(args, "chat", False):
        parts.append("--chat")
    if args.tokenizer != DEFAULT_TOKENIZER:
        parts += ["--tokenizer", args.tokenizer]
    return f"python -m data.prepare {shlex.join(parts)}"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sources = parser.add_subparsers(dest="source", required=True, metavar="|".join(["stdlib", "files", *PUBLIC_SETS]))
    sources.add_parser("stdlib", help="the standard library of this Python: code, 12 MB, no download")
    files = sources.add_parser("files", help="text files (UTF-8), .jsonl, .parquet, folders of them, standard input")
    files.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file, a folder of files, or - for stdin")
    files.add_argument(
        "--field",
        help="where .jsonl lines and .parquet rows have their text (default: text), or their chat (default: messages)",
    )
    files.add_argument("--chat", action="store_true", help="chats in .jsonl, to learn the assistant's answers from")
    for name, public in PUBLIC_SETS.items():
        source = sources.add_parser(name, help=public.about)
        source.add_argument("--files", type=_count, metavar="N", help="take only the first N files (default: all)")
    for source in sources.choices.values():
        source.add_argument("--tokenizer", default=DEFAULT_TOKENIZER, help=f"{TOKENIZERS} (default: %(default)s)")
        place = source.add_mutually_exclusive_group()
        place.add_argument("--name", help="name of the dataset (default: the source's, or the first PATH's)")
        place.add_argument("--out", type=Path, metavar="FOLDER", help="where to put it instead of data/shards/NAME")
        source.add_argument("--overwrite", action="store_true", help="replace a dataset of other contents")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of files")
    return int(text)


if __name__ == "__main__":
    with exit_cleanly():
        main()
