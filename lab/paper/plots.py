"""The charts of generated pages: grouped bars with values and ranges, and panels of curves."""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from files.palette import GRID, INK, SERIES

DPI = 120
MISSING = "not measured"
TEXT = {"fontsize": 8, "color": INK, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 2}}  # over lines
OUTSIDE = "outside upper center"  # a legend there is laid out with the axes, so nothing cuts it


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The value of a bar, and its range over repetitions; without a range there is no error bar."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Groups of horizontal bars, with one bar per series in each group; None is shown as not measured."""

    labels: Sequence[str]
    series: Mapping[str, Sequence[Bar | None]]
    title: str
    line: float  # position of a dotted line
    line_label: str = ""
    digits: int = 2  # of the values, after the decimal point
    is_logarithmic: bool = False  # the axis, which begins at the line


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A panel of lines: label to (x, y)."""

    title: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]


def exactly(value: float | None) -> Bar | None:
    """Returns the bar of a number without a range; None for None."""
    return None if value is None else Bar(value=value, low=value, high=value)


def rate_in_words(rate: str) -> str:
    """Returns a link rate as an axis shows it: 200 Mbit/s for `200mbit`."""
    return re.sub(r"^([0-9.]+)([kmg])bit$", lambda match: f"{match[1]} {match[2].upper()}bit/s", rate)


def draw_bars(bars: Bars) -> Figure:
    """Returns the figure of the bars, each labelled with its value; the first group is on top."""
    height = 0.8 / len(bars.series)
    figure = Figure(figsize=(9, 1.2 + len(bars.labels) * (0.25 + 0.2 * len(bars.series))), layout="constrained")
    axes = figure.add_subplot()
    for i, ((name, found), colour) in enumerate(zip(bars.series.items(), SERIES, strict=False)):
        places = [row - 0.4 + height * (i + 0.5) for row in range(len(bars.labels))]
        axes.barh(places, [bar.value if bar else 0.0 for bar in found], height * 0.9, color=colour, label=name)
        for place, bar in zip(places, found, strict=True):
            text = f"{bar.value:.{bars.digits}f}" if bar else MISSING
            end = (bar.high if bar else 0.0, place)
            axes.annotate(text, end, (4, 0), textcoords="offset points", va="center", **TEXT)
            draw_range(axes, bar, place)
    axes.axvline(bars.line, color=INK, linewidth=0.8, linestyle=":", label=bars.line_label or None)
    if bars.is_logarithmic:
        axes.set_xscale("log")
        axes.set_xlim(left=bars.line)
        axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.1)
    name_bars(axes, bars.labels, bars.title)
    figure.legend(loc=OUTSIDE, ncols=len(bars.series) + bool(bars.line_label), frameon=False)
    return figure


def draw_range(axes: Any, bar: Bar | None, place: float) -> None:
    """Draws the range of a horizontal bar, if it has one."""
    if bar and bar.high > bar.low:
        ends = [[bar.value - bar.low], [bar.high - bar.value]]
        axes.errorbar([bar.value], [place], xerr=ends, fmt="none", ecolor=INK, elinewidth=1, capsize=2)


def name_bars(axes: Any, labels: Sequence[str], title: str) -> None:
    """Labels rows of horizontal bars; the first is on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel(title)
    axes.spines[["top", "right"]].set_visible(False)


def draw_curves(panels: Sequence[Curves], *, x: str, y: str) -> Figure:
    """Returns the figure of the panels side by side; later lines are dashed, so that overlapping ones are visible.

    All panels have the same scales; y begins at 0.
    """
    figure = Figure(figsize=(5.5 * len(panels), 3.8), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), sharex=True, sharey=True), panels, strict=True):
        for i, (label, (xs, ys)) in enumerate(panel.lines.items()):
            style: dict[str, Any] = {"linewidth": 3.0 - 1.6 * i, "linestyle": ("-", "--")[i], "color": SERIES[i]}
            axes.plot(xs, ys, label=label, **style)
        axes.set_title(panel.title, fontsize=10, color=INK)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.tick_params(labelleft=True)
        axes.set_ylim(bottom=0)
        axes.grid(color=GRID, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return figure


def png(figure: Figure) -> bytes:
    """Returns the PNG of a figure; the same figure gives the same bytes."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()
