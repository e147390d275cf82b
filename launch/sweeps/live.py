"""`Live`: the runs of a sweep as a live table in a terminal, or as one line per change of state elsewhere."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live as Screen
from rich.table import Table
from rich.text import Text

from launch.sweeps.pool import SweepJob
from launch.sweeps.records import RunState, metric_text, record, tally
from runtime.files import json_lines, run_directory
from runtime.files.json_objects import JsonMapping
from training.metrics.run_files import number
from training.metrics.units import UNKNOWN, format_seconds

STYLES = {RunState.RUNNING: "cyan", RunState.FINISHED: "green", RunState.FAILED: "red", RunState.STOPPED: "yellow"}
# Priority of the runs, if not all fit on the screen
ORDER = (RunState.RUNNING, RunState.FAILED, RunState.STOPPED, RunState.WAITING, RunState.PRUNED, RunState.FINISHED)
TAIL_BYTES = 8192  # tail of metrics.jsonl to read; more than its longest line


class Live:
    """A context manager. `show` updates the display."""

    def __init__(self, metric: str, console: Console | None = None) -> None:
        self._metric = metric
        self._console = Console(highlight=False) if console is None else console
        self._screen: Screen | None = None
        self._last: dict[str, RunState] = {}
        self._jobs: Sequence[SweepJob] = ()
        self._final: dict[str, float | None] = {}  # metric of finished runs

    def __enter__(self) -> Self:
        if self._console.is_interactive:
            self._screen = Screen(console=self._console, auto_refresh=False, get_renderable=self._draw)
            self._screen.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._screen:
            self._screen.stop()

    def show(self, jobs: Sequence[SweepJob]) -> None:
        """Redraws the table, or prints a line for each job whose state has changed."""
        self._jobs = jobs
        if self._screen:
            self._screen.refresh()
            return
        for job in jobs:
            before = self._last.get(job.run.name, RunState.WAITING)
            if job.state != before:
                self._last[job.run.name] = job.state
                self._console.print(Text(self._line(job)), soft_wrap=True)

    def _draw(self) -> Group:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("run", "state", "step", self._metric, "time"):
            table.add_column(column, justify="right" if column in ("step", self._metric, "time") else "left")
        room = max(3, self._console.height - 4)
        chosen = sorted(range(len(self._jobs)), key=lambda i: ORDER.index(self._jobs[i].state))[:room]
        for job in (self._jobs[i] for i in sorted(chosen)):
            state = Text(f"{job.state}  {job.error}" if job.error else job.state, style=STYLES.get(job.state, "dim"))
            state.truncate(60, overflow="ellipsis")
            row = latest(job.run.run_dir)
            steps = f"{row.get('step', 0)}/{job.run.values['num_steps']}"
            table.add_row(Text(job.run.name), state, steps, self._number(job, row), _time(job))
        return Group(table, Text(tally([job.state for job in self._jobs]), style="dim"))

    def _line(self, job: SweepJob) -> str:
        """Returns the line to print when the job's state has changed."""
        position = f"[{self._jobs.index(job) + 1}/{len(self._jobs)}] {job.run.name}"
        if job.state == RunState.FINISHED:
            when = f"finished in {_time(job)}" if job.attempts else "was already finished"
            return f"{position} {when}, {self._metric} {self._number(job, {})}"
        return f"{position} {job.state}" + (f": {job.error}" if job.error else "")

    def _number(self, job: SweepJob, row: JsonMapping) -> str:
        """Returns the metric: the latest value while the job runs, the value of the report once it has finished."""
        name = job.run.name
        if job.state == RunState.FINISHED and name not in self._final:
            self._final[name] = record(job.run, job.state, "", self._metric).metric
        return metric_text(self._metric, self._final.get(name, number(row.get(self._metric))))


def latest(run_dir: Path) -> Mapping[str, object]:
    """Returns the latest value of each key in the last lines of `metrics.jsonl`.

    Cheap while the file is being written.
    """
    numbers: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        for row in json_lines.read_tail(run_dir / run_directory.METRICS, TAIL_BYTES):
            numbers |= row
    return numbers


def _time(job: SweepJob) -> str:
    return format_seconds(job.time_s) if job.time_s else UNKNOWN
