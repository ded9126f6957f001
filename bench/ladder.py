"""What each idea of this repository adds to the speed of generation: one model and prompt, one step after another.

    python -m bench.ladder --target out/code_300m --draft out/code_20m
    python -m bench.ladder --model 1b --prompt 8k --quant int8             random weights, without the last step

    naive    multi-head attention, softmax(Q K^T) V written out over the whole cache, PyTorch operation by operation
    flash    the attention of kernels/flash_decode.py, which reads the cache once and only as far as it is filled
    GQA      fewer key/value heads: less cache to read, smaller projections
    graph    weights packed, norms and activations inside the products, a whole round one CUDA graph (decoding.py)
    int8     half the bytes of every weight
    drafts   several tokens a pass (speculation.py): the text of the step before

Up to GQA the steps run `Transformer.decode`, the definition that the fast path is tested against; the first two have
random weights in the same shape but with a key/value head to each query head. tokens/s are new tokens by the wall time
of the whole generation, prompt included, at temperature 0: the best of 2 runs after 1. The last line printed is JSON.
"""

import argparse
import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace

import torch

import checkpoint
import model as model_module
from bench.attention import count
from bench.models import Ids, config_of, known_model, printed_at_the_end, random_ids, wall_time
from config import pick_device, pick_dtype
from data import UserError, exit_cleanly
from decoding import Decoder
from engine import Engine
from model import KVCache, ModelConfig, Transformer
from sampling import Sampling

GREEDY = Sampling(0)
NEW, CALLS = 200, 2
STEPS = (
    "naive MHA",
    "+ flash attention",
    "+ GQA",
    "+ fused kernels in a captured graph",
    "+ quantised weights",
    "+ drafts",
)


def naive_decode(q, k_cache, v_cache, cache_len, window=None):
    """Attention over a cache as a textbook has it: q [B, H, T, D], caches [B, G, S, D], scores [B, H, T, S] in full."""
    group, tokens, slots = q.shape[1] // k_cache.shape[1], q.shape[2], k_cache.shape[2]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k_cache, v_cache))
    key = torch.arange(slots, device=q.device)
    position = cache_len[:, None] - tokens + torch.arange(tokens, device=q.device)  # [B, T]
    hidden = key > position[..., None]  # [B, T, S]
    if window is not None:
        hidden |= key <= position[..., None] - window
    scores = (q @ k.mT).float() / math.sqrt(q.shape[-1])
    return scores.masked_fill(hidden[:, None], -math.inf).softmax(-1).to(q.dtype) @ v


@contextmanager
def attention_in_decode(function: Callable):
    """`Transformer.decode` with another attention."""
    ours, model_module.flash_decode = model_module.flash_decode, function
    try:
        yield
    finally:
        model_module.flash_decode = ours


@torch.no_grad()
def eager(model: Transformer, prompt: list[int], new: int) -> list[int]:
    """The likeliest tokens after a prompt, each read by the host before the next is computed."""
    device = model.embed.weight.device
    cache = KVCache(model.config, 1, len(prompt) + new, device, model.embed.weight.dtype)
    tokens, start, ids = torch.tensor([prompt], device=device), 0, []
    for _ in range(new):
        positions = torch.arange(start, start + tokens.shape[1], device=device)[None]
        logits = model.decode(tokens, positions, cache, last_only=True)[:, -1]  # [1, V]
        start += tokens.shape[1]
        tokens = logits.argmax(-1, keepdim=True)
        ids.append(tokens.item())
    return ids


def random_model(config: ModelConfig, device: torch.device) -> Transformer:
    with torch.device(device):
        return Transformer(config).to(pick_dtype("auto", device)).init_weights().requires_grad_(False)


