"""The sources of a token shard: memory, local disk, another node, the store. The cost of each access is counted.

Rendezvous hashing decides which node downloads a shard, and the other nodes request it from that node. A dead or slow
peer is skipped, and receives no further requests for a while.
"""

import hashlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from input_pipeline.cache import explained
from input_pipeline.shard_cache import DamagedShardError, ShardCache
from input_pipeline.shard_index import Shard
from input_pipeline.store import FETCHES, PATIENCE_S, StoreError
from runtime.blobs import BlobAddress, Connection, PeerError, RefusedError

Candidate = TypeVar("Candidate")
THREADS = 4  # read-ahead threads
CLOSE_S = 5.0  # time to wait for their end
ASKED = 3  # number of nodes to ask for a copy, in addition to the node that would download the shard
AVOIDED_S = 30.0  # pause of requests to a peer that failed
PURPOSE = "shards"
_SILENCE_S = 10.0  # a peer that sends neither a byte nor a line for that long is slow
_LEAST_BYTES_PER_S = 1 << 18  # a peer that sends less, after _SILENCE_S, is slow


class DamagedObjectError(StoreError):
    """An object of the store differs from its entry in the index."""


@dataclass
class Counters:
    """Read counters of this process since its start. Their keys in metrics.jsonl are these names after `data_`."""

    memory_hits: int = 0  # windows whose shard was open
    disk_hits: int = 0  # shards opened from the local disk
    peer_hits: int = 0  # shards received from another node
    store_hits: int = 0  # shards downloaded from the store
    peer_bytes: int = 0
    store_bytes: int = 0
    shard_wait_s: float = 0.0  # time that windows waited for shards
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **amounts: float) -> None:
        """Adds amounts to the counters of these names."""
        with self.lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def scalars(self) -> dict[str, float]:
        """Returns all counters by their keys in metrics.jsonl."""
        return {f"data_{name}": value for name, value in vars(self).items() if name != "lock"}


def rendezvous(key: str, among: Sequence[Candidate]) -> list[Candidate]:
    """Returns `among` ordered by hashes with `key`. A node that leaves or joins changes only the keys assigned to it.

    Source: highest random weight, Thaler and Ravishankar 1998.
    """
    return sorted(among, key=lambda one: hashlib.sha256(f"{key} {one}".encode()).digest(), reverse=True)


def maker_of(name: str, nodes: Iterable[str]) -> str:
    """Returns the node that tokenises a file."""
    return rendezvous(name, sorted({*nodes}))[0]


class Peers:
    """The other nodes of the run, from the view of one process."""

    def __init__(
        self, me: int, nodes: Sequence[str], addresses: Sequence[BlobAddress], token: str, *, tokenised: bool = False
    ) -> None:
        """Takes the node and the address of each process. Processes that share a cache are one node.

        `tokenised`: the nodes have made the shards themselves (node `maker_of(name)` each), and the store has none.
        """
        self._tokenised = tokenised
        self._me, self._token, self.node = me, token, nodes[me]
        self.addresses: dict[str, list[BlobAddress]] = {}
        for node, address in zip(nodes, addresses, strict=True):
            self.addresses.setdefault(node, []).append(address)
        self.nodes = tuple(self.addresses)
        self._avoided: dict[str, float] = {}  # end of the avoidance, by node

    def to_ask(self, shard: Shard, *, downloads: bool) -> list[tuple[str, bool]]:
        """Returns the nodes to ask for a shard, in order, and whether each should download it if necessary.

        Nodes before this node in rendezvous order should. With `downloads`, this node must download the shard for
        another node, so it only asks for existing copies. If no node has the shard, this node downloads it. The node
        that tokenised it is asked first.
        """
        order = rendezvous(shard.sha256, self.nodes)
        mine = order.index(self.node)
        before, behind = order[:mine], order[mine + 1 :]
        maker = maker_of(shard.name, self.nodes)
        made = [(maker, False)] if self._tokenised and maker != self.node else []
        if downloads:
            return made + [(node, False) for node in [*before, *behind][:ASKED]]
        return made + [(node, True) for node in before] + [(node, False) for node in behind[:ASKED]]

    def fetch(self, node: str, shard: Shard, to: Path, *, download: bool) -> None:
        """Writes a node's copy of a shard to a file. PeerError if the node does not send it, or is avoided."""
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
            if download or not isinstance(error, RefusedError):  # it failed, and would fail for the next shard too
                self.avoid(node)
            raise

    def avoid(self, node: str) -> None:
        """Sends a node no requests for a while."""
        self._avoided[node] = time.monotonic() + AVOIDED_S


