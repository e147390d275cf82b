"""Draws a replayed step: a lane for the compute and one for each network level."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from files.palette import FILL, GRID, INK, SERIES, SOFT
from metrics.units import format_seconds
from planner.timeline import NAMES, REPEATED, Interval, Timeline

LANES = {"compute": "compute", "intra": "inside a node", "inter": "between nodes"}
KINDS = {"kernel": "kernels", **NAMES, "other": "other traffic"}
# of SERIES
TRAFFIC = {"gather": 0, "hop_one": 1, "hop_two": 2, "other": 3, "gradient_scope": 4, "parameter_scope": 5}
TRAFFIC |= {"orthogonalise": 6, "experts": 7}
COLOURS = {"kernel": FILL, **{kind: SERIES[number] for kind, number in TRAFFIC.items()}}
HEIGHT = 0.72
PIXELS = 3000  # of the width: what is nearer than one of them is drawn as one bar


def draw(timeline: Timeline, title: str) -> Figure:
    """Returns the picture. Iterations of loops that repeat the one before are cut out: `x 8` is above the one shown."""
    end = max((interval.end_s for interval in timeline.intervals), default=0.0) or timeline.step_s
    lanes = [lane for lane in LANES if any(interval.lane == lane for interval in timeline.intervals)]
    brackets = _brackets(timeline)
    top = max(brackets.values(), default=-1) + 1  # rows of them
    figure = Figure(figsize=(11, 1.5 + 0.62 * len(lanes) + 0.25 * top), layout="constrained")
    axes = figure.add_subplot()
    shown = []
    for kind, name in KINDS.items():
        drawn = False
        for y, lane in enumerate(lanes):
            bars = _merged([i for i in timeline.intervals if i.lane == lane and _kind(i) == kind], end / PIXELS)
            if bars:
                label = name if not drawn else None
                axes.broken_barh(bars, (y - HEIGHT / 2, HEIGHT), color=COLOURS[kind], linewidth=0, label=label)
                drawn = True
        shown += [kind] if drawn else []
    axes.set_yticks(range(len(lanes)), [LANES[lane] for lane in lanes], color=INK)
    for bracket, row in brackets.items():
        y = -0.5 - 0.4 * row
        axes.plot([bracket.start_s, bracket.end_s], [y, y], color=INK, linewidth=0.8, marker="|", markersize=5)
        middle = (bracket.start_s + bracket.end_s) / 2
        axes.text(middle, y - 0.05, bracket.name, ha="center", va="bottom", fontsize=8, color=INK)
    axes.set_ylim(len(lanes) - 0.5, -0.5 - 0.4 * top)
    axes.set_xlim(0, end)
    cut = timeline.step_s - end
    left_out = (
        f"; repeated iterations of loops, {format_seconds(cut)}, are cut out" if cut > 0.01 * timeline.step_s else ""
    )
    axes.set_xlabel(f"seconds of a step of {format_seconds(timeline.step_s)}{left_out}", color=SOFT, fontsize=9)
    axes.set_title(f"{title}: calculated, not measured", fontsize=10, color=INK, loc="left")
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside lower right", ncols=len(shown), frameon=False, fontsize=9)
    return figure


def colour_of(name: str) -> int:
    """Returns the colour of a kind of traffic, by its place in SERIES."""
    return TRAFFIC.get(name, TRAFFIC["other"])


def _brackets(timeline: Timeline) -> dict[Interval, int]:
    """Returns the iterations that stand for several, each with its row: above those that it contains."""
    rows: dict[Interval, int] = {}
    repeated = [interval for interval in timeline.intervals if interval.lane == REPEATED]
    for one in sorted(repeated, key=lambda interval: interval.end_s - interval.start_s):
        inside = [row for other, row in rows.items() if one.start_s <= other.start_s and other.end_s <= one.end_s]
        rows[one] = max(inside, default=-1) + 1
    return rows


def _kind(interval: Interval) -> str:
    if interval.lane == "compute":
        return "kernel"
    return interval.name if interval.name in KINDS else "other"


def _merged(intervals: Sequence[Interval], gap: float) -> list[tuple[float, float]]:
    """Returns (start, length) of bars; those that are nearer than `gap` are one, and none is narrower."""
    bars: list[tuple[float, float]] = []
    for interval in sorted(intervals, key=lambda i: i.start_s):
        end = max(interval.end_s, interval.start_s + gap)
        if bars and interval.start_s - (bars[-1][0] + bars[-1][1]) < gap:
            start, length = bars[-1]
            bars[-1] = (start, max(length, end - start))
        else:
            bars.append((interval.start_s, end - interval.start_s))
    return bars
