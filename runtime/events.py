"""`WORKDIR/events.jsonl`: the events of a run, one JSON object per line, for programs and for people.

Every line has `time` (ISO 8601, UTC), `event`, `by` (the writer: a process of the run, or its engine) and the fields
listed with the event below. The lines of an attempt also have `attempt_id`, which the engine and the processes share.
Process 0 of a run writes, and process 1 if process 0 is lost. After a link failure each of these two may report that
the other one is lost.
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
from runtime.files.json_objects import JsonObject

_LOCK_S = 1.0  # a process stopped while it holds the lock must not block the others for longer


class Event(StrEnum):
    """The kinds of events, each with its fields."""

    STARTED = "started"  # coordinator, nodes (of the mesh), processes, devices
    # step, source (nothing, memory or checkpoint), steps_again (steps that are repeated); with memory also
    # source_nodes (nodes whose memory held a part of the state) and nodes (of the attempt)
    RESTORED = "restored"
    FIRST_STEP = "first_step"  # step, after (the preceding step, or the last step of the preceding round)
    SNAPSHOT_BEGUN = "snapshot_begun"  # step; its arrays are copied, but not yet committed by all processes
    CHECKPOINT_BEGUN = "checkpoint_begun"  # step; the checkpoint is complete when `checkpoints/STEP` exists
    PROFILED = "profiled"  # step (the first), steps, step_s, collectives (training/profiling.py: collective_times)
    LOST_PEER = "lost_peer"  # peers, why
    # independent replicas, each in a separate file; `step`: the first step, the last step, or the step of the loss
    REPLICA_JOINED = "replica_joined"  # replica, step, host
    REPLICA_LEFT = "replica_left"  # replica, step
    REPLICA_LOST = "replica_lost"  # replica, step, why
    STOPPED = "stopped"  # step, why (finished or asked to stop)
    EXITED = "exited"  # code, why
    # an engine's events
    ATTEMPT_STARTED = "attempt_started"  # attempt (its number), hosts, idle (unused hosts)
    ATTEMPT_STOPPING = "attempt_stopping"  # attempt, why; the program is asked to stop
    ATTEMPT_FAILED = "attempt_failed"  # attempt, host and how of the first process that ended without a request
    ATTEMPT_STEPPED = "attempt_stepped"  # attempt, step, after_s (since the event that caused the attempt)
    ATTEMPT_ENDED = "attempt_ended"  # attempt, step, ends (how each host's process ended)
    NODE_LOST = "node_lost"  # host, why


class EventLog:
    """Appends events to the file of a work directory. Does nothing without a directory."""

    def __init__(self, workdir: Path | None, writer: str = "", attempt_id: str = "") -> None:
        """`writer` and the name of this host become the field `by`. `attempt_id` becomes a field of every line."""
        self._file = workdir / run_directory.EVENTS if workdir else None
        self._by = f"{writer} on {socket.gethostname()}"
        self._attempt = {"attempt_id": attempt_id} if attempt_id else {}

    def write(self, event: Event, **fields: Any) -> None:
        """Appends an event. Ignores write errors, because a full disk must not end a run that could continue."""
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

    def new(self) -> list[JsonObject]:
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
    """Whether a file ends with a complete line. If the machine died during a write, it does not."""
    size = os.fstat(descriptor).st_size
    return not size or os.pread(descriptor, 1, size - 1) == b"\n"


def _parsed(line: bytes) -> JsonObject | None:
    """Returns the event of a line; None if the line is not an event."""
    content = json_lines.parsed(line)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        if content and content["event"]:
            return content | {"time_s": datetime.fromisoformat(content["time"]).timestamp()}
    return None
