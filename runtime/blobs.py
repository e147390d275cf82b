"""Bytes on request between the processes of a run: parts of snapshots, and token shards.

A process serves each connection that `handshake.py` has authenticated in a separate thread. A request is a line of
JSON, optionally followed by bytes. The answer is {"wait": PROGRESS} every quarter of a second, then {"size": N,
"xxh3": H} and N bytes, or {"error": WHY}. A malformed request closes the connection. PROGRESS is any JSON value. A
caller may assume that a process hangs if its value does not change for too long.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import Any, BinaryIO, Self

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from runtime.addresses import listen, own_address
from runtime.files import json_objects
from runtime.files.json_objects import JsonMapping, JsonObject
from runtime.handshake import Acceptor, connect

WAIT_S = 0.25  # less than any allowed silence
_BLOCK_BYTES = 1 << 20
_LINE_BYTES = 1 << 26  # longest line, which lists all pieces of a snapshot
_HASHED_BYTES = 1 << 18  # bytes hashed at once, while they are in a cache

# (request, requesting process, stream of the bytes after the request) -> bytes of the answer
RequestHandler = Callable[[JsonObject, int, BinaryIO], memoryview]


class PeerError(OSError):
    """Another process, named by the text, does not send or accept the bytes it should."""


class RefusedError(PeerError):
    """The other process answered with an error."""


class StalledError(PeerError):
    """The other process answers that it needs longer, but makes no progress."""


@dataclass(frozen=True, kw_only=True)
class BlobAddress:
    """The address of a process' service."""

    process: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"process {self.process} at {self.host}:{self.port}"


class BlobService:
    """Answers the requests of the other processes until it is closed."""

    def __init__(
        self,
        purpose: str,
        answer: RequestHandler,
        *,
        process: int,
        count: int,
        token: str,
        progress: Callable[[], object] = lambda: True,
    ) -> None:
        """Listens for `count` processes at a port that the system chooses.

        An OSError, LookupError or RuntimeError of `answer` is sent to the caller. Any other exception closes the
        connection. `progress` returns a JSON value that changes while this process makes progress.
        """
        host = own_address()
        listener = listen(host, count)
        self.address = BlobAddress(process=process, host=host, port=listener.getsockname()[1])
        self._answer, self._progress = answer, progress
        self._acceptor = Acceptor(listener, token, purpose, count, self.serve)

    def close(self) -> None:
        """Stops the service."""
        self._acceptor.close()

    def serve(self, connection: socket.socket, process: int, host: str) -> None:
        """Answers the requests of a process on `host` until the connection is closed."""
        del host
        # Errors while closing are suppressed too, because closing sends data that the other process no longer reads.
        with (
            suppress(OSError, ValueError, LookupError, TypeError),
            connection,
            connection.makefile("rwb") as stream,
            _WaitMessages(stream, self._progress) as waiting,
        ):
            while line := stream.readline(_LINE_BYTES):
                request = json_objects.parse(line, "the request", lenient=True)
                with waiting.answering():
                    header, content = self._answered(request, process, stream)
                _say(stream, header)
                stream.write(content)
                stream.flush()

    def _answered(self, request: JsonObject, process: int, stream: Any) -> tuple[JsonObject, memoryview]:
        """Returns the header and the bytes of the answer."""
        try:
            content = self._answer(request, process, stream)
        except (OSError, LookupError, RuntimeError) as error:
            return {"error": f"{type(error).__name__}: {error}"}, memoryview(b"")
        return {"size": content.nbytes, "xxh3": xxh3_64_intdigest(content)}, content


