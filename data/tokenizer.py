"""Tokenizers: text to ids and back, five kinds with one face.

    bytes        the 256 byte values
    char         the characters of one corpus, sorted by code point
    bpe:N        byte-level BPE trained on the corpus itself, N ids in all
    gpt2, cl100k_base, o200k_base   the encodings that tiktoken names
    hf           what a converted model came with (hf_tokenizer.py)

In every kind, ids run from 0 to vocab_size - 1 and one of them, `eot_id`, ends a document. No text ever encodes to it:
"<|endoftext|>" written in a text is ordinary text, and only `encode_with_specials` reads it as the id. A tokenizer is a
table from id to bytes plus a way to cut text into ids, so decoding, byte counts, hashing and saving are written once,
in `Tokenizer`.

`tokenizer.json` holds the whole table, also for the encodings that tiktoken would download: whoever has a dataset or a
checkpoint needs no network.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from .errors import UserError

FILE_NAME = "tokenizer.json"
FORMAT_VERSIONS = (1, 2)  # 2 is the kind "hf", which holds another library's tokenizer.json in place of a table
EOT = "<|endoftext|>"
MAX_RUN = 100_000

# GPT-4's pattern, but with two digits in a piece at most, not three: a small vocabulary has no room for a thousand
# numbers. Text is cut into these pieces first, and no merge crosses a cut.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)

# What tiktoken downloads for each named encoding, so that an offline user can be told which file to bring.
_BLOB = "https://openaipublic.blob.core.windows.net"
TIKTOKEN_FILES = {
    "gpt2": (f"{_BLOB}/gpt-2/encodings/main/vocab.bpe", f"{_BLOB}/gpt-2/encodings/main/encoder.json"),
    "cl100k_base": (f"{_BLOB}/encodings/cl100k_base.tiktoken",),
    "o200k_base": (f"{_BLOB}/encodings/o200k_base.tiktoken",),
}


@dataclass(frozen=True)
class Specials:
    """The ids that no ordinary text encodes to, and what a model does with them."""

    tokens: dict[str, int]  # how each is written, in a rendered chat for instance -> id
    bos_id: int | None = None  # begins a text
    add_bos: bool = False  # whether the model was trained to see bos_id before a prompt
    stop_ids: frozenset[int] = field(default_factory=frozenset)  # end a turn or a text, beside eot_id
    chat_template: str | None = None  # Jinja


class Tokenizer:
    """What all kinds share. Subclasses say how text becomes ids (`encode_to_numpy`).

    name: "bytes", "char", "bpe:4096", "gpt2" ...
    vocab_size: number of ids, the end of text included
    eot_id: the id that ends a document
    hash: hex digest of all that decides how this tokenizer encodes and decodes
    special_tokens: how the ids without ordinary text are written -> id
    bos_id, add_bos: the id that begins a text (None: there is none), and whether `encode_prompt` puts it first
    stop_ids: the ids that end a generated text or turn, eot_id among them
    chat_template: the Jinja text that turns messages into a prompt, or None
    is_lossless: whether decoding gives back every text, byte for byte
    leading_space: whether a text is encoded with a space before it (only in some of hf_tokenizer.py)
    """

    kind: str
    is_lossless = True
    leading_space = False

    def __init__(
        self,
        name: str,
        token_bytes: list[bytes],
        eot_id: int,
        pattern: str | None = None,
        specials: Specials | None = None,
    ):
        """`token_bytes[id]` is the id's text in UTF-8; b"" for special ids and for ids the encoding leaves unused."""
        self.name = name
        self.eot_id = eot_id
        self.pattern = pattern
        self.token_bytes = token_bytes
        self.vocab_size = len(token_bytes)
        self.specials = specials or Specials({EOT: eot_id})
        self.hash = _content_hash(self._content())

    @property
    def special_tokens(self) -> dict[str, int]:
        return self.specials.tokens

    @property
    def bos_id(self) -> int | None:
        return self.specials.bos_id

    @property
    def add_bos(self) -> bool:
        return self.specials.add_bos

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.specials.stop_ids | {self.eot_id}

    @property
    def chat_template(self) -> str | None:
        return self.specials.chat_template

    def encode_to_numpy(self, text: str) -> np.ndarray:
        """Ids of `text`, uint32 [n], without an end of text."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without an end of text. Special strings in it are ordinary text."""
        return self.encode_to_numpy(text).tolist()

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text to continue: as `encode`, after bos_id where the model expects it."""
        return [self.bos_id, *self.encode(text)] if self.add_bos else self.encode(text)

    def encode_with_specials(self, text: str) -> list[int]:
        """Ids of a rendered chat: special strings become their ids, and no bos_id is added (templates write their own).

        Never for text that a stranger wrote: `encode` that apart, or it could end its turn and begin another.
        """
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)  # at odd places stand the specials
        ids = ([self.special_tokens[part]] if i % 2 else self.encode(part) for i, part in enumerate(parts))
        return list(chain.from_iterable(ids))

    def encode_pieces(self, pieces: Iterable[tuple[str, bool]]) -> np.ndarray:
        """Ids of pieces of text, each with whether it ends its document, which adds eot_id: uint32 [n]."""
        eot = np.array([self.eot_id], dtype=np.uint32)
        parts = [np.empty(0, dtype=np.uint32)]
        for text, ends_document in pieces:
            parts += [self.encode_to_numpy(text), eot] if ends_document else [self.encode_to_numpy(text)]
        return np.concatenate(parts)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that `ids` stand for; eot_id and ids outside the vocabulary stand for none."""
        table, size = self.token_bytes, self.vocab_size
        return b"".join([table[i] for i in ids if 0 <= i < size])

    def decode_array(self, ids: np.ndarray) -> bytes:
        """`decode_bytes` for an array of ids [n], all of them in the vocabulary: many ids at once, and faster."""
        return b"".join(self._byte_table[ids].tolist())

    @cached_property
    def _byte_table(self) -> np.ndarray:
        """`token_bytes` as an array of objects [vocab_size], so that many ids are looked up in one go."""
        return np.array([*self.token_bytes, None], dtype=object)[
            :-1
        ]  # the None keeps numpy from seeing one long string

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8, such as half a character, become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_byte_lengths(self) -> np.ndarray:
        """Bytes of text behind each id, int32 [vocab_size], 0 for eot: what turns nats per token into bits per byte."""
        return np.array([len(token) for token in self.token_bytes], dtype=np.int32)

    def save(self, folder: str | os.PathLike) -> None:
        """Write `tokenizer.json`, all there is to know about this tokenizer, into an existing folder."""
        content = {"name": self.name, "hash": self.hash, **self._content()}
        with open(Path(folder, FILE_NAME), "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=0) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _content(self) -> dict:
        """Everything the tokenizer does follows from this; the name is a label and not part of it."""
        return {
            "format": 1,
            "kind": self.kind,
            "vocab_size": self.vocab_size,
            "eot_id": self.eot_id,
            "pattern": self.pattern,
            "tokens": [base64.b64encode(token).decode("ascii") for token in self.token_bytes],
        }


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8, and the end of text: 257 ids, no unknown text, nothing to download or train."""

    kind = "bytes"

    def __init__(self):
        super().__init__("bytes", [bytes([value]) for value in range(256)] + [b""], eot_id=256)

    def encode_to_numpy(self, text: str) -> np.ndarray:
        return np.frombuffer(well_formed(text).encode("utf-8"), dtype=np.uint8).astype(np.uint32)


class CharTokenizer(Tokenizer):
    """One id per character of a fixed alphabet, in order of code point; the end of text is the last id."""

    kind = "char"

    def __init__(self, characters: Iterable[str]):
        alphabet = sorted(set(characters))
        super().__init__("char", [c.encode("utf-8") for c in alphabet] + [b""], eot_id=len(alphabet))
        self._code_points = np.array([ord(c) for c in alphabet], dtype=np.uint32)

    def encode_to_numpy(self, text: str) -> np.ndarray:
        """Raises UserError for a character that the training text did not have."""
        points = np.frombuffer(well_formed(text).encode("utf-32-le"), dtype="<u4")
        ids = np.searchsorted(self._code_points, points)
        known = ids < len(self._code_points)
        known[known] = self._code_points[ids[known]] == points[known]
        if not known.all():
            stranger = chr(points[~known][0])
            raise UserError(
                f"the character {stranger!r} (U+{ord(stranger):04X}) is not among the {len(self._code_points)} "
                f"characters of this {self.name} tokenizer; leave it out, or train with a bytes or bpe tokenizer"
            )
        return ids.astype(np.uint32)


class BPETokenizer(Tokenizer):
    """Byte-level BPE run by tiktoken: the named encodings and those trained here. Special ids other than eot_id exist
    (vocab_size counts them) but no text encodes to them and they decode to nothing."""

    kind = "bpe"

    def __init__(self, name: str, token_bytes: list[bytes], eot_id: int, pattern: str):
        super().__init__(name, token_bytes, eot_id, pattern)
        ranks = {token: rank for rank, token in enumerate(token_bytes) if token}
        self._encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={EOT: eot_id}, explicit_n_vocab=None
        )

    def encode_to_numpy(self, text: str) -> np.ndarray:
        return run_tiktoken(self._encoding, well_formed(text))

    def encode_pieces(self, pieces: Iterable[tuple[str, bool]]) -> np.ndarray:
        """The same in one call of tiktoken, which then leaves the interpreter lock to other threads for longer."""
        pieces = list(pieces)
        text = well_formed("".join(text + EOT if ends_document else text for text, ends_document in pieces))
        if text.count(EOT) == sum(ends_document for _, ends_document in pieces):  # no text has it: it can mean the id
            try:
                return self._encoding.encode_to_numpy(text, allowed_special={EOT})
            except ValueError:
                pass  # see encode_to_numpy
        return super().encode_pieces(pieces)


def load_tokenizer(folder: str | os.PathLike) -> Tokenizer:
    """The tokenizer that `save` wrote into `folder`. UserError if there is none or if it was altered."""
    path = Path(folder, FILE_NAME)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version, expected = content["format"], content["hash"]
        intact = version in FORMAT_VERSIONS and _content_hash(content) == expected
    except FileNotFoundError:
        raise UserError(f"{path} is missing, and without it the ids of {folder} mean nothing") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not a tokenizer file of this project") from error
    if version not in FORMAT_VERSIONS:
        raise UserError(f"{path} has format version {version}, and this program reads versions 1 and 2")
    if not intact:
        raise UserError(f"{path} was altered after it was written: its content does not match its hash")
    return _from_content(content)


def _content_hash(content: dict) -> str:
    """Hex digest of the fields of tokenizer.json that say what the tokenizer does."""
    fields = [content[key] for key in ("format", "kind", "vocab_size", "eot_id", "pattern")]
    if content["format"] == 1:
        fields += [content["tokens"]]
    else:  # what else decides about ids; a chat template may be mended without making datasets foreign
        fields += [content["library"], *(content["specials"][key] for key in ("tokens", "bos_id", "add_bos"))]
    return hashlib.sha256(json.dumps(fields).encode("ascii")).hexdigest()


def _from_content(content: dict) -> Tokenizer:
    if content["kind"] == "hf":
        from .hf_tokenizer import HFTokenizer  # it is a Tokenizer, so it imports this file

        return HFTokenizer.from_content(content)
    token_bytes = [base64.b64decode(token) for token in content["tokens"]]
    if content["kind"] == "bytes":
        return ByteTokenizer()
    if content["kind"] == "char":
        return CharTokenizer(token.decode("utf-8") for token in token_bytes[:-1])
    return BPETokenizer(content["name"], token_bytes, content["eot_id"], content["pattern"])


def named_encoding(name: str) -> BPETokenizer:
    """One of tiktoken's own encodings. tiktoken downloads it once, or finds it in TIKTOKEN_CACHE_DIR.

    Raises UserError when it can do neither, naming the files it wants.
    """
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # no network or no room for the cache; a download with the wrong hash
        wanted = " and ".join(f"{hashlib.sha1(url.encode()).hexdigest()} ({url})" for url in TIKTOKEN_FILES[name])
        raise UserError(
            f"tiktoken cannot load {name!r} ({type(error).__name__}); without a network, set TIKTOKEN_CACHE_DIR to a "
            f"folder that holds {wanted}, named as its sha1 shown here"
        ) from error
    token_bytes = [b""] * encoding.n_vocab
    for token, rank in encoding._mergeable_ranks.items():
        token_bytes[rank] = token
    return BPETokenizer(name, token_bytes, encoding.eot_token, encoding._pat_str)


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Byte-level BPE of `vocab_size` ids: 256 bytes, the merges, the end of text.

    A text too small for so many merges that occur twice gives a smaller vocabulary, named after its real size.
    The same texts give the same merges.
    """
    vocab = _train(texts, vocab_size - 1).get_vocab()  # the end of text is ours, on top
    byte_of = byte_of_character()
    token_bytes = [bytes(byte_of[c] for c in token) for token in sorted(vocab, key=vocab.__getitem__)]
    return BPETokenizer(f"bpe:{len(token_bytes) + 1}", [*token_bytes, b""], len(token_bytes), SPLIT_PATTERN)


def _train(texts: Iterable[str], n_tokens: int) -> tokenizers.Tokenizer:
    """Let the `tokenizers` library find the merges: an id is a merge's rank, which is all that tiktoken needs."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), behavior="isolated"),
            # The trainer takes time in the square of a piece: no word is this long, but a line of "====" may be.
            pre_tokenizers.Split(tokenizers.Regex("(?m).{1000}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=n_tokens,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    return trained


def byte_of_character() -> dict[str, int]:
    """The characters that `tokenizers` writes for bytes: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(0x100 + i): value for i, value in enumerate(others)}


def run_tiktoken(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """Ids of `text`, uint32 [n]; special strings in it are ordinary text."""
    try:
        return encoding.encode_to_numpy(text, disallowed_special=())
    except ValueError:  # tiktoken's regex engine gives up on a run of about a million spaces
        return np.concatenate([encoding.encode_to_numpy(part, disallowed_special=()) for part in _short_runs(text)])


def _short_runs(text: str) -> list[str]:
    """`text` cut so that no part has more than MAX_RUN white space characters in a row."""
    runs = (match.span() for match in re.finditer(r"\s+", text))
    cuts = [cut for start, stop in runs for cut in range(start + MAX_RUN, stop, MAX_RUN)]
    return [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def well_formed(text: str) -> str:
    """`text` with lone surrogates, which have no UTF-8 form, replaced by U+FFFD (a terminal can produce them)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
