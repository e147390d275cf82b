"""Draws strategies against the number of devices: throughput of each device, and cost."""

from collections.abc import Callable, Sequence
from math import nan

from matplotlib.figure import Figure

from palette import GRID, INK, SERIES, SOFT
from planner.predict import Prediction
from planner.report import Plan

MARKERS = "osD^vP*X"


def draw_curves(plans: Sequence[Plan], title: str, nodes: Sequence[int] = ()) -> Figure:
    """Returns the picture: a curve for each strategy; where it is not legal or does not fit, it is broken.

    `nodes`: counts that may be without a plan. The second panel is left out without a price. The devices are on a
    logarithmic axis.
    """
    per_node = plans[0].devices // plans[0].nodes
    devices = {count: count * per_node for count in (*nodes, *(plan.nodes for plan in plans))}
    every = [p for plan in plans for p in plan.predictions]
    names = sorted({p.candidate.name for p in every})

    def speed(p: Prediction) -> float | None:
        return (p.tokens_per_s or p.rows_per_s) / devices[p.nodes]

    has_tokens = all(p.tokens_per_s is not None for p in every)
    cells: dict[str, Callable[[Prediction], float | None]] = {
        f"{'tokens' if has_tokens else plans[0].unit}/s of each device": speed
    }
    if any(p.usd_on_demand is not None for p in every):
        cells["$ for a billion tokens, on demand"] = lambda p: p.usd_on_demand
    figure = Figure(figsize=(5.5 * len(cells), 5), layout="constrained")
    for axes, (label, cell) in zip(figure.subplots(1, len(cells), squeeze=False)[0], cells.items(), strict=True):
        for n, name in enumerate(names):
            of_plans = [[p for p in plan.predictions if p.candidate.name == name] for plan in plans]
            found = {devices[ps[0].nodes]: cell(ps[0]) for ps in of_plans if ps}  # the fastest of each name
            points = [(x, found.get(x)) for x in sorted(devices.values())]
            axes.plot(
                [x for x, _ in points],
                [nan if y is None else y for _, y in points],
                color=SERIES[n % len(SERIES)],
                marker=MARKERS[n % len(MARKERS)],
                linestyle="--" if n >= len(SERIES) else "-",
                label=name if axes is figure.axes[0] else None,
            )
        axes.set_xscale("log", base=2)
        ticks = sorted({*devices.values()})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("devices", color=SOFT, fontsize=9)
        heading = f"{title}\n{label}" if axes is figure.axes[0] else label
        axes.set_title(heading, fontsize=10, color=INK, loc="left")
        axes.grid(color=GRID, linewidth=0.6)
        axes.tick_params(length=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure
