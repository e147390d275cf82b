"""`RunLog`: everything a run says and leaves behind, by process 0; the other processes get one that does nothing."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metrics.progress import Progress
from metrics.report import write_report
from metrics.summary import print_summary
from metrics.throughput import StepTimer
from metrics.wire import WireCounter
from metrics.writer import MetricsWriter


class RunLog:
    """The progress bar, `metrics.jsonl`, TensorBoard and the files from which `report.html` is made."""

    def __init__(
        self,
        run_dir: Path,
        *,
        enabled: bool,
        start_step: int,
        num_steps: int,
        log_every: int,
        timer: StepTimer,
        files: Mapping[str, Mapping[str, Any]],
        constants: Mapping[str, float],
        count_wire: bool,
        started_s: float,
    ) -> None:
        """`files` become `NAME.json`; `constants` go into every line of the metrics; `started_s` is `perf_counter()`."""
        self.validation_loss: float | None = None
        self._run_dir, self._enabled, self._log_every = run_dir, enabled, log_every
        self._num_steps, self._timer, self._constants = num_steps, timer, dict(constants)
        self._started_s, self._extra, self._last = started_s, dict[str, float](), dict[str, float]()
        if not enabled:
            return
        for name, content in files.items():
            write_json(run_dir / f"{name}.json", content)
        self._writer = MetricsWriter(run_dir, resume_step=start_step)
        self._progress = Progress(num_steps, start_step)
        self._wire = WireCounter() if count_wire else None
        if self._wire:
            self._wire.delta()

    def say(self, text: str) -> None:
        """Prints a line."""
        if self._enabled:
            self._progress.print(text)

    def spent(self, key: str, seconds: float) -> None:
        """Adds time that was no training: it appears as `key` with the next step and not in its step time."""
        self._extra[key] = self._extra.get(key, 0.0) + seconds
        self._timer.pause(seconds)

    def step(self, step: int, scalars: Mapping[str, float]) -> None:
        """Takes the numbers of a step that is done now."""
        speed = self._timer.done(step, time.perf_counter())
        if not self._enabled:
            return
        row = dict(scalars) | (speed.scalars() if speed else {}) | self._constants | self._extra
        self._extra = {}
        wire = self._wire.delta() if self._wire else None
        if wire:
            row |= wire.per_step(1)
        self._last = {"step": step} | row
        self._progress.update(step, row)
        if step % self._log_every == 0 or step == self._num_steps:
            self._writer.write(step, row)

    def validation(self, step: int, loss: float, bits_per_byte: float) -> None:
        """Takes the validation loss after `step`."""
        self.validation_loss = loss
        if self._enabled:
            row = {"validation_loss": loss, "validation_bits_per_byte": bits_per_byte}
            self._last |= row
            self._writer.write(step, row)
            self.say(f"step {step}: validation loss {loss:.4f} nats a token, {bits_per_byte:.4f} bits a byte")

    def close(self, exit_reason: str, *, sample: str | None = None, mesh_png: bytes | None = None) -> None:
        """Writes the summary and the report, and prints the summary."""
        if not self._enabled:
            return
        self._progress.close()
        self._writer.close()
        for name, content in (("sample.txt", sample and sample.encode()), ("mesh.png", mesh_png)):
            if content is not None:
                (self._run_dir / name).write_bytes(content)
        names = {"step": "steps", "loss": "final_loss"}
        kept = ("step", "loss", "validation_loss", "validation_bits_per_byte", "skipped_steps")
        summary = {names.get(key, key): self._last[key] for key in kept if key in self._last}
        summary |= {"exit_reason": exit_reason, "wall_time_s": time.perf_counter() - self._started_s}
        write_json(self._run_dir / "summary.json", summary)
        if sample is not None:
            print(sample)
        print_summary(self._run_dir)
        print(f"report: {write_report(self._run_dir)}")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)
