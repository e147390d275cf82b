"""`run_all`: runs a sweep on this machine, several runs at a time. A failed run does not stop the others."""

import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from launch.sweeps.plan import ROOT, Run
from launch.sweeps.records import RunState, is_finished
from runtime.exit_codes import ExitCode, signal_name
from runtime.files import locks

MAX_ATTEMPTS = 4  # attempts per sweep for a run that stops resumable
OUTPUT_FILE = "output.txt"  # the output of a run
POLL_EVERY_S = 0.2


class Process(Protocol):
    """A running program: a Popen, or a program on another machine."""

    def poll(self) -> int | None:
        """Returns the exit code, None while it runs."""
        ...

    def send_signal(self, number: int, /) -> None:
        """Sends the program a signal."""
        ...


Launcher = Callable[[Sequence[str], Path, int], Process]  # (command, file for output, descriptor)


def start_here(
    command: Sequence[str], output: Path, *inherited: int, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Starts a program on this machine in its own session, so that it gets Ctrl-C only from this process.

    It inherits the file descriptors `inherited`.
    """
    with open(output, "ab") as file:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=stdin,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=inherited,
        )


@dataclass(kw_only=True)
class SweepJob:
    """A run and its progress. `time_s` is its running time in this sweep."""

    run: Run
    state: RunState
    error: str = ""
    attempts: int = 0
    time_s: float = 0.0
    started_s: float = 0.0
    output_start: int = 0  # start of this attempt's output in the file
    process: Process | None = None

    def start(self, launch: Launcher, lock: int) -> None:
        """Starts the run's program, which may inherit the file descriptor `lock`."""
        self.run.run_dir.mkdir(parents=True, exist_ok=True)
        output = self.run.run_dir / OUTPUT_FILE
        with open(output, "ab") as file:
            file.write(f"$ {shlex.join(self.run.command)}\n".encode())
            self.output_start = file.tell()
        self.process = launch(self.run.command, output, lock)
        self.state, self.attempts, self.started_s = RunState.RUNNING, self.attempts + 1, time.monotonic()

    def look(self, *, stopping: bool = False) -> None:
        """Updates the state if the run has ended. A run that stopped resumable waits for a retry."""
        assert self.process is not None
        code = self.process.poll()
        now = time.monotonic()
        self.time_s, self.started_s = self.time_s + now - self.started_s, now
        if code is None:
            return
        if code == 0:
            self.state = RunState.FINISHED
        elif stopping:
            self.state = RunState.STOPPED
        elif code == ExitCode.RESUMABLE and self.attempts < MAX_ATTEMPTS:
            self.state = RunState.WAITING
        else:
            self.state = RunState.FAILED
            error = last_error(self.run.run_dir / OUTPUT_FILE, self.output_start)
            self.error = f"killed by {signal_name(-code)}: {error}" if code < 0 else error
            if code == ExitCode.RESUMABLE:
                self.error = f"stopped {self.attempts} times: {error}"


AnyJob = TypeVar("AnyJob", bound=SweepJob)


def run_all(
    runs: Sequence[Run],
    *,
    workers: int,
    workdir: Path,
    show: Callable[[Sequence[SweepJob]], None] = lambda jobs: None,
    launch: Launcher = start_here,
) -> list[SweepJob]:
    """Runs all runs that are not finished, and returns the jobs of all.

    On Ctrl-C, running ones save and stop, and the others stay waiting.
    """
    jobs = [SweepJob(run=run, state=RunState.FINISHED if is_finished(run) else RunState.WAITING) for run in runs]
    with claimed(workdir) as lock, stopped_at_end(jobs, show):
        while any(job.state in (RunState.WAITING, RunState.RUNNING) for job in jobs):
            for job in running(jobs):
                job.look()
            waiting = [job for job in jobs if job.state == RunState.WAITING]
            for job in waiting[: workers - len(running(jobs))]:
                job.start(launch, lock)
            show(jobs)
            time.sleep(POLL_EVERY_S)
    return jobs


@contextmanager
def stopped_at_end(jobs: Sequence[SweepJob], show: Callable[[Sequence[SweepJob]], None]) -> Iterator[None]:
    """Stops the runs when its body ends. Ctrl-C ends the body quietly, because the states show the remaining runs."""
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        stop(jobs, show)


def running(jobs: Sequence[AnyJob]) -> list[AnyJob]:
    """Returns the jobs that are running."""
    return [job for job in jobs if job.state == RunState.RUNNING]


def stop(jobs: Sequence[SweepJob], show: Callable[[Sequence[SweepJob]], None]) -> None:
    """Forwards Ctrl-C and waits. A second Ctrl-C is forwarded too, and makes train.py stop without saving."""
    again = True
    while running(jobs):
        try:
            for job in running(jobs) if again else ():
                assert job.process is not None
                job.process.send_signal(signal.SIGINT)
            again = False
            time.sleep(POLL_EVERY_S)
            for job in running(jobs):
                job.look(stopping=True)
            show(jobs)
        except KeyboardInterrupt:
            again = True


@contextmanager
def claimed(workdir: Path) -> Iterator[int]:
    """Locks the directory against other sweeps while this one, or a run that outlives it, is alive.

    Yields the lock's file descriptor, which the runs inherit. ValueError if the directory is locked.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            lock = held.enter_context(locks.locked(workdir / ".lock", wait_s=0))
        except BlockingIOError:
            raise ValueError(
                f"{workdir} is in use by another sweep or its runs; wait for them or choose another --workdir"
            ) from None
        yield lock


def last_error(output: Path, start: int = 0) -> str:
    """Returns the last line after byte `start` that begins with `error: `, or else the last line."""
    lines = [line.strip() for line in output.read_bytes()[start:].decode(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    return ([line for line in lines if line.startswith("error: ")] or lines or ["no output"])[-1]
