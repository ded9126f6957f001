"""Generate text from a trained model: the command line of `engine.py`.

For example: `python generate.py --prompt "def fibonacci("`.
"""

import argparse
import contextlib
import json
import re
import secrets
import sys
from dataclasses import asdict
from pathlib import Path

import checkpoint
from config import CHOICES, pick_device, pick_dtype
from data import UserError, exit_cleanly
from data.chat import prompt_ids
from decoding import KV
from engine import Engine, Sampling
from rounds import MAX_DRAFTS

NEW_TOKENS, CHAT_TOKENS = 200, 1000  # an answer ends by itself, and a text seldom does
ESCAPES = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\\": "\\"}  # in --stop

EXAMPLES = """examples:
  python generate.py                                            the newest run under out/, from nothing
  python generate.py --prompt "def main(" --temperature 0       the likeliest continuation
  python generate.py --prompt_file start.txt --num_samples 3 --top_p 0.95 --seed 7
  python generate.py --prompt "import " --stop "\\n\\n" --json
  python generate.py --interactive --checkpoint out/small/last
  python generate.py --checkpoint out/big --quant int8 --draft out/small/last --prompt "import "
  python generate.py --chat --checkpoint out/smollm2            a conversation; with --prompt, one answer

Without --json, stdout has the prompt, the text as it comes and a last line with tokens/s; the rest is on stderr.
The same seed, prompt and options give the same text. Sample i of a run is what --seed SEED+i gives alone."""


class Parser(argparse.ArgumentParser):
    """argparse, with errors in one sentence."""

    def error(self, message):
        raise UserError(f"{message} (python generate.py --help explains)")


def build_parser() -> Parser:
    parser = Parser(
        description="Continue a text with a trained model.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--checkpoint", metavar="DIR", help="a run or a checkpoint in it (default: the newest run under out/)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to continue (default: none, a new document)")
    source.add_argument("--prompt_file", metavar="FILE", help="read it from a UTF-8 file, as it is")
    source.add_argument(
        "--interactive",
        action="store_true",
        help="each line typed is a prompt of its own (the model does not see earlier ones), until Ctrl-D; Ctrl-C stops "
        "a text, a second one leaves",
    )
    chat = "answer by the checkpoint's chat template; without --prompt, each line typed is the next turn until Ctrl-D"
    add("--chat", action="store_true", help=chat)
    add("--system", metavar="TEXT", help="with --chat: what the model is told first (default: the template's own)")
    longest = f"longest continuation (default: {NEW_TOKENS}, with --chat {CHAT_TOKENS}, or what block_size leaves)"
    add("--max_new_tokens", type=positive, metavar="N", help=longest)
    number = dict(type=float, metavar="X")
    add("--temperature", default=Sampling.temperature, help="0: the likeliest token (default: %(default)s)", **number)
    add("--top_k", type=int, metavar="K", help="draw from the K likeliest tokens (default: all)")
    add("--top_p", help="from the likeliest that reach probability X together (default: all)", **number)
    add("--min_p", help="from those at least X times as likely as the likeliest (default: all)", **number)
    penalty = "above 1: tokens already in the text become less likely (default: %(default)s)"
    add("--repetition_penalty", default=Sampling.repetition_penalty, help=penalty, **number)
    add("--seed", type=int, help="of the noise (default: drawn, and printed)")
    stop = r"end before this text; \n, \r, \t and \\ are understood; may be given several times"
    add("--stop", type=unescaped, action="append", default=[], metavar="TEXT", help=stop)
    add("--num_samples", type=positive, default=1, metavar="N", help="continuations (default: %(default)s)")
    add("--json", action="store_true", help="one JSON object a sample, then one with the report, nothing else")
    scaling = "reach past the positions of the training, and past block_size: linear:2, yarn:4 ... (rope.py has all)"
    add("--rope_scaling", metavar="SPEC", help=scaling)
    quant = "weights in 8 or 4 bits: less memory; on a GPU, int8 is also faster for large models (default: as stored)"
    add("--quant", choices=["int8", "int4"], help=quant)
    add("--kv", choices=KV, default="auto", help="the cache in 8 bits, or in the dtype of activations (auto)")
    guess = f"tokens to guess ahead and check at once, auto or 0 to {MAX_DRAFTS}; the text is the same (default: auto)"
    add("--speculate", type=speculated, default="auto", metavar="K", help=guess)
    draft = "a smaller checkpoint with the same tokenizer that guesses (default: the text repeats itself)"
    add("--draft", metavar="DIR", help=draft)
    add("--logprobs", action="store_true", help="with --json: the log-probability of each token, under the model alone")
    add("--device", default="auto", help="cuda, mps or cpu (default: the first that is there)")
    add("--dtype", choices=CHOICES["dtype"], default="auto", help="auto: bfloat16 on GPUs that have it, else float32")
    return parser


def positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)


def speculated(text: str) -> str | int:
    if text != "auto" and (not text.strip().isdecimal() or int(text) > MAX_DRAFTS):
        raise argparse.ArgumentTypeError(f"{text!r} must be auto or a whole number from 0 to {MAX_DRAFTS}")
    return text if text == "auto" else int(text)


def unescaped(text: str) -> str:
    """The text that a shell could not pass on easily; other backslashes stand for themselves."""
    if not text:
        raise argparse.ArgumentTypeError("the empty text would end everything before it begins")
    return re.sub(r"\\[nrt\\]", lambda match: ESCAPES[match[0]], text)


def read_prompt(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}") from None


