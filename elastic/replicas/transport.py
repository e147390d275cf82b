"""How the members of a run reach each other: by authenticated connections, or within one process in tests."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from runtime.blobs import Address, Answer, BlobService, Connection


class Link(Protocol):
    """A connection to another member."""

    def ask(self, request: Mapping[str, Any], most: int, progress: Callable[[], object] = lambda: None) -> bytes:
        """Returns an answer of at most `most` bytes; `progress` is called while the other member lets it wait."""
        ...

    def get_whole(
        self, request: Mapping[str, Any], size: int, progress: Callable[[], object] = lambda: None
    ) -> memoryview:
        """Returns an answer of `size` bytes."""
        ...


class Service(Protocol):
    """Answers the other members until it is closed."""

    @property
    def address(self) -> Address:
        """The address that the other members connect to."""
        ...

    def close(self) -> None:
        """Ends all connections."""
        ...


class Transport(Protocol):
    """The network of one member. Its errors are PeerErrors (runtime/blobs.py)."""

    @property
    def silence_s(self) -> float:
        """Seconds after which a silent member counts as lost."""
        ...

    def serve(self, answer: Answer) -> Service:
        """Answers requests from now on."""
        ...

    def connect(self, address: Address, silence_s: float | None = None) -> AbstractContextManager[Link]:
        """Returns a new connection; with `silence_s` for one short answer."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sockets:
    """Connections that prove that they know the run's token. A member's process `process` talks to the same of others.

    A member that answers "wait", and makes no progress for `stall_s`, counts as lost; `progress` returns a value that
    changes while this one makes progress.
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

    def serve(self, answer: Answer) -> BlobService:
        return BlobService(
            self._purpose,
            answer,
            process=self.number,
            count=self.most_connections,
            token=self.token,
            progress=self.progress,
        )

    def connect(self, address: Address, silence_s: float | None = None) -> Connection:
        limits = {"silence_s": self.silence_s, "stall_s": self.stall_s}
        if silence_s is not None:
            limits = {"silence_s": silence_s, "stall_s": silence_s}
        return Connection(address, self.token, self._purpose, self.number, **limits)
