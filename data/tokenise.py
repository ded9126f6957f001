"""From a corpus to the shards of its splits: all cores, little memory, the same shards for any number of workers."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from .chat import encode_chats
from .errors import UserError
from .reading import READ_BYTES, SPLITS, Part, pieces
from .shards import ANSWER, ShardWriter, open_split
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
            if corpus.is_chat or not tokenizer.is_lossless:
                _verify_again(corpus, split, splits[split], tokenizer, folder, workers, bar)
            else:
                _verify(folder, split, splits[split], tokenizer, workers, bar)
    return splits


def _progress(what: str, total: int) -> tqdm:
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None)


def _write_split(
    corpus: Corpus, split: str, tokenizer: Tokenizer, folder: Path, workers: int, bar: tqdm
) -> dict[str, int | str | list[dict]]:
    n_answers = 0
    with ShardWriter(folder, split, tokenizer, marked=corpus.is_chat) as writer:
        function = encoder_of(corpus)
        encoded = ordered_map(lambda batch: function(batch, tokenizer), _batches(corpus.split(split)), workers)
        for n_bytes, tokens in encoded:
            writer.write(tokens)
            n_answers += int((tokens & ANSWER > 0).sum())
            bar.update(n_bytes)
    return {
        "documents": corpus.n_documents[split],
        "bytes": sum(header["n_bytes"] for header in writer.headers),
        "tokens": sum(header["n_tokens"] for header in writer.headers),
        "text_sha256": corpus.text_sha256[split],
        "shards": writer.headers,
        **({"answer_tokens": n_answers} if corpus.is_chat else {}),
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


def encoder_of(corpus: Corpus) -> Callable[[Batch, Tokenizer], tuple[int, np.ndarray]]:
    return encode_chats if corpus.is_chat else encode


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


def _verify_again(
    corpus: Corpus, split: str, entry: dict, tokenizer: Tokenizer, folder: Path, workers: int, bar: tqdm
) -> None:
    """Read a written split back where its ids do not decode to the text: encoding that once more must give them."""
    tokens, position, digest = open_split(folder, split, entry["shards"], tokenizer), 0, hashlib.sha256()
    function, same = encoder_of(corpus), True

    def encoded(batch: Batch) -> tuple[bytes, int, np.ndarray]:
        return "".join(text for text, _ in batch).encode("utf-8"), *function(batch, tokenizer)

    for text, n_bytes, ids in ordered_map(encoded, _batches(corpus.split(split)), workers):
        digest.update(text)
        same = same and np.array_equal(tokens.read(position, position + len(ids)), ids)
        position += len(ids)
        bar.update(n_bytes)
    if not same or position != len(tokens) or digest.hexdigest() != entry["text_sha256"]:
        raise UserError(f"the {split} split is not what the text gives when read again: did a file change meanwhile?")
