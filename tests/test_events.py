"""`events.jsonl`: whole lines from several writers, and the events of a run."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.failing import no_room
from support.running import ROOT, arguments, run_here

from runtime.events import Event, EventLog, EventReader
from runtime.exit_codes import ExitCode
from runtime.files import locks, run_directory
from runtime.heartbeat import Heartbeat, Verdict
from runtime.preemption import PreemptionHandler
from runtime.supervisor import Supervisor

WRITER = """
import sys
from pathlib import Path
from runtime.events import Event, EventLog
log = EventLog(Path(sys.argv[1]))
for step in range(200):
    log.write(Event.SNAPSHOT_BEGUN, step=step, from_=sys.argv[2] * 100)
"""


def kinds(workdir: Path) -> list[str]:
    return [event["event"] for event in EventReader(workdir).new()]


@pytest.mark.slow
def test_lines_of_several_writers_stay_whole(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, tmp_path, name], cwd=ROOT) for name in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    found = EventReader(tmp_path).new()
    for name in "ab":
        assert [event["step"] for event in found if event["from_"][0] == name] == [*range(200)]


def test_a_line_is_written_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network file system appends of two nodes may overwrite each other; here they never do."""
    done: list[str] = []
    take, write = locks.take, os.write
    monkeypatch.setattr(locks, "take", lambda *args, **how: done.append("take") or take(*args, **how))
    monkeypatch.setattr(os, "write", lambda *args: done.append("write") or write(*args))
    EventLog(tmp_path).write(Event.FIRST_STEP, step=1)
    monkeypatch.undo()
    assert done == ["take", "write"] and kinds(tmp_path) == ["first_step"]


def test_a_reader_gets_whole_lines_once(tmp_path: Path) -> None:
    reader, log = EventReader(tmp_path), EventLog(tmp_path)
    assert reader.new() == []  # the file does not exist yet
    log.write(Event.FIRST_STEP, step=1)
    (event,) = reader.new()
    assert event["step"] == 1 and abs(event["time_s"] - time.time()) < 60
    with (tmp_path / run_directory.EVENTS).open("a") as file:
        file.write('no event\n{"time": "2026-01-01T00:00:00+00:00", "event": "snapshot_be')
        file.flush()
        assert reader.new() == []
        file.write('gun", "step": 2}\n')
    (event,) = reader.new()
    assert (event["event"], event["step"], event["time_s"]) == (Event.SNAPSHOT_BEGUN, 2, 1767225600.0)
    assert reader.new() == []


def test_a_torn_line_spoils_no_other(tmp_path: Path) -> None:
    """A machine died in the middle of a line, or the disk was full."""
    log, reader = EventLog(tmp_path), EventReader(tmp_path)
    (tmp_path / run_directory.EVENTS).write_text('{"time": "2026-01-01T00:00:00+00:00", "event": "read')
    log.write(Event.STARTED, coordinator="a:1")
    assert [event["event"] for event in reader.new()] == ["started"]
    (tmp_path / run_directory.EVENTS).unlink()  # and begins anew
    log.write(Event.STARTED, coordinator="b:1")
    (event,) = reader.new()
    assert event["coordinator"] == "b:1"


def test_a_run_that_ends_twice_is_written_down_once(tmp_path: Path) -> None:
    """Another process failed first, and this one on its own within its grace period."""
    with PreemptionHandler() as preemption:
        supervisor = Supervisor(preemption)
        supervisor._workdir = tmp_path
        supervisor.started(nodes=1)
        supervisor._note_verdict(Verdict(text="process 1 failed: x", code=1), [])
        supervisor.end(ExitCode.FAILED, "x")
    ends = [event["why"] for event in EventReader(tmp_path).new() if event["event"] == Event.EXITED]
    assert ends == ["process 1 failed: x"]


@pytest.mark.slow
def test_events_that_cannot_be_written_do_not_keep_a_process_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network file system hangs."""
    goes_on, ended = threading.Event(), list[bool]()
    monkeypatch.setattr(Supervisor, "_note_exit", lambda *_: ended.append(goes_on.wait(60)))
    with PreemptionHandler() as preemption:
        assert Supervisor(preemption).end(ExitCode.FAILED, "x") == ExitCode.FAILED
        assert not ended
    goes_on.set()


def test_a_frozen_writer_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.events._LOCK_S", 0.0)
    EventLog(tmp_path).write(Event.FIRST_STEP, step=1)
    descriptor = os.open(tmp_path / run_directory.EVENTS, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        EventLog(tmp_path).write(Event.SNAPSHOT_BEGUN, step=1)
    finally:
        os.close(descriptor)
    assert kinds(tmp_path) == ["first_step", "snapshot_begun"]


def test_a_disk_without_room_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", no_room)
    EventLog(tmp_path).write(Event.FIRST_STEP, step=1)
    monkeypatch.undo()
    assert kinds(tmp_path) == []


@pytest.mark.slow
def test_what_a_run_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its start to its exit code, in order; the same command again finds it finished, and writes nothing.

    The lock of the directory is released last: no other program is in it before the exit is written down.
    """
    end, was_locked = Heartbeat.end, list[bool]()

    def end_under_the_lock(heartbeat: Heartbeat, code: int, failure: str = "") -> int:
        with pytest.raises(BlockingIOError), locks.locked(lock, wait_s=0):
            pass
        was_locked.append(True)
        return end(heartbeat, code, failure)

    lock = tmp_path / "run" / f"lock-{socket.gethostname()}"
    monkeypatch.setattr(Heartbeat, "end", end_under_the_lock)
    (memory := tmp_path / "memory").mkdir(mode=0o700)
    args = arguments(tmp_path / "run", elastic__snapshot_every=4, elastic__memory_dir=memory)
    assert run_here(*args) == 0 and was_locked
    monkeypatch.undo()
    with locks.locked(lock, wait_s=0):
        pass
    found = [(event["event"], event.get("step")) for event in EventReader(tmp_path / "run").new()]
    steps = [("snapshot_begun", 4), ("checkpoint_begun", 5), ("snapshot_begun", 8), ("checkpoint_begun", 10)]
    beginning = [("started", None), ("restored", 0), ("first_step", 1)]
    assert found == [*beginning, *steps, ("stopped", 10), ("exited", None)]
    by = {event["by"] for event in EventReader(tmp_path / "run").new()}
    assert by == {f"process 0 on {socket.gethostname()}"}
    found = EventReader(tmp_path / "run").new()
    assert {event["attempt_id"] for event in found} == {f"{socket.gethostname()}:{os.getpid()}"}
    restored = {"step": 0, "source": "nothing", "steps_again": 0}
    assert {key: value for key, value in found[1].items() if key in (*restored, "nodes", "source_nodes")} == restored
    written = (tmp_path / "run" / run_directory.EVENTS).read_text()
    assert json.loads(written.splitlines()[-1])["code"] == 0
    assert run_here(*args) == 0 and (tmp_path / "run" / run_directory.EVENTS).read_text() == written
