"""Who knows whom among independent replicas: in one process, one call after the other, with a clock of the test."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.in_process import HOST, InProcess, Network, OneAtATime

from elastic.replicas import membership
from elastic.replicas.membership import NO_PEER, RARELY, Log, Membership
from elastic.replicas.numbers import check_number_is_free
from elastic.replicas.peers import FILE_NAME, NEVER, STALE_S, Peer, read_address, read_addresses, write_address
from elastic.replicas.state_copies import StateCopies
from elastic.replicas.transport import SharedLock
from runtime.blobs import PeerError, Stall, StalledError
from runtime.events import Event
from runtime.exit_codes import ResumableError


@dataclass
class Members:
    """The members of a run, in one process."""

    folder: Path
    network: Network = field(default_factory=Network)
    live: dict[int, Membership] = field(default_factory=dict)
    events: list[tuple[int, str, int, int]] = field(default_factory=list)  # reporter, event, replica, step
    said: list[str] = field(default_factory=list)

    def start(self, number: int, step: int = 0, run: str = "") -> Membership:
        """Starts a member, which takes part at once if no other one has begun."""
        transport = self.network.transport(number)
        service = transport.serve(lambda request, process, _: made.answer(request, process))
        me = Peer(number=number, host=HOST, port=service.address.port, run=run)

        made = Membership(
            me,
            folder=self.folder,
            transport=transport,
            delay=0,
            lock=(lock := SharedLock()),
            copies=StateCopies(lock),
            agree=lambda value: [value],
            log=Reports(self, number),
        )
        check_number_is_free(self.folder, transport)
        write_address(self.folder, me, 0)
        self.live[number] = made
        if not made.meet(step):
            made.enter(step)
        return made

    def kill(self, number: int) -> Membership:
        """Ends a member without a word."""
        killed = self.live.pop(number)
        del self.network.answers[killed.me.port]
        return killed

    def known_to(self, number: int) -> list[int]:
        return [member.number for member in self.live[number].peers]


class Reports(Log):
    """Keeps the reports of replica `number`."""

    def __init__(self, members: Members, number: int) -> None:
        self.members, self.number = members, number

    def say(self, text: str) -> None:
        self.members.said.append(text)

    def write(self, event: Event, *, replica: int, step: int, **fields: str) -> None:
        self.members.events.append((self.number, event, replica, step))


@pytest.fixture(autouse=True)
def in_turn(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Runs greetings one after the other; returns the clock, which does not advance."""
    clock = SimpleNamespace(now_s=1000.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(membership, "ThreadPoolExecutor", OneAtATime)
    monkeypatch.setattr(membership, "time", clock)
    return clock


@pytest.fixture
def run(tmp_path: Path) -> Members:
    return Members(tmp_path)


class ComeAndGo(RuleBasedStateMachine):
    """Members start, die, leave, lose sight of each other and step, in any order; links are cut and heal."""

    @initialize()
    def begin(self) -> None:
        self.patch, self.folder = pytest.MonkeyPatch(), TemporaryDirectory()
        self.patch.setattr(membership, "ThreadPoolExecutor", OneAtATime)
        self.run, self.step = Members(Path(self.folder.name)), 0

    numbers = st.integers(0, 3)

    @rule(number=numbers)
    def start(self, number: int) -> None:
        if number in self.run.live:
            with pytest.raises(ValueError, match="runs at"):
                check_number_is_free(self.run.folder, self.run.network.transport(number))
        else:
            made = self.run.start(number, self.step)
            if made.me.first == NEVER:
                made.enter(self.step + 2)

    @precondition(lambda self: self.run.live)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        self.run.kill(data.draw(st.sampled_from(sorted(self.run.live))))

    @precondition(lambda self: self.run.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.run.live)))
        self.run.live[number].tell(last=self.step)
        self.run.kill(number).withdraw()

    @rule(one=numbers, other=numbers)
    def cut(self, one: int, other: int) -> None:
        if one != other:
            self.run.network.cut.add(frozenset((one, other)))

    @rule()
    def heal(self) -> None:
        self.run.network.cut.clear()

    @precondition(lambda self: self.run.live)
    @rule(data=st.data(), turn=st.sampled_from([1, RARELY]))
    def seek(self, data: st.DataObject, turn: int) -> None:
        data.draw(st.sampled_from(sorted(self.run.live.items())))[1].seek(turn)

    @rule(one=numbers, other=numbers, stalled=st.booleans())
    def lose(self, one: int, other: int, stalled: bool) -> None:
        if one in self.run.live and (known := [m for m in self.run.live[one].peers if m.number == other]):
            self.run.live[one].lose(known[0], (StalledError if stalled else PeerError)("lost"))

    @rule()
    def go_on(self) -> None:
        self.step += 1
        for member in self.run.live.values():
            member.step, member.me = self.step, member.me.changed(step=self.step, begun=True)

    @invariant()
    def records_are_of_others_and_no_newer_than_they_are(self) -> None:
        for number, member in self.run.live.items():
            for other in member.peers:
                assert other.number != number
                owner = self.run.live.get(other.number)
                if owner and owner.me.address == other.address:
                    assert other.version <= owner.me.version

    def teardown(self) -> None:
        """When all links have healed, and all have looked for each other, each knows the live ones as they are."""
        if not hasattr(self, "run"):
            return
        self.heal()
        self.go_on()
        for _ in range(2):
            for member in self.run.live.values():
                member.seek(RARELY)
        for member in self.run.live.values():
            member.tell(rate=1.0)
        for number, member in self.run.live.items():
            wanted = {other: self.run.live[other].me for other in self.run.live if other != number}
            assert {other.number: other for other in member.peers} == wanted
        self.patch.undo()
        self.folder.cleanup()


