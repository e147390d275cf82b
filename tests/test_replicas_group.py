"""Replicas in threads, over loopback: the same bits for any number of replicas, also if replicas join and leave."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.replica_loop import NUM_UNITS, PATIENCE_S, STATE_BYTES, STEPS, TOKEN, Gone, Loop, started, trained
from support.waiting import until

from elastic.replicas import driver, exchange, membership
from elastic.replicas.peers import FILE_NAME, NEVER
from runtime.blobs import Connection, PeerError

pytestmark = pytest.mark.slow  # threads that wait for each other


@pytest.fixture(params=[0, 1], ids=["at once", "late"])
def late(request: pytest.FixtureRequest) -> int:
    """1: a step is summed while the units of the next one are computed."""
    return request.param


@pytest.mark.parametrize(("count", "codec"), [(3, "none"), (2, "bf16"), (4, "int4")])
def test_any_number_of_replicas_has_the_bits_of_one(count: int, codec: str, late: int, tmp_path: Path) -> None:
    loops = started(tmp_path, count, codec, delay=late)
    trained(loops)
    for step in range(STEPS):
        assert sorted(unit for loop in loops for unit in loop.computed.get(step, [])) == [*range(NUM_UNITS)]
        assert all(len(loop.computed[step]) == len(loops[0].computed[step]) for loop in loops if count != 4)


def test_faster_replicas_compute_more_units(tmp_path: Path) -> None:
    loops = started(tmp_path, 3)
    for loop, rate in zip(loops, (1.0, 3.0, 2.0), strict=True):
        loop.replicas.members.tell(rate=rate)
    trained(loops)
    assert [[len(loop.computed[step]) for loop in loops] for step in range(STEPS)] == [[1, 3, 2]] * STEPS


@pytest.mark.parametrize(("units_before_death", "codec"), [(0, "none"), (1, "int8")])
def test_others_finish_the_step_in_which_one_is_lost(
    units_before_death: int, codec: str, late: int, tmp_path: Path
) -> None:
    steps = STEPS + 2 * late  # so much later all know of the loss when they begin a step
    loops = started(tmp_path, 3, codec, steps, late)

    def die(step: int, unit: int) -> None:
        if step == 2 and len(loops[2].computed.get(2, [])) == units_before_death:
            raise Gone

    loops[2].before_unit = die
    trained(loops)
    assert sorted(loops[2].computed) == [0, 1, 2][: 2 + units_before_death]
    survivors = [loop.computed for loop in loops[:2]]
    assert {unit for computed in survivors for unit in computed[2]} | {*loops[2].computed.get(2, [])} == {
        *range(NUM_UNITS)
    }
    assert [len(computed[steps - 1]) for computed in survivors] == [3, 3]
    for loop in loops[:2]:
        assert len([e for e, _ in loop.log.events if e == "replica_lost"]) == 1 and loop.replicas.count == 2
        assert any(a["step"] in range(1 - late, 3) for e, a in loop.log.events if e == "replica_lost")


def test_all_but_one_may_be_lost(late: int, tmp_path: Path) -> None:
    loops = started(tmp_path, 4, delay=late)
    for number in (0, 2, 3):

        def die(step: int, unit: int, at: int = 1 + number) -> None:
            if step == min(at, 3):
                raise Gone

        loops[number].before_unit = die
    trained(loops)
    assert sorted(loops[1].computed[3]) == [*range(NUM_UNITS)]


def test_one_that_leaves_is_not_lost(late: int, tmp_path: Path) -> None:
    loops = started(tmp_path, 3, delay=late)
    loops[0].steps = 3
    loops[0].before_step = lambda step: loops[0].replicas.members.tell(last=2) if step == 2 else None
    trained(loops)
    for loop in loops[1:]:
        assert len(loop.computed[2]) == 2 and len(loop.computed[3]) == 3
        assert not [fields for event, fields in loop.log.events if event == "replica_lost" and fields["replica"] == 0]


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
        answer = loop.replicas.copies.answer
        loop.replicas.copies.answer = lambda request, member, number=loop.number, answer=answer: (
            asked.add(number) or answer(request, member)
        )
        loop.go()
    until(lambda: min(loop.replicas.members.me.step for loop in loops) >= 6 - late)
    new = Loop(tmp_path, 2, steps=NEVER, delay=late).start(joins=True)

    def end(step: int, unit: int) -> None:
        for loop in (*loops, new):
            loop.steps = min(loop.steps, step + 3)  # the others cannot be further: this one computes a part of it

    new.before_unit = end
    new.go()
    until(lambda: asked == {0, 1})
    joined.set()
    for loop in (*loops, new):
        loop.end()
    assert new.fetched == [8] and len(new.blocks) >= len(STATE_BYTES) and not loops[0].blocks
    first = min(new.computed)
    assert first > new.fetched[0] and new.steps == first + 3
    assert [[len(loop.computed[step]) for loop in (*loops, new)] for step in range(first, first + 3)] == [[2, 2, 2]] * 3


def test_one_that_gets_the_totals_slower_than_the_others_train_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over a slow link, with a member that exchanges with no peer: it would lag indefinitely."""
    monkeypatch.setattr(membership, "PATIENCE_S", 0.05)
    (alone,) = started(tmp_path, 1, steps=NEVER)
    alone.before_step = lambda step: time.sleep(0.02)
    alone.go()
    until(lambda: alone.replicas.members.me.step >= 6)
    new = Loop(tmp_path, 1, steps=NEVER).start(joins=True)
    fetch = new.replicas.exchange._fetch  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(new.replicas.exchange, "_fetch", lambda *args: time.sleep(0.1) or fetch(*args))

    def end(step: int, unit: int) -> None:
        for loop in (alone, new):
            loop.steps = min(loop.steps, step + 3)

    new.before_unit = end
    new.go()
    for loop in (alone, new):
        loop.end()
    assert len(new.fetched) == 1 and alone.steps == new.steps
    assert [len(loop.computed[new.steps - 1]) for loop in (alone, new)] == [3, 3]


def test_one_that_needs_the_state_a_second_time_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fetch takes longer than the steps that the others keep: a third fetch would not help either."""
    monkeypatch.setattr(exchange, "KEPT_STEPS", 4)
    (alone,) = started(tmp_path, 1, steps=NEVER)
    alone.before_step = lambda step: time.sleep(0.01)
    alone.go()
    until(lambda: alone.replicas.members.me.step >= 6)
    new, fetch = Loop(tmp_path, 1, steps=NEVER).start(joins=True), driver.fetch_copies

    def slowly(*args: Any) -> Any:
        found = fetch(*args)
        time.sleep(0.5)
        return found

    def end(step: int, unit: int) -> None:
        for loop in (alone, new):
            loop.steps = min(loop.steps, step + 3)

    monkeypatch.setattr(driver, "fetch_copies", slowly)
    new.before_unit = end
    new.go()
    for loop in (alone, new):
        loop.end()
    assert len(new.fetched) == 2 and min(new.computed) == new.fetched[1]


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
