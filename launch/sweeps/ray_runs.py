"""The runs of a sweep on a Ray cluster, each a separate train.py process. Only this module uses Ray."""

import logging
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from launch.sweeps.plan import ROOT
from launch.sweeps.pool import start_here
from runtime.exit_codes import ExitCode

THREADS = 3  # threads of a runner: one waits for the run's end, the others forward signals
CONNECT_S = 10.0


class Runner:
    """Starts a run on a node, waits for its end and forwards signals. The run ends with the runner."""

    def __init__(self, command: Sequence[str], output: Path) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it, and the run would inherit that
        python, *program = command
        self._process = start_here([python, "-m", "launch.sweeps.ray_child", *program], output, stdin=subprocess.PIPE)

    def begun(self) -> None:
        """Returns once the process exists."""

    def ended(self) -> int:
        """Returns the exit code of the run when it has ended."""
        return self._process.wait()

    def send(self, number: int) -> None:
        """Sends a signal to the run, if it has not ended."""
        self._process.send_signal(number)


class RayProcess:
    """A run on the cluster, with the methods of a Popen that a sweep needs."""

    def __init__(self, command: Sequence[str], output: Path, gpus: float) -> None:
        remote: Any = ray.remote(Runner)
        remote = remote.options(num_cpus=1, num_gpus=gpus, max_concurrency=THREADS)
        self._runner = remote.remote(list(command), output)
        self._code: int | None = None
        self._begun, self._ended = self._runner.begun.remote(), self._runner.ended.remote()

    def poll(self) -> int | None:
        """Returns the exit code: None while it runs or waits for a node, 75 if its node was lost."""
        if self._code is None and ray.wait([self._ended], timeout=0)[0]:
            try:
                self._code = ray.get(self._ended)
            except RayActorError:
                self._code = ExitCode.RESUMABLE
            ray.kill(self._runner)  # it would keep its CPU and GPUs
        return self._code

    def send_signal(self, number: int, /) -> None:
        """Sends a signal. A run that has not started is cancelled."""
        if ray.wait([self._begun], timeout=0)[0]:
            self._runner.send.remote(number)
        else:
            ray.kill(self._runner)


class RayRuns:
    """Starts runs on the cluster. Each takes one CPU, and all GPUs of a node if the nodes have any."""

    def __init__(self) -> None:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._gpus = max((node.get("GPU", 0.0) for node in nodes), default=0.0)
        key, each = ("GPU", self._gpus) if self._gpus else ("CPU", 1.0)
        self.capacity = max(1, sum(int(node.get(key, 0.0) // each) for node in nodes))  # runs at a time

    def __call__(self, command: Sequence[str], output: Path, lock: int) -> RayProcess:
        """Starts a run. The lock of the sweep stays on this machine."""
        return RayProcess(command, output, self._gpus)


@contextmanager
def connected(address: str) -> Iterator[RayRuns]:
    """Connects to the Ray cluster at an address, or starts one here (`local`). ValueError if no cluster answers."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        )
    except (OSError, RuntimeError, ValueError, OverflowError, RayError) as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"--ray={address}: no Ray cluster there ({said}); `ray start` makes one, --ray=local uses this machine"
        ) from error
    for number, handler in before:  # ray.init installs its own handler of SIGTERM
        signal.signal(number, handler)
    try:
        yield RayRuns()
    finally:
        ray.shutdown()
