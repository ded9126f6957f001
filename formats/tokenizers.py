"""Tokenizers of the Hugging Face world, in and out.

In: the files beside a model become a `data.hf_tokenizer.HFTokenizer`. Out: ours become files for `AutoTokenizer`. Both
ways end in a proof: a long probe of many scripts must get the same ids, and the same text back, from both sides.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

import data
from data import UserError
from data.files import write_synced
from data.hf_tokenizer import HFTokenizer, parse, token_table
from data.tokenizer import Specials

from . import byte_level_bpe

# Special tokens that end a turn or a text wherever they exist.
ENDS = "</s> <|endoftext|> <|end_of_text|> <|eot_id|> <|eom_id|> <|im_end|> <|end|> <end_of_turn>".split()

_SAMPLES = (
    "The quick brown fox's 12 345 6789 jumps; it'll cost $3.14159e-10, WE'VE 50% off! I'm, you're, they'd, don'T\n",
    "    def f(x: int) -> str:\n\t\treturn x//2  # ok\r\n\r\n\n   \n==== //// .... ;;; {}[]()<>\\|`~^&*_+=-\n/path\n",
    "accents é e\u0301 ñ Å A\u030a ﬁ ß ẞ İ ı \u0301first naïve façade Ελληνικά Русский\n",
    "Українська עברית العربية فارسی हिन्दी ไทย မြန်မာ বাংলা தமிழ் አማርኛ ქართული Հայերեն ᏣᎳᎩ\u200f\u202e\u202c\n",
    "中文字符，日本語テキスト、한국어 텍스트\u3000全角１２３ \u2028\u2029\x85\x0b\x0c\x1c\x1f end\n",
    "emoji 👍🏽 👨‍👩‍👧‍👦 🇩🇪 ☃\ufe0f \u200b\u200d\ufeff\u00ad\u00a0nbsp 𝔘𝔫𝔦 𐍈 ٣٤٥ ⅷ ½ 𝟘𝟙 ²\n",
    "controls \x01\x02\x04\x06\x13\x14\x16\x1d\x7f. private \ue000 \U0010ffff \U000f0000 \U00040000 \ufffd \ufffe\n",
    " leading,  two,   three    four     \n\n\n  \t\t \r\r  trailing   ",
)


def probe(words: int = 4000) -> str:
    """Text of many scripts with every kind of edge between them: samples, then a random mixture, always the same."""
    rng = random.Random(0)
    characters = [c for sample in _SAMPLES for c in sample]
    endings = [" ", "  ", "\n", "\n\n", "\t", "'s", "'LL", ".", "1", "23456", "", "", ""]
    mixture = ("".join(rng.choices(characters, k=rng.randrange(1, 6))) + rng.choice(endings) for _ in range(words))
    return "".join(_SAMPLES) + "".join(mixture) + " " * 300 + "x" * 300


def from_library(name: str, library: str, eot_id: int, specials: Specials) -> HFTokenizer:
    """The HFTokenizer of a tokenizer.json, run by tiktoken where that is proven to give the library's ids.

    The file is changed in one thing, where it disagrees with `specials`: whether it puts bos_id before a text.

    Raises:
        UserError: a file that the library cannot read, or that would decode to another text here.
    """
    loaded = load(library)
    library = _with_bos(loaded, library, specials)
    spec = parse(library)
    pattern = _tiktoken_pattern(spec)
    slow = HFTokenizer(name, library, eot_id, specials)
    text = probe()
    if spec["model"]["type"] == "WordLevel":  # characters, without a token for unknown ones
        text = "".join(c for c in text if c in spec["model"]["vocab"])
    ids = slow.encode(text)
    if slow.decode(ids) != loaded.decode(ids, skip_special_tokens=True):
        raise UserError(f"the tokenizer {name} decodes text in a way that is not supported")
    if pattern is None:
        return slow
    fast = HFTokenizer(name, library, eot_id, specials, pattern)
    return fast if fast.encode(text) == ids else slow


def load(library: str) -> Tokenizer:
    """The library's own tokenizer of a tokenizer.json. UserError if it cannot read it."""
    try:
        return Tokenizer.from_str(library)
    except Exception as error:  # the library raises nothing more specific
        raise UserError(f"the `tokenizers` library cannot read this tokenizer.json: {error}") from None


