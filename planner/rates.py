"""The planner's figures, in planner/rates.csv: each with its unit, source and month."""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

FILE = Path(__file__).with_name("rates.csv")


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A row: one figure of a device, a library of collectives or a node, with its unit."""

    of: str
    figure: str
    value: float
    unit: str
    source: str
    date: str  # year-month


class MissingRateError(ValueError):
    """No row has the requested figure."""


class Rates:
    """Finds figures by device, library or node."""

    def __init__(self, rows: Iterable[Rate]) -> None:
        self._rows: Mapping[tuple[str, str], Rate] = {(row.of, row.figure): row for row in rows}

    def get(self, figure: str, *of: str) -> float | None:
        """Returns the figure of the first of these names that has it, or None."""
        return next((self._rows[name, figure].value for name in of if (name, figure) in self._rows), None)

    def __call__(self, figure: str, *of: str) -> float:
        """Returns the same. MissingRateError if no name has the figure."""
        if (value := self.get(figure, *of)) is None:
            raise MissingRateError(f"{FILE.name} has no {figure!r} of {' or '.join(of)}: add a row, with its source")
        return value


def read(text: str) -> tuple[Rate, ...]:
    """Returns the rows of a CSV. ValueError for a row whose value is not a number, or without source or date."""
    rows = tuple(Rate(**{**row, "value": float(row["value"])}) for row in csv.DictReader(text.splitlines()))
    for row in rows:
        if not (row.source and row.date):
            raise ValueError(f"{FILE.name}: {row.figure!r} of {row.of} has no source or date")
    return rows


@lru_cache
def rows() -> tuple[Rate, ...]:
    """Returns the rows of rates.csv."""
    return read(FILE.read_text())
