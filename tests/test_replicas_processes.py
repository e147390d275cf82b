"""Members of two processes each, all in threads: what one process alone learns, both act upon."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.replica_loop import NUM_UNITS, PATIENCE_S, STEPS, Loop, trained
from support.shard_nodes import Meeting, in_threads
from support.waiting import until

from elastic.replicas import membership
from elastic.replicas.peers import NEVER
from runtime.blobs import PeerError

pytestmark = pytest.mark.slow  # threads that wait for each other


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Loop]]]:
    """Makes the processes of a member."""
    monkeypatch.setattr(membership, "SEEK_S", 600.0)  # those that were lost stay lost
    made: list[Loop] = []

    def member(number: int, *, joins: bool = False, steps: int = STEPS) -> list[Loop]:
        meeting = Meeting(2)

        def process(rank: int) -> Loop:
            loop = Loop(tmp_path, number, steps=steps, process=rank, agree=partial(meeting.all_gather, rank))
            made.append(loop)
            return loop.start(joins=joins)

        return in_threads([partial(process, rank) for rank in range(2)])

    yield member
    for loop in made:
        loop.replicas.close()


def test_what_one_process_wants_computed_both_compute(make: Callable[..., list[Loop]]) -> None:
    """One of them has lost the other member. Whether theirs is the first one is what process 0 thinks."""
    first, second = make(0), make(1)

    def lose(step: int) -> None:
        if step == 2:
            second[1].replicas.members.lose(first[1].replicas.members.me, PeerError("a cut link"))

    second[1].before_step = lose
    trained([*first, *second])
    for one, other in (first, second):
        assert one.computed == other.computed
    assert [sorted(second[0].computed[step]) for step in range(2, STEPS)] == [[*range(NUM_UNITS)]] * (STEPS - 2)
    assert [loop.replicas.is_first for loop in (*first, *second)] == [True, True, False, False]


def test_the_processes_of_a_member_join_at_the_same_step(
    make: Callable[..., list[Loop]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "ASK_S", 0.0)
    monkeypatch.setattr(membership, "ENTRY_S", 0.0)
    asked, joined = set[int](), threading.Event()
    there = make(0, steps=14)

    def knows(loop: Loop, step: int) -> None:
        """Waits in front of step 9 until it is known when the others enter: only then are all guesses alike."""
        if step == 9:
            until(lambda: any(member.first != NEVER for member in loop.replicas.members.peers))

    for rank, loop in enumerate(there):
        loop.before_unit = lambda step, unit: step == 6 and joined.wait(PATIENCE_S)
        loop.before_step = partial(knows, loop)
        loop.note_copies(asked, rank)
        loop.go()
    until(lambda: min(loop.replicas.members.me.step for loop in there) == 6)
    joins = [loop.go() for loop in make(1, joins=True, steps=14)]
    until(lambda: asked == {0, 1})
    joined.set()
    for loop in (*there, *joins):
        loop.end()
    assert [loop.fetched for loop in joins] == [[8], [8]]
    for one, other in (there, joins):
        assert one.computed == other.computed
    assert max(joins[0].computed) == 13 and {len(units) for units in joins[0].computed.values()} == {3}


def test_a_state_is_taken_when_all_processes_have_it(
    make: Callable[..., list[Loop]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(0)
    joins, tries = make(1), Counter[int]()

    def fetch(connect: Any, *_: object) -> dict[int, memoryview]:
        rank = [loop.replicas._transport for loop in joins].index(connect.__self__)
        tries[rank] += 1
        if rank and tries[rank] == 1:
            raise PeerError("it was lost")
        return {0: memoryview(b"")}

    monkeypatch.setattr("elastic.replicas.driver.fetch_copies", fetch)
    assert in_threads([lambda loop=loop: loop.replicas.fetch_state([0]) for loop in joins]) == [(4, [b""])] * 2
    assert tries == {0: 2, 1: 2}


def test_a_member_differs_if_one_of_its_processes_does(make: Callable[..., list[Loop]]) -> None:
    loops = [*make(0), *make(1)]
    digests = ["a", "b", "a", "x"]
    found = in_threads([partial(loop.replicas.compare, 0, says) for loop, says in zip(loops, digests, strict=True)])
    assert found == [True, True, False, False]