def _tiktoken_pattern(spec: dict) -> str | None:
    """tiktoken's pattern for this tokenizer.json, or None where tiktoken might give other ids than the library."""
    model, normalizer = spec["model"], spec["normalizer"]
    plain_added = all(
        not (t["lstrip"] or t["rstrip"] or t["single_word"]) and not (t["normalized"] and normalizer)
        for t in spec["added_tokens"]
    )
    plain_model = model["type"] == "BPE" and not any(
        model.get(key) for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    )
    pattern = byte_level_bpe.split_pattern(spec["pre_tokenizer"])
    if pattern is None or not plain_added or not plain_model or (spec["decoder"] or {}).get("type") != "ByteLevel":
        return None
    table, _ = token_table(spec)
    added = {t["id"] for t in spec["added_tokens"]}
    ranks = {token: i for i, token in enumerate(table) if token and i not in added}
    of_characters = {byte_level_bpe.as_characters(token): token for token in ranks}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    try:
        pairs = [(of_characters[left], of_characters[right]) for left, right in merges]
    except (KeyError, ValueError):  # a merge of added tokens, or not of two
        return None
    return pattern if byte_level_bpe.ranks_agree(ranks, pairs, model.get("ignore_merges", False)) else None


def read_tokenizer(folder: str | Path, name: str | None = None) -> HFTokenizer:
    """The tokenizer of a Hugging Face model's folder.

    Reads tokenizer.json, and where they exist tokenizer_config.json and special_tokens_map.json (begin and end of
    text), generation_config.json and config.json (further ids that end a text) and chat_template.jinja.

    Raises:
        UserError: no tokenizer.json, a damaged file, or one whose end of text is not known.
    """
    folder = Path(folder)
    library = _read(folder / "tokenizer.json")
    if library is None:
        raise UserError(
            f"{folder} has no tokenizer.json: write one with transformers, "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    config, special_map, generation, model = (
        _read_json(folder / f"{file}.json")
        for file in ("tokenizer_config", "special_tokens_map", "generation_config", "config")
    )
    names = {key: _token_text(config.get(key) or special_map.get(key)) for key in ("bos_token", "eos_token")}
    ends = [i for source in (generation, model) for i in _ids(source.get("eos_token_id"))]
    loaded = load(library)
    if names["eos_token"] is None and ends:
        names["eos_token"] = loaded.id_to_token(ends[0])
    if names["eos_token"] is None:
        raise UserError(f"{folder} names no end of text: tokenizer_config.json needs an eos_token")
    library = _with_added(loaded, library, config, names.values())
    ids = {token.content: i for i, token in loaded.get_added_tokens_decoder().items() if token.special}
    prepended = _prepended(loaded)
    bos_id = ids.get(names["bos_token"], prepended)
    add_bos = config["add_bos_token"] if isinstance(config.get("add_bos_token"), bool) else prepended is not None
    specials = Specials(
        tokens=ids,
        bos_id=bos_id,
        add_bos=add_bos and bos_id is not None,
        stop_ids=frozenset(ends) | stop_ids(ids),
        chat_template=_read(folder / "chat_template.jinja") or _default_template(config.get("chat_template")),
    )
    return from_library(name or f"hf:{folder.resolve().name}", library, ids[names["eos_token"]], specials)


def stop_ids(specials: dict[str, int]) -> frozenset[int]:
    """Those of the special tokens whose name says that they end a turn or a text."""
    return frozenset(specials[name] for name in ENDS if name in specials)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(_read(path) or "{}")
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object")
    return content


def _ids(value: int | list[int] | None) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and i >= 0]


def _token_text(token: str | dict | None) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise UserError(f"tokenizer_config.json must write the tokens that begin and end a text, and has {text!r}")
    return text


def _default_template(template: str | list | None) -> str | None:
    """The template, or of several named ones the one that is used when none is named."""
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise UserError(f"the chat_template of tokenizer_config.json is no text but {template!r}")
    return template


