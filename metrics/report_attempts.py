"""The report's section on an elastic run: its nodes over time, and a table of its attempts."""

from collections.abc import Sequence
from html import escape

from metrics.attempts import Attempt, pauses, span_s
from metrics.charts import Series, draw, number_axis
from metrics.page import note
from metrics.units import UNKNOWN, format_count, format_seconds

UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))


def nodes_chart(attempts: Sequence[Attempt]) -> str:
    """Returns a chart of the nodes that train over the time since the start: none in a pause."""
    start, whole_s = attempts[0].started_s, span_s(attempts)
    name, unit_s = next((name, unit_s) for name, unit_s in UNITS if whole_s > 3 * unit_s or unit_s == 1)
    line: list[tuple[float, float]] = [(0.0, 0.0)]
    for attempt in attempts:
        if attempt.first_step_s is None:
            continue
        first, last = ((time_s - start) / unit_s for time_s in (attempt.first_step_s, attempt.ended_s))
        line += [(first, 0), (first, attempt.nodes), (last, attempt.nodes), (last, 0)]
    most = max(attempt.nodes for attempt in attempts)
    x = number_axis(0.0, whole_s / unit_s, "{:g}".format)
    y = number_axis(0.0, most, format_count, labels={n: str(n) for n in range(0, most + 1, -(-most // 8))}, margin=0.02)
    drawn = draw(
        [Series(label="nodes", colour=0, line=line)], x, y, x_name=f"{name} since the start", label="nodes over time"
    )
    return drawn + note("Nodes that train; none in a pause.")


def attempts_table(attempts: Sequence[Attempt]) -> str:
    """Returns a table with a row for each attempt: its nodes, the pause before its first step, and how it ended."""
    start = attempts[0].started_s
    words = ("Began after", "Nodes", "From step", "Pause", "Steps again")
    head = "".join(f'<th class="n">{word}</th>' for word in words) + "<th>State from</th><th>Ended</th>"
    rows = []
    for attempt, pause in zip(attempts, pauses(attempts), strict=True):
        numbers = (
            format_seconds(attempt.started_s - start),
            str(attempt.nodes),
            format_count(attempt.start_step),
            UNKNOWN if pause is None else format_seconds(pause),
            format_count(attempt.steps_again),
        )
        texts = (attempt.source, attempt.end or "no sign of its end")
        cells = "".join(f'<td class="n">{number}</td>' for number in numbers)
        rows.append(f"<tr>{cells}{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="scroll">{table}</div>' + note("Pause: from the end of the attempt before to its first step.")
