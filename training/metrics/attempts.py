"""The attempts of an elastic run, from `events.jsonl`: their times, numbers of nodes, and pauses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median

from runtime.events import Event
from runtime.files.json_objects import JsonMapping
from training.metrics.charts import Chart, Series, number_axis
from training.metrics.run_files import series
from training.metrics.units import UNKNOWN, format_count, format_seconds

UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))
ENDS = (Event.STOPPED, Event.LOST_PEER, Event.EXITED)


@dataclass(kw_only=True)
class Attempt:
    """One start of the program on a fixed set of nodes; times are in seconds since 1970, None where unknown."""

    started_s: float
    nodes: int
    start_step: int = 0
    source: str = ""  # where its state came from: nothing, memory or checkpoint
    steps_again: int = 0
    first_step_s: float | None = None
    ended_s: float = field(default=0.0)  # or the time of its last event
    end: str = ""


def attempts_of(events: Sequence[JsonMapping], outcome: str = "") -> list[Attempt]:
    """Returns the attempts that began, in order of time. `events` come from `runtime.events.EventReader`.

    `outcome` comes from the summary, because an attempt that writes its report has a summary but no recorded end yet.
    """
    found: list[Attempt] = []
    for event in events:
        kind, time_s = event["event"], event["time_s"]
        if kind == Event.STARTED:
            nodes = event.get("nodes", event.get("processes", 1))  # earlier versions recorded only the processes
            found.append(Attempt(started_s=time_s, nodes=int(nodes)))
        if not found or str(event.get("by", "")).startswith("engine"):
            continue
        attempt = found[-1]
        if not attempt.end:
            attempt.ended_s = time_s
        if kind == Event.RESTORED:
            attempt.start_step, attempt.source = int(event.get("step", 0)), str(event.get("source", ""))
            attempt.steps_again = int(event.get("steps_again", 0))
        elif kind == Event.FIRST_STEP and attempt.first_step_s is None:
            attempt.first_step_s = time_s
            skipped = int(event.get("after", 0)) - attempt.start_step  # in a replica that took the others' state
            attempt.steps_again = max(0, attempt.steps_again - max(0, skipped))
        elif kind in ENDS and not attempt.end:
            attempt.end = str(event.get("why", ""))
    if found and found[-1].source and not found[-1].end:  # until it restores, the summary is of the previous attempt
        found[-1].end = outcome
    return found


def pauses(attempts: Sequence[Attempt]) -> list[float | None]:
    """Returns the seconds without a step before each attempt's first step, since the previous end or the first start.

    None for an attempt without a step, whose time counts towards the next pause.
    """
    found: list[float | None] = []
    since = attempts[0].started_s if attempts else 0.0
    for attempt in attempts:
        found.append(None if attempt.first_step_s is None else max(0.0, attempt.first_step_s - since))
        if attempt.first_step_s is not None:
            since = attempt.ended_s
    return found


def goodput(attempts: Sequence[Attempt], rows: Sequence[JsonMapping]) -> float | None:
    """Returns the fraction of the time, from first start to last event, spent on steps that were not repeated.

    Metrics hold each step once, from its last execution. A row's step time counts for all steps since the previous row.
    Rows without a step time, the first of an attempt, count with the median. None if unknown.
    """
    times = {step: value for step, value in series(rows, "step_time_s") if isfinite(value)}
    if not attempts or not times:
        return None
    usual, before, kept_s = median(times.values()), 0.0, 0.0
    for step, _ in series(rows, "step"):
        kept_s += times.get(step, usual) * (step - before)
        before = step
    whole_s = span_s(attempts)
    return min(1.0, kept_s / whole_s) if whole_s > 0 else None


def span_s(attempts: Sequence[Attempt]) -> float:
    """Returns the seconds from the start of the first attempt to the last event of any attempt."""
    return max((attempt.ended_s for attempt in attempts), default=0.0) - (attempts[0].started_s if attempts else 0.0)


def nodes_chart(attempts: Sequence[Attempt]) -> Chart:
    """Returns a chart of the number of training nodes over the time since the start: none during a pause."""
    start, whole_s = attempts[0].started_s, span_s(attempts)
    name, unit_s = next((name, unit_s) for name, unit_s in UNITS if whole_s > 3 * unit_s or unit_s == 1)
    line: list[tuple[float, float]] = [(0.0, 0.0)]
    for attempt in attempts:
        if attempt.first_step_s is None:
            continue
        first, last = ((time_s - start) / unit_s for time_s in (attempt.first_step_s, attempt.ended_s))
        line += [(first, 0), (first, attempt.nodes), (last, attempt.nodes), (last, 0)]
    most = max(attempt.nodes for attempt in attempts)
    return Chart(
        series=[Series(label="nodes", colour=0, line=line)],
        x=number_axis(0.0, whole_s / unit_s, "{:g}".format),
        y=number_axis(
            0.0, most, format_count, labels={n: str(n) for n in range(0, most + 1, -(-most // 8))}, margin=0.02
        ),
        x_name=f"{name} since the start",
        label="nodes over time",
        note="Nodes that train; none in a pause.",
    )


def attempts_rows(attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
    """Returns a row for each attempt, below the names of the columns. The last two columns contain words."""
    rows = [("Began after", "Nodes", "From step", "Pause", "Steps again", "State from", "Ended")]
    for attempt, pause in zip(attempts, pauses(attempts), strict=True):
        numbers = (
            format_seconds(attempt.started_s - attempts[0].started_s),
            str(attempt.nodes),
            format_count(attempt.start_step),
            UNKNOWN if pause is None else format_seconds(pause),
            format_count(attempt.steps_again),
        )
        rows.append((*numbers, attempt.source, attempt.end or "no sign of its end"))
    return rows
