"""Transfers parts of snapshots between the processes of a run: for a restore, and for the copies of partners."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import BinaryIO

import numpy as np

from elastic.memory_files import MemoryFolder, Region, SnapshotManifest, as_bytes, laid_out
from runtime.blobs import BlobAddress, Connection
from runtime.files.json_objects import JsonObject

PURPOSE = "transfers"
_SILENCE_S = 60.0
_BLOCK_BYTES = 1 << 20


def connect(address: BlobAddress, token: str, me: int) -> Connection:
    """Returns a connection of process `me` to another process. OSError if the other process cannot be reached."""
    return Connection(address, token, PURPOSE, me, silence_s=_SILENCE_S)


def fetch(
    connection: Connection, snapshot: SnapshotManifest, number: int, region: Region, progress: Callable[[], object]
) -> np.ndarray:
    """Returns `region`, a part of piece `number` of a snapshot. OSError if the transfer fails.

    `progress` is called during the transfer.
    """
    dtype = snapshot.dtypes[region.path]
    request = {"get": snapshot.name, "number": number, "start": region.start, "shape": region.shape}
    content = connection.get_whole(request, math.prod(region.shape) * dtype.itemsize, progress)
    return np.frombuffer(content, dtype).reshape(region.shape)


def send_copy(connection: Connection, folder: MemoryFolder, snapshot: SnapshotManifest, numbers: list[int]) -> None:
    """Sends some pieces of our snapshot to our partner, which stores a copy. OSError if the transfer fails."""
    pieces = [snapshot.pieces[number] for number in numbers]
    contents = (as_bytes(folder.read(snapshot, piece)) for piece in pieces)
    connection.put({"put": replace(snapshot, pieces=laid_out(pieces)).as_json()}, contents)


class Answers:
    """Answers the requests of other processes: sends regions of a folder, and stores copies of partners there."""

    def __init__(self, folder: MemoryFolder, attempt: int) -> None:
        self._folder, self._attempt = folder, attempt
        self.copies_of: frozenset[int] = frozenset()  # processes whose copies are accepted
        self._read: dict[str, SnapshotManifest] = {}

    def __call__(self, request: JsonObject, process: int, content: BinaryIO) -> memoryview:
        """Returns the bytes of the answer. ValueError if the process may not send its content."""
        return self._put(request, process, content) if "put" in request else self._get(request)

    def _get(self, request: JsonObject) -> memoryview:
        name = request["get"]
        if name not in self._read:
            self._read = {snapshot.name: snapshot for snapshot in self._folder.snapshots()[0]}
        snapshot = self._read[name]
        piece = snapshot.pieces[request["number"]]
        part = Region(path=piece.region.path, start=tuple(request["start"]), shape=tuple(request["shape"]))
        return as_bytes(self._folder.read(snapshot, piece)[part.within(piece.region)])

    def _put(self, request: JsonObject, sender: int, content: BinaryIO) -> memoryview:
        sent = SnapshotManifest.from_json(request["put"])
        expected = (self._folder.run_id, self._attempt, sender)
        if sender not in self.copies_of or (sent.run_id, sent.attempt, sent.owner) != expected:
            raise ValueError(f"process {sender} has no copy to store here as {sent.name} of run {sent.run_id}")
        blocks = _blocks(content, sum(piece.size for piece in sent.pieces))
        try:
            self._folder.write(sent.name, map(memoryview, blocks))
        except OSError:
            for _ in blocks:  # read the remainder, because the sender reads the answer last
                pass
            raise
        if self._folder.damaged(sent, lambda: None):
            self._folder.remove([sent.name])
            raise OSError("the bytes that came do not match their hash")
        self._folder.describe(sent)
        return memoryview(b"")


def _blocks(content: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields the next `size` bytes."""
    while size:
        block = content.read(min(size, _BLOCK_BYTES))
        if not block:
            raise ConnectionError("the sender closed the connection")
        size -= len(block)
        yield block
