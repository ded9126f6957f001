"""Models of other projects into checkpoints of this one, and back: the command line of `formats`.

For example: `python convert.py hf Qwen/Qwen3-0.6B out/qwen3`, then `python generate.py --checkpoint out/qwen3`.
"""

import argparse
import sys

import torch

from data import UserError, exit_cleanly

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "keep": None}

EXAMPLES = """examples:
  python convert.py hf Qwen/Qwen3-0.6B out/qwen3           a model of the hub, downloaded by its own library
  python convert.py hf path/to/folder out/llama            a folder with config.json, safetensors and a tokenizer
  python convert.py gguf model.Q4_K_M.gguf out/model       llama.cpp's format, dequantised
  python convert.py llama2c stories15M.bin --tokenizer tokenizer.bin out/stories
  python convert.py to-hf out/small my-model               a run of train.py for transformers, vLLM, llama.cpp ...

What is made is a checkpoint: `generate.py --checkpoint` and `train.py --init_from` take it."""


class Parser(argparse.ArgumentParser):
    """argparse, with errors in one sentence."""

    def error(self, message):
        raise UserError(f"{message} (python convert.py --help explains)")


def build_parser() -> Parser:
    parser = Parser(
        description="Read models of other projects, and write ours for them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name, help, source, source_help):
        sub = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        sub.add_argument("source", metavar=source, help=source_help)
        sub.add_argument("out", metavar="OUT", help="the directory to make; it must not exist")
        sub.add_argument(
            "--dtype", choices=DTYPES, default="keep", help="what the weights are stored as (default: %(default)s)"
        )
        return sub

    command("hf", "read a Hugging Face model", "PATH_OR_NAME", "its folder, or its name on the hub (owner/model)")
    command("gguf", "read a GGUF file (llama.cpp, Ollama)", "FILE", "the file")
    llama2c = command("llama2c", "read a checkpoint of llama2.c", "FILE", "its .bin file, in the legacy layout")
    llama2c.add_argument("--tokenizer", metavar="FILE", required=True, help="its tokenizer's .bin file")
    command("to-hf", "write a model for Hugging Face transformers", "RUN", "a run or a checkpoint in it")
    return parser


def main(argv=None):
    args = build_parser().parse_args(argv)
    dtype = DTYPES[args.dtype]
    if args.command == "to-hf":
        from formats.huggingface import convert_to

        note = convert_to(args.source, args.out, dtype)
        print(f"{args.out}: load it with transformers.AutoModelForCausalLM.from_pretrained({args.out!r})")
        if note:
            print(f"note: {note}", file=sys.stderr)
        return
    if args.command == "hf":
        from formats.huggingface import convert_from

        config = convert_from(args.source, args.out, dtype)
    elif args.command == "gguf":
        from formats import gguf

        config = gguf.convert(args.source, args.out, dtype)
    else:
        from formats import llama2c

        config = llama2c.convert(args.source, args.tokenizer, args.out, dtype)
    print(f"{args.out}: {config.n_params():,} parameters, up to {config.block_size} tokens")


if __name__ == "__main__":
    with exit_cleanly():
        main()
