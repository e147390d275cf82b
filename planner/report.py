"""`Plan`: the planner's answer for a number of nodes, as text, as JSON that can be read back, and as an HTML page."""

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from configs.losses import rows_of, steps_to_loss
from planner.day import DAY_S, Downtime, day_rows
from planner.predict import TOKENS, Prediction, StepTraffic
from planner.replay import NAMES
from planner.search import CandidateCounts
from runtime.files.pages import columns
from training.metrics.page import render
from training.metrics.units import UNKNOWN, format_bytes, format_count, format_percent, format_seconds

LEVELS = {"inter": "between nodes", "intra": "inside a node", "host": "to and from the host"}
# traffic and its colours: indices of runtime.files.palette.SERIES
TRAFFIC = {
    "gather": 0,
    "group_reduce_scatter": 1,
    "replica_all_reduce": 2,
    "other": 3,
    "gradient_scope": 4,
    "parameter_scope": 5,
}
TRAFFIC |= {"orthogonalise": 6, "experts": 7, "context": 7}  # a model with experts does not shard rows
CHANGED = "with another result than the config's:"
ABOUT_LOSS = (
    "loss: how much higher the validation loss was in recorded runs of a small model, with the range of the seeds; of "
    "several records the highest, and its model"
)
NO_LOSS = (
    "nothing is predicted about the loss, because no record holds for this run (docs/planner.md); compare "
    "validation_loss with a run of the first list"
)
TO_LOSS = "the cheapest way to the config's loss (that of its own result at the end, and 0.5 % above):"
ABOUT_STEPS = (
    "steps: the config's, times what recorded runs of small models needed of a dense run's, where all records of a "
    "setting get there; the one that needs most is named. That another model needs as many is an assumption"
)
OTHER = "*"  # marks another optimizer than the config's
ABOUT_OTHER = (
    f"{OTHER} another optimizer than the config's, listed last: its learning rate has to be tuned (in the records Muon "
    "has 2e-2, AdamW 4e-3)"
)
DAY = "what a day loses besides:"
SHOWN = 1e-3  # fraction of a step: shorter parts are in the page's table, not in its bar
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
    "exposed": lambda p: format_percent(p.exposed_s / p.step_s),
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
    unit: str  # name of the rows: sequences or images
    predictions: tuple[Prediction, ...]  # the fastest first
    helps: Mapping[str, float]  # seconds of the fastest step with better hardware
    counts: CandidateCounts | None  # counts of a search
    error_bar: str  # errors of predicted steps
    notes: tuple[str, ...]
    changed: tuple[Prediction, ...] = ()  # steps of a search that change the result
    replicas: Prediction | None = None  # the fastest step with independent replicas
    day: tuple[Downtime, ...] = ()  # losses of a day, for the first prediction
    steps: int = 0  # steps of the config's run
    optimizer: str = ""  # optimizer of the dense runs whose records hold for this run; "" without any

    @property
    def best(self) -> Prediction:
        """The fastest prediction."""
        return self.predictions[0]


def to_json(plans: Sequence[Plan]) -> str:
    """Returns plans as JSON text."""
    return json.dumps({"plans": [asdict(plan) for plan in plans]}, indent=1)


def from_json(text: str) -> list[Plan]:
    """Returns the plans of JSON text."""
    plans = []
    for values in json.loads(text)["plans"]:
        predictions = tuple(Prediction.from_dict(p) for p in values["predictions"])
        counts = CandidateCounts(**values["counts"]) if values["counts"] else None
        changed = tuple(Prediction.from_dict(p) for p in values.get("changed", ()))
        read = {"predictions": predictions, "changed": changed, "counts": counts, "notes": tuple(values["notes"])}
        read["replicas"] = Prediction.from_dict(values["replicas"]) if values.get("replicas") else None
        read["day"] = tuple(Downtime(**loss) for loss in values.get("day", ()))
        plans.append(Plan(**{**values, **read}))
    return plans


# ------------------------------------------------------------------------------------------------ text


