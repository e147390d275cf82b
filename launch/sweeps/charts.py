"""`sweep_chart`: the metric against one swept key, with one series per value of a second key."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from launch.sweeps.plan import text
from launch.sweeps.records import metric_text
from runtime.files.palette import SERIES
from training.metrics.charts import Axis, Chart, Series, number_axis, word_axis

MAX_LINES = len(SERIES)
MAX_LABELLED = 10  # distinct numbers, each with a tick; more numbers have ticks at round values
# ratios of the largest to the smallest value at which an axis becomes logarithmic, for a swept key and for metrics
LARGE_RATIO_X, LARGE_RATIO_Y = 8, 20
DODGE = 9.0  # horizontal distance between the dots of neighbouring series above a word, so that no dot covers another
RATE_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run: its value of the chart's key, its value of the series key, and its metric."""

    x: Any
    line: Any  # None with a single series
    y: float
    tip: str


def sweep_chart(
    points: Sequence[Point], *, x_name: str, line_name: str, metric: str, over: Sequence[str] = ()
) -> Chart:
    """Returns the chart: a dot per run and, where `x` is a number, a line through the median of each `x`.

    A value that is not finite is a cross at the top. `over` are the keys in which the runs of a median differ.
    """
    finite = [point.y for point in points if math.isfinite(point.y)]
    if not finite:
        return Chart(note="No run has measured a finite value.")
    low, high = min(finite), max(finite)
    x = axis_of([point.x for point in points])
    form = partial(metric_text, metric) if metric.endswith(("_bytes", "_s")) else text
    y = number_axis(low, high, form, log=0 < LARGE_RATIO_Y * low < high, margin=0.04)
    names = list(dict.fromkeys(text(p.line) for p in sorted(points, key=lambda p: as_number(p.line) or 0.0)))
    is_random = len(points) > MAX_LINES and 2 * len({text(point.x) for point in points}) > len(points)
    joined = x.numeric and not is_random  # few sampled values are equal
    series = []
    for i, name in enumerate(names):
        members = [point for point in points if text(point.line) == name]
        series.append(
            Series(
                label=name,
                colour=i,
                line=_medians(members) if joined else (),
                dots=[(point.x, point.y, point.tip) for point in members],
                shift=0.0 if x.numeric else DODGE * (i - (len(names) - 1) / 2),
            )
        )
    note = f"Lines: median over {', '.join(over)}." if joined and over else ""
    label = f"{metric} over {x_name}"
    return Chart(series=series, x=x, y=y, x_name=x_name, label=label, legend=line_name, note=note)


def axis_of(values: Sequence[object]) -> Axis:
    """Returns the axis of a key's values: linear, logarithmic, or words in the order given."""
    labels = {number: text(value) for value in values if (number := as_number(value)) is not None}
    if any(as_number(value) is None for value in values):
        axis = word_axis(list(dict.fromkeys(map(text, values))))
        return replace(axis, position=lambda value: axis.position(text(value)))
    low, high, few = min(labels), max(labels), len(labels) <= MAX_LABELLED
    axis = number_axis(
        low, high, text, log=0 < LARGE_RATIO_X * low <= high, margin=0.06, labels=labels if few else None
    )
    return replace(axis, position=lambda value: axis.position(as_number(value)))


def as_number(value: object) -> float | None:
    """Returns a number, or the bits per second of a link rate (`200mbit`); None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    rate = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", str(value).lower())
    return float(rate[1]) * RATE_UNITS[rate[2]] if rate else None


def _medians(members: Sequence[Point]) -> list[tuple[object, float]]:
    """Returns the median at each x in order, NaN where a run diverged."""
    values: dict[Any, list[float]] = {}
    for point in sorted(members, key=lambda point: as_number(point.x) or 0.0):
        values.setdefault(point.x, []).append(point.y)
    return [(x, median(ys) if all(map(math.isfinite, ys)) else math.nan) for x, ys in values.items()]
