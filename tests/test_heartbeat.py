"""A process that dies, stops or cannot be reached ends its run with exit code 75 and its name; never a hang."""

import faulthandler
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ports import free_port
from running import ROOT, finish

from configs.schema import ElasticConfig
from runtime import heartbeat
from runtime.exit_codes import ResumableError
from runtime.heartbeat import Heartbeat, Peer, moved_bytes
from runtime.phases import Phase
from runtime.supervisor import Supervisor

RESUMABLE = 75
HOST = socket.gethostname()

# Process ME of COUNT at PORT, without jax: it completes step 10 + ME and then waits in what never returns.
PLAYER = """
import ctypes, os, signal, socket, sys, threading, time
from unittest.mock import MagicMock
sys.modules |= dict.fromkeys(["jax", "jax.experimental", "runtime.consensus"], MagicMock())
from runtime import heartbeat
from runtime.heartbeat import Heartbeat
from runtime.phases import Phase
me, count, port = map(int, sys.argv[1:4])
def listen():
    with socket.create_server(("localhost", port)) as listener:
        accepted = [listener.accept()[0] for _ in range(count - 1)]
    return sorted((peer(int(each.recv(1)), each) for each in accepted), key=lambda each: each.process)
def reach():
    while True:
        try:
            connection = socket.create_connection(("localhost", port))
        except OSError:
            time.sleep(0.1)
        else:
            connection.sendall(b"%d" % me)
            return [peer(0, connection)]
def peer(process, connection):
    return heartbeat.Peer(process=process, host=socket.gethostname(), connection=connection)
heartbeat._GRACE_S = 1.5
watch = Heartbeat()
peers = listen() if me == 0 else reach()
if me:
    peers[0].connection.recv(1, socket.MSG_PEEK)  # process 0 beats when all are there
watch.start(me, peers, 2.5, 3.0, is_awaited=count == 1)
watch.completed(10 + me)
while len(watch._steps) < (1 if me else count - 1):
    time.sleep(0.01)
# At SIGUSR1 it aborts; not by os.abort: jax's threads do not hold the GIL.
signal.signal(signal.SIGUSR1, lambda *_: ctypes.CDLL(None).abort())
print("ready", flush=True)
{then}
"""
WAIT = "time.sleep(60)"


def play(ports: Sequence[int], then: dict[int, str] | None = None) -> list[subprocess.Popen[str]]:
    """Starts processes that watch each other, and waits until process 0 knows all steps, and the others its own.

    `then` is what some do instead of waiting.
    """
    count, then = len(ports), then or {}
    players = [
        subprocess.Popen(
            [sys.executable, "-c", PLAYER.format(then=then.get(me, WAIT)), str(me), str(count), str(ports[me])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for me in range(count)
    ]
    for player in players:
        assert player.stdout and player.stdout.readline() == "ready\n", finish(*players)
    return players


def check_ended(outcomes: Sequence[tuple[int, str, str]], message: str) -> None:
    for code, _, err in outcomes:
        assert code == RESUMABLE, outcomes
        (said,) = [line for line in err.splitlines() if line.startswith("error: ")]  # jax's own words may follow
        assert re.search(message, said), err


def last_steps(*known: int) -> str:
    return "last completed step: " + ", ".join(rf"{10 + process} \(process {process}\)" for process in known) + ";"


def test_a_process_dies() -> None:
    """A worker here, process 0 in test_heartbeat_runs.py; who is left leaves at once, process 0 after the other."""
    players = play([free_port()] * 3)
    players[1].kill()
    outcomes = finish(*players)
    check_ended([outcomes[0], outcomes[2]], f"^error: process 1 on {HOST} died .*; {last_steps(2, 1, 0)}")
    assert "Thread" not in outcomes[0][2]


def test_peers_that_connected_long_before_the_last_one_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heartbeat, "_watch", lambda self: None)
    peer = Peer(process=1, host=HOST, connection=socket.socket(), heard_s=time.monotonic() - 100)
    with peer.connection:
        Heartbeat().start(0, [peer], 2.5, 3.0)
    assert time.monotonic() - peer.heard_s < 50


def test_others_learn_of_an_error_that_cannot_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the output goes to the full disk too, they would wait in a collective."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=full, flush=full))
    told: list[tuple[int, str]] = []
    one: Any = SimpleNamespace(phase=Phase.STEPPING, shows_tracebacks=True, _heartbeat=SimpleNamespace())
    one._heartbeat.await_verdict = lambda error: None
    one.end = lambda code, said: told.append((code, said))
    Supervisor.fail(one, ResumableError("the disk is full"), ())
    Supervisor.fail(one, KeyError("a bug"), ())
    assert told == [(75, "the disk is full"), (1, "KeyError: 'a bug'")]


def test_jax_aborts_before_the_loss_is_noticed() -> None:
    """Its threads see the end of process 0 at the same time as ours."""
    players = play([free_port()] * 2)
    players[1].send_signal(signal.SIGUSR1)
    assert players[1].stderr
    assert any("Fatal Python error: Aborted" in line for line in iter(players[1].stderr.readline, ""))
    players[0].kill()
    check_ended(finish(*players)[1:], f"^error: process 0 on {HOST} died .*; {last_steps(1, 0)}")


STEP, READ = f"watch.enter(Phase.STEPPING)\n{WAIT}", f"watch.enter(Phase.READING)\n{WAIT}"


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ({0: READ, 1: STEP, 2: STEP}, rf"process 0 on {HOST} reads a batch, every other process is in a step; "),
        ({0: STEP, 1: STEP}, "every process is in a step; "),
        ({0: STEP}, "every process is in a step; "),  # which others wait for
        (dict.fromkeys(range(7), READ), rf"(process \d on {HOST} reads a batch, ){{5}}2 others do not step either; "),
    ],
)
def test_no_main_thread_makes_progress(then: dict[int, str], said: str) -> None:
    """All are well but one, which the others wait for in a collective; or a collective hangs; or all want data."""
    outcomes = finish(*play([free_port()] * len(then), then))
    check_ended(outcomes, f"^error: no progress for 3 s .*: {said}{last_steps(*reversed(then))}")
    assert all("Thread" in err for _, _, err in outcomes)


