"""`plan_page`: a self-contained HTML page of plans, in the style of the reports of runs and sweeps."""

import math
from collections.abc import Sequence
from typing import Any

from metrics.charts import Axis, Chart, Series, number_axis
from metrics.page import render
from metrics.units import format_bytes, format_count, format_percent, format_seconds
from planner.curves import curves_of
from planner.picture import colour_of
from planner.predict import Prediction
from planner.report import (
    LEVELS,
    MEMORY_PARTS,
    Plan,
    candidate_rows,
    counts_text,
    helps_text,
    scaling_rows,
    sent_text,
    time_rows,
)
from planner.timeline import NAMES

SHOWN = 1e-3  # of a step: what takes less is in the table alone


def plan_page(
    name: str, plans: Sequence[Plan | str], nodes: Sequence[int], timeline_png: bytes, command: str, spot: str = ""
) -> str:
    """Returns the page: how a run scales, if there are several plans, and all that the last one says.

    A plan that is text says why there is none for its number of `nodes`. `timeline_png` draws the last plan's best
    step; `spot` is the text about spot nodes, if any.
    """
    found = [plan for plan in plans if isinstance(plan, Plan)]
    plan, best = found[-1], found[-1].best
    return render(
        "planner/page.html",
        title=f"Plan of {name}",
        heading=name,
        badge=best.candidate.name,
        mood="good",
        about=plan.title,
        footer="Predicted from the compiled program; docs/planner.md says how far to trust it.",
        plan=plan,
        facts=_tiles(plan),
        scaling=scaling_rows(plans, nodes) if len(plans) > 1 else None,
        charts=_charts(found, nodes),
        candidates=candidate_rows(plan),
        memory=_memory(best),
        times=_times(best),
        timeline_png=timeline_png,
        helps=helps_text(plan.helps, best.step_s) if plan.helps else "",
        spot=spot,
        notes=[*([counts_text(plan.counts)] if plan.counts else []), *plan.notes],
        command=command,
    )


def _tiles(plan: Plan) -> list[tuple[str, str, str]]:
    p = plan.best
    exposed = sum(part.exposed_s for part in p.traffic) / p.step_s
    facts = [
        ("Step", format_seconds(p.step_s), f"{p.accumulation} x {p.candidate.micro_size} rows of each device"),
        (f"{plan.unit.capitalize()}/s", format_count(p.rows_per_s), f"{plan.devices} devices"),
        ("MFU", format_percent(p.mfu), "of the devices' peak"),
        ("Exposed", format_percent(exposed), "of the step: kernels wait for the network"),
        ("Memory", format_bytes(p.memory.total), f"of {format_bytes(p.memory.capacity)} a device"),
        ("Between nodes", format_bytes(p.inter_bytes), "sent per device and step"),
        ("Inside nodes", format_bytes(p.intra_bytes), "sent per device and step"),
    ]
    if p.tokens_per_s is not None:
        facts.insert(2, ("Tokens/s", format_count(p.tokens_per_s), f"{plan.nodes} nodes"))
    if p.usd_on_demand is not None:
        spot = "on demand" if p.usd_spot is None else f"on demand; {p.usd_spot:,.0f} $ on spot nodes"
        facts.append(("A billion tokens", f"{p.usd_on_demand:,.0f} $", spot))
    return facts


def _charts(plans: Sequence[Plan], nodes: Sequence[int]) -> dict[str, Chart]:
    """Returns throughput and cost against devices, a line for each strategy; none of a single number of devices."""
    charts = {}
    for label, curves in curves_of(plans, nodes).items():
        devices = sorted({x for points in curves.values() for x, _ in points})
        if len(devices) > 1:
            most = max(y for points in curves.values() for _, y in points if math.isfinite(y))
            charts[f"{label[0].upper()}{label[1:]}"] = Chart(
                series=[_line(name, points, n) for n, (name, points) in enumerate(curves.items())],
                x=_devices_axis(devices),
                y=number_axis(0.0, most, format_count, margin=0.02),
                x_name="devices",
                label=label,
            )
    return charts


def _line(name: str, points: Sequence[tuple[int, float]], colour: int) -> Series:
    dots = [(x, y, f"{name}: {format_count(y)}") for x, y in points if math.isfinite(y)]
    return Series(label=name, colour=colour, line=points, dots=dots)


def _devices_axis(devices: Sequence[int]) -> Axis:
    labels = {float(count): str(count) for count in devices}
    return number_axis(devices[0], devices[-1], str, log=True, margin=0.04, labels=labels)


def _memory(p: Prediction) -> dict[str, Any]:
    """Returns a bar of what a program can have, and what of it is used by which part."""
    sizes = {name: getattr(p.memory, name) for name in MEMORY_PARTS}
    parts = [(name, size, format_bytes(size), colour) for colour, (name, size) in enumerate(sizes.items())]
    used = f"{format_bytes(p.memory.total)} of the {format_bytes(p.memory.capacity)} that a program can have."
    return {"parts": parts, "whole": p.memory.capacity, "note": used}


def _times(p: Prediction) -> dict[str, Any]:
    """Returns a bar of what the step waits for, and a table of what is hidden."""
    parts: list[tuple[str, float, str, int | None]] = [("compute", p.compute_s, format_seconds(p.compute_s), None)]
    for part in sorted(p.traffic, key=lambda part: -part.exposed_s):
        if part.exposed_s > SHOWN * p.step_s:
            name = f"{NAMES.get(part.name, 'other')} {LEVELS[part.level]}"
            parts.append((name, part.exposed_s, format_seconds(part.exposed_s), colour_of(part.name)))
    sent = sent_text(p)
    title = f"{p.candidate}: a step of {format_seconds(p.step_s)}"
    note = f"{sent[0].upper()}{sent[1:]}."
    return {"title": title, "parts": parts, "whole": p.step_s, "rows": time_rows(p), "note": note}
