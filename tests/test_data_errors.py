"""How a program leaves when it meets an error that a user can cause."""

import subprocess
import sys

import pytest
from test_data_prepare import ENVIRONMENT

from data import exit_cleanly


@pytest.mark.parametrize(
    "body, code, stderr",
    [
        ("raise data.UserError('so and so')", 1, "error: so and so\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
        ("raise SystemExit(3)", 3, ""),
        ("pass", 0, ""),
    ],
)
def test_exit_cleanly(body, code, stderr, tmp_path):
    script = f"import data\nwith data.exit_cleanly():\n    {body}"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, stderr)


def test_exit_cleanly_when_the_reader_is_gone(tmp_path):
    script = "import data\nwith data.exit_cleanly():\n    for i in range(100000): print(i)"
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141
    process.stderr.close()


def test_exit_cleanly_lets_bugs_through():
    with pytest.raises(ZeroDivisionError), exit_cleanly():
        print(1 / 0)
