"""Times how long a start takes, with an empty cache folder and with a folder filled by the same start.

    python -m lab.benchmarks.starts [--repetitions=3]

configs/quickstart.py: the first step of it on its 8 virtual devices and on a single one, whose programs are cached, and
all of its steps. Adds lines to results/measured/starts.jsonl.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.benchmarks.runner import (
    WORKDIR,
    FailedRunError,
    Key,
    options_of,
    program,
    run_missing,
    shown,
    started,
    trainer,
)
from lab.records import MEASURED, Line, middle
from runtime.files.cache import ENVIRONMENT_KEY
from runtime.files.pages import markdown

RESULTS = MEASURED / "starts.jsonl"
CONFIG = "configs/quickstart.py"
FIRST: dict[str, Any] = {"num_steps": 1, "optimizer.warmup_steps": 0, "sample.length": 0}
ALONE = {"mesh.num_cpu_devices": 1, "mesh.devices_per_node": 1}
ALONE |= {"sharding.strategy": "ddp", "sharding.partition_size": 0}
CASES = {"8 devices": FIRST, "one device": FIRST | ALONE, "8 devices, all steps": {}}
RUNS = [(case, cache) for case in ("8 devices", "one device") for cache in ("empty", "filled")]
RUNS += [("8 devices, all steps", "empty")]


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Times what is missing; returns 1 if a run failed."""
    options = options_of(__doc__, argv, repetitions=(3, "of each start, in turn"))
    keys = [{"case": case, "cache": cache, "repetition": i} for i in range(options.repetitions) for case, cache in RUNS]
    return run_missing(RESULTS, keys, measured)


def measured(key: Key) -> dict[str, Any]:
    """Returns the seconds until the first step and of the whole command."""
    folder = WORKDIR / "starts" / str(key["repetition"]) / str(key["case"]).replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    if key["cache"] == "filled":
        timed(key, folder)
    return timed(key, folder)


def timed(key: Key, folder: Path) -> dict[str, Any]:
    """Runs a case from the beginning, with the cache in a folder."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    os.environ[ENVIRONMENT_KEY] = str((folder / "cache").resolve())
    command, started_s = trainer(CONFIG, folder / "run", CASES[key["case"]]), time.perf_counter()
    said = started(command)
    whole_s = time.perf_counter() - started_s
    found = re.search(r"^first step done after ([\d.]+) s$", said, re.MULTILINE)
    if not found:
        raise FailedRunError(f"no step was done: {said.strip()[-300:]}")
    return {"first_step_s": float(found[1]), "whole_s": whole_s, "command": shown(command)}


def table(lines: Sequence[Line]) -> str:
    """Returns a row per start: the seconds until its first step, and of the whole command."""
    rows = []
    for case, cache in RUNS:
        of = [line for line in lines if (line["case"], line["cache"]) == (case, cache)]
        times = (middle([line[name] for line in of]) for name in ("first_step_s", "whole_s"))
        rows.append([case, cache, str(len(of)), *times])
    return markdown(["quickstart on", "cache folder", "runs", "first step done after, s", "whole command, s"], rows)


if __name__ == "__main__":
    sys.exit(main())
