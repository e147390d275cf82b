"""The records in lab/benchmarks/results: one line per measurement, or per result of a program.

The lines in `MEASURED` depend on a machine and a moment: seconds, losses, bytes on a wire. Lines are only added; an
outdated line moves to `ARCHIVE`, with the reason (`supersede`). The lines in `DERIVED` are the same on every machine:
bytes of compiled programs, replays, counted calls. Each line names its commit; a deleted line is computed again.

A new line is refused unless its commit is an ancestor of HEAD. Older lines whose commit a rebase removed have the key
`commit_lost`, with the reason, and each table of a page that reads them says so (`lost_note`).
"""

import json
import lzma
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from configs.schema import RENAMED
from runtime.files import atomic, json_lines
from training.metrics.environment import environment

RESULTS = Path(__file__).resolve().parent / "benchmarks" / "results"
MEASURED, DERIVED = RESULTS / "measured", RESULTS / "derived"
ARCHIVE = RESULTS / "superseded.jsonl.xz"  # outdated lines, each with the name of its record and the reason
COMMIT_LOST = "commit_lost"  # a mark of a line, with the reason as its value
TODAY = RENAMED | {  # names of keys in older lines, and their names today
    "hop_two_ratio": "all_reduce_ratio",
    "hop_two_fraction_sent": "all_reduce_fraction_sent",
}
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


def recorded(file: Path) -> list[Line]:
    """Returns the lines of a record; none if the file does not exist yet."""
    return read_lines(file) if file.exists() else []


def archived(name: str) -> list[Line]:
    """Returns the outdated lines of a record, oldest first; each has the key `superseded`, with the reason."""
    lines = map(json.loads, lzma.decompress(ARCHIVE.read_bytes()).decode().splitlines()) if ARCHIVE.exists() else ()
    return [_renamed(line) for line in lines if line.pop("record") == name]


def supersede(file: Path, is_outdated: Callable[[Line], bool], reason: str) -> None:
    """Moves lines of a measured record to the archive."""
    lines = json_lines.read(file)  # with the names that they were written with
    moved = [{"record": file.stem, **line, "superseded": reason} for line in lines if is_outdated(line)]
    before = lzma.decompress(ARCHIVE.read_bytes()).decode() if ARCHIVE.exists() else ""
    atomic.replace(ARCHIVE, lzma.compress((before + "".join(f"{json.dumps(line)}\n" for line in moved)).encode()))
    replace(file, [line for line in lines if not is_outdated(line)])


def is_recorded(file: Path, key: Mapping[str, Any]) -> bool:
    """Whether a record has a line with these values; None: or without that value."""
    written = json.loads(json.dumps(key))  # as it was written: tuples are lists
    return any(all(line.get(name) == value for name, value in written.items()) for line in recorded(file))


def replace(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Makes these the lines of a record. ValueError if the commit of one is not an ancestor of HEAD."""
    lines = list(lines)
    check_commits(file, lines)
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic.replace(file, "".join(f"{json.dumps(line)}\n" for line in lines))


def put(file: Path, line: Mapping[str, Any], key: Iterable[str]) -> None:
    """Writes a line into a derived record; replaces the line with the same values of `key`."""
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

    def lines(self, name: str, /, **key: Any) -> list[Line]:
        """Returns the lines of a record that have these values. ValueError if the record is missing."""
        if name not in self.files:
            raise ValueError(f"{name}.jsonl is missing in lab/benchmarks/results; restore it with git")
        found = [(n, line) for n, line in enumerate(self.files[name]) if key.items() <= line.items()]
        if lost := {n for n, line in found if COMMIT_LOST in line}:
            self.read_lost.setdefault(name, set()).update(lost)
        return [line for _, line in found]

    def lost_note(self) -> str:
        """Returns a sentence about the lines read so far whose commit is gone; "" without any."""
        counts = [f"{len(numbers)} of `{name}.jsonl`" for name, numbers in sorted(self.read_lost.items())]
        return f"Lines whose commit a rebase removed are among the records: {', '.join(counts)}." if counts else ""

    def line(self, name: str, /, **key: Any) -> Line:
        """Returns the only line that has these values. ValueError if none or several have them."""
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
    """A value, with its lowest and highest measurement."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 1) -> str:
        """Returns `13.1 (12.8 to 13.4)`."""
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def range_of(values: Sequence[float], value: float | None = None) -> Range:
    """Returns the lowest and the highest of some values, around `value` or else their median."""
    return Range(value=median(values) if value is None else value, low=min(values), high=max(values))


def middle(values: Sequence[float | None], digits: int = 1) -> str:
    """Returns the median of the known values, with the range of several values; `-` without any."""
    known = [value for value in values if value is not None]
    if len(known) == 1:
        return f"{known[0]:.{digits}f}"
    return range_of(known).text(digits) if known else "-"


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Returns `mean (lowest to highest)`."""
    return f"{mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"
