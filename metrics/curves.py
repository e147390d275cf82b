"""`curve_chart`: measurements over the steps of a run; long ones are thinned, with a trend line over them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from metrics.charts import Series, draw, nice_ticks, number_axis
from metrics.page import note

Points = Sequence[tuple[float, float]]
MAX_POINTS = 600  # of one curve in the SVG
MAX_DOTS = 60
TREND_FROM = 200  # points


@dataclass(frozen=True, kw_only=True)
class Curve:
    """(step, value) pairs; a `sparse` one, such as validations, gets dots and no trend."""

    label: str
    colour: int
    points: Points
    sparse: bool = False


def curve_chart(curves: Sequence[Curve], *, form: Callable[[float], str], label: str, zero: bool = False) -> str:
    """Returns a chart of value over step; `zero` starts the axis at 0. Values that are not finite leave a gap."""
    finite = [(step, value) for curve in curves for step, value in curve.points if math.isfinite(value)]
    if not finite:
        return note("No finite value was measured.")
    steps, values = [step for step, _ in finite], [value for _, value in finite]
    low, high, cut = _value_range(values, zero)
    x_ticks = nice_ticks(min(steps), max(steps)) if min(steps) < max(steps) else [min(steps)]
    x = number_axis(min(steps), max(steps), "{:,.0f}".format, labels={t: f"{t:,.0f}" for t in x_ticks if t == int(t)})
    series = [one for curve in curves for one in _series(curve, form)]
    text = f"{cut} value{'s' if cut > 1 else ''} above {form(high)} drawn at the top edge."
    svg = draw(series, x, number_axis(low, high, form), x_name="step", label=label)
    return svg + (note(text) if cut else "")


def thin_out(points: Points, max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Returns at most `max_points` points: the minimum and the maximum of each interval, so that no spike is lost.

    The first and the last point are always included. A value that is not finite counts as a minimum.
    """
    if len(points) <= max_points:
        return list(points)
    thinned = [points[0]]
    for interval in _intervals(points[1:-1], (max_points - 2) // 2):
        order = sorted(range(len(interval)), key=lambda j: v if math.isfinite(v := interval[j][1]) else -math.inf)
        thinned += [interval[j] for j in sorted({order[0], order[-1]})]
    return [*thinned, points[-1]]


def trend(points: Points, max_points: int = 100) -> list[tuple[float, float]]:
    """Returns the median of each interval at its middle: it neither lags behind the curve nor follows its spikes."""
    medians = []
    for interval in _intervals(points, max(1, min(max_points, len(points) // 4))):
        finite = [value for _, value in interval if math.isfinite(value)]
        medians.append(((interval[0][0] + interval[-1][0]) / 2, median(finite) if finite else math.nan))
    return medians


def _series(curve: Curve, form: Callable[[float], str]) -> list[Series]:
    line = thin_out(curve.points)
    if curve.sparse:
        dots = [(step, value, f"{curve.label}, step {step:,.0f}: {form(value)}") for step, value in curve.points]
        return [Series(label=curve.label, colour=curve.colour, line=line, dots=dots if len(dots) <= MAX_DOTS else ())]
    if len(curve.points) < TREND_FROM:
        return [Series(label=curve.label, colour=curve.colour, line=line)]
    return [
        Series(label=curve.label, colour=curve.colour, line=line, faint=True),
        Series(label=curve.label, colour=curve.colour, line=trend(curve.points)),
    ]


def _intervals(points: Points, count: int) -> list[Points]:
    """Returns the points cut into `count` parts of about equal length."""
    return [points[i * len(points) // count : (i + 1) * len(points) // count] for i in range(count)]


def _value_range(values: Sequence[float], zero: bool) -> tuple[float, float, int]:
    """Returns (low, high, number of values above high); high leaves out a few outliers that would flatten the rest."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    usual = ordered[int(0.98 * (len(ordered) - 1))]
    if len(ordered) >= 20 and high - low > 4 * (usual - low) and high > 3 * median(ordered):
        high = max(usual + 0.25 * (usual - low), 1.2 * median(ordered))
    if zero:
        low = min(0.0, low)
    margin = 0.04 * (high - low)
    return (low if zero else low - margin), high + margin, sum(value > high + margin for value in values)
