"""The records in lab/benchmarks/results: one line per measurement, or per result of a program.

What is in `MEASURED` depends on a machine and a moment: seconds, losses, bytes on a wire. Lines are only added; an
outdated one gets the key `superseded`, with the reason, and nothing else of it changes (tests/test_records.py). What is
in `DERIVED` a commit gives on every machine: bytes of compiled programs, replays, counted calls. Each of its lines
stands once and names its commit; a deleted one is computed again.

A new line is refused unless its commit is an ancestor of HEAD. Older lines whose commit a rebase removed have the key
`commit_lost`, with the reason, and each table of a page that reads them says so (`lost_note`).
"""

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from configs.schema import RENAMED
from runtime.files import atomic, json_lines
from training.metrics.environment import environment

RESULTS = Path(__file__).resolve().parent / "benchmarks" / "results"
MEASURED, DERIVED = RESULTS / "measured", RESULTS / "derived"
SUPERSEDED, COMMIT_LOST = "superseded", "commit_lost"  # marks of a line, with the reason as their values
TODAY = RENAMED | {  # names of keys in older lines, and their names today
    "hop_two_ratio": "all_reduce_ratio",
    "hop_two_fraction_sent": "all_reduce_fraction_sent",
}
SAME = 1e-5  # losses that differ by less, relatively, count as equal
Line = dict[str, Any]


def add(file: Path, line: Mapping[str, Any]) -> None:
    """Adds a line to a record. ValueError if its commit is not an ancestor of HEAD."""
    check_commits(file, [line])
    json_lines.append(file, line)


def check_commits(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """ValueError, with the line, if the commit of a line of a record here is not an ancestor of HEAD, and unmarked.

    Nothing is checked outside of a repository, such as in a copy on a machine with GPUs.
    """
    root = RESULTS.parents[2]
    if not file.is_relative_to(RESULTS) or not (root / ".git").exists():
        return
    for commit, line in {line.get("commit"): line for line in lines if COMMIT_LOST not in line}.items():
        command = ["git", "-C", root, "merge-base", "--is-ancestor", str(commit), "HEAD"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            raise ValueError(
                f"{file.name}: a line is refused, because its commit ({commit and commit[:7]}) is not an ancestor of "
                f"HEAD; run it again at a commit that stays. The line: {json.dumps(line)}"
            )


def recorded(file: Path, *, superseded: bool = False) -> list[Line]:
    """Returns the lines of a record, those marked `superseded` only if asked for; none if there is no file yet."""
    lines = read_lines(file) if file.exists() else []
    return [line for line in lines if superseded or SUPERSEDED not in line]


def is_recorded(file: Path, key: Mapping[str, Any]) -> bool:
    """Whether a record has a line with these values; None: or without that value."""
    written = json.loads(json.dumps(key))  # as it was written: tuples are lists
    return any(all(line.get(name) == value for name, value in written.items()) for line in recorded(file))


def replace(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Makes these the lines of a derived record. ValueError if the commit of one is not an ancestor of HEAD."""
    lines = list(lines)
    check_commits(file, lines)
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic.replace(file, "".join(f"{json.dumps(line)}\n" for line in lines))


def put(file: Path, line: Mapping[str, Any], key: Iterable[str]) -> None:
    """Writes a line into a derived record, instead of the one with the same values of `key`."""
    written = json.loads(json.dumps(line))  # as it will be read: tuples are lists
    names = list(key)
    kept = [other for other in recorded(file) if any(other.get(name) != written[name] for name in names)]
    replace(file, [*kept, written])


def machine() -> dict[str, str]:
    """Returns commit, machine and jax version of a measurement."""
    about = environment({})
    return {"commit": about["git_commit"], "machine": f"{os.cpu_count()} CPU cores", "jax": about["versions"]["jax"]}


@dataclass(frozen=True)
class Records:
    """The lines of each record, by its name."""

    files: Mapping[str, Sequence[Line]]
    read_lost: dict[str, set[int]] = field(default_factory=dict)  # numbers of the lines with COMMIT_LOST that were read

    def lines(self, name: str, /, *, superseded: bool = False, **key: Any) -> list[Line]:
        """Returns the lines of a record that have these values. ValueError if there is no such record."""
        if name not in self.files:
            raise ValueError(f"{name}.jsonl is missing; python -m lab.benchmarks.{name} writes it")
        numbered = enumerate(self.files[name], 1)
        lines = [(n, line) for n, line in numbered if superseded or SUPERSEDED not in line]
        found = [(n, line) for n, line in lines if key.items() <= line.items()]
        if lost := {n for n, line in found if COMMIT_LOST in line}:
            self.read_lost.setdefault(name, set()).update(lost)
        return [line for _, line in found]

    def lost_note(self) -> str:
        """Returns a sentence about the lines read so far whose commit is gone; "" without any."""
        counts = [f"{len(numbers)} of `{name}.jsonl`" for name, numbers in sorted(self.read_lost.items())]
        return f"Lines whose commit a rebase removed are among the records: {', '.join(counts)}." if counts else ""

    def line(self, name: str, /, **key: Any) -> Line:
        """Returns the one line that has these values. ValueError if there is not exactly one."""
        found = self.lines(name, **key)
        if len(found) != 1:
            raise ValueError(
                f"lab/benchmarks/results: {name}.jsonl has {len(found)} lines of {', '.join(map(str, key.values()))}; "
                f"it needs one: python -m lab.benchmarks.{name}"
            )
        return found[0]


def read_records(folder: Path = RESULTS) -> Records:
    """Returns the records in `folder`."""
    return Records({file.stem: read_lines(file) for file in folder.glob("*/*.jsonl")})


def read_lines(file: Path) -> list[Line]:
    """Returns the lines of a record, with today's names of keys."""
    return [_renamed(line) for line in json_lines.read(file)]


def _renamed(value: Any) -> Any:
    if isinstance(value, dict):
        return {TODAY.get(name, name): _renamed(part) for name, part in value.items()}
    return [_renamed(part) for part in value] if isinstance(value, list) else value


# -------------------------------------------------------------------------------------------- values and their range


@dataclass(frozen=True, kw_only=True)
class Range:
    """A value, and between what it lay."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 1) -> str:
        """Returns `13.1 (12.8 to 13.4)`."""
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def middle(values: Sequence[float | None], digits: int = 1) -> str:
    """Returns the median of what was measured, with the range if that is more than one value; `-` of nothing."""
    known = [value for value in values if value is not None]
    if len(known) == 1:
        return f"{known[0]:.{digits}f}"
    return Range(value=median(known), low=min(known), high=max(known)).text(digits) if known else "-"


def same_until(losses: Sequence[float], others: Sequence[float]) -> tuple[int | None, float]:
    """Returns the first step whose losses differ by more than `SAME`, None if none does, and the most before it."""
    apart = [abs(a - b) / a for a, b in zip(losses, others, strict=True)]
    first = next((i for i, difference in enumerate(apart) if difference > SAME), None)
    return None if first is None else first + 1, max(apart[:first], default=0.0)


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Returns `mean (lowest to highest)`."""
    return f"{mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"
