"""The output of the probe: a table, `probe.json` for the planner, and a plot."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from files.palette import SERIES
from lab.probe.model import RING_PASSES, LinkFit, Measurement, fit
from metrics.units import UNKNOWN, format_bytes, format_percent, format_seconds

COLUMNS = "{:5}  {:14}  {:>8}  {:>8}  {:>11}  {:>12}"
COLOURS = dict(zip(RING_PASSES, SERIES))

Fits = Mapping[tuple[str, str], LinkFit]  # by level and collective


def finish(measured: Sequence[Measurement], environment: Mapping[str, Any], out: Path) -> None:
    """Fits alpha and bandwidth, prints them, and writes `probe.json` and `probe.png` into `out`."""
    keys = list(dict.fromkeys((m.level, m.collective) for m in measured))
    fits = {key: fit([m for m in measured if (m.level, m.collective) == key]) for key in keys}
    print("\ntime = alpha * steps + payload on the link / bandwidth")
    for (level, collective), found in fits.items():
        print(
            f"{level:5}  {collective:14}  alpha {format_seconds(found.alpha_s):>8}  "
            f"bandwidth {_rate(found.bandwidth_bytes_per_s):>26}  worst error {format_percent(found.worst_error)}"
        )
    (out / "probe.json").write_text(json.dumps(record(measured, fits, environment), indent=1) + "\n")
    draw(measured, fits).savefig(out / "probe.png", dpi=110)
    print(f"written: {out / 'probe.json'}, {out / 'probe.png'}")


def record(measured: Sequence[Measurement], fits: Fits, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of probe.json; docs/clusters.md explains its keys."""
    levels: dict[str, Any] = {}
    for level in dict.fromkeys(m.level for m in measured):
        group = next(m for m in measured if m.level == level)
        collectives = {name: found for (of, name), found in fits.items() if of == level}
        best = max(collectives, key=lambda name: collectives[name].bandwidth_bytes_per_s)
        levels[level] = {
            "group_size": group.group_size,
            "devices_per_link": group.devices_per_link,
            "best": best,  # a lower bound for the link
            **_as_json(collectives[best]),
            "collectives": {name: _as_json(found) for name, found in collectives.items()},
        }
    measurements = [
        asdict(m) | {"steps": m.steps, "link_bytes": m.link_bytes, "bandwidth_bytes_per_s": m.bandwidth_bytes_per_s}
        for m in measured
    ]
    return {
        "model": "time_s = alpha_s * steps + link_bytes / bandwidth_bytes_per_s",
        "levels": levels,
        "measurements": measurements,
        "environment": dict(environment),
    }


def header(num_devices: int, device_kind: str) -> str:
    """Returns the heading of the table."""
    about = f"{num_devices} devices ({device_kind}); bandwidth is payload on the link over time"
    return f"{about}\n{COLUMNS.format('level', 'collective', 'size', 'time', 'bandwidth', 'wire/payload')}"


def row(m: Measurement) -> str:
    """Returns a line of the table."""
    wire = UNKNOWN if m.wire_tx_bytes is None else f"{m.wire_tx_bytes / m.link_bytes:.3f}"
    bandwidth = f"{format_bytes(m.bandwidth_bytes_per_s)}/s"
    return COLUMNS.format(m.level, m.collective, format_bytes(m.size_bytes), format_seconds(m.time_s), bandwidth, wire)


def left_out(level: str, collective: str, size_bytes: int) -> str:
    """Returns the line for the sizes that are not measured."""
    start = COLUMNS.format(level, collective, format_bytes(size_bytes), "", "", "").rstrip()
    return f"{start}  and more left out: they would take too long"


def draw(measured: Sequence[Measurement], fits: Fits) -> Figure:
    """Returns two charts for each level: time, and bandwidth, against size, with the fitted lines."""
    levels = list(dict.fromkeys(m.level for m in measured))
    figure = Figure(figsize=(10, 3.6 * len(levels)), layout="constrained")
    charts = figure.subplots(len(levels), 2, squeeze=False)
    for (left, right), level in zip(charts, levels, strict=True):
        group = next(m for m in measured if m.level == level)
        for collective, colour in COLOURS.items():
            some = [m for m in measured if (m.level, m.collective) == (level, collective)]
            _draw(left, right, some, fits[level, collective], colour)
        _label(left, f"{level}: groups of {group.group_size}, {group.devices_per_link} on a link", "seconds")
        _label(right, "payload on the link over time", "MB/s")
        left.legend(fontsize="small")
    return figure


def _draw(left: Axes, right: Axes, some: Sequence[Measurement], found: LinkFit, colour: str) -> None:
    sizes = [m.size_bytes for m in some]
    left.plot(sizes, [m.time_s for m in some], "o", color=colour, label=some[0].collective, markersize=4)
    right.plot(sizes, [m.bandwidth_bytes_per_s / 1e6 for m in some], "o", color=colour, markersize=4)
    times = [found.time_s(m.steps, m.link_bytes) for m in some]
    left.plot(sizes, times, color=colour, linewidth=1)
    right.plot(sizes, [m.link_bytes / t / 1e6 for m, t in zip(some, times, strict=True)], color=colour, linewidth=1)


def _label(axes: Axes, title: str, quantity: str) -> None:
    axes.set(title=title, xscale="log", yscale="log", xlabel="bytes of the whole tensor", ylabel=quantity)
    axes.grid(alpha=0.3)


def _as_json(found: LinkFit) -> dict[str, float]:
    return asdict(found) | {"bandwidth_bytes_per_s": found.bandwidth_bytes_per_s}


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s = {format_bytes(8 * bytes_per_s)[:-1]}bit/s"
