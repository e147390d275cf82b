"""A process that dies, stops or cannot be reached ends its run with exit code 75 and its name; never a hang."""

import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from running import IGNORED, ROOT, arguments, finish, free_port, start_together, steps_logged, wait_until

from elastic.heartbeat import ElasticConfig, Peer
from elastic.meeting import accept, connect, listen

pytestmark = IGNORED
RESUMABLE = 75
HOST = socket.gethostname()

# Process ME of COUNT at PORT, without jax: it completes step 10 + ME and then waits in what never returns.
PLAYER = """
import socket, sys, time
from elastic.heartbeat import Heartbeat
from elastic.meeting import accept, connect
me, count, port = map(int, sys.argv[1:4])
def listen():
    with socket.create_server(("localhost", port)) as listener:
        return accept(listener, "secret", count - 1)
def reach():
    while True:
        try:
            return [connect("localhost", port, "secret", socket.gethostname(), me)]
        except OSError:
            time.sleep(0.1)
watch = Heartbeat()
peers = listen() if me == 0 else reach()
watch.start(me, peers, 2.0)
watch.completed(10 + me)
print("ready", flush=True)
{then}
"""
WAIT = "time.sleep(60)"


def play(ports: Sequence[int], then: dict[int, str] | None = None) -> list[subprocess.Popen[str]]:
    """Starts processes that watch each other, and waits until they do; `then` is what some do instead of waiting."""
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
    time.sleep(1.5)  # a beat, by which all know each other's steps
    return players


def check_ended(outcomes: Sequence[tuple[int, str, str]], message: str) -> None:
    for code, _, err in outcomes:
        assert code == RESUMABLE, outcomes
        assert re.search(message, err.splitlines()[-1]), err
        assert sum(line.startswith("error: ") for line in err.splitlines()) == 1, err


STEPS = r"last completed step: 12 \(process 2\), 11 \(process 1\), 10 \(process 0\)"


def test_a_process_dies() -> None:
    """A worker here, process 0 below in a real run; who is left leaves at once, process 0 after the other."""
    players = play([free_port()] * 3)
    players[1].kill()
    outcomes = finish(*players)
    check_ended([outcomes[0], outcomes[2]], f"^error: process 1 on {HOST} died .*; {STEPS}")
    assert "Thread" not in outcomes[0][2]


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_process_is_stopped(stopped: int) -> None:
    """Process 0 notices for all, or all notice that it is silent; the stacks tell what they were waiting in."""
    players = play([free_port()] * 3)
    players[stopped].send_signal(signal.SIGSTOP)
    outcomes = finish(*(player for i, player in enumerate(players) if i != stopped))
    players[stopped].send_signal(signal.SIGCONT)
    check_ended(outcomes, f"^error: process {stopped} on {HOST}: silent for 2 s .*; {STEPS}")
    assert all("most recent call first" in err for _, _, err in outcomes)
    check_ended(finish(players[stopped]), "^error: ")  # once it goes on, it ends too


def test_a_process_fails() -> None:
    """The others end with its code, and say what it said."""
    players = play([free_port()] * 3, {1: 'time.sleep(2); watch.end(1, failure="the disk is full")'})
    outcomes = finish(*players)
    assert [code for code, _, _ in outcomes] == [1] * 3, outcomes
    for i in (0, 2):
        assert f"error: process 1 on {HOST} failed: the disk is full; last completed step" in outcomes[i][2]


def test_all_fail_with_the_same_error() -> None:
    """Each is left to say it itself: nobody is blamed."""
    fail = 'time.sleep(2); watch.end(2, failure="the vocabulary is too small")'
    outcomes = finish(*play([free_port()] * 3, {0: fail, 1: f"time.sleep(0.5); {fail}", 2: fail}))
    assert [(code, err) for code, _, err in outcomes] == [(2, "")] * 3


