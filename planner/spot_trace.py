"""How many nodes there are at which time: a trace of spot nodes, read from a file."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from math import isfinite, nan
from pathlib import Path
from typing import Any

from files import json_objects

FORMAT = "give a CSV with the columns seconds,nodes, or a JSON file of skypilot-org/spot-traces"


@dataclass(frozen=True)
class Change:
    """From `start_s` on there are so many nodes."""

    start_s: float
    nodes: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Changes in their order, the first at 0 s; after `length_s` it begins again."""

    changes: tuple[Change, ...]
    length_s: float

    def endless(self) -> Iterator[tuple[float, float, int]]:
        """Yields (start, end, nodes), again and again."""
        ends = [*(change.start_s for change in self.changes[1:]), self.length_s]
        for n in count():
            for change, end_s in zip(self.changes, ends, strict=True):
                yield n * self.length_s + change.start_s, n * self.length_s + end_s, change.nodes


def read_trace(path: Path) -> Trace:
    """Returns the trace of a file: CSV with the columns seconds and nodes, or JSON as in skypilot-org/spot-traces.

    The CSV's last line ends the trace, and has the nodes of the line before. The JSON is
    `{"metadata": {"gap_seconds": 300}, "data": [16, 16, 0, ...]}`. Lines that begin with # are comments. ValueError
    says what is wrong.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(f"--spot_trace={path} cannot be read ({why}); {FORMAT}") from error
    try:
        points = _points_of_json(text) if text.lstrip().startswith("{") else _points_of_csv(text)
    except KeyError as error:
        raise ValueError(f"--spot_trace={path} has no {error.args[0]}; {FORMAT}") from error
    except TypeError as error:
        raise ValueError(f"--spot_trace={path}: its JSON has another form; {FORMAT}") from error
    except (ValueError, OverflowError) as error:
        raise ValueError(f"--spot_trace={path}: {error}; {FORMAT}") from error
    times = [time_s for time_s, _ in points]
    if len(points) < 2 or times[0] != 0 or any(b <= a for a, b in pairwise(times)):
        raise ValueError(f"--spot_trace={path}: seconds must begin at 0 and increase, in two lines at least; {FORMAT}")
    if any(nodes < 0 for _, nodes in points):
        raise ValueError(f"--spot_trace={path}: {min(nodes for _, nodes in points)} nodes; {FORMAT}")
    if points[-1][1] != points[-2][1]:
        raise ValueError(
            f"--spot_trace={path}: the last line ends the trace, with the nodes of the line before; {FORMAT}"
        )
    changes = [Change(*points[0])]
    for time_s, nodes in points[1:-1]:
        changes += [Change(time_s, nodes)] if nodes != changes[-1].nodes else []
    return Trace(changes=tuple(changes), length_s=times[-1])


def _points_of_csv(text: str) -> list[tuple[float, int]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    rows = list(csv.reader(lines))
    if not rows or [cell.strip() for cell in rows[0]] != ["seconds", "nodes"]:
        raise ValueError("the first line is not seconds,nodes")
    if bad := next((row for row in rows[1:] if len(row) != 2 or not row[1].strip().isdecimal()), None):
        raise ValueError(f"{','.join(bad)!r} is no line of seconds,nodes")
    return [(_finite(seconds), int(nodes)) for seconds, nodes in rows[1:]]


def _points_of_json(text: str) -> list[tuple[float, int]]:
    read = json_objects.parse(text, "it")
    gap_s, counts = _finite(read["metadata"]["gap_seconds"]), [int(count) for count in read["data"]]
    return [(n * gap_s, count) for n, count in enumerate([*counts, counts[-1]])] if counts else []


def _finite(seconds: Any) -> float:
    try:
        number = float(seconds)
    except ValueError:
        number = nan
    if not isfinite(number):
        raise ValueError(f"{seconds} is no time")
    return number