def plan_text(plan: Plan) -> str:
    """Returns the printed text of a plan, at most 120 columns wide, except notes."""
    best, step_s = plan.best, format_seconds(plan.best.step_s)
    memory = " + ".join(f"{name} {format_bytes(size)}" for name, size in best.memory.parts.items())
    about = _wrapped(f"{best.candidate}: a device's memory, and what a step of {step_s} is spent on")
    blocks = [
        _wrapped(plan.title),
        "\n".join([*_folded(candidate_rows(plan)), "", *_wrapped(run_text(plan)).splitlines()]),
        "\n".join([CHANGED, *_folded(changed_rows(plan)), _wrapped(about_loss(plan))]) if plan.changed else "",
        to_loss_text(plan),
        _wrapped(plan.error_bar),
        f"{about}\n  {format_bytes(best.memory.total)} of {format_bytes(best.memory.capacity)}: {memory}",
        "\n".join(f"  {line}" for line in (*columns(time_rows(best), left=2), sent_text(best))),
        "\n".join([DAY, *(f"  {line}" for line in columns(day_rows(plan.day), left=2))]) if plan.day else "",
        _wrapped(f"what would help most: {helps_text(plan.helps, best.step_s)}") if plan.helps else "",
        _wrapped(counts_text(plan.counts)) if plan.counts else "",
    ]
    return "\n".join(["\n\n".join(filter(None, blocks)), *(f"note: {note}" for note in plan.notes)])


def candidate_rows(plan: Plan) -> list[Sequence[str]]:
    """Returns a row for each prediction, below the names of the columns. Without a price it has no costs."""
    predictions = [*plan.predictions, *([plan.replicas] if plan.replicas else [])]
    slow = all(p.flops_per_device < 1e11 for p in predictions)
    cells = {name: [cell(p) for p in predictions] for name, cell in COLUMNS.items()}
    del cells["TFLOP/s" if slow else "GFLOP/s"]
    shown = {name.replace("rows", plan.unit): column for name, column in cells.items() if any(column)}
    numbers = [*map(str, range(1, len(plan.predictions) + 1)), ""]
    return [["", *shown], *zip(numbers, *shown.values(), strict=False)]


def run_text(plan: Plan) -> str:
    """Returns a line with the steps, tokens, days and dollars of the config's run, with the fastest step."""
    best, seconds = plan.best, plan.steps * plan.best.step_s
    if not seconds:
        return ""
    tokens = [] if best.tokens_per_s is None else [f"{format_count(best.tokens_per_s * seconds)} tokens"]
    whole_s = seconds / max(1e-9, 1 - sum(loss.day_s for loss in plan.day) / DAY_S)
    with_losses = [f"{format_seconds(whole_s)} with what a day loses besides"] * bool(plan.day)
    facts = [f"{plan.steps:,} steps", *tokens, f"{format_seconds(seconds)} of steps", *with_losses]
    return f"the run: {', '.join([*facts, *filter(None, [_price(best, whole_s)])])}"


def changed_rows(plan: Plan) -> list[Sequence[str]]:
    """Returns a header and a row for each prediction with another result, with its recorded cost in loss, if any holds.

    With several records the cost is the highest mean. `shorter` compares the step with the best step that has the
    config's result. Other optimizers are last and marked.
    """
    head = ("", "strategy", "micro", "gather", "memory", "step", "shorter", "exposed", "loss", "recorded on")
    rows: list[Sequence[str]] = [head]
    for number, p in enumerate(sorted(plan.changed, key=lambda p: p.candidate.has_other_optimizer), 1):
        step = format_seconds(p.step_s), format_percent(1 - p.step_s / plan.best.step_s)
        cells = [COLUMNS[name](p) for name in ("strategy", "micro", "gather", "memory")]
        worst = max(rows_of(p.candidate.change, plan.optimizer), key=lambda row: row.mean, default=None)
        recorded = (str(worst), worst.size) if worst else ("not recorded", "")
        rows.append((_number(number, p), *cells, *step, COLUMNS["exposed"](p), *recorded))
    return rows if plan.optimizer else [row[:-2] for row in rows]


def about_loss(plan: Plan) -> str:
    """Returns the note below the rows of another result."""
    about = ABOUT_LOSS if plan.optimizer else NO_LOSS
    return "; ".join([about, *[ABOUT_OTHER] * any(p.candidate.has_other_optimizer for p in plan.changed)])


def about_steps(plan: Plan) -> str:
    """Returns the note below the ways to the config's loss."""
    marked = any(row[0].endswith(OTHER) for row in to_loss_rows(plan))
    return "; ".join([ABOUT_STEPS, *[ABOUT_OTHER] * marked])


def _number(number: int, p: Prediction) -> str:
    return f"{number}{OTHER if p.candidate.has_other_optimizer else ''}"


