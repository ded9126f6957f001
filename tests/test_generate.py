"""The command line of the engine, on a tiny checkpoint: its output, its refusals, and how it is interrupted."""

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import checkpoint
import generate
from data import UserError
from data.tokenizer import ByteTokenizer, CharTokenizer
from engine import Engine, Sampling
from model import ModelConfig, Transformer

ROOT = Path(__file__).parent.parent
REPORT_LINE = re.compile(r"^(\d+) new tokens in [\d.]+ s: [\d.]+ tokens/s \(.*\)$")


def write_run(run, tokenizer, block_size=64):
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, n_layer=1, n_head=2, n_kv_head=1, n_embd=16, block_size=block_size
    )
    model = Transformer(config).init_weights(torch.Generator().manual_seed(0))
    checkpoint.save(run, {"step": 1, "config": asdict(config)}, model, [], tokenizer)
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with three runs under out/, `bytes` the newest."""
    folder = tmp_path_factory.mktemp("work")
    write_run(folder / "out" / "char", CharTokenizer("abc \n"))
    write_run(folder / "out" / "long", ByteTokenizer(), block_size=8192)
    write_run(folder / "out" / "bytes", ByteTokenizer())
    for age, name in enumerate(("bytes", "long", "char")):
        state = folder / "out" / name / "last" / "state.json"
        os.utime(state, (1e9 - age, 1e9 - age))
    return folder


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Call the program in this process; its stdout and stderr."""
    monkeypatch.chdir(folder)

    def call(*argv):
        generate.main(["--device", "cpu", *argv])
        return capsys.readouterr()

    return call


def command(*argv):
    return [sys.executable, str(ROOT / "generate.py"), "--device", "cpu", *argv]


