"""Where a token shard comes from: memory, the local disk, another node, the store; with what that cost, counted.

Which node downloads a shard is decided by rendezvous hashing, and the others ask that one. A peer that is dead or slow
is passed over, and not asked again for a while.
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
from typing import Any

import numpy as np

from input_pipeline.cache import explained
from input_pipeline.shard_cache import DamagedError, ShardCache
from input_pipeline.shard_index import Shard
from input_pipeline.store import FETCHES, PATIENCE_S, StoreError
from runtime.blobs import Address, Connection, PeerError, RefusedError

THREADS = 4  # that read ahead
CLOSE_S = 5.0  # for which their end is waited for
ASKED = 3  # nodes, besides the one that would download it, that are asked whether they have a shard
AVOIDED_S = 30.0  # a peer that failed is not asked again for so long
PURPOSE = "shards"
_SILENCE_S = 10.0  # without a byte or a line a peer is slow
_LEAST_BYTES_PER_S = 1 << 18  # a peer that sends less, after _SILENCE_S, is slow


class DamagedObjectError(StoreError):
    """An object of the store has another content than the index says."""


@dataclass
class Counters:
    """What this process read since its start; the keys of metrics.jsonl are these names after `data_`."""

    memory_hits: int = 0  # windows whose shard was open
    disk_hits: int = 0  # shards that were opened from the local disk,
    peer_hits: int = 0  # from another node,
    store_hits: int = 0  # from the store
    peer_bytes: int = 0
    store_bytes: int = 0
    shard_wait_s: float = 0.0  # for which windows waited for shards
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **amounts: float) -> None:
        """Adds to some of them."""
        with self.lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def scalars(self) -> dict[str, float]:
        """Returns all by their keys in metrics.jsonl."""
        return {f"data_{name}": value for name, value in vars(self).items() if name != "lock"}


def rendezvous(key: str, among: Sequence[Any]) -> list[Any]:
    """Returns `among` in the order of their hashes with `key`: who leaves or joins moves its own keys alone.

    (Highest random weight: Thaler and Ravishankar 1998.)
    """
    return sorted(among, key=lambda one: hashlib.sha256(f"{key} {one}".encode()).digest(), reverse=True)


def maker_of(name: str, nodes: Iterable[str]) -> str:
    """Returns the node that tokenises a file."""
    return rendezvous(name, sorted({*nodes}))[0]


class Peers:
    """The other nodes of the run, for one process of it."""

    def __init__(
        self, me: int, nodes: Sequence[str], addresses: Sequence[Address], token: str, *, tokenised: bool = False
    ) -> None:
        """`nodes` and `addresses` are those of each process; processes that share a cache are one node.

        `tokenised`: the nodes have made the shards themselves, `maker_of` each, and the store has none.
        """
        self._tokenised = tokenised
        self._me, self._token, self.node = me, token, nodes[me]
        self.addresses: dict[str, list[Address]] = {}
        for node, address in zip(nodes, addresses, strict=True):
            self.addresses.setdefault(node, []).append(address)
        self.nodes = tuple(self.addresses)
        self._avoided: dict[str, float] = {}  # until when

    def to_ask(self, shard: Shard, *, downloads: bool) -> list[tuple[str, bool]]:
        """Returns the nodes to ask for a shard, in turn, and whether each shall download it if it has to.

        Those before this node in rendezvous order shall. `downloads`: this node shall itself, on behalf of another
        one, so it only asks who has it. If no node gives it, this node downloads it. Who made it is asked first.
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


class Tiers:
    """Gives token shards: from the local disk, another node, or `download`, in this order."""

    def __init__(
        self, cache: ShardCache, download: Callable[[Shard, Path], int], url_of: Callable[[Shard], str]
    ) -> None:
        """`download` writes a shard to a file and returns the bytes that came from the store, where it is `url_of`."""
        self.counters = Counters()
        self._cache, self._download, self._url_of = cache, download, url_of
        self.peers: Peers | None = None

    def get(self, shard: Shard) -> np.ndarray:
        """Returns the tokens [N], memory-mapped. Errors are those of the cache and the store."""
        with explained(self._cache.folder):
            return self._get(shard, downloads=False)

    def content(self, shard: Shard, download: bool) -> memoryview | None:
        """Returns the bytes of a shard for another node; None if it is not here and shall not be downloaded."""
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
            except DamagedError as error:
                damage = str(error)
        raise DamagedObjectError(
            f"{self._url_of(shard)}: the tokens of {shard.name} are damaged: {damage}, {FETCHES} times; restore the "
            "object, or prepare the set again"
        )

    def _from_peer(self, shard: Shard, *, downloads: bool) -> np.ndarray | None:
        """Returns the tokens from the first node that gives them; None if none does."""
        if not (peers := self.peers):
            return None
        for node, download in peers.to_ask(shard, downloads=downloads):
            fill = partial(peers.fetch, node, shard, download=download)
            try:
                return self._cache.add(shard, fill)
            except PeerError as error:
                logging.getLogger(__name__).debug("shard %s not from node %s: %s", shard.name, node, error)
            except DamagedError:
                peers.avoid(node)
        return None


class OpenShards:
    """The shards that are open in this process, the least recently used ones closed first, and a reader ahead."""

    def __init__(self, tiers: Tiers, most: int) -> None:
        """Keeps up to `most` shards open. THREADS threads open those that `read_ahead` names."""
        self._tiers, self._most = tiers, most
        # by hash: those that are open, that a thread is opening, or that were fetched several times in vain
        self._found: OrderedDict[str, Future[np.ndarray]] = OrderedDict()
        self._now: deque[Shard] = deque()  # to be opened first
        self._later: deque[Shard] = deque()
        self._urgent: set[str] = set()  # hashes of those that are needed now, until a thread is done with them
        self._changed = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []

    def get(self, shard: Shard) -> np.ndarray:
        """Returns the tokens [N] of a shard, after waiting for them if they are not there yet."""
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
        """Opens shards in the background, those of `now` first, and forgets what it was to open before."""
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
        """Lets the threads begin no more shards."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads. To be called after the store is closed, for which they may wait."""
        self.stop()
        until_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _is_open(self, shard: Shard) -> bool:
        """Whether a shard is open; if so, the others are closed before it."""
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
                    if not isinstance(error, DamagedObjectError):  # who needs it tries again
                        del self._found[shard.sha256]
                found.set_exception(error)
            with self._changed:
                done = [key for key, one in self._found.items() if one.done()]
                for key in done[: max(0, len(done) - self._most)]:
                    del self._found[key]
        return found.result()

    def _work(self) -> None:
        while True:
            with self._changed:  # shards for later do not share the link with those that are needed now
                self._changed.wait_for(lambda: self._closed or self._now or (self._later and not self._urgent))
                if self._closed:
                    return
                shard = (self._now or self._later).popleft()
            try:
                self._obtain(shard)
            except Exception as error:  # who needs the shard reports it
                logging.getLogger(__name__).debug("shard %s not read ahead: %s", shard.name, error)
            with self._changed:
                self._urgent.discard(shard.sha256)
                self._changed.notify_all()
