"""`ElasticRun`: a run of train.py on an emulated Ray cluster, observed by its events, metrics and processes."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, Self

from launch.emulate.control import ask
from launch.emulate.namespaces import namespace_of, processes, processes_in
from runtime.events import Event, EventReader
from runtime.progress import read_progress

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.1
NOTHING_LEFT_S = 10.0  # for the kernel to end the nodes
JOIN = [sys.executable, "-m", "launch.emulate.ray_nodes"]
FIRST_STEP = {Event.FIRST_STEP, Event.ATTEMPT_STEPPED}  # train.py's; the engine's
# the first report of a failure, or of a change of the world
NOTICED = {Event.LOST_PEER, Event.NODE_LOST, Event.ATTEMPT_FAILED, Event.ATTEMPT_STOPPING}
LAST_LINES = 15  # log lines shown in a message


class RunError(RuntimeError):
    """The run ended, or made no progress for too long; the message has its last lines."""


class ElasticRun:
    """A run of train.py under `launch.ray` on emulated nodes; node 0 has Ray's head, nodes 1 and up train.

    A context manager, which ends the whole cluster at its end. It has no thread: `look` reads new events and metrics,
    and runs the actions that `later` has scheduled. Methods that wait call it repeatedly.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        nodes: int,
        devices_per_node: int,
        rate: str,
        program: str = "train.py",
    ) -> None:
        """`arguments` are the program's, except `--workdir`, which is `folder/run`."""
        self.folder, self.workdir, self.max_nodes = folder, folder / "run", nodes
        self.events: list[dict[str, Any]] = []  # with `at_s`, by this process' monotonic clock
        self.attempt, self.is_settled, self.settled_s = 0, False, 0.0  # settled: the attempt has finished a step
        self.world: tuple[int, ...] = ()  # the node of each process
        self.alive = set(range(1, nodes + 1))  # nodes that train, or may join
        self.step, self.lost_steps, self.source = 0, 0, ""
        self._name = f"chaos-{os.getpid()}"
        self._stepped_s: list[float] = []  # when each finished step was seen
        self._steps_of_earlier_attempts = 0  # number of them before this attempt
        self._newest = 0  # the newest step of this history of the run
        self._news = EventReader(self.workdir)
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._programs: dict[int, int] = {}  # of this attempt
        cluster = [f"--name={self._name}", f"--nodes={nodes + 1}", f"--devices_per_node={devices_per_node}"]
        cluster += [f"--rate={rate}", f"--workdir={folder / 'nodes'}"]
        engine = ["--min_nodes=1", f"--max_nodes={nodes}", f"--devices_per_node={devices_per_node}"]
        engine += ["--max_failures=20"]
        train = [sys.executable, program, f"--workdir={self.workdir}", *arguments]
        self._command = [sys.executable, "-m", "launch.emulate", *cluster, "--", *JOIN]
        self._command += [sys.executable, "-m", "launch.ray", *engine, "--", *train]

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that __exit__ runs
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # its nodes end with it
        self._process.wait()

    # --------------------------------------------------------------------------------------------------- looking

    def look(self) -> None:
        """Reads new metrics and events, and runs the actions that are due."""
        before, self.step = self.step, read_progress(self.workdir).step
        if self.step > before:
            self._stepped_s.append(time.monotonic())
        self._newest = max(self._newest, self.step)
        ahead_s = time.time() - time.monotonic()
        for event in self._news.new():
            self._take(event | {"at_s": event["time_s"] - ahead_s})
        due = [item for item in self._later if item[0] <= time.monotonic()]
        self._later = [item for item in self._later if item not in due]
        for _, action in due:
            action()

    def _take(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        kind = event["event"]
        if kind == Event.ATTEMPT_STARTED:
            self.attempt, self.is_settled = event["attempt"], False
            self.world = tuple(int(host.removeprefix("node")) for host in event["hosts"])
            self._programs.clear()
        elif kind in FIRST_STEP and not self.is_settled:
            self.is_settled, self.settled_s = True, event["at_s"]
        elif kind == Event.ATTEMPT_ENDED:
            self.is_settled = False
        elif kind == Event.RESTORED:
            self.lost_steps += max(0, self._newest - event["step"])
            self._newest, self._steps_of_earlier_attempts = event["step"], len(self._stepped_s)
            self.source = event["source"]

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Calls `look` until `condition` holds. RunError if the run ends first, or after the time-out."""
        deadline_s = time.monotonic() + timeout_s
        while self.look() or not condition():
            if (code := self._process.poll()) is not None:
                raise RunError(f"the run ended with exit code {code} before {what}; it said:\n{self._last_lines()}")
            if time.monotonic() > deadline_s:
                raise RunError(f"no {what} in {timeout_s:g} s; the run said:\n{self._last_lines()}")
            time.sleep(POLL_S)

    def later(self, pause_s: float, action: Callable[[], None]) -> None:
        """Schedules an action."""
        self._later.append((time.monotonic() + pause_s, action))

    def since(self, start_s: float, kinds: Container[str]) -> float | None:
        """Returns the time from `start_s` to the next event of these kinds, or None."""
        times_s = (event["at_s"] - start_s for event in self.events if event["event"] in kinds)
        return next((after_s for after_s in times_s if after_s >= 0), None)

    @property
    def attempt_has_step(self) -> bool:
        """Whether the metrics have a step of this attempt."""
        return len(self._stepped_s) > self._steps_of_earlier_attempts

    def longest_pause(self, start_s: float) -> float:
        """Returns the longest time between two consecutive steps, of which the second finished after `start_s`."""
        pairs = itertools.pairwise(self._stepped_s)
        return max((after - before for before, after in pairs if after > start_s), default=0.0)

    def finish(self, timeout_s: float) -> int:
        """Runs the scheduled actions, waits for the end of the run and its cluster, and returns the exit code."""
        for _, action in self._later:
            action()
        self._later.clear()
        deadline_s = time.monotonic() + timeout_s
        while self._process.poll() is None:
            self.look()
            if time.monotonic() > deadline_s:
                raise RunError(f"the run has not ended in {timeout_s:g} s; it said:\n{self._last_lines()}")
            time.sleep(POLL_S)
        self.look()
        return self._process.returncode

    def _last_lines(self) -> str:
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-LAST_LINES:])

    # --------------------------------------------------------------------------------------------------- touching

    def tell(self, verb: str, node: int) -> None:
        """Sends a command about a node to the emulated cluster."""
        ask(self._name, {"verb": verb, "node": node})

    def add(self) -> int:
        """Starts one more node, and returns its number."""
        answer = ask(self._name, {"verb": "add", "command": JOIN})
        number = int(answer.split()[0].removeprefix("node"))
        self.alive.add(number)
        return number

    def program(self, node: int) -> int:
        """Returns the process of train.py on a node: the oldest, since another one may wait for the next attempt."""
        if node not in self._programs:
            self._programs[node] = min(self._processes(node, "ray_standby.py"), key=_started)
        return self._programs[node]

    def launcher(self, node: int) -> int:
        """Returns the process that runs Ray on a node."""
        (found,) = self._processes(node, "launch.emulate.ray_nodes")
        return found

    def memory(self, node: int) -> Path:
        """Returns the path of the node's RAM disk from this process."""
        return Path(f"/proc/{self._init(node)}/root/dev/shm")

    def _processes(self, node: int, word: str) -> list[int]:
        init = self._init(node)
        found = [pid for pid in processes_in(namespace_of(init)) if pid != init]
        found = [pid for pid in found if any(word in text for text in _arguments(pid))]
        if not found:
            raise RunError(f"no process with {word} in node{node}; the run said:\n{self._last_lines()}")
        return found

    def _init(self, node: int) -> int:
        """Returns process 1 of a node."""
        return json.loads(ask(self._name, {"verb": "inits"}))[node]

    def left(self) -> list[str]:
        """Returns the processes that remain after the end of the cluster: with its name, or a directory of it.

        Other processes in a node end with its process 1, which has the hosts file among its arguments.
        """
        hosts = str((self.folder / "nodes" / "hosts").resolve())
        marks = {f"--name={self._name}", f"--workdir={self.workdir}", hosts}
        deadline_s = time.monotonic() + NOTHING_LEFT_S
        while True:
            words = {pid: _arguments(pid) for pid in processes()}
            left = [f"process {pid}: {' '.join(words[pid])[:120]}" for pid in words if marks & {*words[pid]}]
            if not left or time.monotonic() > deadline_s:
                return left
            time.sleep(POLL_S)


def _arguments(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def _started(pid: int) -> int:
    """Returns when a process started, in ticks."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return sys.maxsize
