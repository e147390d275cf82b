"""`MetricsWriter`: one JSON line per logged step in `metrics.jsonl`, and the same values for TensorBoard.

`metrics.jsonl` is strict JSON: a number that is not finite becomes the string `"NaN"`, `"Infinity"` or
`"-Infinity"`, which `float()` reads back. TensorBoard gets the number itself.
"""

# protobuf creates its classes at run time:
# pyright: reportAttributeAccessIssue=false

import importlib
import json
import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from runtime.files import atomic, json_lines, run_directory

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter

FLUSH_EVERY_S = 5.0  # TensorBoard's file; metrics.jsonl is flushed after every line


class MetricsWriter:
    """Appends the values of each step to the files of a run directory.

    With `resume_step=N` the run continues after step N. Lines of later steps from the previous attempt and incomplete
    lines are removed, so that each step appears once. A new run (0) renames an existing `metrics.jsonl` to
    `metrics.1.jsonl` (2, 3, ...). None: the step is unknown until the first line is written.
    """

    def __init__(self, run_dir: str | os.PathLike[str], resume_step: int | None = 0) -> None:
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / run_directory.METRICS
        self._lines = None if resume_step is None else _opened_lines(self._path, resume_step)
        self._events: EventsWriter | None = _opened_events(folder / run_directory.TENSORBOARD)
        self._has_events = False
        self._flushed_s = 0.0

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the values measured at `step`, which may have any set of keys."""
        values = {key: float(value) for key, value in scalars.items()}
        line: dict[str, int | float | str] = {"step": int(step)}
        line |= {key: _json_number(scalars[key], value) for key, value in values.items()}
        self._lines = self._lines or _opened_lines(self._path, step - 1)
        self._lines.write(json.dumps(line, allow_nan=False) + "\n")
        self._write_event(int(step), values)

    def is_lost(self) -> bool:
        """Whether the open metrics.jsonl is no longer in its folder, because that was deleted or moved."""
        return self._lines is not None and not self._path.exists()

    def sync(self) -> None:
        """Waits until the lines of metrics.jsonl are on the disk, where they survive a failure of the machine."""
        if self._lines is not None:
            os.fsync(self._lines.fileno())

    def close(self) -> None:
        """Flushes and closes both files. A second call does nothing."""
        if self._lines is not None:
            self._lines.close()
        if self._events is not None:
            self._events.close()
            self._events = None

    def _write_event(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one event with all values, in this thread so that a full disk raises here instead of hanging."""
        from tensorboardX.proto import event_pb2, summary_pb2

        assert self._events is not None
        summary = summary_pb2.Summary(
            value=[summary_pb2.Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        )
        now = time.time()
        if not self._has_events:  # this event hides the earlier values of the steps from here on
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._events.write_event(event_pb2.Event(wall_time=now, step=step, session_log=start))
            self._has_events = True
        self._events.write_event(event_pb2.Event(wall_time=now, step=step, summary=summary))
        if now - self._flushed_s >= FLUSH_EVERY_S:
            self._events.flush()
            self._flushed_s = now


def import_ahead() -> None:
    """Starts to import TensorBoard's package in a thread, because it may import torch, which takes seconds."""
    threading.Thread(target=importlib.import_module, args=("tensorboardX",), name="tensorboard").start()


def _opened_lines(path: Path, after: int) -> TextIO:
    """Returns the file opened for the lines of steps after `after`.

    Removes lines of these steps from earlier attempts.
    """
    if after:
        drop_lines_after(path, after)
    else:
        atomic.set_aside(path)
    return open(path, "a", buffering=1, encoding="utf-8")


def _opened_events(folder: Path) -> "EventsWriter":
    """Returns a new event file."""
    from tensorboardX.event_file_writer import EventsWriter  # see `import_ahead`

    folder.mkdir(exist_ok=True)
    return EventsWriter(str(folder / "events"), filename_suffix=f".{os.getpid()}.{len(os.listdir(folder))}")


def drop_lines_after(path: Path, step: int) -> None:
    """Atomically removes the lines of steps after `step` and incomplete lines from a `metrics.jsonl`."""
    data = path.read_bytes() if path.exists() else b""
    lines = [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    steps = [(json_lines.parsed(line) or {}).get("step") for line in lines]
    remaining = b"".join(line for line, of in zip(lines, steps, strict=True) if isinstance(of, int) and of <= step)
    if remaining != data:
        atomic.replace(path, remaining, durable=True)


def _json_number(given: float, value: float) -> int | float | str:
    """Returns a number as strict JSON can store it: integers stay integers, non-finite numbers become strings."""
    if math.isfinite(value):
        return int(given) if isinstance(given, int) else value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
