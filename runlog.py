"""What a run leaves to read: metrics.jsonl, the loss-curve picture and, when asked for, Weights & Biases."""

import json
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from data import UserError

# The keys of every row of metrics.jsonl, in this order.
COLUMNS = (
    *("step", "tokens", "loss", "val_loss", "val_bpb", "lr", "grad_norm"),
    *("tokens_per_s", "mfu", "memory", "seconds"),
)


class RunLog:
    """`metrics.jsonl`: one JSON object a step, with the keys of COLUMNS; null where a step has no such value.

    loss: mean over the step's tokens, nats per token. val_loss, val_bpb: nats per token and bits per byte of the
    validation text. mfu: share of the GPU's bf16 peak. memory: peak bytes. seconds: since the run began, all told.
    """

    def __init__(self, run: Path, settings: dict, resume_step: int | None = None):
        self.path = run / "metrics.jsonl"
        self.wandb = None
        kept = []
        if resume_step is not None and self.path.exists():
            # A run killed after its last checkpoint logged steps that it will now take again.
            kept = [row for row in read_metrics(self.path) if row["step"] <= resume_step]
        with self._writing():
            run.mkdir(parents=True, exist_ok=True)
            (run / "config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
            with open(self.path, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in kept)
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

    def start_wandb(self, run: Path, settings: dict, run_id: str | None) -> str:
        """Log to Weights & Biases too, continuing its run `run_id` if given. Returns the id of the run."""
        try:
            import wandb
        except ImportError:
            raise UserError("wandb=true, but wandb is not installed: pip install wandb, or drop --wandb") from None
        self.wandb = wandb.init(
            project="decoder-llm", name=run.name, dir=str(run), config=settings, id=run_id, resume="allow"
        )
        return self.wandb.id

    def close(self):
        self._file.close()
        if self.wandb:
            self.wandb.finish()


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl; a last line that a kill cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def plot_loss_curve(run: Path) -> Path | None:
    """Draw `loss_curve.png` from the run's metrics; None, with a word why, when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        tqdm.write("no loss_curve.png: matplotlib is not installed (pip install matplotlib)")
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
    axes.figure.savefig(path, dpi=120)
    return path