COMPILE = "watch.enter(Phase.COMPILING)\ntime.sleep(6)"
RESTORE = """watch.enter(Phase.RESTORING)
with open(os.devnull, "wb", buffering=0) as file:
    for _ in range(12):
        file.write(bytes(2 << 20))
        time.sleep(0.5)
"""


@pytest.mark.slow
@pytest.mark.parametrize("long", [COMPILE, RESTORE])
def test_what_may_take_long_is_no_hang(long: str) -> None:
    """One of them compiles, or reads and writes files."""
    ends = f"{long}\nprint('still there', flush=True)\nsys.exit(watch.end(0))"
    outcomes = finish(
        *play([free_port()] * 2, {0: f"{STEP[: -len(WAIT)]}time.sleep(7)\nsys.exit(watch.end(0))", 1: ends})
    )
    assert [code for code, _, _ in outcomes] == [0, 0] and "still there" in outcomes[1][1], outcomes


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_process_is_stopped(stopped: int) -> None:
    """Process 0 notices for all, or all notice that it is silent, which then know the steps of nobody else."""
    players = play([free_port()] * 3)
    players[stopped].send_signal(signal.SIGSTOP)
    others = [i for i in range(3) if i != stopped]
    outcomes = finish(*(players[i] for i in others))
    players[stopped].send_signal(signal.SIGCONT)
    for i, outcome in zip(others, outcomes, strict=True):
        known = last_steps(2, 1, 0) if stopped else last_steps(i, 0)
        check_ended([outcome], f"^error: process {stopped} on {HOST}: silent for 2.5 s .*; {known}")
        assert "most recent call first" in outcome[2]  # what it was waiting in
    check_ended(finish(players[stopped]), "^error: ")  # once it goes on, it ends too


def test_a_process_fails() -> None:
    """The others end with its code, and say what it said."""
    players = play([free_port()] * 3, {1: 'time.sleep(1); watch.end(1, failure="the disk is full")'})
    outcomes = finish(*players)
    assert [code for code, _, _ in outcomes] == [1] * 3, outcomes
    for i in (0, 2):
        assert f"error: process 1 on {HOST} failed: the disk is full; last completed step" in outcomes[i][2]


