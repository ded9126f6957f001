"""What the measurements of generation share: models with random weights, prompts, caches, clocks."""

import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

import checkpoint
from config import build, pick_dtype, read_preset
from data import Tokenizer, UserError
from decoding import Decoder, whole_chunks
from engine import Engine
from model import ModelConfig
from rounds import Rounds
from sampling import Sampling

MODELS = {
    "124m": ("config/gpt2_124m.py", {"n_kv_head": 4, "vocab_size": 50304}),
    "1b": ("config/llama3_1b.py", {}),
    "8b": ("config/llama3_8b.py", {}),
    "70b": ("config/llama3_70b.py", {}),
}
SAMPLING = Sampling(temperature=0.8, top_k=200)


def known_model(text: str) -> str:
    if text not in MODELS and not Path(text).exists():
        raise UserError(f"there is no model {text!r}: name {', '.join(MODELS)}, a preset in config/ or a checkpoint")
    return text


class Ids(Tokenizer):
    """Ids that stand for nothing, none of which ends a text: every row gets all its tokens."""

    kind = "ids"
    stop_ids = frozenset()

    def __init__(self, vocab_size: int):
        super().__init__("ids", [b"."] * vocab_size, eot_id=0)


def config_of(model: str) -> ModelConfig:
    """The shape of a name in MODELS or of a preset. A preset without vocab_size gets 50304."""
    path, changes = MODELS.get(model, (model, {}))
    if model in MODELS:
        path = Path(__file__).parent.parent / path
    return build({"vocab_size": 50304} | read_preset(str(path)) | changes).model


def decoder_of(model: str, quant: str | None, device: torch.device) -> Decoder:
    """A checkpoint's weights, or random ones in the shape of a preset, packed; there are never two copies."""
    dtype = pick_dtype("auto", device)
    if Path(model).is_dir():
        return Decoder.of(checkpoint.load_model(model, device, dtype), quant, release=True)
    return Decoder.random(config_of(model), device, dtype, quant)


def random_ids(config: ModelConfig, rows: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (rows, length), generator=generator).tolist()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_time(call: Callable, device: torch.device) -> float:
    """Seconds of one call, to the end of what it started on the device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def fill(engine: Engine, prompt: list[int], batch: int, new: int) -> None:
    """Give the engine a cache as if it had read `prompt`: random keys and values, which `reuse=True` finds there."""
    rounds = Rounds(
        engine.decoder, engine.tokenizer.vocab_size, batch, whole_chunks(len(prompt) + new), engine.kv, None
    )
    for x in (rounds.cache.k, rounds.cache.v):
        for layer in x:  # [B, G, S, D]
            layer.normal_() if layer.is_floating_point() else layer.random_(-127, 128)
    for scale in (rounds.cache.k_scale, rounds.cache.v_scale):
        if scale is not None:
            scale.fill_(1 / 64)
    rounds.held = prompt[:-1]
    engine.rounds = rounds


def replay_seconds(rounds: Rounds, prompts: list[list[int]], samples: int, replays: int, reuse: bool) -> float | None:
    """Seconds of one round without drafts, from replays of its graph with nothing in between; None without a GPU."""
    if not rounds.cuda:
        return None
    rows = len(prompts) * samples
    limits = [len(prompts[0]) + replays] * rows
    rounds.begin(prompts, samples, limits, range(rows), SAMPLING, reuse=reuse)
    rounds.launch(0)
    graph = next(graph for (part, drafts, *_), graph in rounds.graphs.items() if (part, drafts) == ("verify", 0))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays - 1):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / (replays - 1)


def in_process(function: Callable, *arguments):
    """Run in a fresh process. One that dies is an exception here."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@contextmanager
def printed_at_the_end(summary: dict) -> Iterator[None]:
    """Print a summary as a line of JSON when all is measured, or what it holds when SIGTERM (`timeout`) comes first."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        print(json.dumps(summary), flush=True)
        signal.signal(signal.SIGTERM, before)
