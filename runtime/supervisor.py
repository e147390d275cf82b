"""`Supervisor`: what every run needs around training: signals, the other processes, standby, errors, exit codes.

    code = supervise(run)      # run(supervisor) is the program; it returns whether it is finished

The program says which phase it enters; an error ends it with the exit code of that phase, as one line if it is a
user's mistake or was to be expected. A process that fails tells the others, and none is left waiting.
"""

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import jax

from runtime import launch
from runtime.command_line import one_line
from runtime.consensus import broadcast, new_key
from runtime.events import Event, EventLog
from runtime.exit_codes import ExitCode, ResumableError
from runtime.handshake import shared_token
from runtime.heartbeat import Heartbeat, Verdict
from runtime.phases import Phase
from runtime.preemption import PreemptionHandler
from runtime.rendezvous import rendezvous
from runtime.standby import StandbyGate

NOTE_S = 1.0  # for the exit code to be written down


class Supervisor:
    """One process of a run, seen from outside of training."""

    def __init__(self, preemption: PreemptionHandler) -> None:
        self.phase = Phase.CHECKING
        self.shows_tracebacks = False
        self.events = EventLog(None)
        self._preemption, self._heartbeat = preemption, Heartbeat(self._note_verdict)
        self._gate: StandbyGate | None = None
        self._workdir = Path()
        self._coordinator = self._attempt_id = ""
        self._has_started = False
        self._exit_noted = threading.Lock()  # taken once, and never given back
        self._held = ExitStack()

    def stand_by(self) -> None:
        """Makes `await_turn` wait for SIGUSR1 to process 0."""
        self._gate = StandbyGate()

    def join(
        self,
        address: launch.Address,
        *,
        workdir: Path,
        silence_s: float,
        stall_s: float,
    ) -> None:
        """Joins the other processes if there are any, and begins to watch them. ValueError says what to give."""
        launch.join(address)
        token = shared_token(workdir) if jax.process_count() > 1 else ""
        self.phase = Phase.JOINING
        self._workdir = workdir
        self._coordinator = address.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS") or ""
        own = f"{socket.gethostname()}:{os.getpid()}"  # where the launcher tells the coordinator to jax alone
        self._attempt_id = broadcast(new_key("attempt-id"), lambda: self._coordinator or own)
        peers = rendezvous(self._coordinator or None, token)
        self._heartbeat.start(jax.process_index(), peers, silence_s, stall_s)
        self.phase = Phase.CHECKING

    def hold(self, resource: AbstractContextManager[object]) -> None:
        """Enters a context that `release` leaves: after the exit is recorded and the other processes know of it."""
        self._held.enter_context(resource)

    def release(self) -> None:
        """Leaves the contexts that `hold` entered."""
        self._held.close()

    def enter(self, phase: Phase) -> None:
        """Notes what the main thread does from now on."""
        self.phase = phase
        self._heartbeat.enter(phase)

    @property
    def stands_by(self) -> bool:
        """Whether the attempt before this one may still train."""
        return self._gate is not None

    def await_turn(self, compile_ahead: Callable[[], object]) -> bool:
        """Compiles, says so, and waits; False if asked to stop before. Every process that stands by must call it."""
        assert self._gate
        self.enter(Phase.COMPILING)
        compile_ahead()
        if jax.process_index() == 0:
            self._own_events().write(Event.READY, coordinator=self._coordinator)
        return self._gate.opens(self._preemption)

    def started(self) -> None:
        """Writes down that the run starts: the work directory is its own from now on."""
        self._has_started = True
        if jax.process_index() == 0:
            self.events = self._own_events()
        self.events.write(
            Event.STARTED,
            coordinator=self._coordinator,
            processes=jax.process_count(),
            devices=jax.device_count(),
        )

    def stop_requested(self) -> bool:
        """Whether somebody asked the run to stop; all processes see it at the same call."""
        return self._preemption.requested()

    def completed(self, step: int) -> None:
        """Notes the last step that this process completed."""
        self._heartbeat.completed(step)

    def end(self, code: ExitCode, failure: str = "") -> ExitCode:
        """Ends the watch over the other processes and returns `code`; after a failure it ends the process."""
        why = failure or ("finished" if code == ExitCode.FINISHED else "asked to stop")
        # in a thread: a file system that hangs, maybe the very failure, must not keep it from the other processes
        noting = threading.Thread(target=self._note_exit, args=(self.events, code, why), daemon=True)
        noting.start()
        noting.join(NOTE_S)
        self._heartbeat.end(code, failure)
        return code

    def _note_exit(self, events: EventLog, code: int, why: str) -> None:
        if self._exit_noted.acquire(blocking=False):
            events.write(Event.EXITED, code=code, why=why)

    def fail(self, error: Exception, expected: tuple[type[Exception], ...]) -> ExitCode:
        """Prints an error, tells the other processes, and returns the exit code."""
        self._heartbeat.await_verdict(error)
        code = ExitCode.RESUMABLE if isinstance(error, ResumableError) else self.phase.code_if_failed
        expected += (OSError, ResumableError)
        if not isinstance(error, (ValueError, *expected)):
            traceback.print_exc()
            return self.end(ExitCode.FAILED, one_line(f"{type(error).__name__}: {error}"))
        if self.shows_tracebacks or not (code == ExitCode.BAD_INPUT or isinstance(error, expected)):
            traceback.print_exc()
        said = one_line(str(error))
        print(f"error: {said}", file=sys.stderr)
        return self.end(code, said)

    def _own_events(self) -> EventLog:
        return EventLog(self._workdir, f"process {jax.process_index()}", self._attempt_id)

    def _note_verdict(self, verdict: Verdict, lost: list[str]) -> None:
        """Writes down why the run ends: process 0 does, or process 1 if that one is lost."""
        if not self._has_started or jax.process_index() > 1 or (jax.process_index() == 1 and not lost):
            return
        events = self._own_events()
        if lost:
            events.write(Event.LOST_PEER, peers=lost, why=verdict.text)
        self._note_exit(events, verdict.code, verdict.text)


def supervise(
    run: Callable[[Supervisor], bool], *, expected: tuple[type[Exception], ...] = (), ends_process: bool = False
) -> ExitCode:
    """Runs a program and returns its exit code; errors of the types `expected` need no traceback.

    With `ends_process` nothing but the end of the process follows: SIGTERM does not change the exit code any more.
    """
    with PreemptionHandler(to_the_end=ends_process) as preemption:
        supervisor = Supervisor(preemption)
        try:
            return supervisor.end(ExitCode.FINISHED if run(supervisor) else ExitCode.RESUMABLE)
        except KeyboardInterrupt:
            print("stopped at once; run the same command again to go on from the newest checkpoint", file=sys.stderr)
            return supervisor.end(ExitCode.RESUMABLE, "it was stopped at once")
        except Exception as error:
            return supervisor.fail(error, expected)
        finally:
            supervisor.release()
