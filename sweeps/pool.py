"""`run_all`: runs a sweep on this machine, a number of runs at a time; a failed run does not stop the others."""

import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from files import locks
from runtime.exit_codes import ExitCode
from sweeps.plan import ROOT, Run
from sweeps.records import State, is_finished

MAX_STARTS = 4  # of one run that stops resumable, in one sweep
OUTPUT_FILE = "output.txt"  # all that a run printed
POLL_EVERY_S = 0.2


@dataclass(kw_only=True)
class Job:
    """A run, and how far it is; `time_s` is spent by this sweep."""

    run: Run
    state: State
    error: str = ""
    starts: int = 0
    time_s: float = 0.0
    started_s: float = 0.0
    said_before: int = 0  # bytes of the output that are of earlier starts
    process: subprocess.Popen[bytes] | None = None

    def start(self, lock: int) -> None:
        """Starts the run's program in a session of its own: Ctrl-C reaches it through us alone."""
        self.run.run_dir.mkdir(parents=True, exist_ok=True)
        with open(self.run.run_dir / OUTPUT_FILE, "ab") as output:
            output.write(f"$ {shlex.join(self.run.command)}\n".encode())
            output.flush()
            self.said_before = output.tell()
            self.process = subprocess.Popen(
                self.run.command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
            )
        self.state, self.starts, self.started_s = State.RUNNING, self.starts + 1, time.monotonic()

    def look(self, *, stopping: bool = False) -> None:
        """Takes the exit code of the run if it has ended; one that stopped resumable waits for its next start."""
        assert self.process is not None
        code = self.process.poll()
        now = time.monotonic()
        self.time_s, self.started_s = self.time_s + now - self.started_s, now
        if code is None:
            return
        if code == 0:
            self.state = State.FINISHED
        elif stopping:
            self.state = State.STOPPED
        elif code == ExitCode.RESUMABLE and self.starts < MAX_STARTS:
            self.state = State.WAITING
        else:
            self.state = State.FAILED
            said = last_error(self.run.run_dir / OUTPUT_FILE, self.said_before)
            self.error = f"killed by {signal.Signals(-code).name}: {said}" if code < 0 else said
            if code == ExitCode.RESUMABLE:
                self.error = f"stopped {self.starts} times: {said}"


def run_all(
    runs: Sequence[Run], *, workers: int, workdir: Path, show: Callable[[Sequence[Job]], None] = lambda jobs: None
) -> list[Job]:
    """Runs what is not finished yet, and returns all; on Ctrl-C the running ones save and stop, the rest wait."""
    jobs = [Job(run=run, state=State.FINISHED if is_finished(run) else State.WAITING) for run in runs]
    with claimed(workdir) as lock:
        try:
            while any(job.state in (State.WAITING, State.RUNNING) for job in jobs):
                for job in running(jobs):
                    job.look()
                waiting = [job for job in jobs if job.state == State.WAITING]
                for job in waiting[: workers - len(running(jobs))]:
                    job.start(lock)
                show(jobs)
                time.sleep(POLL_EVERY_S)
        except KeyboardInterrupt:
            pass  # the states say what is left to do
        finally:
            stop(jobs, show)
    return jobs


def running(jobs: Sequence[Job]) -> list[Job]:
    """Returns the jobs whose program runs."""
    return [job for job in jobs if job.state == State.RUNNING]


def stop(jobs: Sequence[Job], show: Callable[[Sequence[Job]], None]) -> None:
    """Passes Ctrl-C on and waits; another Ctrl-C is passed on too, and train.py then stops without saving."""
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
    """Keeps other sweeps out of the directory, as long as this one or a run that it left behind is alive.

    Gives the lock's file descriptor, which the runs inherit. ValueError if it is taken.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            lock = held.enter_context(locks.locked(workdir / ".lock", wait_s=0))
        except BlockingIOError:
            raise ValueError(f"{workdir} is in use by another sweep, or by runs that one left behind") from None
        yield lock


def last_error(output: Path, start: int = 0) -> str:
    """Returns the last line that begins with `error: `, else the last line, of what was printed from `start` on."""
    lines = [line.strip() for line in output.read_bytes()[start:].decode(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    return ([line for line in lines if line.startswith("error: ")] or lines or ["it printed nothing"])[-1]
