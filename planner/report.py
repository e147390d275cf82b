"""`Plan`: what the planner found for a number of nodes; as text, and as JSON that can be read back."""

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from metrics.units import UNKNOWN, format_bytes, format_count, format_percent, format_seconds
from planner.clusters import Cluster
from planner.predict import Prediction, Traffic
from planner.search import Counts
from planner.timeline import NAMES

MEMORY_PARTS = ("parameters", "gradients", "optimizer", "temporaries", "batch")
LEVELS = {"inter": "between nodes", "intra": "inside a node"}
COLUMNS: Mapping[str, Callable[[Prediction], str]] = {
    "strategy": lambda p: p.candidate.name,
    "micro": lambda p: str(p.candidate.micro_size),
    "steps": lambda p: str(p.accumulation),
    "gather": lambda p: p.candidate.gather,
    "memory": lambda p: format_bytes(p.memory.total),
    "step": lambda p: format_seconds(p.step_s),
    "rows/s": lambda p: f"{p.rows_per_s:.3g}" if p.rows_per_s < 100 else f"{p.rows_per_s:,.0f}",
    "tokens/s": lambda p: UNKNOWN if p.tokens_per_s is None else format_count(p.tokens_per_s),
    "TFLOP/s": lambda p: f"{p.flops_per_device / 1e12:.3g}",
    "GFLOP/s": lambda p: f"{p.flops_per_device / 1e9:.3g}",
    "MFU": lambda p: format_percent(p.mfu),
    "exposed": lambda p: format_percent(sum(part.exposed_s for part in p.traffic) / p.step_s),
    "$/Gtoken": lambda p: "" if p.usd_on_demand is None else f"{p.usd_on_demand:,.0f}",
    "spot": lambda p: "" if p.usd_spot is None else f"{p.usd_spot:,.0f}",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer for a number of nodes."""

    title: str
    cluster: str
    nodes: int
    devices: int
    unit: str  # of the rows: sequences or images
    predictions: tuple[Prediction, ...]  # the fastest first
    helps: Mapping[str, float]  # of the first: seconds of its step with better hardware
    counts: Counts | None  # of a search
    error_bar: str  # how far predicted steps were from timed ones
    notes: tuple[str, ...]

    @property
    def best(self) -> Prediction:
        """The fastest."""
        return self.predictions[0]


def to_json(plans: Sequence[Plan]) -> str:
    """Returns plans as JSON text."""
    return json.dumps(
        {"plans": [asdict(plan) | {"predictions": [p.to_dict() for p in plan.predictions]} for plan in plans]}, indent=1
    )


def from_json(text: str) -> list[Plan]:
    """Returns the plans of JSON text."""
    plans = []
    for values in json.loads(text)["plans"]:
        predictions = tuple(Prediction.from_dict(p) for p in values["predictions"])
        counts = Counts(**values["counts"]) if values["counts"] else None
        plans.append(Plan(**{**values, "predictions": predictions, "counts": counts, "notes": tuple(values["notes"])}))
    return plans


def plan_text(plan: Plan) -> str:
    """Returns what is printed of a plan, at most 120 columns wide but for notes."""
    best, lines = plan.best, [plan.title, ""]
    lines += _table(candidate_rows(plan))
    lines += ["", _wrapped(plan.error_bar)]
    spent = f"a device's memory, and what a step of {format_seconds(best.step_s)} is spent on"
    lines += ["", f"{best.candidate}: {spent}"]
    lines += [f"  {memory_text(best)}", ""]
    lines += [f"  {line}" for line in (*_table(time_rows(best)), sent_text(best))]
    if plan.helps:
        lines += ["", _wrapped(f"what would help most: {helps_text(plan.helps, best.step_s)}")]
    if plan.counts:
        lines += ["", _wrapped(counts_text(plan.counts))]
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def candidate_rows(plan: Plan) -> list[Sequence[str]]:
    """Returns a row for each prediction, below the names of the columns; no costs without a price."""
    slow = all(p.flops_per_device < 1e11 for p in plan.predictions)
    columns = {name: [cell(p) for p in plan.predictions] for name, cell in COLUMNS.items()}
    del columns["TFLOP/s" if slow else "GFLOP/s"]
    columns = {name.replace("rows", plan.unit): cells for name, cells in columns.items()}
    columns = {"": [str(n) for n in range(1, len(plan.predictions) + 1)]} | columns
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    return [[*shown], *zip(*shown.values(), strict=True)]


def scaling_text(plans: Sequence[Plan | str], nodes: Sequence[int]) -> str:
    """Returns throughput against nodes; a plan that is text says why there is none."""
    return "\n".join(_table(scaling_rows(plans, nodes)))


def scaling_rows(plans: Sequence[Plan | str], nodes: Sequence[int]) -> list[Sequence[str]]:
    """Returns a row for each number of nodes, below the names of the columns; one without a plan is short."""
    first = next((plan for plan in plans if not isinstance(plan, str)), None)
    speed = f"{first.unit if first else 'rows'}/s"
    rows: list[Sequence[str]] = [("nodes", "devices", "strategy", "micro", "step", speed, "of linear", "MFU")]
    for count, plan in zip(nodes, plans, strict=True):
        if isinstance(plan, str) or first is None:
            rows.append((str(count), "", str(plan)))
            continue
        best, per_node = plan.best, first.best.rows_per_s / first.nodes
        name, micro = best.candidate.name, str(best.candidate.micro_size)
        linear = format_percent(best.rows_per_s / count / per_node)
        cells = (str(count), str(plan.devices), name, micro, format_seconds(best.step_s), f"{best.rows_per_s:.1f}")
        rows.append((*cells, linear, format_percent(best.mfu)))
    return rows


def helps_text(helps: Mapping[str, float], step_s: float) -> str:
    """Returns which better hardware would help most, and by how much shorter the step were, on one line."""
    gains = [(name, max(0.0, 1 - seconds / step_s)) for name, seconds in helps.items()]
    (best, gain), *rest = gains
    if gain < 0.005:
        return f"none of {', '.join(helps)}"
    others = ", ".join(f"{name} {format_percent(gain)}" for name, gain in rest)
    return f"{best}, a step {format_percent(gain)} shorter" + (f" ({others})" if rest else "")


def counts_text(counts: Counts) -> str:
    """Returns what the search looked at, on one line."""
    unseen = f"{counts.illegal} not legal, {counts.too_large} too large, {counts.too_slow} too slow by a bound"
    seen = f"{counts.compiled} compiled ({counts.from_cache} from the cache, {counts.did_not_fit} did not fit)"
    rest = f", {counts.not_looked_at} not looked at (--compile=N for more)" if counts.not_looked_at else ""
    return f"{counts.candidates} candidates: {unseen}, {seen}{rest}"


def title(name: str, cluster: Cluster, nodes: int, num_params: int, rows: int, unit: str) -> str:
    """Returns the first line."""
    link = format_bytes(8 * cluster.node_bandwidth).replace("B", "bit")
    count = nodes * cluster.devices_per_node
    node = "node" if nodes == 1 else "nodes"
    return (
        f"{name}, {format_count(num_params)} parameters, {rows:,} {unit} a step, on {nodes} {node} of {cluster.name} "
        f"({count} x {cluster.device.name}, {link}/s a node)"
    )


# ------------------------------------------------------------------------------------------------ parts


def memory_text(p: Prediction) -> str:
    """Returns what a device holds, part by part."""
    text = " + ".join(f"{name} {format_bytes(getattr(p.memory, name))}" for name in MEMORY_PARTS)
    return f"{format_bytes(p.memory.total)} of {format_bytes(p.memory.capacity)}: {text}"


def time_rows(p: Prediction) -> list[Sequence[str]]:
    """Returns what a step is spent on, below the names of the columns: two of words and three of times."""
    rows: list[Sequence[str]] = [("", "", "takes", "hidden", "exposed")]
    rows.append(("compute", "", format_seconds(p.compute_s), "", format_seconds(p.compute_s)))
    known = [part for part in p.traffic if part.name in NAMES]
    others = [part for part in p.traffic if part not in known]
    if others:
        levels = {part.level for part in others}
        sums = [sum(getattr(part, key) for part in others) for key in ("busy_s", "exposed_s")]
        level = levels.pop() if len(levels) == 1 else "both levels"
        known.append(Traffic(name="other", level=level, busy_s=sums[0], exposed_s=sums[1]))
    for part in sorted(known, key=lambda part: -part.exposed_s):
        seconds = (part.busy_s, part.hidden_s, part.exposed_s)
        nothing = 1e-6 * part.busy_s  # rounding
        level = LEVELS.get(part.level, part.level)
        cells = [format_seconds(s if s > nothing else 0.0) for s in seconds]
        rows.append((NAMES.get(part.name, part.name), level, *cells))
    return rows


def sent_text(p: Prediction) -> str:
    """Returns what a device sends in a step."""
    inter, intra = format_bytes(p.inter_bytes), format_bytes(p.intra_bytes)
    sent = f"a device sends {inter} between nodes and {intra} inside its node"
    codec = "" if p.hop_two == "none" else f"; hop two as {p.hop_two}"
    local = f"; replicas meet every {p.inner_steps} steps" if p.inner_steps else ""
    return f"{sent}{codec}{local}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, subsequent_indent="  ")


def _table(rows: Sequence[Sequence[str]], left: int = 2) -> list[str]:
    """Returns rows in columns, the first `left` of them aligned to the left; a short row is not aligned."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[i]) for row in full) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        if len(row) < len(rows[0]):
            lines.append("  ".join(row))
            continue
        cells = [f"{cell:<{w}}" if i < left else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return lines
