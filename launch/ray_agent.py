"""`Agent`: a Ray actor that runs the program on one node, and keeps a standby process for the next attempt.

This module does not import Ray, which calls the methods in several threads (`THREADS` in launch/ray_members.py).
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.exit_codes import ExitCode

STANDBY = Path(__file__).with_name("ray_standby.py")
KEPT_LINES = 1000  # lines of the program's output that are buffered until the engine fetches them
# Variables of other launchers. The flags replace them, because nodes with different values would disagree.
OTHERS_WORDS = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_NUM_CPU_DEVICES")
STARTING_S = 10.0  # limit for an agent to start; then other jobs may hold the node's CPUs
PORTS = range(20000, 32000)  # above Ray's ports, below Linux' ephemeral ports


@dataclass(frozen=True, kw_only=True)
class News:
    """The changes on a node since the last answer, and its current state."""

    attempt: int  # number of the newest attempt, 0 for none
    code: int | None  # its exit code (negative: a signal), None while it runs
    lines: list[str]  # output
    is_leaving: bool  # the agent got SIGTERM: the node is leaving
    free_port: int


class Agent:
    """Runs the program of one node: one process per attempt, one after the other, in a separate process group."""

    def __init__(self, command: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
        """Takes `command`: a Python interpreter, the program, and the arguments that all nodes have in common."""
        self._command, self._folder = command, folder
        self._environment = {k: v for k, v in os.environ.items() if k not in OTHERS_WORDS} | dict(environment)
        self._changed = threading.Condition()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._newest: tuple[int, int | None] = (0, None)  # attempt and exit code
        self._told = self._newest  # last state reported to the engine
        self._running: subprocess.Popen[str] | None = None
        self._warm: subprocess.Popen[str] | None = None
        self._is_leaving = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        self.warm_up()

    def start(self, attempt: int, arguments: Sequence[str]) -> None:
        """Starts the program for an attempt. `arguments` follow the common arguments."""
        with self._changed:
            if attempt == self._newest[0]:  # it was killed before it started
                return
            self._newest = attempt, None
            if self._warm and self._warm.poll() is not None:  # it was killed while it waited
                self._warm.communicate()
                self._warm = None
            self.warm_up()
            process, self._warm = self._warm, None
            if process is None:
                self._end(attempt, ExitCode.BAD_INPUT)
                return
            self._running = process
        threading.Thread(target=self._watch, args=(process, attempt), daemon=True).start()
        with contextlib.suppress(OSError):  # if it has ended, `_watch` reports that
            print(json.dumps([*self._command[2:], *arguments]), file=process.stdin, flush=True)

    def warm_up(self) -> None:
        """Starts the standby process for the next attempt, unless it exists."""
        with self._changed:  # `start` may run in another thread
            if self._warm:
                return
            try:
                self._warm = subprocess.Popen(
                    [self._command[0], "-u", str(STANDBY), self._command[1]],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    cwd=self._folder,
                    env=self._environment,
                    start_new_session=True,
                )
            except OSError as error:
                where = f"{socket.gethostname()}: {self._command[0]} in {self._folder}"
                self._say(f"error: {where}: {error.strerror}; every node needs the same files")

    def send(self, attempt: int, number: int) -> None:
        """Sends a signal to the program of an attempt, if it runs. SIGKILL goes to its whole process group."""
        with self._changed:
            process = self._running if attempt == self._newest[0] else None
            if number == signal.SIGKILL and attempt > self._newest[0]:  # Ray may reorder calls
                self._end(attempt, -number)
        if process and process.poll() is None:
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)

    def news(self, wait_s: float) -> News:
        """Returns the news as soon as something has changed, or after `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._told != self._newest, wait_s)
            self._told = attempt, code = self._newest
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            return News(attempt=attempt, code=code, lines=lines, is_leaving=self._is_leaving, free_port=_free_port())

    def _watch(self, process: subprocess.Popen[str], attempt: int) -> None:
        """Collects the output until the process has ended. Its children may keep the pipe open for longer."""
        reading = threading.Thread(target=self._read, args=(process,), daemon=True)
        reading.start()
        code = process.wait()
        reading.join(1.0)
        assert process.stdin
        with contextlib.suppress(OSError):  # if it ended before it read its arguments
            process.stdin.close()
        self._end(attempt, code)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        with process.stdout:
            for line in process.stdout:
                self._say(line.rstrip("\n"))

    def _say(self, line: str) -> None:
        with self._changed:
            self._lines.append(line)
            self._changed.notify_all()

    def _end(self, attempt: int, code: int) -> None:
        with self._changed:
            self._newest, self._running = (attempt, code), None
            self._changed.notify_all()

    def _on_sigterm(self, *_: object) -> None:
        self._is_leaving = True


def _free_port() -> int:
    """Returns a free port that is not ephemeral, so that no connection takes it before the program listens there."""
    while True:
        port = random.choice(PORTS)
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("", port))
            return port
