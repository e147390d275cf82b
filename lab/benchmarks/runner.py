"""Runs the missing lines of a record, repetitions in turn; a line has its command, commit, machine and link rate."""

import csv
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
from typing import Any

from configs.overrides import Overrides
from lab.records import RESULTS, add, is_recorded, machine, put
from runtime.command_line import OneLineParser, complain, prepare_output
from training.metrics.run_files import RunFiles, read_run

ROOT = Path(__file__).resolve().parents[2]
WORKDIR = Path("runs/benchmarks")
RUN_S = 1800  # time-out of a program; a run takes minutes
Key = Mapping[str, Any]  # the part of a line of a record that identifies it
Main = Callable[..., int]  # takes no argument, or the words of a command line


class FailedRunError(RuntimeError):
    """A run that ended without numbers."""


# ----------------------------------------------------------------------------------------------- the command line


def program(main: Main) -> Main:
    """Makes a program of a function: an error is one line, with the exit code that belongs to it."""

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
    """Returns the options of the command line, each given by its default, which has its type, and its meaning."""
    parser = OneLineParser(description=about)
    for name, (default, meaning) in options.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true", help=meaning)
        else:
            text = meaning if default == "" else f"{meaning} (default: %(default)s)"
            parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    return parser.parse_args(argv)


def words(text: str, option: str, known: Iterable[str], separator: str = ",") -> list[str]:
    """Returns the words of an option. ValueError if one is not among the known ones."""
    found, choices = [word for word in text.split(separator) if word], list(known)
    for word in found:
        if word not in choices:
            raise ValueError(f"--{option}={word} is not one of {f'{separator} '.join(dict.fromkeys(choices))}")
    return found


# ------------------------------------------------------------------------------------------- the plan, the record


def rows_of(name: str) -> list[dict[str, Any]]:
    """Returns the rows of a CSV file of this folder, with their whole numbers."""
    with (Path(__file__).parent / name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: int(word) if word.isdecimal() else word for key, word in row.items()} for row in rows]


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

    A run that fails is one line, and the others follow. `again`: also replaces the lines of a derived record.
    ValueError if the code differs, or begins to differ, from the commit in the lines.
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


def train(workdir: Path, config: str, overrides: Overrides, before: Sequence[str] = ()) -> tuple[RunFiles, str]:
    """Runs train.py, with the command `before` it if given; returns its files and the command as a user types it.

    FailedRunError if it does not finish.
    """
    shutil.rmtree(workdir, ignore_errors=True)
    command = [*before, *trainer(config, workdir, overrides)]
    started(command)
    shutil.rmtree(workdir / "checkpoints", ignore_errors=True)  # 300 MB
    return read_run(workdir), shown(command)


def emulator(rate: str, workdir: Path, *options: str, nodes: int = 4, devices_per_node: int = 2) -> list[str]:
    """Returns the beginning of the command of a program on emulated nodes."""
    given = [f"--nodes={nodes}", f"--devices_per_node={devices_per_node}", f"--rate={rate}", f"--workdir={workdir}"]
    return [sys.executable, "-m", "launch.emulate", *given, *options, "--"]


def config_words(config: str, overrides: Overrides) -> list[str]:
    """Returns the words of a command line that describe a config: its file, and the keys that it changes."""
    return [f"--config={config}", *(f"--config.{key}={value}" for key, value in overrides.items())]


def trainer(config: str, workdir: Path, overrides: Overrides) -> list[str]:
    """Returns the command of train.py."""
    return [sys.executable, "train.py", f"--workdir={workdir}", *config_words(config, overrides)]


def shown(command: Sequence[str]) -> str:
    """Returns a command as a user types it."""
    return shlex.join("python" if word == sys.executable else word for word in command)


def started(command: Sequence[str]) -> str:
    """Runs a program and returns its output. FailedRunError with the last line of its errors."""
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
