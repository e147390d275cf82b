"""Replicas in threads, over loopback: the bits of one for any number, whichever join, leave, are lost or meet again.

Each checks the totals of every step, as all do in support/replica_loop.py.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.replica_loop import (
    NUM_UNITS,
    PATIENCE_S,
    STATE_BYTES,
    STEPS,
    TOKEN,
    Gone,
    Loop,
    check_step,
    pieces_of,
    started,
    trained,
)
from support.waiting import until

from elastic.replicas import driver, exchange, membership
from elastic.replicas.driver import Replicas
from elastic.replicas.peers import FILE_NAME, NEVER
from elastic.replicas.sums import StepSums
from elastic.replicas.transport import Sockets
from runtime import blobs
from runtime.blobs import Connection, PeerError

pytestmark = pytest.mark.slow  # threads that wait for each other


@pytest.fixture(params=[0, 1], ids=["at once", "late"])
def late(request: pytest.FixtureRequest) -> int:
    """1: a step is summed while the units of the next one are computed."""
    return request.param


# ------------------------------------------------------------------------------------------ deaths, leaves and rates
DIES, LEAVES = "dies", "leaves"
FATES: list[tuple[int, str, dict[int, tuple[str, int, int]]]] = [  # of replicas: in which step, after how many units
    (3, "none", {}),
    (2, "bf16", {}),
    (4, "int4", {}),
    (3, "none", {2: (DIES, 2, 0)}),
    (3, "int8", {2: (DIES, 2, 1)}),
    (4, "none", {0: (DIES, 1, 0), 2: (DIES, 3, 0), 3: (DIES, 3, 0)}),
    (3, "none", {0: (LEAVES, 2, 2)}),
]


@pytest.mark.parametrize(("count", "codec", "fates"), FATES)
def test_all_have_the_bits_of_one_whoever_dies_or_leaves(
    count: int, codec: str, fates: dict[int, tuple[str, int, int]], late: int, tmp_path: Path
) -> None:
    steps = STEPS + 2 * late  # so much later all know of a loss when they begin a step
    loops = started(tmp_path, count, codec, steps, late)
    for number, (fate, at, units) in fates.items():
        if fate == LEAVES:
            leave_after(loops[number], at)
        else:
            loops[number].before_unit = dies_at(loops[number], at, units)
    trained(loops)
    for step in range(steps):
        computed = [loop.computed.get(step, []) for loop in loops]
        assert {unit for units in computed for unit in units} == {*range(NUM_UNITS)}
        if not fates:  # none computes what another one does
            assert sum(map(len, computed)) == NUM_UNITS and max(map(len, computed)) - min(map(len, computed)) <= 1
    stays = [loop for loop in loops if loop.number not in fates]
    assert sorted(unit for loop in stays for unit in loop.computed[steps - 1]) == [*range(NUM_UNITS)]
    died = {number for number, (fate, *_) in fates.items() if fate == DIES}
    for loop in stays:
        lost = [about for event, about in loop.log.events if event == "replica_lost"]
        assert {about["replica"] for about in lost} & {*fates} == died and loop.replicas.count == len(stays)
        assert all(about["step"] in range(fates[n][1] - late - 1, steps) for about in lost if (n := about["replica"]))


def dies_at(loop: Loop, at: int, units: int) -> Callable[[int, int], None]:
    def die(step: int, unit: int) -> None:
        if step == at and len(loop.computed.get(at, [])) == units:
            raise Gone

    return die


def leave_after(loop: Loop, last: int) -> None:
    loop.steps = last + 1
    loop.before_step = lambda step: loop.replicas.members.tell(last=last) if step == last else None


def test_faster_replicas_compute_more_units(tmp_path: Path) -> None:
    loops = started(tmp_path, 3)
    for loop, rate in zip(loops, (1.0, 3.0, 2.0), strict=True):
        loop.replicas.members.tell(rate=rate)
    trained(loops)
    assert [[len(loop.computed[step]) for loop in loops] for step in range(STEPS)] == [[1, 3, 2]] * STEPS


# ------------------------------------------------------------------------------------------------------------- joins
def end_soon(new: Loop, *others: Loop) -> None:
    """Lets all end three steps after the first in which a new one takes part: the others cannot be further."""

    def end(step: int, unit: int) -> None:
        for loop in (*others, new):
            loop.steps = min(loop.steps, step + 3)

    new.before_unit = end
    new.go()


def test_one_that_joins_takes_the_state_from_all_others(
    late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "ASK_S", 0.0)
    joined, asked = threading.Event(), set[int]()
    loops = started(tmp_path, 2, steps=NEVER, delay=late)

    def has_met(loop: Loop) -> None:
        """Waits until a member knows when the late one enters: only then all members derive the same plan."""
        until(lambda: any(m.number == 2 and m.first != NEVER for m in loop.replicas.members.peers))

    for loop in loops:
        loop.before_unit = lambda step, unit: joined.wait(PATIENCE_S) if step == 6 else None
        loop.before_step = lambda step, loop=loop: has_met(loop) if step == 9 else None
        loop.note_copies(asked, loop.number)
        loop.go()
    until(lambda: min(loop.replicas.members.me.step for loop in loops) >= 6 - late)
    new = Loop(tmp_path, 2, steps=NEVER, delay=late).start(joins=True)
    end_soon(new, *loops)
    until(lambda: asked == {0, 1})
    joined.set()
    for loop in (*loops, new):
        loop.end()
    assert new.fetched == [8] and len(new.blocks) >= len(STATE_BYTES) and not loops[0].blocks
    first = min(new.computed)
    assert first > new.fetched[0] and new.steps == first + 3
    assert [[len(loop.computed[step]) for loop in (*loops, new)] for step in range(first, first + 3)] == [[2, 2, 2]] * 3


@pytest.mark.parametrize(("slow", "fetches"), [("totals", 1), ("state", 2)])
def test_one_that_joins_over_a_slow_link_takes_part(
    slow: str, fetches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets totals slower than its peer trains, or its state slower than the peer keeps totals: it is waited for."""
    monkeypatch.setattr(*((membership, "PATIENCE_S", 0.05) if slow == "totals" else (exchange, "KEPT_STEPS", 4)))
    (alone,) = started(tmp_path, 1, steps=NEVER)
    alone.before_step = lambda step: time.sleep(0.02)
    alone.go()
    until(lambda: alone.replicas.members.me.step >= 6)
    new = Loop(tmp_path, 1, steps=NEVER).start(joins=True)
    owner, name, pause_s = (new.replicas.exchange, "_fetch", 0.1) if slow == "totals" else (driver, "fetch_copies", 0.5)
    fetch = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: (fetch(*args), time.sleep(pause_s))[0])
    end_soon(new, alone)
    for loop in (alone, new):
        loop.end()
    assert len(new.fetched) == fetches and alone.steps == new.steps
    assert slow == "totals" or min(new.computed) == new.fetched[1], "a third fetch would not help either"
    assert [len(loop.computed[new.steps - 1]) for loop in (alone, new)] == [3, 3]


