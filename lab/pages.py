"""Fills the tables of the docs, draws their charts and writes configs/losses.csv, from the records; nothing is trained.

    python -m lab.pages
    python -m lab.pages --check      # writes nothing

The records are in lab/benchmarks/results. A page has a table between `<!-- table: NAME -->` and `<!-- end -->`;
`tables` here and in lab/paper/tables.py has the names. Exit codes: 0 done; 1 --check found a page whose tables
differ from the records; 2 a record or a table is missing.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from configs.losses import FILE, rows
from lab.benchmarks import (
    accuracy,
    compiled,
    eager,
    elastic,
    gpu,
    ladder_table,
    losses,
    overlap_table,
    planner_configs,
    planner_errors,
    planner_records,
    profile_step,
    published_steps,
    published_tpu_steps,
    replica_events,
    starts,
    step_tables,
    time_to_loss_table,
)
from lab.benchmarks.step_tables import by_themselves, ours_of, rates_of
from lab.paper import tables as papers
from lab.plots import png
from lab.records import Records, read_records
from runtime.command_line import OneLineParser, complain
from runtime.files.pages import filled, update

COMMAND = "python -m lab.pages"
DOCS = Path(__file__).resolve().parents[1] / "docs"
CHARTS: dict[str, Callable[[Records], Figure]] = {
    **papers.CHARTS,
    "strategies_step_time": step_tables.draw_step_times,
    "strategies_bytes": step_tables.draw_bytes,
    "readme_bytes": partial(step_tables.draw_readme, is_dark=False),
    "readme_bytes_dark": partial(step_tables.draw_readme, is_dark=True),
    "replica_events": lambda x: replica_events.picture(x.lines("replica_events")),
    "time_to_loss": lambda x: time_to_loss_table.picture(x.lines("time_to_loss")),
    "planner_curves": lambda _: planner_records.curves(),
    "profile": lambda x: profile_step.picture(x.line("profile_step"), is_dark=False),
    "profile_dark": lambda x: profile_step.picture(x.line("profile_step"), is_dark=True),
}


def tables(records: Records) -> dict[str, Callable[[], str]]:
    """Returns all tables as functions of no argument, by the name that a page gives them."""
    of = records.lines
    ours, steps = by_themselves(of("strategies")), of("compression")
    sessions = {name: of("planner", timed=name) for name in planner_errors.SESSIONS}
    found: dict[str, Callable[[], str]] = {
        **papers.tables(records),
        **ladder_table.tables(of("ladder")),
        "what strategies hold": lambda: compiled.held_and_sent(of("compiled", config="quickstart", accum=2)),
        "bytes of strategies": lambda: step_tables.strategy_bytes(ours_of(of("strategies"))),
        "the scale model": lambda: step_tables.scale_model(of("strategies", mode=step_tables.SCALE_MODEL)),
        "PyTorch": lambda: step_tables.pytorch(of("strategies", mode=step_tables.PEER)),
        "eager updates": lambda: eager.table(of("eager")),
        "what is free": lambda: losses.free(records),
        "kill matrix": lambda: elastic.kill_matrix(of("elastic")),
        "what overlaps": lambda: overlap_table.table(of("overlap")),
        "starts": lambda: starts.table(of("starts")),
        "replicas": lambda: step_tables.replicas(of("replicas")),
        "time to loss": lambda: time_to_loss_table.table(of("time_to_loss")),
        "steps on the wire": lambda: time_to_loss_table.step_times(of("time_to_loss")),
        "steps with latency": lambda: time_to_loss_table.with_latency(of("time_to_loss")),
        "fastest by link": lambda: time_to_loss_table.choice(of("time_to_loss")),
        "events of replicas": lambda: replica_events.table(of("replica_events")),
        "random events of replicas": lambda: replica_events.random_table(of("replica_events")),
        "plans of configs": planner_configs.table,
        "clusters": planner_configs.clusters_table,
        "a search": planner_records.short_example,
        "a whole search": planner_records.example,
        "a run on spot nodes": planner_records.spot,
        "adapters of 70 B": planner_records.adapters,
        "published steps on TPUs": lambda: published_tpu_steps.table(of("published_tpu_steps")),
        "errors on published steps on TPUs": lambda: published_steps.summary(
            published_tpu_steps.groups(of("published_tpu_steps"))
        ),
        "errors on published steps": lambda: published_steps.summary(published_steps.groups(of("published_steps"))),
        "errors of the planner": lambda: planner_errors.summary(sessions),
        "a GPU by the planner": lambda: planner_errors.gpu_table(of("planner_gpu")),
        "a GPU beside PyTorch": lambda: gpu.table(of("gpu")),
        "rates of a GPU": lambda: gpu.rates(of("gpu_rates")),
        "replicas by the planner": lambda: planner_errors.replicas_table(of("planner_replicas")),
        "fastest by the planner": lambda: planner_errors.bests(sessions),
    }
    for task in accuracy.TASKS:
        found[f"accuracy on {task}"] = lambda task=task: accuracy.table(task, of("accuracy", task=task))
    for rate in rates_of(ours):
        found[f"step times at {rate}"] = partial(step_tables.step_times, ours, rate)
    for rate in rates_of(steps):
        at_rate = [line for line in steps if line["rate"] == rate]
        found[f"steps with codecs at {rate}"] = partial(step_tables.codec_steps, at_rate)
    return found


def with_note(records: Records, table: Callable[[], str]) -> str:
    """Returns a table, with a note if it reads lines whose commit is gone.

    A sentence replaces a table without rows.
    """
    records.read_lost.clear()
    text = table()
    if len(text.splitlines()) == 2:
        return "The runs of this table are not recorded yet."
    return "\n\n".join(filter(None, [text, records.lost_note()]))


def main(argv: Sequence[str] | None = None, docs: Path = DOCS) -> int:
    """Fills or checks the pages in a folder; returns the exit code."""
    parser = OneLineParser(prog="python -m lab.pages", description="Fills the pages from the records.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is stale")
    try:
        check = parser.parse_args(argv).check
        records = read_records()
        stale = update({FILE: losses.text(records)}, FILE.parents[1], COMMAND, check=check)
        rows.cache_clear()  # the planner's tables read the file
        records.read_lost.clear()
        found = {name: partial(with_note, records, table) for name, table in tables(records).items()}
        assert not records.read_lost, f"{[*records.read_lost]} are read before their tables, which would lack the note"
        texts = {page: filled(page.read_text(), found) for page in sorted(docs.rglob("*.md"))}
        charts = {} if check else {name: png(draw(records)) for name, draw in CHARTS.items()}
    except ValueError as error:
        return complain(error)
    for name, content in charts.items():
        (docs / "images" / f"{name}.png").write_bytes(content)
    stale = max(stale, update(texts, docs.parent, COMMAND, check=check))
    if check and not stale:
        print(f"the tables of {len(texts)} pages are those of the records")
    return stale


if __name__ == "__main__":
    sys.exit(main())
