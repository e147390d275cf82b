"""Steps of independent replicas that do not wait for a peer: alone, lagging, closed, replaced; copies of states."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.in_process import HOST, InProcess, Network, OneAtATime, Service
from support.replica_loop import NUM_UNITS, SIZES, check_step, compute, pieces_of, summed, totals

from elastic.replicas import driver, exchange, membership
from elastic.replicas.driver import BehindError, Replicas
from elastic.replicas.peers import NEVER, Peer, read_address, write_address
from elastic.replicas.state_copies import LEAVES, StateCopies
from elastic.replicas.sums import StepSums
from elastic.replicas.transport import SharedLock
from runtime.blobs import PeerError, RefusedError, RequestHandler
from runtime.exit_codes import ResumableError

Make = Callable[..., Replicas]


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def make(tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes members that have met the ones before."""
    monkeypatch.setattr(membership, "ThreadPoolExecutor", OneAtATime)
    made: list[Replicas] = []

    def member(number: int, codec: str = "none", **how: Any) -> Replicas:
        parts = {"transport": network.transport(number), "num_units": NUM_UNITS, "pieces": pieces_of(codec)} | how
        made.append(Replicas(folder=tmp_path, **parts))
        made[-1].members.meet(0)
        made[-1].members.enter(0)
        return made[-1]

    yield member
    for one in made:
        one.close()


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4"])
def test_a_member_alone_has_the_totals(codec: str, make: Make) -> None:
    alone = make(0, codec)
    for number in range(3):
        check_step(alone, number, codec)
    assert alone.count == 1 and alone.is_first and alone.exchange.sent_bytes == 0


def test_delayed_a_step_is_computed_before_the_one_before_it_is_summed(make: Make) -> None:
    delayed, computed = make(0, delay=1), list[tuple[int, int]]()
    for number in range(3):
        step = delayed.step(number)
        for unit in step.units_without_waiting():
            computed.append((number, unit))
            compute(step, number, unit)
        if number:
            before = delayed.step(number - 1)
            assert not [*before.units()]
            assert before.totals().tobytes() == totals(number - 1)
    assert computed == [(number, unit) for number in range(3) for unit in range(NUM_UNITS)]


