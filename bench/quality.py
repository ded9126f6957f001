"""What quantised weights and an int8 cache do to a model's predictions, read through the engine's own decoding step.

    python -m bench.quality out/small --text book.txt

The text goes through `Decoder.step` STRIDE tokens at a time, each seeing the whole cache before it: exactly the
products, the attention and the cache that generation uses. The last line printed is JSON.
"""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

import checkpoint
from config import pick_device, pick_dtype
from data import UserError, exit_cleanly
from decoding import Decoder, whole_chunks

STRIDE = 64
KINDS = ((None, "auto"), ("int8", "auto"), ("int4", "auto"), (None, "int8"), ("int8", "int8"))


@torch.no_grad()
def nats_per_token(decoder: Decoder, ids: list[int], vocab_size: int, kv: str) -> float:
    """Mean -log p of ids[1:], int ids of one text, each given all that stands before it."""
    cache, device = decoder.cache(1, whole_chunks(len(ids)), kv), decoder.device
    tokens, total = torch.tensor(ids, device=device), 0.0
    for start in tqdm(range(0, len(ids) - 1, STRIDE), leave=False):
        chunk = tokens[start : start + STRIDE]
        place = torch.tensor([start], dtype=torch.int32, device=device)
        logits = decoder.step(decoder.embed[chunk], place, place + len(chunk), cache)[:, :vocab_size]  # [T, V]
        targets = tokens[start + 1 : start + 1 + len(chunk)]
        total += F.cross_entropy(logits[: len(targets)].float(), targets, reduction="sum").item()
    return total / (len(ids) - 1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a run or a checkpoint in it")
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text to predict")
    parser.add_argument("--tokens", type=int, default=2048, help="of it, from the start (default: %(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args(argv)
    device = pick_device(args.device)
    path, dtype = checkpoint.resolve(args.checkpoint), pick_dtype(args.dtype, device)
    model, tokenizer = checkpoint.load_model(path, device, dtype), checkpoint.load_tokenizer(path)
    try:
        text = Path(args.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {args.text}: {error}") from None
    ids = tokenizer.encode_prompt(text)[: min(args.tokens, model.config.block_size)]
    if len(ids) < 2:
        raise UserError(f"{args.text} is too short: two tokens are needed")

    print(f"{path} on {device}, {str(dtype).removeprefix('torch.')}, {len(ids) - 1} tokens of {args.text}")
    print("| weights | cache | nats per token | perplexity | change |\n|---|---|---|---|---|")
    rows = []
    for quant, kv in KINDS:
        nats = nats_per_token(Decoder.of(model, quant), ids, tokenizer.vocab_size, kv)
        rows.append(dict(weights=quant, cache=kv, nats=nats))
        change = math.exp(nats - rows[0]["nats"]) - 1
        names = (quant or str(dtype).removeprefix("torch."), "as activations" if kv == "auto" else kv)
        print(f"| {names[0]} | {names[1]} | {nats:.4f} | {math.exp(nats):.2f} | {100 * change:+.2f}% |", flush=True)
    print(json.dumps(dict(checkpoint=str(path), device=str(device), rows=rows)))


if __name__ == "__main__":
    with exit_cleanly():
        main()