class Link(threading.Thread):
    """Carries the bytes of one connection to `port`; once cut it carries none, and closes nothing."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._to, self._listener = port, socket.create_server(("localhost", 0))
        self.port = self._listener.getsockname()[1]
        self.cut, self.over, self.carried = threading.Event(), threading.Event(), 0
        self.start()

    def run(self) -> None:
        with self._listener, self._listener.accept()[0] as one:
            while (other := socket.socket()).connect_ex(("localhost", self._to)):
                other.close()  # process 0 does not listen yet
                time.sleep(0.1)
            with other:
                while not self.cut.is_set():
                    for source in select.select([one, other], [], [], 0.1)[0]:
                        self.carried += (other if source is one else one).send(source.recv(1000))
                self.over.wait(30)


def test_a_link_is_cut() -> None:
    """Each end notices by itself, though no connection closes; before that, beats are enough for more than 2 s."""
    port = free_port()
    link = Link(port)
    players = play([port, link.port])
    time.sleep(2)
    assert link.carried > 100 and all(player.poll() is None for player in players)
    link.cut.set()
    outcomes = finish(*players)
    for i in range(2):
        check_ended([outcomes[i]], f"^error: process {1 - i} on {HOST}: silent for 2 s")
    link.over.set()
    link.join()


def test_strangers_are_sent_away() -> None:
    """A port scan does not become a process of the run, nor hold up those that are."""
    with listen(1) as listener:
        port = listener.getsockname()[1]
        found: list[Peer] = []
        server = threading.Thread(target=lambda: found.extend(accept(listener, "secret", 1)))
        server.start()
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1 \r\n")
            assert stranger.recv(10) == b""
        with pytest.raises(OSError, match="process 1 cannot reach process 0 at localhost:.*closed the connection"):
            connect("localhost", port, "guessed", "node-a", 1)
        peer = connect("localhost", port, "secret", "node-a", 1)
        server.join()
    assert [(p.process, p.host) for p in found] == [(1, HOST)] and str(peer) == "process 0 on node-a"
    for p in (peer, *found):
        p.connection.close()


@pytest.mark.parametrize("silence_s", [0.5, 90.0])
def test_a_bound_that_cannot_be_kept(silence_s: float) -> None:
    with pytest.raises(ValueError, match="must be from 1 to 60"):
        ElasticConfig(silence_s=silence_s)


def run_two(workdir: Path) -> list[subprocess.Popen[str]]:
    args = arguments(workdir, num_steps=1000, checkpoint__every=0, elastic__silence_s=3.0)
    two = start_together(args, 2, devices=1, pause_s=0.1)
    wait_until(lambda: steps_logged(workdir) >= 3, two[0])
    return two


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        (1, signal.SIGSTOP),
        (0, signal.SIGKILL),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_real_run(tmp_path: Path, victim: int, number: int) -> None:
    """The main thread of the survivor is in gloo, or has an exception from it; jax would abort it or let it hang."""
    two = run_two(tmp_path)
    os.kill(two[victim].pid, number)
    outcome = finish(two[1 - victim])
    two[victim].kill()
    finish(two[victim])
    what = "died" if number == signal.SIGKILL else "silent for 3 s"
    check_ended(outcome, rf"^error: process {victim} on {HOST}:? {what} .*; last completed step: [0-9]+ \(process")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for network namespaces")
def test_a_cut_link_of_an_emulated_cluster(tmp_path: Path) -> None:
    """Both nodes name the other: nothing tells them which of the two is cut off."""
    emulate, name = [sys.executable, "-m", "cluster.emulate"], f"cut{os.getpid()}"
    args = arguments(tmp_path / "run", num_steps=100000, checkpoint__every=0, elastic__silence_s=5.0)
    cluster = subprocess.Popen(
        [*emulate, "--nodes=2", "--devices_per_node=1", f"--name={name}", f"--workdir={tmp_path}", "--"]
        + [sys.executable, "train.py", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    wait_until(lambda: steps_logged(tmp_path / "run") >= 3, cluster)
    subprocess.run([*emulate, "ctl", f"--name={name}", "cut", "1"], check=True, cwd=ROOT, timeout=30)
    cut_s = time.monotonic()
    try:
        cluster.wait(60)
    finally:
        cluster.terminate()
    code, out, err = finish(cluster)[0]
    assert code == RESUMABLE, (out, err)
    assert time.monotonic() - cut_s < 60
    for node in range(2):
        said = (tmp_path / f"node{node}.log").read_text()
        assert re.search(rf"error: process {1 - node} on .*: silent for 5 s .*; last completed step: [0-9]+", said), (
            said
        )
