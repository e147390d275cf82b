"""Runs what a record lacks, repetitions in turn; each line says its command, commit, machine and link rate."""

import functools
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import sweep
from configs.overrides import Overrides
from lab.records import RESULTS, add, is_recorded, machine, put
from launch.emulate.links import Links
from launch.sweeps.plan import plan
from launch.sweeps.records import Record, State, is_finished
from runtime.command_line import OneLineParser, complain, prepare_output

ROOT = Path(__file__).resolve().parents[2]
WORKDIR = Path("runs/benchmarks")
RUN_S = 1800  # time-out of a program; a run takes minutes
Key = Mapping[str, Any]  # what tells a line of a record from others
Main = Callable[..., int]  # of no argument, or of the words of a command line


class FailedRunError(RuntimeError):
    """A run that ended without numbers."""


# ----------------------------------------------------------------------------------------------- the command line


def program(main: Main) -> Main:
    """Makes a program of a function: what it cannot do is one line, with the exit code that belongs to it."""

    @functools.wraps(main)
    def run(*argv: Sequence[str]) -> int:
        prepare_output()
        try:
            return main(*argv)
        except (ValueError, OSError) as error:
            return complain(error)
        except RuntimeError as error:
            return complain(OSError(str(error)))

    return run


def options_of(about: str | None, argv: Sequence[str] | None, **options: tuple[Any, str]) -> Namespace:
    """Returns the options of the command line: of each its default, whose type it has, and what it means."""
    parser = OneLineParser(description=about)
    for name, (default, meaning) in options.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true", help=meaning)
        else:
            text = meaning if default == "" else f"{meaning} (default: %(default)s)"
            parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    return parser.parse_args(argv)


def words(text: str, option: str, known: Iterable[str]) -> list[str]:
    """Returns the words of an option, which commas separate. ValueError if one is not among the known ones."""
    found, choices = [word for word in text.split(",") if word], list(known)
    for word in found:
        if word not in choices:
            raise ValueError(f"--{option}={word} is not one of {', '.join(dict.fromkeys(choices))}")
    return found


def checked_rates(text: str) -> list[str]:
    """Returns the link rates of an option. ValueError if one is none."""
    return [Links(rate=rate).rate for rate in text.split(",")]


# ----------------------------------------------------------------------------------------------------- the record


def alternating(repetitions: int, **choices: Iterable[Any]) -> list[Key]:
    """Returns a key for each repetition and combination of choices; all are run once before any is run again."""
    names = (*choices, "repetition")
    return [
        dict(zip(names, (*chosen, repetition), strict=True))
        for repetition in range(repetitions)
        for chosen in itertools.product(*map(list, choices.values()))
    ]


def run_missing(
    file: Path, keys: Iterable[Key], measure: Callable[[Key], Mapping[str, Any]], *, again: bool = False
) -> int:
    """Measures and records each key that the record lacks, in order; returns 1 if a run failed, else 0.

    A run that fails is one line, and the others follow. `again`: also what a derived record has, in its place.
    ValueError if the code is not, or no longer, that of the commit which the lines name.
    """
    about, failed = machine(), 0  # before the runs, during which commits may be made
    for key in keys:
        if not again and is_recorded(file, key):
            continue
        if about["commit"] and file.is_relative_to(RESULTS):
            check_code(about["commit"])
        name = ", ".join(str(value) for value in key.values() if not isinstance(value, Mapping))
        try:
            line = {**key, **measure(key), **about}
        except (ValueError, RuntimeError, OSError) as error:
            print(f"error: {name}: {' '.join(str(error).split())}", file=sys.stderr)
            failed = 1
            continue
        if again:
            put(file, line, key)
        else:
            add(file, line)
        print(f"{name}: recorded", flush=True)
    return failed


def check_code(commit: str) -> None:
    """ValueError if a tracked file is not as in a commit, but for records, pages and tests."""
    others = [f":(exclude){path}" for path in (RESULTS.relative_to(ROOT), "docs", "*.md", "tests")]
    command = ["git", "diff", "--name-only", commit, "--", ".", *others]
    if changed := subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        raise ValueError(f"{changed[0]} is not as in commit {commit[:7]}, which the record would name: commit it first")


# ------------------------------------------------------------------------------------------------------- the runs


def emulated(nodes: int, devices_per_node: int, rate: str) -> dict[str, Any]:
    """Returns the overrides of a run on emulated nodes."""
    return {"emulate.nodes": nodes, "emulate.devices_per_node": devices_per_node, "emulate.rate": rate}


def train(name: str, config: str, overrides: Overrides) -> Record:
    """Runs train.py by the sweep `runs/benchmarks/NAME`. FailedRunError if it does not finish."""
    (run,) = plan(config, [overrides], workdir=WORKDIR / name)
    if is_finished(run):  # it has a line already, now superseded; the sweep would take it for this run
        shutil.rmtree(run.run_dir)
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
    is_emulated, compiled = bool(record.run.emulate), record.files.collectives
    per_node = int(record.run.emulate.get("devices_per_node", 0))
    wire = {
        key: median(row[key] for row in rows[1:]) if is_emulated else None  # the first step connects
        for key in ("wire_tx_bytes", "wire_rx_bytes")
    }
    return {
        "step_time_s": median(times),
        "step_times_s": times,
        "losses": [row["loss"] for row in rows],
        **wire,
        **{f"compiled_{key}": per_node * compiled[key] for key in ("inter_bytes", "intra_bytes")},
        "command": shown(record.run.command),
    }


def emulator(rate: str, workdir: Path, *options: str, nodes: int = 4) -> list[str]:
    """Returns the command of emulated nodes of 2 devices, without its program."""
    given = [f"--nodes={nodes}", "--devices_per_node=2", f"--rate={rate}", f"--workdir={workdir}", *options]
    return [sys.executable, "-m", "launch.emulate", *given]


def config_words(config: str, overrides: Overrides) -> list[str]:
    """Returns the words of a command line that describe a config: its file, and the keys that it changes."""
    return [f"--config={config}", *(f"--config.{key}={value}" for key, value in overrides.items())]


def trainer(config: str, workdir: Path, overrides: Overrides) -> list[str]:
    """Returns the command of train.py."""
    return [sys.executable, "train.py", f"--workdir={workdir}", *config_words(config, overrides)]


def shown(command: Sequence[str]) -> str:
    """Returns a command as a user types it."""
    return shlex.join("python" if word == sys.executable else word for word in command)


def pytorch_steps(python: str, options: Sequence[str], rate: str, workdir: Path) -> dict[str, Any]:
    """Runs PyTorch's steps on emulated nodes; returns its result, and the command. FailedRunError if it failed."""
    emulation = emulator(rate, workdir, "--processes_per_node=2")
    command = [*emulation, "--", python, "lab/benchmarks/pytorch_peer.py", *options]
    return result_of(command) | {"command": shown(command)}


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
