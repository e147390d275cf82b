"""`Chart`: series over two axes, which the template draws as SVG: small, sharp, and in the page's colours."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any

Points = Sequence[tuple[float, float]]
LETTER = 6.6  # width of a character of a tick label
TICKS = 7  # approximate number per axis
MAX_POINTS = 400  # per curve
MAX_TIPS = 50  # per curve
TREND_FROM = 200  # points


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Maps values to positions from 0 to 1. `ticks` are (position, label). Words are not numeric."""

    position: Callable[[Any], float]
    ticks: Sequence[tuple[float, str]]
    numeric: bool = True


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of (x, y), dots of (x, y, tooltip), or both, in one colour, which is an index of `palette.SERIES`.

    A y that is not finite is a gap in the line, and for a dot a cross at the top. `shift` moves the dots to the right.
    """

    label: str
    colour: int
    line: Sequence[tuple[Any, float]] = ()
    dots: Sequence[tuple[object, float, str]] = ()
    shift: float = 0.0
    hover: bool = False  # shows a dot only below the pointer
    faint: bool = False  # and is not in the legend


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Data of the template, in units of its `viewBox`. Without series only the note is drawn."""

    series: Sequence[Series] = ()
    x: Axis = Axis(position=float, ticks=())
    y: Axis = Axis(position=float, ticks=())
    x_name: str = ""
    label: str = ""
    legend: str = ""  # its title
    note: str = ""

    width, height = 560, 278
    left, right, top, bottom = 76, 544, 16, 226

    def runs(self, one: Series) -> Iterator[list[str]]:
        """Yields the points (`x y`) of each part of the line without gaps.

        A single point appears twice, so that it is visible.
        """
        for finite, run in groupby(one.line, key=lambda point: math.isfinite(point[1])):
            if finite:
                places = [f"{self._across(self.x.position(a))} {self._down(self.y.position(b))}" for a, b in run]
                yield places if len(places) > 1 else places * 2

    def dots(self, one: Series) -> Iterator[tuple[float, float | None, str]]:
        """Yields (x, y, tooltip) of each dot. y is None where the value is not finite."""
        for a, b, tip in one.dots:
            y = self._down(self.y.position(b)) if math.isfinite(b) else None
            yield self._across(self.x.position(a)) + one.shift, y, tip

    def y_ticks(self) -> list[tuple[float, str]]:
        """Returns (y, label) of each tick."""
        return [(self._down(position), label) for position, label in self.y.ticks]

    def x_ticks(self) -> Iterator[tuple[float, str, str]]:
        """Yields (x, shown, label).

        A long word is shortened, and a label that would touch the previous one is omitted.
        """
        room = int((self.right - self.left) / max(1, len(self.x.ticks)) / LETTER)
        end = -math.inf
        for position, label in sorted(self.x.ticks):
            fits = self.x.numeric or len(label) < room
            shown = label if fits else label[: room - 1] + "\N{HORIZONTAL ELLIPSIS}"
            half = len(shown) * LETTER / 2
            middle = min(self._across(position), self.width - half)
            if middle - half > end:
                yield round(middle, 1), shown, label
                end = middle + half + LETTER

    def _across(self, position: float) -> float:
        return round(self.left + position * (self.right - self.left), 1)

    def _down(self, position: float) -> float:
        return round(self.bottom - position * (self.bottom - self.top), 1)


# ---------------------------------------------------------------------------------------------------- axes


def number_axis(
    low: float,
    high: float,
    form: Callable[[float], str],
    *,
    log: bool = False,
    margin: float = 0.0,
    labels: Mapping[float, str] | None = None,
) -> Axis:
    """Returns a linear or logarithmic axis with ticks at `labels`, or else at round numbers.

    `margin` widens the range at both ends, as a fraction of it. Values outside the range are drawn at its ends.
    """
    scale = math.log10 if log else float
    first, last = scale(low), scale(high)
    if first == last:
        first, last = first - (abs(first) * 0.1 or 1.0), last + (abs(last) * 0.1 or 1.0)
    first, last = first - margin * (last - first), last + margin * (last - first)
    if labels is None:
        ends = (10**first, 10**last) if log else (first, last)
        labels = {value: form(value) for value in round_ticks(*ends, log=log)}

    def position(value: float) -> float:
        return min(max((scale(value) - first) / (last - first), 0.0), 1.0)

    return Axis(position=position, ticks=[(position(value), label) for value, label in labels.items()])


