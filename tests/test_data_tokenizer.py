"""Tokenizers: round trips, equal ids wherever two ways lead to them, and what they refuse."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from data import UserError, load_tokenizer
from data import tokenizer as tokenizers_module
from data.tokenizer import EOT, BPETokenizer, ByteTokenizer, CharTokenizer, named_encoding, train_bpe

ROOT = Path(__file__).resolve().parent.parent

TORTURE = (
    "plain ASCII, digits 1234567890 and 3.14159e-10\n\ttabs\r\nCRLF\rCR\x0b\x0c\x1c\x1f\x85\u2028\u2029 line ends\n"
    "\n\n   \n"
    "accents é e\u0301 ñ Å A\u030a ﬁ ß ẞ İ ı; combining \u0301\u0327 first\n"
    "中文字符，日本語テキスト、한국어 텍스트\u3000全角\n"
    "العربية עברית हिन्दी ไทย မြန်မာ\u200f\u200e\u202e bidi\u202c\n"
    "emoji 👍🏽 👨‍👩‍👧‍👦 🇩🇪🏴󠁧󠁢󠁥󠁮󠁧󠁿 ☃\ufe0f\u200b\u200d\ufeff\u00ad\u00a0nbsp\n"
    "astral 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff \ufffd \ufffe private \ue000; digits ٣٤٥ ⅷ ½ 𝟘𝟙𝟚 二\n"
    f"special {EOT} <|endofprompt|> <s> </s> [MASK] <|im_start|>\n"
    "code: def f(x):\n        return x//2  # it's, IT'S, we'll, they'Ve\n==== //// ....\n\n\n/path\n"
    + " " * 300
    + "x" * 300
)


def code() -> str:
    """Some real text: a few files of this very interpreter's library."""
    folder = Path(os.__file__).parent
    return "".join(Path(folder, name).read_text(encoding="utf-8") for name in ("argparse.py", "ast.py", "typing.py"))


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    return train_bpe([code(), TORTURE], 1000)


def gpt2() -> BPETokenizer:
    try:
        return named_encoding("gpt2")
    except UserError as error:
        pytest.skip(f"gpt2 is not to be had: {error}")


@pytest.fixture(params=["bytes", "char", "bpe", "gpt2"])
def tokenizer(request, bpe):
    make = {"bytes": ByteTokenizer, "char": lambda: CharTokenizer(TORTURE), "bpe": lambda: bpe, "gpt2": gpt2}
    return make[request.param]()


def test_round_trip_of_every_kind_of_character(tokenizer):
    ids = tokenizer.encode(TORTURE)
    assert tokenizer.decode(ids) == TORTURE
    assert tokenizer.decode_bytes(ids) == TORTURE.encode("utf-8")
    with_ends = np.array([tokenizer.eot_id, *ids, tokenizer.eot_id])
    assert tokenizer.decode_array(with_ends) == TORTURE.encode("utf-8")
    assert tokenizer.decode_array(with_ends[:0]) == tokenizer.decode_array(with_ends[:1]) == b""
    assert ids == tokenizer.encode_to_numpy(TORTURE).tolist()
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


def test_documents_in_one_call_have_the_ids_of_each(tokenizer):
    """Also where a text ends in white space, has the name of the end of text in it, or gives up half of it."""
    rng = random.Random(0)
    alphabet = [*"ax0 \n\t/.'", "中", "😀", EOT, EOT[:6], EOT[6:], " " * 7]
    texts = ["".join(rng.choices(alphabet, k=rng.randrange(10))) for _ in range(2000)]
    if isinstance(tokenizer, CharTokenizer):
        texts = ["".join(c for c in text if c in TORTURE) for text in texts]
    for start in range(0, len(texts), 4):
        pieces = [(text, True) for text in texts[start : start + 4]]
        expected = [i for text, _ in pieces for i in [*tokenizer.encode(text), tokenizer.eot_id]]
        assert tokenizer.encode_pieces(pieces).tolist() == expected
    assert tokenizer.encode_pieces([]).tolist() == []
    halves = [("<|endof", False), ("text|>", True), ("b", False)]  # pieces that together spell the end of text
    assert tokenizer.eot_id not in tokenizer.encode_pieces(halves[:1] + halves[2:]).tolist()
    ids = tokenizer.encode_pieces(halves).tolist()
    assert ids.count(tokenizer.eot_id) == 1 and tokenizer.decode(ids) == "<|endoftext|>b"


