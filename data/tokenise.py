"""From a corpus to the shards of its splits: all cores, little memory, the same shards for any number of workers."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from .errors import UserError
from .reading import READ_BYTES, SPLITS, Part, pieces
from .shards import ShardWriter, open_split
from .sources import Corpus
from .tokenizer import Tokenizer

VERIFY_TOKENS = 1 << 18  # tokens decoded in one go when a split is read back


def write_splits(corpus: Corpus, tokenizer: Tokenizer, folder: Path, workers: int) -> dict[str, dict]:
    """Tokenise both splits into `folder`, read them back and compare. Returns what dataset.json says about them.

    Raises UserError when what was written is not the text that the corpus was found to be.
    """
    total = sum(corpus.n_bytes.values())
    with _progress("tokenising", total) as bar:
        splits = {split: _write_split(corpus, split, tokenizer, folder, workers, bar) for split in SPLITS}
    with _progress("checking", total) as bar:
        for split in SPLITS:
            _verify(folder, split, splits[split], tokenizer, workers, bar)
    return splits


def _progress(what: str, total: int) -> tqdm:
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None)


def _write_split(
    corpus: Corpus, split: str, tokenizer: Tokenizer, folder: Path, workers: int, bar: tqdm
) -> dict[str, int | str | list[dict]]:
    with ShardWriter(folder, split, tokenizer) as writer:
        encoded = ordered_map(lambda batch: encode(batch, tokenizer), _batches(corpus.split(split)), workers)
        for n_bytes, tokens in encoded:
            writer.write(tokens)
            bar.update(n_bytes)
    return {
        "documents": corpus.n_documents[split],
        "bytes": sum(header["n_bytes"] for header in writer.headers),
        "tokens": sum(header["n_tokens"] for header in writer.headers),
        "text_sha256": corpus.text_sha256[split],
        "shards": writer.headers,
    }


Batch = list[tuple[str, bool]]  # pieces of text, each with whether it ends its document


def _batches(parts: list[Part]) -> Iterator[Batch]:
    """The pieces of the parts, in batches of READ_BYTES characters or a little more."""
    batch: Batch = []
    size = 0
    for text, ends_document in pieces(parts):
        batch.append((text, ends_document))
        size += len(text)
        if size >= READ_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode(batch: Batch, tokenizer: Tokenizer) -> tuple[int, np.ndarray]:
    """Bytes and ids of a batch, with eot_id after each document's end."""
    return sum(len(text.encode("utf-8")) for text, _ in batch), tokenizer.encode_pieces(batch)


def ordered_map(function: Callable, items: Iterable, workers: int) -> Iterator:
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


def _verify(folder: Path, split: str, entry: dict, tokenizer: Tokenizer, workers: int, bar: tqdm) -> None:
    """Read a written split back: it must decode to the text that was first read, with one eot_id per document."""
    tokens = open_split(folder, split, entry["shards"], tokenizer)

    def decoded(start: int) -> tuple[bytes, int]:
        block = tokens.read(start, start + VERIFY_TOKENS)
        return tokenizer.decode_array(block), int((block == tokenizer.eot_id).sum())

    digest, n_eot = hashlib.sha256(), 0
    for text, n in ordered_map(decoded, range(0, len(tokens), VERIFY_TOKENS), workers):
        digest.update(text)
        n_eot += n
        bar.update(len(text))
    if digest.hexdigest() != entry["text_sha256"] or n_eot != entry["documents"]:
        raise UserError(
            f"the {split} split does not decode to the text that was read first: did a file change meanwhile?"
        )
