"""Tokenizers of converted models: the ids of the `tokenizers` library, whichever engine runs; files in and out."""

import json
import random
import unicodedata
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import tokenizers
from test_data_tokenizer import TORTURE, code
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from data import UserError, load_tokenizer
from data.hf_tokenizer import BYTE_TOKEN, HFTokenizer
from data.tokenizer import EOT, BPETokenizer, ByteTokenizer, CharTokenizer, Specials, byte_of_character, train_bpe
from engine import TextStream
from formats import byte_level_bpe, sentencepiece
from formats.gguf_tokenizer import LLAMA3_PATTERN, QWEN2_PATTERN
from formats.tokenizers import from_library, probe, read_tokenizer, write_tokenizer

CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K_PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
SPECIAL = ["<|end|>", "<|user|>", "<|bos|>"]
CHAT = "<|user|>Hé <|user|> 12<|end|> \n<|bos|>x"


def byte_level(pattern, **options) -> tokenizers.Tokenizer:
    """A trained byte-level BPE like those of SmolLM (specials first), Llama 3 or Qwen (last), some bytes left out."""
    return tokenizers.Tokenizer.from_str(trained_byte_level(pattern, **options))


@cache
def trained_byte_level(pattern, missing=(), digits=False, nfc=False, ordinary=(), specials_first=True) -> str:
    trained = byte_level_bpe.library_tokenizer({}, [], pattern, digits)
    if nfc:
        trained.normalizer = normalizers.NFC()
    alphabet = [c for c, value in byte_of_character().items() if value not in missing]
    first = SPECIAL if specials_first else []
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, special_tokens=first, show_progress=False)
    text = "".join(c for c in code()[:50_000] + TORTURE if not set(c.encode()) & set(missing))
    trained.train_from_iterator([text], trainer)
    trained.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    trained.add_tokens([AddedToken(name, special=False, normalized=False) for name in ordinary])
    return trained.to_str()


