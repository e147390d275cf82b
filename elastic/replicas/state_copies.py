"""The state of a step for a replica that joins: each of its peers copies a part of it, and continues to train.

The joining replica names a step soon to come, and asks each peer for some arrays of the state after it. At that step
each peer copies them to its host's memory, which pauses it for the time of the copy, and sends them while it trains. A
copy is dropped when all replicas that wanted it have it, are lost, or want another step.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import numpy as np

from elastic.replicas.transport import Link, SharedLock
from runtime.blobs import BlobAddress
from runtime.files.json_objects import JsonObject

PASSED = "that step has passed"
LEAVES = "this replica leaves"


class StateCopies:
    """Copies of arrays for replicas that join."""

    def __init__(self, lock: SharedLock) -> None:
        self._lock = lock
        self._step = -1  # the last step whose state could be copied
        self._wants: dict[int, tuple[int, set[int]]] = {}  # for each replica a step, and the arrays that it lacks
        self._copies: dict[int, dict[int, np.ndarray]] = {}
        self._closed = False

    def are_wanted(self, step: int) -> bool:
        """Whether a replica wants a copy of the state after `step` steps. Later requests for it are refused."""
        with self._lock:
            self._step = step
            return bool(self._wanted(step))

    def at_step(self, step: int, arrays: Sequence[object]) -> None:
        """Copies the wanted ones of `arrays`, the state after `step` steps on this process' devices."""
        with self._lock:
            self._step = step
            wanted = self._wanted(step)
        copies = {number: np.array(arrays[number]) for number in wanted if 0 <= number < len(arrays)}
        if not copies:
            return
        with self._lock:
            self._copies[step] = copies
            self._tidy()  # a replica may be lost by now
            self._lock.notify_all()

    def drop(self, replica: int) -> None:
        """Drops the copies that a replica wanted and has not received."""
        with self._lock:
            self._wants.pop(replica, None)
            self._tidy()

    def _wanted(self, step: int) -> set[int]:
        """Returns the arrays of a step that replicas want."""
        return set[int]().union(*(numbers for at, numbers in self._wants.values() if at == step))

    def _tidy(self) -> None:
        """Drops the copies that no replica wants any more."""
        for step, copies in [*self._copies.items()]:
            wanted = self._wanted(step)
            self._copies[step] = {number: x for number, x in copies.items() if number in wanted}
            if not self._copies[step]:
                del self._copies[step]

    def close(self) -> None:
        """Ends the waiting for a step: ConnectionError. Existing copies can still be requested."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def answer(self, request: JsonObject, replica: int) -> memoryview:
        """Answers `copy` (a step and arrays) and `state` (the bytes of an array). LookupError if it is too late."""
        step = request["step"]
        with self._lock:
            if request["op"] == "copy":
                if step <= self._step:
                    raise LookupError(PASSED)
                self._wants[replica] = step, {int(number) for number in request["arrays"]}
                self._tidy()
                return memoryview(b"")
            number = request["array"]
            self._lock.wait_for(lambda: self._closed or step in self._copies or self._step > step)
            if self._closed and step not in self._copies:
                raise ConnectionError(LEAVES)
            content = self._copies[step][number]
            at, numbers = self._wants.get(replica, (step, set[int]()))
            if at == step:
                numbers.discard(number)
            self._tidy()
            return content.reshape(-1).view(np.uint8).data


def fetch_copies(
    connect: Callable[[BlobAddress], AbstractContextManager[Link]],
    addresses: Sequence[BlobAddress],
    step: int,
    sizes: Sequence[int],
    progress: Callable[[], object],
) -> dict[int, memoryview]:
    """Returns the arrays of the state after `step` steps, of `sizes` bytes each, by number.

    Each peer sends a part, all at the same time; `progress` is called for each block received. PeerError if a peer does
    not send its part.
    """
    parts: list[list[int]] = [[] for _ in addresses]
    loads = [0] * len(addresses)
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = loads.index(min(loads))
        parts[least].append(number)
        loads[least] += sizes[number]
    found: dict[int, memoryview] = {}

    def fetch(address: BlobAddress, numbers: list[int]) -> None:
        with connect(address) as connection:
            connection.ask({"op": "copy", "step": step, "arrays": numbers}, 0)
            for number in numbers:
                request = {"op": "state", "step": step, "array": number}
                found[number] = connection.get_whole(request, sizes[number], progress)

    with ThreadPoolExecutor(len(addresses)) as pool:
        for done in [pool.submit(fetch, *each) for each in zip(addresses, parts, strict=True)]:
            done.result()
    return found
