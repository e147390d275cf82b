"""Measures `local_sgd.target_utilisation` on links that become slow in the middle of a run, beside fixed intervals.

    python -m lab.benchmarks.utilisation [--seeds=1]

Trains the decoder of lab/benchmarks/time_to_loss.toml with MuLoCo and two bits a value on 4 emulated nodes, whose links
change from 200 Mbit/s to 10 and back: with fixed intervals, and with a target of 95 %. Only what is missing is run;
adds lines to results/measured/utilisation.jsonl. Needs root (docs/emulation.md).
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from lab.benchmarks.runner import WORKDIR, FailedRunError, Key, options_of, program, run_missing, shown
from lab.benchmarks.time_to_loss import (
    CONFIG,
    METHODS,
    POLL_S,
    TASK,
    change,
    emulator,
    last_words,
    rows_written,
    steps_written,
)
from lab.plots import rate_in_words
from lab.records import MEASURED, Line, spread
from runtime.files.pages import markdown

RESULTS = MEASURED / "utilisation.jsonl"
TARGET, MOST = 0.95, 100
FIXED = (2, 10, 20, MOST)  # the last as if they never met
PARTS = (("200mbit", 100), ("10mbit", 200), ("200mbit", 100))  # steps
STEPS = sum(steps for _, steps in PARTS)
KEYS = TASK | METHODS["Muon, DiLoCo, 10 steps, momentum 0.6, int4"].keys
KEYS |= {"compression.all_reduce": "statistical", "num_steps": STEPS, "eval.every": 0}


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Does and records the missing runs; returns 1 if one failed, 2 for a bad option."""
    options = options_of(__doc__, argv, seeds=(1, "number of runs of each interval, with seeds from 0"))
    settings = [{"inner_steps": fixed, "target": 0.0} for fixed in FIXED] + [{"inner_steps": MOST, "target": TARGET}]
    keys = [{"steps": STEPS, "on": "links", **key, "seed": seed} for seed in range(options.seeds) for key in settings]
    return run_missing(RESULTS, keys, measured)


def measured(key: Key) -> dict[str, Any]:
    """Trains with an interval, fixed or chosen; returns what `on_links` does. FailedRunError if the run failed."""
    local = {"inner_steps": key["inner_steps"], "target_utilisation": key["target"]}
    return on_links(KEYS | {"seed": key["seed"]} | {f"local_sgd.{name}": value for name, value in local.items()})


def on_links(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Trains on links that change; returns the last validation loss, the steps that met, and what each part took."""
    folder, load = WORKDIR / "utilisation" / "links", os.getloadavg()[0]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [*emulator(folder, PARTS[0][0]), sys.executable, "train.py", f"--config={CONFIG}", f"--workdir={folder}"]
    command += [f"--config.{name}={value}" for name, value in keys.items()]
    ends = [*accumulate(steps for _, steps in PARTS)]
    with (folder / "said.log").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
    try:
        for end, (rate, _) in zip(ends, PARTS[1:], strict=False):
            while steps_written(process, folder) < end:
                time.sleep(POLL_S)
            change(folder, rate)
        if process.wait():
            raise FailedRunError(last_words(folder))
    finally:
        process.kill()  # with it end its nodes and all that runs there
        process.wait()
    rows, parts = rows_written(folder), []
    for end, (rate, steps) in zip(ends, PARTS, strict=True):
        here = [(a, b) for a, b in pairwise(rows) if end - steps < b["step"] <= end]  # a row is of the steps since `a`
        timed_s = sum((row["step"] - before["step"]) * row["step_time_s"] for before, row in here)
        mean_s = timed_s / (here[-1][1]["step"] - here[0][0]["step"])
        parts.append({"rate": rate, "steps": steps, "seconds": steps * mean_s})
    found = {"validation_loss": rows[-1]["validation_loss"], "parts": parts, "met": [row["step"] for row in rows[1:]]}
    return found | {"load": load, "command": shown(command)}


# ----------------------------------------------------------------------------------------------------- the table


def table(lines: Sequence[Line]) -> str:
    """Returns a row per setting: the speed in each part, seconds, and losses, also over the chosen's.

    Speed is relative to that of the steps that hardly met, with the same seed.
    """
    ends = [0, *accumulate(steps for _, steps in PARTS)]
    by_seed = {(line["inner_steps"], line["target"], line["seed"]): line for line in lines}
    rows = []
    for fixed, target in [*((fixed, 0.0) for fixed in FIXED), (MOST, TARGET)]:
        runs = [line for line in lines if (line["inner_steps"], line["target"]) == (fixed, target)]
        chosen = [by_seed.get((MOST, TARGET, line["seed"])) for line in runs]
        apart = [by_seed.get((MOST, 0.0, line["seed"])) for line in runs]
        pairs = [(run, of) for run, of in zip(runs, apart, strict=True) if of]
        cells = [f"chosen, {MOST} at most" if target else str(fixed)]
        for part, (first, last) in enumerate(pairwise(ends)):
            shares = [of["parts"][part]["seconds"] / run["parts"][part]["seconds"] for run, of in pairs]
            gaps = [b - a for run in runs for a, b in pairwise([0, *run["met"]]) if first < b <= last]
            cells.append(
                spread(shares, ".1%") + (f", every {spread(gaps, '.0f')}" if target else "") if shares else "-"
            )
        seconds = [sum(part["seconds"] for part in run["parts"]) for run in runs]
        losses = [run["validation_loss"] for run in runs]
        over = [loss / of["validation_loss"] - 1 for loss, of in zip(losses, chosen, strict=True) if of and not target]
        cells += [spread(seconds, ".0f"), spread(losses, ".3f")] if runs else ["-", "-"]
        rows.append([*cells, spread(over, "+z.1%") if over else ""])
    heads = ["steps between meetings", *(f"part {i}, {rate_in_words(rate)}" for i, (rate, _) in enumerate(PARTS, 1))]
    return markdown([*heads, "seconds", "validation loss", "over the chosen's"], rows)


if __name__ == "__main__":
    sys.exit(main())