def test_documents_in_one_call_bear_endless_runs(bpe):
    pieces = [(" " * 2_000_000, True), ("x", True)]
    assert bpe.encode_pieces(pieces).tolist()[-2:] == [*bpe.encode("x"), bpe.eot_id]


def test_ids_lie_in_the_vocabulary_and_eot_is_never_encoded(tokenizer):
    ids = tokenizer.encode(TORTURE)
    assert 0 <= min(ids) and max(ids) < tokenizer.vocab_size
    assert 0 <= tokenizer.eot_id < tokenizer.vocab_size
    assert tokenizer.eot_id not in ids


def test_ids_without_text_decode_to_nothing(tokenizer):
    a = tokenizer.encode("a")
    strangers = [tokenizer.eot_id, tokenizer.vocab_size, tokenizer.vocab_size + 63, -1, 10**12]
    assert tokenizer.decode_bytes(strangers + a + strangers) == b"a"
    assert tokenizer.decode_bytes(np.array(a)) == b"a"


def test_byte_lengths_sum_to_the_text(tokenizer):
    lengths = tokenizer.token_byte_lengths()
    assert lengths.dtype == np.int32 and lengths.shape == (tokenizer.vocab_size,)
    assert lengths[tokenizer.eot_id] == 0
    assert lengths[tokenizer.encode(TORTURE)].sum() == len(TORTURE.encode("utf-8"))


def test_saved_and_loaded_it_is_the_same(tokenizer, tmp_path, monkeypatch):
    tokenizer.save(tmp_path)
    monkeypatch.setattr(tiktoken, "get_encoding", None)  # loading needs no download
    loaded = load_tokenizer(tmp_path)
    assert (loaded.name, loaded.vocab_size, loaded.eot_id) == (tokenizer.name, tokenizer.vocab_size, tokenizer.eot_id)
    assert loaded.hash == tokenizer.hash
    assert loaded.encode(TORTURE) == tokenizer.encode(TORTURE)


def test_half_a_character_decodes_to_a_replacement(bpe):
    assert ByteTokenizer().decode("é".encode()[:1]) == "\ufffd"
    assert ByteTokenizer().decode_bytes([0xC3]) == b"\xc3"


def test_lone_surrogates_become_replacements():
    for tokenizer in (ByteTokenizer(), train_bpe(["a"], 257), CharTokenizer("a\ufffd")):
        assert tokenizer.decode(tokenizer.encode("a\ud800a")) == "a\ufffda"


def test_char_ids_follow_the_code_points():
    tokenizer = CharTokenizer("cabba😀")
    assert tokenizer.encode("abc😀") == [0, 1, 2, 3]
    assert (tokenizer.eot_id, tokenizer.vocab_size) == (4, 5)


@pytest.mark.parametrize("stranger", ["d", "~", "\x00", "😀"])
def test_unknown_character_is_named_with_its_tokenizer(stranger):
    with pytest.raises(UserError, match=f"U\\+{ord(stranger):04X}.*char tokenizer"):
        CharTokenizer("abcxyz").encode(f"abc{stranger}")


def test_bpe_counts_every_id(bpe):
    assert (bpe.name, bpe.vocab_size, bpe.eot_id) == ("bpe:1000", 1000, 999)
    assert len(set(bpe.token_bytes)) == 1000  # no token twice, and only eot is empty


def test_bpe_ids_equal_those_of_its_trainer(bpe):
    trained = tokenizers_module._train([code(), TORTURE], 999)
    other = Path(os.__file__).parent.joinpath("inspect.py").read_text(encoding="utf-8")
    for text in (TORTURE, code(), other):
        assert bpe.encode(text) == trained.encode(text, add_special_tokens=False).ids


def test_bpe_training_is_deterministic(bpe):
    assert train_bpe([code(), TORTURE], 1000).hash == bpe.hash
    script = (
        "import sys; sys.path[:0] = sys.argv[1:3]; import test_data_tokenizer as t;"
        "print(t.train_bpe([t.code(), t.TORTURE], 1000).hash)"
    )
    command = [sys.executable, "-c", script, str(ROOT), str(ROOT / "tests")]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    assert subprocess.check_output(command, env=environment, text=True).strip() == bpe.hash


