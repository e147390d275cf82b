"""Token shards from node to node: who downloads a shard is decided by rendezvous hashing, and the others ask that node.

A process serves each connection that `runtime/handshake.py` has authenticated in a thread of its own. A request is a
line of JSON, and so are its answers: any number of {"wait": true}, then {"size": N} and N bytes, or {"absent": WHY}.
A peer that is dead or slow is passed over, and not asked again for a while.
"""

import errno
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from files import json_objects
from input_pipeline.shard_index import Shard
from input_pipeline.store import PATIENCE_S
from runtime.addresses import listen, own_address
from runtime.handshake import Acceptor, introduce

ASKED = 3  # nodes, besides the one that would download it, that are asked whether they have a shard
AVOIDED_S = 30.0  # a peer that failed is not asked again for so long
_PURPOSE = "shards"
_SILENCE_S = 10.0  # without a byte or a line a peer is slow; it sends a line every _WAIT_S while it fetches itself
_WAIT_S = 1.0
_LEAST_BYTES_PER_S = 1 << 18  # a peer that sends less, after _SILENCE_S, is slow
_BLOCK_BYTES = 1 << 20


class PeerError(Exception):
    """A peer does not give a shard."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process of the run: its node (processes that share a cache are one), and where it serves."""

    process: int
    node: str
    host: str
    port: int

    def as_json(self) -> dict[str, Any]:
        """Returns its fields."""
        return asdict(self)


def rendezvous(key: str, among: Sequence[Any]) -> list[Any]:
    """Returns `among` in the order of their hashes with `key`: who leaves or joins moves its own keys alone.

    (Highest random weight: Thaler and Ravishankar 1998.)
    """
    return sorted(among, key=lambda one: hashlib.sha256(f"{key} {one}".encode()).digest(), reverse=True)


class Service:
    """Serves the token shards of this node to the other processes, until it is closed."""

    def __init__(self, process: int, count: int, token: str, node: str) -> None:
        """Listens for `count` processes at a port that the system chooses."""
        host = own_address()
        listener = listen(host, count)
        self.member = Member(process=process, node=node, host=host, port=listener.getsockname()[1])
        self._known: Mapping[str, Shard] = {}
        self._open_file: Callable[[Shard, bool], BinaryIO | None] = lambda *_: None
        self._is_ready = threading.Event()
        self._acceptor = Acceptor(listener, token, _PURPOSE, count, self._serve)

    def serve(self, shards: Sequence[Shard], open_file: Callable[[Shard, bool], BinaryIO | None]) -> None:
        """Sets the shards, and what opens the file of one; its second argument: whether to download it first."""
        self._known, self._open_file = {shard.sha256: shard for shard in shards}, open_file
        self._is_ready.set()

    def close(self) -> None:
        """Stops the service."""
        self._acceptor.close()

    def _serve(self, connection: socket.socket, process: int, host: str) -> None:
        """Answers the requests of a process until the connection is closed."""
        del process, host
        # The errors of the closing are suppressed too: it sends what the other process no longer reads.
        with suppress(OSError, ValueError, LookupError, TypeError), connection, connection.makefile("rwb") as stream:
            while line := stream.readline(1000):
                request = json_objects.parse(line, "the request")
                found = self._found(request["shard"], bool(request["download"]), stream)
                if isinstance(found, str):
                    _say(stream, {"absent": found})
                    continue
                with found:
                    _say(stream, {"size": self._known[request["shard"]].size_bytes})
                    connection.sendfile(found)

    def _found(self, sha256: str, download: bool, stream: Any) -> BinaryIO | str:
        """Returns the open file of a shard, or why there is none; says every second that it takes long."""
        result: list[BinaryIO | str] = []

        def look() -> None:
            self._is_ready.wait()  # the other process may have opened the set before this one
            try:
                result.append(self._open_file(self._known[sha256], download) or "it is not here")
            except Exception as error:
                result.append(str(error) or type(error).__name__)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(_WAIT_S)
        while thread.is_alive():
            _say(stream, {"wait": True})
            thread.join(_WAIT_S)
        return result[0]


