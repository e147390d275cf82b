"""Opens the connections for the heartbeats: all processes connect to process 0, at a port that its system chooses."""

import queue
import socket
import time
from typing import Any

import jax

from runtime import handshake
from runtime.addresses import host_and_port, listen, own_address
from runtime.consensus import broadcast, new_key
from runtime.heartbeat import Peer

_PURPOSE = "heartbeats"
_CONNECT_S = 60.0
_ACCEPT_S = _CONNECT_S + 10.0  # longer than the others try: when process 0 exits, jax aborts them


def rendezvous(coordinator: str | None, token: str) -> list[Peer]:
    """Returns this process' connections for heartbeats; none in a run of one process. Every process must call it.

    `coordinator` is HOST:PORT of process 0, as the user gave it. OSError if a process cannot be reached.
    """
    if jax.process_count() == 1:
        return []
    listener: socket.socket | None = None

    def where() -> list[Any]:
        nonlocal listener
        host = host_and_port(coordinator)[0] if coordinator else own_address()
        listener = listen(host, jax.process_count() - 1)
        return [host, listener.getsockname()[1], socket.gethostname()]

    address, port, host = broadcast(new_key("heartbeat"), where)
    if listener:
        return accept(listener, token, jax.process_count() - 1)
    return [connect(address, port, token, host, jax.process_index())]


def accept(listener: socket.socket, token: str, count: int) -> list[Peer]:
    """Waits until `count` processes have authenticated, returns them, and closes `listener`."""
    admitted: queue.Queue[Peer] = queue.Queue()

    def admit(connection: socket.socket, process: int, host: str) -> None:
        admitted.put(Peer(process=process, host=host, connection=connection))

    acceptor = handshake.Acceptor(listener, token, _PURPOSE, count, admit)
    peers: dict[int, Peer] = {}
    deadline_s = time.monotonic() + _ACCEPT_S
    try:
        while len(peers) < count:
            peer = admitted.get(timeout=max(0.0, deadline_s - time.monotonic()))
            peers[peer.process] = peer
    except queue.Empty:
        missing = ", ".join(str(i) for i in range(1, count + 1) if i not in peers)
        raise TimeoutError(f"process {missing} did not connect to process 0 for heartbeats; a firewall?") from None
    finally:
        acceptor.close()
    return [peers[process] for process in sorted(peers)]


def connect(address: str, port: int, token: str, host: str, me: int) -> Peer:
    """Connects to process 0, which listens at `address` and runs on `host`, and returns it."""
    try:
        connection = handshake.connect(address, port, token, _PURPOSE, me, _CONNECT_S)
    except OSError as error:
        cannot = f"process {me} cannot reach process 0 at {address}:{port} for heartbeats"
        raise OSError(f"{cannot}: {error}; a firewall?") from error
    connection.settimeout(None)
    return Peer(process=0, host=host, connection=connection)
