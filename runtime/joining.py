"""Joins the processes by jax within a time limit, and says what a process waits for.

jax alone waits for five minutes in silence and then aborts, also when process 0 has ended long before. So jax joins in
a thread, while the main thread watches process 0 and can still be interrupted.
"""

import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

# Only this module tells the address that a launcher has given; tried with jax 0.10.2 and 0.12.0.1.
from jax._src import distributed

from runtime.addresses import host_and_port
from runtime.exit_codes import ResumableError

PATIENCE_S = 300.0  # for all processes to join
JAX_PATIENCE_S = 400  # longer: jax does not raise an error at its limit, it aborts the process
_QUIET_S = 20.0  # of waiting before a process says so
_GONE_S = 60.0  # in which a process 0 that was reached may be started again
_LOOK_S = 5.0  # each look is a connection to process 0, from every process that waits
_CONNECT_S = 2.0


def join_in_time(initialize: Callable[[], None], process: int | None) -> None:
    """Calls `initialize`, which joins by jax, and raises what it raises. `process` is None if only jax knows it.

    ResumableError if not all processes have joined after `PATIENCE_S`, or if process 0 is gone before.
    """
    joined: Future[None] = Future()
    threading.Thread(target=_join, args=(initialize, joined), name="joining", daemon=True).start()
    me = "this process" if process is None else f"process {process}"
    started_s, reached_s, said = time.monotonic(), float("inf"), ""  # `reached_s`: when process 0 was there, if it was
    while not wait([joined], _LOOK_S).done:
        is_there, state = _look()
        now_s = time.monotonic()
        reached_s = now_s if is_there else reached_s
        if now_s - reached_s > _GONE_S:
            raise ResumableError(f"{_process_0()} ended before {me} had joined")
        if now_s - started_s > _QUIET_S and state != said:
            said = state
            print(f"{me} waits for the others, up to {PATIENCE_S:g} s: {state}", file=sys.stderr, flush=True)
        if now_s - started_s > PATIENCE_S:
            raise ResumableError(
                f"{me} could not join the others in {PATIENCE_S:g} s: {state}; start all processes, with one "
                f"--coordinator that every node can reach, and the same --num_processes"
            )
    joined.result()


def _join(initialize: Callable[[], None], joined: "Future[None]") -> None:
    try:
        joined.set_result(initialize())
    except BaseException as error:  # SystemExit too: else the processes would seem to have joined
        joined.set_exception(error)


def _process_0() -> str:
    return f"process 0 at {distributed.global_state.coordinator_address}"


def _look() -> tuple[bool, str]:
    """Returns whether jax's service in process 0 can be reached, and that in words."""
    address = distributed.global_state.coordinator_address
    if address is None:
        return False, "the launcher has not said where process 0 is"
    try:
        socket.create_connection(host_and_port(address), timeout=_CONNECT_S).close()
    except OSError as error:
        return False, f"{_process_0()} cannot be reached ({error.strerror or error})"
    return True, f"{_process_0()} is there, but not all the others are"
