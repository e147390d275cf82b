"""Measures `local_sgd.target_utilisation` on links that become slow in the middle of a run, beside fixed intervals.

    python -m lab.benchmarks.utilisation [--seeds=1]

Trains the decoder of lab/benchmarks/time_to_loss.toml with MuLoCo and two bits a value: with fixed intervals, whose
losses need no links; and with a target of 95 % on 4 emulated nodes, whose links change from 200 Mbit/s to 10 and back.
Only what is missing is run; adds lines to results/measured/utilisation.jsonl. Links need root (docs/emulation.md).
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from configs.schema import LEAST_INTERVAL
from files.pages import markdown
from lab.benchmarks.replicas import shown
from lab.benchmarks.runner import WORKDIR, FailedRunError, Key, options_of, program, run_missing, train
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

RESULTS = MEASURED / "utilisation.jsonl"
TARGET, MOST = 0.95, 100
CHOICE = re.compile(r"step (\d+): a meeting took (\S+) s more than a step of \S+ s; replicas meet every (\d+) steps")
FIXED = (2, 10, 20, 50)
PARTS = (("200mbit", 100), ("10mbit", 200), ("200mbit", 100))  # steps
STEPS = sum(steps for _, steps in PARTS)
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
    """Trains on links that change; returns the last validation loss, the meetings, and what each part took."""
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
    found = {"parts": parts, "meetings": meetings((folder / "said.log").read_text())}
    return {"validation_loss": rows[-1]["validation_loss"], **found, "load": load, "command": shown(command)}


def meetings(said: str) -> list[tuple[int, float]]:
    """Returns the steps that were meetings, and the seconds of each beyond its step, from what a run said.

    It says when the interval changes; a meeting after which it does not took about as long as the one before.
    """
    choices = {int(step): (float(more_s), int(interval)) for step, more_s, interval in CHOICE.findall(said)}
    found, step, (more_s, interval) = [], 0, (next(iter(choices.values()))[0], LEAST_INTERVAL)
    while step < STEPS:
        step = min(step + interval, STEPS)
        more_s, interval = choices.get(step, (more_s, interval))
        found.append((step, more_s))
    assert choices.keys() <= dict(found).keys()
    return found


# ----------------------------------------------------------------------------------------------------- the table


def table(lines: Sequence[Line]) -> str:
    """Returns a row per setting: the share of the time in steps by part, seconds, and losses, also over the chosen's.

    For fixed intervals, steps and meetings are what they were in the first run on the links, in the same part.
    """
    chosen = [line for line in lines if line["target"]]
    parts = chosen[0]["parts"] if chosen else []
    ends = [0, *accumulate(part["steps"] for part in parts)]
    met = dict(chosen[0]["meetings"]) if chosen else {}
    gaps = dict(zip(met, (b - a for a, b in pairwise([0, *met])), strict=True))
    of_chosen = {line["seed"]: line["validation_loss"] for line in chosen}
    rows = []
    for fixed in (*FIXED, 0):
        runs = [line for line in lines if line["inner_steps"] == fixed and not line["target"]] if fixed else chosen
        cells, whole = [str(fixed) if fixed else f"chosen, {MOST} at most"], np.zeros(2)
        for part, (first, last) in zip(parts, pairwise(ends), strict=True):
            here = [step for step in met if first < step <= last]
            in_meetings_s = sum(met[step] for step in here)
            spent = np.array([part["seconds"] - in_meetings_s, in_meetings_s])
            spent[1] *= part["steps"] / fixed / len(here) if fixed else 1
            cells.append(
                in_steps(spent) if fixed else f"{in_steps(spent)}, every {spread([gaps[x] for x in here], '.0f')}"
            )
            whole += spent
        cells += [in_steps(whole), f"{whole.sum():.0f}"] if parts else []
        over = [line["validation_loss"] / of_chosen[line["seed"]] - 1 for line in runs if line["seed"] in of_chosen]
        cells += [spread([line["validation_loss"] for line in runs], ".3f") if runs else "-"]
        rows.append([*cells, spread(over, "+z.1%") if fixed and over else ""])
    heads = ["steps between meetings", *(f"in steps at {rate_in_words(part['rate'])}" for part in parts)]
    heads += ["in the whole run", "seconds"] if parts else []
    return markdown([*heads, "validation loss", "over the chosen's"], rows)


def in_steps(spent_s: np.ndarray) -> str:
    """Returns the share of the first of two times, of steps and of meetings."""
    return f"{spent_s[0] / spent_s.sum():.1%}"


if __name__ == "__main__":
    sys.exit(main())