def _with_added(tokenizer: Tokenizer, library: str, config: dict, names: Iterable[str | None]) -> str:
    """Add to the tokenizer what only tokenizer_config.json tells of, further added tokens and which are special.

    Returns its tokenizer.json, the very text it had if there is nothing to add.
    """
    present = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    try:
        declared = {t["content"]: (int(i), t) for i, t in (config.get("added_tokens_decoder") or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError("the added_tokens_decoder of tokenizer_config.json is damaged") from None
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    missing = [
        AddedToken(content, special=t.get("special", False), **{flag: t[flag] for flag in flags if flag in t})
        for content, (_, t) in sorted(declared.items(), key=lambda item: item[1][0])
        if content not in present
    ]
    missing += [AddedToken(name, special=True, normalized=False) for name in names if name and not present.get(name)]
    if not missing:
        return library
    tokenizer.add_tokens(missing)
    odd = next((content for content, (i, _) in declared.items() if tokenizer.token_to_id(content) != i), None)
    if odd is not None:
        raise UserError(f"tokenizer_config.json and tokenizer.json give the token {odd!r} different ids")
    return tokenizer.to_str()


def _prepended(tokenizer: Tokenizer) -> int | None:
    """The id that the tokenizer's own post-processor puts before a text, or None."""
    text = 2**31  # an id that is no token's
    encoding = Tokenizer(models.WordLevel({"a": text}, unk_token="a")).encode("a")
    ids = tokenizer.post_process(encoding).ids
    before = ids[: ids.index(text)]
    if len(before) > 1:
        raise UserError("this tokenizer.json puts several tokens before a text, which is not supported")
    return before[0] if before else None


def _with_bos(tokenizer: Tokenizer, library: str, specials: Specials) -> str:
    """The tokenizer.json, its post-processor replaced if it does not put bos_id before a text, or should not."""
    if _prepended(tokenizer) == (specials.bos_id if specials.add_bos else None):
        return library
    tokenizer.post_processor = processors.Sequence([])
    if specials.add_bos:
        bos = tokenizer.id_to_token(specials.bos_id)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, specials.bos_id)]
        )
    return tokenizer.to_str()


def write_tokenizer(tokenizer: data.Tokenizer, folder: str | Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into an existing folder, for `AutoTokenizer`.

    A converted tokenizer gives back the file that it came with. A char tokenizer, as here, fails on other characters.

    Raises:
        UserError: the `tokenizers` library would give other ids.
    """
    library = _as_library(tokenizer)
    text = probe()
    if tokenizer.kind == "char":
        alphabet = {token.decode("utf-8") for token in tokenizer.token_bytes}
        text = "".join(c for c in text if c in alphabet)
    written = Tokenizer.from_str(library)
    written.encode_special_tokens = True
    ids = tokenizer.encode(text)
    same = written.encode(text, add_special_tokens=False).ids == ids and written.decode(ids) == tokenizer.decode(ids)
    if not same:
        raise UserError(f"the `tokenizers` library would give other ids than the tokenizer {tokenizer.name}")
    written_as = {i: name for name, i in tokenizer.special_tokens.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": written_as.get(tokenizer.bos_id),
        "eos_token": written_as[tokenizer.eot_id],
        "clean_up_tokenization_spaces": False,  # it would drop spaces before punctuation in decoded text
        "chat_template": tokenizer.chat_template,
    }
    config = {key: value for key, value in config.items() if value is not None}
    write_synced(Path(folder, "tokenizer.json"), library)
    write_synced(Path(folder, "tokenizer_config.json"), json.dumps(config, indent=2) + "\n")


def _as_library(tokenizer: data.Tokenizer) -> str:
    """The text of a Hugging Face tokenizer.json that gives the ids of `tokenizer`."""
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.library
    library = _char_library(tokenizer) if tokenizer.kind == "char" else _byte_level_library(tokenizer)
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in tokenizer.special_tokens])
    return library.to_str()


def _byte_level_library(tokenizer: data.Tokenizer) -> Tokenizer:
    ranks = {token: i for i, token in enumerate(tokenizer.token_bytes) if token}
    vocab = {byte_level_bpe.as_characters(token): i for token, i in ranks.items()} | tokenizer.special_tokens
    if tokenizer.kind == "bytes":
        return byte_level_bpe.library_tokenizer(vocab, [], None)
    pattern = byte_level_bpe.for_library(tokenizer.pattern)
    return byte_level_bpe.library_tokenizer(vocab, byte_level_bpe.merges_of(ranks), pattern)


def _char_library(tokenizer: data.Tokenizer) -> Tokenizer:
    vocab = {token.decode("utf-8"): i for i, token in enumerate(tokenizer.token_bytes) if token}
    unknown = "<|unknown|>"  # not in the vocabulary: other characters are an error there too
    library = Tokenizer(models.WordLevel({**vocab, **tokenizer.special_tokens}, unk_token=unknown))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m:.)"), behavior="isolated")
    library.decoder = decoders.Fuse()
    return library
