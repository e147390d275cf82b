"""The tables of a run's page: its strategy, its configuration, and the collectives of its step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

from metrics.run_files import RunFiles, number, series
from metrics.units import UNKNOWN, format_bytes, format_count

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
    """Returns what was set of the sharding and the batch, with the devices and the mesh that it gave."""
    known = {key: run.config.get(key) for key in ("sharding", "batch")}
    known |= {key: run.environment.get(key) for key in ("devices", "mesh")}
    return [(name, text) for name, text in config_facts(known) if text != UNKNOWN]


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


def _text(value: Any) -> str:
    """Returns a value as text: booleans as yes and no, lists with commas."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or UNKNOWN
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
