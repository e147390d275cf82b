"""The sum over units has the bits of one tree, for any division and order of the units."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.replicas.payloads import LOSSLESS, Payload
from elastic.replicas.plan import SLOWDOWN, nodes_of, owners, unit_counts
from elastic.replicas.sums import Node, Piece, Status, StepSums, added, check_nodes, cover, halves, parent
from elastic.replicas.transport import SharedLock

SIZE = 33


def leaf(unit: int, piece: int = 0) -> np.ndarray:
    """Returns values of very different sizes: another order of additions gives other bits."""
    rng = np.random.default_rng((unit, piece))
    return (rng.standard_normal(SIZE) * 10.0 ** rng.integers(-6, 6, SIZE)).astype(np.float32)


def carried(values: list[np.ndarray]) -> np.ndarray:
    """Returns the sum as a binary counter makes it: two sums of equally many values become one, the rest at the end."""
    sums: list[tuple[int, np.ndarray]] = []
    for value in values:
        sums.append((1, value))
        while len(sums) > 1 and sums[-1][0] == sums[-2][0]:
            (size, second), (_, first) = sums.pop(), sums.pop()
            sums.append((2 * size, first + second))
    *left, (_, total) = sums
    for _, first in reversed(left):
        total = first + total
    return total


def sums_of(num_units: int, payloads: list[Payload]) -> StepSums:
    return StepSums(num_units, [Piece(SIZE, payload) for payload in payloads], SharedLock())


@given(num_units=st.integers(1, 17), members=st.integers(1, 5), draw=st.randoms(use_true_random=False))
@settings(derandomize=True, max_examples=60, deadline=None, database=None)
def test_the_sum_is_that_of_the_tree_to_the_last_bit(num_units: int, members: int, draw: random.Random) -> None:
    """For any assignment of units, and any order of pieces and sums."""
    expected = [carried([leaf(unit, piece) for unit in range(num_units)]) for piece in range(2)]
    owner_of = [draw.randrange(members) for _ in range(num_units)]  # not neighbours
    all_sums = [sums_of(num_units, [LOSSLESS, LOSSLESS]) for _ in range(members)]
    for member, sums in enumerate(all_sums):
        sums.require(nodes_of(member, owner_of))
        units = []
        for _ in range(owner_of.count(member)):
            units.append(sums.next_unit())
            sums.begin(units[-1])
        assert units == [unit for unit, owner in enumerate(owner_of) if owner == member]
        parts = [(unit, piece) for unit in units for piece in range(2) if unit is not None]
        for unit, piece in draw.sample(parts, len(parts)):
            sums.put(unit, piece, leaf(unit, piece))
    for (member, sums), piece in itertools.product(enumerate(all_sums), range(2)):
        there = [(other, node) for other in range(members) if other != member for node in nodes_of(other, owner_of)]
        for other, node in draw.sample(there, len(there)):
            assert not sums.reduce(piece) and not sums.has(node, piece)
            sums.receive(node, piece, all_sums[other].wait_for(node, piece))
            assert sums.has(node, piece)
        assert sums.reduce(piece) and sums.is_complete == bool(piece)
    for sums in all_sums:
        assert sums.totals().tobytes() == b"".join(expected)


def test_the_order_of_the_tree_matters_to_the_bits() -> None:
    """Or the test above could not fail."""
    values = [leaf(unit) for unit in range(11)]
    assert carried(values).tobytes() != sum(values[1:], values[0]).tobytes()


@given(num_units=st.integers(1, 24))
@settings(derandomize=True, max_examples=25, deadline=None, database=None)
def test_the_nodes_of_a_tree(num_units: int) -> None:
    root = (0, num_units)
    nodes, left = [root], [root]
    while left:
        lo, hi = node = left.pop()
        if hi - lo > 1:
            first, second = halves(node)
            size = first[1] - first[0]
            assert (first[0], first[1], second[1]) == (lo, second[0], hi)
            assert size & (size - 1) == 0 and size < hi - lo <= 2 * size
            assert parent(root, first) == parent(root, second) == node
            nodes += [first, second]
            left += [first, second]
    assert len(nodes) == 2 * num_units - 1
    check_nodes(nodes, num_units)
    for lo, hi in itertools.product(range(-1, num_units + 2), repeat=2):
        if (lo, hi) not in nodes:
            with pytest.raises(ValueError, match=rf"\[{lo}, {hi}\) is no node of {num_units} units"):
                check_nodes([(lo, hi)], num_units)


@given(num_units=st.integers(1, 20))
@settings(derandomize=True, max_examples=12, deadline=None, database=None)
def test_a_cover_has_each_unit_once_in_the_fewest_nodes(num_units: int) -> None:
    root = (0, num_units)
    for lo, hi in itertools.combinations(range(num_units + 1), 2):
        found = cover(root, lo, hi)
        assert [unit for node in found for unit in range(*node)] == [*range(lo, hi)]
        check_nodes(found, num_units)
        inside = {parent(root, node) for node in found if node != root}
        assert not [above for above in inside if lo <= above[0] and above[1] <= hi]
        assert cover(root, lo, lo) == cover(root, hi, hi) == []


def test_a_value_is_found_where_it_is_whole_and_none_is_made_of_a_part() -> None:
    values: dict[Node, str] = {(0, 4): "a", (0, 1): "never", (4, 5): "b"}

    def find() -> str | None:
        return added((0, 6), values.get, lambda x, y: f"({x}+{y})")

    assert find() is None
    values[5, 6] = "c"
    assert find() == "(a+(b+c))"


def test_units_are_divided_by_the_rates_so_that_the_slowest_ends_early() -> None:
    draw = random.Random(0)
    for _ in range(200):
        rates = [draw.choice([0.5, 1.0, 1.7, 4.0]) for _ in range(draw.randint(1, 3))]
        num_units = draw.randint(1, 7)
        found = unit_counts(num_units, rates)
        assert sum(found) == num_units and all(each >= (i < num_units) for i, each in enumerate(found))
        least = min(
            max(each / rate for each, rate in zip(other, rates, strict=True))
            for other in itertools.product(range(num_units + 1), repeat=len(rates))
            if sum(other) == num_units and (min(other) > 0 or num_units < len(rates))
        )
        if num_units >= len(rates):
            end = max(each / rate for each, rate in zip(found, rates, strict=True))
            assert end == least or (end < SLOWDOWN * least and max(found) - min(found) <= 1)
    assert unit_counts(12, [1, 2, 3]) == [2, 4, 6]
    assert unit_counts(10, [100, 1e-9, 1]) == [8, 1, 1]  # else it would never be measured as faster
    assert unit_counts(2, [1, 1, 50]) == [1, 1, 0]
    assert unit_counts(16, [1.25, 1.25, 1, 1]) == [4, 4, 4, 4]  # 5, 5, 3, 3 would end 4 % earlier
    assert unit_counts(16, [1, 1, 1, 0.5]) == [5, 5, 4, 2]
    assert unit_counts(16, [0.2, 0, 0, 0]) == unit_counts(16, [0] * 4) == [4, 4, 4, 4]  # not known yet
    assert unit_counts(6, [9, 3, 0]) == unit_counts(6, [9, 3, 6])


@given(num_units=st.integers(1, 17), members=st.integers(1, 5))
@settings(derandomize=True, max_examples=15, deadline=None, database=None)
def test_what_lost_members_owe_is_divided_and_nothing_else_moves(num_units: int, members: int) -> None:
    rates = {number * 3: 1.0 + number for number in range(members)}
    began = owners(num_units, rates, [])
    assert began == sorted(began) and [began.count(n) for n in rates] == unit_counts(num_units, [*rates.values()])
    for lost in itertools.chain.from_iterable(itertools.combinations(rates, n) for n in range(members)):
        found = owners(num_units, rates, lost)
        assert all(a == b for a, b in zip(began, found, strict=True) if a not in lost)
        assert len(found) == num_units and not {*found} & {*lost}
        left = [number for number in rates if number not in lost]
        took = [b for a, b in zip(began, found, strict=True) if a in lost]
        assert [took.count(number) for number in left] == unit_counts(len(took), [rates[number] for number in left])
        for order in itertools.permutations(lost):
            assert owners(num_units, dict(reversed(rates.items())), order) == found
        covered = [unit for n in rates for node in nodes_of(n, found) for unit in range(*node)]
        assert sorted(covered) == [*range(num_units)]
        assert all(found[unit] == n for n in rates for node in nodes_of(n, found) for unit in range(*node))


def test_sums_travel_in_the_form_of_fewest_bytes() -> None:
    most_units = {"none": 0, "bf16": 1, "int8": 3, "int4": 7}  # whose encoded values are fewer bytes than their sum
    for (codec, encoded), size in itertools.product(most_units.items(), (1, 2, 3, 4, 7, 8)):
        sums = sums_of(8, [Payload(codec=codec, block=64), LOSSLESS])
        sent = sums.nodes_to_send([(0, size)], 0)
        assert sums.nodes_to_send([(0, size)], 1) == [(0, size)]  # for any other pieces
        assert len(sent) == (size if size <= encoded else 1)
        assert [unit for node in sent for unit in range(*node)] == [*range(size)]


def test_a_unit_whose_piece_was_added_to_its_neighbours_is_computed_again_for_who_asks_for_it_alone() -> None:
    """Even while other pieces of it are still to come: replicas may divide the units differently for a moment."""
    sums = sums_of(4, [LOSSLESS, LOSSLESS])
    sums.require([(2, 4)])
    for unit in (2, 3):
        assert sums.next_unit() == unit
        sums.begin(unit)
        sums.put(unit, 0, leaf(unit, 0))
    assert sums.find((3, 4), 1) is None and sums.next_unit() == Status.WAITING  # it is to come
    assert sums.find((3, 4), 0) is None and sums.next_unit() == 3
    sums.begin(3)
    for piece in (0, 1, 1):  # piece 1 is put twice
        sums.put(3, piece, leaf(3, piece))
    found = sums.find((3, 4), 0)
    assert found is not None and found.tobytes() == leaf(3, 0).tobytes()
