"""SentencePiece-style BPE (Llama 2, TinyLlama, Mistral) as a tokenizer of the `tokenizers` library.

The vocabulary is a list of pieces with scores. Text begins with a space, spaces are U+2581, and at each step the two
neighbours whose union has the highest score merge. Characters without a piece fall back to tokens of single bytes.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from data.hf_tokenizer import BYTE_TOKEN, SPACE


def library_tokenizer(
    pieces: list[str],
    scores: list[float],
    unknown: str,
    special: set[str],
    added: set[str] = frozenset(),
    leading_space: bool = True,
) -> Tokenizer:
    """The tokenizer of these pieces, whose ids are their places.

    Args:
        pieces: with U+2581 for a space, and "<0x0A>" for a byte.
        unknown: the piece for what cannot be encoded; with all 256 bytes nothing is.
        special: pieces that no ordinary text encodes to, `unknown` among them.
        added: further pieces that are found in a text before all merging.
        leading_space: put a space before each text.
    """
    vocab = {piece: i for i, piece in enumerate(pieces)}
    ordinary = {piece for piece in vocab if piece not in special | added and not BYTE_TOKEN.fullmatch(piece)}
    merges = _merges({piece: scores[vocab[piece]] for piece in ordinary})
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prepend = [normalizers.Prepend(SPACE)] if leading_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if leading_space else []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    in_order = sorted(special | added, key=vocab.__getitem__)
    tokenizer.add_tokens([AddedToken(piece, special=piece in special, normalized=False) for piece in in_order])
    return tokenizer


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """All pairs of pieces whose union is a piece, the highest score first."""
    merges = []
    for piece in sorted(scores, key=lambda piece: -scores[piece]):
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        merges += [(left, right) for left, right in halves if left in scores and right in scores]
    return merges
