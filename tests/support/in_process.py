"""A network inside this process: a request is a function call, and links are cut and healed by the test."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.replicas.transport import Link
from runtime.blobs import BlobAddress, PeerError, RefusedError, RequestHandler

HOST = "host"


class Network:
    """The services that answer, and the links that are cut."""

    def __init__(self) -> None:
        self.answers: dict[int, RequestHandler] = {}  # by port
        self.cut: set[frozenset[int]] = set()  # pairs of members
        self.connected: list[tuple[int, int]] = []  # attempts: from a member to another one
        self.ports = itertools.count(1)

    def transport(self, number: int) -> "InProcess":
        return InProcess(self, number)


@dataclass(frozen=True)
class InProcess:
    """The network of one replica."""

    network: Network
    number: int
    process: int = 0
    silence_s: float = 0.0

    def serve(self, answer: RequestHandler) -> "Service":
        port = next(self.network.ports)
        self.network.answers[port] = answer
        return Service(self.network, BlobAddress(process=self.number, host=HOST, port=port))

    def connect(self, address: BlobAddress, silence_s: float | None = None) -> "OpenLink":
        self.network.connected.append((self.number, address.process))
        is_cut = frozenset((self.number, address.process)) in self.network.cut
        if is_cut or address.port not in self.network.answers:
            raise PeerError(f"{address}: no answer")
        return OpenLink(self.network.answers[address.port], self.number)


@dataclass(frozen=True)
class Service:
    """One member's answers, until it is closed."""

    network: Network
    address: BlobAddress

    def close(self) -> None:
        self.network.answers.pop(self.address.port, None)


@dataclass(frozen=True)
class OpenLink(Link):
    """Calls the function that answers, and reports its errors as a connection does."""

    answer: RequestHandler
    me: int

    def __enter__(self) -> "OpenLink":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, request: Mapping[str, Any], most: int, progress: Callable[[], object] = lambda: None) -> bytes:
        try:
            content: Any = self.answer(json.loads(json.dumps(request)), self.me, None)  # pyright: ignore[reportArgumentType]
        except (OSError, LookupError, RuntimeError) as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from error
        except (ValueError, TypeError) as error:
            raise PeerError("it closed the connection") from error
        return bytes(content)

    def get_whole(
        self, request: Mapping[str, Any], size: int, progress: Callable[[], object] = lambda: None
    ) -> memoryview:
        content = self.ask(request, size, progress)
        if len(content) != size:
            raise PeerError(f"it announces {len(content)} bytes of {size}")
        return memoryview(content)


class OneAtATime:
    """In the place of a pool of threads: calls one function after the other, and notes how many it could at once."""

    most = 0

    def __init__(self, max_workers: int) -> None:
        OneAtATime.most = max(OneAtATime.most, max_workers)

    def __enter__(self) -> "OneAtATime":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return [function(item) for item in items]
