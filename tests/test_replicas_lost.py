"""Members that lose each other while both are there: neither waits for the other, and they find each other again."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.replica_loop import NUM_UNITS, PATIENCE_S, started, summed
from support.waiting import until

from elastic.replicas import exchange, membership
from elastic.replicas.driver import Replicas, Step
from elastic.replicas.payloads import LOSSLESS
from elastic.replicas.peers import NEVER
from elastic.replicas.sums import Piece, StepSums
from elastic.replicas.transport import Sockets
from runtime import blobs
from runtime.blobs import Connection, PeerError

pytestmark = pytest.mark.slow  # threads that wait for each other
UNITS, PIECES = 4, [Piece(size, LOSSLESS) for size in (3, 5)]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Replicas]]:
    monkeypatch.setattr(membership, "SEEK_S", 0.05)
    made: list[Replicas] = []

    def member(number: int, **how: Any) -> Replicas:
        made.append(Replicas(folder=tmp_path, transport=sockets(number), num_units=UNITS, pieces=PIECES, **how))
        made[-1].members.meet(0)
        made[-1].members.enter(0)
        return made[-1]

    yield member
    for each in made:
        each.close()


def sockets(number: int) -> Sockets:
    return Sockets(number=number, token="0" * 64, silence_s=10.0)


def step(member: Replicas, number: int) -> np.ndarray:
    """Returns a member's totals of a step."""

    def compute(step: Step, unit: int) -> None:
        for piece, (size, _) in enumerate(PIECES):
            step.put(unit, piece, np.full(size, number + unit, np.float32))

    return summed(member, number, compute)


def check(totals: np.ndarray, number: int) -> None:
    assert totals.tolist() == [sum(number + unit for unit in range(UNITS))] * sum(size for size, _ in PIECES)


@pytest.mark.parametrize("late", [0, 1], ids=["at once", "late"])
@pytest.mark.parametrize("apart", [0, 2, 4])
def test_members_that_meet_again_share_the_work_again(
    apart: int, late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many steps are between them, in the midst of which the cut link heals."""
    monkeypatch.setattr(membership, "SEEK_S", 0.05)
    is_cut, healed, connect = threading.Event(), threading.Event(), Sockets.connect

    def reach(*to: Any) -> Connection:
        if is_cut.is_set():
            raise PeerError("a cut link")
        return connect(*to)

    monkeypatch.setattr(Sockets, "connect", reach)
    loops = started(tmp_path, 2, steps=NEVER, delay=late)
    is_cut.set()
    for loop, other in (loops, loops[::-1]):
        loop.replicas.members.lose(other.replicas.members.me, PeerError("a cut link"))
    arrived = [threading.Event(), threading.Event()]
    for loop, stop in zip(loops, (2 + apart, 2), strict=True):

        def share(step: int, number: int, stop: int = stop, at: threading.Event = arrived[loop.number]) -> None:
            time.sleep(0.01)
            if step == stop and not at.is_set():
                at.set()
                healed.wait(PATIENCE_S)

        loop.before_unit = share
        loop.go()
    assert all(at.wait(PATIENCE_S) for at in arrived)
    is_cut.clear()
    until(lambda: all(loop.replicas.members.peers for loop in loops))
    healed.set()

    def is_shared() -> bool:
        one, two = (loop.computed.copy() for loop in loops)
        done = [step for step in one.keys() & two.keys() if step + 1 in one.keys() & two.keys()]
        return any(len(one[step]) == len(two[step]) == NUM_UNITS // 2 for step in done)

    until(is_shared)
    for loop in loops:
        loop.steps = 0  # it leaves after this step
    for loop in loops:
        loop.end()


def test_waiting_for_what_others_say_of_a_step_is_no_hang(
    make: Callable[..., Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may validate, or save, before it. And of a step's sums: `agree` is called for each look."""
    monkeypatch.setattr(blobs, "WAIT_S", 0.02)
    asked, looked = threading.Semaphore(0), threading.Semaphore(0)
    waits = make(0, progress=asked.release, agree=lambda value: (looked.release(), [value])[1])
    other = make(1)
    found: list[Any] = []

    def train() -> None:
        found.append(waits.compare(0, "a"))
        found.append(step(waits, 0))

    thread = threading.Thread(target=train)
    thread.start()
    assert all(asked.acquire(timeout=60) for _ in range(3))
    assert other.compare(0, "a")
    while looked.acquire(blocking=False):
        pass
    assert all(looked.acquire(timeout=60) for _ in range(20))
    check(step(other, 0), 0)
    thread.join(60)
    assert found[0]
    check(found[1], 0)


def test_of_those_with_the_same_parameters_the_lowest_is_the_first(make: Callable[..., Replicas]) -> None:
    """It saves them, whatever another one has that is lower."""
    members = [make(number) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(Replicas.compare, members, [0] * 3, "baa")] == [False, True, True]
    assert [member.is_first for member in members] == [False, True, False]


def test_what_a_member_owes_is_divided_when_it_says_that_it_does_not_take_part(
    make: Callable[[int], Replicas],
) -> None:
    here, away = make(0), make(1)
    totals: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: totals.append(step(here, 0)))
    thread.start()
    until(lambda: here.members.me.begun)
    away.members.tell(first=NEVER, begun=False)
    thread.join(60)
    check(totals[0], 0)


