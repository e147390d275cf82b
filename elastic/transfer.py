"""Carries boxes between the processes of a run: what a restart misses, and the copy that a partner keeps.

A process serves from threads of its own. A connection starts with the run's token, as the heartbeats' do
(`elastic/meeting.py`); then come requests, a line of JSON each, and bytes where the request or the answer has some.
"""

import json
import secrets
import socket
import socketserver
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedIOBase
from typing import Any

import numpy as np

from elastic.boxes import Box
from elastic.meeting import listen, own_address
from elastic.memory_files import Generation, MemoryFolder, Slots, as_bytes

_TIMEOUT_S = 60.0  # for a connection, and for each part of an answer
_TOKEN_LINE_BYTES = 100
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a process serves."""

    process: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"process {self.process} at {self.host}:{self.port}"


class Service:
    """Serves the boxes in a folder, and keeps copies there, until it is closed."""

    def __init__(self, folder: MemoryFolder, process: int, count: int, token: str) -> None:
        """Listens for `count` processes at a port that the system chooses."""
        listener = listen(count)
        self.address = Address(process=process, host=own_address(), port=listener.getsockname()[1])
        self._server = _Server(listener, _handler(_Answers(folder), token))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the service."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Connection:
    """Asks another process for what it keeps."""

    def __init__(self, address: Address, token: str) -> None:
        """OSError if it cannot be reached."""
        self._address = address
        with self._explained():
            self._socket = socket.create_connection((address.host, address.port), timeout=_TIMEOUT_S)
            self._file = self._socket.makefile("rwb")
            self._say_line(token)

    def get(self, name: str, number: int, box: Box, dtype: np.dtype) -> np.ndarray:
        """Returns the part `box` of piece `number` of a generation. OSError if it does not come."""
        with self._explained():
            self._say_line(json.dumps({"get": name, "number": number, "start": box.start, "shape": box.shape}))
            answer = self._answer()
            content = bytearray(answer["size"])
            if self._file.readinto(content) != len(content):
                raise ConnectionError("it closed the connection")
            if zlib.crc32(content) != answer["crc32"]:
                raise OSError("the bytes that came do not match their hash")
        return np.frombuffer(content, dtype).reshape(box.shape)

    def put(self, folder: MemoryFolder, generation: Generation, numbers: list[int]) -> None:
        """Makes the other process keep some pieces of a whole generation of ours. OSError if it does not."""
        pieces, offset = [], 0
        for piece in (generation.pieces[number] for number in numbers):
            pieces.append(replace(piece, offset=offset))
            offset += piece.size
        with self._explained():
            self._say_line(json.dumps({"put": replace(generation, pieces=tuple(pieces)).as_json()}))
            for number in numbers:
                self._file.write(as_bytes(folder.read(generation, generation.pieces[number])))
            self._file.flush()
            self._answer()

    def close(self) -> None:
        """Ends the connection."""
        self._file.close()
        self._socket.close()

    def _say_line(self, text: str) -> None:
        self._file.write(text.encode() + b"\n")
        self._file.flush()

    def _answer(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise ConnectionError("it closed the connection")
        answer = json.loads(line)
        if answer["error"]:
            raise OSError(answer["error"])
        return answer

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(f"{self._address}: {error}") from error


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, handler: type[socketserver.BaseRequestHandler]) -> None:
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: the one who asks gets the error, or misses the answer; a stranger's is nobody's."""


class _Answers:
    """What a process answers to requests."""

    def __init__(self, folder: MemoryFolder) -> None:
        self._folder = folder
        self._read: dict[str, Generation] = {}
        self._slots: dict[tuple[int, int], Slots] = {}
        self._lock = threading.Lock()

    def get(self, request: dict[str, Any]) -> memoryview:
        """Returns the part of a piece that another process wants."""
        name = request["get"]
        with self._lock:
            if name not in self._read:
                self._read = {generation.name: generation for generation in self._folder.generations()[0]}
            generation = self._read[name]
        piece = generation.pieces[request["number"]]
        part = Box(path=piece.box.path, start=tuple(request["start"]), shape=tuple(request["shape"]))
        return as_bytes(self._folder.read(generation, piece)[part.within(piece.box)])

    def put(self, request: dict[str, Any], content: BufferedIOBase) -> None:
        """Keeps a copy of another process' pieces, which follow in `content`."""
        sent = Generation.from_json(request["put"])
        attempt, owner, _ = sent.name.split("-")
        slots = self._slots.setdefault(
            (int(attempt), int(owner)), Slots(self._folder, attempt=int(attempt), owner=int(owner))
        )
        blocks = _blocks(content, sum(piece.size for piece in sent.pieces))
        try:
            with slots.open() as file:
                for block in blocks:
                    file.write(memoryview(block))
        except OSError:
            for _ in blocks:  # the sender hears of it when it has sent them
                pass
            raise
        kept = self._folder.commit(replace(sent, name=file.name))
        if kept.pieces != sent.pieces:
            self._folder.remove([kept.name])
            raise OSError("the bytes that came do not match their hash")
        slots.committed()


def _blocks(content: BufferedIOBase, size: int) -> Iterator[bytes]:
    """Yields the next `size` bytes."""
    while size:
        block = content.read(min(size, _BLOCK_BYTES))
        if not block:
            raise ConnectionError("the sender closed the connection")
        size -= len(block)
        yield block


def _handler(answers: _Answers, token: str) -> type[socketserver.BaseRequestHandler]:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.connection.settimeout(_TIMEOUT_S)
            if not secrets.compare_digest(self.rfile.readline(_TOKEN_LINE_BYTES), token.encode() + b"\n"):
                return
            self.connection.settimeout(None)
            while line := self.rfile.readline():
                self._answer(json.loads(line))

        def _answer(self, request: dict[str, Any]) -> None:
            try:
                if "put" in request:
                    answers.put(request, self.rfile)
                    part = memoryview(b"")
                else:
                    part = answers.get(request)
            except (OSError, LookupError) as error:
                self._say({"error": f"{type(error).__name__}: {error}"})
                return
            self._say({"error": None, "size": part.nbytes, "crc32": zlib.crc32(part)})
            self.wfile.write(part)

        def _say(self, answer: dict[str, Any]) -> None:
            self.wfile.write(json.dumps(answer).encode() + b"\n")

    return Handler
