"""The state of a step for a member that joins: each of the others copies a part of it, and trains on.

The joining member names a step soon to come, and of each of the others the arrays that it wants of it. At that step
each copies those to its host's memory, which takes the time of the copy alone, and sends them while it trains. A copy
is dropped when all that wanted it have it, are lost, or want another step.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from elastic.replicas.transport import Link
from runtime.blobs import Address

PASSED = "that step has passed"
LEAVES = "this replica leaves"


class StateCopies:
    """Copies of arrays for members that join."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._step = -1  # the last step whose state could be copied
        self._wants: dict[int, tuple[int, set[int]]] = {}  # of each member a step, and the arrays that it lacks of that
        self._copies: dict[int, dict[int, np.ndarray]] = {}
        self._closed = False

    def are_wanted(self, step: int) -> bool:
        """Whether somebody wants a copy of the state after `step` steps: from now on nobody can ask for it."""
        with self._changed:
            self._step = step
            return bool(self._wanted(step))

    def at_step(self, step: int, arrays: Sequence[Any]) -> None:
        """Copies what is wanted of the state after `step` steps; `arrays` are those of this process' devices."""
        with self._changed:
            self._step = step
            wanted = self._wanted(step)
        copies = {number: np.array(arrays[number]) for number in wanted if 0 <= number < len(arrays)}
        if not copies:
            return
        with self._changed:
            self._copies[step] = copies
            self._tidy()  # somebody may be lost by now
            self._changed.notify_all()

    def drop(self, member: int) -> None:
        """Drops what a member wanted, and has not got."""
        with self._changed:
            self._wants.pop(member, None)
            self._tidy()

    def _wanted(self, step: int) -> set[int]:
        """Returns the arrays of a step that somebody wants."""
        return set[int]().union(*(numbers for at, numbers in self._wants.values() if at == step))

    def _tidy(self) -> None:
        """Drops the copies that nobody wants any more."""
        for step, copies in [*self._copies.items()]:
            wanted = self._wanted(step)
            self._copies[step] = {number: x for number, x in copies.items() if number in wanted}
            if not self._copies[step]:
                del self._copies[step]

    def close(self) -> None:
        """Ends the waiting of all that wait for a step: ConnectionError. What was copied can still be had."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def answer(self, request: dict[str, Any], member: int) -> memoryview:
        """Answers `copy`: a step and arrays, and `state`: the bytes of one of them. LookupError if it is too late."""
        step = request["step"]
        with self._changed:
            if request["op"] == "copy":
                if step <= self._step:
                    raise LookupError(PASSED)
                self._wants[member] = step, {int(number) for number in request["arrays"]}
                self._tidy()
                return memoryview(b"")
            number = request["array"]
            self._changed.wait_for(lambda: self._closed or step in self._copies or self._step > step)
            if self._closed and step not in self._copies:
                raise ConnectionError(LEAVES)
            content = self._copies[step][number]
            at, numbers = self._wants.get(member, (step, set[int]()))
            if at == step:
                numbers.discard(number)
            self._tidy()
            return content.reshape(-1).view(np.uint8).data


def fetch_copies(
    connect: Callable[[Address], AbstractContextManager[Link]],
    addresses: Sequence[Address],
    step: int,
    sizes: Sequence[int],
    progress: Callable[[], object],
) -> dict[int, memoryview]:
    """Returns the arrays of the state after `step` steps, of `sizes` bytes each, by number.

    Each of the others sends a part, all at once; `progress` is called for what has come. PeerError if one of them does
    not.
    """
    parts: list[list[int]] = [[] for _ in addresses]
    loads = [0] * len(addresses)
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = loads.index(min(loads))
        parts[least].append(number)
        loads[least] += sizes[number]
    found: dict[int, memoryview] = {}

    def fetch(address: Address, numbers: list[int]) -> None:
        with connect(address) as connection:
            connection.ask({"op": "copy", "step": step, "arrays": numbers}, 0)
            for number in numbers:
                request = {"op": "state", "step": step, "array": number}
                found[number] = connection.get_whole(request, sizes[number], progress)

    with ThreadPoolExecutor(len(addresses)) as pool:
        for done in [pool.submit(fetch, *each) for each in zip(addresses, parts, strict=True)]:
            done.result()
    return found