def to_loss_rows(plan: Plan) -> list[list[str]]:
    """Returns a row for the best step with the config's result, and for each step whose recorded runs reach its loss.

    The cheapest row (fewest steps times seconds per step) is first. Other optimizers are last and marked. The rows are
    below the names of the columns. Returns no rows if the config's is the only one.
    """
    found = [(plan.steps * plan.best.step_s, plan.best, plan.steps, "")]
    for p in plan.changed:
        records = rows_of(p.candidate.change, plan.optimizer)
        if steps := steps_to_loss(records):
            most = max(records, key=lambda row: row.steps or 0)
            found.append((plan.steps * steps * p.step_s, p, round(plan.steps * steps), most.where))
    rows: list[list[str]] = [["", "strategy", "micro", "step", "steps", "takes", "costs", "recorded on"]]
    ordered = sorted(found, key=lambda row: (row[1].candidate.has_other_optimizer, row[0]))
    for number, (seconds, p, steps, where) in enumerate(ordered, 1):
        cells = [p.candidate.name, str(p.candidate.micro_size), format_seconds(p.step_s), f"{steps:,}"]
        rows.append([_number(number, p), *cells, format_seconds(seconds), _price(p, seconds), where])
    if not rows[1][6]:  # without a price
        rows = [[*row[:6], row[7]] for row in rows]
    return rows if len(found) > 1 else []


def _price(p: Prediction, seconds: float) -> str:
    """Returns the on-demand price of `seconds` of a prediction's nodes; "" without a price."""
    if p.usd_on_demand is None or p.tokens_per_s is None:
        return ""
    return f"{p.usd_on_demand * p.tokens_per_s * seconds / TOKENS:,.0f} $"


def to_loss_text(plan: Plan) -> str:
    """Returns the table of ways to the config's loss, with its explanation; "" without one."""
    rows = to_loss_rows(plan)
    return "\n".join([TO_LOSS, *_folded(rows), _wrapped(about_steps(plan))]) if rows else ""


def scaling_rows(plans: Sequence[Plan | str], nodes: Sequence[int]) -> list[Sequence[str]]:
    """Returns throughput against nodes, below the names of the columns. A row without a plan gives the reason."""
    first = next(plan for plan in plans if isinstance(plan, Plan))
    speed = f"{first.unit}/s"
    rows: list[Sequence[str]] = [("nodes", "devices", "strategy", "micro", "step", speed, "of linear", "MFU")]
    for count, plan in zip(nodes, plans, strict=True):
        if isinstance(plan, str):
            rows.append((str(count), "", plan))
            continue
        best, per_node = plan.best, first.best.rows_per_s / first.nodes
        name, micro = best.candidate.name, str(best.candidate.micro_size)
        linear = format_percent(best.rows_per_s / count / per_node)
        cells = (str(count), str(plan.devices), name, micro, format_seconds(best.step_s), f"{best.rows_per_s:.1f}")
        rows.append((*cells, linear, format_percent(best.mfu)))
    return rows


def scaling_text(plans: Sequence[Plan | str], nodes: Sequence[int]) -> str:
    """Returns the table of throughput against nodes."""
    return "\n".join(_folded(scaling_rows(plans, nodes)))


