"""`ClusterJob`: the processes of one program on an emulated cluster, with their environment, output and exit code."""

import codecs
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from launch.emulate.nodes import EmulatedCluster
from runtime.exit_codes import ExitCode

KILLED = 137
COORDINATOR_PORT = 29400  # every port is free: the network is new
TORCH_PORT = 29500
TERM_S = 10.0  # between SIGTERM and SIGKILL


@dataclass(kw_only=True)
class EmulatedProcess:
    """A process of a job. `code` is the exit code as in a shell (128 + signal), None while the process runs."""

    rank: int
    node: int
    handle: subprocess.Popen[bytes]
    code: int | None = None


class ClusterJob:
    """Starts a program on every node and watches it. Call `watch` a few times a second until `is_running` is false.

    When a process fails, the others have `grace_s` seconds to notice and exit. Then they get SIGTERM, and SIGKILL 10 s
    later. A process that was killed with its node (`ctl kill`) has not failed. With `independent` each node's processes
    form a separate world, numbered by the node like a task of a SLURM array. The failure of one world does not end the
    others.
    """

    def __init__(
        self,
        cluster: EmulatedCluster,
        command: Sequence[str],
        *,
        devices: int,
        processes_per_node: int,
        grace_s: float,
        independent: bool = False,
    ) -> None:
        self.cluster = cluster
        self.processes: list[EmulatedProcess] = []
        self.pipe: IO[bytes] | None = None
        self._grace_s, self._independent = grace_s, independent
        self._devices, self._processes_per_node = devices, processes_per_node
        self._failure: EmulatedProcess | None = None  # the first failed process
        self._deadline_s = float("inf")
        self._next_signal = signal.SIGTERM
        self._interrupted = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for node in range(len(cluster.nodes)):
            self._log(node).unlink(missing_ok=True)
            self._start_all(node, command, first=node if independent else 0, nodes=len(cluster.nodes))

    def add(self, command: Sequence[str]) -> int:
        """Adds a node, starts a program on it if `command` is not empty, and returns the node's number.

        Kills the node if the program cannot be started.
        """
        node = self.cluster.add()
        self._log(node).unlink(missing_ok=True)
        if command:
            try:
                if self._independent:
                    self._start_all(node, command, first=node)
                else:
                    self._start(node, command, {})
            except (ValueError, OSError) as error:
                self.cluster.kill(node)
                raise ValueError(f"node{node} is killed, its program cannot be started: {error}") from error
        return node

    def is_running(self) -> bool:
        """Returns whether a process is running."""
        return any(process.code is None for process in self.processes)

    def watch(self) -> None:
        """Forwards the output of process 0, records ended processes, and kills the others after the grace period."""
        self._tee()
        ended = []
        for process in self.processes:
            if process.code is None and (code := process.handle.poll()) is not None:
                process.code = code if code >= 0 else 128 - code
                ended.append(process)
        self._tee()  # the end of the output
        failed = [p for p in ended if p.code and "killed" not in self.cluster.nodes[p.node].marks]
        if failed and not self._failure:
            # prefer the failed process to a process that detected the failure
            self._note_failure(min(failed, key=lambda p: p.code == ExitCode.RESUMABLE))
        if time.monotonic() > self._deadline_s:
            self._send(self._next_signal)
            self._next_signal = signal.SIGKILL
            self._deadline_s = time.monotonic() + TERM_S

    def interrupt(self, number: int) -> None:
        """Forwards a signal to all processes, without a time limit; the second signal is SIGKILL."""
        self._send(signal.SIGKILL if self._interrupted else number)
        self._interrupted = True

    def exit_code(self) -> int:
        """Returns the exit code of the process that failed first.

        Without failures: 0, unless all were killed with their nodes.
        """
        if self._failure:
            return self._failure.code or 0
        return KILLED if all(process.code for process in self.processes) else 0

    def _start_all(self, node: int, command: Sequence[str], *, first: int, nodes: int = 1) -> None:
        """Starts a node's processes. `first` is the first node of their world."""
        per_node = self._processes_per_node
        world = per_node * (1 if self._independent else nodes)
        for local in range(per_node):
            rank = (node - first) * per_node + local
            ranks = {"JAX_PROCESS_ID": rank, "RANK": rank, "LOCAL_RANK": local}
            sizes = {"JAX_NUM_PROCESSES": world, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": per_node}
            sizes |= {"JAX_NUM_CPU_DEVICES": self._devices // per_node}
            # XLA:CPU's threads: the default is one per core of the machine, which all nodes share
            threads = {"NPROC": min(self._devices // per_node, os.cpu_count() or 1)}
            number = {"SLURM_ARRAY_TASK_ID": node} if self._independent else {}
            self._start(node, command, ranks | sizes | threads | number, first=first)

    def _start(self, node: int, command: Sequence[str], values: dict[str, int], *, first: int = 0) -> None:
        address = self.cluster.address(first)
        env = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",  # so that logs can be read while the program runs
            "JAX_COORDINATOR_ADDRESS": f"{address}:{COORDINATOR_PORT}",
            "MASTER_ADDR": address,
            "MASTER_PORT": str(TORCH_PORT),
            **{name: str(value) for name, value in values.items()},
        }
        env.pop("TMPDIR", None)  # nodes would share it
        rank = len(self.processes)
        with contextlib.ExitStack() as undo:
            log = undo.enter_context(self._log(node).open("ab", buffering=0))  # shared by the processes of a node
            handle = self.cluster.start(node, command, env, log if rank else subprocess.PIPE)
            self.processes.append(EmulatedProcess(rank=rank, node=node, handle=handle))
            if handle.stdout:
                undo.pop_all()
                self.pipe, self._log_of_first = handle.stdout, log
                os.set_blocking(handle.stdout.fileno(), False)

    def _note_failure(self, process: EmulatedProcess) -> None:
        self._failure = process
        stops_as_told = self._interrupted and process.code == ExitCode.RESUMABLE
        if self.is_running() and not stops_as_told and not self._independent:
            self._deadline_s = time.monotonic() + self._grace_s
            print(
                f"process {process.rank} on node{process.node} ended with exit code {process.code}; the others have "
                f"{self._grace_s:g} s (its log: {self._log(process.node)})",
                file=sys.stderr,
            )

    def _log(self, node: int) -> Path:
        return self.cluster.workdir / f"node{node}.log"

    def _tee(self) -> None:
        while self.pipe and (data := self.pipe.read(1 << 16)) is not None:
            self._log_of_first.write(data)
            if not data:
                self._log_of_first.close()
                self.pipe = None
            sys.stdout.write(self._decoder.decode(data))
            sys.stdout.flush()

    def _send(self, number: int) -> None:
        for process in self.processes:
            if process.code is None:
                process.handle.send_signal(number)
