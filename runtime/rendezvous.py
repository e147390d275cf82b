"""Connects the processes of a run to process 0 before jax does. Heartbeats use the connections later.

Process 0 waits at the coordinator's address. Both sides say hello and authenticate (runtime/handshake.py). When all
processes have connected, process 0 answers with the address of jax's service, which has a free port:

    both:      {"run": RUN, "process": I, "processes": N, "error": null}
    both:      the handshake
    process 0: {"host": HOST, "jax": HOST:PORT}

Two runs with the same address therefore cannot mix: the token distinguishes them, and jax never connects to the service
of another run. RUN is a hash of the run's name. An error in a hello counts only for a process of the same run. It ends
all processes with the same line.
"""

import contextlib
import hashlib
import json
import os
import queue
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runtime import handshake
from runtime.addresses import bind, host_and_port, listen, to_listen_at
from runtime.exit_codes import ResumableError
from runtime.files import json_objects
from runtime.files.json_objects import JsonObject
from runtime.heartbeat import PeerProcess
from runtime.launchers import Place, start_jax

BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"  # the address at which process 0 listens
PATIENCE_S = 300.0  # limit for all processes to join
_QUIET_S = 20.0  # a process waits that long before it reports the wait
_GONE_S = 60.0  # time in which a lost process 0 may be restarted
_LOOK_S = 5.0
_TRY_S, _RETRY_S = 10.0, 0.5
_TELL_S = 5.0  # time for the other processes to connect and read the error of process 0
_HELLO_BYTES, _ERROR_CHARACTERS = 8000, 600
_PURPOSE = "heartbeats"


class OtherRunError(ConnectionError):
    """The program at the coordinator's address is not process 0 of this run."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The connections of this process (process 0: to all others; the others: to process 0), and jax's address."""

    peers: list[PeerProcess]
    jax_address: str
    jax_port: socket.socket | None = None  # reserves the port for jax's service in process 0

    def start_jax(self, place: Place) -> None:
        """Joins the processes in jax. ResumableError if jax's service cannot be reached."""
        if self.jax_port is None:
            start_jax(place, self.jax_address, None)
            return
        with self.jax_port:
            host, port = self.jax_port.getsockname()[:2]
            start_jax(place, self.jax_address, f"{_bracketed(host)}:{port}")


def meet(place: Place, run: str, token: Callable[[], str]) -> Meeting:
    """Connects this process with the others of its run. Every process must call it.

    `run` is the same in all processes of a run, and `token` returns their secret. A ValueError or OSError of `token` is
    a
    ValueError in every process. ResumableError if some processes do not connect in time.
    """
    return _Host(place, run).gather(token) if place.process == 0 else _reach(place, run, token)


