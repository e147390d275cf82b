"""`StepSums`: the sums of one step that a replica knows, piece by piece; and the tree that fixes their order.

A step has V work units, 0..V-1. A node `(lo, hi)` of the tree is the sum of units lo..hi-1: the sum of its two halves,
where the first half has the largest power of two of units that is less than all. So the sum over all units depends on V
alone, to the last bit, and not on the replicas that added it.

A value is the sum of the gradients of a node, for one piece of the parameters. It depends only on the step, the node
and the piece. Whether it was computed here or received from a peer makes no difference, so survivors can compute each
value that a lost replica had not sent.
"""

from collections import Counter
from collections.abc import Callable, Collection, Container, Sequence
from enum import IntEnum
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from elastic.replicas.payloads import Payload
from elastic.replicas.transport import SharedLock

Node = tuple[int, int]  # units lo..hi-1
Value = TypeVar("Value")

TOTAL_IS_HERE = "the total is here"


class Status(IntEnum):
    """Why no unit is left to compute. Negative, because processes of a replica agree on a unit or a status."""

    WAITING = -1  # for sums and totals of peers
    COMPLETE = -2  # all totals are here
    BEHIND = -3  # this replica lags: its peers no longer have the totals


class Piece(NamedTuple):
    """A piece of a unit's gradients, f32 `[size]`."""

    size: int
    payload: Payload


