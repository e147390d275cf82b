"""Replaces the planner's figures by measurements of `lab.probe`."""

import re
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from sys import float_info
from typing import Any

from planner.clusters import GPUS, Accelerator, Cluster
from runtime.files import json_objects
from runtime.files.json_objects import JsonMapping
from training.metrics.throughput import peak_flops


def with_probe(cluster: Cluster, path: Path, *, has_other_link: bool = False) -> tuple[Cluster, str]:
    """Returns the cluster with the measurements of `lab.probe`, and a line that lists them.

    Figures that were not measured stay (a level of one node or of one device per node, a missing attention kernel), and
    so do figures between nodes if the link is not the probed one. ValueError if the file is not a probe's, or of
    another cluster.
    """
    least = {"alpha_s": 0.0, "bandwidth_bytes_per_s": 1.0, "group_size": 1.0, "devices_per_link": 1.0}
    try:
        read = json_objects.parse(json_objects.read_bytes(path), "it")
        levels = {
            name: {key: _checked(level[key], least[key]) for key in least} for name, level in read["levels"].items()
        }
        kind, date = str(read["environment"]["device_kind"]), str(read["environment"].get("date", ""))[:10]
        cluster = _with_unlisted(cluster, kind, read)
        device, measured = _measured(cluster.device, read.get("device") or {})
    except OSError as error:
        raise ValueError(f"--probe={path} cannot be read ({error.strerror}); lab.probe writes it") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"it has no {error.args[0]}" if isinstance(error, KeyError) else "its form is another"
        why = str(error) if isinstance(error, ValueError) else why
        raise ValueError(f"--probe={path} is not a file that lab.probe wrote ({why})") from error
    _refuse_other(cluster, path, kind, levels)
    changes: dict[str, Any] = {}
    reached = cluster.reached
    names = {"intra": "links inside nodes"} | ({} if has_other_link else {"inter": "links between nodes"})
    levels = {level: levels[level] for level in names if level in levels}
    if intra := levels.get("intra"):
        changes |= {"intra_bandwidth": intra["bandwidth_bytes_per_s"], "intra_latency_s": intra["alpha_s"]}
        reached = replace(reached, intra=1.0)
    if inter := levels.get("inter"):
        changes |= {"node_bandwidth": inter["bandwidth_bytes_per_s"], "inter_latency_s": inter["alpha_s"]}
        reached = replace(reached, inter=1.0, all_to_all=1.0)
    measured |= {name: level in levels for level, name in names.items()}
    found, missing = (", ".join(name for name in measured if measured[name] is is_there) for is_there in (True, False))
    said = f"{path}, measured {date}: {found or 'nothing'}" + f"; not measured, as without it: {missing}" * bool(
        missing
    )
    return replace(cluster, device=device, **changes, reached=reached), said


def _with_unlisted(cluster: Cluster, kind: str, read: JsonMapping) -> Cluster:
    """Returns a cluster of GPUs of an unlisted kind, if the probe has their memory and rates; else the same cluster.

    Its programs are compiled for the GPU of `cluster`. Without a data sheet its peak is the rate of probed products.
    """
    found = read.get("device") or {}
    whole = all(found.get(key) for key in ("memory_bytes", "products_flops_per_s", "memory_bandwidth"))
    if not (cluster.is_gpu and whole) or any(_is_of(name, kind) for name in GPUS):
        return cluster
    peak = peak_flops(kind) or _checked(found["products_flops_per_s"])
    device = replace(
        cluster.device,
        name=kind,
        peak_flops=dict.fromkeys(("bf16", "f16", "f32"), peak),
        attention={},
        flash={},
        memory_bytes=_checked(found["memory_bytes"]),
        note=f"{kind} is not listed: as probed, with programs for {cluster.device.name}; MFU is of {peak:.3g} FLOP/s",
    )
    per_node = round(read["levels"].get("intra", {}).get("group_size", cluster.devices_per_node))
    return replace(cluster, name=f"probed {kind}", device=device, devices_per_node=per_node, on_demand=None, spot=None)


def _is_of(name: str, kind: str) -> bool:
    """Whether jax's name of a device, such as `NVIDIA H100 80GB HBM3`, means a GPU of the planner's `name`."""
    return re.sub(r"-\d+GB$", "", name).replace("-", " ").upper() in kind.upper()


def _measured(device: Accelerator, found: JsonMapping) -> tuple[Accelerator, dict[str, bool]]:
    """Returns the device with the figures of a probe's key `device`, and which figures were measured.

    If devices share a machine, its figures are the sum of all devices measured at once. A launch there mostly waits for
    a core, and the other figures contain that wait.
    """
    together = float(found.get("devices", 1)) if device.is_shared else 1.0

    def rate(value: float) -> float:
        return together * _checked(value)

    peak = device.peak(found.get("dtype", ""))
    kernels = {
        name: {part: rate(parts[part]) / peak for part in ("forward", "backward")}
        for name, parts in found.get("attention_flops_per_s", {}).items()
    }
    taken = next((name for name in ("cudnn", "pallas") if name in kernels), "none")
    changes: dict[str, Any] = {"attention": kernels.get(taken), "flash": kernels.get("pallas")}
    if (value := found.get("products_flops_per_s")) is not None:
        changes["matmul_fraction"] = rate(value) / peak
    figures = {name: name for name in ("memory_bandwidth", "functions_per_s")}
    for figure, name in (figures | {"copies_to_host_bytes_per_s": "unpinned_bandwidth"}).items():
        if (value := found.get(figure)) is not None:
            changes[name] = rate(value)
    if (value := found.get("launch_s")) is not None and not device.is_shared:
        changes["launch_s"] = rate(value)
    names = {"products": "matmul_fraction", "memory": "memory_bandwidth"}
    changes = {name: value for name, value in changes.items() if value}
    attention = f"attention ({taken})" if "attention" in changes else "attention"
    of_gpus = {"launches": "launch_s", attention: "attention"}
    names |= {"functions": "functions_per_s"} if device.is_shared else of_gpus
    names |= {"copies to the host": "unpinned_bandwidth"}
    return replace(device, **changes), {what: name in changes for what, name in names.items()}


def _checked(value: float, least: float = float_info.min) -> float:
    """Returns a figure. ValueError if it is not a positive finite number."""
    if not least <= value < inf:
        raise ValueError(f"a rate or a time of it is {value}")
    return value


def _refuse_other(cluster: Cluster, path: Path, kind: str, levels: Mapping[str, Mapping[str, float]]) -> None:
    """Raises ValueError if the probe ran on other devices, or on nodes with another number of them."""
    ours = cluster.device.name.partition("-")[0]
    if not _is_of(cluster.device.name, kind):
        raise ValueError(
            f"--probe={path} was measured on devices of kind {kind!r}, but --cluster={cluster.name} has {ours}; "
            "measure there, or name the cluster that it was measured on"
        )
    keys = {"intra": "group_size", "inter": "devices_per_link"}
    there = {round(levels[level][key]) for level, key in keys.items() if level in levels}
    if there - {cluster.devices_per_node}:
        raise ValueError(
            f"--probe={path} was measured on nodes of {max(there)} devices, but those of --cluster={cluster.name} have "
            f"{cluster.devices_per_node}; give --devices_per_node={max(there)}, or measure there"
        )
