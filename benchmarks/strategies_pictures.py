"""The pictures of docs/strategies.md and of the README, from the lines of the record."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.strategies_lines import (
    Line,
    above_compute_s,
    compute_s,
    link_s,
    names_of,
    rates_of,
    runs_of,
    sent_bytes,
    step_time,
)
from palette import FILL, INK, SERIES
from paper.plots import MISSING, OUTSIDE, Bars, draw_bars, draw_range, name_bars, rate_in_words


def draw_step_times(lines: Sequence[Line]) -> Figure:
    """Draws the step time of every strategy, one bar per rate, with the range of the steps."""
    names, compute = names_of(lines), compute_s(lines)
    series = {
        rate_in_words(rate): [step_time(runs_of(lines, name, rate)) for name in names] for rate in rates_of(lines)
    }
    line, label = (compute.value, "compute only") if compute else (0.0, "")
    title = "seconds a step, measured on emulated nodes"
    return draw_bars(Bars(labels=names, series=series, title=title, line=line, line_label=label, digits=1))


def draw_bytes(lines: Sequence[Line]) -> Figure:
    """Draws the bytes per step that a node sends to other nodes, and those between its devices."""
    names = names_of(lines)
    inter, intra = ([sent_bytes(lines, n, f"compiled_{key}_bytes") / 1e6 for n in names] for key in ("inter", "intra"))
    figure = Figure(figsize=(9, 0.34 * len(names) + 1.4), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(range(len(names)), inter, 0.7, label="between nodes", color=SERIES[0])
    axes.barh(range(len(names)), intra, 0.7, left=inter, label="inside the node", color=FILL)
    name_bars(axes, names, "MB that a node sends in a step, counted in the compiled program")
    figure.legend(loc=OUTSIDE, ncols=2, frameon=False)
    return figure


def draw_shares(lines: Sequence[Line]) -> Figure:
    """Draws each measured step above the sum of compute time and link time, on one scale for all rates."""
    rates, compute = rates_of(lines), compute_s(lines)
    shown = {rate: [name for name in names_of(lines) if runs_of(lines, name, rate)] for rate in rates}
    rows = max(map(len, shown.values()))
    figure = Figure(figsize=(5.4 * len(rates), 0.5 * rows + 1.4), layout="constrained")
    for axes, rate in zip(figure.subplots(1, len(rates), squeeze=False, sharex=True)[0], rates, strict=True):
        names = shown[rate]
        steps = [step_time(runs_of(lines, name, rate)) for name in names]
        above = [y - 0.2 for y in range(len(names))]
        axes.barh(
            above, [step.value if step else 0.0 for step in steps], 0.36, color=SERIES[0], label="a step, measured"
        )
        for place, step in zip(above, steps, strict=True):
            draw_range(axes, step, place)
        known = [y for y, name in enumerate(names) if above_compute_s(lines, name, rate) is not None]
        first = compute.value if compute else 0.0
        below, links = [y + 0.2 for y in known], [link_s(lines, names[y], rate) for y in known]
        axes.barh(below, first, 0.36, color=FILL, label="compute only, measured")
        axes.barh(below, links, 0.36, left=first, color=SERIES[1], label="and the link at its full rate, calculated")
        for y in set(range(len(names))) - set(known):
            axes.text(0.0, y + 0.2, f" compute only: {MISSING}", va="center", fontsize=8, color=INK)
        name_bars(axes, names, f"seconds a step at {rate_in_words(rate)}")
        axes.set_ylim(bottom=rows - 0.5)  # bars as thick as in the other panels
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc=OUTSIDE, ncols=3, frameon=False)
    return figure