class StepSums:
    """The sums and totals of one step. All methods may be called by several threads."""

    def __init__(self, num_units: int, pieces: Sequence[Piece], lock: SharedLock) -> None:
        """`pieces` are in the order in which a backward pass completes them.

        The last piece has a lossless payload, which sums of several units use too. `lock` is notified when a new
        unit can be computed, a peer waits for a total, or all totals are here. Threads that wait for a value or a total
        wait for the condition of its piece, because they are many.
        """
        self._root: Node = (0, num_units)
        self._pieces, self._lock = pieces, lock
        self._arrived = [lock.condition() for _ in pieces]
        # as they are sent: encoding a decoded value again may give other bits
        self._values: dict[tuple[Node, int], memoryview] = {}
        self._totals: dict[int, memoryview] = {}
        self._requested: set[int] = set()  # pieces whose totals peers wait for
        self._targets: set[tuple[Node, int]] = set()
        self._to_compute: list[int] = []
        self._pending: Counter[tuple[int, int]] = Counter()  # (unit, piece) that is still to come
        self._error: Exception | None = None  # ends all waiting

    @property
    def num_pieces(self) -> int:
        """Pieces of the parameters."""
        return len(self._pieces)

    @property
    def is_complete(self) -> bool:
        """Whether the totals of all pieces are here."""
        return len(self._totals) == self.num_pieces

    # ------------------------------------------------------------------------------------------------ units to compute
    def nodes_to_send(self, nodes: Collection[Node], piece: int) -> list[Node]:
        """Returns the nodes in the form in which a piece takes the fewest bytes: encoded units, or sums in f32."""
        each = self._pieces[piece].payload.bytes_per_value
        return [
            part
            for lo, hi in nodes
            for part in ([(i, i + 1) for i in range(lo, hi)] if (hi - lo) * each < 4 else [(lo, hi)])
        ]

    def require(self, nodes: Collection[Node]) -> None:
        """Notes nodes whose sums peers will ask for, or this replica needs: their units must be computed."""
        with self._lock:
            for piece in range(self.num_pieces):
                for node in self.nodes_to_send(nodes, piece):
                    self._targets.add((node, piece))
                    self._compute_units(node, piece)

    def next_unit(self) -> int | Literal[Status.WAITING, Status.COMPLETE]:
        """Returns the next unit to compute, or the reason for none."""
        with self._lock:
            if self.is_complete:
                return Status.COMPLETE
            return self._to_compute[0] if self._to_compute else Status.WAITING

    def begin(self, unit: int) -> None:
        """Notes that a unit is being computed."""
        with self._lock:
            self._pending.update((unit, piece) for piece in range(self.num_pieces))
            if unit in self._to_compute:
                self._to_compute.remove(unit)

    def put(self, unit: int, piece: int, values: np.ndarray) -> None:
        """Takes a piece `f32 [N]` of a unit that was computed here. The array must not be changed any more."""
        encoded = self._pieces[piece].payload.encode(values)
        with self._lock:
            self._keep((unit, unit + 1), piece, encoded)
            self._pending[unit, piece] -= 1
            self._arrived[piece].notify_all()

    # ------------------------------------------------------------------------------------------------- sums and totals
    def receive(self, node: Node, piece: int, payload: memoryview) -> None:
        """Takes a node's sum from a peer; its size is right."""
        with self._lock:
            self._keep(node, piece, payload, merge=False)
            self._arrived[piece].notify_all()

    def has(self, node: Node, piece: int) -> bool:
        """Whether a node's sum of a piece is here, all parts of it, or a sum that includes it."""
        with self._lock:
            return self._covers(self._values, self._root, node, piece) or self._is_whole(node, piece)

    def is_requested(self, piece: int) -> bool:
        """Whether a peer waits for the total of a piece, even if this replica's plan lets another one add it up."""
        return piece in self._requested

    def wait_for(self, node: Node, piece: int) -> memoryview:
        """Returns the bytes of a node's sum, computed here if need be. LookupError when the piece's total is here."""
        with self._lock:
            while (payload := self.find(node, piece)) is None:
                self._wait(piece)
            return payload

    def find(self, node: Node, piece: int) -> memoryview | None:
        """Returns the bytes that `wait_for` returns; None if units must be computed first, which is noted."""
        with self._lock:
            self._targets.add((node, piece))
            if (node, piece) in self._values:
                return self._values[node, piece]
            if (value := self._value(node, piece)) is None:
                if piece in self._totals:
                    raise LookupError(TOTAL_IS_HERE)
                self._compute_units(node, piece)
                return None
        return self._payload(node, piece).encode(value)

    def reduce(self, piece: int) -> bool:
        """Adds up the total of a piece if all units are here; returns whether the total is here now."""
        with self._lock:
            if piece in self._totals:
                return True
            if (value := self._value(self._root, piece)) is None:
                return False
        self.put_total(piece, self._pieces[piece].payload.encode(value))
        return True

    def put_total(self, piece: int, payload: memoryview) -> None:
        """Takes the total of a piece, as the replica that added it up has encoded it."""
        with self._lock:
            self._totals.setdefault(piece, payload)
            self._arrived[piece].notify_all()
            if self.is_complete:
                self._lock.notify_all()

    def total(self, piece: int) -> memoryview | None:
        """Returns the bytes of a piece's total, if it is here."""
        return self._totals.get(piece)

    def wait_for_total(self, piece: int) -> memoryview:
        """Returns the bytes of a piece's total, which is added up here if all units are here."""
        with self._lock:
            while (payload := self.find_total(piece)) is None:
                self._wait(piece)
            return payload

    def find_total(self, piece: int) -> memoryview | None:
        """Returns the bytes that `wait_for_total` returns; None if units are missing, which peers are asked for."""
        with self._lock:
            if piece not in self._requested:
                self._requested.add(piece)
                self._lock.notify_all()
            return self._totals[piece] if self.reduce(piece) else None

    def totals(self) -> np.ndarray:
        """Returns the totals of all pieces, `f32 [N]`, one after the other."""
        totals, start = np.empty(sum(piece.size for piece in self._pieces), np.float32), 0
        for number, (size, payload) in enumerate(self._pieces):
            totals[start : start + size] = payload.decode(self._totals[number], size)
            start += size
        return totals

    # ------------------------------------------------------------------------------------------------------------- end
    def end(self, error: Exception) -> None:
        """Ends the waiting of all threads: they raise the error."""
        with self._lock:
            self._error = error
            for arrived in self._arrived:
                arrived.notify_all()

    def drop_values(self) -> None:
        """Drops all but the totals."""
        with self._lock:
            self._values.clear()

    def _wait(self, piece: int) -> None:
        if not self._error:
            self._arrived[piece].wait()
        if self._error:
            raise type(self._error)(*self._error.args)  # a separate object in each thread

    # ----------------------------------------------------------------------------------------- values, with lock held
    def _payload(self, node: Node, piece: int) -> Payload:
        """Returns the form of a node's sum: a single unit is sent encoded, a sum of several lossless."""
        return self._pieces[piece if node[1] - node[0] == 1 else -1].payload

    def _value(self, node: Node, piece: int) -> np.ndarray | None:
        return added(node, lambda n: self._decoded(n, piece), np.add) if self._is_whole(node, piece) else None

    def _decoded(self, node: Node, piece: int) -> np.ndarray | None:
        if (node, piece) not in self._values:
            return None
        return self._payload(node, piece).decode(self._values[node, piece], self._pieces[piece].size)

    def _is_whole(self, node: Node, piece: int) -> bool:
        return (node, piece) in self._values or (
            node[1] - node[0] > 1 and all(self._is_whole(half, piece) for half in halves(node))
        )

    def _compute_units(self, node: Node, piece: int) -> None:
        """Schedules each unit of a node whose `piece` is neither here nor being computed.

        A unit's value that was added to its neighbour's is here as a part of their sum. Other pieces of the unit may
        still be under way.
        """
        for unit in range(*node):
            if unit not in self._to_compute and not (
                self._pending[unit, piece] or self._covers(self._values, node, (unit, unit + 1), piece)
            ):
                self._to_compute.append(unit)
                self._lock.notify_all()

    def _covers(self, nodes: Container[tuple[Node, int]], top: Node, node: Node, piece: int) -> bool:
        """Whether `node`, or a node above it up to `top`, is among `nodes`, for a piece."""
        while (node, piece) not in nodes:
            if node == top:
                return False
            node = parent(self._root, node)
        return True

    def _keep(self, node: Node, piece: int, payload: memoryview, *, merge: bool = True) -> None:
        """Keeps a value, and adds it to its neighbour's if a target includes both."""
        while True:
            self._values[node, piece] = payload
            if not merge or node == self._root:
                return
            above = parent(self._root, node)
            if not self._covers(self._targets, self._root, above, piece):
                return
            first, second = halves(above)
            if (first, piece) not in self._values or (second, piece) not in self._values:
                return
            if (above, piece) in self._values:
                return
            value = self._value(above, piece)
            assert value is not None
            payload = self._payload(above, piece).encode(value)
            del self._values[first, piece], self._values[second, piece]
            node = above


