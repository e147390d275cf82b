"""The two pictures: bars of published and our ratios, and loss curves."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")  # Paul Tol's "bright" scheme, distinct for the colour-blind too
INK, GRID = "#1f2937", "#d5dae1"
DPI = 120


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Groups of horizontal bars, one bar a series in each group; None is written as not measured."""

    labels: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    title: str
    line: float  # where nothing is gained


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A panel of lines: label to (x, y)."""

    title: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]


def bars_png(bars: Bars) -> bytes:
    """Returns a PNG of the bars, each with its value."""
    height = 0.8 / len(bars.series)
    figure = Figure(figsize=(9, 1.2 + len(bars.labels) * (0.25 + 0.2 * len(bars.series))), layout="constrained")
    axes = figure.add_subplot()
    for i, ((name, values), colour) in enumerate(zip(bars.series.items(), COLOURS, strict=False)):
        places = [row - 0.4 + height * (i + 0.5) for row in range(len(bars.labels))]
        axes.barh(places, [value or 0 for value in values], height * 0.9, color=colour, label=name)
        for place, value in zip(places, values, strict=True):
            text = " not measured" if value is None else f" {value:.2f}"
            axes.text(value or 0, place, text, va="center", fontsize=8, color=INK)
    axes.axvline(bars.line, color=INK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(bars.labels)), bars.labels)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(bars.title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=len(bars.series), frameon=False)
    return _png(figure)


def curves_png(panels: Sequence[Curves], *, x: str, y: str) -> bytes:
    """Returns a PNG of the panels side by side; later lines are dashed, so that equal ones are both seen."""
    figure = Figure(figsize=(5.5 * len(panels), 3.8), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for i, (label, (xs, ys)) in enumerate(panel.lines.items()):
            style: dict[str, Any] = {"linewidth": 3.0 - 1.6 * i, "linestyle": ("-", "--")[i], "color": COLOURS[i]}
            axes.plot(xs, ys, label=label, **style)
        axes.set_title(panel.title, fontsize=10, color=INK)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(color=GRID, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()
