"""Training steps of a preset with each attention implementation, against the length of the sequence.

    python -m bench.training config/gpt2_124m.py
    python -m bench.training config/gpt2_124m.py --attention triton torch --lengths 1k 8k --steps 30

A step is forward, backward, clipping and the optimizer's update, compiled as train.py compiles it, on random tokens
and the same number of tokens at every length. Each case runs in a process of its own, so that one that runs out of
memory is a cell of the table. "layer MB" is what one attention layer keeps for its backward pass: q, k and v, its
output, and whatever else the implementation saves. The last line printed is JSON.
"""

import argparse
import json
import statistics
import sys
import time

import torch

from bench.attention import count, in_own_process
from config import build, read_preset
from data import UserError, exit_cleanly
from kernels import flash_attention
from model import Transformer
from optim import make_optimizers, set_learning_rate

DTYPE = torch.bfloat16
WARM_UP = 3


def kept_by_a_layer(config, attention: str, batch: int, tokens: int) -> int:
    """Bytes that stay allocated between the forward and the backward pass of one attention call, its inputs and its
    output included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    heads = (config.n_head, config.n_kv_head, config.n_kv_head)
    q, k, v = (
        torch.randn(batch, h, tokens, config.head_dim, device="cuda", dtype=DTYPE, requires_grad=True) for h in heads
    )
    out = flash_attention(q, k, v, backend=attention)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    assert out.requires_grad  # or nothing would have been kept
    return kept


def measure(settings: dict, attention: str, tokens: int, tokens_per_step: int, steps: int) -> dict:
    """Milliseconds of each step, peak memory of a step and of the attention layer, or {"error": ...}."""
    batch = max(1, tokens_per_step // tokens)
    config = build(settings | {"block_size": tokens})
    try:
        kept = kept_by_a_layer(config.model, attention, batch, tokens)
        with torch.device("cuda"):
            model = Transformer(config.model, attention=attention, dtype=DTYPE).init_weights()
        loss_of = torch.compile(model, fullgraph=True, dynamic=False)
        optimizers = make_optimizers(model, config)
        set_learning_rate(optimizers, 1e-4)
        row = torch.randint(config.model.vocab_size, (batch, tokens + 1), device="cuda")
        times = []
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            began = time.perf_counter()
            loss_of(row[:, :-1], row[:, 1:]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
    except torch.cuda.OutOfMemoryError:
        return {"error": "out of memory"}
    return dict(ms=times[WARM_UP:], peak_bytes=torch.cuda.max_memory_allocated(), layer_bytes=kept, batch=batch)


def cells_of(result: dict, tokens: int) -> list[str]:
    if "error" in result:
        return [result["error"], "-", "-", "-"]
    ms = statistics.median(result["ms"])
    speed = result["batch"] * tokens / ms * 1e3
    return [f"{ms:.1f}", f"{speed:,.0f}", f"{result['peak_bytes'] / 2**30:.1f}", f"{result['layer_bytes'] / 2**20:.0f}"]


def ratios(results: dict, other: str) -> list[str]:
    """What the first implementation saves against `other`: time and the layer's memory."""
    ours, theirs = results[next(iter(results))], results[other]
    if "error" in ours or "error" in theirs:
        return ["-", "-"]
    faster = statistics.median(theirs["ms"]) / statistics.median(ours["ms"])
    return [f"{faster:.2f}x", f"{theirs['layer_bytes'] / ours['layer_bytes']:.1f}x"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", help="config/gpt2_124m.py, for example")
    parser.add_argument("--attention", nargs="+", default=["triton", "naive"], help="default: triton naive")
    parser.add_argument("--lengths", nargs="+", type=count, default=[1024 * 2**i for i in range(6)], help="1k .. 32k")
    parser.add_argument("--tokens_per_step", type=count, default=16_384, help="default: 16k")
    parser.add_argument("--steps", type=int, default=15, help="timed steps (default: %(default)s)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("bench.training needs a CUDA GPU; torch sees none")
    settings = {"vocab_size": 50_257} | read_preset(arguments.preset)

    print(f"{arguments.preset} on {torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, compiled")
    names = arguments.attention
    columns = [f"{name} {unit}" for name in names for unit in ("ms", "tok/s", "peak GB", "layer MB")]
    columns += [f"{names[0]} vs {name}: {what}" for name in names[1:] for what in ("speed", "layer memory")]
    print("| T | " + " | ".join(columns) + " |\n" + "|---" * (len(columns) + 1) + "|")
    rows = []
    for tokens in arguments.lengths:
        results = {
            name: in_own_process(measure, settings, name, tokens, arguments.tokens_per_step, arguments.steps)
            for name in names
        }
        cells = [cell for name in names for cell in cells_of(results[name], tokens)]
        cells += [cell for name in names[1:] for cell in ratios(results, name)]
        print(f"| {tokens} | " + " | ".join(cells) + " |", flush=True)
        rows.append(dict(tokens=tokens, results=results))
    print(json.dumps(dict(preset=arguments.preset, device=torch.cuda.get_device_name(), rows=rows)), file=sys.stdout)


if __name__ == "__main__":
    with exit_cleanly():
        main()