def sentencepiece_like() -> tokenizers.Tokenizer:
    """A trained SentencePiece-style BPE with byte fallback, as Llama 2's."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=pieces, show_progress=False)
    trained.train_from_iterator(code()[:50_000].split("\n"), trainer)
    vocab = trained.get_vocab()
    pieces = sorted(vocab, key=vocab.__getitem__)
    scores = [-float(i) for i in range(len(pieces))]
    return sentencepiece.library_tokenizer(pieces, scores, "<unk>", {"<unk>", "<s>", "</s>"})


def specials_of(library: tokenizers.Tokenizer, **facts) -> Specials:
    return Specials({t.content: i for i, t in library.get_added_tokens_decoder().items() if t.special}, **facts)


MAKERS = {
    "gpt2": lambda: byte_level(None),
    "smollm": lambda: byte_level(None, missing=(0x04, 0x13, 0xC0, 0xF1, 0xF5), digits=True),
    "llama3": lambda: byte_level(LLAMA3_PATTERN, specials_first=False),
    "qwen": lambda: byte_level(QWEN2_PATTERN, nfc=True, ordinary=("<think>", "<think>>"), specials_first=False),
    "sentencepiece": sentencepiece_like,
}


@pytest.fixture(scope="module", params=MAKERS)
def library(request) -> tokenizers.Tokenizer:
    made = MAKERS[request.param]()
    made.family = request.param
    return made


@pytest.fixture(scope="module")
def tokenizer(library) -> HFTokenizer:
    specials = specials_of(library)
    return from_library(library.family, library.to_str(), specials.tokens.get("<|end|>", 2), specials)


@pytest.fixture(scope="module")
def spm() -> HFTokenizer:
    library = sentencepiece_like()
    return from_library("spm", library.to_str(), 2, specials_of(library, bos_id=1, add_bos=True))


@pytest.fixture(scope="module")
def smollm() -> HFTokenizer:
    library = MAKERS["smollm"]()
    return from_library("smollm", library.to_str(), 0, specials_of(library))


def random_texts(n=300):
    rng = random.Random(1)
    for _ in range(n):
        yield "".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(0xD7FF), rng.randrange(0x1F300, 0x1F700)]))
                      for _ in range(rng.randrange(12)))  # fmt: skip


def test_byte_level_bpe_runs_in_tiktoken_and_the_rest_in_the_library(library, tokenizer):
    assert (tokenizer.pattern is None) == (library.family == "sentencepiece")
    assert tokenizer.vocab_size == library.get_vocab_size()


def test_ids_are_those_of_the_library(library, tokenizer):
    library = tokenizers.Tokenizer.from_str(library.to_str())
    library.encode_special_tokens = True
    for text in (TORTURE, code()[100_000:120_000], probe(), "", " ", "<think>a<think>>", *random_texts()):
        ids = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == library.decode(ids)


def test_round_trips(library, tokenizer):
    texts = [TORTURE, "".join(map(chr, range(1, 0x250))), "👩‍👩‍👧‍👦🇩🇪", " two  spaces ", *random_texts()]
    for text in texts:
        if library.family == "smollm":
            text = "".join(c for c in text if not set(c.encode()) & {4, 0x13, 0xF1})
        expected = unicodedata.normalize("NFC", text) if library.family == "qwen" else text
        assert tokenizer.decode(tokenizer.encode(text)) == expected
    assert tokenizer.is_lossless == (library.family in ("gpt2", "llama3"))


def test_specials_in_text_are_text_and_in_a_rendered_chat_ids(library, tokenizer):
    if library.family == "sentencepiece":
        chat, special = "<s>[INST] Hé  ho [/INST] x</s><s> y", {1, 2}
    else:
        chat, special = CHAT, set(tokenizer.special_tokens.values())
    assert not special & set(tokenizer.encode(chat))
    assert tokenizer.decode(tokenizer.encode(chat)) == chat
    ids = tokenizer.encode_with_specials(chat)
    assert ids == library.encode(chat, add_special_tokens=False).ids
    assert len(special & set(ids)) >= 2
    assert "<|user|>" not in tokenizer.decode(ids) and "<s>" not in tokenizer.decode(ids)


def test_added_tokens_that_are_not_special_are_text_with_one_id():
    library = MAKERS["qwen"]()
    tokenizer = from_library("q", library.to_str(), 0, specials_of(library))
    think, longer = library.token_to_id("<think>"), library.token_to_id("<think>>")
    assert tokenizer.encode("<think>") == [think] and tokenizer.encode("<think>>") == [longer]
    assert tokenizer.decode([think]) == "<think>" and "<think>" not in tokenizer.special_tokens


def test_missing_bytes_are_dropped_as_the_library_drops_them(smollm):
    assert smollm.encode("a\x04b") == smollm.encode("a") + smollm.encode("b")
    assert smollm.decode(smollm.encode("a\x04b\x13\U00040000c"))[:2] == "ab"
    merged = smollm.encode("==")
    assert len(merged) == 1 and smollm.encode("=\x04=") == merged  # its neighbours meet
    assert smollm.encode("\x04") == []


def test_endless_runs(smollm):
    for text in (" " * 1_200_000 + "x", "=" * 100_000):
        assert smollm.decode(smollm.encode(text)) == text


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_the_other_ways_to_write_a_leading_space(scheme):
    """Mistral's newer files put it in a pre-tokenizer; Gemma's have none."""
    library = sentencepiece_like()
    library.normalizer = None
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if scheme != "never" else steps)
    tokenizer = from_library("x", library.to_str(), 2, specials_of(library))
    assert tokenizer.leading_space == (scheme != "never")
    for text in ("import os", "a  b 👍🏽\n", "</s> x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = "<s>import</s> os"
    assert tokenizer.encode_with_specials(chat) == library.encode(chat).ids


def test_sentencepiece_streams_the_bytes_of_the_text(spm):
    text = "Ünïcode 👍🏽 tab\t nul\x00 line\n end"
    ids = spm.encode(text)
    assert b"".join(spm.decode_bytes([i]) for i in ids) == spm.decode_bytes(ids) == b" " + text.encode()
    stream = TextStream(spm)
    assert "".join(stream.feed([i]) for i in ids) + stream.finish() == " " + text
    stream = TextStream(spm, begins=True)
    assert "".join(stream.feed([i]) for i in [1, *ids]) + stream.finish() == text
    assert spm.decode(ids) == text and spm.decode([1, *ids, 2]) == text
    library = tokenizers.Tokenizer.from_str(spm.library)
    assert sum(bool(BYTE_TOKEN.fullmatch(library.id_to_token(i))) for i in ids) > 8  # the emoji came byte by byte


def test_a_document_in_pieces_gets_one_leading_space(spm):
    pieces = [("def f", False), ("(x)\n", True), ("end", True)]
    expected = [*spm.encode("def f(x)\n"), 2, *spm.encode("end"), 2]
    assert spm.encode_pieces(pieces).tolist() == expected
    assert spm.encode_pieces([("a ", False), ("b", False)]).tolist() == spm.encode("a b")


def test_bos_goes_before_prompts_alone(spm, smollm):
    assert spm.encode_prompt("x y") == [1, *spm.encode("x y")] and spm.encode_prompt("") == [1]
    assert smollm.encode_prompt("x y") == smollm.encode("x y") and smollm.bos_id is None


def test_the_tokenizers_of_before_have_the_same_face():
    for tokenizer in (ByteTokenizer(), CharTokenizer("ab<|endoftext|>"), train_bpe([code()[:5000]], 300)):
        eot = tokenizer.eot_id
        assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.chat_template) == (None, False, None)
        assert tokenizer.stop_ids == {eot} and tokenizer.special_tokens == {EOT: eot} and tokenizer.is_lossless
        assert tokenizer.encode_prompt("ab") == tokenizer.encode("ab")
        expected = [*tokenizer.encode("a"), eot, eot, *tokenizer.encode("b")]
        assert tokenizer.encode_with_specials(f"a{EOT}{EOT}b") == expected


def test_datasets_made_before_there_were_specials_keep_their_tokenizer(tmp_path):
    assert ByteTokenizer().hash == "1207e317ec37b8ef97e665d2aefc91731b50032c5a261bce9648f10feeac8c33"
    CharTokenizer("ab").save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert content["format"] == 1 and "specials" not in content


def test_saved_and_loaded_it_is_the_same(tokenizer, tmp_path):
    _, bos, eot = sorted(tokenizer.special_tokens.values())
    facts = dict(bos_id=bos, add_bos=True, stop_ids=frozenset({bos, eot}), chat_template="{{ messages }}")
    specials = replace(tokenizer.specials, **facts)
    made = from_library("made", tokenizer.library, eot, specials)
    made.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.hash, loaded.name, loaded.specials, loaded.pattern) == (made.hash, "made", specials, made.pattern)
    assert loaded.encode(TORTURE) == tokenizer.encode(TORTURE)
    assert np.array_equal(loaded.token_byte_lengths(), tokenizer.token_byte_lengths())
    assert loaded.stop_ids == {bos, eot} and loaded.chat_template == "{{ messages }}"


def test_the_hash_covers_what_decides_ids_and_not_the_template(smollm, tmp_path):
    def variant(**facts):
        return HFTokenizer("x", smollm.library, 0, replace(smollm.specials, **facts), smollm.pattern).hash

    assert variant() == variant(chat_template="{{ x }}") == variant(stop_ids=frozenset({1}))
    assert len({variant(), variant(bos_id=2), variant(bos_id=2, add_bos=True), variant(tokens={})}) == 4
    smollm.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, "library": content["library"].replace('"a"', '"b"', 1)}), encoding="utf-8")
    with pytest.raises(UserError, match="altered"):
        load_tokenizer(tmp_path)


# Proofs that tiktoken may run a vocabulary


def test_a_merge_list_that_tiktoken_would_read_otherwise_stays_with_the_library():
    """Of "a", "b", "c", "ab", "bc", "abc" the last is merged from a + bc, but the merges before leave ab + c."""
    alphabet = {c: i for i, c in enumerate(byte_of_character())}
    vocab = alphabet | {"ab": 256, "bc": 257, "abc": 258, "<|end|>": 259}
    reached, unreached = ("ab", "c"), ("a", "bc")  # Llama 3's file lists both
    for last, agrees in (([reached], True), ([unreached], False), ([unreached, reached], True)):
        library = byte_level_bpe.library_tokenizer(vocab, [("a", "b"), ("b", "c"), *last], None, ignore_merges=False)
        library.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
        tokenizer = from_library("abc", library.to_str(), 259, specials_of(library))
        assert (tokenizer.pattern is not None) == agrees
        assert tokenizer.encode("abc") == ([258] if agrees else [256, vocab["c"]])


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec["pre_tokenizer"].update(add_prefix_space=True),
        lambda spec: spec["added_tokens"][1].update(lstrip=True),
        lambda spec: spec["model"].update(unk_token="<|end|>"),
        lambda spec: spec["model"]["merges"].reverse(),
        lambda spec: spec.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [
            {"type": "Punctuation", "behavior": "Isolated"}, spec["pre_tokenizer"]]}),
    ],
)  # fmt: skip
def test_what_tiktoken_cannot_do_the_library_does(change):
    spec = json.loads(byte_level(None).to_str())
    change(spec)
    library = json.dumps(spec)
    tokenizer = from_library("x", library, 0, Specials({name: i for i, name in enumerate(SPECIAL)}))
    assert tokenizer.pattern is None
    other = tokenizers.Tokenizer.from_str(library)
    assert tokenizer.encode_with_specials("Hi <|user|> x.") == other.encode("Hi <|user|> x.").ids


def test_merges_follow_from_ranks():
    bpe = train_bpe([code()], 700)
    ranks = {token: i for i, token in enumerate(bpe.token_bytes) if token}
    merges = byte_level_bpe.merges_of(ranks)
    assert ["".join(pair) for pair in merges] == [byte_level_bpe.as_characters(t) for t in bpe.token_bytes[256:-1]]


# Files of Hugging Face, in and out


def write_folder(folder, library, **files):
    (folder / "tokenizer.json").write_text(library.to_str(), encoding="utf-8")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def with_template(library, bos="<|bos|>"):
    library = tokenizers.Tokenizer.from_str(library.to_str())
    special = [(bos, library.token_to_id(bos))]
    library.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=special)
    return library


def test_a_folder_is_read_with_its_bos_stops_and_template(tmp_path):
    library = with_template(byte_level(None))
    write_folder(
        tmp_path,
        library,
        tokenizer_config={
            "eos_token": {"content": "<|end|>"},
            "bos_token": "<|bos|>",
            "chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}],
        },
        generation_config={"eos_token_id": [0, 1]},
    )
    tokenizer = read_tokenizer(tmp_path)
    assert (tokenizer.eot_id, tokenizer.bos_id, tokenizer.add_bos) == (0, 2, True)
    assert tokenizer.stop_ids == {0, 1} and tokenizer.chat_template == "yes"
    assert tokenizer.encode_prompt("Hi") == library.encode("Hi").ids
    assert tokenizer.library == library.to_str() and tokenizer.name == f"hf:{tmp_path.name}"
    (tmp_path / "chat_template.jinja").write_text("newer", encoding="utf-8")
    assert read_tokenizer(tmp_path).chat_template == "newer"


@pytest.mark.parametrize("in_file, in_config, expected", [(1, None, 1), (0, None, 0), (1, False, 0), (0, True, 1)])
def test_the_bos_policy_of_the_config_wins(tmp_path, in_file, in_config, expected):
    plain = byte_level(None)
    config = {"eos_token": "<|end|>", "bos_token": "<|bos|>", "add_bos_token": in_config}
    write_folder(tmp_path, with_template(plain) if in_file else plain, tokenizer_config=config)
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer.add_bos == bool(expected)
    assert tokenizers.Tokenizer.from_str(tokenizer.library).encode("Hi").ids == tokenizer.encode_prompt("Hi")


def test_specials_that_only_the_config_declares(tmp_path):
    library = byte_level(None)
    extra = {"content": "<|extra|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    config = {"added_tokens_decoder": {str(library.get_vocab_size()): extra}, "eos_token": "<|extra|>"}
    write_folder(tmp_path, library, tokenizer_config=config)
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer.eot_id == library.get_vocab_size() == tokenizer.vocab_size - 1
    assert tokenizer.encode_with_specials("<|extra|>") == [tokenizer.eot_id]
    config["added_tokens_decoder"] = {"7777": extra}
    write_folder(tmp_path, library, tokenizer_config=config)
    with pytest.raises(UserError, match="different ids"):
        read_tokenizer(tmp_path)


def test_folders_that_cannot_be_read(tmp_path):
    def refused(match):
        with pytest.raises(UserError, match=match):
            read_tokenizer(tmp_path)

    refused("no tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    refused("cannot read this tokenizer.json")
    library = byte_level(None)
    write_folder(tmp_path, library)
    refused("names no end of text")
    (tmp_path / "tokenizer_config.json").write_text("[1]", encoding="utf-8")
    refused("not a JSON object")
    (tmp_path / "tokenizer_config.json").write_text("{'a'}", encoding="utf-8")
    refused("is not JSON")
    spec = json.loads(library.to_str())
    spec["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    write_folder(tmp_path, library, tokenizer_config={"eos_token": "<|end|>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    refused("decoder that is not supported.*WordPiece")
    library.post_processor = processors.TemplateProcessing(
        single="<|bos|> <|user|> $A", special_tokens=[("<|bos|>", 2), ("<|user|>", 1)]
    )
    write_folder(tmp_path, library)
    refused("several tokens before a text")


def own_bpe(pattern):
    bpe = train_bpe([code()[:50_000], TORTURE], 600)
    return BPETokenizer("own", bpe.token_bytes, bpe.eot_id, pattern or bpe.pattern)


@pytest.mark.parametrize(
    "make",
    [
        ByteTokenizer,
        lambda: CharTokenizer(TORTURE),
        lambda: own_bpe(None),
        lambda: own_bpe(CL100K_PATTERN),
        lambda: own_bpe(O200K_PATTERN),
    ],
    ids=["bytes", "char", "bpe", "cl100k", "o200k"],
)
def test_our_own_tokenizers_go_out_and_come_back_with_their_ids(tmp_path, make):
    transformers = pytest.importorskip("transformers")
    tokenizer = make()
    write_tokenizer(tokenizer, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = TORTURE.replace(EOT, "")
    assert theirs(text).input_ids == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.eot_id and len(theirs) == tokenizer.vocab_size
    back = read_tokenizer(tmp_path)
    assert back.encode(TORTURE) == tokenizer.encode(TORTURE)
    assert (back.eot_id, back.vocab_size, back.stop_ids) == (tokenizer.eot_id, tokenizer.vocab_size, tokenizer.stop_ids)
    assert (back.pattern is None) == (tokenizer.kind == "char")


def test_converted_tokenizers_give_their_file_back(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    _, bos, eot = sorted(tokenizer.special_tokens.values())
    facts = dict(bos_id=bos, add_bos=True, chat_template="{{ messages }}")
    made = from_library("made", tokenizer.library, eot, replace(tokenizer.specials, **facts))
    write_tokenizer(made, tmp_path)
    assert (tmp_path / "tokenizer.json").read_text(encoding="utf-8") == made.library
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = TORTURE.replace("<s>", "").replace("</s>", "")  # there, specials in a text are their ids
    assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
    assert theirs("Hi").input_ids == made.encode_prompt("Hi")
    assert theirs(CHAT, add_special_tokens=False).input_ids == made.encode_with_specials(CHAT)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (bos, eot) and theirs.chat_template == made.chat_template
    back = read_tokenizer(tmp_path)
    assert (back.hash, back.specials.add_bos, back.pattern) == (made.hash, True, made.pattern)


def test_a_char_tokenizer_refuses_strangers_on_the_other_side_too(tmp_path):
    write_tokenizer(CharTokenizer("abc"), tmp_path)
    back = read_tokenizer(tmp_path)
    assert back.encode("cab") == [2, 0, 1]
    with pytest.raises(UserError, match="cannot encode"):
        back.encode("abd")