def test_each_peer_is_asked_from_the_step_after_it_was_met(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again after it was lost and found, because the thread that asked it has ended."""
    asked: list[int] = []
    monkeypatch.setattr(exchange.SumExchange, "_begin_asking", lambda self, peer: asked.append(peer.number))
    here, there = make(0), make(1)
    there.members.enter(9)
    for number, expected in enumerate([[1], [1], [1, 1]]):
        if number == 2:
            here.members.lose(there.members.me, PeerError("a cut link"))
            there.members.tell()
            here.members.seek(1)
        check_step(here, number)
        assert asked == expected


def test_the_units_of_a_peer_that_is_lost_in_a_step_are_computed_here(make: Make) -> None:
    here, there = make(0), make(1)
    step = here.step(0)
    before = [*step.units_without_waiting()]
    here.members.lose(there.members.me, PeerError("gone"))
    after = [*step.units_without_waiting()]
    assert (before, after) == ([0, 1, 2], [3, 4, 5])


def test_what_others_get_is_counted(make: Make, network: Network) -> None:
    alone = make(0)
    check_step(alone, 0)
    link = network.transport(7).connect(alone.members.me.address)
    link.get_whole({"op": "total", "step": 0, "piece": 0}, 4 * SIZES[0])
    assert alone.exchange.sent_bytes == 4 * SIZES[0]
    link.ask({"op": "self"}, 1 << 20)
    assert alone.exchange.sent_bytes == 4 * SIZES[0]


def test_bad_requests_are_refused(make: Make, network: Network) -> None:
    alone = make(0)
    check_step(alone, 0)
    alone.copies.at_step(1, [])  # without copies of the state after step 0
    link = network.transport(7).connect(alone.members.me.address)
    requests: list[dict[str, Any]] = [{}, {"op": []}, {"op": "other", "step": 0, "piece": 0}]
    requests += [{"op": "peer", "record": None}, {"op": "total", "step": 0}]
    requests += [{"op": "total", "step": 0, "piece": piece} for piece in (len(SIZES), -1, True, "0")]
    requests += [{"op": "total", "step": number, "piece": 0} for number in ("0", -(10**30), None)]
    nodes = [(0, 10**30), (1, 3), (0, 0), (None, []), (-1, 1)]
    requests += [{"op": "sum", "step": 0, "piece": 0, "lo": lo, "hi": hi} for lo, hi in nodes]
    requests += [{"op": "copy", "step": 0, "arrays": [0]}, {"op": "copy", "step": 99, "arrays": 3}]
    requests += [{"op": "copy", "step": None, "arrays": [0]}, {"op": "state", "step": 0, "array": 0}]
    for request in requests:
        with pytest.raises(PeerError):
            link.ask(request, 0)
    check_step(alone, 1)


# ------------------------------------------------------------------------------------------------- the end of a wait
class Ended(Exception):
    """The run stops while it waits."""


def waits_for_another(network: Network, folder: Path, release: threading.Event) -> None:
    """Adds a member that takes part, and computes nothing until it is released."""
    service = network.transport(1).serve(lambda request, process, _: answer(request))
    member = Peer(number=1, host=HOST, port=service.address.port, first=0, begun=True, version=1)
    write_address(folder, member, 0)

    def answer(request: dict[str, Any]) -> memoryview:
        if request["op"] != "peer":
            release.wait()
            raise RefusedError("it ends")
        return memoryview(json.dumps({"record": member.as_dict(), "peers": []}).encode())


@pytest.mark.parametrize("why", ["it is asked to stop", "another program has its number", "it is closed"])
def test_a_member_that_waits_ends_at_once(why: str, make: Make, network: Network, tmp_path: Path) -> None:
    """Though the peer never answers; units that it was about to compute are computed before."""
    release, computed = threading.Event(), list[int]()
    waits_for_another(network, tmp_path, release)

    def ends() -> None:
        if why == "it is asked to stop":
            raise Ended
        if why == "it is closed":
            waiting.close()
        waiting.members.successor = waiting.members.me.address

    waiting = make(0)
    error = {"it is asked to stop": Ended, "it is closed": ConnectionError}.get(why, ResumableError)
    with pytest.raises(error):
        summed(waiting, 0, lambda step, unit: computed.append(unit), waits=ends)
    assert computed == [*range(NUM_UNITS // 2)]
    release.set()


# --------------------------------------------------------------------------------------------------- start and close
def test_the_service_answers_once_its_members_exist(make: Make, network: Network, tmp_path: Path) -> None:
    """A caller that has an old address of this port may connect before."""
    answers: list[dict[str, Any]] = []

    class Asked(InProcess):
        def serve(self, answer: RequestHandler) -> Service:
            def ask() -> None:
                content = answer({"op": "self"}, 7, None)  # pyright: ignore[reportArgumentType]
                answers.append(json.loads(bytes(content)))

            asking.append(threading.Thread(target=ask))
            asking[0].start()
            return super().serve(answer)

    asking: list[threading.Thread] = []
    made = make(0, transport=Asked(network, 0))
    asking[0].join()
    assert [answer["number"] for answer in answers] == [0]
    assert read_address(tmp_path, 0, 0) == made.members.me.address


def test_a_second_member_of_a_number_does_not_begin(make: Make, network: Network, tmp_path: Path) -> None:
    """It changes nothing, and leaves no service running."""
    first = make(0)
    with pytest.raises(ValueError, match="replica 0 runs at host:1 already"):
        make(0)
    assert [*network.answers] == [1] and read_address(tmp_path, 0, 0) == first.members.me.address
    check_step(first, 0)


def test_a_closed_member_answers_none_and_leaves_no_address(make: Make, network: Network, tmp_path: Path) -> None:
    """Its process may live on for a while, and its peers would take it for a replica that has come back."""
    ended = make(0)
    link = network.transport(7).connect(ended.members.me.address)
    ended.close()
    with pytest.raises(PeerError, match=LEAVES):
        link.ask({"op": "peer", "record": ended.members.me.as_dict()}, 1000)
    assert read_address(tmp_path, 0, 0) is None and not network.answers


# ------------------------------------------------------------------------------------------------------------- behind
def test_a_member_whose_state_is_older_than_all_others_takes_theirs(make: Make) -> None:
    """No other one took part in its next step: by itself it would do all steps until the first one did."""
    other, joins = make(0), make(1)
    joins.members.tell(first=NEVER)
    other.members.enter(5)
    check_step(other, 5)
    with pytest.raises(BehindError):
        check_step(joins, 0)


def test_a_member_whose_peers_no_longer_have_the_totals_takes_their_state(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "KEPT_STEPS", 1)
    other, joins = make(0), make(1)
    joins.members.tell(first=NEVER)
    for number in range(3):
        check_step(other, number)
    with pytest.raises(BehindError, match="no longer have the totals of step 0"):
        check_step(joins, 0)


def test_a_member_about_to_enter_begins_where_all_others_leave(make: Make) -> None:
    """It has all that they did, and waits for nobody."""
    leaves, joins = make(0), make(1)
    joins.members.tell(first=9)
    for number in range(2):
        check_step(leaves, number)
    leaves.members.tell(step=2, last=1)
    check_step(joins, 2)
    assert joins.members.me.first == 2


@pytest.mark.parametrize("count", [1, 2])
def test_the_last_one_that_leaves_waits_for_those_about_to_enter(
    count: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until each has what it did, one step after each look; if a peer stays, that one can send it."""
    leaves, *joiners = (make(number) for number in range(1 + count))
    for number, joins in enumerate(joiners):
        joins.members.tell(first=9 + number)
    for number in range(2):
        check_step(leaves, number)
    turns = iter([(joins, number) for joins in joiners for number in range(2)])
    a_turn_later = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: check_step(*next(turns)))
    monkeypatch.setattr(membership, "time", a_turn_later)
    leaves.members.leave(2)
    assert not [*turns]

    stays = make(8)
    stays.members.tell(step=2, begun=True)
    joiners[0].members.tell(step=0)
    leaves.members.leave(2)


