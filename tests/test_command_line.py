"""What all programs share: what they print may be cut off, and directories that cannot be made are named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import ROOT

PROGRAM = """
import sys
from runtime.command_line import escape_output
escape_output()
for i in range({lines}):
    print(i, "\\ud800")
sys.exit(3)
"""


def into_closed_pipe(*command: str, **environment: str) -> tuple[int, str]:
    """Returns the exit code and stderr of a Python program whose output nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as output:
        done = subprocess.run(
            [sys.executable, *command],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            timeout=120,
            check=False,
            env={**os.environ, **environment},
        )
    return done.returncode, done.stderr


@pytest.mark.parametrize("lines", [1, 10_000], ids=["less than a buffer", "more"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_nothing(lines: int, unbuffered: str) -> None:
    assert into_closed_pipe("-c", PROGRAM.format(lines=lines), PYTHONUNBUFFERED=unbuffered) == (3, "")


@pytest.mark.parametrize(
    "command",
    [
        "sweep.py --config=configs/sweeps/strategies_by_model.py --dry_run",
        "train.py --help",
        "-m planner.table --help",
        "-m cluster.chaos --help",
        "-m cluster.emulate --help",
        "-m cluster.probe --help",
        "-m engines.ray --help",
        "-m metrics.report --help",
        "-m state --help",
    ],
)
def test_a_program_whose_reader_has_gone_ends_quietly(command: str) -> None:
    assert into_closed_pipe(*command.split()) == (0, "")


def test_output_keeps_its_order_and_its_characters(tmp_path: Path) -> None:
    file = tmp_path / "out"
    with file.open("wb") as output:
        command = [sys.executable, "-c", PROGRAM.format(lines=3) + "\n"]
        subprocess.run(command, stdout=output, cwd=ROOT, timeout=120, check=False)
    assert file.read_bytes() == b"0 \\ud800\n1 \\ud800\n2 \\ud800\n"