class Ladder:
    """Runs the steps, each printed when it is measured."""

    def __init__(self, prompt: list[int], new: int, device: torch.device):
        self.prompt, self.new, self.device, self.rows = prompt, new, device, []

    def step(self, name: str, generate: Callable[[], list[int]]) -> list[int]:
        """Time `generate`, which returns the new ids; those of its last call are returned."""
        ids = []

        def call():
            ids[:] = generate()

        best = min([wall_time(call, self.device) for _ in range(1 + CALLS)][1:])
        speed = len(ids) / best
        first, last = (self.rows[0], self.rows[-1]) if self.rows else (None, None)
        row = dict(step=name, tokens_per_s=speed, tokens=len(ids))
        row |= dict(factor=speed / last["tokens_per_s"] if last else 1.0)
        row |= dict(total=speed / first["tokens_per_s"] if first else 1.0)
        print(f"| {name} | {speed:,.1f} | {row['factor']:.2f} | {row['total']:.1f} |", flush=True)
        self.rows.append(row)
        return list(ids)

    def eager_step(self, name: str, model: Transformer) -> list[int]:
        return self.step(name, lambda: eager(model, self.prompt, self.new))

    def engine_step(self, name: str, engine: Engine) -> list[int]:
        return self.step(name, lambda: engine.complete([self.prompt], GREEDY, self.new)[0].token_ids)


def climb(
    ladder: Ladder, config: ModelConfig, load: Callable[[], Transformer], tokenizer, quant: str, draft: tuple | None
) -> None:
    """Measure every step. load: gives the model anew; draft: of `Engine`, or None to leave the last step out."""
    twin = random_model(replace(config, n_kv_head=config.n_head), ladder.device)
    with attention_in_decode(naive_decode):
        ladder.eager_step(STEPS[0], twin)
    ladder.eager_step(STEPS[1], twin)
    del twin
    model = load()
    ladder.eager_step(STEPS[2], model)
    decoder = Decoder.of(model, release=True)
    ladder.engine_step(STEPS[3], Engine(decoder, tokenizer, speculate=0))
    del model, decoder
    quantised = Decoder.of(load(), quant, release=True)
    plain = ladder.engine_step(STEPS[4], Engine(quantised, tokenizer, speculate=0))
    if draft:
        engine = Engine(quantised, tokenizer, draft=draft, speculate=4)
        if ladder.engine_step(STEPS[5], engine) != plain:
            raise SystemExit("the text with drafts is not the text without")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.ladder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", metavar="DIR", help="a run or checkpoint")
    parser.add_argument("--draft", metavar="DIR", help="a smaller one with the same tokenizer, for the last step")
    parser.add_argument(
        "--model", type=known_model, help="instead of a target: random weights in the shape of a preset"
    )
    parser.add_argument("--prompt", type=count, default=512, help="tokens (default: %(default)s)")
    parser.add_argument("--prompt_file", help="its text in place of random ids, for a target")
    parser.add_argument("--new", type=count, default=NEW, help="new tokens (default: %(default)s)")
    parser.add_argument("--quant", choices=("int8", "int4"), default="int8")
    parser.add_argument("--device", default="auto", help="cuda or cpu (default: %(default)s)")
    args = parser.parse_args(argv)
    if (args.target is None) == (args.model is None) or (args.draft and not args.target):
        raise UserError("give either --target DIR, with or without --draft DIR, or --model PRESET")
    device, draft = pick_device(args.device), None
    dtype = pick_dtype("auto", device)
    if args.target:
        tokenizer = checkpoint.load_tokenizer(args.target)
        config = checkpoint.model_config(checkpoint.load_state(checkpoint.resolve(args.target)))
    else:
        config = config_of(args.model)
        tokenizer = Ids(config.vocab_size)
    if config.block_size <= args.new:
        raise UserError(
            f"the model's block_size of {config.block_size} has no room for {args.new} new tokens: use less"
        )
    if args.draft:
        small = Decoder.of(checkpoint.load_model(args.draft, device, dtype), args.quant, release=True)
        draft = (small, checkpoint.load_tokenizer(args.draft))

    def load():
        return checkpoint.load_model(args.target, device, dtype) if args.target else random_model(config, device)

    if args.prompt_file:
        with open(args.prompt_file, encoding="utf-8") as file:
            prompt = tokenizer.encode_prompt(file.read().rstrip("\n"))
    else:
        prompt = random_ids(config, 1, args.prompt)[0]
    prompt = prompt[-(config.block_size - args.new) :]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}: prompt of {len(prompt)}, {args.new} new tokens, {args.quant}")
    print("| step | tokens/s | factor | in all |\n|---|---|---|---|", flush=True)
    ladder = Ladder(prompt, args.new, device)
    with printed_at_the_end(dict(device=name, prompt=len(prompt), new=args.new, quant=args.quant, rows=ladder.rows)):
        climb(ladder, config, load, tokenizer, args.quant, draft)


if __name__ == "__main__":
    with exit_cleanly():
        main()
