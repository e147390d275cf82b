"""`StepSums`: what a member knows of the sums of one step, piece by piece.

A value is the sum of the gradients of a node of the tree (elastic/replicas/tree.py), of one piece of the parameters. It
depends on the step, the node and the piece alone: not on who computed it, nor on whether it was computed or came from
another member. So every value is right for every purpose, and a survivor computes the values that a lost member had not
sent.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Sequence

import numpy as np

from elastic.replicas.payloads import Payload
from elastic.replicas.tree import Node, added, cover, halves, parent

WAITING, COMPLETE = -1, -2  # in the place of a share to compute
TOTAL_IS_HERE = "the total is here"


class StepSums:
    """The values of one step that are here. All methods may be called by several threads."""

    def __init__(
        self,
        num_shares: int,
        payloads: Sequence[Payload],
        sizes: Sequence[int],
        lock: threading.RLock,
        changed: threading.Condition,
    ) -> None:
        """`payloads` and `sizes` are those of the pieces, in the order in which a backward pass completes them.

        The last one is of numbers that nothing is lost of: sums of several shares travel by it too.
        `changed`, a condition of `lock`, is notified when there is a new share to compute, another member waits for a
        total, or all totals are here. Many threads wait for a value or a total: each has a condition of its piece.
        """
        self._root: Node = (0, num_shares)
        self._payloads, self._sizes, self._lock, self._changed = payloads, sizes, lock, changed
        self._here = [threading.Condition(lock) for _ in payloads]
        # as they travel: they are decoded where they are added, and encoding what was decoded may give other bits
        self._values: dict[tuple[Node, int], memoryview] = {}
        self._totals: dict[int, memoryview] = {}
        self._asked_for: set[int] = set()  # pieces whose totals others wait for
        self._targets: set[tuple[Node, int]] = set()
        self._to_compute: list[int] = []
        self._pending: Counter[tuple[int, int]] = Counter()  # (share, piece) that is still to come
        self._end: Exception | None = None  # of all waiting

    @property
    def num_pieces(self) -> int:
        """Pieces of the parameters."""
        return len(self._payloads)

    @property
    def is_complete(self) -> bool:
        """Whether the totals of all pieces are here."""
        return len(self._totals) == self.num_pieces

    def nodes_to_send(self, nodes: Collection[Node], piece: int) -> list[Node]:
        """Returns the nodes in the form in which a piece takes the fewest bytes: encoded shares, or sums in f32."""
        shares = self._payloads[piece].bytes_per_value
        return [
            part
            for lo, hi in nodes
            for part in ([(i, i + 1) for i in range(lo, hi)] if (hi - lo) * shares < 4 else [(lo, hi)])
        ]

    def owe(self, nodes: Collection[Node]) -> None:
        """Notes nodes whose sums others will ask for, or that are needed here: their shares are to be computed."""
        with self._lock:
            for piece in range(self.num_pieces):
                for node in self.nodes_to_send(nodes, piece):
                    self._targets.add((node, piece))
                    self._ask_for(node, piece)

    def look(self, check: Callable[[], None], wait_s: float) -> int:
        """Returns a share to compute, COMPLETE, or WAITING when neither is so within `wait_s`.

        `check` is called before each look, and may raise.
        """
        until_s = time.monotonic() + wait_s
        with self._lock:
            while not self.is_complete:
                check()
                if self._to_compute:
                    return self._to_compute[0]
                if not self._changed.wait(until_s - time.monotonic()):  # it is notified for much else
                    return WAITING
            return COMPLETE

    def begin(self, share: int) -> None:
        """Notes that a share is being computed."""
        with self._lock:
            self._pending.update((share, piece) for piece in range(self.num_pieces))
            if share in self._to_compute:
                self._to_compute.remove(share)

    def put(self, share: int, piece: int, values: np.ndarray) -> None:
        """Takes a piece `f32 [N]` of a share that was computed here; the array is this object's from now on."""
        encoded = self._payloads[piece].encode(values)
        with self._lock:
            self._keep((share, share + 1), piece, encoded)
            self._pending[share, piece] -= 1
            self._here[piece].notify_all()

    def take(self, node: Node, piece: int, payload: memoryview) -> None:
        """Takes a node's sum from another member, of as many bytes as it has."""
        with self._lock:
            self._keep(node, piece, payload, merge=False)
            self._here[piece].notify_all()

    def has(self, node: Node, piece: int) -> bool:
        """Whether a node's sum of a piece is here, all that makes it, or a sum that has it in it."""
        with self._lock:
            return self._covers(self._values, self._root, node, piece) or self._is_whole(node, piece)

    def is_asked_for(self, piece: int) -> bool:
        """Whether another member waits for the total of a piece, whoever adds it up by the plan of this one."""
        return piece in self._asked_for

    def wait_for(self, node: Node, piece: int) -> memoryview:
        """Returns the bytes of a node's sum, computed here if need be. LookupError when the piece's total is here."""
        with self._lock:
            while (found := self.give(node, piece)) is None:
                self._wait(piece)
            return found

    def give(self, node: Node, piece: int) -> memoryview | None:
        """Returns what `wait_for` does; None if it is yet to be computed, which is noted."""
        with self._lock:
            self._targets.add((node, piece))
            if (node, piece) in self._values:
                return self._values[node, piece]
            if (value := self._value(node, piece)) is None:
                if piece in self._totals:
                    raise LookupError(TOTAL_IS_HERE)
                self._ask_for(node, piece)
                return None
        return self._form(node, piece).encode(value)

    def reduce(self, piece: int) -> bool:
        """Makes the total of a piece if all shares are here; returns whether it is here now."""
        with self._lock:
            if piece in self._totals:
                return True
            if (value := self._value(self._root, piece)) is None:
                return False
        self.put_total(piece, self._payloads[piece].encode(value))
        return True

    def put_total(self, piece: int, payload: memoryview) -> None:
        """Takes the total of a piece, as its owner has encoded it."""
        with self._lock:
            self._totals.setdefault(piece, payload)
            self._here[piece].notify_all()
            if self.is_complete:
                self._changed.notify_all()

    def total(self, piece: int) -> memoryview | None:
        """Returns the bytes of a piece's total, if it is here."""
        return self._totals.get(piece)

    def wait_for_total(self, piece: int) -> memoryview:
        """Returns the bytes of a piece's total, added up here if all shares are."""
        with self._lock:
            while (found := self.give_total(piece)) is None:
                self._wait(piece)
            return found

    def give_total(self, piece: int) -> memoryview | None:
        """Returns what `wait_for_total` does; None if it is not here, nor all shares: those are asked for."""
        with self._lock:
            if piece not in self._asked_for:
                self._asked_for.add(piece)
                self._changed.notify_all()
            return self._totals[piece] if self.reduce(piece) else None

    def totals(self) -> np.ndarray:
        """Returns the totals of all pieces, `f32 [N]`, one after the other."""
        found, start = np.empty(sum(self._sizes), np.float32), 0
        for piece, (payload, size) in enumerate(zip(self._payloads, self._sizes, strict=True)):
            found[start : start + size] = payload.decode(self._totals[piece], size)
            start += size
        return found

    def end(self, error: Exception) -> None:
        """Ends the waiting of all that wait: they raise the error."""
        with self._lock:
            self._end = error
            for here in self._here:
                here.notify_all()

    def drop_values(self) -> None:
        """Forgets all but the totals."""
        with self._lock:
            self._values.clear()

    def _wait(self, piece: int) -> None:
        if not self._end:
            self._here[piece].wait()
        if self._end:
            raise type(self._end)(*self._end.args)  # each thread one of its own

    def _form(self, node: Node, piece: int) -> Payload:
        """A single share travels encoded, a sum of several as it is."""
        return self._payloads[piece] if node[1] - node[0] == 1 else self._payloads[-1]

    def _value(self, node: Node, piece: int) -> np.ndarray | None:
        return added(node, lambda n: self._decoded(n, piece), np.add) if self._is_whole(node, piece) else None

    def _decoded(self, node: Node, piece: int) -> np.ndarray | None:
        if (node, piece) not in self._values:
            return None
        return self._form(node, piece).decode(self._values[node, piece], self._sizes[piece])

    def _is_whole(self, node: Node, piece: int) -> bool:
        return (node, piece) in self._values or (
            node[1] - node[0] > 1 and all(self._is_whole(half, piece) for half in halves(node))
        )

    def _ask_for(self, node: Node, piece: int) -> None:
        """Adds to what is to be computed the shares of a node of which a piece is neither here nor under way.

        What was added to its neighbour is not here by itself, though the rest of its share may be under way.
        """
        for share in range(*node):
            if share not in self._to_compute and not (
                self._pending[share, piece] or self._covers(self._values, node, (share, share + 1), piece)
            ):
                self._to_compute.append(share)
                self._changed.notify_all()

    def _covers(self, nodes: Container[tuple[Node, int]], node: Node, found: Node, piece: int) -> bool:
        """Whether `found`, or what has it in it up to a node, is among `nodes`, of a piece."""
        while (found, piece) not in nodes:
            if found == node:
                return False
            found = parent(self._root, found)
        return True

    def _keep(self, node: Node, piece: int, payload: memoryview, *, merge: bool = True) -> None:
        """Keeps a value, and adds it to its neighbour's if both are of a node that is wanted whole."""
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
            payload = self._form(above, piece).encode(value)
            del self._values[first, piece], self._values[second, piece]
            node = above


def check_nodes(nodes: Sequence[Node], num_shares: int) -> None:
    """Raises ValueError for what is no node of the tree."""
    for lo, hi in nodes:
        if not 0 <= lo < hi <= num_shares or cover((0, num_shares), lo, hi) != [(lo, hi)]:
            raise ValueError(f"[{lo}, {hi}) is no node of {num_shares} shares")