def _folded(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a table's lines. The extras of a strategy are on a separate line below its row."""
    at = rows[0].index("strategy")
    names = [row[at].partition("+") if len(row) == len(rows[0]) else ("", "", "") for row in rows]
    short = [[*row[:at], name, *row[at + 1 :]] if name else row for row, (name, *_) in zip(rows, names, strict=True)]
    lines = columns(short, left=2)
    indent = " " * lines[0].index("strategy")
    return [
        line
        for row, (_, plus, extras) in zip(lines, names, strict=True)
        for line in (row, *([f"{indent}{plus}{extras}"] if extras else []))
    ]


def helps_text(helps: Mapping[str, float], step_s: float) -> str:
    """Returns a line with the hardware changes that shorten the step most."""
    gains = [(name, max(0.0, 1 - seconds / step_s)) for name, seconds in helps.items()]
    (best, gain), *rest = gains
    if gain < 0.005:
        return f"none of {', '.join(helps)}"
    others = ", ".join(f"{name} {format_percent(gain)}" for name, gain in rest)
    return f"{best}, a step {format_percent(gain)} shorter" + (f" ({others})" if rest else "")


def counts_text(counts: CandidateCounts) -> str:
    """Returns a line with the counts of a search."""
    unseen = f"{counts.illegal} not legal, {counts.too_large} too large, {counts.too_slow} too slow by a bound"
    unseen += f", {counts.no_gain} changes without a gain" if counts.no_gain else ""
    seen = f"{counts.compiled} compiled ({counts.from_cache} from the cache, {counts.did_not_fit} did not fit)"
    rest = f", {counts.not_looked_at} not looked at (--compile=N for more)" if counts.not_looked_at else ""
    return f"{counts.candidates} candidates: {unseen}, {seen}{rest}"


def time_rows(p: Prediction) -> list[Sequence[str]]:
    """Returns the parts of a step's time below a header: two columns of words and three of times."""
    rows: list[Sequence[str]] = [("", "", "takes", "hidden", "exposed")]
    rows.append(("compute", "", format_seconds(p.compute_s), "", format_seconds(p.compute_s)))
    known = [part for part in p.traffic if part.name in NAMES]
    others = [part for part in p.traffic if part not in known]
    if others:
        levels = {part.level for part in others}
        busy_s, exposed_s = (sum(getattr(part, key) for part in others) for key in ("busy_s", "exposed_s"))
        level = levels.pop() if len(levels) == 1 else "both levels"
        known.append(StepTraffic(name="other", level=level, busy_s=busy_s, exposed_s=exposed_s))
    for part in sorted(known, key=lambda part: -part.exposed_s):
        seconds = (part.busy_s, part.busy_s - part.exposed_s, part.exposed_s)
        cells = [format_seconds(s if s > 1e-6 * part.busy_s else 0.0) for s in seconds]  # the rest is rounding
        rows.append((NAMES.get(part.name, part.name), LEVELS.get(part.level, part.level), *cells))
    return rows


def sent_text(p: Prediction) -> str:
    """Returns the bytes that a device sends in a step."""
    inter, intra = format_bytes(p.inter_bytes), format_bytes(p.intra_bytes)
    local = f"; replicas meet every {p.inner_steps} steps" if p.inner_steps else ""
    return f"a device sends {inter} between nodes and {intra} inside its node{local}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, subsequent_indent="  ")


# ------------------------------------------------------------------------------------------------ the page


def plan_page(
    name: str, plans: Sequence[Plan | str], nodes: Sequence[int], pictures: Mapping[str, bytes], command: str, spot: str
) -> str:
    """Returns a page in one file: scaling, if several plans are given, and all details of the last plan.

    A plan that is text is the reason why its number of `nodes` has none. `pictures` are PNGs: `timeline` of the last
    plan's best step, and `curves` for several plans. `spot` is the text about spot nodes, if any.
    """
    plan = [plan for plan in plans if isinstance(plan, Plan)][-1]
    best = plan.best
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
        candidates=candidate_rows(plan),
        run=run_text(plan),
        changed=changed_rows(plan) if plan.changed else None,
        about_loss=about_loss(plan),
        to_loss=to_loss_rows(plan),
        about_steps=about_steps(plan),
        memory=_memory(best),
        times=_times(best),
        pictures=pictures,
        day=day_rows(plan.day) if plan.day else None,
        helps=helps_text(plan.helps, best.step_s) if plan.helps else "",
        spot=spot,
        notes=[*([counts_text(plan.counts)] if plan.counts else []), *plan.notes],
        command=command,
    )


def _tiles(plan: Plan) -> list[tuple[str, str, str]]:
    p = plan.best
    facts = [
        ("Step", format_seconds(p.step_s), f"{p.accumulation} x {p.candidate.micro_size} rows of each device"),
        (f"{plan.unit.capitalize()}/s", format_count(p.rows_per_s), f"{plan.devices} devices"),
        ("MFU", format_percent(p.mfu), "of the devices' peak"),
        ("Exposed", format_percent(p.exposed_s / p.step_s), "of the step: kernels wait for the network"),
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


def _memory(p: Prediction) -> dict[str, object]:
    """Returns a bar of the memory for a program, and the part of each use."""
    parts = [(name, size, format_bytes(size), colour) for colour, (name, size) in enumerate(p.memory.parts.items())]
    used = f"{format_bytes(p.memory.total)} of the {format_bytes(p.memory.capacity)} that a program can have."
    return {"parts": parts, "whole": p.memory.capacity, "note": used}


def _times(p: Prediction) -> dict[str, object]:
    """Returns a bar of the step's parts, and a table of hidden and exposed time."""
    parts: list[tuple[str, float, str, int | None]] = [("compute", p.compute_s, format_seconds(p.compute_s), None)]
    for part in sorted(p.traffic, key=lambda part: -part.exposed_s):
        if part.exposed_s > SHOWN * p.step_s:
            name = f"{NAMES.get(part.name, 'other')} {LEVELS.get(part.level, part.level)}"
            colour = TRAFFIC.get(part.name, TRAFFIC["other"])
            parts.append((name, part.exposed_s, format_seconds(part.exposed_s), colour))
    title, sent = f"{p.candidate}: a step of {format_seconds(p.step_s)}", sent_text(p)
    return {"title": title, "parts": parts, "whole": p.step_s, "rows": time_rows(p), "note": f"A{sent[1:]}."}