def test_a_member_that_was_behind_and_is_alone_goes_on_from_its_own_step(make: Make) -> None:
    alone = make(0)
    alone.members.tell(first=5)
    check_step(alone, 2)


def test_few_totals_are_kept_for_a_member_that_does_not_go_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEPT_STEPS", 2)
    trains, hangs = make(0), make(1)
    hangs.members.tell(first=NEVER)
    for number in range(9):
        check_step(trains, number)
    assert [*trains.exchange._sums] == [6, 7, 8]


def test_the_state_is_asked_of_those_that_have_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that leaves earlier has no state; and without it no member continues, because its state is older."""
    stays, leaves, joins = make(0), make(1), make(2)
    for member in (stays, leaves):
        member.members.tell(step=9, begun=True, first=0)
    leaves.members.tell(last=9)
    asked: list[tuple[int, list[int]]] = []

    def fetch(connect: Any, addresses: Any, at: int, *_: object) -> Any:
        asked.append((at, [address.process for address in addresses]))
        if len(asked) < 7:
            raise PeerError("that step has passed")
        return {0: memoryview(b"")}

    monkeypatch.setattr("elastic.replicas.driver.fetch_copies", fetch)
    with pytest.raises(ResumableError, match="do not send the state"):
        joins.fetch_state([0])
    assert asked == [(11 + 2 * i, [0]) for i in range(5)]
    stays.members.tell(step=20)
    assert joins.fetch_state([0]) == (24, [b""])
    assert joins.members._looked is not None and joins.members._looked[1] == 24, "skipped steps are not its own"
    for member in (stays, leaves):
        member.members.tell(first=NEVER, begun=False)
    assert joins.fetch_state([0]) is None, "no other one trains"


def test_a_member_that_lacks_the_state_waits_until_those_that_leave_are_gone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may save for minutes; then it continues from its own state, or from their saved state."""
    monkeypatch.setattr(driver, "ASK_S", 0.0)
    waited: list[None] = []

    def progress() -> None:
        waited.append(None)
        if len(waited) == 3:
            leaves.close()

    leaves, joins = make(0), make(1, progress=progress)
    leaves.members.tell(step=10, begun=True, first=0, last=9)
    assert joins.fetch_state([0]) is None
    assert len(waited) == 3 and not joins.members.all_leave_before(5), "there is none to leave"


def test_none_waits_for_a_hash_that_will_not_come(make: Make) -> None:
    """For a past step, also with `delayed` (a step's sum comes a step after its hash), or for an unknown member."""
    asks, other = make(0), make(1)
    other._lock.wait_for = lambda predicate, timeout=None: predicate() or pytest.fail("it waits")

    def refuses(at: int) -> None:
        with asks._transport.connect(other.members.me.address) as link, pytest.raises(RefusedError, match="KeyError"):
            link.ask({"op": "digest", "step": at}, 99)

    other._digests = {4: "the hash"}
    refuses(3)
    other.members.step = 5
    refuses(5)
    other.members.me = other.members.me.changed(last=6)
    refuses(7)
    other.members.me = other.members.me.changed(first=NEVER, last=NEVER)  # it fetches the others' state
    refuses(6)


