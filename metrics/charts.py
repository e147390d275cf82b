"""`line_chart`: a chart as inline SVG, drawn here so that it is crisp, small and follows the page's colours.

Colours are CSS classes (`series-train`, `grid`, ...) that the page's style sheet defines for light and dark.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 560.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 14.0, 12.0, 34.0
MAX_POINTS = 600  # of one line; a longer one is thinned to the extremes of each stretch


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart; a `trend` is drawn over its own raw values, which are `faint`; `dots` marks few points."""

    label: str
    style: str  # the CSS class is `series-{style}`
    points: Points
    faint: bool = False
    trend: bool = False
    dots: bool = False


def line_chart(lines: Sequence[Line], *, form: Callable[[float], str], label: str, zero: bool = False) -> str:
    """Returns an SVG of value over step; `zero` starts the axis at 0. Values that are not finite leave a gap."""
    everything = [point for line in lines for point in line.points if math.isfinite(point[1])]
    if not everything:
        return '<p class="note">No finite value was measured.</p>'
    x_low, x_high = _widened(min(x for x, _ in everything), max(x for x, _ in everything))
    y_low, y_high, cut = _value_range([y for line in lines if not line.trend for _, y in line.points], zero)
    ticks_y, ticks_x = nice_ticks(y_low, y_high, 5), [t for t in nice_ticks(x_low, x_high, 6) if t == int(t)]
    y_low, y_high = min(y_low, ticks_y[0]), max(y_high, ticks_y[-1])

    def x_of(step: float) -> float:
        return LEFT + (step - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - (min(max(value, y_low), y_high) - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{escape(label)}">']
    y_steps = HEIGHT - BOTTOM + 18
    parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y_steps}" text-anchor="end">step</text>')
    for tick in ticks_y:
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(form(tick))}</text>')
    for tick in ticks_x:
        x, anchor = x_of(tick), "middle"
        if x > WIDTH - RIGHT - 24:
            x, anchor = WIDTH - 2, "end"
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y_steps}" text-anchor="{anchor}">{tick:,.0f}</text>')
    for line in lines:
        faint = " faint" if line.faint else ""
        for path in _paths(thin_out(line.points), x_of, y_of):
            parts.append(f'<path class="line series-{line.style}{faint}" d="{path}"/>')
        for step, value in line.points if line.dots and len(line.points) <= 60 else ():
            if math.isfinite(value):
                tip = escape(f"{line.label}, step {step:,.0f}: {form(value)}")
                parts.append(
                    f'<circle class="dot series-{line.style}" cx="{x_of(step):.1f}" cy="{y_of(value):.1f}" r="3">'
                    f"<title>{tip}</title></circle>"
                )
    parts.append("</svg>")
    return "".join(parts) + _legend(lines) + _cut_note(cut, y_high, form)


def thin_out(points: Points, max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Returns at most `max_points` points: the lowest and the highest of each stretch, so that no spike is lost.

    The first and the last point stay. A value that is not finite stays too, in place of the stretch's lowest.
    """
    if len(points) <= max_points:
        return list(points)
    inner = points[1:-1]
    stretches = (max_points - 2) // 2
    kept = [points[0]]
    for i in range(stretches):
        stretch = inner[i * len(inner) // stretches : (i + 1) * len(inner) // stretches]
        order = sorted(range(len(stretch)), key=lambda j: _finite_or(stretch[j][1], -math.inf))
        kept += [stretch[j] for j in sorted({order[0], order[-1]})]
    return [*kept, points[-1]]


def trend(points: Points, max_points: int = 100) -> list[tuple[float, float]]:
    """Returns the median of each stretch of the line, at the stretch's middle: it neither lags nor follows spikes."""
    stretches = max(1, min(max_points, len(points) // 4))
    medians = []
    for i in range(stretches):
        stretch = points[i * len(points) // stretches : (i + 1) * len(points) // stretches]
        finite = [value for _, value in stretch if math.isfinite(value)]
        medians.append(((stretch[0][0] + stretch[-1][0]) / 2, median(finite) if finite else math.nan))
    return medians


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Returns about `count` round numbers (1, 2 or 5 times a power of ten apart) that lie in [low, high]."""
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.75)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)] or [low]


def _value_range(values: list[float], zero: bool) -> tuple[float, float, int]:
    """Returns (low, high, number of values above high): a few far outliers do not flatten the rest."""
    ordered = sorted(value for value in values if math.isfinite(value))
    low, high = ordered[0], ordered[-1]
    usual = ordered[int(0.98 * (len(ordered) - 1))]
    if len(ordered) >= 20 and high - low > 4 * (usual - low) and high > 3 * median(ordered):
        high = max(usual + 0.25 * (usual - low), 1.2 * median(ordered))
    if zero:
        low = min(0.0, low)
    low, high = _widened(low, high)
    margin = 0.04 * (high - low)
    return (low if zero else low - margin), high + margin, sum(value > high + margin for value in values)


def _widened(low: float, high: float) -> tuple[float, float]:
    """Returns a range that is not empty."""
    if high > low:
        return low, high
    room = abs(low) * 0.1 or 1.0
    return low - room, high + room


def _paths(points: Points, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> list[str]:
    """Returns one SVG path for each run of finite points."""
    paths, current = [], []
    for step, value in [*points, (0.0, math.nan)]:
        if math.isfinite(value):
            current.append(f"{x_of(step):.1f} {y_of(value):.1f}")
        elif current:
            paths.append("M" + "L".join(current if len(current) > 1 else current * 2))
            current = []
    return paths


def _finite_or(value: float, otherwise: float) -> float:
    return value if math.isfinite(value) else otherwise


def _legend(lines: Sequence[Line]) -> str:
    named = [line for line in lines if not line.faint]
    if len(named) < 2:
        return ""
    keys = (f'<span><i class="key key-{line.style}"></i>{escape(line.label)}</span>' for line in named)
    return f'<p class="legend">{"".join(keys)}</p>'


def _cut_note(cut: int, high: float, form: Callable[[float], str]) -> str:
    if not cut:
        return ""
    return f'<p class="note">{cut} value{"s" if cut > 1 else ""} above {escape(form(high))} drawn at the top edge.</p>'
