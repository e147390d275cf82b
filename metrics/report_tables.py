"""The tables of a run's page: its strategy, its configuration, and the collectives of its step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from statistics import median
from typing import Any

from metrics.run_files import RunFiles, number, series
from metrics.units import UNKNOWN, format_bytes, format_count

AXES = ("stage", "replica_inter", "shard_inter", "replica_intra", "shard_intra", "tensor", "expert")
WIRE_KEYS = ("wire_tx_bytes", "wire_rx_bytes")
Fact = tuple[str, str]


def config_facts(values: Mapping[str, Any], prefix: str = "") -> list[Fact]:
    """Returns a nested dict flattened to (`a.b.c`, value) pairs."""
    facts: list[Fact] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            facts += config_facts(value, f"{name}.")
        else:
            facts.append((name, UNKNOWN if value is None or value == "" else _text(value)))
    return facts


def strategy_facts(run: RunFiles) -> list[Fact]:
    """Returns the facts about the strategy: scopes, mesh, nodes, replicas, batch and optimizer."""
    sharding, batch, optimizer = (_section(run.config, key) for key in ("sharding", "batch", "optimizer"))
    facts: list[Fact] = []
    if sharding:
        facts.append(("strategy", _strategy_name(sharding)))
        facts += [
            (name.replace("_", " "), _text(sharding[name]))
            for name in ("hierarchical", "two_hop", "gather", "partitioner")
            if name in sharding
        ]
        scopes = [
            f"{name} {_text(sharding[name])}" for name in ("parameters", "gradients", "optimizer") if sharding.get(name)
        ]
        facts += [("scopes", ", ".join(scopes))] if scopes else []
    mesh = _section(run.environment, "mesh")
    if sizes := {axis: mesh[axis] for axis in AXES if isinstance(mesh.get(axis), int)}:
        facts.append(("mesh", ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"))
        size = {axis: sizes.get(axis, 1) for axis in AXES}
        facts.append(("devices", format_count(prod(size.values()))))
        facts.append(("nodes", format_count(size["stage"] * size["replica_inter"] * size["shard_inter"])))
        facts.append(("replicas", format_count(size["replica_inter"] * size["replica_intra"])))
    if "global_size" in batch:
        micro = f", {_text(batch['micro_size'])} per device and micro-step" if "micro_size" in batch else ""
        facts.append(("batch", f"{_text(batch['global_size'])} rows{micro}"))
    if "name" in optimizer:
        rate = f", learning rate {_text(optimizer['learning_rate'])}" if "learning_rate" in optimizer else ""
        facts.append(("optimizer", f"{_text(optimizer['name'])}{rate}"))
    return facts


@dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of a table below its head, and the kind of each."""

    rows: Sequence[Sequence[str]]
    kinds: Sequence[str]


def collective_table(run: RunFiles) -> Table | None:
    """Returns the collectives of the compiled step, grouped by mesh axes, with byte counts and sums; None without."""
    entries = _collectives(run)
    if not entries:
        return None
    rows = [("Over axes", "Kind", "Type", "Payload", "Times per step", "Inside nodes", "Between nodes")]
    kinds = []
    for axes, members in _by_axes(entries):
        rows += [(axes, *[""] * 4, *_bytes_cells(_sum(members))), *map(_collective_row, members)]
        kinds += ["group", *["member"] * len(members)]
    return Table(rows=[*rows, ("Sum", *[""] * 4, *_bytes_cells(_sum(entries)))], kinds=[*kinds, "total"])


def collectives_note(run: RunFiles) -> str:
    """Returns where the table is from, or why there is none, and what the network interfaces counted, if they did."""
    if not _collectives(run):
        problem = run.collectives.get("problem")
        why = f"says that {problem}" if problem else "lists no collectives: the step sends nothing"
        return f"collectives.json {run.problems.get('collectives.json', why)}."
    said = "From the compiled program. Bytes are per device and step."
    counts = [[value for _, value in series(run.rows, key) if isfinite(value)] for key in WIRE_KEYS]
    if not all(counts):
        return said
    sent, received = (format_bytes(median(values)) for values in counts)
    return f"{said} Counted by this node's network interfaces, median per step: {sent} sent, {received} received."


def _collectives(run: RunFiles) -> list[Mapping[str, Any]]:
    entries = run.collectives.get("collectives")
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []


def _collective_row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    words = (entry.get("name") or UNKNOWN, entry.get("kind", ""), entry.get("dtype", ""))
    payload, times = number(entry.get("payload_bytes")), number(entry.get("times"))
    numbers = (
        UNKNOWN if payload is None else format_bytes(payload),
        UNKNOWN if times is None else format_count(times),
    )
    return *map(_text, words), *numbers, *_bytes_cells(_sum([entry]))


def _by_axes(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yields (axes, collectives), ordered by the bytes sent between nodes, largest first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        axes = row.get("axes")
        name = " \N{MULTIPLICATION SIGN} ".join(map(str, axes)) if isinstance(axes, list) else _text(axes or "")
        groups.setdefault(name or "unnamed axes", []).append(row)
    keyed = ((_sum(members), axes, members) for axes, members in groups.items())
    for _, axes, members in sorted(keyed, key=lambda item: (-item[0]["inter_bytes"], -item[0]["intra_bytes"], item[1])):
        yield axes, sorted(members, key=lambda row: -sum(_sum([row]).values()))


def _sum(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {key: sum(number(row.get(key)) or 0.0 for row in rows) for key in ("intra_bytes", "inter_bytes")}


def _bytes_cells(counts: Mapping[str, float]) -> list[str]:
    return [format_bytes(counts[key]) if counts[key] else UNKNOWN for key in ("intra_bytes", "inter_bytes")]


def _strategy_name(sharding: Mapping[str, Any]) -> str:
    name = _text(sharding.get("strategy", UNKNOWN))
    size = sharding.get("partition_size")
    return f"{name}, partition groups of {_text(size)} devices" if size else name


def _section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str:
    """Returns a value as text: booleans as yes and no, lists with commas."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or UNKNOWN
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