def test_none_waits_for_the_hash_of_a_state_that_is_on_its_way(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that needs the others' state again takes part from that step on: they compare before they send it."""
    stays, joins = make(0), make(1)
    stays.members.tell(step=9, begun=True)
    asked: list[int] = []

    def fetch(connect: Any, addresses: Any, at: int, *_: object) -> Any:
        joins._lock.wait_for = lambda predicate, timeout=None: predicate() or pytest.fail("it waits")
        with stays._transport.connect(joins.members.me.address) as link, pytest.raises(RefusedError, match="KeyError"):
            link.ask({"op": "digest", "step": at}, 99)
        asked.append(at)
        return {0: memoryview(b"")}

    monkeypatch.setattr("elastic.replicas.driver.fetch_copies", fetch)
    for _ in range(2):
        assert joins.fetch_state([0])
    assert asked == [11, 11] and joins.members.me.takes_part(11)


def test_none_waits_for_a_step_that_was_skipped() -> None:
    """Its sums were found before they ended: none would wake a thread that waits for them then."""
    sums = StepSums(NUM_UNITS, pieces_of("none"), SharedLock())
    sums.end(LookupError("skipped"))
    for wait in (lambda: sums.wait_for_total(0), lambda: sums.wait_for((0, 1), 0)):
        with pytest.raises(LookupError, match="skipped"):
            wait()


# -------------------------------------------------------------------------------------------------- copies of states
def test_each_of_two_that_join_gets_its_copies_of_the_state() -> None:
    """The second joins before the first has all copies: the first lost them, and both restarted indefinitely."""
    copies = StateCopies(SharedLock())
    arrays = [np.arange(3.0), np.array(7)]
    for member, at in ((1, 2), (2, 5)):
        copies.answer({"op": "copy", "step": at, "arrays": [0, 1]}, member)
        copies.at_step(at, [x + at for x in arrays])
    for member, number, at in ((1, 0, 2), (2, 1, 5), (1, 1, 2), (2, 0, 5)):
        sent = copies.answer({"op": "state", "step": at, "array": number}, member)
        np.testing.assert_array_equal(np.frombuffer(sent, arrays[number].dtype), np.ravel(arrays[number] + at))
    assert not any(copies._copies.values()), "none are kept that all have"
    with pytest.raises(LookupError):
        copies.answer({"op": "state", "step": 2, "array": 0}, 1)


def test_copies_that_no_member_waits_for_are_dropped() -> None:
    """Copies for a member that asks again for a later step, or is lost; copies for other members stay."""
    copies, arrays = StateCopies(SharedLock()), [np.zeros(2), np.ones(2)]
    for at in range(3):
        copies.answer({"op": "copy", "step": at, "arrays": [0, 1]}, 1)
        copies.at_step(at, arrays)
        assert [*copies._copies] == [at]
    copies.answer({"op": "copy", "step": 3, "arrays": [1]}, 2)
    copies.answer({"op": "copy", "step": 3, "arrays": [0]}, 3)
    copies.drop(3)
    copies.at_step(3, arrays)
    copies.drop(1)
    assert {at: [*of] for at, of in copies._copies.items()} == {3: [1]}
    copies.close()  # it leaves: finished copies can still be fetched, and no peer waits for more
    assert copies.answer({"op": "state", "step": 3, "array": 1}, 2).tobytes() == arrays[1].tobytes()
    assert not copies._copies
    with pytest.raises(ConnectionError, match=LEAVES):
        copies.answer({"op": "state", "step": 4, "array": 1}, 2)


def test_the_copies_of_a_lost_peer_are_dropped(make: Make) -> None:
    here, there = make(0), make(1)
    here.copies.answer({"op": "copy", "step": 5, "arrays": [0]}, 1)
    here.members.lose(there.members.me, PeerError("gone"))
    assert not here.copies.are_wanted(5)


def test_a_member_that_is_lost_while_its_copy_is_made_keeps_none() -> None:
    copies = StateCopies(SharedLock())

    class Lost:
        """An array whose copy takes a while, in which the member that wants it is lost."""

        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            copies.drop(1)
            return np.zeros(2)

    copies.answer({"op": "copy", "step": 1, "arrays": [0]}, 1)
    copies.at_step(1, [Lost()])
    assert not copies._copies
