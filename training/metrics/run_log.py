"""`RunLog`: all output of a run, printed and in files. It writes in process 0 and does nothing in the others."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from runtime.exit_codes import ResumableError
from runtime.files import atomic, run_directory
from runtime.files.json_objects import JsonMapping, JsonObject
from training.metrics.progress import RunProgress, print_summary
from training.metrics.report import write_report
from training.metrics.run_files import read_run
from training.metrics.throughput import StepTimer
from training.metrics.wire import WireBytes, WireCounter
from training.metrics.writer import MetricsWriter


class RunLog:
    """Writes the progress bar, `metrics.jsonl`, TensorBoard events, `report.html` and the files that it reads.

    A context manager: an exception that ends the run closes the progress bar and becomes the outcome in the report.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        enabled: bool,
        start_step: int,
        num_steps: int,
        log_every: int,
        timer: StepTimer,
        files: Mapping[str, JsonMapping],
        constants: Mapping[str, float],
        count_wire: bool,
        started_s: float,
        sink: str = "none",
        may_join: bool = False,
    ) -> None:
        """Writes each of `files`, JSON by its name, and sets up the rest.

        `constants` are in every row of the metrics, added to a measurement of the same name. `started_s` is the
        `perf_counter()` at the program's start. `sink` also receives the rows: `wandb` or `none`. With `may_join` the
        run may continue at a later step than `start_step`, with the state of another replica. Rows of earlier steps
        then stay, and a failed write is resumable.
        """
        self._run_dir, self._enabled, self._log_every = run_dir, enabled, log_every
        self._may_join, self._cannot_write = may_join, ResumableError if may_join else OSError
        self._last_step, self._num_steps, self._started_s = start_step, num_steps, started_s
        self._first: int | None = None  # the first step of this attempt
        self._written = start_step  # the last step with a row
        self._timer, self._constants = timer, dict(constants)
        self._row: tuple[int, dict[str, float]] | None = None  # the latest step's row, not written yet
        self._spent: dict[str, float] = {}  # seconds by key, outside of steps, for the next row
        self._crossed: list[WireBytes] = []  # wire bytes since the last row
        self._crossing = 0  # number of steps in which they crossed
        if not enabled:
            return
        with self._explained():
            for name, content in files.items():
                _write_json(run_dir / name, content)
            # files of an earlier attempt; a killed attempt must leave none
            (run_dir / run_directory.SUMMARY).unlink(missing_ok=True)
            self._writer = MetricsWriter(run_dir, resume_step=None if may_join else start_step)
        self._progress = RunProgress(num_steps, start_step)
        self._sink: Any = None
        if sink == "wandb":
            with self._sink_or_warning():
                self._sink = offline_wandb(run_dir, files.get(run_directory.CONFIG, {}))
        self._wire = WireCounter() if count_wire else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or not self._enabled:
            return
        stopped = isinstance(error, KeyboardInterrupt)
        try:
            self.close("interrupted" if stopped else f"failed: {' '.join(str(error).split())}")
        except Exception as failed:  # must not hide the error that ends the run
            error.add_note(f"the report could not be written: {failed}")

    def say(self, text: str) -> None:
        """Prints a line."""
        if self._enabled:
            self._progress.print(text)

    def spent(self, key: str, seconds: float) -> None:
        """Records time just spent outside of training, under `key` in the next row.

        It is excluded from the step time, and the bytes sent during it from the wire bytes.
        """
        self._spent[key] = self._spent.get(key, 0.0) + seconds
        self._timer.pause(seconds)
        if self._enabled and self._wire:
            self._wire.delta()

    def step(self, step: int, scalars: Mapping[str, float]) -> None:
        """Takes the measurements of a step at the moment it ends."""
        if not self._enabled:
            return
        self._write_if_due()
        row = {**scalars, **self._timer.done(step, time.perf_counter())}
        if self._may_join and "mfu" in row:  # a replica did only its part of the step
            mfu = row.pop("mfu")
            row |= {"mfu": mfu / row["replicas"]} if "replicas" in row else {}
        self._crossed_until(step)
        if self._crossed:
            row["wire_tx_bytes"] = sum(one.tx_bytes for one in self._crossed) / self._crossing
            row["wire_rx_bytes"] = sum(one.rx_bytes for one in self._crossed) / self._crossing
        row |= {name: row.get(name, 0) + value for name, value in self._constants.items()}
        self._row = step, row
        if self._first is None:
            self._first = step
            self.say(f"first step done after {time.perf_counter() - self._started_s:.1f} s")
        self._progress.update(step, row)

    def passed(self, step: int) -> None:
        """Takes a step without a row, at the moment it ends, and only collects its wire bytes."""
        if self._enabled:
            self._write_if_due()
            self._crossed_until(step)
            self._progress.update(step, {})

    def _crossed_until(self, step: int) -> None:
        """Counts the wire bytes since the previous step, or since the end of a later `spent`.

        Bytes before the first step of a replica that may have joined are left out, because they contain the state that
        it received.
        """
        wire = self._wire.delta() if self._wire else None
        if wire and not (self._may_join and self._first is None):
            self._crossed.append(wire)
            self._crossing += step - self._last_step
        self._last_step = step

    def validation(self, step: int, scalars: Mapping[str, float], text: str) -> None:
        """Takes the results of a validation after `step`, which must be the last logged step, and prints `text`."""
        if self._enabled:
            assert self._row is not None and self._row[0] == step
            self._row[1].update(scalars)
            self.say(f"step {step}: {text}")

    def flush(self) -> None:
        """Writes the row of the latest step if due, and waits until all rows are on the disk.

        Call it before that step is saved, because an attempt that resumes from it will not repeat it on any host.
        """
        if self._enabled:
            self._write_if_due()
            with self._explained():
                self._writer.sync()

    def is_lost(self) -> bool:
        """Whether the run's directory was deleted or moved, so that its output would be lost."""
        return self._enabled and self._writer.is_lost()

    def _write_if_due(self) -> None:
        """Writes the row of the latest step if due.

        The first step of an attempt is always due, because its row tells engines about the progress. Steps may be
        skipped.
        """
        if self._row is None:
            return
        step, row = self._row
        is_due = step // self._log_every > self._written // self._log_every
        if is_due or step in (self._first, self._num_steps) or "validation_loss" in row:
            self._write_row()

    def close(self, exit_reason: str, *, sample: str | None = None, mesh_png: bytes | None = None) -> None:
        """Writes the summary and the report, and prints the summary."""
        if not self._enabled:
            return
        self._progress.close()
        try:
            if self._row is not None:
                self._write_row()
        finally:
            with self._explained():
                self._writer.close()
        with self._explained():
            if sample is not None:
                (self._run_dir / run_directory.SAMPLE).write_text(sample, encoding="utf-8")
            if mesh_png is not None:
                (self._run_dir / run_directory.MESH).write_bytes(mesh_png)
        run, summary = read_run(self._run_dir), JsonObject()  # once, because the rows may take a gigabyte
        for row in run.rows:  # the last value of each key, including earlier attempts
            summary |= {name: row[key] for key, name in IN_SUMMARY.items() if key in row}
            named = [key for key in row if key.startswith(("data_", "validation_loss/")) and key != "data_wait_s"]
            summary |= {key: row[key] for key in named}  # counters of shards, and losses on each source and set
        summary |= {"exit_reason": exit_reason, "wall_time_s": time.perf_counter() - self._started_s} | self._spent
        with self._explained():
            _write_json(self._run_dir / run_directory.SUMMARY, summary)
        if sample is not None:
            print(sample)
        problems = {name: problem for name, problem in run.problems.items() if name != run_directory.SUMMARY}
        run = replace(run, summary=summary, problems=problems)
        print_summary(run)
        with self._explained():
            report = write_report(run)
        print(f"report: {report}")
        if self._sink:
            with self._sink_or_warning():
                self._sink.finish()

    def _write_row(self) -> None:
        assert self._row is not None
        (step, row), self._row = self._row, None
        self._written = step
        spent, self._spent = self._spent, {}
        self._crossed.clear()
        self._crossing = 0
        self._timer.row_written()
        with self._explained():
            self._writer.write(step, row | spent)
        if self._sink:
            with self._sink_or_warning():
                self._sink.log(row | spent, step=step)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns an error of the disk into one line."""
        try:
            yield
        except OSError as error:
            raise self._cannot_write(
                f"cannot write to {self._run_dir}: {error.strerror or error}; its checkpoints are intact"
            ) from error

    @contextmanager
    def _sink_or_warning(self) -> Iterator[None]:
        """Turns an error of the sink, which is foreign code, into a warning. The run continues without the sink."""
        try:
            yield
        except Exception as error:
            self._sink = None
            why = " ".join(f"{type(error).__name__}: {error}".split())
            self.say(f"warning: sink=wandb failed ({why}); the run continues without it")


# key of metrics.jsonl: key of summary.json
IN_SUMMARY = {
    "step": "steps",
    "loss": "final_loss",
    "validation_loss": "validation_loss",
    "validation_bits_per_byte": "validation_bits_per_byte",
    "validation_accuracy": "validation_accuracy",
    "skipped_steps": "skipped_steps",
}


def offline_wandb(run_dir: Path, config: Mapping[str, object]) -> object:
    """Returns a run of Weights & Biases in `run_dir/wandb`, which `wandb sync` sends. Attempts share a group."""
    import wandb  # optional

    quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    about = {"project": "mics-jax", "group": run_dir.name, "config": dict(config)}
    return wandb.init(mode="offline", dir=run_dir, settings=quiet, **about)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    atomic.replace(path, json.dumps(content, indent=2) + "\n")
