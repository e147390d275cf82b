"""`StepPlan`: who computes which share of a step, who adds up which piece, and what one member asks another for."""

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property

from elastic.replicas.sums import StepSums
from elastic.replicas.tree import Node, nodes_of, owners

Asked = Set[tuple[int, Node | None]]  # pieces, and of a sum the node


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One member's guess, from what it knows of the others. Each makes it alike; nothing depends on that."""

    me: int
    num_shares: int
    num_pieces: int
    rates: Mapping[int, float]  # shares per second of the members that began the step; 0: not known
    lost: frozenset[int] = frozenset()

    @cached_property
    def left(self) -> list[int]:
        """The members that are left; this one if none is."""
        return [number for number in sorted(self.rates) if number not in self.lost] or [self.me]

    @cached_property
    def owner_of(self) -> list[int]:
        """The member that computes each share."""
        return (
            owners(self.num_shares, self.rates, self.lost)
            if self.rates.keys() - self.lost
            else ([self.me] * self.num_shares)
        )

    @cached_property
    def own(self) -> list[Node]:
        """What this member computes."""
        return nodes_of(self.me, self.owner_of)

    @cached_property
    def own_pieces(self) -> list[int]:
        """The pieces that this member adds up."""
        return [piece for piece in range(self.num_pieces) if self.adds(piece) == self.me]

    def adds(self, piece: int) -> int:
        """Returns the member that adds up a piece: in turn, and in the place of a lost one another."""
        began = sorted(self.rates) or [self.me]
        member = began[piece % len(began)]
        return member if member in self.left else self.left[piece % len(self.left)]

    def without(self, lost: Collection[int]) -> "StepPlan":
        """Returns the plan of those that are left."""
        return replace(self, lost=self.lost | frozenset(lost))

    def follow(self, sums: StepSums) -> None:
        """Notes what this member computes, and adds up its pieces of which all is here."""
        sums.owe(self.own)
        for piece in self.own_pieces:
            sums.reduce(piece)

    def add_up(self, sums: StepSums, piece: int) -> None:
        """Adds up a piece of which something has come, if it is this member's and all is here."""
        if self.adds(piece) == self.me:
            sums.reduce(piece)

    def sum_to_ask(self, member: int, sums: StepSums, but: Asked = frozenset()) -> tuple[int, Node] | None:
        """Returns a piece that this member adds up, and what another one has of it that is not here, nor asked for."""
        if member not in self.left:
            return None
        nodes = nodes_of(member, self.owner_of)
        own = (p for p in range(self.num_pieces) if self.adds(p) == self.me or sums.is_asked_for(p))
        open_pieces = (p for p in own if sums.total(p) is None)
        wanted = ((p, node) for p in open_pieces for node in sums.nodes_to_send(nodes, p) if not sums.has(node, p))
        return next((each for each in wanted if each not in but), None)

    def total_to_ask(self, member: int, sums: StepSums, but: Asked = frozenset()) -> tuple[int, None] | None:
        """Returns a piece that another member adds up, and whose total is not here, nor asked for."""
        wanted = ((p, None) for p in range(self.num_pieces) if self.adds(p) == member and sums.total(p) is None)
        return next((each for each in wanted if each not in but), None)