class _Host:
    """Process 0, which admits the others."""

    def __init__(self, place: Place, run: str) -> None:
        self._place, self._run = place, run
        self._error = ""
        self._arrived: queue.Queue[PeerProcess | ValueError] = queue.Queue()
        self._refused = 0  # processes of this run that have read the error

    def gather(self, token: Callable[[], str]) -> Meeting:
        """Returns the connections to all other processes. ValueError if one of them, or this process, has an error."""
        listener = _listen(self._place)
        secret = ""
        try:
            secret = token()
        except (ValueError, OSError) as error:
            self._error = str(error)
        acceptor = handshake.Acceptor(
            listener, secret, _PURPOSE, self._place.count - 1, self._admitted, handshake=self._greet
        )
        peers: dict[int, PeerProcess] = {}
        try:
            if self._error:
                raise ValueError(self._error)
            self._await_all(peers)
        except ValueError as error:
            self._tell(str(error), peers)
            raise
        finally:
            acceptor.close()
        host = host_and_port(self._place.coordinator)[0]
        jax_port = _free_port(host)
        jax_address = f"{_bracketed(host)}:{jax_port.getsockname()[1]}"
        for peer in peers.values():
            peer.send(host=socket.gethostname(), jax=jax_address)
        return Meeting(peers=[peers[process] for process in sorted(peers)], jax_address=jax_address, jax_port=jax_port)

    def _await_all(self, peers: dict[int, PeerProcess]) -> None:
        waiting = _JoinLimit("process 0")
        while True:
            for process in [process for process, peer in peers.items() if not _is_open(peer.connection)]:
                peers.pop(process).connection.close()
            missing = [str(process) for process in range(1, self._place.count) if process not in peers]
            if not missing:
                return
            state = f"process {', '.join(missing[:5])}{' and others' * (len(missing) > 5)} did not connect"
            try:
                peer = self._arrived.get(timeout=_LOOK_S)
            except queue.Empty:
                waiting.check(state)
                continue
            if isinstance(peer, ValueError):
                raise peer
            if str(peer.process) in missing:
                peers[peer.process] = peer
            else:  # it retries repeatedly, so the queue is not empty
                peer.connection.close()
                waiting.check(f"{state}, and two processes were started as process {peer.process}")

    def _admitted(self, connection: socket.socket, process: int, host: str) -> None:
        self._arrived.put(PeerProcess(process=process, host=host, connection=connection))

    def _greet(self, connection: socket.socket, token: str, purpose: str) -> tuple[int, str]:
        """Exchanges hellos with a process and authenticates it."""
        connection.settimeout(_TRY_S)
        _send(connection, _hello(self._place, self._run, self._error))
        theirs = _receive(connection)
        if problem := _problem(self._place, self._run, theirs):
            self._arrived.put(ValueError(problem))
        if problem or self._error:
            self._refused += 1
            raise ConnectionError("it cannot join")
        return handshake.admit(connection, token, purpose)

    def _tell(self, error: str, peers: Mapping[int, PeerProcess]) -> None:
        """Sends the error to the connected processes, and for a while to processes that still connect."""
        self._error = error
        told, until_s = list(peers.values()), time.monotonic() + _TELL_S
        for peer in told:
            peer.send(error=error[:_ERROR_CHARACTERS])
        while len(told) + self._refused < self._place.count - 1 and time.monotonic() < until_s:
            with contextlib.suppress(queue.Empty):
                if isinstance(peer := self._arrived.get(timeout=0.02), PeerProcess):
                    peer.send(error=error[:_ERROR_CHARACTERS])
                    told.append(peer)
        for peer in told:
            peer.connection.close()


def _reach(place: Place, run: str, token: Callable[[], str]) -> Meeting:
    """Connects to process 0, which may start later, and waits for all other processes."""
    me, waiting, reached_s = f"process {place.process}", _JoinLimit(f"process {place.process}"), float("inf")
    process_0 = f"process 0 at {place.coordinator}"
    while True:
        state = f"{process_0} is there, but not all the others are"
        try:
            with contextlib.ExitStack() as on_failure:
                connection = on_failure.enter_context(_connect(place.coordinator))
                reached_s = time.monotonic()
                _introduce(connection, place, run, token)
                while not select.select([connection], [], [], _LOOK_S)[0]:
                    reached_s = time.monotonic()
                    waiting.check(state)
                welcome = _receive(connection)
                if "error" in welcome:
                    raise ValueError(str(welcome["error"]))
                connection.settimeout(None)
                peer = PeerProcess(process=0, host=str(welcome["host"]), connection=connection)
                on_failure.pop_all()
                return Meeting(peers=[peer], jax_address=str(welcome["jax"]))
        except OtherRunError:
            state = f"the program at {place.coordinator} is not process 0 of this run"
        except (OSError, KeyError) as error:
            state = f"{process_0} cannot be reached ({getattr(error, 'strerror', '') or error})"
        if time.monotonic() - reached_s > _GONE_S:
            raise ResumableError(f"{process_0} ended before {me} had joined")
        waiting.check(state)
        time.sleep(_RETRY_S)