def test_one_that_starts_anew_under_its_number_is_not_waited_for(late: int, tmp_path: Path) -> None:
    """The others need its part of the step; the new one needs their state, from a step after that."""
    loops = started(tmp_path, 2, steps=6, delay=late)
    stopped, met, again = threading.Event(), threading.Event(), threading.Event()

    def stop(step: int, unit: int) -> None:
        if step == 2:
            stopped.set()
            again.wait(PATIENCE_S)  # silent about this step, but it does not close
            raise Gone

    loops[0].before_step = lambda step: met.wait(PATIENCE_S) if step == 5 else None  # not gone before it has answered
    loops[1].before_unit = stop
    for loop in loops:
        loop.go()
    assert stopped.wait(PATIENCE_S)
    (tmp_path / "1" / FILE_NAME.format(0)).unlink()  # its host is gone, which the other one has not noticed
    anew = Loop(tmp_path, 1, delay=late)
    assert anew.replicas.members.meet(0)
    met.set()
    loops[0].end()
    assert sorted(loops[0].computed[2]) == [*range(NUM_UNITS)]
    again.set()
    loops[1].end()
    anew.replicas.close()


def test_closing_ends_what_waits(tmp_path: Path) -> None:
    """The steps of this member, and the requests of others: for a sum, for a total, for a state."""
    loop, other = started(tmp_path, 2)
    other.before_step = lambda step: loop.replicas.close()
    requests = [{"op": "total", "step": 0, "piece": 0}, {"op": "state", "step": 5, "array": 0}]
    requests += [{"op": "sum", "step": 9, "piece": 0, "lo": 0, "hi": 1}]
    loop.go()
    waiting = [threading.Event() for _ in requests]

    def ask(request: dict[str, Any], waits: threading.Event) -> None:
        with Connection(loop.replicas.members.me.address, TOKEN, "replicas 0", 7, silence_s=60) as connection:
            connection.ask(request, 0, waits.set)

    with ThreadPoolExecutor(len(requests)) as pool:
        asked = [pool.submit(ask, *each) for each in zip(requests, waiting, strict=True)]
        assert all(waits.wait(60) for waits in waiting)
        loop.replicas.close()
        for done in asked:
            with pytest.raises(PeerError, match="this replica leaves"):
                done.result(60)
    with pytest.raises(ConnectionError, match="this replica leaves"):
        loop.end()
    other.go().end()
    assert sorted(other.computed[0]) == [*range(NUM_UNITS)]


