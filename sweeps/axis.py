"""`axis_of`: where the values of a swept key stand on an axis: linear, logarithmic, or side by side."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, pstdev
from typing import Any

from metrics.charts import nice_ticks
from sweeps.plan import text

RATE_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
LARGE_RATIO = 20
MAX_LABELLED = 10  # with more values than this the ticks are round numbers


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Positions between 0 and 1; `in_order` says whether the values are numbers, which a line may join."""

    position: Callable[[Any], float]
    ticks: Sequence[tuple[float, str]]
    in_order: bool


def axis_of(values: Sequence[Any]) -> Axis:
    """Returns the axis of a key's values; those that are not numbers stand in the order given."""
    numbers = [as_number(value) for value in values]
    if any(value is None for value in numbers):
        return _side_by_side(list(dict.fromkeys(text(value) for value in values)))
    labels = {value: text(given) for value, given in zip(numbers, values) if value is not None}
    places = sorted(labels)
    return _number_axis(places, log_spaced(places), labels if len(places) <= MAX_LABELLED else None, margin=0.06)


def measured_axis(values: Sequence[float], form: Callable[[float], str]) -> Axis:
    """Returns the axis of measured numbers: logarithmic if the largest is many times the smallest."""
    places = sorted(set(values))
    return _number_axis(places, 0 < LARGE_RATIO * places[0] < places[-1], None, margin=0.04, form=form)


def _number_axis(
    places: Sequence[float],
    log: bool,
    labels: dict[float, str] | None,
    margin: float,
    form: Callable[[float], str] = text,
) -> Axis:
    """Returns the axis of sorted numbers, with ticks at `labels` or at round numbers."""
    scale = math.log10 if log else float
    low, high = scale(places[0]), scale(places[-1])
    if low == high:
        low, high = low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
    room = margin * (high - low)
    low, high = low - room, high + room
    if labels is None:
        labels = {value: form(value) for value in (_log_ticks(low, high) if log else nice_ticks(low, high, 7))}

    def position(value: Any) -> float:
        number = as_number(value)
        assert number is not None
        return (scale(number) - low) / (high - low)

    return Axis(position=position, ticks=[(position(v), label) for v, label in labels.items()], in_order=True)


def as_number(value: Any) -> float | None:
    """Returns a number, or a link's rate (`200mbit`) in bits a second; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    rate = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", str(value).lower())
    return float(rate[1]) * RATE_UNITS[rate[2]] if rate else None


def log_spaced(places: Sequence[float]) -> bool:
    """Says whether sorted numbers are spaced more evenly by their ratios than by their differences."""
    distinct = sorted(set(places))
    if len(distinct) < 2 or distinct[0] <= 0 or distinct[-1] < 4 * distinct[0]:
        return False
    if len(distinct) == 2:
        return distinct[1] >= 10 * distinct[0]
    steps = [b - a for a, b in pairwise(distinct)]
    factors = [math.log(b / a) for a, b in pairwise(distinct)]
    return pstdev(factors) / mean(factors) < pstdev(steps) / mean(steps)


def _side_by_side(words: list[str]) -> Axis:
    places = {word: (i + 0.5) / len(words) for i, word in enumerate(words)}
    return Axis(
        position=lambda value: places[text(value)], ticks=[(places[word], word) for word in words], in_order=False
    )


def _log_ticks(low: float, high: float) -> list[float]:
    """Returns round numbers between two powers of ten: 1, 2 and 5 of each decade, or only 1 if there are many."""
    factors = (1, 2, 5) if high - low < 2.5 else (1,)
    ticks = [factor * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for factor in factors]
    inside = [tick for tick in ticks if low <= math.log10(tick) <= high]
    return inside if len(inside) > 1 else [10**low, 10**high]
