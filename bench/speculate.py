"""Speculative decoding beside plain decoding: the same text, how much sooner?

    python -m bench.speculate --train 3                     train a target and a draft model on code, then measure
    python -m bench.speculate --target out/code_300m --draft out/code_20m
    python -m bench.speculate --target out/smollm2          prompt lookup alone
    python -m bench.speculate --project speculate.txt decode.txt    8B with a 1B draft, by what was measured

`--train MINUTES` prepares the .py files of this Python and of PyTorch as the dataset "code", then trains
config/code_300m.py and config/code_20m.py side by side, on a GPU each where there are two, into out/.

Every prompt of bench/prompts (code, prose, copying, edits) and one of random ids is continued at two temperatures,
without speculation and with it: drafts from the draft model or from the text itself ("lookup"), a fixed number of them
or as many as pay ("auto"). Times are of whole `Engine.generate` calls, the best of 2 after 1. A text in which the same
8 tokens occur three times is a loop, on which speculation looks free: it is marked and not counted. Then the texts of
many combinations of seed, prompt, sampling, drafter, k and batch are compared with plain ones, token for token. The
program fails if any text differs. The last line printed is JSON.
"""

import argparse
import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from itertools import cycle, product
from pathlib import Path
from statistics import StatisticsError, mean

import torch

import checkpoint
from bench.models import printed_at_the_end, random_ids, wall_time
from bench.train_code import train
from config import pick_device, pick_dtype
from data import UserError, exit_cleanly
from decoding import Decoder
from engine import Engine
from sampling import Sampling
from speculation import CHOICES, FixedDrafts

PROMPTS = Path(__file__).parent / "prompts"  # KIND_NAME.txt
NEW, CALLS = 200, 2
TEMPERATURES = (0.0, 0.8)
LOOP, REPEATS = 8, 3
EXACT_NEW = 64
EXACT_SAMPLINGS = (
    Sampling(0),
    Sampling(0.8),
    Sampling(0.8, top_p=0.9),
    Sampling(1.0, top_k=50, repetition_penalty=1.1),
)


@dataclass(frozen=True)
class Mode:
    drafter: str  # none, draft, lookup
    speculate: str | int

    def __str__(self):
        return "plain" if self.drafter == "none" else f"{self.drafter} {self.speculate}"


PLAIN = Mode("none", 0)
FIXED = 3
MODES = [Mode("draft", FIXED), Mode("draft", "auto"), Mode("lookup", 7), Mode("lookup", "auto")]


class EveryChoice:
    """Each k in turn: then every CUDA graph is there before anything is timed."""

    def __init__(self):
        self.turns = cycle(CHOICES)

    def choose(self, sources, room) -> int:
        drafts = next(self.turns)
        return drafts if drafts <= room else 0

    def observe(self, done, sources, added):
        pass


class Models:
    """The target and perhaps a draft model, packed once for all engines."""

    def __init__(self, target: str, draft: str | None, device: torch.device, quant: str | None):
        dtype = pick_dtype("auto", device)

        def load(path):
            return Decoder.of(checkpoint.load_model(path, device, dtype), quant, release=True)

        self.tokenizer, self.target = checkpoint.load_tokenizer(target), load(target)
        self.draft = draft and (load(draft), checkpoint.load_tokenizer(draft))

    def engine(self, mode: Mode) -> Engine:
        """One that has captured all its graphs."""
        draft = self.draft if mode.drafter == "draft" else None
        engine = Engine(self.target, self.tokenizer, draft=draft, speculate=mode.speculate)
        if engine.decoder.device.type == "cuda" and mode.speculate == "auto":
            policy, engine.policy = engine.policy, EveryChoice()
            engine.complete(random_ids(engine.config, 1, 8), Sampling(), 64)
            engine.policy = policy
        return engine

    def modes(self) -> list[Mode]:
        return [mode for mode in MODES if mode.drafter != "draft" or self.draft]


