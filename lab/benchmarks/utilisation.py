"""Measures `local_sgd.target_utilisation` on links that become slow in the middle of a run, beside fixed intervals.

    python -m lab.benchmarks.utilisation [--seeds=1]

Trains the decoder of lab/benchmarks/time_to_loss.toml with MuLoCo and two bits a value: with fixed intervals, whose
losses need no links; and with a target of 95 % on 4 emulated nodes, whose links change from 200 Mbit/s to 10 at a third
of the steps and back at two thirds. Only what is missing is run; adds lines to results/measured/utilisation.jsonl. The
run on the links needs root (docs/emulation.md).
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from files.pages import markdown
from lab.benchmarks.replicas import shown
from lab.benchmarks.runner import WORKDIR, FailedRunError, Key, options_of, program, run_missing, train
from lab.benchmarks.time_to_loss import (
    CONFIG,
    CONNECTING,
    METHODS,
    POLL_S,
    TASK,
    change,
    emulator,
    last_words,
    rows_written,
    written,
)
from lab.plots import rate_in_words
from lab.records import MEASURED, Line, spread

RESULTS = MEASURED / "utilisation.jsonl"
TARGET, MOST = 0.95, 100
FIXED = (2, 10, 20, 50)
RATES = ("200mbit", "10mbit", "200mbit")  # of the thirds
STEPS = 400
KEYS = TASK | METHODS["Muon, DiLoCo, 10 steps, momentum 0.6, int4"].keys
KEYS |= {"compression.hop_two": "statistical", "num_steps": STEPS, "eval.every": 0}


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Does and records the missing runs; returns 1 if one failed, 2 for a bad option."""
    options = options_of(__doc__, argv, seeds=(1, "number of runs of each interval, with seeds from 0"))
    settings = [{"steps": STEPS, "inner_steps": fixed, "target": 0.0} for fixed in FIXED]
    settings.append({"steps": STEPS, "inner_steps": MOST, "target": TARGET})
    return run_missing(RESULTS, [{**key, "seed": seed} for seed in range(options.seeds) for key in settings], measured)


def measured(key: Key) -> dict[str, Any]:
    """Trains with an interval, fixed or chosen; returns the last validation loss. FailedRunError if the run failed."""
    local = {"inner_steps": key["inner_steps"], "target_utilisation": key["target"]}
    keys = KEYS | {"seed": key["seed"]} | {f"local_sgd.{name}": value for name, value in local.items()}
    if key["target"]:
        return on_links(keys)
    run = train("utilisation", CONFIG, keys)
    return {"validation_loss": run.files.rows[-1]["validation_loss"], "command": shown(run.run.command)}


def on_links(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Trains on links that change; returns the last validation loss, and what each third's steps and meetings took."""
    folder, load = WORKDIR / "utilisation" / "links", os.getloadavg()[0]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    flags = [f"--config.{name}={value}" for name, value in keys.items()]
    train_py = [sys.executable, "train.py", f"--config={CONFIG}", f"--workdir={folder}", *flags]
    command, begins = emulator(folder, RATES[0]) + train_py, [CONNECTING]
    with (folder / "said.log").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
    try:
        for third in (1, 2):
            while written(process, folder) < third * STEPS // 3:
                time.sleep(POLL_S)
            change(folder, RATES[third])
            begins.append(len(rows_written(folder)))
        if process.wait():
            raise FailedRunError(last_words(folder))
    finally:
        process.kill()  # with it end its nodes and all that runs there
        process.wait()
    rows = rows_written(folder)
    parts = [rows[first:last] for first, last in zip(begins, [*begins[1:], STEPS], strict=True)]
    thirds = [{"rate": rate, **took(part)} for rate, part in zip(RATES, parts, strict=True)]
    loss = rows[-1]["validation_loss"]
    return {"validation_loss": loss, "thirds": thirds, "load": load, "command": shown(command)}


def took(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the steps' times, in seconds, and which of the steps were meetings."""
    meetings = [row["step"] for row in rows if row["hop_two_payload_bytes"]]
    return {"first": rows[0]["step"], "step_times_s": [row["step_time_s"] for row in rows], "meetings": meetings}


# ----------------------------------------------------------------------------------------------------- the table


def costs(third: Mapping[str, Any]) -> tuple[float, float]:
    """Returns what a step of a third takes without a meeting, and a meeting besides it, in seconds: the means."""
    meetings = set(third["meetings"])
    times = [(time_s, step in meetings) for step, time_s in enumerate(third["step_times_s"], third["first"])]
    step_s = fmean(time_s for time_s, meets in times if not meets)
    return step_s, fmean(time_s for time_s, meets in times if meets) - step_s


def table(lines: Sequence[Line]) -> str:
    """Returns a row per setting: the share of the time in steps by third, seconds, and losses, also over the chosen's.

    Seconds are those of steps and meetings, as they were in the first run on the links, also for fixed intervals.
    """
    chosen = [line for line in lines if line["target"]]
    thirds = chosen[0]["thirds"] if chosen else []
    of_chosen = {line["seed"]: line["validation_loss"] for line in chosen}
    gaps = {meets: meets - before for before, meets in pairwise(step for third in thirds for step in third["meetings"])}
    rows = []
    for fixed in (*FIXED, 0):
        runs = [line for line in lines if line["inner_steps"] == fixed and not line["target"]] if fixed else chosen
        cells, whole = [str(fixed) if fixed else f"chosen, {MOST} at most"], np.zeros(2)
        for third in thirds:
            (step_s, meeting_s), steps = costs(third), len(third["step_times_s"])
            spent = np.array([steps * step_s, meeting_s * (steps / fixed if fixed else len(third["meetings"]))])
            between = [gaps[step] for step in third["meetings"] if step in gaps]
            cells.append(in_steps(spent) if fixed else f"{in_steps(spent)}, every {spread(between, '.0f')} steps")
            whole += spent
        cells += [in_steps(whole), f"{whole.sum():.0f}"] if thirds else []
        over = [line["validation_loss"] / of_chosen[line["seed"]] - 1 for line in runs if line["seed"] in of_chosen]
        cells += [spread([line["validation_loss"] for line in runs], ".3f") if runs else "-"]
        rows.append([*cells, spread(over, "+z.1%") if fixed and over else ""])
    heads = ["steps between meetings", *(f"in steps at {rate_in_words(third['rate'])}" for third in thirds)]
    heads += ["in the whole run", "seconds"] if thirds else []
    return markdown([*heads, "validation loss", "over the chosen's"], rows)


def in_steps(spent_s: np.ndarray) -> str:
    """Returns the share of the first of two times, of steps and of meetings."""
    return f"{spent_s[0] / spent_s.sum():.1%}"


if __name__ == "__main__":
    sys.exit(main())