def test_bpe_of_a_tiny_text_is_smaller_and_says_so():
    tokenizer = train_bpe(["abababab"], 4096)
    assert tokenizer.vocab_size < 270 and tokenizer.name == f"bpe:{tokenizer.vocab_size}"
    assert sorted(train_bpe(["abababab"], 257).token_bytes) == [b"", *(bytes([value]) for value in range(256))]


def test_bpe_merges_stay_inside_the_split_pattern(bpe):
    for token in bpe.token_bytes:
        text = token.decode("utf-8", errors="ignore")
        assert not any(c.isdigit() for c in text) or len(text) <= 2
        assert not (text.strip() and any(c.isspace() for c in text.strip()))


def test_training_and_encoding_bear_endless_runs(bpe):
    for text in (" " * 1_200_000 + "x", "\n" * 1_200_000, "=" * 1_200_000, "ab" * 600_000):
        assert bpe.decode(bpe.encode(text)) == text
        assert train_bpe([text], 270).vocab_size > 257


def test_named_encoding_with_gaps_and_other_specials(monkeypatch, bpe, tmp_path):
    """cl100k_base and o200k_base leave ids unused and have specials beside the end of text."""
    ranks = {token: rank for rank, token in enumerate(bpe.token_bytes[:400])}
    encoding = tiktoken.Encoding(
        "cl100k_base", pat_str=bpe.pattern, mergeable_ranks=ranks, special_tokens={EOT: 402, "<|other|>": 410}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    tokenizer = named_encoding("cl100k_base")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot_id) == ("cl100k_base", 411, 402)
    assert tokenizer.decode([400, 401, 402, 403, 410]) == ""
    assert tokenizer.encode(TORTURE) == encoding.encode_ordinary(TORTURE)
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode(TORTURE + "<|other|>") == encoding.encode_ordinary(TORTURE + "<|other|>")


def test_gpt2_is_gpt2():
    tokenizer = gpt2()
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot_id) == ("gpt2", 50257, 50256)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.encode(TORTURE) == tiktoken.get_encoding("gpt2").encode_ordinary(TORTURE)


@pytest.mark.parametrize("name, wanted", [("gpt2", "vocab.bpe"), ("o200k_base", "o200k_base.tiktoken")])
def test_offline_error_names_the_cache_folder_and_the_files(tmp_path, name, wanted):
    (tmp_path / "a.txt").write_text("some text\n" * 20, encoding="utf-8")
    command = [sys.executable, "-m", "data.prepare", "files", "a.txt", "--tokenizer", name, "--out", "shards"]
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environment = {**os.environ, **nowhere, "TIKTOKEN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
    for word in (name, "TIKTOKEN_CACHE_DIR", wanted):
        assert word in done.stderr
    assert not (tmp_path / "shards").exists()


def test_named_files_are_the_ones_tiktoken_asks_for(tmp_path, monkeypatch):
    """The table of files follows tiktoken, which knows its own addresses."""
    openai_public = pytest.importorskip("tiktoken_ext.openai_public")
    for name, urls in tokenizers_module.TIKTOKEN_FILES.items():
        asked = []
        monkeypatch.setattr(
            openai_public, "load_tiktoken_bpe", lambda url, expected_hash, asked=asked: asked.append(url)
        )
        monkeypatch.setattr(
            openai_public,
            "data_gym_to_mergeable_bpe_ranks",
            lambda vocab_bpe_file, encoder_json_file, asked=asked, **_: asked.extend(
                [vocab_bpe_file, encoder_json_file]
            ),
        )
        openai_public.ENCODING_CONSTRUCTORS[name]()
        assert tuple(asked) == urls


def test_altered_and_foreign_tokenizer_files_are_refused(tmp_path, bpe):
    with pytest.raises(UserError, match="missing"):
        load_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    bpe.save(tmp_path)
    content = json.loads(path.read_text(encoding="utf-8"))

    def refused(text: str, match: str):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=match) as error:
            load_tokenizer(tmp_path)
        assert str(path) in str(error.value)

    tokens = content["tokens"]
    refused(json.dumps({**content, "tokens": [*tokens[:300], tokens[301], tokens[300], *tokens[302:]]}), "altered")
    refused(json.dumps({**content, "eot_id": 3}), "altered")
    refused(json.dumps({**content, "format": 99}), "format version 99")
    refused(json.dumps({"version": "1.0", "model": {"type": "BPE"}}), "not a tokenizer file")
    refused("[]", "not a tokenizer file")
    refused(path.read_text(encoding="utf-8")[:-1], "not a tokenizer file")
