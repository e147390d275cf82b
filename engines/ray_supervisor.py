"""`Supervisor`: starts the program on one node, watches it, and keeps a warm one for the next start. A Ray actor.

Nothing here knows Ray, which calls the methods in several threads (`ACTOR_OPTIONS`).
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
from types import FrameType

from runtime.exit_codes import ExitCode

STANDBY = Path(__file__).with_name("ray_standby.py")
KEPT_LINES = 1000  # of the program's output, until they are asked for
# What another launcher told the node: the flags replace it, and what only some nodes have would make them disagree.
OTHERS_WORDS = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_NUM_CPU_DEVICES")
STARTING_S = 10.0  # for a supervisor to begin: who waits longer, for CPUs that others hold, is not waited for
PORTS = range(20000, 32000)  # above Ray's, below those that Linux gives to connections


@dataclass(frozen=True, kw_only=True)
class News:
    """What happened on a node since it was last asked, and how things are now."""

    codes: dict[int, int | None]  # of the attempts: how its process ended (negative: by a signal), None if it runs
    lines: list[tuple[int, str]]  # of output, each with its attempt (0: of the supervisor itself)
    is_leaving: bool  # the node was asked to go: SIGTERM
    is_warm: bool  # a process has been started for the next attempt
    free_port: int


class Supervisor:
    """Runs the program of one node: a process for each attempt, in a process group of its own."""

    def __init__(self, command: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
        """`command` is a Python, its program, and the arguments that all nodes have in common."""
        self._command, self._folder = command, folder
        self._environment = {k: v for k, v in os.environ.items() if k not in OTHERS_WORDS} | dict(environment)
        self._changed = threading.Condition()
        self._lines: deque[tuple[int, str]] = deque(maxlen=KEPT_LINES)
        self._codes: dict[int, int | None] = {}
        self._told: dict[int, int | None] = {}  # of these
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._warm: subprocess.Popen[str] | None = None
        self._is_leaving = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        self.warm_up()

    def start(self, attempt: int, arguments: Sequence[str]) -> None:
        """Starts the program for an attempt, with these arguments behind the common ones."""
        with self._changed:
            if attempt in self._codes:  # it was killed before it began
                return
            self._codes[attempt] = None
            if self._warm and self._warm.poll() is not None:  # it was killed while it waited
                self._warm.communicate()
                self._warm = None
            self.warm_up()
            process, self._warm = self._warm, None
            if process is None:
                self._end(attempt, ExitCode.BAD_INPUT)
                return
            self._running[attempt] = process
        threading.Thread(target=self._watch, args=(process, attempt), daemon=True).start()
        with contextlib.suppress(OSError):  # if it has ended, `_watch` says how
            print(json.dumps([*self._command[2:], *arguments]), file=process.stdin, flush=True)

    def warm_up(self) -> None:
        """Starts the process of the next attempt, up to where it waits for its arguments, if there is none."""
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
                where = f"{self._command[0]} in {self._folder}"
                self._say(0, f"error: {where}: {error.strerror}; every node needs the same files")

    def send(self, attempt: int, number: int) -> None:
        """Sends a signal to the program of an attempt, if it runs; SIGKILL also goes to what it started."""
        with self._changed:  # Ray's calls may overtake each other
            process = self._running.get(attempt)
            if number == signal.SIGKILL and attempt not in self._codes:
                self._end(attempt, -number)
        if process and process.poll() is None:
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)

    def news(self, wait_s: float) -> News:
        """Returns the news as soon as there are any, or after `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._told != self._codes, wait_s)
            self._told = dict(self._codes)
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            return News(
                codes=dict(self._codes),
                lines=lines,
                is_leaving=self._is_leaving,
                is_warm=self._warm is not None,
                free_port=_free_port(),
            )

    def _watch(self, process: subprocess.Popen[str], attempt: int) -> None:
        """Passes the output on, until the process has ended: its children may hold the pipe open."""
        reading = threading.Thread(target=self._read, args=(process, attempt), daemon=True)
        reading.start()
        code = process.wait()
        reading.join(1.0)
        assert process.stdin
        with contextlib.suppress(OSError):  # if it took not even its arguments
            process.stdin.close()
        self._end(attempt, code)

    def _read(self, process: subprocess.Popen[str], attempt: int) -> None:
        assert process.stdout
        with process.stdout:
            for line in process.stdout:
                self._say(attempt, line.rstrip("\n"))

    def _say(self, attempt: int, line: str) -> None:
        with self._changed:
            self._lines.append((attempt, line))
            self._changed.notify_all()

    def _end(self, attempt: int, code: int) -> None:
        with self._changed:
            self._codes[attempt] = code
            self._running.pop(attempt, None)
            self._changed.notify_all()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._is_leaving = True


def _free_port() -> int:
    """Returns a port that no connection is given by chance before the program listens there."""
    while True:
        port = random.choice(PORTS)
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("", port))
            return port
