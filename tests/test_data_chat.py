"""Datasets of chats: what `--chat` stores, what the loader makes of it, and what both refuse."""

import io
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from data import UserError, open_dataset, open_datasets, shards, tokenise
from data.chat import chat_ids, encode_chats
from data.loader import IGNORE_INDEX, Loader, validation_batches
from data.prepare import main, prepare
from data.shards import ANSWER, ENDS_DOCUMENT, HEADER_BYTES, ID_MASK, Tokens
from data.sources import files_corpus
from tests.chat_models import CHATML, INSTRUCT, chat_tokenizer, write_chat_model, write_chats
from tests.conftest import ROOT

CHATS = [[f"Question {i}?", f"Answer {i * i}.", "And then?", "That is all 🙂."] for i in range(30)]
EOT = 0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prepared(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    path = write_chats(folder / "talk.jsonl", CHATS)
    main(["files", str(path), "--chat", "--tokenizer", str(model), "--out", str(folder / "shards")])
    return folder / "shards"


def all_of(tokens: Tokens) -> np.ndarray:
    return tokens.read(0, len(tokens)).astype(np.int64)


def loader(tokens, **options):
    defaults = dict(block_size=16, windows_per_step=24, seed=1, device="cpu", micro_batch_size=4)
    return Loader(tokens, **{**defaults, **options})


def test_every_chat_is_stored_with_its_marks(prepared):
    dataset = open_dataset(prepared)
    tokenizer = chat_tokenizer()
    assert dataset.tokenizer.hash == tokenizer.hash and dataset.tokenizer.chat_template == CHATML
    expected = []
    for turns in CHATS:
        roles = ["user", "assistant"] * 2
        messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
        expected += [*chat_ids(tokenizer, messages).tolist(), EOT | ENDS_DOCUMENT]
    assert [*all_of(dataset.train), *all_of(dataset.val)] == expected
    info = json.loads((prepared / "dataset.json").read_text(encoding="utf-8"))
    assert info["splits"]["train"]["documents"] + info["splits"]["val"]["documents"] == len(CHATS)
    n_answers = [info["splits"][split]["answer_tokens"] for split in ("train", "val")]
    assert sum(n_answers) == sum(token & ANSWER > 0 for token in expected) and n_answers[1] > 0
    assert info["splits"]["val"]["documents"] == 3 and " --chat --tokenizer " in info["command"]


def test_targets_are_answers_alone(prepared):
    dataset = open_dataset(prepared)
    stream = all_of(dataset.train)
    for step in range(3):
        inputs, targets = loader(dataset.train, windows_per_step=4).micro_batch(step, 0)
        starts = loader(dataset.train)._orders[0].window_starts(np.arange(4) + 4 * step)
        for row, start in enumerate(starts):
            window = stream[start : start + 17]
            assert inputs[row].tolist() == (window[:-1] & ID_MASK).tolist()
            expected = [t & ID_MASK if t & ANSWER else IGNORE_INDEX for t in window[1:].tolist()]
            assert targets[row].tolist() == expected
    tokenizer = dataset.tokenizer
    inputs, targets = next(validation_batches(dataset.val, 10**4, 1, "cpu"))
    learnt = [tokenizer.decode_bytes([t]) or b"|" for t in targets[0].tolist() if t != IGNORE_INDEX]
    spoken = [text for turns in CHATS[-3:] for text in turns[1::2]]
    assert b"".join(learnt).decode("utf-8") == "".join(f"{text}|" for text in spoken)
    assert inputs.max() < tokenizer.vocab_size and int((targets != IGNORE_INDEX).sum()) < targets.numel() / 2


def test_validation_counts_every_answer_once_whatever_the_windows(prepared):
    val = open_dataset(prepared).val
    counted = int((all_of(val)[1:] & ANSWER > 0).sum())
    for block_size, batch_size in ((7, 3), (16, 4), (1000, 1)):
        batches = list(validation_batches(val, block_size, batch_size, "cpu"))
        assert sum(int((targets != IGNORE_INDEX).sum()) for _, targets in batches) == counted


def test_documents_are_chats_also_where_turns_end_with_the_end_of_text(tmp_path):
    tokenizer = chat_tokenizer(INSTRUCT)
    model = write_chat_model(tmp_path / "model", tokenizer)
    path = write_chats(tmp_path / "talk.jsonl", CHATS)
    main(["files", str(path), "--chat", "--tokenizer", str(model.parent), "--out", str(tmp_path / "shards")])
    dataset = open_dataset(tmp_path / "shards")
    stream = all_of(dataset.train)
    inputs, targets, starts = next(validation_batches(dataset.train, len(stream), 1, "cpu", eot_id=EOT))
    ends = np.flatnonzero(stream[:-1] & ENDS_DOCUMENT)
    assert 27 == len(ends) + 1 and int((inputs == EOT).sum()) > 2 * len(ends)
    assert np.unique(starts).tolist() == [0, *(ends[ends < len(stream) - 2] + 1)]
    batch = loader(dataset.train, eot_id=EOT).micro_batch(0, 0)
    assert len(batch) == 3 and batch[2].dtype == torch.int32 and batch[2].shape == batch[0].shape


@pytest.mark.parametrize("world_size, micro_batch_size", [(1, 24), (1, 3), (2, 4), (3, 1)])
def test_weights_make_a_step_the_mean_over_its_targets(prepared, world_size, micro_batch_size):
    """Each target's share of the step's loss is the same however the step is divided."""
    train = open_dataset(prepared).train
    for step in range(4):
        counted, weighted = 0, []
        for rank in range(world_size):
            part = loader(train, micro_batch_size=micro_batch_size, rank=rank, world_size=world_size)
            for m in range(part.micro_batches_per_step):
                targets = part.micro_batch(step, m)[1]
                weight, n = part.weight(step, m) / world_size, int((targets != IGNORE_INDEX).sum())
                if weight:
                    weighted.append(weight / n)
                    counted += n
                assert n > 0, "a mean over nothing would be NaN"
        assert weighted == pytest.approx([1 / counted] * len(weighted))


def test_a_step_without_an_answer_has_no_weight():
    tokens = Tokens([np.arange(1, 100, dtype=np.uint32)], marked=True)
    part = loader(tokens, windows_per_step=4)
    targets = part.micro_batch(0, 0)[1]
    assert part.weight(0, 0) == 0 and int((targets != IGNORE_INDEX).sum()) == 1
    assert all((targets == IGNORE_INDEX).all() for _, targets in validation_batches(tokens, 16, 4, "cpu"))


def test_plain_text_beside_chats_counts_wholly(prepared, tmp_path):
    (tmp_path / "book.txt").write_text("All of this counts. " * 200, encoding="utf-8")
    main(["files", str(tmp_path / "book.txt"), "--tokenizer", f"like:{prepared}", "--out", str(tmp_path / "book")])
    mixed = open_datasets(f"{prepared}:0.5,{tmp_path / 'book'}:0.5")
    part = loader(mixed.train, windows_per_step=40, micro_batch_size=40, eot_id=EOT)
    inputs, targets, _ = part.micro_batch(0, 0)
    whole = (targets != IGNORE_INDEX).all(dim=1)
    assert 15 <= int(whole.sum()) <= 25
    assert torch.equal(inputs[whole][:, 1:], targets[whole][:, :-1])
    book = inputs[whole].flatten().tolist()
    assert set(mixed.tokenizer.decode(book)) <= set("All of this counts. ")


def test_a_plain_dataset_is_as_it_was(tmp_path):
    """No marks, no wider tokens, no new fields: shards made before are the ones made now."""
    (tmp_path / "a.txt").write_text("plain text, " * 100, encoding="utf-8")
    main(["files", str(tmp_path / "a.txt"), "--tokenizer", "bytes", "--out", str(tmp_path / "shards")])
    header = shards.read_header(tmp_path / "shards/train-00000.bin")
    assert "marked" not in header and header["dtype"] == "uint16"
    assert loader(open_dataset(tmp_path / "shards").train).weight(0, 0) == 1 / 6


def test_preparing_twice_and_with_another_template(model, tmp_path, capsys):
    path = write_chats(tmp_path / "talk.jsonl", CHATS)
    words = ["files", str(path), "--chat", "--out", str(tmp_path / "shards"), "--tokenizer"]
    main([*words, str(model)])
    assert "already" not in capsys.readouterr().out
    main([*words, str(model.parent)])  # the run it is in: the same tokenizer
    assert "already prepared" in capsys.readouterr().out
    other = write_chat_model(tmp_path / "other", chat_tokenizer(CHATML.replace("Be brief.", "Be kind.")))
    with pytest.raises(UserError, match="holds other text or settings; add --overwrite"):
        main([*words, str(other)])
    main([*words, str(other), "--overwrite"])
    main(
        ["files", str(path), "--field", "messages", "--out", str(tmp_path / "two"), "--chat", "--tokenizer", str(other)]
    )
    hashes = [open_dataset(tmp_path / name).hash for name in ("shards", "two")]
    assert hashes[0] == hashes[1]


def test_what_was_written_must_be_what_was_read(model, tmp_path, monkeypatch):
    path, folder = write_chats(tmp_path / "talk.jsonl", CHATS), tmp_path / "shards"

    def changing():
        corpus = files_corpus([path], "messages", chat=True)
        path.write_bytes(path.read_bytes().replace(b"And then?", b"And when?"))
        return corpus

    with pytest.raises(UserError, match="is not what the text gives when read again"):
        prepare(changing, str(model), folder, "")
    calls = []

    def wrong_at_first(batch, tokenizer):
        calls.append(batch)
        n_bytes, ids = encode_chats(batch, tokenizer)
        return n_bytes, ids[::-1] if len(calls) == 1 else ids

    monkeypatch.setattr(tokenise, "encode_chats", wrong_at_first)
    with pytest.raises(UserError, match="is not what the text gives when read again"):
        prepare(lambda: files_corpus([path], "messages", chat=True), str(model), folder, "")
    assert len(calls) == 3 and not folder.exists()  # two splits written, the first of them read back


def test_from_standard_input(model, tmp_path, monkeypatch):
    lines = write_chats(tmp_path / "talk.jsonl", CHATS).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    main(["files", "-", "--chat", "--tokenizer", str(model), "--out", str(tmp_path / "shards")])
    assert open_dataset(tmp_path / "shards").train.marked


def test_damage_is_found(prepared, tmp_path):
    def damaged(change):
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(prepared, folder)
        path = folder / "train-00000.bin"
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)
        with pytest.raises(UserError) as error:
            open_dataset(folder)
        return str(error.value)

    def flip_mark(data):
        data[HEADER_BYTES + 4 * 20 + 3] ^= 0x80

    assert "is damaged: its tokens do not match" in damaged(flip_mark)
    assert "is truncated" in damaged(lambda data: data.__delitem__(slice(-4, None)))
    hide = b', "marked": true}'
    assert "holds the id" in damaged(
        lambda data: data.__setitem__(slice(None), data.replace(hide, b"}".ljust(len(hide))))
    )


