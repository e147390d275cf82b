"""The charts of docs/strategies.md, docs/compression_accuracy.md and the README, from the records."""

from collections.abc import Sequence
from dataclasses import asdict

from matplotlib.figure import Figure

from files.palette import FILL, SERIES
from lab.benchmarks.scores import (
    DENSE,
    Line,
    codecs_of,
    compute_s,
    names_of,
    optimizer_of,
    rates_of,
    runs_of,
    sent_bytes,
    step_time,
)
from lab.paper.plots import OUTSIDE, Bar, Bars, draw_bars, name_bars, rate_in_words

IN_README = ("mics(2)", "mics(4)", "zero3", "zero3 auto", "zero2", "zero1", "ddp")  # its chart, in this order
TITLE = "seconds a step, measured on emulated nodes"


def bar(runs: Sequence[Line]) -> Bar | None:
    """Returns the bar of the step time of some runs, None without runs."""
    found = step_time(runs)
    return Bar(**asdict(found)) if found else None


def draw_step_times(lines: Sequence[Line]) -> Figure:
    """Draws the step time of every strategy, one bar per rate, with the range of the steps."""
    names, compute = names_of(lines), compute_s(lines)
    series = {rate_in_words(rate): [bar(runs_of(lines, name, rate)) for name in names] for rate in rates_of(lines)}
    line, label = (compute.value, "compute only") if compute else (0.0, "")
    return draw_bars(Bars(labels=names, series=series, title=TITLE, line=line, line_label=label, digits=1))


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


def draw_codecs(steps: Sequence[Line]) -> Figure:
    """Draws the step time of every codec, one bar per rate, with the range of the steps."""
    runs = {name: [line for line in steps if line["codec"] == name] for name in codecs_of(steps)}
    series = {
        rate_in_words(rate): [bar([line for line in of if line["rate"] == rate]) for of in runs.values()]
        for rate in reversed(rates_of(steps))
    }
    labels = [label_of(of, runs.get(DENSE, [])) for of in runs.values()]
    return draw_bars(Bars(labels=labels, series=series, title=TITLE, line=0.0))


def label_of(of: Sequence[Line], dense: Sequence[Line]) -> str:
    """Returns a codec's name, with what forbids to compare its bar with that of `none`."""
    notes = [] if optimizer_of(of[0]) in map(optimizer_of, dense) else [optimizer_of(of[0])]
    notes += [] if {line["commit"] for line in of} & {line["commit"] for line in dense} else ["another commit"]
    notes += ["superseded"] if any("superseded" in line for line in of) else []
    return "\n".join([of[0]["codec"], *([f"({', '.join(notes)})"] if notes else [])])
