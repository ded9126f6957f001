"""A target and a draft model on code, in minutes: what `python -m bench.speculate --train` measures.

python -m bench.train_code              the dataset "code" alone
python -m bench.train_code --train 3    and both models, side by side, on a GPU each where there are two
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch

import checkpoint
from config import read_preset
from data import UserError, exit_cleanly
from data.sources import STDLIB_SKIPPED

ROOT = Path(__file__).parent.parent
TARGET, DRAFT, DATASET = "code_300m", "code_20m", "code"
PRESET_MINUTES = 3.0  # what the presets' max_steps take on an H200


def prepare() -> None:
    """The dataset "code": the .py files of this Python's library and of PyTorch, in a BPE of 8,192 ids."""
    roots = [Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent]
    with tempfile.TemporaryDirectory() as folder:
        for root in roots:
            for path in sorted(root.rglob("*.py")):
                place = path.relative_to(root)
                if path.is_file() and not STDLIB_SKIPPED.intersection(place.parts) and is_text(path):
                    target = Path(folder, root.name, place)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)
        command = [sys.executable, "-m", "data.prepare", "files", folder, "--tokenizer", "bpe:8192", "--name", DATASET]
        subprocess.run(command, cwd=ROOT, check=True)


def is_text(path: Path) -> bool:
    """Whether a file has anything in it, all of it UTF-8: some of a library's own test files are not."""
    try:
        return bool(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError:
        return False


def train(minutes: float) -> tuple[str, str]:
    """Prepare the text, then train both models at once; each is stopped, and saves, after so many minutes."""
    runs = {name: ROOT / "out" / name for name in (TARGET, DRAFT)}
    for run in runs.values():
        if run.exists():
            raise UserError(f"{run} is there already: measure it with --target and --draft, or remove it")
    if not (ROOT / "data" / "shards" / DATASET).exists():
        prepare()
    started, devices = time.monotonic(), max(1, torch.cuda.device_count())
    processes = {}
    for i, name in enumerate(runs):
        steps = max(1, round(read_preset(str(ROOT / f"config/{name}.py"))["max_steps"] * minutes / PRESET_MINUTES))
        command = [sys.executable, "train.py", f"config/{name}.py", f"--max_steps={steps}", f"--eval_interval={steps}"]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible_device(i % devices)}
        processes[name] = subprocess.Popen([*command, f"--out_dir={runs[name]}"], cwd=ROOT, env=environment)
    for name, process in processes.items():
        try:
            process.wait(max(1.0, minutes * 60 - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            print(f"{name}: {minutes:g} minutes are over, saving", flush=True)
            process.send_signal(signal.SIGINT)
            process.wait()
        checkpoint.resolve(runs[name])  # says so if the run has left nothing
    return str(runs[TARGET]), str(runs[DRAFT])


def visible_device(index: int) -> str:
    """The name of a GPU in CUDA_VISIBLE_DEVICES, which may be restricted already."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return visible[index] if visible else str(index)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.train_code", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=float, metavar="MINUTES", help="train the two models too")
    args = parser.parse_args(argv)
    if args.train is None:
        prepare()
    else:
        train(args.train)


if __name__ == "__main__":
    with exit_cleanly():
        main()
