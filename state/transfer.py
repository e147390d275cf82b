"""Transfers regions between the processes of a run: for a restore, and for the copies of partners.

A process serves each connection that `runtime/handshake.py` has authenticated in a thread of its own. A request is a
line of JSON, and so is its answer; either may be followed by bytes. A malformed request closes the connection.
"""

import json
import socket
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BufferedIOBase
from typing import Any

import numpy as np

from files import json_objects
from runtime.addresses import listen, own_address
from runtime.handshake import Acceptor, introduce
from state.memory_files import MemoryFolder, SlotFile, SnapshotManifest, as_bytes
from state.owned_shards import Region

_PURPOSE = "transfers"
_TIMEOUT_S = 60.0  # for connecting, and for each read of an answer
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Address:
    """The address at which a process serves."""

    process: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"process {self.process} at {self.host}:{self.port}"


class Service:
    """Serves the regions in a folder, and stores copies of partners there, until it is closed."""

    def __init__(self, folder: MemoryFolder, attempt: int, process: int, count: int, token: str) -> None:
        """Listens for `count` processes at a port that the system chooses."""
        host = own_address()
        listener = listen(host, count)
        self.address = Address(process=process, host=host, port=listener.getsockname()[1])
        self._answers = _Answers(folder, attempt)
        self._acceptor = Acceptor(listener, token, _PURPOSE, count, self._answers.serve)

    def keep_for(self, processes: Iterable[int]) -> None:
        """Sets the processes whose copies are accepted."""
        self._answers.keeps_for = frozenset(processes)

    def close(self) -> None:
        """Stops the service."""
        self._acceptor.close()


class Connection:
    """A connection to another process' service."""

    def __init__(self, address: Address, token: str, me: int) -> None:
        """Connects as process `me`. OSError if the other process cannot be reached."""
        self._address = address
        with self._explained():
            self._socket = socket.create_connection((address.host, address.port), timeout=_TIMEOUT_S)
            try:
                introduce(self._socket, token, _PURPOSE, me, _TIMEOUT_S)
            except OSError:
                self._socket.close()
                raise
            self._socket.settimeout(_TIMEOUT_S)
            self._file = self._socket.makefile("rwb")

    def get(self, name: str, number: int, region: Region, dtype: np.dtype) -> np.ndarray:
        """Returns `region`, a part of piece `number` of a snapshot. OSError if the transfer fails."""
        with self._explained():
            self._say_line(json.dumps({"get": name, "number": number, "start": region.start, "shape": region.shape}))
            answer = self._answer()
            content = bytearray(answer["size"])
            if self._file.readinto(content) != len(content):
                raise ConnectionError("it closed the connection")
            if zlib.crc32(content) != answer["crc32"]:
                raise OSError("the bytes that came do not match their hash")
        return np.frombuffer(content, dtype).reshape(region.shape)

    def put(self, folder: MemoryFolder, snapshot: SnapshotManifest, numbers: list[int]) -> None:
        """Sends some pieces of our snapshot to the other process, which stores a copy. OSError if that fails."""
        pieces, offset = [], 0
        for piece in (snapshot.pieces[number] for number in numbers):
            pieces.append(replace(piece, offset=offset))
            offset += piece.size
        with self._explained():
            self._say_line(json.dumps({"put": replace(snapshot, pieces=tuple(pieces)).as_json()}))
            for number in numbers:
                self._file.write(as_bytes(folder.read(snapshot, snapshot.pieces[number])))
            self._file.flush()
            self._answer()

    def close(self) -> None:
        """Closes the connection, even if the other process no longer reads what was to be sent."""
        with self._socket, suppress(OSError):
            self._file.close()

    def _say_line(self, text: str) -> None:
        self._file.write(text.encode() + b"\n")
        self._file.flush()

    def _answer(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise ConnectionError("it closed the connection")
        try:
            answer = json_objects.parse(line, "the answer")
        except ValueError as error:
            raise ConnectionError(str(error)) from error
        if answer.get("error"):
            raise OSError(answer["error"])
        return answer

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(f"{self._address}: {error}") from error


class _Answers:
    """Answers the requests of other processes."""

    def __init__(self, folder: MemoryFolder, attempt: int) -> None:
        self._folder, self._attempt = folder, attempt
        self.keeps_for: frozenset[int] = frozenset()
        self._read: dict[str, SnapshotManifest] = {}
        self._lock = threading.Lock()

    def serve(self, connection: socket.socket, process: int, host: str) -> None:
        """Answers the requests of a process on `host` until the connection is closed."""
        del host
        # The errors of the closing are suppressed too: it sends what the other process no longer reads.
        with suppress(OSError, ValueError, LookupError, TypeError), connection, connection.makefile("rwb") as file:
            while line := file.readline():
                request = json_objects.parse(line, "the request", lenient=True)
                try:
                    part = self.put(request, process, file) if "put" in request else self.get(request)
                    answer = {"error": None, "size": part.nbytes, "crc32": zlib.crc32(part)}
                except (OSError, LookupError) as error:
                    part, answer = memoryview(b""), {"error": f"{type(error).__name__}: {error}"}
                file.write(json.dumps(answer).encode() + b"\n")
                file.write(part)
                file.flush()

    def get(self, request: dict[str, Any]) -> memoryview:
        """Returns the requested part of a piece."""
        name = request["get"]
        with self._lock:
            if name not in self._read:
                self._read = {snapshot.name: snapshot for snapshot in self._folder.snapshots()[0]}
            snapshot = self._read[name]
        piece = snapshot.pieces[request["number"]]
        part = Region(path=piece.region.path, start=tuple(request["start"]), shape=tuple(request["shape"]))
        return as_bytes(self._folder.read(snapshot, piece)[part.within(piece.region)])

    def put(self, request: dict[str, Any], sender: int, content: BufferedIOBase) -> memoryview:
        """Stores a copy of the sender's pieces, which follow in `content`. ValueError if we are not its partner."""
        sent = SnapshotManifest.from_json(request["put"])
        expected = (self._folder.run_id, self._attempt, sender)
        if sender not in self.keeps_for or (sent.run_id, sent.attempt, sent.owner) != expected:
            raise ValueError(f"process {sender} has nothing to keep here as {sent.name} of run {sent.run_id}")
        blocks = _blocks(content, sum(piece.size for piece in sent.pieces))
        try:
            with SlotFile(self._folder.path, sent.name) as file:
                for block in blocks:
                    file.write(memoryview(block))
        except OSError:
            for _ in blocks:  # read the remainder, because the sender reads the answer last
                pass
            raise
        if self._folder.commit(sent).pieces != sent.pieces:
            self._folder.remove([sent.name])
            raise OSError("the bytes that came do not match their hash")
        return memoryview(b"")


def _blocks(content: BufferedIOBase, size: int) -> Iterator[bytes]:
    """Yields the next `size` bytes."""
    while size:
        block = content.read(min(size, _BLOCK_BYTES))
        if not block:
            raise ConnectionError("the sender closed the connection")
        size -= len(block)
        yield block