def prompts_for(models: Models, new: int) -> dict[str, tuple[str, list[int]]]:
    """name -> (kind, ids), as much of the end of each prompt as leaves room for `new` tokens."""
    config = models.target.config
    room = config.block_size - new
    if room < 1:
        raise UserError(f"the model's block_size of {config.block_size} has no room for {new} new tokens: use less")
    texts = {path.stem: path.read_text(encoding="utf-8").rstrip("\n") for path in sorted(PROMPTS.glob("*.txt"))}
    found = {n: (n.split("_")[0], models.tokenizer.encode_prompt(text)[-room:]) for n, text in texts.items()}
    return found | {"random_ids": ("random", random_ids(config, 1, min(room, 256))[0])}


def loops(ids: list[int]) -> bool:
    """Whether some LOOP tokens in a row occur REPEATS times."""
    runs = Counter(tuple(ids[i : i + LOOP]) for i in range(len(ids) - LOOP + 1))
    return bool(runs) and max(runs.values()) >= REPEATS


def timed(engine: Engine, prompt: list[int], sampling: Sampling, new: int) -> tuple[float, list[int]]:
    """Seconds of the best call, and the new ids. The engine's report is that of its last call."""
    ids = []

    def call():
        ids[:] = engine.complete([prompt], sampling, new, seed=1)[0].token_ids

    times = [wall_time(call, engine.decoder.device) for _ in range(1 + CALLS)]
    return min(times[1:]), list(ids)


def round_seconds(engine: Engine) -> float | None:
    """Seconds on the device of a mean round of the last call."""
    report = engine.report
    read = report.weight_bytes + report.kv_bytes
    return read / (report.read_tb_per_s * 1e12) if report.read_tb_per_s else None


def measure(engines: dict[Mode, Engine], prompts: dict, temperature: float, new: int) -> list[dict]:
    """A row for each prompt and mode but the plain one, which it is compared with. prompts: of `prompts_for`."""
    rows, sampling, plain = [], Sampling(temperature), engines[PLAIN]
    for name, (kind, prompt) in prompts.items():
        plain_seconds, plain_ids = timed(plain, prompt, sampling, new)
        common = dict(prompt=name, kind=kind, temperature=temperature, tokens=len(plain_ids), loops=loops(plain_ids))
        common |= dict(plain_seconds=plain_seconds, plain_round_s=round_seconds(plain))
        for mode, engine in engines.items():
            if mode == PLAIN:
                continue
            seconds, ids = timed(engine, prompt, sampling, new)
            did = engine.report.speculation
            rounds = did["rounds_by_k"]
            drafted = sum(k * count for k, count in rounds.items())
            rows.append(
                common
                | dict(mode=str(mode), seconds=seconds, speedup=plain_seconds / seconds, same=ids == plain_ids)
                | dict(draft_s=did["draft_seconds"] / drafted if drafted and mode.drafter == "draft" else None)
                | dict(verify_s=did["verify_seconds"] / max(1, sum(rounds.values())))
                | {key: did[key] for key in ("tokens_per_pass", "acceptance", "rounds_by_k")}
            )
    return rows


