"""Token shards from node to node: who downloads a shard is decided by rendezvous hashing, and the others ask that node.

A peer that is dead or slow is passed over, and not asked again for a while.
"""

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from input_pipeline.shard_index import Shard
from input_pipeline.store import PATIENCE_S
from runtime.blobs import Address, Connection, PeerError, RefusedError

ASKED = 3  # nodes, besides the one that would download it, that are asked whether they have a shard
AVOIDED_S = 30.0  # a peer that failed is not asked again for so long
PURPOSE = "shards"
_SILENCE_S = 10.0  # without a byte or a line a peer is slow
_LEAST_BYTES_PER_S = 1 << 18  # a peer that sends less, after _SILENCE_S, is slow


def rendezvous(key: str, among: Sequence[Any]) -> list[Any]:
    """Returns `among` in the order of their hashes with `key`: who leaves or joins moves its own keys alone.

    (Highest random weight: Thaler and Ravishankar 1998.)
    """
    return sorted(among, key=lambda one: hashlib.sha256(f"{key} {one}".encode()).digest(), reverse=True)


class Peers:
    """The other nodes of the run, for one process of it."""

    def __init__(self, me: int, nodes: Sequence[str], addresses: Sequence[Address], token: str) -> None:
        """`nodes` and `addresses` are those of each process; processes that share a cache are one node."""
        self._me, self._token, self.node = me, token, nodes[me]
        self.addresses: dict[str, list[Address]] = {}
        for node, address in zip(nodes, addresses, strict=True):
            self.addresses.setdefault(node, []).append(address)
        self.nodes = tuple(self.addresses)
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
        addresses = self.addresses[node]
        address = addresses[self._me % len(addresses)]
        request, transfer_s = {"shard": shard.sha256, "download": download}, shard.size_bytes / _LEAST_BYTES_PER_S
        limits = {"wait_s": PATIENCE_S + transfer_s, "receive_s": _SILENCE_S + transfer_s}
        try:
            with (
                open(to, "wb") as file,
                Connection(address, self._token, PURPOSE, self._me, silence_s=_SILENCE_S) as connection,
            ):
                for block in connection.get(request, shard.size_bytes, **limits):
                    file.write(block)
        except PeerError as error:
            if download or not isinstance(error, RefusedError):  # it could not, and would fail for the next one too
                self.avoid(node)
            raise

    def avoid(self, node: str) -> None:
        """Asks a node no more for a while."""
        self._avoided[node] = time.monotonic() + AVOIDED_S
