"""The outcome of a run: its state and its results, from the files in its directory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from configs.schema import nearest
from launch.sweeps.plan import Run
from runtime.files import json_lines, run_directory
from training.metrics.run_files import RunFiles, read_run, results_of, series
from training.metrics.units import UNKNOWN, format_bytes, format_loss, format_seconds


class RunState(StrEnum):
    """The state of a run."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    PRUNED = "pruned"  # stopped because other runs were better at the same step
    STOPPED = "stopped"  # resumable: running the same sweep again continues it


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run with its results. `error` is the last error line that a failed run printed."""

    run: Run
    state: RunState
    error: str
    results: Mapping[str, float | None]  # the headline numbers
    metric: float | None  # NaN where it diverged

    @property
    def files(self) -> RunFiles:
        """The run's files, read on demand: the rows of hundreds of runs would take gigabytes."""
        return _files_of(self.run)


def is_finished(run: Run) -> bool:
    """Returns whether the run's summary says that it finished."""
    try:
        summary = json_lines.parsed((run.run_dir / run_directory.SUMMARY).read_bytes())
    except FileNotFoundError:
        return False
    return summary is not None and summary.get("exit_reason") == "finished"


def record(run: Run, state: RunState, error: str, metric: str) -> Record:
    """Reads the existing files of the run. `metric` is a headline number or a key whose rows give a median."""
    files = _files_of(run)
    results = results_of(files)
    if metric in results:
        value = results[metric]
    else:
        values = [value for _, value in series(files.rows, metric) if math.isfinite(value)]
        value = median(values) if values else None
    return Record(run=run, state=state, error=error, results=results, metric=value)


def _files_of(run: Run) -> RunFiles:
    try:
        return read_run(run.run_dir)
    except ValueError:
        return RunFiles(run_dir=run.run_dir)


def missing_metric(record: Record, metric: str) -> str:
    """Returns an error message if a finished run has no such metric, else ""."""
    names = [name for name, value in record.results.items() if value is not None]
    known = [*dict.fromkeys([*names, *(key for row in record.files.rows for key in row)])] or [*record.results]
    if metric in known:
        return ""
    return f"METRIC={metric!r} is not in {record.run.run_dir}; the nearest there is {nearest(metric, known)!r}"


def best(records: list[Record], goal: str) -> Record | None:
    """Returns the finished run with the lowest (or highest) metric."""
    done = [r for r in records if r.state == RunState.FINISHED and r.metric is not None and math.isfinite(r.metric)]
    return (min if goal == "min" else max)(done, key=lambda r: r.metric or 0.0, default=None)


def metric_text(name: str, value: float | None) -> str:
    """Returns a metric as readable text, with units if its name ends with `_bytes` or `_s`."""
    if value is None:
        return UNKNOWN
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_s") and not name.endswith("_per_s"):
        return format_seconds(value)
    return format_loss(value) if 0.1 <= abs(value) < 1000 or not math.isfinite(value) else f"{value:.6g}"


def tally(states: Sequence[RunState]) -> str:
    """Returns `12 runs: 3 finished, 2 running, 7 waiting`."""
    return f"{len(states)} runs: {', '.join(f'{states.count(state)} {state}' for state in RunState if state in states)}"
