"""Reads `probe.json` of `lab.probe`: the links of a cluster as they were measured, in place of data sheets."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from files import json_objects
from planner.clusters import Cluster

NEEDED = ("alpha_s", "bandwidth_bytes_per_s", "group_size", "devices_per_link")


def with_probe(cluster: Cluster, path: Path) -> tuple[Cluster, str]:
    """Returns the cluster with the links that a probe measured on it, and a line that says which.

    A level that was not measured (one node, or one device a node) stays as it was. ValueError if the file is none of a
    probe, or of another cluster.
    """
    try:
        read = json_objects.parse(json_objects.read_bytes(path), "it")
        levels: dict[str, dict[str, Any]] = read["levels"]
        kind, date = str(read["environment"]["device_kind"]), str(read["environment"].get("date", ""))[:10]
        figures = {name: {key: float(level[key]) for key in NEEDED} for name, level in levels.items()}
    except OSError as error:
        raise ValueError(f"--probe={path} cannot be read ({error.strerror}); lab.probe writes it") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = error if isinstance(error, ValueError) else "its form is another"
        why = f"it has no {error.args[0]}" if isinstance(error, KeyError) else why
        raise ValueError(f"--probe={path} is not a file that lab.probe wrote ({why})") from error
    _refuse_other(cluster, path, kind, figures)
    changes: dict[str, Any] = {}
    if intra := figures.get("intra"):
        changes |= {"intra_bandwidth": intra["bandwidth_bytes_per_s"], "intra_latency_s": intra["alpha_s"]}
    if inter := figures.get("inter"):
        changes |= {"node_bandwidth": inter["bandwidth_bytes_per_s"], "inter_latency_s": inter["alpha_s"]}
    missing = {"intra", "inter"} - figures.keys()
    if missing:  # the fractions of the data sheet's figures are no longer taken off: do it here
        reached = cluster.network()
        theirs = {"intra_bandwidth": reached.intra_bandwidth, "node_bandwidth": reached.node_bandwidth}
        changes = theirs | changes
    rest = f"; {' and '.join(sorted(missing))} not measured: as without it" if missing else ""
    sources = {**cluster.sources, **dict.fromkeys(changes, f"{path}, measured {date}")}
    return replace(cluster, **changes, is_measured=True, sources=sources), f"links: {path}, measured {date}{rest}"


def _refuse_other(cluster: Cluster, path: Path, kind: str, figures: dict[str, dict[str, float]]) -> None:
    """Raises ValueError if the probe ran on other devices, or on nodes with another number of them."""
    ours = cluster.device.name.split("-")[0]
    if ours.upper() not in kind.upper():
        raise ValueError(
            f"--probe={path} was measured on devices of kind {kind!r}, but --cluster={cluster.name} has {ours}; "
            "measure there, or name the cluster that it was measured on"
        )
    keys = {"intra": "group_size", "inter": "devices_per_link"}
    there = {round(figures[level][key]) for level, key in keys.items() if level in figures}
    if there - {cluster.devices_per_node}:
        raise ValueError(
            f"--probe={path} was measured on nodes of {max(there)} devices, but those of --cluster={cluster.name} have "
            f"{cluster.devices_per_node}; give --devices_per_node={max(there)}, or measure there"
        )
