"""The planner's pictures: a replayed step in lanes, and strategies against the number of devices."""

from collections.abc import Callable, Sequence
from math import nan
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from planner.predict import Prediction
from planner.replay import NAMES, REPEATED, Bar, Timeline
from planner.report import LEVELS, TRAFFIC, Plan
from runtime.files.palette import FILL, GRID, INK, SERIES, SOFT
from training.metrics.units import format_seconds

LANES = {"compute": "compute", "intra": LEVELS["intra"], "inter": LEVELS["inter"]}
KINDS = {"kernel": "kernels", **NAMES, "other": "other traffic"}
COLOURS = {"kernel": FILL, **{kind: SERIES[number] for kind, number in TRAFFIC.items()}}
HEIGHT = 0.72
PIXELS = 3000  # width: bars with a smaller gap than one pixel are merged
MARKERS = "osD^vP*X"
LEGEND_WIDTH = 58  # characters of a line in the legend of a panel


def draw(timeline: Timeline, title: str) -> Figure:
    """Returns the picture. Repeated loop iterations are cut out, with `x 8` above the iteration shown."""
    end = max((interval.end_s for interval in timeline.intervals), default=0.0) or timeline.step_s
    lanes = [lane for lane in LANES if any(interval.lane == lane for interval in timeline.intervals)]
    brackets = _brackets(timeline)
    top = max(brackets.values(), default=-1) + 1  # number of their rows
    figure = Figure(figsize=(11, 1.5 + 0.62 * len(lanes) + 0.25 * top), layout="constrained")
    axes = figure.add_subplot()
    for kind, name in KINDS.items():
        for y, lane in enumerate(lanes):
            bars = _merged([i for i in timeline.intervals if i.lane == lane and _kind(i) == kind], end / PIXELS)
            if bars:
                label = name if name not in axes.get_legend_handles_labels()[1] else None
                axes.broken_barh(bars, (y - HEIGHT / 2, HEIGHT), color=COLOURS[kind], linewidth=0, label=label)
    axes.set_yticks(range(len(lanes)), [LANES[lane] for lane in lanes], color=INK)
    for bracket, row in brackets.items():
        y = -0.5 - 0.4 * row
        axes.plot([bracket.start_s, bracket.end_s], [y, y], color=INK, linewidth=0.8, marker="|", markersize=5)
        middle = (bracket.start_s + bracket.end_s) / 2
        axes.text(middle, y - 0.05, bracket.name, ha="center", va="bottom", fontsize=8, color=INK)
    axes.set_ylim(len(lanes) - 0.5, -0.5 - 0.4 * top)
    axes.set_xlim(0, end)
    cut = timeline.step_s - end
    rest = f"; repeated iterations of loops, {format_seconds(cut)}, are cut out" if cut > 0.01 * timeline.step_s else ""
    _styled(axes, title, f"seconds of a step of {format_seconds(timeline.step_s)}{rest}", grid="x")
    axes.spines["left"].set_visible(False)
    figure.legend(loc="outside lower right", ncols=len(KINDS), frameon=False, fontsize=9)
    return figure


def draw_curves(plans: Sequence[Plan], title: str, nodes: Sequence[int] = ()) -> Figure:
    """Returns throughput per device and, with a price, cost against devices: a curve for each strategy.

    A curve is broken where its strategy is illegal or does not fit. `nodes` are counts that may lack a plan.
    """
    per_node, unit = plans[0].devices // plans[0].nodes, plans[0].unit
    every = [p for plan in plans for p in reversed(plan.predictions)]  # each strategy's fastest prediction is last
    best: dict[str, dict[int, Prediction]] = {}  # by strategy and number of nodes
    for p in every:
        best.setdefault(p.candidate.words, {})[p.nodes] = p
    unit = "tokens" if all(p.tokens_per_s is not None for p in every) else unit
    panels: dict[str, Callable[[Prediction], float | None]] = {
        f"{unit}/s of each device": lambda p: (p.tokens_per_s or p.rows_per_s) / (p.nodes * per_node)
    }
    if any(p.usd_on_demand is not None for p in every):
        panels["$ for a billion tokens, on demand"] = lambda p: p.usd_on_demand
    counts = sorted({*nodes, *(plan.nodes for plan in plans)})
    devices = [count * per_node for count in counts]
    figure = Figure(figsize=(5.5 * len(panels), 5), layout="constrained")
    for axes, (label, value) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for n, name in enumerate(sorted(best)):
            values = [value(best[name][count]) if count in best[name] else None for count in counts]
            axes.plot(
                devices,
                [nan if one is None else one for one in values],
                color=SERIES[n % len(SERIES)],
                marker=MARKERS[n % len(MARKERS)],
                linestyle="--" if n >= len(SERIES) else "-",
                label=fill(name, LEGEND_WIDTH) if axes is figure.axes[0] else None,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(devices, map(str, devices))
        axes.set_ylim(bottom=0)
        _styled(axes, title if axes is figure.axes[0] else "", "devices", label)
    figure.legend(loc="outside lower center", ncols=len(panels), frameon=False, fontsize=9)
    return figure


def _styled(axes: Axes, title: str, below: str, label: str = "", grid: str = "both") -> None:
    """Sets the title and grid of axes, and removes their frame."""
    heading = [f"{title}: calculated, not measured"] if title else []
    axes.set_title("\n".join([*heading, *([label] if label else [])]), fontsize=10, color=INK, loc="left")
    axes.set_xlabel(below, color=SOFT, fontsize=9)
    axes.grid(axis=grid, color=GRID, linewidth=0.6)  # pyright: ignore[reportArgumentType]
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _brackets(timeline: Timeline) -> dict[Bar, int]:
    """Returns the bars of repeated iterations, with the row of each: a loop is above the loops inside it."""
    rows: dict[Bar, int] = {}
    repeated = [interval for interval in timeline.intervals if interval.lane == REPEATED]
    for one in sorted(repeated, key=lambda interval: interval.end_s - interval.start_s):
        inside = [row for other, row in rows.items() if one.start_s <= other.start_s and other.end_s <= one.end_s]
        rows[one] = max(inside, default=-1) + 1
    return rows


def _kind(bar: Bar) -> str:
    if bar.lane == "compute":
        return "kernel"
    return bar.name if bar.name in KINDS else "other"


def _merged(intervals: Sequence[Bar], gap: float) -> list[tuple[float, float]]:
    """Returns (start, length) of bars. Bars nearer than `gap` are merged, and none is narrower than `gap`."""
    bars: list[tuple[float, float]] = []
    for interval in sorted(intervals, key=lambda i: i.start_s):
        end = max(interval.end_s, interval.start_s + gap)
        if bars and interval.start_s - (bars[-1][0] + bars[-1][1]) < gap:
            start, length = bars[-1]
            bars[-1] = (start, max(length, end - start))
        else:
            bars.append((interval.start_s, end - interval.start_s))
    return bars