ComeAndGo.TestCase.settings = settings(
    derandomize=True, max_examples=60, stateful_step_count=30, deadline=None, database=None
)
test_members_come_and_go = ComeAndGo.TestCase


# ---------------------------------------------------------------------------------------------------- one's own number
def test_a_number_that_is_in_use_is_refused(run: Members) -> None:
    """By one line; a program that is about to end is waited for by the next start. Nothing else answers as it does."""
    first = run.start(3)
    check = partial(check_number_is_free, run.folder, run.network.transport(3))
    with pytest.raises(ValueError, match=r"replica 3 runs at host:1 already; give this one another number \(--group\)"):
        run.start(3)
    assert read_address(run.folder, 3, 0) == first.me.address
    first.tell(last=7)
    with pytest.raises(ResumableError, match="is about to end; run the same command again"):
        check()
    for answer in (b"", b"[]", b"{}", json.dumps(run.start(4).me.as_dict()).encode()):
        run.network.answers[first.me.port] = lambda *_, answer=answer: memoryview(answer)
        check()
    run.kill(3)
    check()


def test_the_address_is_looked_at_until_it_stays(run: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that start at once: the second one's check took a while, in which the first has written its own."""
    run.start(3)
    run.kill(3)
    connect = InProcess.connect

    def slowly(transport: InProcess, *to: Any) -> Any:
        monkeypatch.setattr(InProcess, "connect", connect)
        run.start(3)
        raise PeerError("no answer")

    monkeypatch.setattr(InProcess, "connect", slowly)
    with pytest.raises(ValueError, match="runs at host:2 already"):
        check_number_is_free(run.folder, run.network.transport(3))


def test_a_member_writes_its_address_again_unless_another_program_has_its_number(run: Members) -> None:
    here = run.start(3)
    here.withdraw()
    assert read_address(run.folder, 3, 0) is None
    here.seek(1)
    assert read_address(run.folder, 3, 0) is None
    here.seek(RARELY)
    assert read_address(run.folder, 3, 0) == here.me.address and here.successor is None
    del run.network.answers[here.me.port]  # it was stopped for a while, and replaced
    again = run.start(3)
    here.seek(RARELY)
    here.withdraw()
    assert here.successor == again.me.address == read_address(run.folder, 3, 0)


# ---------------------------------------------------------------------------------------------------------- addresses
def grow_old(folder: Path, number: int) -> None:
    file = folder / str(number) / FILE_NAME.format(0)
    newest_s = file.stat().st_mtime
    os.utime(file, (newest_s - STALE_S - 9,) * 2)


def test_stale_addresses_cost_the_start_nothing_and_go_away(run: Members) -> None:
    """Hosts that drop packets let their callers wait: 100 of them have left addresses."""
    for number in range(100):
        write_address(run.folder, Peer(number=number, host=HOST, port=9999), 0)
        grow_old(run.folder, number)
    write_address(run.folder, Peer(number=100, host=HOST, port=9999), 0)  # it may be about to start
    run.start(101)
    grow_old(run.folder, 101)  # it trains, and cannot write
    run.network.connected.clear()
    here = run.start(102)
    assert run.network.connected == [(102, 100)] and not here.peers
    OneAtATime.most = 0
    here.seek(1)
    assert OneAtATime.most >= 100, "they are greeted at once"
    assert run.known_to(102) == [101]
    fresh, stale = read_addresses(run.folder, 102, 0)
    assert [[address.process for address in found] for found in (fresh, stale)] == [[100], [101]]


def test_lost_members_are_greeted_for_a_while_only(run: Members, in_turn: SimpleNamespace) -> None:
    here = run.start(0)
    there = run.start(1)
    run.network.cut.add(frozenset((0, 1)))
    here.lose(there.me, PeerError("silent"))
    (run.folder / "1" / FILE_NAME.format(0)).unlink()
    greeted = []
    for after_s in (STALE_S - 1, 2):
        in_turn.now_s += after_s
        run.network.connected.clear()
        here.seek(1)
        greeted.append(len(run.network.connected))
    assert greeted == [1, 0]


def test_an_address_that_cannot_be_read_hides_no_other(run: Members) -> None:
    """Over NFS while it is replaced; peers pass on its member's address. A folder in its place is an error."""
    run.start(1), run.start(2)
    (run.folder / "1" / FILE_NAME.format(0)).write_text("")
    run.start(0)
    assert run.known_to(0) == [1, 2]


# ------------------------------------------------------------------------------------------------------ lost members
def test_a_member_that_hangs_takes_no_part_until_it_gets_on(run: Members) -> None:
    """Its threads answer each greeting, so it is found again at once: it must not be waited for in each step."""
    here, there = run.start(0), run.start(1)
    for member in (here, there):
        member.step, member.me = 5, member.me.changed(step=5, begun=True)
    here.lose(there.me, StalledError("it makes no progress"))
    here.seek(1)
    assert run.known_to(0) == [1] and not here.takes_part(1, 5)
    there.me = there.me.changed(step=6)
    here.seek(1)
    assert here.takes_part(1, 6)
    here.lose(there.me, PeerError("a cut link"))
    here.seek(1)
    assert here.takes_part(1, 6), "a member that was cut off is not one that hangs"


def test_a_member_that_was_cut_off_and_is_behind_takes_no_part_until_it_has_caught_up(run: Members) -> None:
    """It does not know it: the others did its part of the steps since. Its older records change nothing."""
    here, there = run.start(0), run.start(1)
    old = there.me
    here.lose(there.me, PeerError("a cut link"))
    here.step = 9
    for behind, takes_part in ((7, False), (8, True)):
        there.me = there.me.changed(step=behind)
        here.seek(1)
        assert here.takes_part(1, 9) == takes_part, behind
    here.answer({"op": "peer", "record": there.me.changed(rate=2.0).as_dict()}, 1)
    here.answer({"op": "peer", "record": old.as_dict()}, 1)
    assert [(member.step, member.rate) for member in here.peers] == [(8, 2.0)]


def test_a_stall_is_a_value_that_stays_the_same_for_too_long() -> None:
    times = iter([0.0, 1.0, 5.0, 11.0, 12.0, 21.0, 21.5])
    check = Stall(10.0, clock=lambda: next(times))
    for value in (True, True, 2, 2, 2):
        check(value)
    with pytest.raises(StalledError, match="no progress, for 10 s"):
        check(2)


def test_members_that_others_can_reach_are_not_waited_for_again_and_again(run: Members) -> None:
    """A greeting over a link that drops all packets may take as long as the allowed silence."""
    here, _, _, there = (run.start(number) for number in range(4))
    run.network.cut.add(frozenset((0, 3)))
    here.lose(there.me, PeerError("a cut link"))
    run.network.connected.clear()
    for _ in range(3):
        here.tell()
    assert (0, 3) not in run.network.connected and run.known_to(0) == [1, 2]
    here.answer({"op": "peer", "record": there.me.changed(last=9).as_dict()}, 3)  # it reaches this one
    assert run.known_to(0) == [1, 2]


def test_members_of_another_run_are_not_met(run: Members) -> None:
    """Neither when they are greeted, nor when they greet; each is greeted once, though they know each other."""
    for number in range(3):
        run.start(number)
    run.network.connected.clear()
    with pytest.raises(ValueError, match="replica [012] at .* trains by another config"):
        run.start(3, run="another")
    assert sorted(to for _, to in run.network.connected) == [0, 1, 2]
    assert not run.live[3].peers and [run.known_to(number) for number in range(3)] == [[1, 2], [0, 2], [0, 1]]
    run.kill(0), run.kill(1), run.kill(2), run.kill(3)
    run.start(4)
    assert len(run.said) == 1 and "none of the 4 replicas that" in run.said[0]


def test_a_record_that_describes_no_member_is_not_believed(run: Members) -> None:
    here = run.start(0)
    good = Peer(number=1, host=HOST, port=1).as_dict()
    bad: list[Any] = [None, [], {}, {**good, "more": 1}]
    bad += [{**good, "number": number} for number in (0, 2, -1, "1", True)]
    bad += [{**good, "port": port} for port in (0, -1, 1 << 40)]
    bad += [{**good, "rate": rate} for rate in (-1, 10**400, float("nan"), float("inf"), "1")]
    bad += [{**good, "step": -1}, {**good, "first": "0"}, {**good, "begun": 1}]
    for record in bad:
        with pytest.raises((ValueError, TypeError)):
            here.answer({"op": "peer", "record": record}, 1)
    lists: list[Any] = [5, None, "ab", {"number": 2}, [3], [good, 3]]
    said = [json.dumps({"record": good, "peers": others}) for others in lists]
    said += [json.dumps({"record": record, "peers": []}) for record in bad if record is not None]
    for text in ("", "[]", "{}", *said):
        run.network.answers[999] = lambda *_, text=text: memoryview(text.encode())
        write_address(run.folder, Peer(number=1, host=HOST, port=999), 0)
        here.seek(RARELY)
        assert not here.peers, text
    here.answer({"op": "peer", "record": good}, 1)
    assert run.known_to(0) == [1]


def test_joins_leaves_and_losses_are_reported(run: Members) -> None:
    here = run.start(0)
    joins = run.start(1)
    assert run.events[:2] == [(0, Event.REPLICA_JOINED, 0, 0), (1, Event.REPLICA_JOINED, 0, 0)]
    run.events.clear()
    joins.tell(first=NEVER)
    joins.enter(7)
    joins.tell(rate=2.0)
    joins.tell(last=9)
    lost = run.start(2)
    here.step = 8
    here.lose(lost.me, PeerError("gone"))
    joins.step = here.step = 10
    here.lose(joins.me, PeerError("gone"))  # as it has said
    of_0 = [event[1:] for event in run.events if event[0] == 0]
    assert of_0 == [
        (Event.REPLICA_JOINED, 1, 7),
        (Event.REPLICA_LEFT, 1, 9),
        (Event.REPLICA_JOINED, 2, 0),
        (Event.REPLICA_LOST, 2, 8),
    ]


# ------------------------------------------------------------------------------------------------------- when to enter
def catching_up(*, looked: Any, nearest: Any, newest: Callable[[], int]) -> tuple[Any, list[int]]:
    """Returns a member that lags its peers, which are at the step `newest`, and the steps at which it enters."""
    entered: list[int] = []
    one: Any = SimpleNamespace(_looked=looked, _nearest=nearest, _agree=lambda value: [value], tell=lambda: None)
    one.newest_step, one.enter, one.look = newest, entered.append, partial(Membership.look, one)
    return one, entered


ENTRIES: list[tuple[Any, ...]] = [  # now, the last look, the nearest; its own step and the others'; where it enters
    # in a second the others came from step 110 to 130, so in half of one they will have done ten more
    (8.0, (7.0, 100, 110), (7.0, 10), 125, 130, [140]),  # it came 25 steps: 5 take it 0.2 s
    (8.0, (7.0, 100, 110), (7.0, 10), 110, 130, []),  # 20 steps would take it 2 s
    (8.0, (7.0, 100, 110), (7.0, 10), 129, 130, [140]),
    (8.0, None, (0.0, 0), 125, 130, []),  # the first look says nothing of how fast they are
    (8.0, None, (0.0, 0), 129, 130, [132]),
    # totals take it 5 s a step, as over a slow link, and the only other one a second: it would never catch up
    (15.0, (10.0, 100, 103), (10.0, 3), 101, 108, [110]),
    (15.0, (10.0, 100, 103), (10.0, 6), 101, 108, []),  # it gains less than a step at a time
    (15.0, (10.0, 100, 103), (-300.0, 6), 101, 108, [110]),
    (15.0, (10.0, 100, 103), (10.0, 8), 101, 108, []),  # its lag was larger before
    # all start together, and one is the first: the others need none of its state
    (8.0, None, (0.0, 0), 0, 0, [2]),
    (8.0, None, (0.0, 0), 0, 1, [3]),
    (8.0, None, (0.0, 0), 0, 2, []),
    (8.0, None, (0.0, 0), 5, NO_PEER, [5]),
]


def test_a_member_enters_where_the_others_need_not_wait_for_it(in_turn: SimpleNamespace) -> None:
    failed = []
    for now_s, looked, nearest, step, newest, expected in ENTRIES:
        in_turn.now_s = now_s
        one, entered = catching_up(looked=looked, nearest=nearest, newest=lambda newest=newest: newest)
        Membership.choose_entry(one, step)
        if entered != expected or one._looked != (now_s, step, newest):
            failed.append((now_s, looked, nearest, step, newest, entered))
    assert not failed


def test_a_member_does_not_enter_where_the_others_step_while_it_asks(in_turn: SimpleNamespace) -> None:
    """They would be past the entry. And a member that loses contact to all for a moment is not nearer to them."""
    heard = iter([0, 1])
    one, entered = catching_up(looked=None, nearest=(0.0, 0), newest=lambda: next(heard))
    Membership.choose_entry(one, 0)
    assert not entered
    one.newest_step, before = lambda: NO_PEER, one._nearest
    one.look(101)
    assert one._nearest == before


# --------------------------------------------------------------------------------------------------------- leaving
def test_a_member_that_leaves_waits_for_what_only_it_can_give(
    run: Members, monkeypatch: pytest.MonkeyPatch, in_turn: SimpleNamespace
) -> None:
    """Rows: the peers' records after 2 steps, and whether they need totals of the leaving member."""
    rows: list[tuple[list[dict[str, Any]], bool]] = [
        ([], False),
        ([{"first": 0, "step": 2, "begun": True}], False),
        ([{"first": 0, "step": 1, "begun": True}], True),  # in the last step of this one
        ([{"first": 0, "step": 1, "last": 0}], False),  # it has left before
        ([{"first": 3, "step": 1}], True),  # about to enter, and no other member has the totals
        ([{"first": 3, "step": 1}, {"first": 0, "step": 2, "begun": True}], False),  # who stays keeps them
        ([{"first": 9, "step": 1}, {"first": 3, "step": 2}], True),
    ]
    for others, waits in rows:
        leaves = run.start(0)
        for number, about in enumerate(others, 1):
            record = Peer(number=number, host=HOST, port=10**4 + number, first=NEVER, version=1).changed(**about)
            run.network.answers[record.port] = lambda *_, record=record: memoryview(
                json.dumps({"record": record.as_dict(), "peers": []}).encode()
            )
            leaves.answer({"op": "peer", "record": record.as_dict()}, number)
        slept: list[float] = []

        def sleep(seconds: float, slept: list[float] = slept) -> None:
            slept.append(seconds)
            in_turn.now_s += 10.0

        in_turn.sleep = sleep
        leaves.leave(2)
        assert bool(slept) == waits, others
        assert len(slept) in (0, 3), "30 s at most"
        run.kill(0)
        for port in [port for port in run.network.answers if port > 10**4]:
            del run.network.answers[port]


def test_a_member_about_to_begin_counts_as_there(run: Members) -> None:
    """Else a member whose parameters differ from the majority before the first step would keep them."""
    other, late = run.start(0), run.start(1)
    assert late.newest_step() == 0 and not late.is_alone() and not late.all_leave_before(5)
    other.tell(first=NEVER)
    assert late.is_alone()
    other.me = other.me.changed(begun=True, first=0, last=4)  # it does not tell of each step
    assert not late.is_alone() and late.all_leave_before(5)


def test_a_member_that_is_gone_while_it_takes_no_part_is_noticed(run: Members) -> None:
    """No sum waits for it, and the totals that it would need would be kept."""
    stays, joins, leaves = (run.start(number) for number in range(3))
    joins.tell(first=NEVER)
    leaves.tell(last=3)
    stays.tell(begun=True)
    stays.step = 4
    run.kill(1), run.kill(2)
    stays.seek(1)
    assert not stays.peers


def test_an_address_that_cannot_be_written_is_for_the_scheduler(run: Members) -> None:
    (run.folder / "0").touch()
    one: Any = SimpleNamespace(me=Peer(number=0, host=HOST, port=1), _folder=run.folder)
    one.transport = run.network.transport(0)
    with pytest.raises(ResumableError, match=f"cannot write to {run.folder}: .*; see that the disk has room"):
        Membership.publish(one)


@pytest.fixture(autouse=True)
def no_threads_are_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before
