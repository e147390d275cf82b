"""What changes of a step's traffic cost in loss, as far as it was measured: planner/costs.csv."""

import csv
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

FILE = Path(__file__).with_name("costs.csv")
ABOUT = "loss: how much higher the validation loss was in a small model's recorded runs, with the range of 3 seeds"
UNKNOWN = "not recorded"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A row: validation loss minus that of the same run without the change, over seeds."""

    change: str  # as candidates write it
    mean: float
    least: float
    most: float
    seeds: int
    record: str
    method: str  # the name of its lines
    commits: str

    def __str__(self) -> str:
        return f"{self.mean:+z.3f} ({self.least:+z.3f} to {self.most:+z.3f})"


@lru_cache
def rows() -> tuple[Cost, ...]:
    """Returns the rows of costs.csv."""
    numbers = {"mean": float, "least": float, "most": float, "seeds": int}
    with FILE.open(newline="") as lines:
        return tuple(
            Cost(**{key: numbers.get(key, str)(value) for key, value in row.items()}) for row in csv.DictReader(lines)
        )


def is_recorded(change: str) -> bool:
    """Whether a row says what a change cost; nothing costs nothing."""
    return not change or any(row.change == change for row in rows())


def cost_of(change: str) -> str:
    """Returns what a change cost, in words."""
    return next((str(row) for row in rows() if row.change == change), UNKNOWN)
