"""Measures the time from the start of train.py to the end of its first step, with an empty cache and with a full one.

The cache holds the tokenised text and, except with several virtual CPU devices (docs/training.md), compiled programs.
With the quickstart, cold and warm starts therefore differ only by the text.

    python -m benchmarks.startup [--config=configs/quickstart.py] [--repeats=3]

Prints wall-clock seconds, and CPU seconds of the process, which depend less on the machine's load. The targets for the
quickstart: under 20 s cold, under 10 s warm.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from metrics.environment import environment
from runtime.command_line import prepare_output
from runtime.events import Event, EventReader

ROOT = Path(__file__).resolve().parent.parent


def start_to_first_step(config: str, cache: str) -> tuple[float, float]:
    """Returns the wall-clock seconds until the first step is done, and the CPU seconds of the run of one step."""
    with tempfile.TemporaryDirectory() as workdir:
        short = ["--config.num_steps=1", "--config.optimizer.warmup_steps=0", "--config.sample.length=0"]
        command = [sys.executable, "train.py", f"--config={config}", f"--workdir={workdir}", *short]
        used = cpu_s()
        before_s = time.time()
        variables = {**os.environ, "MICS_JAX_CACHE": cache}
        subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, check=True)
        events = EventReader(Path(workdir)).new()
        wall_s = next(event["time_s"] - before_s for event in events if event["event"] == Event.FIRST_STEP)
        return wall_s, cpu_s() - used


def cpu_s() -> float:
    """Returns the CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Measures the time to the first step.")
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    prepare_output()
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                wall_s, used_s = start_to_first_step(options.config, cache)
                print(f"{state}: first step after {wall_s:.1f} s; whole run of one step {used_s:.1f} CPU s", flush=True)
    about = environment({})
    print(f"command: {about['command']}")
    print(f"commit {about['git_commit']}, {about['platform']}, {about['cpu_count']} cores, {about['date']}")


if __name__ == "__main__":
    main()
