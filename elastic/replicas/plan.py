"""`StepPlan`: which replica computes which unit of a step, which one adds up which piece, and the requests of one.

Replicas run no consensus protocol. Each replica derives the plan from the records of its peers. If two plans differ for
a moment, a request makes its receiver compute a unit that it had left to another replica, and the values are the same.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from elastic.replicas.sums import Node, StepSums, cover

SLOWDOWN = 1.2  # by how much longer a step may take before replicas compute different numbers of units

WantedSum = tuple[int, Node | None]  # a piece, and the node of the sum; None: the total


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The plan of replica `me` for one step."""

    me: int
    num_units: int
    num_pieces: int
    rates: Mapping[int, float]  # units per second of the replicas that began the step; 0: not known
    lost: frozenset[int] = frozenset()

    @cached_property
    def remaining(self) -> list[int]:
        """The replicas that are not lost; this one if none remains."""
        return [number for number in sorted(self.rates) if number not in self.lost] or [self.me]

    @cached_property
    def owner_of(self) -> list[int]:
        """The replica that computes each unit."""
        if self.rates.keys() <= self.lost:
            return [self.me] * self.num_units
        return owners(self.num_units, self.rates, self.lost)

    def adder_of(self, piece: int) -> int:
        """Returns the replica that adds up a piece: they take turns, and another one replaces a lost one."""
        began = sorted(self.rates) or [self.me]
        number = began[piece % len(began)]
        return number if number in self.remaining else self.remaining[piece % len(self.remaining)]

    def without(self, lost: Collection[int]) -> "StepPlan":
        """Returns the plan of the other replicas."""
        return replace(self, lost=self.lost | frozenset(lost))

    def follow(self, sums: StepSums) -> None:
        """Notes the units that this replica computes, and adds up each of its pieces of which all units are here."""
        sums.require(nodes_of(self.me, self.owner_of))
        for piece in range(self.num_pieces):
            self.add_up(sums, piece)

    def add_up(self, sums: StepSums, piece: int) -> None:
        """Adds up a piece if this replica must, and all its units are here."""
        if self.adder_of(piece) == self.me:
            sums.reduce(piece)

    def sum_to_request(self, peer: int, sums: StepSums, requested: Set[WantedSum] = frozenset()) -> WantedSum | None:
        """Returns a sum of a peer's units that this replica lacks and has not requested, of a piece that it adds up."""
        if peer not in self.remaining:
            return None
        nodes = nodes_of(peer, self.owner_of)
        pieces = (p for p in range(self.num_pieces) if self.adder_of(p) == self.me or sums.is_requested(p))
        wanted = (
            (p, node)
            for p in pieces
            if sums.total(p) is None
            for node in sums.nodes_to_send(nodes, p)
            if not sums.has(node, p)
        )
        return next((each for each in wanted if each not in requested), None)

    def total_to_request(self, peer: int, sums: StepSums, requested: Set[WantedSum] = frozenset()) -> WantedSum | None:
        """Returns a total that a peer adds up, and that this replica lacks and has not requested."""
        wanted = ((p, None) for p in range(self.num_pieces) if self.adder_of(p) == peer and sums.total(p) is None)
        return next((each for each in wanted if each not in requested), None)


def owners(num_units: int, rates: Mapping[int, float], lost: Collection[int]) -> list[int]:
    """Returns for each unit the replica that computes it.

    `rates` has all replicas that began the step, by number. The units of the lost ones are divided among the others, in
    a way that does not depend on the order of the losses.
    """
    owner_of = _neighbours({number: rates[number] for number in sorted(rates)}, num_units)
    remaining = {number: rates[number] for number in sorted(rates) if number not in lost}
    orphans = [unit for unit, number in enumerate(owner_of) if number in lost]
    for unit, number in zip(orphans, _neighbours(remaining, len(orphans)), strict=True):
        owner_of[unit] = number
    return owner_of


def nodes_of(replica: int, owner_of: Sequence[int]) -> list[Node]:
    """Returns the largest nodes whose units are all computed by one replica, in order."""
    nodes: list[Node] = []
    lo = 0
    for hi in range(1, len(owner_of) + 1):
        if hi == len(owner_of) or owner_of[hi] != owner_of[lo]:
            nodes += cover((0, len(owner_of)), lo, hi) if owner_of[lo] == replica else []
            lo = hi
    return nodes


def unit_counts(num_units: int, rates: Sequence[float]) -> list[int]:
    """Returns how many units each of some replicas computes, so that the slowest one ends as early as possible.

    Equal numbers, unless the slowest replica would take SLOWDOWN times as long then: if the number of units and of
    replicas are powers of two, equal numbers are whole nodes of the tree, whose sums take the fewest bytes. `rates` are
    units per second, in any scale. 0: not known yet, the mean of the known ones is taken.
    """
    replicas, known = range(len(rates)), [rate for rate in rates if rate] or [1.0]
    rates = [rate or sum(known) / len(known) for rate in rates]
    counts = [int(i < num_units) for i in replicas]  # at least one each, or the rate of a replica stays unknown
    for _ in range(num_units - sum(counts)):
        counts[min(replicas, key=lambda i: ((counts[i] + 1) / rates[i], i))] += 1
    equal = [num_units // len(rates) + (i < num_units % len(rates)) for i in replicas]
    ends = [max(each[i] / rates[i] for i in replicas) for each in (counts, equal)]
    return equal if ends[1] < SLOWDOWN * ends[0] else counts


def _neighbours(rates: Mapping[int, float], num_units: int) -> list[int]:
    """Returns the replica of each unit: each replica has some neighbouring units."""
    each = zip(rates, unit_counts(num_units, [*rates.values()]), strict=True)
    return [number for number, count in each for _ in range(count)]
