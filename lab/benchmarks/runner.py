"""Runs what a record lacks, repetitions in turn; each line says its command, commit, machine and link rate."""

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import sweep
from configs.overrides import Overrides
from lab.benchmarks.records import add, is_recorded, machine
from lab.emulate.links import Links
from sweeps.records import Record, State

ROOT = Path(__file__).resolve().parents[2]
WORKDIR = Path("runs/benchmarks")
RUN_S = 1800  # time-out of a program; a run takes minutes
Key = Mapping[str, Any]  # what tells a line of a record from others


class FailedRunError(RuntimeError):
    """A run that ended without numbers."""


def alternating(repetitions: int, **choices: Iterable[Any]) -> list[Key]:
    """Returns a key for each repetition and combination of choices; all are run once before any is run again."""
    names = (*choices, "repetition")
    return [
        dict(zip(names, (*chosen, repetition), strict=True))
        for repetition in range(repetitions)
        for chosen in itertools.product(*map(list, choices.values()))
    ]


def run_missing(file: Path, keys: Iterable[Key], measure: Callable[[Key], Mapping[str, Any]]) -> int:
    """Measures and records each key that the record lacks, in order; returns 1 if a run failed, else 0.

    A run that fails is one line, and the others follow.
    """
    about, failed = machine(), 0  # before the runs, during which commits may be made
    for key in keys:
        if is_recorded(file, key):
            continue
        name = ", ".join(map(str, key.values()))
        try:
            add(file, {**key, **measure(key), **about})
            print(f"{name}: recorded", flush=True)
        except RuntimeError as error:
            print(f"error: {name}: {' '.join(str(error).split())}", file=sys.stderr)
            failed = 1
    return failed


def checked_rates(text: str) -> list[str]:
    """Returns the link rates of an option. ValueError if one is none."""
    rates = text.split(",")
    try:
        for rate in rates:
            Links(rate=rate)
    except ValueError as error:
        raise ValueError(str(error).replace("--rate=", "--rates=")) from None
    return rates


def train(name: str, config: str, overrides: Overrides) -> Record:
    """Runs train.py by the sweep `runs/benchmarks/NAME`. FailedRunError if it does not finish."""
    (record,) = sweep.run(config, [overrides], workdir=WORKDIR / name, metric="step_time_s")
    shutil.rmtree(record.run.run_dir / "checkpoints", ignore_errors=True)  # 300 MB
    if record.state != State.FINISHED:
        raise FailedRunError(record.error)
    return record


def steps_of(record: Record) -> dict[str, Any]:
    """Returns the times, losses and bytes of a run's steps; bytes on the wire are node 0's, None without emulation.

    The first step is not timed.
    """
    rows = [row for row in record.files.rows if "loss" in row]
    times = [row["step_time_s"] for row in rows if row.get("step_time_s") is not None]
    emulated, compiled = record.run.emulate, record.files.collectives
    per_node = int(emulated.get("devices_per_node", 0))
    return {
        "step_time_s": median(times),
        "step_times_s": times,
        "losses": [row["loss"] for row in rows],
        **{f"wire_{way}_bytes": _on_wire(rows, f"wire_{way}_bytes") if emulated else None for way in ("tx", "rx")},
        **{f"compiled_{key}": per_node * compiled[key] for key in ("inter_bytes", "intra_bytes")},
        "command": shown(record.run.command),
    }


def _on_wire(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return median(row[key] for row in rows[1:])  # the first step connects


def started(command: Sequence[str]) -> str:
    """Runs a program and returns what it printed. FailedRunError with the last line of its errors."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=RUN_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FailedRunError(f"{command[0]}: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise FailedRunError(f"{Path(command[1]).name} ended with exit code {done.returncode}: {last}")
    return done.stdout


def result_of(command: Sequence[str]) -> dict[str, Any]:
    """Runs a program that prints a line RESULT and a JSON object, and returns that. FailedRunError without it."""
    said = started(command)
    result = re.search(r"^RESULT (.*)$", said, re.MULTILINE)
    if not result:
        raise FailedRunError(f"no RESULT was printed: {said.strip()[-300:]}")
    return json.loads(result[1])


def shown(command: Sequence[str]) -> str:
    """Returns a command as a page shows it."""
    return shlex.join("python" if word == sys.executable else word for word in command)