# ----------------------------------------------------------------------------------------------------------- the tree
def halves(node: Node) -> tuple[Node, Node]:
    """Returns the two halves of a node of more than one unit."""
    lo, hi = node
    middle = lo + (1 << (hi - lo - 1).bit_length() - 1)
    return (lo, middle), (middle, hi)


def parent(root: Node, node: Node) -> Node:
    """Returns the node of which `node` is a half; `node` is not the root."""
    above = root
    while node not in (both := halves(above)):
        above = both[node[0] >= both[1][0]]
    return above


def cover(node: Node, lo: int, hi: int) -> list[Node]:
    """Returns the largest nodes below `node` that together are its units in `[lo, hi)`, in order."""
    if lo >= node[1] or hi <= node[0]:
        return []
    if lo <= node[0] and node[1] <= hi:
        return [node]
    return [part for half in halves(node) for part in cover(half, lo, hi)]


def added(node: Node, find: Callable[[Node], Value | None], add: Callable[[Value, Value], Value]) -> Value | None:
    """Returns `find(node)`, or else the sum of the node's halves; None if a unit is missing."""
    if (value := find(node)) is not None or node[1] - node[0] == 1:
        return value
    first, second = (added(half, find, add) for half in halves(node))
    return None if first is None or second is None else add(first, second)


def check_nodes(nodes: Sequence[Node], num_units: int) -> None:
    """Raises ValueError for a range that is not a node of the tree."""
    for lo, hi in nodes:
        if not 0 <= lo < hi <= num_units or cover((0, num_units), lo, hi) != [(lo, hi)]:
            raise ValueError(f"[{lo}, {hi}) is no node of {num_units} units")