class Tiers:
    """Provides token shards from the local disk, another node, or `download`, in this order."""

    def __init__(
        self, cache: ShardCache, download: Callable[[Shard, Path], int], url_of: Callable[[Shard], str]
    ) -> None:
        """`download` writes a shard to a file and returns the bytes read from the store. `url_of` gives its URL."""
        self.counters = Counters()
        self._cache, self._download, self._url_of = cache, download, url_of
        self.peers: Peers | None = None

    def get(self, shard: Shard) -> np.ndarray:
        """Returns the tokens [N], memory-mapped. Raises the errors of the cache and the store."""
        with explained(self._cache.folder):
            return self._get(shard, downloads=False)

    def content(self, shard: Shard, download: bool) -> memoryview | None:
        """Returns the bytes of a shard for another node; None if it is not on this node and `download` is false."""
        found = self._cache.content(shard)
        if download and found is None:
            self._get(shard, downloads=True)
            found = self._cache.content(shard)
        return found

    def _get(self, shard: Shard, *, downloads: bool) -> np.ndarray:
        tokens = self._cache.open(shard)
        if tokens is None:
            with self._cache.locked(shard.sha256):
                tokens = self._cache.open(shard)  # another process may have fetched it meanwhile
                if tokens is None:
                    return self._fetch(shard, downloads=downloads)
        self.counters.add(disk_hits=1)
        return tokens

    def _fetch(self, shard: Shard, *, downloads: bool) -> np.ndarray:
        """Returns the tokens of a shard that is not on the disk; the caller holds its lock."""
        if (tokens := self._from_peer(shard, downloads=downloads)) is not None:
            self.counters.add(peer_hits=1, peer_bytes=shard.size_bytes)
            return tokens
        sizes: list[int] = []
        damage = ""
        for _ in range(FETCHES):
            try:
                tokens = self._cache.add(shard, lambda path: sizes.append(self._download(shard, path)))
                self.counters.add(store_hits=1, store_bytes=sum(sizes))
                return tokens
            except DamagedShardError as error:
                damage = str(error)
        raise DamagedObjectError(
            f"{self._url_of(shard)}: the tokens of {shard.name} are damaged: {damage}, {FETCHES} times; restore the "
            "object, or prepare the set again"
        )

    def _from_peer(self, shard: Shard, *, downloads: bool) -> np.ndarray | None:
        """Returns the tokens from the first node that sends them; None if no node does."""
        if not (peers := self.peers):
            return None
        for node, download in peers.to_ask(shard, downloads=downloads):
            fill = partial(peers.fetch, node, shard, download=download)
            try:
                return self._cache.add(shard, fill)
            except PeerError as error:
                logging.getLogger(__name__).debug("shard %s not from node %s: %s", shard.name, node, error)
            except DamagedShardError:
                peers.avoid(node)
        return None


class OpenShards:
    """The open shards of this process, closed in least-recently-used order, and a reader ahead."""

    def __init__(self, tiers: Tiers, most: int) -> None:
        """Keeps up to `most` shards open. THREADS threads open the shards that `read_ahead` names."""
        self._tiers, self._most = tiers, most
        # by hash: shards that are open, that a thread is opening, or whose fetches repeatedly failed
        self._found: OrderedDict[str, Future[np.ndarray]] = OrderedDict()
        self._now: deque[Shard] = deque()  # to be opened first
        self._later: deque[Shard] = deque()
        self._urgent: set[str] = set()  # hashes of the shards needed now, until a thread has processed them
        self._changed = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []

    def get(self, shard: Shard) -> np.ndarray:
        """Returns the tokens [N] of a shard, after waiting for them if necessary."""
        with self._changed:
            if self._is_open(shard):
                self._tiers.counters.add(memory_hits=1)
                return self._found[shard.sha256].result()
        before_s = time.perf_counter()
        try:
            return self._obtain(shard)
        finally:
            self._tiers.counters.add(shard_wait_s=time.perf_counter() - before_s)

    def read_ahead(self, now: Sequence[Shard], later: Sequence[Shard]) -> None:
        """Opens shards in the background, first `now`, then `later`, and cancels the previous request."""
        with self._changed:
            self._now = deque(shard for shard in now if not self._is_open(shard))
            self._later = deque(shard for shard in later if not self._is_open(shard))
            self._urgent = {shard.sha256 for shard in self._now}
            self._changed.notify_all()
            if not self._threads and not self._closed:
                self._threads = [
                    threading.Thread(target=self._work, daemon=True, name="read-ahead") for _ in range(THREADS)
                ]
                for thread in self._threads:
                    thread.start()

    def stop(self) -> None:
        """Lets the threads start no further shards."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads. Close the store first, because they may wait for it."""
        self.stop()
        until_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _is_open(self, shard: Shard) -> bool:
        """Whether a shard is open. If so, marks it as the most recently used shard."""
        found = self._found.get(shard.sha256)
        if found is None or not found.done() or found.exception():
            return False
        self._found.move_to_end(shard.sha256)
        return True

    def _obtain(self, shard: Shard) -> np.ndarray:
        with self._changed:
            found = self._found.get(shard.sha256)
            if is_mine := found is None:
                found = self._found[shard.sha256] = Future()
        if is_mine:
            try:
                found.set_result(self._tiers.get(shard))
            except BaseException as error:
                with self._changed:
                    if not isinstance(error, DamagedObjectError):  # the next caller tries again
                        del self._found[shard.sha256]
                found.set_exception(error)
            with self._changed:
                done = [key for key, one in self._found.items() if one.done()]
                for key in done[: max(0, len(done) - self._most)]:
                    del self._found[key]
        return found.result()

    def _work(self) -> None:
        while True:
            with self._changed:  # later shards do not share the link with shards needed now
                self._changed.wait_for(lambda: self._closed or self._now or (self._later and not self._urgent))
                if self._closed:
                    return
                shard = (self._now or self._later).popleft()
            try:
                self._obtain(shard)
            except Exception as error:  # the caller that needs the shard reports it
                logging.getLogger(__name__).debug("shard %s not read ahead: %s", shard.name, error)
            with self._changed:
                self._urgent.discard(shard.sha256)
                self._changed.notify_all()
