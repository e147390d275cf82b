"""Every way in which a step of a few replicas can go: who computes, asks, is lost and notices it, in every order.

The values are symbols whose sum is the text of the addition: a total's text has every share once, in the tree's order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from elastic.replicas.payloads import Payload
from elastic.replicas.plan import StepPlan
from elastic.replicas.sums import Node, Piece, Status, StepSums, halves
from elastic.replicas.transport import SharedLock


class Symbol(str):
    """The text of how a value was made."""

    __slots__ = ()

    def __add__(self, other: str) -> "Symbol":
        return Symbol(f"({self}+{other})")


@dataclass(frozen=True)
class Text:
    """Writes a symbol; with fewer than 4 bytes per value, encoding leaves its mark each time."""

    bytes_per_value: float = 4.0

    def encode(self, values: np.ndarray) -> bytes:
        return (values[0] if self.bytes_per_value == 4 else f"q{values[0]}").encode()

    def decode(self, payload: bytes | memoryview, size: int) -> np.ndarray:
        assert size == 1
        return np.array([Symbol(bytes(payload).decode())], object)


LOSSY: Payload = Text(1.5)  # two shares are sent separately
EXACT: Payload = Text()


def expected(node: Node, piece: int, mark: str) -> str:
    """Returns the text of a node's sum: of encoded shares, added in the tree's order."""
    if node[1] - node[0] == 1:
        return f"{mark}{node[0]}.{piece}"
    first, second = (expected(half, piece, mark) for half in halves(node))
    return f"({first}+{second})"


@dataclass(frozen=True)
class Peer:
    """A member in one state of the step."""

    plan: StepPlan
    sums: StepSums
    finished: bool = False

    def copy(self) -> "Peer":
        """Returns a copy that may be changed; the values themselves are shared."""
        sums = object.__new__(StepSums)
        sums.__dict__ = {k: v.copy() if isinstance(v, dict | list | set) else v for k, v in vars(self.sums).items()}
        return replace(self, sums=sums)

    def without(self, other: int) -> "Peer":
        """Returns it after it has noticed that another one is lost."""
        found = replace(self.copy(), plan=self.plan.without([other]))
        found.plan.follow(found.sums)
        return found

    def computed(self) -> "Peer | None":
        """Returns it after its next unit, if it has one to compute."""
        found = self.copy()
        if (unit := found.sums.next_unit()) == Status.WAITING:
            return None
        found.sums.begin(unit)
        for piece in range(found.sums.num_pieces):
            found.sums.put(unit, piece, np.array([Symbol(f"{unit}.{piece}")], object))
            found.plan.add_up(found.sums, piece)
        return found

    def done(self) -> "Peer":
        """Returns it after it has gone on to the next step."""
        found = replace(self.copy(), finished=True)
        found.sums.drop_values()
        return found

    @property
    def key(self) -> tuple[object, ...]:
        """The common part of states with the same future: which values exist, not their content."""
        found = (v for v in vars(self.sums).values() if isinstance(v, dict | list | set))
        return self.plan.lost, self.finished, *(tuple(v) if isinstance(v, list) else frozenset(v) for v in found)


State = tuple[Peer | None, ...]  # None: lost


def start(views: Sequence[Mapping[int, float]], num_units: int, payloads: Sequence[Payload]) -> State:
    """Returns the beginning of a step in which each member takes the members and rates of its view for the truth."""
    peers = []
    for me, rates in enumerate(views):
        plan = StepPlan(me=me, num_units=num_units, num_pieces=len(payloads), rates=rates)
        peer = Peer(plan, StepSums(num_units, [Piece(1, payload) for payload in payloads], SharedLock()))
        plan.follow(peer.sums)
        peers.append(peer)
    return tuple(peers)


def changed(state: State, peers: Mapping[int, Peer | None]) -> State:
    return tuple(peers.get(number, peer) for number, peer in enumerate(state))


def losses(state: State) -> Iterator[tuple[str, State]]:
    """Yields the loss of each member while another one lives, and what is taken for one, of a member that lives."""
    alive = {number: peer for number, peer in enumerate(state) if peer}
    for number, peer in alive.items():
        for other in alive.keys() - {number}:
            yield f"{number} is lost", changed(state, {number: None})
            if other in peer.plan.remaining and len(state) == 2:  # three members would have too many states
                yield f"{number} loses sight of {other}", changed(state, {number: peer.without(other)})


def moves(state: State) -> Iterator[tuple[str, State]]:
    """Yields the possible next actions of the members, and the state after each."""
    for number, peer in enumerate(state):
        if peer is None:
            continue
        for other in peer.plan.remaining:
            if state[other] is None:
                yield f"{number} notices the loss of {other}", changed(state, {number: peer.without(other)})
        if peer.finished:
            continue
        if peer.sums.is_complete:
            yield f"{number} has done", changed(state, {number: peer.done()})
            continue
        if after := peer.computed():
            yield f"{number} computes", changed(state, {number: after})
        for other, asked in enumerate(state):
            if asked is None or other == number:
                continue
            for wanted in (peer.plan.sum_to_request(other, peer.sums), peer.plan.total_to_request(other, peer.sums)):
                if wanted:
                    one, two = peer.copy(), asked.copy()
                    ask(one, two, *wanted)
                    yield f"{number} asks {other} for {wanted}", changed(state, {number: one, other: two})


def ask(peer: Peer, other: Peer, piece: int, node: Node | None) -> None:
    """Gives a peer a value of another peer, or makes the other peer owe it."""
    if node:
        try:
            if found := other.sums.find(node, piece):
                peer.sums.receive(node, piece, found)
                peer.plan.add_up(peer.sums, piece)
            return
        except LookupError:
            assert other.sums.total(piece)
    if found := other.sums.find_total(piece):
        peer.sums.put_total(piece, found)


def explore(first: State, payloads: Sequence[Payload]) -> int:
    """Visits all states that can follow, and returns their number.

    AssertionError, with the events that lead there, if the living members can do nothing more and have not all finished
    with the right totals, or if they can continue indefinitely.
    """
    path: dict[object, str] = {}
    done: set[object] = set()
    stack: list[tuple[object, Iterator[tuple[str, State]]]] = []

    def enter(event: str, state: State) -> None:
        here = tuple(peer and peer.key for peer in state)
        assert here not in path, f"for ever: {[*path.values(), event]}"
        if here in done:
            return
        path[here] = event
        possible = [(name, after) for name, after in moves(state) if tuple(p and p.key for p in after) != here]
        alive = [peer for peer in state if peer]
        assert possible or all(peer.finished for peer in alive), f"stuck: {[*path.values()]}"
        for peer in alive if not possible else []:
            for piece, payload in enumerate(payloads):
                total, mark = peer.sums.total(piece), "q" * (payload == LOSSY)
                text = mark + expected((0, peer.plan.num_units), piece, mark)
                assert total and payload.decode(total, 1) == text, [*path.values()]
        stack.append((here, iter([*possible, *losses(state)])))

    enter("start", first)
    while stack:
        here, events = stack[-1]
        if (following := next(events, None)) is not None:
            enter(*following)
        else:
            done.add(here)
            del path[here]
            stack.pop()
    return len(done)


TWO = {0: 1.0, 1: 1.0}
THREE = TWO | {2: 1.0}


@pytest.mark.parametrize(
    ("views", "num_units", "payloads"),
    [
        ([TWO] * 2, 2, [EXACT]),
        ([TWO] * 2, 3, [EXACT, EXACT]),
        ([TWO] * 2, 4, [LOSSY, EXACT]),
        ([{0: 1.0, 1: 2.0}, {0: 2.0, 1: 1.0}], 3, [EXACT]),
        ([{0: 1.0}, TWO], 3, [EXACT]),  # member 0 has not heard of the other one
        ([TWO] * 3, 3, [EXACT]),  # member 2 only receives
        ([THREE] * 3, 3, [EXACT]),
        ([THREE] * 3, 2, [LOSSY, EXACT]),
        pytest.param([THREE] * 3, 4, [LOSSY, EXACT], marks=pytest.mark.slow),
    ],
)
def test_every_way_ends_with_the_same_totals(
    views: list[dict[int, float]], num_units: int, payloads: list[Payload]
) -> None:
    assert explore(start(views, num_units, payloads), payloads) > 50


def test_two_that_count_differently_who_adds_up_what() -> None:
    """Replica 0 has not heard of replica 2, which is lost: each of the two others takes piece 3 for the other one's."""
    payloads = [EXACT] * 4
    assert explore(changed(start([TWO, THREE, THREE], 2, payloads), {2: None}), payloads) > 50
