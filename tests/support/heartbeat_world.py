"""Heartbeats of several processes in one thread, by a clock that the test turns."""

import re
import socket
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from runtime import heartbeat
from runtime.heartbeat import Heartbeat, PeerProcess
from runtime.phases import Phase

HOST = socket.gethostname()
RESUMABLE = 75
SILENCE_S, STALL_S, TICK_S = 2.5, 3.0, 0.25


class Connection:
    """One end of a connection in memory."""

    def __init__(self) -> None:
        self.data, self.is_closed = b"", False
        self.other: Connection = self

    def send(self, data: bytes, flags: int) -> int:
        del flags
        if self.other.is_closed:
            raise BrokenPipeError
        self.other.data += data
        return len(data)

    def recv(self, size: int) -> bytes:
        data, self.data = self.data[:size], self.data[size:]
        return data

    @property
    def is_readable(self) -> bool:
        return bool(self.data) or self.other.is_closed


class ExitedError(Exception):
    """A process has ended."""

    def __init__(self, code: int) -> None:
        self.code = code


class World:
    """The processes of a run; each has completed step 10 + its number."""

    def __init__(self, count: int, patched: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep)
        patched.setattr(heartbeat, "time", clock)
        patched.setattr(heartbeat, "_exit", self._exit)
        patched.setattr(heartbeat, "_delay_aborts", lambda: None)
        patched.setattr(heartbeat, "moved_bytes", lambda: 0)
        faults = SimpleNamespace(enable=lambda: None, dump_traceback=lambda: self.stacks.add(self._running))
        patched.setattr(heartbeat, "faulthandler", faults)
        patched.setattr(heartbeat, "threading", SimpleNamespace(Thread=Immediately))
        patched.setattr(heartbeat, "sys", SimpleNamespace(stderr=SimpleNamespace(write=self._print, flush=print)))
        patched.setattr(Heartbeat, "_watch", lambda watch: None)
        self.stacks: set[int] = set()  # the processes that printed their stacks
        self.said: dict[int, list[str]] = {process: [] for process in range(count)}
        self.codes: dict[int, int] = {}
        self.stopped: set[int] = set()
        self.planned: list[tuple[float, Callable[[], None]]] = []
        self._running = 0
        self.watches = [Heartbeat() for _ in range(count)]
        peers: list[list[PeerProcess]] = [[] for _ in range(count)]
        for process in range(1, count):
            one, two = Connection(), Connection()
            one.other, two.other = two, one
            peers[0].append(_peer(process, one, self.now_s))
            peers[process].append(_peer(0, two, self.now_s))
        self.peers = peers
        for process, watch in enumerate(self.watches):
            watch.start(process, peers[process], SILENCE_S, STALL_S, is_awaited=count == 1)
            watch.completed(10 + process)
        self.run(2)

    def run(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """Lets time pass, for a while or until something is so."""
        end_s = self.now_s + seconds
        while self.now_s < end_s and not until():
            self._tick()

    def run_to_the_end(self, *processes: int) -> None:
        """Lets time pass until processes have ended."""
        self.run(60, until=lambda: {*processes} <= {*self.codes})

    def kill(self, process: int, code: int = -9) -> None:
        """Ends a process."""
        self.codes[process] = code
        for peer in self.peers[process]:
            peer.connection.is_closed = True

    def fail(self, process: int, code: int, text: str) -> None:
        """Lets the main thread of a process end with an error."""
        self._running = process
        try:
            self.watches[process].end(code, text)
        except ExitedError as exited:
            self.kill(process, exited.code)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Does something after a while."""
        self.planned.append((self.now_s + seconds, action))

    def enter(self, phases: Sequence[Phase]) -> None:
        """Gives each main thread a phase."""
        for watch, phase in zip(self.watches, phases, strict=True):
            watch.enter(phase)

    def _tick(self) -> None:
        for at_s, action in [planned for planned in self.planned if planned[0] <= self.now_s]:
            self.planned.remove((at_s, action))
            action()
        for process in range(len(self.watches)):
            self._turn(process)
        self.now_s += TICK_S

    def _turn(self, process: int) -> None:
        if process in self.codes or process in self.stopped:
            return
        self._running = process
        readable = [peer for peer in self.peers[process] if peer.connection.is_readable and not peer.gone]
        try:
            self.watches[process]._turn(readable)
        except ExitedError as exited:
            self.kill(process, exited.code)

    def _sleep(self, seconds: float) -> None:
        """Lets the others run while the main thread of a process waits at its end."""
        sleeper = self._running
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self._tick()
        self._running = sleeper
        if sleeper in self.codes:
            raise ExitedError(self.codes[sleeper])

    def _exit(self, code: int) -> None:
        raise ExitedError(code)

    def _print(self, text: str) -> None:
        self.said[self._running].append(text)


class Immediately:
    """A thread that runs in the caller."""

    def __init__(self, target: Callable[..., object] = lambda: None, args: Sequence[object] = (), **_: object) -> None:
        self._call = lambda: target(*args)

    def start(self) -> None:
        self._call()

    def join(self, timeout: float | None = None) -> None:
        del timeout


def _peer(process: int, connection: Connection, now_s: float) -> PeerProcess:
    return PeerProcess(process=process, host=HOST, connection=connection, heard_s=now_s)  # pyright: ignore


def check_ended(outcomes: Sequence[tuple[int, str, str]], message: str) -> None:
    """Checks that real processes have ended resumably, with one line that matches."""
    for code, _, err in outcomes:
        assert code == RESUMABLE, outcomes
        (said,) = [line for line in err.splitlines() if line.startswith("error: ")]  # jax's own words may follow
        assert re.search(message, said), err
