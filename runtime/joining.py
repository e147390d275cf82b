"""Joins the processes by jax within a time limit, and says what a process waits for.

jax alone waits for five minutes in silence and then aborts, also when process 0 has ended long before. So jax joins in
a thread, while the main thread watches process 0 and can still be interrupted.
"""

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable

# Only this module tells the address that a launcher has given; tried with jax 0.10.2 and 0.12.0.1.
from jax._src import distributed

from runtime.addresses import host_and_port
from runtime.exit_codes import ResumableError

PATIENCE_S = 300.0  # for all processes to join
JAX_PATIENCE_S = 400  # longer: jax does not raise an error at its limit, it aborts the process
_QUIET_S = 20.0  # of waiting before a process says so
_GONE_S = 60.0  # in which a process 0 that was reached may be started again
_LOOK_S = 0.2
_CONNECT_S = 2.0


def join_in_time(initialize: Callable[[], None], process: int | None) -> None:
    """Calls `initialize`, which joins by jax, and raises what it raises. `process` is None if only jax knows it.

    ResumableError if not all processes have joined after `PATIENCE_S`, or if process 0 is gone before.
    """
    joining = _Joining(initialize)
    joining.start()
    me = "this process" if process is None else f"process {process}"
    started_s, said = time.monotonic(), ""
    with contextlib.closing(_Coordinator()) as coordinator:
        while not joining.is_done(_LOOK_S):
            waited_s = time.monotonic() - started_s
            state = coordinator.look() if waited_s > 1 else ""
            if coordinator.is_gone():
                raise ResumableError(f"{coordinator} ended before {me} had joined")
            if waited_s > _QUIET_S and state != said:
                said = state
                print(f"{me} waits for the others, up to {PATIENCE_S:g} s: {state}", file=sys.stderr, flush=True)
            if waited_s > PATIENCE_S:
                raise ResumableError(
                    f"{me} could not join the others in {PATIENCE_S:g} s: {state}; start all processes, with one "
                    f"--coordinator that every node can reach, and the same --num_processes"
                )


class _Joining(threading.Thread):
    """Joins by jax in a thread, which may never return."""

    def __init__(self, initialize: Callable[[], None]) -> None:
        super().__init__(name="joining", daemon=True)
        self._initialize = initialize
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._initialize()
        except BaseException as error:  # SystemExit too: else the processes would seem to have joined
            self._error = error

    def is_done(self, within_s: float) -> bool:
        """Whether the processes have joined; raises the error of a failure."""
        self.join(within_s)
        if self._error:
            raise self._error
        return not self.is_alive()


class _Coordinator:
    """Process 0 from outside: a connection to jax's service that says nothing shows whether it is there."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        self._away_since_s: float | None = None  # None if it was never reached, or is there

    def __str__(self) -> str:
        return f"process 0 at {distributed.global_state.coordinator_address}"

    def look(self) -> str:
        """Returns in words whether process 0 can be reached."""
        address = distributed.global_state.coordinator_address
        if address is None:
            return "the launcher has not said where process 0 is"
        if self._connection and _is_closed(self._connection):
            self._away_since_s = time.monotonic()
            self.close()
        if not self._connection:
            try:
                self._connection = socket.create_connection(host_and_port(address), timeout=_CONNECT_S)
            except OSError as error:
                return f"{self} cannot be reached ({error.strerror or error})"
            self._connection.setblocking(False)
            self._away_since_s = None
        return f"{self} is there, but not all the others are"

    def is_gone(self) -> bool:
        """Whether process 0 was there and has not come back."""
        return self._away_since_s is not None and time.monotonic() - self._away_since_s > _GONE_S

    def close(self) -> None:
        """Closes the connection."""
        if self._connection:
            self._connection.close()
        self._connection = None


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection that does not block; drops what it has sent."""
    try:
        while data := connection.recv(1 << 16):
            del data
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