def start(folder, *argv, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(command(*argv), cwd=folder, env=environment, **{**pipes, **options})


def expected(folder, run, prompt, new_tokens, seed, sampling=None, **options):
    engine = Engine(checkpoint.load_model(folder / "out" / run), checkpoint.load_tokenizer(folder / "out" / run))
    return engine.complete([prompt], sampling or Sampling(), new_tokens, seed=seed, **options)


def test_text_comes_after_its_prompt_and_the_report_is_last(run, folder):
    out, err = run("--prompt", "hé ", "--max_new_tokens", "9", "--seed", "5")
    text, line = out.removesuffix("\n").rsplit("\n", 1)
    assert text == "hé " + expected(folder, "bytes", "hé ", 9, 5)[0].text
    assert REPORT_LINE.match(line).group(1) == "9"
    assert err == f"checkpoint {Path('out', 'bytes', 'last')}, cpu, float32, seed 5\n"


def test_flags_reach_the_sampler(run, folder):
    flags = "--temperature 0.7 --top_k 90 --top_p 0.95 --min_p 0.001 --repetition_penalty 1.3"
    out, _ = run("--prompt", "a", "--max_new_tokens", "20", "--seed", "5", *flags.split())
    row = expected(folder, "bytes", "a", 20, 5, Sampling(0.7, 90, 0.95, 0.001, 1.3))[0]
    assert out.startswith("a" + row.text + "\n")
    assert row != expected(folder, "bytes", "a", 20, 5)[0]
    greedy = [run("--prompt", "a", "--temperature", "0")[0].rsplit("\n", 2)[0] for _ in range(2)]
    assert greedy[0] == greedy[1]  # with two different seeds


def test_seed_is_drawn_printed_and_enough_to_repeat(run):
    first, err = run("--prompt", "a", "--max_new_tokens", "20")
    seed = re.search(r"seed (\d+)$", err).group(1)
    again, _ = run("--prompt", "a", "--max_new_tokens", "20", "--seed", seed)
    other, _ = run("--prompt", "a", "--max_new_tokens", "20")
    cut = [text.rsplit("\n", 2)[0] for text in (first, again, other)]
    assert cut[0] == cut[1] != cut[2]


def test_checkpoint_may_be_a_run_or_a_checkpoint(run, folder):
    texts = {
        run("--checkpoint", str(path), "--prompt", "ab", "--seed", "1")[0].rsplit("\n", 2)[0]
        for path in (folder / "out" / "char", folder / "out" / "char" / "last")
    }
    assert texts == {"ab" + expected(folder, "char", "ab", 62, 1)[0].text}


def test_default_length_is_what_block_size_leaves(run):
    out, _ = run("--prompt", "x" * 60, "--seed", "1")
    assert REPORT_LINE.match(out.splitlines()[-1]).group(1) == "4"


def test_samples_are_printed_one_after_another(run, folder):
    rows = expected(folder, "bytes", "ab", 12, 7, num_samples=3, stop=["\n", "q", "="])
    headers = [f"--- sample {i + 1} of 3, seed {7 + i} ---\n" for i in range(3)]
    stops = ["--stop", r"\n", "--stop", "q", "--stop", "="]
    out, _ = run("--prompt", "ab", "--max_new_tokens", "12", "--seed", "7", "--num_samples", "3", *stops)
    assert out.startswith("".join(f"{header}ab{row.text}\n" for header, row in zip(headers, rows, strict=True)))
    assert REPORT_LINE.match(out.splitlines()[-1])


def test_first_sample_is_live_and_the_others_wait(capsys):
    from engine import Piece

    printer = generate.InOrder("p", 0, 2)
    pieces = [
        Piece(0, "a", [1]),
        Piece(1, "x", [1]),
        Piece(1, "y", [1], "eot"),
        Piece(0, "b", [1]),
        Piece(0, "", [1], "eot"),
    ]
    seen = []
    capsys.readouterr()
    for piece in pieces:
        printer.show(piece)
        seen.append(capsys.readouterr().out)
    assert seen == ["a", "", "", "b", "\n--- sample 2 of 2, seed 1 ---\npxy"]


def test_json(run, folder):
    flags = ["--prompt", "ab", "--max_new_tokens", "12", "--seed", "7", "--num_samples", "2", "--json"]
    lines = run(*flags)[0].splitlines()
    assert len(lines) == 3
    rows = expected(folder, "bytes", "ab", 12, 7, num_samples=2)
    assert [json.loads(line) for line in lines[:2]] == [asdict(row) for row in rows]
    assert json.loads(lines[0]).keys() == {"prompt", "text", "token_ids", "finish_reason", "log_probabilities"}
    report = json.loads(lines[2])["report"]
    assert report["new_tokens"] == 24 and report["prompt_tokens"] == 2 and report["seed"] == 7
    assert report["tokens_per_s"] > 0 and report["kv_cache_bytes"] > 0


def test_json_through_the_shell(folder):
    """Nothing but JSON on stdout; the byte-for-byte prompt comes back."""
    process = start(folder, "--prompt", "é\\n", "--max_new_tokens", "5", "--seed", "1", "--json")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    objects = [json.loads(line) for line in out.decode().splitlines()]
    assert len(objects) == 2 and objects[0]["prompt"] == "é\\n" and len(objects[0]["token_ids"]) == 5
    assert "report" in objects[1] and b"seed" in err


def test_prompt_file_is_read_as_it_is(run, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes("a\r\n\N{SNOWMAN}\n".encode())
    out, _ = run("--prompt_file", str(path), "--json")
    assert json.loads(out.splitlines()[0])["prompt"] == "a\r\n\N{SNOWMAN}\n"


def test_interactive_answers_every_line(run, folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("ab\n{}\n\nlast".format("x" * 70).encode())))
    out, err = run("--interactive", "--max_new_tokens", "6", "--seed", "3", "--json")
    objects = [json.loads(line) for line in out.splitlines()]
    samples = [o for o in objects if "prompt" in o]
    assert [o["prompt"] for o in samples] == ["ab", "", "last"] and len(objects) == 6
    assert "error: a prompt of 70 tokens" in err  # and it went on
    for turn, sample in zip((0, 2, 3), samples, strict=True):
        assert sample == asdict(expected(folder, "bytes", sample["prompt"], 6, 3 + turn)[0])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--prompt a --prompt_file b", "not allowed with"),
        ("--prompt a --interactive", "not allowed with"),
        ("--promt a", "unrecognized arguments: --promt"),
        ("--prompt_file none.txt", "cannot read none.txt: No such file"),
        ("--prompt_file out", "cannot read out: "),
        ("--prompt_file latin.txt", "latin.txt is not UTF-8 text: byte 3 is 0xe9"),
        ("--max_new_tokens 0", "--max_new_tokens: '0' must be a whole number, at least 1"),
        ("--max_new_tokens -5", "--max_new_tokens: '-5' must be a whole number"),
        ("--max_new_tokens 1.5", "'1.5' must be a whole number"),
        ("--num_samples 0", "--num_samples: '0' must be"),
        ("--temperature -1", "temperature=-1.0 must be"),
        ("--temperature nan", "temperature=nan must be"),
        ("--temperature hot", "--temperature: invalid float value: 'hot'"),
        ("--top_k 0", "top_k=0 must be at least 1"),
        ("--top_k 2.5", "--top_k: invalid int value"),
        ("--top_p 0", "top_p=0.0 must be above 0"),
        ("--top_p 1.2", "top_p=1.2 must be above 0 and at most 1"),
        ("--min_p -0.1", "min_p=-0.1 must lie between"),
        ("--repetition_penalty 0", "repetition_penalty=0.0 must be above 0"),
        ("--seed x", "--seed: invalid int value"),
        (["--stop", ""], "the empty text would end everything"),
        ("--device tpu", "device=tpu is not available here"),
        ("--dtype float8", "--dtype: invalid choice: 'float8'"),
        ("--checkpoint nowhere", "nowhere does not exist"),
        ("--checkpoint empty", "empty is not a checkpoint or a run directory"),
        ("--checkpoint latin.txt", "latin.txt is not a checkpoint or a run directory"),
        ("--checkpoint out/char --prompt abz", "the character 'z' (U+007A) is not among"),
        (
            ["--prompt", "x" * 64],
            "a prompt of 64 tokens and max_new_tokens=1 make 65, past this model's block_size of 64",
        ),
        (
            ["--prompt", "xyz", "--max_new_tokens", "62"],
            "use max_new_tokens of at most 61 or a prompt of at most 2 tokens",
        ),
    ],
    ids=str,
)
def test_bad_input_is_one_sentence(argv, message, run, folder, capsys):
    (folder / "latin.txt").write_bytes("caf\xe9 au".encode("latin-1"))
    (folder / "empty").mkdir(exist_ok=True)
    with pytest.raises(UserError) as error:
        run(*(argv.split() if isinstance(argv, str) else argv))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert capsys.readouterr().out == ""