# ------------------------------------------------------------------------- members that lose each other, and are there
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


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Replicas]]:
    """Makes members whose steps the test does."""
    monkeypatch.setattr(membership, "SEEK_S", 0.05)
    made: list[Loop] = []

    def member(number: int, **how: Any) -> Replicas:
        made.append(Loop(tmp_path, number, **how).start())
        return made[-1].replicas

    yield member
    for loop in made:
        loop.replicas.close()


def test_waiting_for_what_others_say_of_a_step_is_no_hang(
    make: Callable[..., Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may validate, or save, before it. And of a step's sums: `agree` is called for each look."""
    monkeypatch.setattr(blobs, "WAIT_S", 0.02)
    asked, looked = threading.Semaphore(0), threading.Semaphore(0)
    waits = make(0, progress=asked.release, agree=lambda value: (looked.release(), [value])[1])
    other = make(1)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(lambda: (waits.compare(0, "a"), check_step(waits, 0))[0])
        assert all(asked.acquire(timeout=60) for _ in range(3))
        assert other.compare(0, "a")
        while looked.acquire(blocking=False):
            pass
        assert all(looked.acquire(timeout=60) for _ in range(20))
        check_step(other, 0)
        assert training.result(60)


def test_nobody_waits_for_a_step_that_another_one_skips(
    make: Callable[..., Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what asks it for totals would hang on that step, and ask for none of those in which it takes part again.

    What it owes of the step is divided as soon as it says that it takes no part.
    """
    monkeypatch.setattr(exchange, "CONNECTIONS", 1)
    stays, skips = make(0), make(1)
    begun = StepSums(NUM_UNITS, pieces_of("none"), skips._lock)
    skips.exchange._sums[0] = begun  # and it will not end it
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(check_step, stays, 0)
        until(lambda: begun.is_requested(1))
        skips.members.tell(first=NEVER, begun=False)
        first.result(60)
        monkeypatch.setattr("elastic.replicas.driver.fetch_copies", lambda *_: {0: memoryview(b"")})
        fetched = skips.fetch_state([0])
        assert fetched is not None and skips.members._looked is not None
        assert skips.members._looked[1] == fetched[0], "the steps that it skipped would count as its own"
        (at, _) = fetched
        skips.members.enter(at)
        rest = pool.submit(lambda: [check_step(stays, number) for number in range(1, at + 1)])
        check_step(skips, at)
        rest.result(30)