def load(args) -> Engine:
    """The engine of the checkpoint asked for, announced on stderr."""
    run = checkpoint.newest_run() if args.checkpoint is None else args.checkpoint
    if run is None:
        raise UserError("there is no run under out/ yet: train one with `python train.py config/small.py`")
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device)
    path = checkpoint.resolve(run)
    model = checkpoint.load_model(path, device, dtype, rope_scaling=args.rope_scaling)
    draft = None
    if args.draft is not None:
        draft = checkpoint.load_model(args.draft, device, dtype), checkpoint.load_tokenizer(args.draft)
    options = dict(quant=args.quant, kv=args.kv, draft=draft, speculate=args.speculate)
    engine = Engine(model, checkpoint.load_tokenizer(path), release=True, **options)
    weights = "" if args.quant is None else f" with {args.quant} weights"
    print(
        f"checkpoint {path}, {device}, {str(dtype).removeprefix('torch.')}{weights}, seed {args.seed}", file=sys.stderr
    )
    return engine


class InOrder:
    """Prints rows one after another although they are generated side by side: the first unfinished one live, those
    behind it when their turn comes."""

    def __init__(self, prompt: str, seed: int, rows: int):
        self.prompt, self.seed, self.rows = prompt, seed, rows
        self.current, self.waiting, self.ended = 0, [""] * rows, [False] * rows
        self.begin()

    def begin(self):
        if self.rows > 1:
            print(f"--- sample {self.current + 1} of {self.rows}, seed {self.seed + self.current} ---")
        print(self.prompt, end="", flush=True)

    def show(self, piece):
        self.waiting[piece.row] += piece.text
        self.ended[piece.row] = piece.finish_reason is not None
        while True:
            print(self.waiting[self.current], end="", flush=True)
            self.waiting[self.current] = ""
            if not self.ended[self.current] or self.current + 1 == self.rows:
                return
            print()
            self.current += 1
            self.begin()


def answer(engine: Engine, prompt: str | list[int], args, sampling: Sampling, seed: int) -> str:
    """Generate and print the samples of one prompt, then the report, also when interrupted. Returns the first text.

    A prompt of ids is the opening of a turn: it is not printed.
    """
    longest = CHAT_TOKENS if args.chat else NEW_TOKENS
    new_tokens = args.max_new_tokens or min(longest, max(1, engine.room(prompt)))
    options = dict(seed=seed, stop=args.stop, num_samples=args.num_samples, logprobs=args.logprobs, reuse=args.chat)
    if args.json:
        completions = engine.complete([prompt], sampling, new_tokens, **options)
        for completion in completions:
            print(json.dumps(asdict(completion)))
        print(json.dumps({"report": {**asdict(engine.report), "seed": seed}}), flush=True)
        return completions[0].text
    pieces = engine.generate([prompt], sampling, new_tokens, **options)
    printer = InOrder(prompt if isinstance(prompt, str) else "", seed, args.num_samples)
    text = ""
    try:
        for piece in pieces:
            printer.show(piece)
            text += piece.text if piece.row == 0 else ""
    finally:
        pieces.close()
        print(f"\n{engine.report or ''}", flush=True)
    return text


class Chat:
    """A conversation: what was said so far, and the answer to what is said next."""

    def __init__(self, engine: Engine, args, sampling: Sampling):
        self.engine, self.args, self.sampling = engine, args, sampling
        self.messages = [] if args.system is None else [{"role": "system", "content": args.system}]
        prompt_ids(engine.tokenizer, [*self.messages, {"role": "user", "content": "Hello"}])  # a bad template fails now

    def reply(self, text: str, seed: int):
        """Answer one turn. A turn that was refused or interrupted leaves the conversation as it was."""
        asked = [*self.messages, {"role": "user", "content": text}]
        said = answer(self.engine, prompt_ids(self.engine.tokenizer, asked), self.args, self.sampling, seed)
        self.messages = [*asked, {"role": "assistant", "content": said}]


def converse(reply, args):
    """`reply(line, seed)` to line after line, each with a seed of its own, until the input ends."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys in input())
    if sys.stdin is None:  # started with it closed, `<&-`
        return
    sys.stdin.reconfigure(errors="replace")
    mark = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    seed = args.seed
    while True:
        try:
            prompt = input(mark)
        except EOFError:
            return
        try:
            reply(prompt, seed)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("stopped (Ctrl-C once more leaves)", file=sys.stderr)
        seed += args.num_samples


def main(argv=None):
    args = build_parser().parse_args(argv)
    try:
        sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty)
    except ValueError as error:
        raise UserError(str(error)) from None
    if args.seed is None:
        args.seed = secrets.randbelow(2**31)
    prompt = read_prompt(args.prompt_file) if args.prompt_file is not None else args.prompt
    converses = args.interactive or (args.chat and prompt is None)
    if args.system is not None and not args.chat:
        raise UserError("--system is what a chat begins with: add --chat")
    if args.chat and converses and args.num_samples > 1:
        raise UserError("a conversation goes on from one answer: leave --num_samples out, or give one --prompt")
    if args.draft is not None and args.speculate == 0:
        raise UserError("--draft guesses ahead, and --speculate 0 is not to guess: leave one of them out")
    if args.logprobs and not args.json:
        raise UserError("--logprobs has no place in plain text: add --json")
    engine = load(args)
    if args.chat:
        reply = Chat(engine, args, sampling).reply
    else:

        def reply(text, seed):
            answer(engine, text, args, sampling, seed)

    if converses:
        converse(reply, args)
    else:
        reply(prompt or "", args.seed)


if __name__ == "__main__":
    with exit_cleanly():
        main()
