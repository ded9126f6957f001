"""Shared by the tests: the repository's folder, a small dataset, and programs run in this process."""

import os
import signal
import sys
from pathlib import Path

# A shell starts background jobs with Ctrl-C ignored, and what they start inherits that: the tests send SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("WANDB_MODE", "offline")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when the kernels are first imported

from data import exit_cleanly  # noqa: E402
from data.prepare import main as prepare_main  # noqa: E402

# The shape and the pace of the runs in these tests: a step takes milliseconds.
TINY = """
n_layer = 2
n_head = 4
n_kv_head = 2
n_embd = 32
block_size = 32
tie_embeddings = False
max_steps = 20
tokens_per_step = 256
micro_batch_size = 4
warmup_steps = 2
eval_interval = 10
device = "cpu"
"""


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)  # tiny products: a second thread only waits


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> str:
    """A byte-level dataset of some of this repository's own files."""
    folder = tmp_path_factory.mktemp("dataset")
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("model.py", "train.py", "checkpoint.py"))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    prepare_main(["files", str(folder / "text.txt"), "--tokenizer", "bytes", "--out", str(folder / "shards")])
    return str(folder / "shards")


@pytest.fixture
def preset(tmp_path, dataset) -> Path:
    """A preset file for a tiny run on `dataset`, writing to tmp_path/run."""
    path = tmp_path / "tiny.py"
    path.write_text(f"{TINY}\ndataset = {dataset!r}\nout_dir = {str(tmp_path / 'run')!r}\n", encoding="utf-8")
    return path


@pytest.fixture
def run_train(capsys):
    """Runs train.py's main in this process -> (exit code, stdout, stderr)."""

    import train  # here, so that a mistake in it fails the tests of train.py alone

    def run(*arguments):
        code = 0
        try:
            with exit_cleanly():
                train.main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run