def test_no_run_yet_names_the_train_command(tmp_path):
    process = start(tmp_path, "--prompt", "a")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == b""
    assert err.decode() == ("error: there is no run under out/ yet: train one with `python train.py config/small.py`\n")


def test_escapes_of_stop_strings():
    assert generate.unescaped(r"a\n\t\r\\n") == "a\n\t\r\\n"
    assert generate.unescaped("\\d\N{SNOWMAN}é\\") == "\\d\N{SNOWMAN}é\\"  # nothing to understand


def test_help_names_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as stop:
        generate.main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    flags = (
        "checkpoint prompt prompt_file interactive max_new_tokens temperature top_k top_p min_p repetition_penalty "
        "seed stop num_samples json device dtype"
    )
    for flag in flags.split():
        assert f"--{flag}" in out
    assert "default: 0.8" in out and "default: 200" in out and "examples:" in out


def read_until(stream, wanted, limit=1_000_000):
    """Bytes of an unbuffered pipe up to a match."""
    data = b""
    while not re.search(wanted, data, re.MULTILINE):
        assert select.select([stream], [], [], 60)[0], data
        byte = os.read(stream.fileno(), 1)
        assert byte and len(data) < limit, data
        data += byte
    return data


LONG = ["--checkpoint", "out/long", "--max_new_tokens", "8000", "--temperature", "0"]  # the last character, repeated
REPORT_BYTES = rb"^\d+ new tokens in .* tokens/s \(.*\)\n"


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_stops_the_text_with_its_report(folder):
    process = start(folder, *LONG, "--prompt", "begin:")
    read_until(process.stdout, rb"begin:(.|\n){20}")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    count = re.search(REPORT_BYTES, out, re.MULTILINE).group().split()[0]
    assert process.returncode == 130 and 20 <= int(count) < 8000
    assert b"Traceback" not in err and err.endswith(b"interrupted\n")


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_interactive_ctrl_c_stops_a_turn_and_a_second_one_leaves(folder):
    process = start(folder, *LONG, "--interactive")
    for word in (b"one:", b"two:"):
        process.stdin.write(word + b"\n")
        process.stdin.flush()
        read_until(process.stdout, word + rb"(.|\n){20}")
        process.send_signal(signal.SIGINT)
        read_until(process.stdout, REPORT_BYTES)
        read_until(process.stderr, rb"leaves\)\n")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in err


