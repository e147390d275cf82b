"""The published numbers of lab/paper/published.csv: what a paper says of a system in a case, with unit and source."""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "published.csv"


@dataclass(frozen=True, kw_only=True)
class Published:
    """One number, None for out of memory; `at` is the case's size: GPUs, unless the source says what else."""

    paper: str
    figure: str
    system: str
    case: str
    at: int
    value: float | None
    unit: str
    ours: str  # what of ours it is compared with: a strategy, or a name in the records
    source: str

    @property
    def config(self) -> str:
        """The name of our config of the model that is the case."""
        return self.case.lower().replace(" ", "_")


@cache
def read() -> tuple[Published, ...]:
    """Returns all published numbers, in the order of the file."""
    with FILE.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row |= {"at": int(row["at"] or 0), "value": float(row["value"]) if row["value"] else None}
    return tuple(Published(**row) for row in rows)


def find(paper: str, figure: str, **which: Any) -> list[Published]:
    """Returns the numbers of a figure whose columns are as given. ValueError if there is none."""
    wanted = {"paper": paper, "figure": figure, **which}
    found = [one for one in read() if wanted.items() <= vars(one).items()]
    if not found:
        raise ValueError(f"{FILE.name} has no line with {', '.join(map(str, wanted.values()))}")
    return found


def value(paper: str, figure: str, **which: Any) -> float:
    """Returns the one number of a figure whose columns are as given. ValueError if there is not exactly one."""
    found = find(paper, figure, **which)
    if len(found) != 1 or found[0].value is None:
        raise ValueError(f"{FILE.name}: {paper}, {figure}, {which} is not one number")
    return found[0].value
