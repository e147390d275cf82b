"""The charts of the pages: grouped bars with values and ranges, stacked bars, and timelines."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from lab.records import Range
from runtime.files.palette import FILL, GRID, INK, SERIES, SERIES_ON_DARK, SOFT

DPI = 120
MISSING = "not measured"
TEXT = {"fontsize": 8, "color": INK, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 2}}  # over lines
OUTSIDE = "outside upper center"  # a legend in this place is laid out with the axes, so nothing cuts it


def exactly(value: float | None) -> Range | None:
    """Returns a number as a bar without a range; None for None."""
    return None if value is None else Range(value=value, low=value, high=value)


def rate_in_words(rate: str) -> str:
    """Returns a link rate as an axis shows it: 200 Mbit/s for `200mbit`."""
    return re.sub(r"^([0-9.]+)([kmg])bit$", lambda match: f"{match[1]} {match[2].upper()}bit/s", rate)


def draw_bars(
    labels: Sequence[str],
    series: Mapping[str, Sequence[Range | None]],
    title: str,
    *,
    line: float = 0.0,
    line_label: str = "",
    digits: int = 2,
) -> Figure:
    """Returns the figure of horizontal bars, one per series in each group, each with its value; the first is on top.

    None is shown as not measured. There is a dotted line at `line`.
    """
    height = 0.8 / len(series)
    figure = Figure(figsize=(9, 1.2 + len(labels) * (0.25 + 0.2 * len(series))), layout="constrained")
    axes = figure.add_subplot()
    for i, ((name, found), colour) in enumerate(zip(series.items(), SERIES, strict=False)):
        places = [row - 0.4 + height * (i + 0.5) for row in range(len(labels))]
        axes.barh(places, [bar.value if bar else 0.0 for bar in found], height * 0.9, color=colour, label=name)
        for place, bar in zip(places, found, strict=True):
            text = f"{bar.value:.{digits}f}" if bar else MISSING
            end = (bar.high if bar else 0.0, place)
            axes.annotate(text, end, (4, 0), textcoords="offset points", va="center", **TEXT)
            if bar and bar.high > bar.low:
                ends = [[bar.value - bar.low], [bar.high - bar.value]]
                axes.errorbar([bar.value], [place], xerr=ends, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
    axes.axvline(line, color=INK, linewidth=0.8, linestyle=":", label=line_label or None)
    axes.margins(x=0.1)
    _name_bars(axes, labels, title)
    figure.legend(loc=OUTSIDE, ncols=len(series) + bool(line_label), frameon=False)
    return figure


def draw_stacked(labels: Sequence[str], series: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Returns the figure of horizontal bars in two parts."""
    figure = Figure(figsize=(9, 0.34 * len(labels) + 1.4), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(labels)
    for (name, values), colour in zip(series.items(), (SERIES[0], FILL), strict=True):
        axes.barh(range(len(labels)), values, 0.7, left=left, label=name, color=colour)
        left = list(values)
    _name_bars(axes, labels, title)
    figure.legend(loc=OUTSIDE, ncols=2, frameon=False)
    return figure


def draw_headline(values: Mapping[str, float], title: str, *, is_dark: bool) -> Figure:
    """Returns the figure of one bar per label with its value at the end, on white, or transparent for dark pages."""
    ground, ink, colour = ("none", GRID, SERIES_ON_DARK[0]) if is_dark else ("white", INK, SERIES[0])
    figure = Figure(figsize=(9, 0.5 * len(values) + 0.8), facecolor=ground)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    axes = figure.add_subplot(facecolor="none")
    bars = axes.barh(range(len(values)), list(values.values()), 0.65, color=colour)
    axes.bar_label(bars, fmt="{:.0f} MB", padding=5, fontsize=12, color=ink)
    axes.set_yticks(range(len(values)), list(values), fontsize=12, color=ink)
    axes.set_xticks([])
    axes.set_title(title, fontsize=12, color=ink, loc="left")
    axes.tick_params(length=0)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.spines[:].set_visible(False)
    return figure


def draw_timelines(
    lanes: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], title: str, *, is_dark: bool
) -> Figure:
    """Returns the figure of one lane per label, the first on top, with the (start, end) of each kind of work in it.

    At most three kinds: the first is background, and the others are series.
    """
    ground, ink, series, fill = ("none", GRID, SERIES_ON_DARK, SOFT) if is_dark else ("white", INK, SERIES, FILL)
    figure = Figure(figsize=(9, 0.3 * len(lanes) + 1.3), facecolor=ground, layout="constrained")
    axes = figure.add_subplot(facecolor="none")
    for row, kinds in enumerate(lanes.values()):
        for (kind, spans), colour in zip(kinds.items(), (fill, *series), strict=False):
            widths = [(start, end - start) for start, end in spans]
            axes.broken_barh(widths, (row - 0.4, 0.8), color=colour, linewidth=0, label=None if row else kind)
    axes.set_yticks(range(len(lanes)), list(lanes), color=ink)
    axes.invert_yaxis()
    axes.margins(x=0, y=0.02)
    axes.set_xlabel(title, color=ink)
    axes.tick_params(colors=ink, length=0)
    axes.spines[:].set_visible(False)
    figure.legend(loc=OUTSIDE, ncols=3, frameon=False, labelcolor=ink)
    return figure


def _name_bars(axes: Any, labels: Sequence[str], title: str) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel(title)
    axes.spines[["top", "right"]].set_visible(False)


def png(figure: Figure) -> bytes:
    """Returns the PNG of a figure; the same figure gives the same bytes."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()
