"""Mutual authentication of the processes of a run: each end of a connection proves that it knows the run's token.

    server: CHALLENGE                         random
    client: PROCESS HOST CHALLENGE PROOF      the client's process number and host, and its own challenge
    server: PROOF

A proof is an HMAC-SHA256 keyed with the token, over the side (client or server), the purpose of the connection, both
challenges, and the client's number and host. The token is never sent: every process reads it from WORKDIR/token (mode
0600).
"""

import contextlib
import hmac
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax

from runtime.consensus import all_gather, broadcast, new_key
from runtime.files import locks, private

FILE_NAME = "token"
STRANGERS = 64  # concurrent unauthenticated connections, in addition to one per process of the run
_TOKEN = re.compile(r"[0-9a-f]{64}")
_LINE_BYTES = 1000
Handshake = Callable[[socket.socket, str, str], tuple[int, str]]  # (connection, token, purpose) -> (process, host)
_HANDSHAKE_S = 10.0  # limit for the whole handshake
_RETRY_S = 0.1
_WRITTEN_S = 1.0  # limit between the creation of a token's file and its content
# options of a connection that ends when its other end has not answered for two minutes
_ALIVE = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 60,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 10,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 6,
}


def shared_token(workdir: Path) -> str:
    """Returns the token of a run. Process 0 creates a missing token. Every process must call it.

    Raises ValueError in every process if one of them cannot read the token, or if other users could read it.
    """
    broadcast(new_key("token"), lambda: _make_token(workdir / FILE_NAME))
    token = error = ""
    try:
        token = read_token(workdir, jax.process_index())
    except ValueError as failed:
        error = str(failed)
    errors = [said for said in all_gather(new_key("token-read"), error or None) if said]
    if errors:
        raise ValueError(errors[0])
    return token


def make_token(workdir: Path) -> str:
    """Returns the token of a run, and creates a missing token. Only process 0 may call it."""
    _make_token(workdir / FILE_NAME)
    return read_token(workdir, 0)


def read_token(workdir: Path, process: int) -> str:
    """Returns the existing token of a run. ValueError if `process` cannot read it, or if other users could."""
    file = workdir / FILE_NAME
    try:
        return _read_token(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"process {process} on {socket.gethostname()} cannot use {file}: {error}") from error