def test_nobody_waits_for_a_step_that_another_one_skips(
    make: Callable[..., Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what asks it for totals would hang on that step, and ask for none of those in which it takes part again."""
    monkeypatch.setattr(exchange, "CONNECTIONS", 1)
    stays, skips = make(0), make(1)
    found: dict[int, list[np.ndarray]] = {0: [], 1: []}

    def train(member: Replicas, *numbers: int) -> threading.Thread:
        totals = found[member.members.me.number]
        thread = threading.Thread(target=lambda: totals.extend(step(member, number) for number in numbers), daemon=True)
        thread.start()
        return thread

    begun = StepSums(UNITS, PIECES, skips._lock)
    skips.exchange._sums[0] = begun  # and it will not end it
    thread = train(stays, 0)
    until(lambda: begun.is_requested(1))
    skips.members.tell(first=NEVER, begun=False)
    thread.join(60)
    assert len(found[0]) == 1
    monkeypatch.setattr("elastic.replicas.driver.fetch_copies", lambda *_: {0: memoryview(b"")})
    fetched = skips.fetch_state([0])
    assert fetched is not None and skips.members._looked is not None
    assert skips.members._looked[1] == fetched[0], "the steps that it skipped would count as its own"
    (at, _) = fetched
    skips.members.enter(at)
    for thread in (train(stays, *range(1, at + 1)), train(skips, at)):
        thread.join(30)
    check(found[1][0], at)
    for number in range(at + 1):
        check(found[0][number], number)


@pytest.mark.parametrize("count", [1, 2])
def test_those_about_to_enter_go_on_where_the_last_one_leaves(
    count: int, make: Callable[..., Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for them, and they for nobody: they have all that it did."""
    monkeypatch.setattr(membership, "_LEAVE_S", 2 * PATIENCE_S)
    leaves, *joiners = [make(number) for number in range(1 + count)]
    for number, joins in enumerate(joiners):
        joins.members.tell(first=3 + number)
    for number in range(2):
        check(step(leaves, number), number)
    with ThreadPoolExecutor(1 + count) as pool:
        left = pool.submit(leaves.members.leave, 2)
        with pytest.raises(TimeoutError):
            left.result(1)
        for number in range(2):
            for joins in joiners:
                check(step(joins, number), number)
        left.result(PATIENCE_S)  # it is there still, and saves
        for totals in pool.map(lambda joins: step(joins, 2), joiners):
            check(totals, 2)
    assert any(joins.members.me.takes_part(2) for joins in joiners)
