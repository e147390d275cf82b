"""`write_report`: the results of a sweep as `results.csv`, `results.md` and a self-contained `index.html`."""

import csv
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from launch.sweeps.charts import MAX_LINES, Point, sweep_chart
from launch.sweeps.plan import SweepFile, text, varied
from launch.sweeps.records import Record, RunState, best, metric_text, tally
from runtime.files import atomic, pages, run_directory
from training.metrics.charts import Chart
from training.metrics.page import render
from training.metrics.units import UNKNOWN, format_seconds

CSV_FILE, MARKDOWN_FILE, PAGE_FILE = "results.csv", "results.md", "index.html"
REPEATS = ("seed", "repetition")  # keys that only repeat a run; charts show the median over them


def write_report(file: SweepFile, records: list[Record], workdir: Path) -> Path:
    """Writes the three files and returns the path of the page."""
    workdir.mkdir(parents=True, exist_ok=True)
    keys = varied([record.run for record in records])
    with open(workdir / CSV_FILE, "w", newline="", encoding="utf-8") as rows:
        csv.writer(rows).writerows(csv_rows(file, records))
    (workdir / MARKDOWN_FILE).write_text(markdown(file, records, keys), encoding="utf-8")
    page = workdir / PAGE_FILE
    atomic.replace(page, sweep_page(file, records, keys, workdir))
    return page


def csv_rows(file: SweepFile, records: Sequence[Record]) -> list[list[object]]:
    """Returns a header and one row per run with all overridden keys and all headline numbers, unformatted."""
    keys = list(dict.fromkeys(key for record in records for key in record.run.overrides))
    metric = [] if file.metric in records[0].results else [file.metric]
    rows: list[list[Any]] = [["run", "state", *keys, *metric, *records[0].results, "error", "directory"]]
    for r in records:
        values = [*(r.run.values.get(key, "") for key in keys), *(r.metric for _ in metric), *r.results.values()]
        rows.append([r.run.name, r.state.value, *values, r.error, r.run.run_dir.name])
    return rows


def markdown(file: SweepFile, records: list[Record], keys: Sequence[str]) -> str:
    """Returns the headline and a table of the runs, with the best run in bold."""
    winner = best(records, file.goal)
    rows = []
    for record in records:
        cells = [value.replace("|", "\\|").replace("\n", " ") for value in table_cells(file, record, keys)]
        rows.append([f"**{cell}**" if record is winner else cell for cell in cells])
    about = tally([record.state for record in records])
    if winner:
        about += f". {word_of(file)} {file.metric}: {metric_text(file.metric, winner.metric)} ({winner.run.name})"
    return f"# {file.path.stem}\n\n{about}.\n\n{pages.markdown(heads(file, keys), rows)}\n"


def heads(file: SweepFile, keys: Sequence[str]) -> list[str]:
    """Returns the names of the table's columns."""
    return [*keys, file.metric, "step time", "wall time", "state"]


def word_of(file: SweepFile) -> str:
    """Returns the word for the best value of the metric."""
    return "Lowest" if file.goal == "min" else "Highest"


def table_cells(file: SweepFile, record: Record, keys: Sequence[str]) -> list[str]:
    """Returns the values of the keys, the metric, the times and the state."""
    times = (record.results["step_time_s"], record.results["wall_time_s"])
    return [
        *(text(record.run.values.get(key, UNKNOWN)) for key in keys),
        metric_text(file.metric, record.metric),
        *(UNKNOWN if value is None else format_seconds(value) for value in times),
        f"{record.state}: {record.error}" if record.error else record.state.value,
    ]


# ------------------------------------------------------------------------------------------------- the page


def sweep_page(file: SweepFile, records: list[Record], keys: Sequence[str], workdir: Path) -> str:
    """Returns the whole page."""
    states = {record.state for record in records}
    finished = sum(record.state == RunState.FINISHED for record in records)
    winner = best(records, file.goal)
    return render(
        "launch/sweeps/page.html",
        title=file.path.stem,
        heading=file.path.stem,
        badge=f"{finished} of {len(records)} finished",
        mood="bad" if RunState.FAILED in states else "good" if states == {RunState.FINISHED} else "warn",
        about=file.about.partition("\n")[0],
        footer=f"Each dot is a run; {CSV_FILE} has all numbers.",
        facts=_tiles(file, records, keys),
        charts={f"{file.metric} over {key}": _chart(file, records, keys, key) for key in _axes(keys)},
        rows=[heads(file, keys), *(_cells(file, record, keys, workdir) for record in records)],
        kinds=["best" if record is winner else "" for record in records],
        command=shlex.join(["python", *sys.argv]),
    )


def _tiles(file: SweepFile, records: list[Record], keys: Sequence[str]) -> list[tuple[str, str, str]]:
    winner = best(records, file.goal)
    facts = [(f"{word_of(file)} {file.metric}", metric_text(file.metric, winner.metric if winner else None), "")]
    if winner:
        facts += [(key, text(winner.run.values.get(key, UNKNOWN)), "of the best run") for key in keys]
    spent_s = sum(record.results["wall_time_s"] or 0.0 for record in records)
    return [*facts, ("Total time", format_seconds(spent_s), "of the last attempts of all runs")]


def _axes(keys: Sequence[str]) -> Sequence[str]:
    """Returns the keys that have a chart."""
    return [key for key in keys if key not in REPEATS] or keys


def _chart(file: SweepFile, records: list[Record], keys: Sequence[str], key: str) -> Chart:
    """Returns the chart over a key, with a series per value of the first other key that has few enough values.

    A key that determines the chart's key is skipped, because its series would have no lines. For example, the number of
    steps determines the batch size in a sweep of both.
    """
    few = (k for k in _axes(keys) if len(_values(records, k)) <= MAX_LINES)
    other = next((k for k in few if not _decide(records, [k], key)), "")
    points = [
        Point(
            x=r.run.values.get(key, UNKNOWN),
            line=r.run.values.get(other, UNKNOWN) if other else None,
            y=r.metric,
            tip=f"{r.run.name}: {metric_text(file.metric, r.metric)}",
        )
        for r in records
        if r.metric is not None
    ]
    over = [k for k in keys if not _decide(records, [key, other], k)]
    return sweep_chart(points, x_name=key, line_name=other, metric=file.metric, over=over)


def _cells(file: SweepFile, record: Record, keys: Sequence[str], workdir: Path) -> list[str]:
    """Returns a row of the table. Its state links to the page of the run, if that page exists."""
    *numbers, state = table_cells(file, record, keys)
    page = record.run.run_dir / run_directory.REPORT
    if page.exists():
        state = Markup('<a href="{}">{}</a>').format(os.path.relpath(page, workdir), state)
    return [*numbers, state]


def _values(records: Sequence[Record], *keys: str) -> set[tuple[str, ...]]:
    return {tuple(text(record.run.values.get(key, UNKNOWN)) for key in keys) for record in records}


def _decide(records: Sequence[Record], keys: Sequence[str], other: str) -> bool:
    """Whether runs that agree in `keys` agree in `other`."""
    return len(_values(records, *keys, other)) == len(_values(records, *keys))
