"""`sweep_chart`: the metric over one swept key, a line for each value of a second one, as inline SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from palette import SERIES
from sweeps.axis import Axis, as_number, axis_of, measured_axis
from sweeps.plan import text
from sweeps.records import metric_text

WIDTH, HEIGHT = 560.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 66.0, 16.0, 16.0, 52.0
MAX_LINES = len(SERIES)
DODGE = 9.0  # between the dots of neighbouring lines where x is a word, so that none covers another
LETTER = 6.6  # width of a tick's letter


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run: the value of the chart's key, the value that chooses its line, and the metric."""

    x: Any
    line: Any  # None: there is one line
    y: float
    tip: str


def sweep_chart(points: Sequence[Point], *, x_name: str, line_name: str, metric: str) -> str:
    """Returns the chart: a dot a run, and where `x` is a number a line through the medians of each `x`.

    A value that is not finite is a cross at the top.
    """
    finite = [point.y for point in points if math.isfinite(point.y)]
    if not finite:
        return '<p class="note">No run has measured a finite value.</p>'
    x_axis, y_axis = axis_of([point.x for point in points]), measured_axis(finite, lambda y: tick_text(metric, y))
    lines = list(dict.fromkeys(text(p.line) for p in sorted(points, key=lambda p: as_number(p.line) or 0.0)))
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" '
        f'aria-label="{escape(f"{metric} over {x_name}")}">',
        _frame(x_axis, y_axis, x_name),
    ]
    for i, name in enumerate(lines):
        members = [point for point in points if text(point.line) == name]
        if x_axis.in_order and not _scattered(points):
            parts.append(_middle_line(members, x_axis, y_axis, i))
        aside = 0.0 if x_axis.in_order else DODGE * (i - (len(lines) - 1) / 2)
        parts += [_dot(point, x_axis, y_axis, i, aside) for point in members]
    return "".join(parts) + "</svg>" + (_legend(line_name, lines) if line_name else "")


def tick_text(metric: str, value: float) -> str:
    """Returns a round number of the metric's axis."""
    return metric_text(metric, value) if metric.endswith(("_bytes", "_s")) else text(value)


def _frame(x_axis: Axis, y_axis: Axis, x_name: str) -> str:
    """Returns grid and ticks; a label that would touch the one before it is left out."""
    parts = []
    for place, label in y_axis.ticks:
        y = _y(place)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    end = -math.inf
    room = (WIDTH - LEFT - RIGHT) / len(x_axis.ticks)
    for place, label in sorted(x_axis.ticks):
        short = label if x_axis.in_order or len(label) * LETTER < room else label[: int(room / LETTER) - 1] + "\u2026"
        half = len(short) * LETTER / 2
        if _x(place) - half > end:
            parts.append(f'<text class="tick" x="{_x(place):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">')
            parts.append(f"{escape(short)}<title>{escape(label)}</title></text>")
            end = _x(place) + half + LETTER
    parts.append(f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">')
    return "".join(parts) + f"{escape(x_name)}</text>"


def _middle_line(members: Sequence[Point], x_axis: Axis, y_axis: Axis, colour: int) -> str:
    """Returns a line through the medians, whole where the neighbours are finite."""
    values: dict[float, list[float]] = {}
    for point in members:
        values.setdefault(x_axis.position(point.x), []).append(point.y)
    middles = [(place, median(ys)) for place, ys in sorted(values.items()) if all(map(math.isfinite, ys))]
    path = "L".join(f"{_x(place):.1f} {_y(y_axis.position(middle)):.1f}" for place, middle in middles)
    return f'<path class="line colour-{colour % MAX_LINES}" d="M{path}"/>' if len(middles) > 1 else ""


def _dot(point: Point, x_axis: Axis, y_axis: Axis, colour: int, aside: float) -> str:
    x, style = _x(x_axis.position(point.x)) + aside, f"colour-{colour % MAX_LINES}"
    tip = f"<title>{escape(point.tip)}</title>"
    if not math.isfinite(point.y):
        return f'<path class="line {style}" d="M{x - 4:.1f} {TOP - 8}l8 8m0 -8l-8 8">{tip}</path>'
    return f'<circle class="dot {style}" cx="{x:.1f}" cy="{_y(y_axis.position(point.y)):.1f}" r="3.6">{tip}</circle>'


def _legend(name: str, lines: Sequence[str]) -> str:
    keys = (f'<span><i class="key back-{i % MAX_LINES}"></i>{escape(word)}</span>' for i, word in enumerate(lines))
    return f'<p class="legend"><span>{escape(name)}</span>{"".join(keys)}</p>'


def _scattered(points: Sequence[Point]) -> bool:
    """Says whether the values were drawn and not chosen: no two runs share one, though lines would have to."""
    return len(points) > MAX_LINES and len({text(point.x) for point in points}) == len(points)


def _x(place: float) -> float:
    return LEFT + place * (WIDTH - LEFT - RIGHT)


def _y(place: float) -> float:
    return HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM)
