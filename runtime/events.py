"""`WORKDIR/events.jsonl`: what happened to a run, one JSON object a line, for programs and for people.

Every line has `time` (ISO 8601, UTC), `event`, `by` (who writes: a process of the run, or its engine) and the fields
that stand beside the event's name below. Process 0 of a run writes, and process 1 if it misses process 0: after a cut
link each may say that the other one is lost.
"""

import contextlib
import json
import os
import socket
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from files import json_lines, locks

FILE_NAME = "events.jsonl"
_LOCK_S = 1.0  # a process that was frozen while it held the lock must not hold up the others


class Event(StrEnum):
    """What is written, with its fields."""

    READY = "ready"  # coordinator: an attempt that was started ahead has compiled, and waits for SIGUSR1
    STARTED = "started"  # coordinator, processes, devices
    RESTORED = "restored"  # step, source (in words; "nothing" at step 0), steps_again: steps that are done again
    FIRST_STEP = "first_step"  # step
    SNAPSHOT_BEGUN = "snapshot_begun"  # step: its arrays are copied; it counts when all processes have it
    CHECKPOINT_BEGUN = "checkpoint_begun"  # step; it counts when `checkpoints/STEP` is there
    LOST_PEER = "lost_peer"  # peers, why
    STOPPED = "stopped"  # step, why (finished or asked to stop)
    EXITED = "exited"  # code, why
    # of an engine
    ATTEMPT_STARTED = "attempt_started"  # attempt, hosts, idle: hosts that are not needed
    ATTEMPT_AHEAD = "attempt_ahead"  # attempt, hosts, why: it compiles while the one before it trains
    ATTEMPT_STOPPING = "attempt_stopping"  # attempt, why: the program is asked to stop
    ATTEMPT_FAILED = "attempt_failed"  # attempt, host, how: the first process that ended without being asked to
    ATTEMPT_STEPPED = "attempt_stepped"  # attempt, step, after_s: since the event that led to the attempt
    ATTEMPT_ENDED = "attempt_ended"  # attempt, step, ends: host to how its process ended
    NODE_LOST = "node_lost"  # host, why


class EventLog:
    """Appends events to the file of a work directory; one without a directory does nothing."""

    def __init__(self, workdir: Path | None, writer: str = "") -> None:
        """`writer` says on which host it is too."""
        self._file, self._by = (workdir / FILE_NAME if workdir else None), f"{writer} on {socket.gethostname()}"

    def write(self, event: Event, **fields: Any) -> None:
        """Appends an event. What cannot be written is left out: a full disk must not end a run that could go on."""
        if self._file is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": event, "by": self._by, **fields}).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                # of several nodes on a network file system, appends alone may overwrite each other
                with contextlib.suppress(BlockingIOError, locks.NoLocksError):
                    locks.take(descriptor, wait_s=_LOCK_S)
                os.write(descriptor, line if _ends_a_line(descriptor) else b"\n" + line)
            finally:
                os.close(descriptor)


class EventReader:
    """Reads a work directory's events as they come."""

    def __init__(self, workdir: Path) -> None:
        self._file, self._offset = workdir / FILE_NAME, 0

    def new(self) -> list[dict[str, Any]]:
        """Returns the events since the last call, with `time_s` (seconds since 1970) added."""
        with contextlib.suppress(OSError), self._file.open("rb") as file:  # there may be none yet, or no network
            if file.seek(0, os.SEEK_END) < self._offset:  # it was removed, and begins anew
                self._offset = 0
            file.seek(self._offset)
            whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._offset += len(whole) + 1
                return [found for line in whole.split(b"\n") if (found := _parsed(line))]
        return []

    def skip(self) -> None:
        """Leaves out what is there now."""
        with contextlib.suppress(OSError):
            self._offset = self._file.stat().st_size


def _ends_a_line(descriptor: int) -> bool:
    """Whether what is in a file is whole: a machine may have died in the middle of a line."""
    size = os.fstat(descriptor).st_size
    return not size or os.pread(descriptor, 1, size - 1) == b"\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Returns an event, None for a line that is none."""
    content = json_lines.parsed(line)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        if content and content["event"]:
            return content | {"time_s": datetime.fromisoformat(content["time"]).timestamp()}
    return None