def _make_token(file: Path) -> None:
    """Writes a token if the file is missing, or empty because an attempt was killed. Attempts may do this concurrently.

    One of them creates the file, even on file systems without locks, and the others briefly wait for its token.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            opened = open(file, "x+", opener=private.opener)  # noqa: SIM115 (closed below)
        except FileExistsError:
            until_s = time.monotonic() + _WRITTEN_S
            while not file.stat().st_size and time.monotonic() < until_s:
                time.sleep(_RETRY_S)
            if file.stat().st_size:
                return
            opened = open(file, "r+", opener=private.opener)  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ValueError(f"{file} cannot be made ({error.strerror}); choose another --workdir") from error
    with opened:
        with contextlib.suppress(locks.NoLocksError):
            locks.take(opened.fileno())
        if not opened.read():
            opened.write(secrets.token_hex(32))


def _read_token(file: Path) -> str:
    """Returns the token. ValueError if the file cannot be read, if other users may read it, or if it has no token."""
    try:
        with file.open() as opened:
            mode = os.fstat(opened.fileno()).st_mode
            token = opened.read(1000)
    except OSError as error:
        raise ValueError(f"{error.strerror}; all processes need the same --workdir, on a shared file system") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(
            f"others may read it (mode {stat.S_IMODE(mode):04o}); remove it: the next attempt makes one; a file system "
            "without modes (SMB) needs the mount option file_mode=0600"
        )
    if not _TOKEN.fullmatch(token):
        raise ValueError("it holds no token; remove it: the next attempt makes one")
    return token


class Acceptor:
    """Accepts connections at a socket in a thread, and passes on connections whose other end knows the token.

    A handshake may take 10 s. At most `STRANGERS` + `count` connections are in a handshake at a time. Another
    connection closes the oldest one, so that idle connections can neither keep processes out nor exhaust the file
    descriptors.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        purpose: str,
        count: int,
        admitted: Callable[[socket.socket, int, str], None],
        *,
        handshake: Handshake | None = None,
    ) -> None:
        """`admitted` receives, in a separate thread, a connection and the number and host of its other process.

        `handshake` replaces `admit`.
        """
        self._listener, self._token, self._purpose, self._admitted = listener, token, purpose, admitted
        self._handshake = handshake or admit
        self._at_most = STRANGERS + count
        self._strangers: list[socket.socket] = []  # connections in a handshake, oldest first
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name=f"acceptor for {purpose}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops accepting connections."""
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)  # this ends `accept`
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or out of file descriptors until a handshake times out
                time.sleep(_RETRY_S)
                continue
            with self._lock:
                self._strangers.append(connection)
                if len(self._strangers) > self._at_most:
                    with contextlib.suppress(OSError):  # already closed; otherwise its thread closes it
                        self._strangers.pop(0).shutdown(socket.SHUT_RDWR)
            try:
                threading.Thread(target=self._meet, args=(connection,), daemon=True).start()
            except RuntimeError:  # no more threads until others end
                self._forget(connection)
                connection.close()

    def _meet(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option, value in _ALIVE.items():  # a vanished host sends nothing, so waiting would never end
                connection.setsockopt(*option, value)
            process, host = self._handshake(connection, self._token, self._purpose)
        except (OSError, ValueError):  # errors of unauthenticated peers are not reported
            connection.close()
            return
        finally:
            self._forget(connection)
        self._admitted(connection, process, host)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            if connection in self._strangers:
                self._strangers.remove(connection)


def admit(connection: socket.socket, token: str, purpose: str) -> tuple[int, str]:
    """Returns number and host of the process at the other end. OSError or ValueError if it does not authenticate."""
    until_s, ours = time.monotonic() + _HANDSHAKE_S, secrets.token_hex(16)
    connection.settimeout(_HANDSHAKE_S)
    connection.sendall(f"{ours}\n".encode())
    process, host, theirs, proof = read_line(connection, until_s).split()
    of = (purpose.encode(), ours.encode(), theirs, process, host)
    if not hmac.compare_digest(proof, _proof(token, b"client", *of)):
        raise ConnectionError("a stranger")
    connection.sendall(_proof(token, b"server", *of) + b"\n")
    connection.settimeout(None)
    return int(process), host.decode()


def connect(host: str, port: int, token: str, purpose: str, me: int, patience_s: float) -> socket.socket:
    """Returns an authenticated connection to a process of the run. OSError if that takes longer than `patience_s`."""
    connection = socket.create_connection((host, port), timeout=patience_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send without delay
        introduce(connection, token, purpose, me, patience_s)
    except OSError:
        connection.close()
        raise
    return connection


def introduce(connection: socket.socket, token: str, purpose: str, me: int, patience_s: float) -> None:
    """Authenticates as process `me` of the run. OSError if the other end does not prove that it belongs to the run."""
    until_s, ours = time.monotonic() + patience_s, secrets.token_hex(16).encode()
    theirs = read_line(connection, until_s).strip()
    process, host = b"%d" % me, socket.gethostname().encode()
    of = (purpose.encode(), theirs, ours, process, host)
    connection.sendall(b" ".join((process, host, ours, _proof(token, b"client", *of))) + b"\n")
    if not hmac.compare_digest(read_line(connection, until_s).strip(), _proof(token, b"server", *of)):
        raise ConnectionError("it does not know the run's token")


def _proof(token: str, *of: bytes) -> bytes:
    return hmac.digest(token.encode(), b" ".join(of), "sha256").hex().encode()


def read_line(connection: socket.socket, until_s: float, most: int = _LINE_BYTES) -> bytes:
    """Returns one line, and reads no further. OSError if the line is incomplete, too long, or late."""
    line = b""
    while len(line) < most:
        connection.settimeout(max(1e-3, until_s - time.monotonic()))
        byte = connection.recv(1)
        line += byte
        if byte == b"\n":
            return line
        if not byte:
            break
    raise ConnectionError("it closed the connection")