def test_all_fail_with_the_same_error() -> None:
    """Each is left to say it itself: nobody is blamed."""
    fail = 'heartbeat._GRACE_S = 60.0; time.sleep(1); watch.end(2, failure="the vocabulary is too small")'
    outcomes = finish(*play([free_port()] * 3, {0: fail, 1: f"time.sleep(0.1); {fail}", 2: fail}))
    assert [(code, err) for code, _, err in outcomes] == [(2, "")] * 3


def test_process_zero_fails_and_is_killed() -> None:
    """In the time that it gives the others to fail with the same error: they lose it, but know why."""
    then = 'threading.Timer(0.5, os._exit, [137]).start(); watch.end(1, failure="the disk is full")'
    outcomes = finish(*play([free_port()] * 2, {0: then}))
    assert [code for code, _, _ in outcomes] == [137, 1], outcomes
    assert re.search(f"^error: process 0 on {HOST} failed: the disk is full; {last_steps(1, 0)}"[:-1], outcomes[1][2])


@pytest.fixture
def pair() -> Iterator[tuple[Peer, Peer]]:
    """The two ends of a connection."""
    with socket.create_server(("localhost", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, other:
        yield Peer(process=0, host="a", connection=one), Peer(process=1, host="b", connection=other)


def test_a_message_is_sent_whole(pair: tuple[Peer, Peer]) -> None:
    """Though it does not fit into what the system buffers for a process that does not read, and no send waits."""
    one, other = pair
    sizes = [1_000_000 + i for i in range(20)]
    for size in sizes:
        one.send(text="x" * size)
    assert one.unsent
    got: list[int] = []
    while len(got) < len(sizes):
        got += [len(message["text"]) for message in other.receive() if message]
        one.send()
    assert got == sizes


def test_a_verdict_may_quote_a_file_name_that_is_not_utf_8(pair: tuple[Peer, Peer]) -> None:
    text = os.fsdecode(b"/data/caf\xe9.txt is not UTF-8 text")
    pair[0].send(verdict={"text": text})
    assert [message["verdict"]["text"] for message in pair[1].receive()] == [text]


def test_what_breaks_the_watch_ends_the_program(
    pair: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without it, nobody would notice a loss."""
    codes: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(heartbeat, "_exit", codes.put)
    monkeypatch.setattr(faulthandler, "enable", lambda: None)  # pytest's own stays, and its aborts
    monkeypatch.setattr(heartbeat, "_delay_aborts", lambda: None)
    Heartbeat().start(0, [pair[0]], 60.0, 600.0)
    pair[1].connection.sendall(b"no message\n")
    assert codes.get(timeout=30) == 1
    assert f"a message of {pair[0]} is not JSON: Expecting value" in capfd.readouterr().err


def test_events_that_cannot_be_written_do_not_keep_a_run_from_ending(
    pair: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
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


def test_a_shortage_of_file_descriptors_is_said_once(
    pair: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "shortage", lambda: "199 of 200 are in use")
    monkeypatch.setattr(faulthandler, "enable", lambda: None)
    monkeypatch.setattr(heartbeat, "_delay_aborts", lambda: None)
    others = {*threading.enumerate()}
    Heartbeat().start(0, [pair[0]], 60.0, 600.0)
    (watch,) = {*threading.enumerate()} - others
    for _ in range(2):
        assert pair[1].connection.recv(1000)
    pair[1].send(goodbye=True)
    pair[1].connection.close()
    watch.join(30)  # or it would take the end of the test for a loss, and end this process
    assert not watch.is_alive()
    assert capfd.readouterr().err == f"warning: process 0 on {HOST}: 199 of 200 are in use\n"


@pytest.mark.parametrize("silence_s", [0.5, 90.0])
def test_a_bound_that_cannot_be_kept(silence_s: float) -> None:
    with pytest.raises(ValueError, match="must be from 1 to 60"):
        ElasticConfig(silence_s=silence_s, stall_s=600.0, snapshot_every=0, memory_dir="/dev/shm")


def test_files_that_are_read_and_written_are_progress(tmp_path: Path) -> None:
    before = moved_bytes()
    (tmp_path / "file").write_bytes(bytes(3 << 20))
    assert moved_bytes() >= before + (3 << 20)
    (tmp_path / "file").read_bytes()
    assert moved_bytes() >= before + (6 << 20)
