"""`draw`: a chart as inline SVG, which is small, sharp at every size and follows the page's light and dark colours.

Colours are CSS classes of the page: `colour-N` for strokes and `back-N` for the legend, N counting `palette.SERIES`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from palette import SERIES

WIDTH, HEIGHT = 560.0, 278.0
LEFT, RIGHT, TOP, BOTTOM = 76.0, 16.0, 16.0, 52.0
LETTER = 6.6  # width of a character of a tick label
TICKS = 7  # of an axis, about


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Maps values to positions from 0 to 1; `ticks` are (position, label); words are not numeric."""

    position: Callable[[Any], float]
    ticks: Sequence[tuple[float, str]]
    numeric: bool = True


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of (x, y), dots of (x, y, tooltip), or both, in one colour.

    A y that is not finite is a gap in the line, and a cross at the top for a dot. `shift` moves the dots to the right.
    """

    label: str
    colour: int
    line: Sequence[tuple[Any, float]] = ()
    dots: Sequence[tuple[Any, float, str]] = ()
    shift: float = 0.0
    faint: bool = False  # and not in the legend


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
    low, high = scale(low), scale(high)
    if low == high:
        low, high = low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
    low, high = low - margin * (high - low), high + margin * (high - low)
    if labels is None:
        labels = {value: form(value) for value in (_log_ticks(low, high) if log else nice_ticks(low, high))}

    def position(value: float) -> float:
        return min(max((scale(value) - low) / (high - low), 0.0), 1.0)

    return Axis(position=position, ticks=[(position(value), label) for value, label in labels.items()])


def word_axis(words: Sequence[str]) -> Axis:
    """Returns an axis with the words side by side."""
    positions = {word: (i + 0.5) / len(words) for i, word in enumerate(words)}
    return Axis(position=positions.__getitem__, ticks=[(positions[word], word) for word in words], numeric=False)


def nice_ticks(low: float, high: float, count: int = TICKS) -> list[float]:
    """Returns about `count` round numbers (1, 2 or 5 times a power of ten apart) in [low, high]."""
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.75)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)] or [low]


def draw(series: Sequence[Series], x: Axis, y: Axis, *, x_name: str, label: str, legend: str = "") -> str:
    """Returns the SVG and its legend, which has the title `legend`; one series without a title needs no legend."""
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{escape(label)}">',
        *_y_ticks(y),
        *_x_ticks(x),
        _tick_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_name),
    ]
    for one in series:
        style = f"colour-{one.colour % len(SERIES)}"
        for finite, run in groupby(one.line, key=lambda point: math.isfinite(point[1])):
            places = [f"{_x(x.position(a)):.1f} {_y(y.position(b)):.1f}" for a, b in run] if finite else []
            if places:
                path = "L".join(places if len(places) > 1 else places * 2)
                parts.append(f'<path class="line {style}{" faint" if one.faint else ""}" d="M{path}"/>')
        for a, b, tip in one.dots:
            left, title = _x(x.position(a)) + one.shift, f"<title>{escape(tip)}</title>"
            if math.isfinite(b):
                shape = f'<circle class="dot {style}" cx="{left:.1f}" cy="{_y(y.position(b)):.1f}" r="3.4">'
                parts.append(f"{shape}{title}</circle>")
            else:
                cross = f"M{left - 4:.1f} {TOP - 8}l8 8m0 -8l-8 8"
                parts.append(f'<path class="line {style}" d="{cross}">{title}</path>')
    named = [one for one in series if not one.faint]
    return "".join(parts) + "</svg>" + (_legend(legend, named) if legend or len(named) > 1 else "")


def _y_ticks(y: Axis) -> Iterator[str]:
    for position, label in y.ticks:
        top = _y(position)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{top:.1f}" y2="{top:.1f}"/>'
        yield _tick_text(LEFT - 8, top + 4, label, anchor="end")


def _x_ticks(x: Axis) -> Iterator[str]:
    """Yields the labels: a long word is shortened, and a label that would touch the previous one is left out."""
    room = int((WIDTH - LEFT - RIGHT) / max(1, len(x.ticks)) / LETTER)
    end = -math.inf
    for position, label in sorted(x.ticks):
        short = label if x.numeric or len(label) < room else label[: room - 1] + "\N{HORIZONTAL ELLIPSIS}"
        half = len(short) * LETTER / 2
        middle = min(_x(position), WIDTH - half)
        if middle - half > end:
            yield _tick_text(middle, HEIGHT - BOTTOM + 18, short, title="" if short == label else label)
            end = middle + half + LETTER


def _tick_text(x: float, y: float, text: str, *, anchor: str = "middle", title: str = "") -> str:
    tip = f"<title>{escape(title)}</title>" if title else ""
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}{tip}</text>'


def _log_ticks(low: float, high: float) -> list[float]:
    """Returns round numbers between 10**low and 10**high: 1, 2 and 5 of each decade, or only 1 of many decades."""
    factors = (1, 2, 5) if high - low < 2.5 else (1,)
    ticks = [factor * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for factor in factors]
    inside = [tick for tick in ticks if low <= math.log10(tick) <= high]
    return inside if len(inside) > 1 else [10**low, 10**high]


def _legend(title: str, series: Sequence[Series]) -> str:
    keys = "".join(
        f'<span><i class="key back-{one.colour % len(SERIES)}"></i>{escape(one.label)}</span>' for one in series
    )
    return f'<p class="legend">{f"<span>{escape(title)}</span>" if title else ""}{keys}</p>'


def _x(position: float) -> float:
    return LEFT + position * (WIDTH - LEFT - RIGHT)


def _y(position: float) -> float:
    return HEIGHT - BOTTOM - position * (HEIGHT - TOP - BOTTOM)