def _introduce(connection: socket.socket, place: Place, run: str, token: Callable[[], str]) -> None:
    """Says hello and authenticates. ValueError for an error that ends the run, OtherRunError for another program."""
    try:
        theirs = _receive(connection)
    except (OSError, ValueError) as error:
        raise OtherRunError("it says no hello") from error
    if problem := _problem(place, run, theirs):
        _send(connection, _hello(place, run))
        raise ValueError(problem)
    secret = error = ""
    try:
        secret = token()
    except (OSError, ValueError) as failed:
        error = str(failed)
    _send(connection, _hello(place, run, error))
    if error:
        raise ValueError(error)
    try:
        handshake.introduce(connection, secret, _PURPOSE, place.process, _TRY_S)
    except OSError as error:
        raise OtherRunError(str(error)) from error


def _hello(place: Place, run: str, error: str = "") -> JsonObject:
    name = hashlib.sha256(run.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    text = error[:_ERROR_CHARACTERS] or None
    return {"run": name, "process": place.process, "processes": place.count, "error": text}


def _problem(place: Place, run: str, theirs: Mapping[str, object]) -> str:
    """Returns the reason why a process of the same run cannot join, or ""."""
    ours = _hello(place, run)
    if theirs.get("run") != ours["run"]:
        return ""
    if theirs.get("error"):
        return str(theirs["error"])
    if theirs.get("processes") != place.count:
        sides = sorted(((one["process"], one["processes"]) for one in (ours, theirs)), key=str)
        return "; ".join(f"process {process} was started as one of {count}" for process, count in sides)
    return ""


class _JoinLimit:
    """Limits the time that a process waits."""

    def __init__(self, me: str) -> None:
        self._me, self._started_s, self._reported = me, time.monotonic(), ""

    def check(self, state: str) -> None:
        """Reports a new state after a while. ResumableError after the time limit for all processes to join."""
        waited_s = time.monotonic() - self._started_s
        if waited_s > _QUIET_S and state != self._reported:
            self._reported = state
            print(f"{self._me} waits for the others, up to {PATIENCE_S:g} s: {state}", file=sys.stderr, flush=True)
        if waited_s > PATIENCE_S:
            raise ResumableError(
                f"{self._me} could not join the others in {PATIENCE_S:g} s: {state}; start all processes, with one "
                f"--coordinator that every node can reach, and the same --num_processes and --workdir"
            )


def _listen(place: Place) -> socket.socket:
    """Returns the socket at which process 0 listens. ValueError if the port is taken."""
    at = os.environ.get(BIND_VARIABLE)
    host, port = host_and_port(at, BIND_VARIABLE) if at else host_and_port(place.coordinator)
    try:
        return listen(host, place.count, port)
    except OSError as error:
        raise ValueError(
            f"{f'{BIND_VARIABLE}={at}' if at else place.source}: process 0 cannot listen at port {port} of "
            f"{socket.gethostname()}: {os.strerror(error.errno or 0)}; {place.other_port}"
        ) from error


def _free_port(host: str) -> socket.socket:
    """Returns a socket that holds a free port for jax's service on this machine, to which others connect at `host`.

    It does not listen. gRPC binds the same port (SO_REUSEPORT), and no other program can until the socket is closed.
    """
    if at := os.environ.get(BIND_VARIABLE):
        host = host_and_port(at, BIND_VARIABLE)[0]
    return bind(to_listen_at(host))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _connect(coordinator: str) -> socket.socket:
    connection = socket.create_connection(host_and_port(coordinator), timeout=_TRY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _send(connection: socket.socket, message: Mapping[str, object]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> JsonObject:
    line = handshake.read_line(connection, time.monotonic() + _TRY_S, _HELLO_BYTES)
    return json_objects.parse(line, "a message", lenient=True)


def _is_open(connection: socket.socket) -> bool:
    """Whether a connection on which the other end sends nothing is still open."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
