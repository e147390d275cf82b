"""Draws strategies against the number of devices: throughput of each device, and cost."""

from collections.abc import Callable, Mapping, Sequence
from math import nan

from matplotlib.figure import Figure

from files.palette import GRID, INK, SERIES, SOFT
from planner.predict import Prediction
from planner.report import Plan

MARKERS = "osD^vP*X"


Curves = Mapping[str, Sequence[tuple[int, float]]]  # by strategy: (devices, value), NaN without a plan


def curves_of(plans: Sequence[Plan], nodes: Sequence[int] = ()) -> dict[str, Curves]:
    """Returns throughput of each device and, with a price, cost: the fastest prediction of each strategy.

    `nodes`: counts that may be without a plan.
    """
    per_node = plans[0].devices // plans[0].nodes
    devices = {count: count * per_node for count in (*nodes, *(plan.nodes for plan in plans))}
    every = [p for plan in plans for p in plan.predictions]

    def speed(p: Prediction) -> float | None:
        return (p.tokens_per_s or p.rows_per_s) / devices[p.nodes]

    has_tokens = all(p.tokens_per_s is not None for p in every)
    cells: dict[str, Callable[[Prediction], float | None]] = {
        f"{'tokens' if has_tokens else plans[0].unit}/s of each device": speed
    }
    if any(p.usd_on_demand is not None for p in every):
        cells["$ for a billion tokens, on demand"] = lambda p: p.usd_on_demand
    found: dict[str, dict[str, dict[int, float | None]]] = {label: {} for label in cells}
    for plan in plans:
        for p in reversed(plan.predictions):  # the fastest of each strategy last
            for label, cell in cells.items():
                found[label].setdefault(p.candidate.words, {})[devices[p.nodes]] = cell(p)

    def points(values: Mapping[int, float | None]) -> list[tuple[int, float]]:
        return [(x, nan if (y := values.get(x)) is None else y) for x in sorted({*devices.values()})]

    return {label: {name: points(lines[name]) for name in sorted(lines)} for label, lines in found.items()}


def draw_curves(plans: Sequence[Plan], title: str, nodes: Sequence[int] = ()) -> Figure:
    """Returns the picture: a curve for each strategy; where it is not legal or does not fit, it is broken.

    `nodes`: counts that may be without a plan. The second panel is left out without a price. The devices are on a
    logarithmic axis.
    """
    curves = curves_of(plans, nodes)
    figure = Figure(figsize=(5.5 * len(curves), 5), layout="constrained")
    for axes, (label, lines) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        for n, (name, points) in enumerate(lines.items()):
            axes.plot(
                *zip(*points, strict=True),
                color=SERIES[n % len(SERIES)],
                marker=MARKERS[n % len(MARKERS)],
                linestyle="--" if n >= len(SERIES) else "-",
                label=name if axes is figure.axes[0] else None,
            )
        axes.set_xscale("log", base=2)
        ticks = [x for x, _ in next(iter(lines.values()))]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("devices", color=SOFT, fontsize=9)
        heading = f"{title}: calculated, not measured\n{label}" if axes is figure.axes[0] else label
        axes.set_title(heading, fontsize=10, color=INK, loc="left")
        axes.grid(color=GRID, linewidth=0.6)
        axes.tick_params(length=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure
