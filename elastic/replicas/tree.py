"""The tree in whose order the shares of a step are added, and who computes which of them.

A step has V shares, 0..V-1. Their sum is that of the tree over them: a node `[lo, hi)` is the sum of its two halves, of
which the first has the largest power of two of shares that is less than all. So a sum depends on V alone, to the last
bit, not on who added what.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

Node = tuple[int, int]  # shares lo..hi-1
Value = TypeVar("Value")
WORTH = 1.2  # by how much longer a step may take before members compute different numbers of shares


def halves(node: Node) -> tuple[Node, Node]:
    """Returns the two halves of a node of more than one share."""
    lo, hi = node
    middle = lo + (1 << (hi - lo - 1).bit_length() - 1)
    return (lo, middle), (middle, hi)


def parent(root: Node, node: Node) -> Node:
    """Returns the node of whose halves one is `node`, which is not the root."""
    found = root
    while node not in (both := halves(found)):
        found = both[node[0] >= both[1][0]]
    return found


def cover(node: Node, lo: int, hi: int) -> list[Node]:
    """Returns the largest nodes below `node` that together are its shares in `[lo, hi)`, in order."""
    if lo >= node[1] or hi <= node[0]:
        return []
    if lo <= node[0] and node[1] <= hi:
        return [node]
    return [found for half in halves(node) for found in cover(half, lo, hi)]


def added(node: Node, find: Callable[[Node], Value | None], add: Callable[[Value, Value], Value]) -> Value | None:
    """Returns the value of a node: what `find` has, or else the sum of its halves; None if a share is missing."""
    if (value := find(node)) is not None or node[1] - node[0] == 1:
        return value
    first, second = (added(half, find, add) for half in halves(node))
    return None if first is None or second is None else add(first, second)


def counts(num_shares: int, rates: Sequence[float]) -> list[int]:
    """Returns how many shares each of some members computes, so that the slowest ends as early as possible.

    As many each, unless the slowest would take WORTH times as long then: where all are powers of two, those are whole
    nodes of the tree, whose sums take the fewest bytes. `rates` are shares per second, in any unit, of one or more; 0:
    not known yet, taken for the mean of those that are.
    """
    members, known = range(len(rates)), [rate for rate in rates if rate] or [1.0]
    rates = [rate or sum(known) / len(known) for rate in rates]
    found = [int(i < num_shares) for i in members]  # one each: else nobody learns how fast a member is
    for _ in range(num_shares - sum(found)):
        found[min(members, key=lambda i: ((found[i] + 1) / rates[i], i))] += 1
    alike = [num_shares // len(rates) + (i < num_shares % len(rates)) for i in members]
    ends = [max(each[i] / rates[i] for i in members) for each in (found, alike)]
    return alike if ends[1] < WORTH * ends[0] else found


def owners(num_shares: int, rates: Mapping[int, float], lost: Collection[int]) -> list[int]:
    """Returns for each share the member that computes it.

    `rates` are those of all members, by number, that began the step. What the lost ones owe is divided among the others
    alike; it does not matter in which order they were lost.
    """
    found = _in_turn({member: rates[member] for member in sorted(rates)}, num_shares)
    left = {member: rates[member] for member in sorted(rates) if member not in lost}
    owed = [share for share, member in enumerate(found) if member in lost]
    for share, member in zip(owed, _in_turn(left, len(owed)), strict=True):
        found[share] = member
    return found


def nodes_of(member: int, owner_of: Sequence[int]) -> list[Node]:
    """Returns the largest nodes whose shares a member computes all, in order."""
    found: list[Node] = []
    lo = 0
    for hi in range(1, len(owner_of) + 1):
        if hi == len(owner_of) or owner_of[hi] != owner_of[lo]:
            found += cover((0, len(owner_of)), lo, hi) if owner_of[lo] == member else []
            lo = hi
    return found


def _in_turn(rates: Mapping[int, float], num_shares: int) -> list[int]:
    """Returns the member of each share: some neighbours each."""
    each = zip(rates, counts(num_shares, [*rates.values()]), strict=True)
    return [member for member, count in each for _ in range(count)]
