"""Records the loss curves of MiCS and ZeRO-3 on the same text and seed: figure 16 of the MiCS paper on a small scale.

    python -m benchmarks.fidelity [--steps=300]

Runs train.py twice (configs/fidelity.py) and writes results/measured/fidelity.jsonl for `python -m paper`, one line
per run.
"""

import argparse
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.records import MEASURED, add
from files import json_lines
from metrics.environment import environment
from runtime.command_line import prepare_output

ROOT = Path(__file__).resolve().parent.parent
RESULTS = MEASURED / "fidelity.jsonl"
STRATEGIES = {"mics(2)": "mics", "zero3": "zero3"}  # name in the record to the argument of the config


def main() -> int:
    """Trains under each strategy and writes the record; returns train.py's exit code if it fails."""
    parser = argparse.ArgumentParser(description="Records the loss curves of MiCS and ZeRO-3.", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    prepare_output()
    lines = []
    for strategy, arg in STRATEGIES.items():
        with tempfile.TemporaryDirectory() as workdir:
            flags = [f"--config=configs/fidelity.py:{arg}", f"--config.num_steps={options.steps}"]
            done = subprocess.run(
                [sys.executable, "train.py", *flags, f"--workdir={workdir}/run"], cwd=ROOT, check=False
            )
            if done.returncode:
                return done.returncode
            lines.append(run_record(strategy, " ".join(("python train.py", *flags)), Path(workdir) / "run"))
    for line in lines:
        add(RESULTS, line)
    return 0


def run_record(strategy: str, command: str, workdir: Path) -> dict[str, Any]:
    """Returns the line of a run: the loss of each step, with command, commit and machine."""
    steps = json_lines.read(workdir / "metrics.jsonl")
    about = environment({})
    return {
        "strategy": strategy,
        "losses": [step["loss"] for step in steps],
        "command": command,
        "commit": about["git_commit"],
        "machine": f"{platform.machine()}, {about['cpu_count']} CPU cores",
    }


if __name__ == "__main__":
    sys.exit(main())
