"""Runs the quick tests many times, on an idle and on a busy machine, to show that they are green every time.

    python -m lab.benchmarks.quick_suite [--only=idle,busy,one_core]

Ten runs of `make test` on an idle machine, five with two busy loops per core, five on a single core. Adds lines to
results/measured/quick_suite.jsonl: duration, number of tests and failures of each run.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lab.benchmarks.runner import ROOT, FailedRunError, Key, options_of, program, run_missing, shown, words
from lab.records import MEASURED

RESULTS = MEASURED / "quick_suite.jsonl"
RUNS = {"idle": 10, "busy": 5, "one_core": 5}  # by the condition
LOOPS_PER_CORE = 2
LIMIT_S = 3600


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Runs and records what is missing; returns 1 if a run printed no summary."""
    options = options_of(__doc__, argv, only=(",".join(RUNS), "conditions"))
    chosen = words(options.only, "only", RUNS)
    keys = [
        {"condition": name, "repetition": i} for i in range(max(RUNS.values())) for name in chosen if i < RUNS[name]
    ]
    return run_missing(RESULTS, keys, measured)


def measured(key: Key) -> dict[str, Any]:
    """Returns duration, counts and names of failed tests of one run. FailedRunError if pytest printed no summary."""
    command = ["make", "test"]
    if key["condition"] == "one_core":
        command = ["taskset", "--cpu-list", "0", *command]
    load, started_s = os.getloadavg()[0], time.monotonic()
    with busy_loops(LOOPS_PER_CORE * (os.cpu_count() or 1) if key["condition"] == "busy" else 0):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    duration_s = time.monotonic() - started_s
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", done.stdout)}
    if "passed" not in counts:
        raise FailedRunError(f"make test printed no summary: {(done.stdout + done.stderr).strip()[-300:]}")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    result = {"exit_code": done.returncode, "duration_s": round(duration_s, 1), **counts, "failures": failed}
    return {**result, "load": load, "command": shown(command)}


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Runs processes that compute without end while the block runs."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    sys.exit(main())
