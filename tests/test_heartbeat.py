"""A process that dies, stops or cannot be reached ends its run with exit code 75 and its name; never a hang."""

import faulthandler
import itertools
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.failing import no_room
from support.heartbeat_world import HOST, RESUMABLE, STALL_S, World, check_ended
from support.running import ROOT, finish
from support.tables import every_row

from configs.schema import ElasticConfig
from runtime import heartbeat
from runtime.exit_codes import ResumableError
from runtime.heartbeat import Heartbeat, PeerProcess, moved_bytes
from runtime.phases import Phase
from runtime.supervisor import Supervisor

STEP, READ = Phase.STEPPING, Phase.READING

# A process, without jax, that waits for process 0 at a port, and that SIGUSR1 aborts.
WAITS = """
import ctypes, signal, socket, sys, time
from unittest.mock import MagicMock
sys.modules |= dict.fromkeys(["jax", "jax.experimental", "runtime.consensus"], MagicMock())
from runtime.heartbeat import Heartbeat, PeerProcess
connection = socket.create_connection(("localhost", int(sys.argv[1])))
Heartbeat().start(1, [PeerProcess(process=0, host="a", connection=connection)], 60.0, 600.0)
signal.signal(signal.SIGUSR1, lambda *_: ctypes.CDLL(None).abort())  # not os.abort: jax's threads do not hold the GIL
print("ready", flush=True)
time.sleep(60)
"""


def last_steps(*known: int) -> str:
    return "last completed step: " + ", ".join(rf"{10 + process} \(process {process}\)" for process in known) + ";"


def check_said(world: World, process: int, message: str) -> None:
    assert len(world.said[process]) == 1 and re.search(message, world.said[process][0]), world.said


def test_who_is_left_ends_and_names_the_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 0 after the others: when it exits, jax aborts them."""
    world = World(3, monkeypatch)
    world.kill(1)
    world.run_to_the_end(0, 2)
    assert world.codes == {1: -9, 2: RESUMABLE, 0: RESUMABLE} and [*world.codes] == [1, 2, 0] and not world.stacks
    for process in (0, 2):
        check_said(world, process, f"^error: process 1 on {HOST} died .*; {last_steps(2, 1, 0)}")


def test_a_process_without_heartbeats_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 0 notices for all, or all notice that process 0 is silent and then do not know other steps."""
    for stopped, others in ((2, (0, 1)), (0, (1, 2))):
        world = World(3, monkeypatch)
        world.stopped.add(stopped)
        world.run_to_the_end(*others)
        for process in others:
            known = last_steps(2, 1, 0) if stopped else last_steps(process, 0)
            check_said(world, process, f"^error: process {stopped} on {HOST}: silent for 2.5 s .*; {known}")
        assert world.stacks == {*others}
        world.stopped.clear()  # once it continues, it ends too
        world.run_to_the_end(stopped)
        assert {*world.codes.values()} == {RESUMABLE}


NO_PROGRESS = [
    ([READ, STEP, STEP], rf"process 0 on {HOST} reads a batch, every other process is in a step; "),
    ([STEP, STEP], "every process is in a step; "),
    ([STEP], "every process is in a step; "),  # which others wait for
    ([READ] * 7, rf"(process \d on {HOST} reads a batch, ){{5}}2 others do not step either; "),
]


@every_row(("phases", "said"), NO_PROGRESS)
def test_all_main_threads_without_progress_end_the_run(phases: Any, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are well but one, which the others wait for in a collective; or a collective hangs; or all want data."""
    world = World(len(phases), monkeypatch)
    world.enter(phases)
    until_s = world.now_s + 2 * STALL_S
    world.run(STALL_S - 0.5)
    assert not world.codes
    world.run_to_the_end(*range(len(phases)))
    assert world.now_s < until_s
    for process in range(len(phases)):
        check_said(world, process, f"^error: no progress for 3 s .*: {said}{last_steps(*range(len(phases))[::-1])}")


@pytest.mark.parametrize("long", [Phase.COMPILING, Phase.RESTORING])
def test_a_long_phase_is_not_a_hang(long: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that compiles, or that reads and writes files."""
    world = World(2, monkeypatch)
    world.enter([STEP, long])
    moved = itertools.count(0, 2 << 20)
    if long is Phase.RESTORING:
        monkeypatch.setattr(heartbeat, "moved_bytes", lambda: next(moved))
    world.run(5 * STALL_S)
    assert not world.codes


def test_an_error_ends_the_others_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(3, monkeypatch)
    world.fail(1, 1, "the disk is full")
    world.run_to_the_end(0, 2)
    assert world.codes == {0: 1, 1: 1, 2: 1} and not world.said[1]
    for process in (0, 2):
        check_said(world, process, f"error: process 1 on {HOST} failed: the disk is full; last completed step")


def test_nobody_is_blamed_for_an_error_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(3, monkeypatch)
    for process, wait_s in ((1, 1.0), (2, 2.0)):
        world.later(wait_s, lambda process=process: world.fail(process, 2, "the vocabulary is too small"))
    world.fail(0, 2, "the vocabulary is too small")
    assert world.codes == {0: 2, 1: 2, 2: 2} and not any(world.said.values())


def test_process_0_fails_and_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the time that it gives the others to fail with the same error: they lose it, but know why."""
    world = World(2, monkeypatch)
    world.later(1.0, lambda: world.kill(0, 137))
    world.fail(0, 1, "the disk is full")
    world.run_to_the_end(1)
    assert world.codes == {0: 137, 1: 1}
    check_said(world, 1, f"^error: process 0 on {HOST} failed: the disk is full; {last_steps(1, 0)}"[:-1])


def test_peers_that_connected_long_before_the_last_one_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heartbeat, "_watch", lambda self: None)
    peer = PeerProcess(process=1, host=HOST, connection=socket.socket(), heard_s=time.monotonic() - 100)
    with peer.connection:
        Heartbeat().start(0, [peer], 2.5, 3.0)
    assert time.monotonic() - peer.heard_s < 50


def test_others_learn_of_an_error_that_cannot_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the output goes to the full disk too, they would wait in a collective."""

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=no_room, flush=no_room))
    told: list[tuple[int, str]] = []
    one: Any = SimpleNamespace(phase=Phase.STEPPING, shows_tracebacks=True, _heartbeat=SimpleNamespace())
    one._heartbeat.await_verdict = lambda error: None
    one.end = lambda code, said: told.append((code, said))
    Supervisor.fail(one, ResumableError("the disk is full"), ())
    Supervisor.fail(one, KeyError("a bug"), ())
    assert told == [(75, "the disk is full"), (1, "KeyError: 'a bug'")]


