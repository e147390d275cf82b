"""How the processes of a run meet for their heartbeats: all connect to process 0, at a port that its system chooses."""

import secrets
import socket
import time
from typing import Any

import jax

from checkpointing.agreement import from_process_zero, new_ticket
from elastic.heartbeat import Peer

_CONNECT_S = 60.0
_ACCEPT_S = _CONNECT_S + 10.0  # the others give up first: when process 0 is gone, jax aborts them
_LINE_BYTES, _LINE_S = 1000, 5.0  # the most for what a process says of itself
_WELCOME = b"welcome\n"  # nothing is sent before it: what follows are whole lines


def meet(coordinator: str | None) -> list[Peer]:
    """Returns the connections of this process of a joined run, none if it is alone; every process must call it.

    `coordinator` is HOST:PORT of process 0 as the user gave it. OSError if a process cannot be reached.
    """
    if jax.process_count() == 1:
        return []
    listener = listen(jax.process_count() - 1) if jax.process_index() == 0 else None

    def where() -> list[Any]:
        assert listener
        host = coordinator.rpartition(":")[0].strip("[]") if coordinator else own_address()
        return [host, listener.getsockname()[1], secrets.token_hex(16), socket.gethostname()]

    *address, token, host = from_process_zero(new_ticket("heartbeat"), where)
    if listener:
        with listener:
            return accept(listener, token, jax.process_count() - 1)
    return [connect(address[0], address[1], token, host, jax.process_index())]


def listen(count: int) -> socket.socket:
    """Returns a socket for `count` processes to connect to, at a port that the system chooses."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=count)


def accept(listener: socket.socket, token: str, count: int) -> list[Peer]:
    """Returns the `count` processes that connected with the token; whoever else connects is sent away."""
    peers: dict[int, Peer] = {}
    deadline_s = time.monotonic() + _ACCEPT_S
    while len(peers) < count:
        listener.settimeout(max(0.0, deadline_s - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except (TimeoutError, BlockingIOError):
            missing = ", ".join(str(i) for i in range(1, count + 1) if i not in peers)
            raise TimeoutError(f"process {missing} did not connect to process 0 for heartbeats; a firewall?") from None
        try:
            said, process, host = _read_line(connection).split()
            if not secrets.compare_digest(said, token.encode()):
                raise ValueError("a stranger")
            connection.sendall(_WELCOME)
        except (OSError, ValueError):
            connection.close()
            continue
        connection.settimeout(None)
        peers[int(process)] = Peer(process=int(process), host=host.decode(), connection=connection)
    return [peers[process] for process in sorted(peers)]


def connect(address: str, port: int, token: str, host: str, me: int) -> Peer:
    """Returns process 0, which listens at `address` and runs on `host`."""
    cannot = f"process {me} cannot reach process 0 at {address}:{port} for heartbeats"
    try:
        connection = socket.create_connection((address, port), timeout=_CONNECT_S)
        connection.sendall(f"{token} {me} {socket.gethostname()}\n".encode())
        welcome = _read_line(connection, _CONNECT_S)
    except OSError as error:
        raise OSError(f"{cannot}: {error}; a firewall?") from error
    if welcome != _WELCOME:
        connection.close()
        raise OSError(f"{cannot}: it closed the connection")
    connection.settimeout(None)
    return Peer(process=0, host=host, connection=connection)


def _read_line(connection: socket.socket, patience_s: float = _LINE_S) -> bytes:
    """Returns a line, and reads nothing behind it; b"" if it is cut or too long. OSError if it takes too long."""
    line, until_s = b"", time.monotonic() + patience_s
    while len(line) < _LINE_BYTES:
        connection.settimeout(max(1e-3, until_s - time.monotonic()))
        byte = connection.recv(1)
        line += byte
        if byte == b"\n":
            return line
        if not byte:
            break
    return b""


def own_address() -> str:
    """Returns this node's address where its own name gives one that others can use, else the name."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except socket.gaierror:  # others may know it; those who do not will say so
        return name
    return name if address.startswith("127.") else address
