"""The tokenizer inside a GGUF file: byte-level BPE ("gpt2") or SentencePiece-style ("llama").

The file keeps the vocabulary and the merges or scores, but of how text is cut into pieces only a name.
"""

from tokenizers import AddedToken, Tokenizer, normalizers

from data import UserError
from data.hf_tokenizer import HFTokenizer
from data.tokenizer import Specials

from . import byte_level_bpe, sentencepiece
from .tokenizers import from_library, stop_ids

UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # kinds of token; unused ones pad the vocabulary
WITHOUT_TEXT = (UNKNOWN, CONTROL, UNUSED)

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
# tokenizer.ggml.pre: how text is cut (None: as GPT-2 does), and how the model's own tokenizer.json goes further.
PRE_TOKENIZERS = {
    "gpt-2": dict(pattern=None, ignore_merges=False),
    "smollm": dict(pattern=None, ignore_merges=False, digits=True),
    "llama-bpe": dict(pattern=LLAMA3_PATTERN, ignore_merges=True),
    "qwen2": dict(pattern=QWEN2_PATTERN, ignore_merges=False),
}


def value(reader, key: str, default=None):
    """A value of the metadata as a Python object, or the default. UserError for a text that is not UTF-8."""
    field = reader.fields.get(key)
    try:
        return default if field is None else field.contents()
    except UnicodeDecodeError:
        raise UserError(f"the GGUF file is damaged: its {key} is not UTF-8 text") from None


def read_tokenizer(reader, name: str) -> HFTokenizer:
    """The tokenizer of an open `gguf.GGUFReader`.

    Raises:
        UserError: there is none, or one of a kind that is not known.
    """

    def get(key, default=None):
        return value(reader, f"tokenizer.ggml.{key}", default)

    model, tokens, types = get("model"), get("tokens"), get("token_type")
    if model not in ("gpt2", "llama"):
        raise UserError(f"the GGUF file's tokenizer is of the kind {model!r}, and only gpt2 and llama are known")
    if not tokens or len(types or ()) != len(tokens) or len(set(tokens)) != len(tokens):
        raise UserError("the GGUF file's tokenizer is damaged: its tokens and their types do not fit")
    eot_id, bos_id = get("eos_token_id"), get("bos_token_id")
    if eot_id is None or not 0 <= eot_id < len(tokens):
        raise UserError("the GGUF file names no end of text: it needs tokenizer.ggml.eos_token_id")
    special = {token: i for i, token in enumerate(tokens) if types[i] in WITHOUT_TEXT or i in (eot_id, bos_id)}
    added = {token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED} - special.keys()
    if model == "gpt2":
        library = _byte_level(tokens, get("merges"), get("pre"), special, added)
    else:
        library = _sentencepiece(tokens, get("scores"), types, get("add_space_prefix", True), special, added)
    # llama.cpp's own defaults, where the file is silent: Llama models begin with bos.
    add_bos = get("add_bos_token", model == "llama" or get("pre") == "llama-bpe")
    more_ends = {get("eot_token_id"), get("eom_token_id")} - {None}
    specials = Specials(
        tokens=special,
        bos_id=bos_id,
        add_bos=bool(add_bos) and bos_id is not None,
        stop_ids=stop_ids(special) | more_ends,
        chat_template=value(reader, "tokenizer.chat_template"),
    )
    return from_library(name, library.to_str(), eot_id, specials)


def _byte_level(tokens, merges, pre, special, added) -> Tokenizer:
    if pre not in PRE_TOKENIZERS:
        raise UserError(f"the GGUF file cuts text by {pre!r}, and only {', '.join(PRE_TOKENIZERS)} are known")
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges or ()]
    odd = next((pair for pair in pairs if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys()), None)
    if not pairs or odd:
        raise UserError(f"the GGUF file's tokenizer is damaged: {' '.join(odd) if odd else 'there'} is no merge")
    library = byte_level_bpe.library_tokenizer(vocab, pairs, **PRE_TOKENIZERS[pre])
    if pre == "qwen2":
        library.normalizer = normalizers.NFC()  # Qwen's own tokenizer.json has it
    in_order = sorted({*special, *added}, key=vocab.__getitem__)
    library.add_tokens([AddedToken(token, special=token in special, normalized=False) for token in in_order])
    return library


def _sentencepiece(tokens, scores, types, leading_space, special, added) -> Tokenizer:
    if len(scores or ()) != len(tokens):
        raise UserError("the GGUF file's tokenizer is damaged: its tokens and their scores do not fit")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    if unknown is None:
        raise UserError("the GGUF file's tokenizer is damaged: it has no unknown token")
    return sentencepiece.library_tokenizer(tokens, scores, unknown, set(special), added, leading_space)
