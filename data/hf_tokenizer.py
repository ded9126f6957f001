"""The tokenizer of a converted model, run from its own Hugging Face `tokenizer.json`, which travels inside ours.

Two engines give the same ids. The `tokenizers` library runs every such file. Byte-level BPE whose merges and pattern
tiktoken can express runs there, ten times as fast; `formats.tokenizers` proves that once, at conversion, and stores the
pattern. What tiktoken does not have is done here, as the library does it: Unicode normalisation, added tokens that are
ordinary text (Qwen3's "<think>"), and bytes missing from the vocabulary (SmolLM2 lacks 21), which are dropped.

SentencePiece-style vocabularies (Llama 2, Mistral, TinyLlama) write a space as U+2581 and put one before each text.
`decode_bytes` keeps that space, since a continuation begins with a real one; `decode`, which is given a text from its
beginning, takes it off.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cached_property

import numpy as np
import tiktoken
import tokenizers

from .errors import UserError
from .tokenizer import Specials, Tokenizer, byte_of_character, run_tiktoken, well_formed

SPACE = "\u2581"  # how SentencePiece writes it
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
LARGEST_VOCABULARY = 1 << 24  # an id past it is a damaged file's, and a table up to it would fill the memory


class HFTokenizer(Tokenizer):
    """A Hugging Face tokenizer. Special tokens decode to nothing, and only `encode_with_specials` gives their ids.

    library: the text of its tokenizer.json, one that the `tokenizers` library reads.
    pattern: tiktoken's, where tiktoken gives the library's ids; None lets the library encode.
    leading_space: whether each text is encoded with a space before it, which `decode` takes off again.

    Raises UserError for a decoder that is not known here.
    """

    kind = "hf"

    def __init__(self, name: str, library: str, eot_id: int, specials: Specials, pattern: str | None = None):
        self.library = library
        spec = parse(library)
        token_bytes, self.leading_space = token_table(spec)
        super().__init__(name, token_bytes, eot_id, pattern, specials)
        added = [token for token in spec["added_tokens"] if not token["special"]]
        self._added = {token["content"]: token["id"] for token in added}
        self._has_normalizer = spec["normalizer"] is not None
        self._encoding = None if pattern is None else self._tiktoken(spec, pattern)
        self.is_lossless = pattern is not None and not self._has_normalizer and not self._missing_bytes

    @classmethod
    def from_content(cls, content: dict) -> "HFTokenizer":
        """The tokenizer that `save` wrote."""
        facts = content["specials"]
        specials = Specials(**{**facts, "stop_ids": frozenset(facts["stop_ids"])})
        return cls(content["name"], content["library"], content["eot_id"], specials, content["pattern"])

    def _content(self) -> dict:
        return {
            "format": 2,
            "kind": self.kind,
            "vocab_size": self.vocab_size,
            "eot_id": self.eot_id,
            "pattern": self.pattern,
            "specials": {**asdict(self.specials), "stop_ids": sorted(self.specials.stop_ids)},
            "library": self.library,
        }

    def _tiktoken(self, spec: dict, pattern: str) -> tiktoken.Encoding:
        """tiktoken needs all 256 bytes: the missing ones get ids past the vocabulary, which no merge knows."""
        added = {token["id"] for token in spec["added_tokens"]}
        ranks = {token: i for i, token in enumerate(self.token_bytes) if token and i not in added}
        ranks |= {byte: self.vocab_size + i for i, byte in enumerate(self._missing_bytes)}
        return tiktoken.Encoding(self.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    @cached_property
    def _missing_bytes(self) -> list[bytes]:
        return sorted({bytes([value]) for value in range(256)} - set(self.token_bytes))

    @cached_property
    def _ordinary(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, for text in which specials are ordinary text."""
        tokenizer = tokenizers.Tokenizer.from_str(self.library)
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def _with_specials(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self.library)

    def encode_to_numpy(self, text: str) -> np.ndarray:
        text = well_formed(text)
        if self._encoding is None:
            return self._run_library(text)
        parts = self._added_pattern.split(text) if self._added else [text]  # at odd places stand added tokens
        ids = [[self._added[part]] if i % 2 else self._run_tiktoken(part) for i, part in enumerate(parts)]
        return np.concatenate(ids).astype(np.uint32)

    @cached_property
    def _added_pattern(self) -> re.Pattern:
        longest_first = sorted(self._added, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def _run_library(self, text: str) -> np.ndarray:
        try:
            ids = self._ordinary.encode(text, add_special_tokens=False).ids
        except Exception as error:  # a vocabulary of characters, and another one: the library has no narrower class
            raise UserError(f"the tokenizer {self.name} cannot encode this text: {error}") from None
        return np.array(ids, dtype=np.uint32)

    def _run_tiktoken(self, text: str) -> np.ndarray:
        if self._has_normalizer and not text.isascii():
            text = self._ordinary.normalizer.normalize_str(text)
        ids = run_tiktoken(self._encoding, text)
        if self._missing_bytes and len(ids) and ids.max() >= self.vocab_size:
            return self._run_library(text)  # it drops the byte before it merges, so that its neighbours may merge
        return ids

    def encode_pieces(self, pieces: Iterable[tuple[str, bool]]) -> np.ndarray:
        """The pieces of a document are put together first where each would get a leading space of its own."""
        return super().encode_pieces(_joined(pieces) if self.leading_space else pieces)

    def encode_with_specials(self, text: str) -> list[int]:
        if self._encoding is not None:
            return super().encode_with_specials(text)
        return self._with_specials.encode(well_formed(text), add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, which are one from its beginning; bytes that are not UTF-8 become U+FFFD."""
        text = super().decode(ids)
        return text.removeprefix(" ") if self.leading_space else text


def parse(library: str) -> dict:
    """The content of a Hugging Face tokenizer.json, one that the library has read; what it leaves out is none."""
    return {"normalizer": None, "pre_tokenizer": None, "decoder": None, "added_tokens": [], **json.loads(library)}


def token_table(spec: dict) -> tuple[list[bytes], bool]:
    """The bytes of each id, b"" for special tokens and unused ids; and whether decoding strips a leading space."""
    to_bytes, leading_space = _decoding(spec["decoder"])
    vocab = spec["model"]["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else [(token, i) for i, (token, _) in enumerate(vocab)]  # Unigram
    texts = {i: to_bytes(token) for token, i in pairs}
    texts |= {t["id"]: b"" if t["special"] else t["content"].encode("utf-8") for t in spec["added_tokens"]}
    if max(texts) >= LARGEST_VOCABULARY:
        raise UserError(f"this tokenizer.json gives a token the id {max(texts)}, beyond any vocabulary")
    return [texts.get(i, b"") for i in range(max(texts) + 1)], leading_space


def _decoding(decoder: dict | None) -> tuple[Callable[[str], bytes], bool]:
    """How a token of the vocabulary becomes bytes, and whether the text then loses a leading space."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _from_byte_characters, False
    known = all(
        step["type"] in ("ByteFallback", "Fuse", "Metaspace")
        or (step["type"] == "Replace" and (step["pattern"], step["content"]) == ({"String": SPACE}, " "))
        or (step["type"] == "Strip" and (step["content"], step["stop"]) == (" ", 0) and step["start"] <= 1)
        for step in steps
    )
    if not known or not steps:
        raise UserError(f"this tokenizer.json has a decoder that is not supported: {kinds or 'none'}")
    leading_space = any(
        step["type"] == "Strip" and step["start"] == 1
        or step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in steps
    )  # fmt: skip
    fallback, spaces = "ByteFallback" in kinds, "Replace" in kinds or "Metaspace" in kinds

    def to_bytes(token: str) -> bytes:
        if fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return (token.replace(SPACE, " ") if spaces else token).encode("utf-8")

    return to_bytes, leading_space


_BYTE_OF_CHARACTER = byte_of_character()


def _from_byte_characters(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:  # an added token written as plain text
        return token.encode("utf-8")


def _joined(pieces: Iterable[tuple[str, bool]]) -> Iterable[tuple[str, bool]]:
    held: list[str] = []
    for text, ends_document in pieces:
        held.append(text)
        if ends_document:
            yield "".join(held), True
            held = []
    if held:
        yield "".join(held), False