class Peers:
    """The other nodes of the run, for one process of it."""

    def __init__(self, me: int, members: Sequence[Member], token: str) -> None:
        self._me, self._token = me, token
        self.node = next(member.node for member in members if member.process == me)
        self._members: dict[str, list[Member]] = {}
        for member in members:
            self._members.setdefault(member.node, []).append(member)
        self.nodes = tuple(self._members)
        self._avoided: dict[str, float] = {}  # until when

    def to_ask(self, shard: Shard, *, downloads: bool) -> list[tuple[str, bool]]:
        """Returns the nodes to ask for a shard, in turn, and whether each shall download it if it has to.

        Those before this node in rendezvous order shall. `downloads`: this node shall itself, on behalf of another
        one, so it only asks who has it. If no node gives it, this node downloads it.
        """
        order = rendezvous(shard.sha256, self.nodes)
        mine = order.index(self.node)
        before, behind = order[:mine], order[mine + 1 :]
        if downloads:
            return [(node, False) for node in [*before, *behind][:ASKED]]
        return [(node, True) for node in before] + [(node, False) for node in behind[:ASKED]]

    def fetch(self, node: str, shard: Shard, to: Path, *, download: bool) -> None:
        """Writes a node's copy of a shard to a file. PeerError if the node does not give it, or is avoided."""
        if time.monotonic() < self._avoided.get(node, 0.0):
            raise PeerError("it failed a moment ago")
        processes = self._members[node]
        member = processes[self._me % len(processes)]
        with open(to, "wb") as file:
            try:
                with socket.create_connection((member.host, member.port), timeout=_SILENCE_S) as connection:
                    introduce(connection, self._token, _PURPOSE, self._me, _SILENCE_S)
                    connection.settimeout(_SILENCE_S)
                    with connection.makefile("rwb") as stream:
                        _say(stream, {"shard": shard.sha256, "download": download})
                        if why := _receive(stream, shard, file):
                            if download:  # it could not, and would fail for the next shard too
                                self.avoid(node)
                            raise PeerError(why)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):  # our disk, and not the peer
                    raise
                self.avoid(node)
                raise PeerError(f"process {member.process} at {member.host}:{member.port}: {error}") from error

    def avoid(self, node: str) -> None:
        """Asks a node no more for a while."""
        self._avoided[node] = time.monotonic() + AVOIDED_S


def _receive(stream: Any, shard: Shard, file: BinaryIO) -> str:
    """Writes the shard that a peer sends, or returns why it has none. OSError if it fails or is slow."""
    until_s = time.monotonic() + PATIENCE_S + shard.size_bytes / _LEAST_BYTES_PER_S
    while "wait" in (answer := _answer(stream)):
        if time.monotonic() > until_s:
            raise TimeoutError("it has not fetched the shard in time")
    if "absent" in answer:
        return str(answer["absent"]) or "it has none"
    if answer.get("size") != shard.size_bytes:
        raise ConnectionError(f"it announces {answer.get('size')} bytes of {shard.size_bytes}")
    left, until_s = shard.size_bytes, time.monotonic() + _SILENCE_S + shard.size_bytes / _LEAST_BYTES_PER_S
    while left:
        block = stream.read1(min(left, _BLOCK_BYTES))
        if not block:
            raise ConnectionError("it closed the connection")
        file.write(block)
        left -= len(block)
        if time.monotonic() > until_s:
            raise TimeoutError("it sends too slowly")
    return ""


def _answer(stream: Any) -> dict[str, Any]:
    line = stream.readline(1000)
    try:
        return json_objects.parse(line, "its answer")
    except ValueError as error:
        raise ConnectionError(str(error) if line else "it closed the connection") from None


def _say(stream: Any, message: Mapping[str, Any]) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()
