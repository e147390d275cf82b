"""The published numbers of lab/paper/published.csv, compared with ours: errors, ratios of systems, their order."""

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from runtime.files.pages import markdown

FILE = Path(__file__).parent / "published.csv"
NONE, NOT_MEASURED = "-", "not measured"


@dataclass(frozen=True, kw_only=True)
class Published:
    """One number, None for out of memory; `at` is the case's size: GPUs, unless the source names another unit."""

    paper: str
    figure: str
    system: str
    case: str
    at: int
    value: float | None
    unit: str
    ours: str  # compared with: our strategy, or a name in the records
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
    """Returns the numbers of a figure whose columns have these values. ValueError if none match."""
    wanted = {"paper": paper, "figure": figure, **which}
    found = [one for one in read() if wanted.items() <= vars(one).items()]
    if not found:
        raise ValueError(f"{FILE.name} has no line with {', '.join(map(str, wanted.values()))}")
    return found


# ------------------------------------------------------------------------------------------------- comparisons


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A published number (or the value of a paper's formula) and ours; None for a missing one."""

    row: str
    column: str = ""
    published: float | None
    ours: float | None

    @property
    def name(self) -> str:
        """Row and column."""
        return f"{self.row}, {self.column}" if self.column else self.row

    @property
    def off(self) -> float | None:
        """Ours over the published number, less one; None if either is missing or the published one is 0."""
        return self.ours / self.published - 1 if self.ours is not None and self.published else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Cells in one unit, as a table shows them; differences of percentages are in percentage points."""

    title: str
    cells: Sequence[Cell]
    form: str = "{:,.2f}"
    points: bool = False

    def difference(self, cell: Cell) -> str:
        """Returns ours less the published number: in percent of the latter, or in points."""
        if self.points and cell.published is not None and cell.ours is not None:
            return f"{signed(cell.ours - cell.published)} points"
        if cell.published == 0 == cell.ours:
            return "none"
        return percent(cell.off)

    def number(self, value: float | None, missing: str = NONE) -> str:
        """Returns a number in the form of the table."""
        return missing if value is None else self.form.format(value)

    def markdown(self) -> str:
        """Returns the table: a line for each cell, or, of several columns, "published, ours (difference)" in each."""
        columns = sorted(dict.fromkeys(cell.column for cell in self.cells), key=_first_number)
        if len(columns) == 1:
            rows = [
                [cell.row, self.number(cell.published), self.number(cell.ours, NOT_MEASURED), self.difference(cell)]
                for cell in self.cells
            ]
            return markdown([self.title, "published", "ours", "difference"], rows)
        lines: dict[str, dict[str, str]] = {}
        for cell in self.cells:
            ours = self.number(cell.ours)
            pair = f"{self.number(cell.published)}, {ours} ({self.difference(cell)})"
            lines.setdefault(cell.row, {})[cell.column] = ours if cell.published is None else pair
        return markdown(
            [self.title, *columns],
            [[name, *(line.get(column, "") for column in columns)] for name, line in lines.items()],
        )


def compared(
    paper: str, figure: str, ours: Callable[[Published], float | None], *, row: str, column: str = "", **which: Any
) -> list[Cell]:
    """Returns a cell for each number of a figure, with `row` and `column` filled from it, and ours."""
    return [
        Cell(row=row.format(**vars(one)), column=column.format(**vars(one)), published=one.value, ours=ours(one))
        for one in find(paper, figure, **which)
    ]


def mean_off(cells: Iterable[Cell]) -> float:
    """Returns the mean absolute relative difference of the cells that have both numbers."""
    return fmean(abs(cell.off) for cell in cells if cell.off is not None)


def over(cells: Sequence[Cell], base: str, rows: Sequence[str] = ()) -> list[Cell]:
    """Returns the rows (all but the base, if none are named) divided by the row `base` of the same column."""
    bases = {cell.column: cell for cell in cells if cell.row == base}
    return [
        replace(cell, row=f"{cell.row} over {base}", published=cell.published / of.published, ours=cell.ours / of.ours)
        for cell in cells
        if cell.row != base and (cell.row in rows or not rows) and (of := bases.get(cell.column))
        if cell.published and cell.ours and of.published and of.ours
    ]


def orders(cells: Iterable[Cell]) -> tuple[int, int]:
    """Returns the number of columns in which our values have the published order, and the number of columns."""
    columns: dict[str, list[Cell]] = {}
    for cell in cells:
        columns.setdefault(cell.column, []).append(cell)

    def ranked(some: list[Cell], number: Callable[[Cell], float | None]) -> list[str]:
        return [cell.row for cell in sorted(some, key=lambda cell: number(cell) or 0.0)]

    same = [ranked(some, lambda c: c.published) == ranked(some, lambda c: c.ours) for some in columns.values()]
    return sum(same), len(same)


def _first_number(text: str) -> int:
    found = re.search(r"\d+", text)
    return int(found[0]) if found else 0


def percent(value: float | None) -> str:
    """Returns a relative difference as `+1.2%`."""
    return NONE if value is None else f"{signed(100 * value)}%"


def signed(value: float) -> str:
    """Returns a number with its sign and one decimal; 0.0 has none."""
    text = f"{value:+.1f}"
    return text.lstrip("+-") if float(text) == 0 else text