class Connection:
    """A connection to another process' service; a context manager."""

    def __init__(
        self, address: BlobAddress, token: str, purpose: str, me: int, *, silence_s: float, stall_s: float = inf
    ) -> None:
        """Connects as process `me`. PeerError if the other process cannot be reached.

        The other process may be silent for `silence_s`, and report no progress for `stall_s`.
        """
        self._address, self._stall_s = address, stall_s
        with self._explained():
            self._socket = connect(address.host, address.port, token, purpose, me, silence_s)
            self._socket.settimeout(silence_s)
            self._stream = self._socket.makefile("rwb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, request: JsonMapping, size: int, *, wait_s: float = inf, receive_s: float = inf) -> Iterator[bytes]:
        """Yields the requested `size` bytes in blocks. PeerError if that fails or exceeds a time limit.

        `wait_s` limits the time until the answer begins, `receive_s` the time for its bytes.
        """
        with self._explained():
            expected = self._announced(request, size, wait_s)
            left, found, until_s = size, xxh3_64(), time.monotonic() + receive_s
            while left:
                block = self._stream.read1(min(left, _BLOCK_BYTES))
                if not block:
                    raise ConnectionError("it closed the connection")
                left -= len(block)
                found.update(block)
                yield block
                if time.monotonic() > until_s:
                    raise TimeoutError("it sends too slowly")
            _check(found, expected)

    def get_whole(
        self, request: Mapping[str, object], size: int, progress: Callable[[], object] = lambda: None
    ) -> memoryview:
        """Returns the requested `size` bytes, which are copied once. PeerError if that fails.

        `progress` is called for each block, and while the other process reports that the bytes are not ready.
        """
        with self._explained():
            expected, found = self._announced(request, size, inf, progress), xxh3_64()
            content = np.empty(size, np.uint8).data
            for start in range(0, size, _HASHED_BYTES):
                block = content[start : start + _HASHED_BYTES]
                if self._stream.readinto(block) < len(block):
                    raise ConnectionError("it closed the connection")
                found.update(block)
                progress()
            _check(found, expected)
            return content

    def ask(self, request: JsonMapping, most: int, progress: Callable[[], object] = lambda: None) -> bytes:
        """Returns an answer of at most `most` bytes.

        PeerError if that fails. `progress` is called as in `get_whole`.
        """
        with self._explained():
            _say(self._stream, request)
            size = self._answer(progress=progress)["size"]
            if not 0 <= size <= most:
                raise ConnectionError(f"it announces {size} bytes, more than {most}")
            answer = self._stream.read(size)
            if len(answer) < size:
                raise ConnectionError("it closed the connection")
            return answer

    def put(self, request: JsonMapping, contents: Iterable[memoryview]) -> None:
        """Sends bytes after a request, and returns when the other process has read them. PeerError if that fails."""
        with self._explained():
            _say(self._stream, request)
            for content in contents:
                self._stream.write(content)
            self._stream.flush()
            self._answer()

    def close(self) -> None:
        """Closes the connection, even if the other process no longer reads the remaining data."""
        with self._socket, suppress(OSError):
            self._stream.close()

    def _announced(
        self, request: Mapping[str, object], size: int, wait_s: float, progress: Callable[[], object] = lambda: None
    ) -> int:
        """Requests `size` bytes, and returns their hash when the answer begins."""
        _say(self._stream, request)
        answer = self._answer(wait_s, progress)
        if answer["size"] != size:
            raise ConnectionError(f"it announces {answer['size']} bytes of {size}")
        return answer.get("xxh3", -1)

    def _answer(self, wait_s: float = inf, progress: Callable[[], object] = lambda: None) -> JsonObject:
        until_s, check_progress = time.monotonic() + wait_s, Stall(self._stall_s)
        while line := self._stream.readline(_LINE_BYTES):
            answer = json_objects.parse(line, "its answer")
            if "error" in answer:
                raise RefusedError(str(answer["error"]))
            if "wait" not in answer:
                if type(answer.get("size")) is not int:
                    raise ConnectionError("it announces no bytes")
                return answer
            if time.monotonic() > until_s:
                raise TimeoutError("it has not answered in time")
            check_progress(answer["wait"])
            progress()
        raise ConnectionError("it closed the connection")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            kind = next((kind for kind in (RefusedError, StalledError) if isinstance(error, kind)), PeerError)
            raise kind(f"{self._address}: {error}") from error


class Stall:
    """Detects a lack of progress of another process: the value that it sends with each "wait" stays the same."""

    def __init__(self, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s, self._clock = stall_s, clock
        self._value: object = None
        self._since_s = clock()

    def __call__(self, value: object) -> None:
        """Takes the newest value. StalledError if it has not changed for too long."""
        now_s = self._clock()
        if value != self._value:
            self._value, self._since_s = value, now_s
        elif now_s - self._since_s > self._stall_s:
            raise StalledError(f"it makes no progress, for {self._stall_s:g} s by now")


class _WaitMessages:
    """A context manager that sends "wait" on a connection at intervals while an answer is being made."""

    def __init__(self, stream: Any, progress: Callable[[], object]) -> None:
        self._stream, self._progress = stream, progress
        self._lock, self._is_answering, self._is_over = threading.Lock(), False, threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """The answer is made in this context. No "wait" is sent after it."""
        with self._lock:
            self._is_answering = True
        try:
            yield
        finally:
            with self._lock:
                self._is_answering = False

    def _run(self) -> None:
        with suppress(OSError, ValueError):
            while not self._is_over.wait(WAIT_S):
                with self._lock:
                    if self._is_answering:
                        _say(self._stream, {"wait": self._progress()})


def _check(found: xxh3_64, expected: int) -> None:
    if found.intdigest() != expected:
        raise ConnectionError("the bytes that came do not match their hash")


def _say(stream: Any, message: JsonMapping) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()
