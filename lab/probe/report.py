"""The output of the probe: a table, `probe.json` for the planner, and a plot.

The keys of `probe.json`:

- `device`: `devices`, `dtype`, and rates of one device, null where not measured: `products_flops_per_s`,
  `attention_flops_per_s` (by kernel, `forward` and `backward`), `memory_bandwidth`, `launch_s`, `functions_per_s`,
  `copies_to_host_bytes_per_s`; also `failed`, and `measurements` with `times_s` and `spread`
- `levels.LEVEL`: `group_size`, `devices_per_link`, `best` (the collective of highest bandwidth), and
  `collectives.NAME`: `alpha_s`, `beta_s_per_byte`, `bandwidth_bytes_per_s`, `worst_error` (the largest relative error)
- `measurements`: one per level, collective and size (`Measurement` in lab/probe/measure.py)
- `environment`: command, commit, versions, devices
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lab.probe.device import Timed
from lab.probe.measure import RING_PASSES, LinkFit, Measurement, fit
from runtime.files.pages import columns
from runtime.files.palette import SERIES
from training.metrics.units import UNKNOWN, format_bytes, format_count, format_percent, format_seconds

COLUMNS = "{:5}  {:14}  {:>8}  {:>8}  {:>11}  {:>12}"
HEADS = COLUMNS.format("level", "collective", "size", "time", "bandwidth", "wire/payload")
DEVICE_COLUMNS = "{:11}  {:28}  {:>8}  {:>15}  {:>7}"
DEVICE_HEADS = DEVICE_COLUMNS.format("figure", "of", "time", "each device", "spread")

Fits = Mapping[tuple[str, str], LinkFit]  # by level and collective


def finish(
    device: Mapping[str, Any], measured: Sequence[Measurement], environment: Mapping[str, Any], out: Path
) -> None:
    """Fits alpha and bandwidth, prints them, and writes `probe.json` and, of links, `probe.png` into `out`."""
    keys = list(dict.fromkeys((m.level, m.collective) for m in measured))
    fits = {key: fit([m for m in measured if (m.level, m.collective) == key]) for key in keys}
    files = [out / "probe.json"]
    files[0].write_text(json.dumps(record(device, measured, fits, environment), indent=1) + "\n")
    if fits:
        print(f"\ntime = alpha * steps + payload on the link / bandwidth\n{fits_text(fits)}")
        files.append(out / "probe.png")
        draw(measured, fits).savefig(files[1], dpi=110)
    print(f"written: {', '.join(map(str, files))}")


def fits_text(fits: Fits) -> str:
    """Returns the table of alpha and bandwidth."""
    rows = [("level", "collective", "alpha", "bandwidth", "", "worst error")]
    for (level, collective), found in fits.items():
        rate = found.bandwidth_bytes_per_s
        rates = f"{format_bytes(rate)}/s", f"{format_bytes(8 * rate)[:-1]}bit/s"
        rows.append((level, collective, format_seconds(found.alpha_s), *rates, format_percent(found.worst_error)))
    return "\n".join(columns(rows, left=2))


def record(
    device: Mapping[str, Any], measured: Sequence[Measurement], fits: Fits, environment: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the content of probe.json."""
    levels: dict[str, Any] = {}
    for level in dict.fromkeys(m.level for m in measured):
        group = next(m for m in measured if m.level == level)
        collectives = {name: found for (of, name), found in fits.items() if of == level}
        best = max(collectives, key=lambda name: collectives[name].bandwidth_bytes_per_s)
        as_json = {
            name: asdict(found) | {"bandwidth_bytes_per_s": found.bandwidth_bytes_per_s}
            for name, found in collectives.items()
        }
        levels[level] = {
            "group_size": group.group_size,
            "devices_per_link": group.devices_per_link,
            "best": best,  # a lower bound for the link
            **as_json[best],
            "collectives": as_json,
        }
    measurements = [
        asdict(m) | {"steps": m.steps, "link_bytes": m.link_bytes, "bandwidth_bytes_per_s": m.bandwidth_bytes_per_s}
        for m in measured
    ]
    return {
        "device": dict(device),
        "model": "time_s = alpha_s * steps + link_bytes / bandwidth_bytes_per_s",
        "levels": levels,
        "measurements": measurements,
        "environment": dict(environment),
    }


def device_row(m: Timed) -> str:
    """Returns a line of the table of devices."""
    count, _, prefix = format_count(m.per_s).partition(" ")
    rate = f"{count} {prefix}{m.unit}/s"
    return DEVICE_COLUMNS.format(m.figure, m.of, format_seconds(m.time_s), rate, format_percent(m.spread))


def row(m: Measurement) -> str:
    """Returns a line of the table."""
    wire = UNKNOWN if m.wire_tx_bytes is None else f"{m.wire_tx_bytes / m.link_bytes:.3f}"
    bandwidth = f"{format_bytes(m.bandwidth_bytes_per_s)}/s"
    return COLUMNS.format(m.level, m.collective, format_bytes(m.size_bytes), format_seconds(m.time_s), bandwidth, wire)


def draw(measured: Sequence[Measurement], fits: Fits) -> Figure:
    """Returns two charts for each level: time, and bandwidth, against size, with the fitted lines."""
    levels = list(dict.fromkeys(m.level for m in measured))
    figure = Figure(figsize=(10, 3.6 * len(levels)), layout="constrained")
    for charts, level in zip(figure.subplots(len(levels), 2, squeeze=False), levels, strict=True):
        group = next(m for m in measured if m.level == level)
        for collective, colour in zip(RING_PASSES, SERIES):
            some = [m for m in measured if (m.level, m.collective) == (level, collective)]
            sizes = [m.size_bytes for m in some]
            fitted = [fits[level, collective].time_s(m) for m in some]
            for times, style in (([m.time_s for m in some], "o"), (fitted, "-")):
                rates = [m.link_bytes / time_s / 1e6 for m, time_s in zip(some, times, strict=True)]
                for one, values in zip(charts, (times, rates), strict=True):
                    one.plot(sizes, values, style, color=colour, markersize=4, linewidth=1)
            charts[0].lines[-2].set_label(collective)
        groups = f"{level}: groups of {group.group_size}, {group.devices_per_link} on a link"
        charts[0].set(title=groups, ylabel="seconds")
        charts[1].set(title="payload on the link over time", ylabel="MB/s")
        for axes in charts:
            axes.set(xscale="log", yscale="log", xlabel="bytes of the whole tensor")
            axes.grid(alpha=0.3)
        charts[0].legend(fontsize="small")
    return figure