def word_axis(words: Sequence[str]) -> Axis:
    """Returns an axis with the words side by side."""
    positions = {word: (i + 0.5) / len(words) for i, word in enumerate(words)}
    return Axis(position=positions.__getitem__, ticks=[(positions[word], word) for word in words], numeric=False)


def round_ticks(low: float, high: float, *, log: bool = False, integer: bool = False) -> list[float]:
    """Returns about TICKS round numbers in [low, high], or both ends if fewer than two round numbers are inside."""
    from matplotlib.ticker import LogLocator, MaxNLocator  # imported late: it delays startup

    few_decades = log and high < 300 * low
    linear = MaxNLocator(TICKS - 1, steps=(1, 2, 5, 10), integer=integer)
    locator = LogLocator(subs=(1, 2, 5) if few_decades else (1,)) if log else linear
    inside = [float(tick) for tick in locator.tick_values(low, high) if low <= tick * (1 + 1e-9) and tick <= high]
    return inside if len(inside) > 1 else [low, high]


# ----------------------------------------------------------------------------------------- curves over steps


@dataclass(frozen=True, kw_only=True)
class Curve:
    """(step, value) pairs. A `sparse` curve, such as validations, gets dots and no trend."""

    label: str
    points: Points
    sparse: bool = False


def curve_chart(curves: Sequence[Curve], *, form: Callable[[float], str], label: str, zero: bool = False) -> Chart:
    """Returns a chart of value over step. Long curves are thinned, with a trend line on top.

    `zero` starts the axis at 0. Values that are not finite leave a gap.
    """
    finite = [(step, value) for curve in curves for step, value in curve.points if math.isfinite(value)]
    if not finite:
        return Chart(note="No finite value was measured.")
    steps, values = [step for step, _ in finite], [value for _, value in finite]
    low, high, cut = _value_range(values, zero)
    first, last = min(steps), max(steps)
    x_ticks = round_ticks(first, last, integer=True) if first < last else [first]
    return Chart(
        series=[one for colour, curve in enumerate(curves) for one in _series(curve, colour, form)],
        x=number_axis(first, last, str, labels={tick: f"{tick:,.0f}" for tick in x_ticks}),
        y=number_axis(low, high, form),
        x_name="step",
        label=label,
        note=f"{cut} value{'s' if cut > 1 else ''} above {form(high)} drawn at the top edge." if cut else "",
    )


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
    """Returns the median of each interval at its middle, which neither lags nor follows spikes."""
    medians = []
    for interval in _intervals(points, max(1, min(max_points, len(points) // 4))):
        finite = [value for _, value in interval if math.isfinite(value)]
        medians.append(((interval[0][0] + interval[-1][0]) / 2, median(finite) if finite else math.nan))
    return medians


def _series(curve: Curve, colour: int, form: Callable[[float], str]) -> list[Series]:
    """Returns the thinned curve, below its trend if it is long, with tooltips at some of its points."""
    line = thin_out(curve.points)
    is_long = not curve.sparse and len(curve.points) >= TREND_FROM
    shown = trend(curve.points) if is_long else line
    told = [point for point in shown[:: -(-len(shown) // MAX_TIPS)] if math.isfinite(point[1])]
    dots = [(step, value, f"{curve.label}, step {step:,.0f}: {form(value)}") for step, value in told]
    series = [Series(label=curve.label, colour=colour, line=shown, dots=dots, hover=not curve.sparse)]
    return [Series(label=curve.label, colour=colour, line=line, faint=True), *series] if is_long else series


def _intervals(points: Points, count: int) -> list[Points]:
    """Returns the points cut into `count` parts of about equal length."""
    return [points[i * len(points) // count : (i + 1) * len(points) // count] for i in range(count)]


def _value_range(values: Sequence[float], zero: bool) -> tuple[float, float, int]:
    """Returns (low, high, number of values above high). high excludes a few outliers that would flatten the rest."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    usual = ordered[int(0.98 * (len(ordered) - 1))]
    if len(ordered) >= 20 and high - low > 4 * (usual - low) and high > 3 * median(ordered):
        high = max(usual + 0.25 * (usual - low), 1.2 * median(ordered))
    if zero:
        low = min(0.0, low)
    margin = 0.04 * (high - low)
    return (low if zero else low - margin), high + margin, sum(value > high + margin for value in values)