def summarise(rows: list[dict]) -> list[dict]:
    """A row for each kind of prompt, temperature and mode; loops are not counted."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["kind"], row["temperature"], row["mode"]].append(row)
    return [summary_of(*key, members) for key, members in groups.items()]


def summary_of(kind: str, temperature: float, mode: str, members: list[dict]) -> dict:
    counted = [row for row in members if not row["loops"]]
    summary = dict(
        kind=kind, temperature=temperature, mode=mode, counted=len(counted), loops=len(members) - len(counted)
    )
    summary["same"] = all(row["same"] for row in members)
    if not counted:
        return summary
    tokens = sum(row["tokens"] for row in counted)
    plain, seconds = (sum(row[key] for row in counted) for key in ("plain_seconds", "seconds"))
    positions = max(len(row["acceptance"]) for row in counted)
    acceptance = [mean(row["acceptance"][j] for row in counted if len(row["acceptance"]) > j) for j in range(positions)]
    rounds = sum((Counter(row["rounds_by_k"]) for row in counted), Counter())
    drafts = [row["draft_s"] for row in counted if row["draft_s"]]
    return summary | dict(
        plain_tokens_per_s=tokens / plain,
        tokens_per_s=tokens / seconds,
        speedup=plain / seconds,
        tokens_per_pass=mean(row["tokens_per_pass"] for row in counted),
        acceptance=acceptance,
        draft_s=mean(drafts) if drafts else None,
        verify_s=mean(row["verify_s"] for row in counted),
        rounds_by_k=dict(sorted(rounds.items())),
    )


def print_head() -> None:
    head = ("text", "T", "drafts", "plain tok/s", "tok/s", "speed-up", "tokens a pass", "draft stands", "draft us")
    head += ("pass us", "passes by k", "same text")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|", flush=True)


def print_rows(summaries: list[dict]) -> None:
    for s in summaries:
        if not s["counted"]:
            print(f"| {s['kind']} | {s['temperature']} | {s['mode']} | loops | | | | | | | | {s['same']} |")
            continue
        cells = (
            f"{s['kind']} ({s['counted']}{', ' + str(s['loops']) + ' loop' if s['loops'] else ''})",
            f"{s['temperature']}",
            s["mode"],
            f"{s['plain_tokens_per_s']:,.0f}",
            f"{s['tokens_per_s']:,.0f}",
            f"{s['speedup']:.2f}",
            f"{s['tokens_per_pass']:.2f}",
            " ".join(f"{a:.2f}" for a in s["acceptance"][:4]),
            f"{s['draft_s'] * 1e6:.0f}" if s["draft_s"] else "-",
            f"{s['verify_s'] * 1e6:.0f}",
            " ".join(f"{k}:{n}" for k, n in s["rounds_by_k"].items()),
            "yes" if s["same"] else "NO",
        )
        print("| " + " | ".join(cells) + " |", flush=True)


def exactness(models: Models, new: int, seeds: int) -> dict:
    """Speculative against plain texts over combinations of seed, prompt, sampling, drafter, k and batch.

    Returns:
        counts: combinations; `mixed`, those in which some first drafts stood and others did not; `mismatches`.
    """
    prompts = [ids for _, ids in prompts_for(models, new).values()]
    counts, mixed, wrong = 0, 0, []
    drafters = ["lookup"] + ["draft"] * (models.draft is not None)
    plain = models.engine(PLAIN)
    engines = {drafter: models.engine(Mode(drafter, CHOICES[-1])) for drafter in drafters}
    for batch, sampling, seed in product((1, 3), EXACT_SAMPLINGS, range(seeds)):
        chosen = [prompts[(seed + i) % len(prompts)] for i in range(batch)]
        expected = [c.token_ids for c in plain.complete(chosen, sampling, new, seed=seed)]
        for drafter, drafts in product(drafters, CHOICES[1:]):
            engine = engines[drafter]
            engine.policy = FixedDrafts(drafts)
            done = [c.token_ids for c in engine.complete(chosen, sampling, new, seed=seed)]
            acceptance = engine.report.speculation["acceptance"]
            counts += 1
            mixed += bool(acceptance) and 0 < acceptance[0] < 1
            if done != expected:
                wrong.append(dict(batch=batch, sampling=asdict(sampling), seed=seed, drafter=drafter, drafts=drafts))
    return dict(combinations=counts, mixed=mixed, mismatches=len(wrong), wrong=wrong[:10])


def last_json(path: str) -> dict:
    """The line of JSON that a program of bench/ printed last, from a file of its output."""
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.startswith("{")]
        return json.loads(lines[-1])
    except (OSError, UnicodeDecodeError, IndexError, ValueError):
        raise UserError(
            f"{path} does not end in a line of JSON: give a file with the output of a measurement"
        ) from None


def projected(measured: dict, decoding: dict) -> list[dict]:
    """What an 8B target would gain from a 1B draft model at the acceptance measured here.

    A round of k drafts takes k t_d + t_v and gives 1 + a_1 + a_1 a_2 + ... tokens (Leviathan et al. 2023, section 3.3).
    t_d and t_v are replays of the two in the results of bench.decode; t_v is longer than plain decoding by the factor
    that the target measured here showed.

    Args:
        measured, decoding: the JSON of this program and of bench.decode.
    """
    try:
        plain = [row for row in decoding["rows"] if row["quant"] is None and not row["context"] and not row["prefill"]]
        times = {row["model"]: row["replay_us"] for row in plain if row.get("replay_us")}
        draft, target = times["1b"], times["8b"]
        fixed = [row for row in measured["rows"] if row["mode"] == f"draft {FIXED}" and row["plain_round_s"]]
        longer = mean(row["verify_s"] / row["plain_round_s"] for row in fixed)
    except (KeyError, StatisticsError):
        raise UserError("a projection needs 1b and 8b from bench.decode, and a draft model measured here") from None
    print(f"a step of 1B takes {draft:.0f} us, one of 8B {target:.0f}, {longer:.2f} times that with {FIXED} drafts")
    found = []
    for s in measured["summaries"]:
        if s["mode"] != f"draft {FIXED}" or not s["counted"]:
            continue
        gains, tokens, stands = {}, 1.0, 1.0
        for k, a in enumerate(s["acceptance"], start=1):
            stands *= a
            tokens += stands
            gains[k] = tokens * target / (k * draft + longer * target)
        best = max(gains, key=gains.get)
        found.append(dict(kind=s["kind"], temperature=s["temperature"], drafts=best, speedup=gains[best]))
        print(f"8B with a 1B draft, {s['kind']} at {s['temperature']}: {gains[best]:.2f} times as fast with k={best}")
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.speculate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=float, metavar="MINUTES", help="train the two models first")
    parser.add_argument("--target", metavar="DIR", help="a run or checkpoint")
    parser.add_argument("--draft", metavar="DIR", help="a smaller one with the same tokenizer")
    parser.add_argument("--quant", choices=("int8", "int4"), help="of both")
    parser.add_argument("--new", type=int, default=NEW, help="new tokens (default: %(default)s)")
    parser.add_argument(
        "--seeds", type=int, default=5, help="of the comparison of texts, 64 each (default: %(default)s)"
    )
    what = "files with the output of this program and of bench.decode: what would an 8B gain from a 1B draft?"
    parser.add_argument("--project", nargs=2, metavar="FILE", help=what)
    parser.add_argument("--device", default="auto", help="cuda or cpu (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.project:
        print(json.dumps(dict(projection=projected(*map(last_json, args.project)))))
        return
    if (args.train is None) == (args.target is None):
        raise UserError("give either --train MINUTES or --target DIR")
    target, draft = train(args.train) if args.train is not None else (args.target, args.draft)
    device = pick_device(args.device)
    models = Models(target, draft, device, args.quant)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    sizes = [decoder.config.n_params() / 1e6 for decoder in (models.target, *(models.draft or ())[:1])]
    print(f"{name}, torch {torch.__version__}: parameters {', '.join(f'{size:.0f}M' for size in sizes)}", flush=True)
    prompts = prompts_for(models, args.new)
    engines = {mode: models.engine(mode) for mode in (PLAIN, *models.modes())}
    rows, summary = [], dict(device=name, parameters_m=sizes)
    with printed_at_the_end(summary):
        print_head()
        for temperature in TEMPERATURES:
            measured = measure(engines, prompts, temperature, args.new)
            print_rows(summarise(measured))
            rows += measured
            summary |= dict(summaries=summarise(rows), rows=rows)
        worst = {mode: min(r["speedup"] for r in rows if r["mode"] == mode) for mode in {r["mode"] for r in rows}}
        print("slowest single text: " + ", ".join(f"{mode} {ratio:.2f}" for mode, ratio in sorted(worst.items())))
        exact = exactness(models, min(EXACT_NEW, args.new), args.seeds)
        print(
            f"texts: {exact['combinations']} combinations, {exact['mixed']} with drafts that stood and drafts that did "
            f"not, {exact['mismatches']} that differ from plain decoding",
            flush=True,
        )
        summary |= dict(worst=worst, exactness=exact)
    different = sum(not row["same"] for row in rows) + exact["mismatches"]
    if different:
        raise SystemExit(f"{different} speculative texts are not the plain ones")


if __name__ == "__main__":
    with exit_cleanly():
        main()
