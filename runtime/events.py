"""`WORKDIR/events.jsonl`: what happened to a run, one JSON object per line, for programs and for people.

Every line has `time` (ISO 8601, UTC), `event`, `by` (the writer: a process of the run, or its engine) and the fields
that are listed with the event below. The lines of an attempt also have `attempt_id`, in which the engine and the
processes agree. Process 0 of a run writes, and process 1 if process 0 is lost: after a link failure each of them may
report that the other one is lost.
"""

import contextlib
import json
import os
import socket
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from runtime.files import json_lines, locks, run_directory

_LOCK_S = 1.0  # a process that is stopped while it holds the lock must not block the others for longer


class Event(StrEnum):
    """The kinds of events, each with its fields."""

    STARTED = "started"  # coordinator, nodes (of the mesh), processes, devices
    # step, source (nothing, memory or checkpoint), steps_again (steps that are repeated); with memory also
    # source_nodes (nodes whose memory held a part of the state) and nodes (of the attempt)
    RESTORED = "restored"
    FIRST_STEP = "first_step"  # step, after (the step before, or the last one of the round before)
    SNAPSHOT_BEGUN = "snapshot_begun"  # step; its arrays are copied, but not yet committed by all processes
    CHECKPOINT_BEGUN = "checkpoint_begun"  # step; the checkpoint is complete when `checkpoints/STEP` exists
    LOST_PEER = "lost_peer"  # peers, why
    # of independent replicas, each in its own file; `step`: its first, its last, or the one in which it is lost
    REPLICA_JOINED = "replica_joined"  # replica, step, host
    REPLICA_LEFT = "replica_left"  # replica, step
    REPLICA_LOST = "replica_lost"  # replica, step, why
    STOPPED = "stopped"  # step, why (finished or asked to stop)
    EXITED = "exited"  # code, why
    # of an engine
    ATTEMPT_STARTED = "attempt_started"  # attempt (its number), hosts, idle (hosts that it does not use)
    ATTEMPT_STOPPING = "attempt_stopping"  # attempt, why; the program is asked to stop
    ATTEMPT_FAILED = "attempt_failed"  # attempt, host and how of the first process that ended without being asked to
    ATTEMPT_STEPPED = "attempt_stepped"  # attempt, step, after_s (since the event that caused the attempt)
    ATTEMPT_ENDED = "attempt_ended"  # attempt, step, ends (for each host, how its process ended)
    NODE_LOST = "node_lost"  # host, why


class EventLog:
    """Appends events to the file of a work directory; one without a directory does nothing."""

    def __init__(self, workdir: Path | None, writer: str = "", attempt_id: str = "") -> None:
        """`writer` becomes the field `by`, with the name of this host; `attempt_id` a field of every line."""
        self._file = workdir / run_directory.EVENTS if workdir else None
        self._by = f"{writer} on {socket.gethostname()}"
        self._attempt = {"attempt_id": attempt_id} if attempt_id else {}

    def write(self, event: Event, **fields: Any) -> None:
        """Appends an event. A write error is ignored: a full disk must not end a run that could continue."""
        if self._file is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": event, "by": self._by, **self._attempt, **fields}).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                # without a lock, appends of several nodes to a network file system may overwrite each other
                with contextlib.suppress(BlockingIOError, locks.NoLocksError):
                    locks.take(descriptor, wait_s=_LOCK_S)
                os.write(descriptor, line if _ends_a_line(descriptor) else b"\n" + line)
            finally:
                os.close(descriptor)


class EventReader:
    """Reads the events of a work directory as they are appended."""

    def __init__(self, workdir: Path) -> None:
        self._file, self._offset = workdir / run_directory.EVENTS, 0

    def new(self) -> list[dict[str, Any]]:
        """Returns the events since the last call, with `time_s` (seconds since 1970) added."""
        with contextlib.suppress(OSError), self._file.open("rb") as file:  # no file yet, or no network
            if file.seek(0, os.SEEK_END) < self._offset:  # the file was deleted and created again
                self._offset = 0
            file.seek(self._offset)
            whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._offset += len(whole) + 1
                return [found for line in whole.split(b"\n") if (found := _parsed(line))]
        return []


def _ends_a_line(descriptor: int) -> bool:
    """Whether a file ends with a complete line: a machine may have died while it wrote one."""
    size = os.fstat(descriptor).st_size
    return not size or os.pread(descriptor, 1, size - 1) == b"\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Returns the event of a line; None if the line is not an event."""
    content = json_lines.parsed(line)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        if content and content["event"]:
            return content | {"time_s": datetime.fromisoformat(content["time"]).timestamp()}
    return None
