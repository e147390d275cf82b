"""The connections and threads of a replica.

| thread | number | its loop |
|---|---|---|
| training | 1 | computes units and waits for totals: `Step` (driver.py) |
| asking | 4 per peer | fetch sums and totals from the peer: `SumExchange.ask` (exchange.py) |
| answering | 1 per connection | send sums, totals, records and states to peers: `Replicas.answer` (driver.py) |
| seeking | 1 | greets lost and unknown peers: `Membership.seek` (membership.py) |

They share the data of `StepSums`, `SumExchange`, `Membership` and `StateCopies`. A thread holds the `SharedLock` while
it changes these data, or reads several of them.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf
from typing import Protocol

from runtime.blobs import BlobAddress, BlobService, Connection, RequestHandler
from runtime.files.json_objects import JsonMapping


class SharedLock(threading.Condition):
    """The one lock of a replica, and its condition: a thread that changes shared data calls `notify_all`."""

    def __init__(self) -> None:
        self._reentrant = threading.RLock()
        super().__init__(self._reentrant)

    def condition(self) -> threading.Condition:
        """Returns another condition of the same lock, for threads that wait for one particular change."""
        return threading.Condition(self._reentrant)


class Link(Protocol):
    """A connection to a peer."""

    def ask(self, request: JsonMapping, most: int, progress: Callable[[], object] = lambda: None) -> bytes:
        """Returns an answer of at most `most` bytes; `progress` is called while the peer is not ready."""
        ...

    def get_whole(
        self, request: Mapping[str, object], size: int, progress: Callable[[], object] = lambda: None
    ) -> memoryview:
        """Returns an answer of `size` bytes."""
        ...


class Service(Protocol):
    """Answers the peers until it is closed."""

    @property
    def address(self) -> BlobAddress:
        """The address that the peers connect to."""
        ...

    def close(self) -> None:
        """Ends all connections."""
        ...


class Transport(Protocol):
    """The network of one process of a replica. Its errors are PeerErrors (runtime/blobs.py)."""

    @property
    def number(self) -> int:
        """The replica."""
        ...

    @property
    def process(self) -> int:
        """The process in the replica, which connects to the same-numbered processes of its peers."""
        ...

    @property
    def silence_s(self) -> float:
        """Seconds after which a silent peer counts as lost."""
        ...

    def serve(self, answer: RequestHandler) -> Service:
        """Answers requests from now on."""
        ...

    def connect(self, address: BlobAddress, silence_s: float | None = None) -> AbstractContextManager[Link]:
        """Returns a new connection; with `silence_s` for one short answer."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sockets:
    """Connections that prove that they know the run's token.

    A peer that answers "wait", and makes no progress for `stall_s`, counts as lost. `progress` returns a value that
    changes while this process makes progress.
    """

    number: int
    token: str
    silence_s: float
    stall_s: float = inf
    process: int = 0
    most_connections: int = 512
    progress: Callable[[], object] = lambda: True

    @property
    def _purpose(self) -> str:
        return f"replicas {self.process}"

    def serve(self, answer: RequestHandler) -> BlobService:
        return BlobService(
            self._purpose,
            answer,
            process=self.number,
            count=self.most_connections,
            token=self.token,
            progress=self.progress,
        )

    def connect(self, address: BlobAddress, silence_s: float | None = None) -> Connection:
        limits = {"silence_s": self.silence_s, "stall_s": self.stall_s}
        if silence_s is not None:
            limits = {"silence_s": silence_s, "stall_s": silence_s}
        return Connection(address, self.token, self._purpose, self.number, **limits)
