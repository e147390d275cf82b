"""`Supervisor`: the surroundings of training in every run: signals, the other processes, errors, exit codes.

    code = supervise(run)      # run(supervisor) is the program; it returns whether it is finished

The program reports the phase that it enters. An error ends it with the exit code of that phase, as one line if it is a
user's mistake or of an expected type. A process that fails notifies the others, so that none of them waits for it.
"""

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax

from runtime import launchers
from runtime.command_line import one_line, printable
from runtime.consensus import broadcast, new_key
from runtime.descriptors import raise_limit
from runtime.events import Event, EventLog
from runtime.exit_codes import ExitCode, ResumableError
from runtime.handshake import make_token, read_token
from runtime.heartbeat import Heartbeat, Verdict, is_of_a_link
from runtime.phases import Phase
from runtime.preemption import PreemptionHandler
from runtime.rendezvous import meet

NOTE_S = 1.0  # time to write the exit code to events.jsonl


class Supervisor:
    """One process of a run, without the training itself."""

    def __init__(self, preemption: PreemptionHandler) -> None:
        self.phase = Phase.CHECKING
        self._annotation = jax.profiler.TraceAnnotation(Phase.CHECKING.name.lower())  # its name in a profile
        self.shows_tracebacks = False
        self.events = EventLog(None)
        self._preemption, self._heartbeat = preemption, Heartbeat(self._note_verdict)
        self._workdir = Path()
        self._coordinator = self._attempt_id = ""
        self._has_started = False
        self._exit_noted = threading.Lock()  # acquired once, by the first thread that records the exit
        self.held = ExitStack()

    def join(
        self, address: launchers.Address, *, workdir: Path, silence_s: float, stall_s: float, is_awaited: bool = False
    ) -> None:
        """Joins the other processes, if any, and starts the heartbeats. ValueError names the missing flags.

        `is_awaited`: other runs wait for this one.
        """
        self._workdir = workdir
        self._coordinator = address.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS") or ""
        own = f"{socket.gethostname()}:{os.getpid()}"  # if a launcher's variables name the coordinator
        place = launchers.find_place(address)
        if place is None:
            self._attempt_id = self._coordinator or own
            self._heartbeat.start(0, [], silence_s, stall_s, is_awaited=is_awaited)
        else:
            meeting = meet(place, os.path.abspath(workdir), partial(_token, workdir, place.process))
            self.phase = Phase.JOINING
            self._heartbeat.start(place.process, meeting.peers, silence_s, stall_s, is_awaited=is_awaited)
            try:
                meeting.start_jax(place)
                self._attempt_id = broadcast(new_key("attempt-id"), lambda: self._coordinator or own)
            except jax.errors.JaxRuntimeError as error:
                raise ResumableError(f"jax could not connect the processes: {error}") from error
        self.phase = Phase.CHECKING

    def register(self, resource: AbstractContextManager[object]) -> None:
        """Enters a context, which ends after the exit is recorded and the other processes are notified."""
        self.held.enter_context(resource)

    def enter(self, phase: Phase) -> None:
        """Records the phase of the main thread, in a profile too."""
        self._annotation.__exit__(None, None, None)
        self._annotation = jax.profiler.TraceAnnotation(phase.name.lower())
        self._annotation.__enter__()
        self.phase = phase
        self._heartbeat.enter(phase)

    def started(self, *, nodes: int) -> None:
        """Records the start of the run on `nodes` nodes. From now on this process writes events to its directory."""
        self._has_started = True
        if jax.process_index() == 0:
            self.events = self._own_events()
        self.events.write(
            Event.STARTED,
            coordinator=self._coordinator,
            nodes=nodes,
            processes=jax.process_count(),
            devices=jax.device_count(),
        )

    def restored(self, **fields: Any) -> None:
        """Records where the run starts."""
        self.events.write(Event.RESTORED, **fields)

    def stopped(self, step: int, *, finished: bool) -> None:
        """Records the last step of this attempt."""
        self.events.write(Event.STOPPED, step=step, why=_why(finished))

    def stop_requested(self) -> bool:
        """Whether the run was asked to stop. All processes get True at the same call."""
        return self._preemption.requested()

    def progressed_s(self) -> float:
        """Returns the time of the main thread's last progress, by the monotonic clock."""
        return self._heartbeat.progressed_s()

    def completed(self, step: int) -> None:
        """Records the last step that this process completed."""
        self._heartbeat.completed(step)

    def end(self, code: ExitCode, failure: str = "") -> ExitCode:
        """Records the exit, stops the heartbeats and returns `code`. After a failure it may end the process."""
        why = failure or _why(code == ExitCode.FINISHED)
        # in a thread: a hanging file system, which may be the failure, must not delay the message to the other
        # processes
        noting = threading.Thread(target=self._note_exit, args=(self.events, code, why), daemon=True)
        noting.start()
        noting.join(NOTE_S)
        self._heartbeat.end(code, failure)
        return code

    def _note_exit(self, events: EventLog, code: int, why: str) -> None:
        if self._exit_noted.acquire(blocking=False):
            events.write(Event.EXITED, code=code, why=why)

    def fail(self, error: Exception, expected: tuple[type[Exception], ...]) -> ExitCode:
        """Prints an error, notifies the other processes, and returns the exit code."""
        self._heartbeat.await_verdict(error)
        if is_of_a_link(error):
            error = ResumableError(f"a connection between processes that live broke: {error}")
        code = ExitCode.RESUMABLE if isinstance(error, ResumableError) else self.phase.code_if_failed
        expected += (OSError, ResumableError)
        if not isinstance(error, (ValueError, *expected)):
            with suppress(OSError):  # a full disk may be the failure, and the others must be notified
                _print_traceback()
            return self.end(ExitCode.FAILED, one_line(f"{type(error).__name__}: {error}"))
        said = one_line(str(error))
        with suppress(OSError):
            if self.shows_tracebacks or not (code == ExitCode.BAD_INPUT or isinstance(error, expected)):
                _print_traceback()
            print(f"error: {said}", file=sys.stderr, flush=True)
        return self.end(code, said)

    def _own_events(self) -> EventLog:
        return EventLog(self._workdir, f"process {jax.process_index()}", self._attempt_id)

    def _note_verdict(self, verdict: Verdict, lost: list[str]) -> None:
        """Records the reason for the run's end, in process 0, or in process 1 if process 0 is lost."""
        if not self._has_started or jax.process_index() > 1 or (jax.process_index() == 1 and not lost):
            return
        events = self._own_events()
        if lost:
            events.write(Event.LOST_PEER, peers=lost, why=verdict.text)
        self._note_exit(events, verdict.code, verdict.text)


def _why(finished: bool) -> str:
    return "finished" if finished else "asked to stop"


def _print_traceback() -> None:
    print(printable(traceback.format_exc()), file=sys.stderr, end="", flush=True)


def _token(workdir: Path, process: int) -> str:
    return read_token(workdir, process) if process else make_token(workdir)


def supervise(
    run: Callable[[Supervisor], bool], *, expected: tuple[type[Exception], ...] = (), ends_process: bool = False
) -> ExitCode:
    """Runs a program and returns its exit code. Errors of the types `expected` are printed without a traceback.

    `ends_process`: the process exits afterwards, so SIGTERM no longer changes the exit code.
    """
    raise_limit()
    with PreemptionHandler(to_the_end=ends_process) as preemption:
        supervisor = Supervisor(preemption)
        try:
            return supervisor.end(ExitCode.FINISHED if run(supervisor) else ExitCode.RESUMABLE)
        except KeyboardInterrupt:
            print("stopped at once; run the same command again to resume from the newest checkpoint", file=sys.stderr)
            return supervisor.end(ExitCode.RESUMABLE, "it was stopped at once")
        except Exception as error:
            return supervisor.fail(error, expected)
        finally:
            supervisor.held.close()