@pytest.mark.skipif(os.name == "nt", reason="pipes")
def test_a_reader_that_leaves_is_no_error(folder):
    process = start(folder, *LONG, "--prompt", "a\nb\nc\n")
    read_until(process.stdout, rb"a\n")
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert err.count(b"\n") == 1 and err.startswith(b"checkpoint ")


@pytest.mark.skipif(os.name == "nt", reason="argument bytes")
def test_bytes_that_are_no_text_do_no_harm(folder):
    """A terminal in another encoding: bytes of the prompt that are not UTF-8 become U+FFFD, never a traceback."""
    process = start(folder, b"--prompt", b"caf\xe9", "--max_new_tokens", "3")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and b"Traceback" not in err and out.startswith(b"caf")


def test_a_closed_input_has_no_lines(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)  # what Python makes of `<&-`
    assert run("--interactive")[0] == ""


def test_weights_cache_and_guesses_may_be_chosen(run, folder):
    """Speculation and a draft model leave the text as it is; eight bits leave the program running."""
    flags = ["--prompt", "abab", "--max_new_tokens", "20", "--seed", "3", "--json", "--logprobs"]
    plain = json.loads(run(*flags, "--speculate", "0")[0].splitlines()[0])
    draft = str(folder / "out" / "long")
    for options in ([], ["--speculate", "4"], ["--draft", draft], ["--draft", draft, "--speculate", "2"]):
        lines = run(*flags, *options)[0].splitlines()
        assert json.loads(lines[0]) == plain and len(plain["log_probabilities"]) == 20
        assert json.loads(lines[1])["report"]["speculation"]["tokens_per_pass"] >= 1
    out, err = run(*flags, "--quant", "int8", "--kv", "int8")
    assert len(json.loads(out.splitlines()[0])["token_ids"]) == 20 and "float32 with int8 weights, seed 3" in err
    report = json.loads(out.splitlines()[1])["report"]
    assert report["kv_cache_bytes"] == 128 * 1 * (8 + 4) * 2


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--speculate", "17"], "'17' must be auto or a whole number from 0 to 16"),
        (["--speculate", "-1"], "must be auto or a whole number"),
        (["--speculate", "²"], "'²' must be auto or a whole number"),
        (["--max_new_tokens", "²"], "'²' must be a whole number"),
        (["--draft", "out/char"], "draft model's tokenizer (char) is not the model's (bytes)"),
        (["--draft", "out/none"], "does not exist"),
        (["--quant", "int3"], "invalid choice: 'int3'"),
        (["--quant", "int4"], "--quant int4"),
        (["--logprobs"], "add --json"),
        (["--draft", "out/long", "--speculate", "0"], "--speculate 0 is not to guess"),
        (["--num_samples", "1" + "0" * 20], "a KV cache of 1"),
    ],
    ids=str,
)
def test_impossible_choices_are_refused(run, flags, says):
    with pytest.raises(UserError) as error:
        run("--prompt", "a", *flags)
    assert says in str(error.value) and "\n" not in str(error.value)