@pytest.mark.slow
def test_jax_aborts_before_the_loss_is_noticed() -> None:
    """Its threads see the end of process 0 at the same time as ours."""
    with socket.create_server(("localhost", 0)) as listener:
        command = [sys.executable, "-c", WAITS, str(listener.getsockname()[1])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        connection, _ = listener.accept()
    with connection:
        assert process.stdout and process.stdout.readline() == "ready\n" and process.stderr
        process.send_signal(signal.SIGUSR1)
        assert any("Fatal Python error: Aborted" in line for line in iter(process.stderr.readline, ""))
    check_ended(finish(process), r"^error: process 0 on a died .*; last completed step: none;")


@pytest.fixture
def pair() -> Iterator[tuple[PeerProcess, PeerProcess]]:
    """The two ends of a connection."""
    one, other = socket.socketpair()
    with one, other:
        yield PeerProcess(process=0, host="a", connection=one), PeerProcess(process=1, host="b", connection=other)


def test_a_message_is_sent_whole(pair: tuple[PeerProcess, PeerProcess]) -> None:
    """Though it exceeds the system's buffer for a process that does not read, and no send waits."""
    one, other = pair
    sizes = [1_000_000 + i for i in range(8)]
    for size in sizes:
        one.send(text="x" * size)
    assert one.unsent
    got: list[int] = []
    while len(got) < len(sizes):
        got += [len(message["text"]) for message in other.receive() if message]
        one.send()
    assert got == sizes


def test_a_verdict_may_quote_a_file_name_that_is_not_utf_8(pair: tuple[PeerProcess, PeerProcess]) -> None:
    text = os.fsdecode(b"/data/caf\xe9.txt is not UTF-8 text")
    pair[0].send(verdict={"text": text})
    assert [message["verdict"]["text"] for message in pair[1].receive()] == [text]


def test_what_breaks_the_watch_ends_the_program(
    pair: tuple[PeerProcess, PeerProcess], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without it no process would notice a loss."""
    codes: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(heartbeat, "_exit", codes.put)
    monkeypatch.setattr(faulthandler, "enable", lambda: None)  # pytest's own stays, and its aborts
    monkeypatch.setattr(heartbeat, "_delay_aborts", lambda: None)
    Heartbeat().start(0, [pair[0]], 60.0, 600.0)
    pair[1].connection.sendall(b"no message\n")
    assert codes.get(timeout=30) == 1
    assert f"a message of {pair[0]} is not JSON: Expecting value" in capfd.readouterr().err


@pytest.mark.slow
def test_events_that_cannot_be_written_do_not_keep_a_run_from_ending(
    pair: tuple[PeerProcess, PeerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network file system hangs."""
    codes: queue.Queue[int] = queue.Queue()
    goes_on = threading.Event()
    watch = Heartbeat(note=lambda *_: goes_on.wait())

    def leave(code: int) -> None:
        codes.put(code)
        watch._leaving = True  # its thread ends

    monkeypatch.setattr(heartbeat, "_exit", leave)
    monkeypatch.setattr(faulthandler, "enable", lambda: None)
    monkeypatch.setattr(heartbeat, "_delay_aborts", lambda: None)
    watch.start(1, [pair[0]], 60.0, 600.0)
    pair[1].connection.close()
    assert codes.get(timeout=30) == RESUMABLE
    goes_on.set()


def test_a_shortage_of_file_descriptors_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "shortage", lambda: "199 of 200 are in use")
    world = World(1, monkeypatch)
    world.run(5)
    assert world.said == {0: [f"warning: process 0 on {HOST}: 199 of 200 are in use\n"]}


def test_a_bound_that_cannot_be_kept() -> None:
    for silence_s in (0.5, 90.0):
        with pytest.raises(ValueError, match="must be from 1 to 60"):
            ElasticConfig(silence_s=silence_s, stall_s=600.0, snapshot_every=0, memory_dir="/dev/shm")


def test_progress_is_one_moment_until_there_is_more() -> None:
    """Other replicas compare it: a value that differs between two looks would hide a main thread that hangs."""
    beat = Heartbeat()
    beat.enter(STEP)
    assert len({beat.progressed_s() for _ in range(1000)}) == 1
    before = beat.progressed_s()
    beat.enter(STEP)
    assert beat.progressed_s() > before
    beat.enter(Phase.COMPILING)
    assert len({beat.progressed_s() for _ in range(1000)}) > 1  # a phase without a limit


def test_files_that_are_read_and_written_are_progress(tmp_path: Path) -> None:
    before = moved_bytes()
    (tmp_path / "file").write_bytes(bytes(3 << 20))
    assert moved_bytes() >= before + (3 << 20)
    (tmp_path / "file").read_bytes()
    assert moved_bytes() >= before + (6 << 20)
