"""What a run leaves to read: metrics.jsonl, the loss-curve picture and, when asked for, Weights & Biases."""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from data import UserError

try:
    import fcntl
except ModuleNotFoundError:  # Windows: two processes must not write to one run
    fcntl = None

# The keys of every row of metrics.jsonl, in this order.
COLUMNS = (
    *("step", "tokens", "loss", "val_loss", "val_bpb", "lr", "grad_norm"),
    *("tokens_per_s", "mfu", "memory", "seconds"),
)


def say(text: str):
    """Print a line beside the progress bar. A reader that went away must not end a run: then nobody is told more."""
    try:
        tqdm.write(text)
        sys.stdout.flush()
    except OSError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")


class RunLog:
    """`metrics.jsonl`: one JSON object a step, with the keys of COLUMNS; null where a step has no such value.

    loss: mean over the step's tokens, nats per token. val_loss, val_bpb: nats per token and bits per byte of the
    validation text. mfu: share of the GPU's bf16 peak. memory: peak bytes. seconds: since the run began, all told.

    Args:
        run: the run's directory, made here and held until `close`: no second process can write to it.
        settings: for `config.json`.
        history: the metrics.jsonl that a resumed run continues, up to and with `resume_step`.

    Raises:
        UserError: another process holds the directory, it cannot be written, or the history is damaged.
    """

    def __init__(self, run: Path, settings: dict, history: Path | None = None, resume_step: int = 0):
        self.path, self.wandb = run / "metrics.jsonl", None
        # A run killed after its last checkpoint logged steps that it will now take again.
        kept = [row for row in read_metrics(history) if row["step"] <= resume_step] if history else []
        with self._writing():
            run.mkdir(parents=True, exist_ok=True)
            self._lock = hold(run / ".lock")
            replace_file(run / "config.json", json.dumps(settings, indent=1))
            replace_file(self.path, "".join(json.dumps(row) + "\n" for row in kept))
            self._file = open(self.path, "a", encoding="utf-8", buffering=1)  # each line reaches the file at once

    def write(self, **values):
        row = {name: values.pop(name, None) for name in COLUMNS}
        assert not values, f"not columns of the log: {values}"
        with self._writing():
            self._file.write(json.dumps(row) + "\n")
        if self.wandb:
            self.wandb.log({k: v for k, v in row.items() if v is not None}, step=row["step"])

    @contextmanager
    def _writing(self):
        try:
            yield
        except OSError as error:
            raise UserError(f"could not write to {self.path.parent}: {error}") from None

    def close(self):
        self._file.close()
        self._lock.close()
        if self.wandb:
            self.wandb.finish()


def start_wandb(run: Path, settings: dict, run_id: str | None):
    """The Weights & Biases run to log to, `run_id` continued if given."""
    try:
        import wandb
    except ImportError:
        raise UserError("wandb=true, but wandb is not installed: pip install wandb, or drop --wandb") from None
    try:
        run.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project="decoder-llm", name=run.name, dir=str(run), config=settings, id=run_id, resume="allow"
        )
    except (wandb.Error, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"wandb could not start ({reason}): set it up, use WANDB_MODE=offline, or drop --wandb"
        ) from None


def hold(path: Path):
    """Take the lock file, for as long as the returned file stays open; UserError when another process has it."""
    file = open(path, "w", encoding="utf-8")
    if fcntl is not None:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it however the process ends
        except OSError:
            raise UserError(f"another process is writing to {path.parent}: wait for it, or use --out_dir") from None
    return file


def replace_file(path: Path, text: str):
    """Write a file such that a kill leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl; a last line that a kill cut short is left out. UserError for other damage."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["step"] + 0
            rows.append(row)
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                raise UserError(f"{path} is damaged in line {number}: mend or move it to go on") from None
    return rows


def plot_loss_curve(run: Path) -> Path | None:
    """Draw `loss_curve.png` from the run's metrics; None, with a word why, when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say("no loss_curve.png: matplotlib is not installed (pip install matplotlib)")
        return None
    rows = read_metrics(run / "metrics.jsonl")
    axes = Figure(figsize=(8, 4.5), layout="constrained").add_subplot()
    for name, style in (("loss", dict(alpha=0.4, linewidth=1)), ("val_loss", dict(marker="o", markersize=3))):
        points = [(row["step"], row[name]) for row in rows if row[name] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, **style)
    axes.set(title=run.name, xlabel="step", ylabel="nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    path = run / "loss_curve.png"
    try:
        axes.figure.savefig(path, dpi=120)
    except (OSError, ValueError, TypeError) as error:  # a picture is not worth a run
        say(f"no loss_curve.png: {error}")
        return None
    return path