CHAT_OF_ONE = {"role": "user", "content": "Hello"}
ANSWERED = [CHAT_OF_ONE, {"role": "assistant", "content": "Hi"}]


@pytest.mark.parametrize(
    "row, sentence",
    [
        ({"text": "x"}, "line 3 of .* has no field 'messages' .*--field"),
        ({"messages": "x"}, "line 3 of .* has no chat in its field 'messages': it is not a list of messages"),
        ({"messages": []}, "line 3 .* not a list of messages"),
        ({"messages": [*ANSWERED, "x"]}, 'line 3 .* every message must be an object with the texts "role"'),
        ({"messages": [{"role": "assistant", "content": None}]}, "line 3 .* every message must be an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "line 3 .* every message must be an object"),
        ({"messages": [CHAT_OF_ONE]}, "line 3 .* no message has the role assistant"),
        ({"messages": ANSWERED[::-1]}, "line 3 .* begins with an answer, and nobody asked"),
    ],
)
def test_rows_that_are_no_chat(row, sentence, model, tmp_path):
    path = tmp_path / "talk.jsonl"
    lines = [{"messages": ANSWERED}, {"messages": ANSWERED}, row, {"messages": ANSWERED}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with pytest.raises(UserError, match=sentence):
        main(["files", str(path), "--chat", "--tokenizer", str(model), "--out", str(tmp_path / "shards")])
    assert not (tmp_path / "shards").exists()


def test_refusals_before_any_text_is_read(model, tmp_path):
    path = str(write_chats(tmp_path / "talk.jsonl", CHATS))

    def refused(sentence, *words):
        with pytest.raises(UserError, match=sentence):
            main(["files", *words, "--out", str(tmp_path / "shards")])
        assert not (tmp_path / "shards").exists()

    refused("--chat takes a tokenizer with a chat template, and bpe:4096 has none", path, "--chat")
    refused("and gpt2 has none", path, "--chat", "--tokenizer", "gpt2")
    refused("unknown tokenizer", path, "--chat", "--tokenizer", "no/such/folder")
    refused("holds no tokenizer.json: name a run, a checkpoint", path, "--tokenizer", str(tmp_path))
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    chat = ["--chat", "--tokenizer", str(model)]
    refused("a.txt is no .jsonl file, and with --chat all files must be", path, str(tmp_path / "a.txt"), *chat)
    one = str(write_chats(tmp_path / "one.jsonl", CHATS[:1]))
    refused("too short: nothing is left for its train split", one, *chat)


def test_a_template_that_refuses_a_chat_leaves_nothing(tmp_path):
    model = write_chat_model(tmp_path / "model", chat_tokenizer(INSTRUCT))
    path = write_chats(tmp_path / "talk.jsonl", CHATS)
    system = {"messages": [{"role": "system", "content": "Be kind."}, *ANSWERED]}
    path.write_text(path.read_text(encoding="utf-8") + json.dumps(system) + "\n", encoding="utf-8")
    words = ["files", path, "--chat", "--tokenizer", model, "--out", tmp_path / "shards"]
    command = [sys.executable, "-m", "data.prepare", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "roles must alternate user/assistant; the chat is [{" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")) == ["model", "talk.jsonl"]
