"""Byte-level BPE in two notations: merges by pair (Hugging Face) and tokens by rank (tiktoken).

A rank table says less than a list of merges: of two tokens side by side it merges any pair whose bytes together are a
token, the one of lowest rank first. The two agree where every token, cut with the merges before it, falls into exactly
the pair that its own merge joins. Why that is enough: while a pair with the bytes of token t stands side by side, no
merge has crossed its ends, so what stands between them is what t alone would have become, and that is the listed pair.
"""

import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from data.tokenizer import byte_of_character

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# GPT-2's pattern after every digit has been set apart (SmolLM): white space before a digit then ends a fragment.
SINGLE_DIGITS = r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"

_CHARACTER_OF_BYTE = {value: character for character, value in byte_of_character().items()}


def as_characters(token: bytes) -> str:
    """A token as tokenizer.json writes it, one printable character a byte."""
    return "".join(_CHARACTER_OF_BYTE[value] for value in token)


def last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that the merges before `token` cut it into; None if they leave more than two, so that it can
    only be met as a whole piece of text."""
    parts, limit = [token[i : i + 1] for i in range(len(token))], ranks[token]
    while len(parts) > 2:
        merged = [ranks.get(left + right, limit) for left, right in zip(parts, parts[1:], strict=False)]
        lowest = min(merged)
        if lowest >= limit:
            return None
        at = merged.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return (parts[0], parts[1])


def merges_of(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """The list of merges, in order, that does what the rank table does on text inside a piece."""
    pairs = (last_merge(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1)
    return [(as_characters(left), as_characters(right)) for left, right in filter(None, pairs)]


def ranks_agree(ranks: dict[bytes, int], merges: list[tuple[bytes, bytes]], ignore_merges: bool) -> bool:
    """Whether tiktoken with `ranks` merges as the `tokenizers` library with `merges` does.

    ignore_merges: the library takes a piece that is a token whole, as tiktoken always does.
    """
    listed = [ranks.get(left + right) for left, right in merges]
    if None in listed or listed != sorted(listed):
        return False
    merges = set(merges)
    pairs = (last_merge(token, ranks) for token in ranks if len(token) > 1)
    return all(pair in merges or (pair is None and ignore_merges) for pair in pairs)


def split_pattern(pre_tokenizer: dict | None) -> str | None:
    """The one pattern that cuts text as a byte-level pre-tokenizer does, or None if no single one is known."""
    steps = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    first, by_gpt2 = steps[:-1], steps[-1].get("use_regex", True)
    if by_gpt2 and not first:
        return GPT2_PATTERN
    if by_gpt2 and len(first) == 1 and first[0]["type"] == "Digits" and first[0]["individual_digits"]:
        return SINGLE_DIGITS
    if by_gpt2 or len(first) != 1 or first[0]["type"] != "Split":
        return None
    keeps_all = first[0]["behavior"] == "Isolated" and not first[0]["invert"]
    return first[0]["pattern"].get("Regex") if keeps_all else None


def library_tokenizer(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    pattern: str | None,
    digits: bool = False,
    ignore_merges: bool = True,
) -> Tokenizer:
    """A byte-level BPE of the `tokenizers` library: ids by token, merges in order, and how text is cut into pieces.

    pattern: a regular expression of the library; None is GPT-2's. digits: every digit is a piece of its own.
    ignore_merges: take a piece that is a token whole, as tiktoken does.
    """
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def for_library(pattern: str) -> str:
    """tiktoken's pattern in the syntax of the library's engine, Oniguruma, which would repeat `{1,3}+` as a whole."""
    return re.sub(r"(\{\d+,\d+\})\+", r"\1", pattern)
