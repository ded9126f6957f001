"""What do models cost, and what do they buy?

python compare.py eval CHECKPOINT [CHECKPOINT ...] --text FILE    their losses on a text, in one table
"""

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import checkpoint
from config import CHOICES, pick_device, pick_dtype
from data import UserError, exit_cleanly
from evaluation import text_loss

LONGEST_WINDOW = 2048  # by default: longer ones take more memory, and rarely change the loss


class Parser(argparse.ArgumentParser):
    """argparse, with errors in one sentence."""

    def error(self, message):
        raise UserError(f"{message} ({self.prog} --help explains)")


def build_parser() -> Parser:
    parser = Parser(prog="python compare.py", description="Compare models.", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    add_eval(commands)
    return parser


def add_eval(commands):
    parser = commands.add_parser(
        "eval",
        help="losses on a text",
        description="Nats per token, perplexity and bits per byte of models on a text. Bits per byte compare models "
        "with different tokenizers; the other two do not.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run_eval)
    add = parser.add_argument
    add("checkpoints", nargs="+", metavar="CHECKPOINT", help="a run (its best checkpoint) or a checkpoint")
    add("--text", required=True, metavar="FILE", help="UTF-8, all of it is predicted")
    number = dict(type=positive, metavar="N")
    window = f"tokens seen at once (default: the smallest block_size of the models, at most {LONGEST_WINDOW})"
    add("--window", help=window, **number)
    add("--stride", help="tokens between windows; window - stride is the least context (default: window / 2)", **number)
    add("--batch_size", default=8, help="windows in one forward pass (default: %(default)s)", **number)
    add("--json", action="store_true", help="one JSON object a checkpoint, nothing else")
    add("--device", default="auto", help="cuda, mps or cpu (default: the first that is there)")
    add("--dtype", choices=CHOICES["dtype"], default="auto", help="auto: bfloat16 on GPUs that have it, else float32")


def positive(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)


def read_text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}") from None


def run_eval(args):
    """Print the losses of the checkpoints, which are loaded one after the other."""
    text = read_text(args.text)
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device)
    paths = [checkpoint.resolve(path) for path in args.checkpoints]
    limits = [checkpoint.model_config(checkpoint.load_state(path)).block_size for path in paths]
    window = args.window or min(*limits, LONGEST_WINDOW)
    stride = args.stride or max(1, window // 2)
    for path, limit in zip(paths, limits, strict=True):
        if window > limit:
            raise UserError(f"window={window} is past the block_size of {path}, {limit}: use --window {min(limits)}")
    rows = []
    for path in paths:
        model, tokenizer = checkpoint.load_model(path, device, dtype), checkpoint.load_tokenizer(path)
        loss = text_loss(model, tokenizer, text, window, stride, args.batch_size, progress=str(path))
        if not math.isfinite(loss.nats_per_token):
            raise UserError(f"the loss of {path} is {loss.nats_per_token}: its weights are damaged")
        rows.append({"checkpoint": str(path), **asdict(loss), "perplexity": loss.perplexity})
        del model  # its memory is the next one's
        if tokenizer.decode(tokenizer.encode(text)) != text:
            print(f"note: the tokenizer of {path} loses some of this text, so its losses are too low", file=sys.stderr)
        if args.json:
            print(json.dumps({**rows[-1], "window": window, "stride": stride, "dtype": str(dtype)[6:]}), flush=True)
    if not args.json:
        print(
            f"{args.text}: {rows[0]['n_bytes']:,} bytes; windows of {window} tokens, {stride} apart; {str(dtype)[6:]}"
        )
        print(table(rows))


def table(rows: list[dict]) -> str:
    """The losses, one checkpoint a line."""
    head = ["checkpoint", "tokens", "nats/token", "perplexity", "bits/byte"]
    cells = [
        [
            row["checkpoint"],
            f"{row['n_tokens']:,}",
            f"{row['nats_per_token']:.4f}",
            f"{row['perplexity']:.4g}",
            f"{row['bits_per_byte']:.4f}",
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, *cells]
    )


def main(argv=None):
    args = build_parser().parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    with exit_cleanly():
        main()
