"""Members that lose each other while both are there: neither waits for the other, and they find each other again."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from replica_loop import NUM_SHARES, PATIENCE_S, started
from waiting import until

from replicas import group, membership
from replicas.group import BehindError, Replicas
from replicas.members import FILE_NAME, NEVER, Member, write_address
from replicas.membership import NOBODY, Membership
from replicas.payloads import Float32
from replicas.state_copies import LEAVES, StateCopies
from replicas.sums import StepSums
from runtime import blobs
from runtime.blobs import Address, Connection, PeerError
from runtime.exit_codes import ResumableError

SHARES, SIZES = 4, [3, 5]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Replicas]]:
    monkeypatch.setattr(membership, "SEEK_S", 0.05)
    made: list[Replicas] = []

    def member(number: int, saved: int = 0, **how: Any) -> Replicas:
        about = {"num_shares": SHARES, "payloads": [Float32()] * len(SIZES), "sizes": SIZES, "silence_s": 10.0} | how
        made.append(Replicas(number=number, folder=tmp_path, token="0" * 64, saved=lambda: saved, **about))
        made[-1].members.meet(0)
        made[-1].members.enter(0)
        return made[-1]

    yield member
    for each in made:
        each.close()


def step(member: Replicas, number: int) -> np.ndarray:
    """Returns a member's totals of a step."""

    def compute(share: int) -> None:
        for piece, size in enumerate(SIZES):
            member.put(number, share, piece, np.full(size, number + share, np.float32))

    return member.sum(number, compute)


def check(totals: np.ndarray, number: int) -> None:
    assert totals.tolist() == [sum(number + share for share in range(SHARES))] * sum(SIZES)


@contextlib.contextmanager
def cut_off(one: Replicas, other: Replicas, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two members lose each other, and do not find each other again before the end."""
    with monkeypatch.context() as patch:
        patch.setattr(Membership, "_greet_all", lambda _, addresses, *how: ["a cut link"] * len(addresses))
        one.members.lose(other.members.me, "a cut link"), other.members.lose(one.members.me, "a cut link")
        yield


def test_members_that_lost_each_other_meet_again_and_the_one_behind_takes_the_others_state(
    make: Callable[[int], Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, behind = make(0), make(1)
    with cut_off(ahead, behind, monkeypatch):
        for number in range(9):
            check(step(ahead, number), number)  # alone
    until(lambda: ahead.members.others and behind.members.others)
    check(step(ahead, 9), 9)  # without waiting for the other one, which says that it takes part
    with pytest.raises(BehindError):
        step(behind, 0)


@pytest.mark.parametrize("late", [0, 1], ids=["at once", "late"])
@pytest.mark.parametrize("apart", [0, 1, 2, 3, 4])
def test_members_that_meet_again_share_the_work_again(
    apart: int, late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many steps are between them, in the midst of which the cut link heals."""
    monkeypatch.setattr(membership, "SEEK_S", 0.05)
    is_cut, healed, connect = threading.Event(), threading.Event(), Membership.connect

    def reach(*to: Any) -> Connection:
        if is_cut.is_set():
            raise PeerError("a cut link")
        return connect(*to)

    monkeypatch.setattr(Membership, "connect", reach)
    loops = started(tmp_path, 2, steps=NEVER, late=late)
    is_cut.set()
    for loop, other in (loops, loops[::-1]):
        loop.replicas.members.lose(other.replicas.members.me, "a cut link")
    arrived = [threading.Event(), threading.Event()]
    for loop, stop in zip(loops, (2 + apart, 2), strict=True):

        def share(step: int, number: int, stop: int = stop, at: threading.Event = arrived[loop.number]) -> None:
            time.sleep(0.01)
            if step == stop and not at.is_set():
                at.set()
                healed.wait(PATIENCE_S)

        loop.before_share = share
        loop.go()
    assert all(at.wait(PATIENCE_S) for at in arrived)
    is_cut.clear()
    until(lambda: all(loop.replicas.members.others for loop in loops))
    healed.set()

    def is_shared() -> bool:
        one, two = (loop.computed.copy() for loop in loops)
        done = [step for step in one.keys() & two.keys() if step + 1 in one.keys() & two.keys()]
        return any(len(one[step]) == len(two[step]) == NUM_SHARES // 2 for step in done)

    until(is_shared)
    for loop in loops:
        loop.steps = 0  # it leaves after this step
    for loop in loops:
        loop.end()


def test_those_that_begin_on_two_sides_of_a_cut_link_find_each_other(
    make: Callable[..., Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side has lost the other, and on neither is anybody alone."""
    connect = Membership.connect

    def reach(one: Membership, to: Address, *rest: Any) -> Connection:
        if one.me.number // 2 != to.process // 2:
            raise PeerError("a cut link")
        return connect(one, to, *rest)

    with monkeypatch.context() as cut:
        cut.setattr(Membership, "connect", reach)
        made = [make(number) for number in range(4)]
        until(lambda: all(member.members.others for member in made))
        assert [[one.number for one in member.members.others] for member in made] == [[1], [0], [3], [2]]
    until(lambda: all(len(member.members.others) == 3 for member in made))


def test_those_that_others_can_reach_are_not_waited_for_again_and_again(
    make: Callable[..., Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each greeting of one behind a link that drops all may take as long as silence may."""
    monkeypatch.setattr(membership, "SEEK_S", 600.0)
    here, _, _ = (make(number) for number in range(3))
    there = make(3)
    until(lambda: len(here.members.others) == 3)
    tried, connect = list[int](), Membership.connect

    def reach(one: Membership, to: Address, *rest: Any) -> Connection:
        if (one.me.number, to.process) == (0, 3):
            tried.append(to.process)
            raise PeerError("a cut link")
        return connect(one, to, *rest)

    monkeypatch.setattr(Membership, "connect", reach)
    here.members.lose(there.members.me, "a cut link")
    for _ in range(3):
        here.members.tell()
    assert not tried and [member.number for member in here.members.others] == [1, 2]
    there.members.tell(last=9)  # it reaches this one, if only in this direction
    assert [member.number for member in here.members.others] == [1, 2]
    joins = make(0)  # in its place, knowing of 3 only from the others
    tried.clear()
    joins.members.tell()
    assert not tried


def test_a_file_that_cannot_be_read_hides_no_other(make: Callable[..., Replicas], tmp_path: Path) -> None:
    """Over NFS while it is replaced; its member learns of this one from the others."""
    make(1), make(2)
    (tmp_path / "1" / FILE_NAME.format(0)).write_text("")
    assert [member.number for member in make(0).members.others] == [1, 2]


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
        found.append(waits.agrees(0, "a"))
        found.append(step(waits, 0))

    thread = threading.Thread(target=train)
    thread.start()
    assert all(asked.acquire(timeout=60) for _ in range(3))
    assert other.agrees(0, "a")
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
        assert [*pool.map(Replicas.agrees, members, [0] * 3, "baa")] == [False, True, True]
    assert [member.is_first for member in members] == [False, True, False]


def test_members_whose_first_greetings_came_to_nothing_meet_later(
    make: Callable[[int], Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each took the other one for dead."""
    with monkeypatch.context() as patch:
        patch.setattr(Membership, "answer", lambda *_: memoryview(b""))
        one, two = make(0), make(1)
        assert not (one.members.others or two.members.others)
    until(lambda: one.members.others and two.members.others)


def test_members_that_let_their_callers_wait_are_greeted_at_once(
    make: Callable[[int], Replicas], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these greetings ends when all have begun."""
    all_begun = threading.Barrier(20)
    monkeypatch.setattr(membership, "SEEK_S", 600.0)
    monkeypatch.setattr(Membership, "_greet", lambda *_, **__: f"number {all_begun.wait(60)} of them")
    for number in range(1, 21):
        write_address(tmp_path, Member(number=number, host="127.0.0.1", port=1), 0)
    make(0)
    assert not all_begun.broken


def test_members_of_another_run_are_not_met(
    make: Callable[[int], Replicas], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when they are greeted, nor when they greet; each is greeted once, though they know each other."""
    run, said = [make(number) for number in range(3)], list[str]()
    assert [len(one.members.others) for one in run] == [2, 2, 2]
    about: Any = {"num_shares": SHARES, "payloads": [Float32()] * len(SIZES), "sizes": SIZES, "silence_s": 10.0}
    monkeypatch.setattr(membership, "SEEK_S", 600.0)  # one that knows nobody greets all again
    other = Replicas(number=3, folder=tmp_path, token="0" * 64, run="another", say=said.append, **about)
    connect, greeted = other.members.connect, list[int]()
    monkeypatch.setattr(other.members, "connect", lambda to, *rest: (greeted.append(to.process), connect(to, *rest))[1])
    with contextlib.closing(other):
        with pytest.raises(ValueError, match="replica [012] at .* trains by another config"):
            other.members.meet(0)
        assert sorted(greeted) == [0, 1, 2]
        assert not other.members.others and {m.number for one in run for m in one.members.others} == {0, 1, 2}
    third = Replicas(number=2, folder=tmp_path / "empty", token="0" * 64, say=said.append, **about)
    write_address(tmp_path / "empty", Member(number=7, host="127.0.0.1", port=other.members.me.port), 0)
    with contextlib.closing(third):
        assert not third.members.meet(0)
    assert len(said) == 1 and "none of the 1 replicas that" in said[0] and "Connection refused" in said[0]


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


def test_one_whose_state_is_older_than_all_others_takes_theirs(make: Callable[..., Replicas]) -> None:
    """Nobody who is there took part in its next step: by itself it would do all steps until the first one did."""
    other, joins = make(0), make(1)
    joins.members.tell(first=NEVER)
    other.members.enter(5)
    check(step(other, 5), 5)
    with pytest.raises(BehindError):
        step(joins, 0)


def test_nobody_waits_for_a_step_that_another_one_skips(
    make: Callable[..., Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what asks it for totals would hang on that step, and ask for none of those in which it takes part again."""
    monkeypatch.setattr(group, "CONNECTIONS", 1)
    stays, skips = make(0), make(1)
    found: dict[int, list[np.ndarray]] = {0: [], 1: []}

    def train(member: Replicas, *numbers: int) -> threading.Thread:
        totals = found[member.members.me.number]
        thread = threading.Thread(target=lambda: totals.extend(step(member, number) for number in numbers), daemon=True)
        thread.start()
        return thread

    begun = StepSums(SHARES, [Float32()] * len(SIZES), SIZES, skips._lock, skips._changed)
    skips._steps[0] = begun  # and it will not end it
    thread = train(stays, 0)
    until(lambda: begun.is_asked_for(1))
    skips.members.tell(first=NEVER, begun=False)
    thread.join(60)
    assert len(found[0]) == 1
    monkeypatch.setattr("replicas.group.fetch_copies", lambda *_: {0: memoryview(b"")})
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


def test_nobody_begins_to_wait_for_a_step_that_was_skipped() -> None:
    """Its sums were found before they ended: nobody would wake who waits for them then."""
    lock = threading.RLock()
    sums = StepSums(SHARES, [Float32()] * len(SIZES), SIZES, lock, threading.Condition(lock))
    sums.end(LookupError("skipped"))
    for wait in (lambda: sums.wait_for_total(0), lambda: sums.wait_for((0, 1), 0)):
        with pytest.raises(LookupError, match="skipped"):
            wait()


@pytest.mark.parametrize("saved", [0, 7])
def test_one_that_is_behind_goes_on_by_itself_if_nobody_is_left(
    saved: int, make: Callable[..., Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not if a checkpoint is newer: then it ends, to start again from that."""
    ahead, behind = make(0), make(1, saved)
    with cut_off(ahead, behind, monkeypatch):
        for number in range(9):
            step(ahead, number)
    until(lambda: behind.members.others)
    with pytest.raises(BehindError):
        step(behind, 0)
    ahead.close()
    assert behind.fetch_state([8]) is None
    behind.members.enter(0)
    if saved:
        with pytest.raises(ResumableError, match="the newest checkpoint is newer"):
            step(behind, 0)
    for number in () if saved else range(3):
        check(step(behind, number), number)


@pytest.mark.parametrize("chosen", [False, True])
def test_one_that_catches_up_and_is_left_alone_looks_for_a_newer_checkpoint(
    chosen: bool, make: Callable[..., Replicas]
) -> None:
    """Whether or not it has said from which step on it takes part."""
    ahead, joins = make(0), make(1, 7)
    joins.members.tell(first=4 if chosen else NEVER)
    thread = threading.Thread(target=lambda: [step(ahead, number) for number in range(2)])
    thread.start()
    thread.join(60)
    check(step(joins, 0), 0)
    ahead.close()
    with pytest.raises(ResumableError, match="the newest checkpoint is newer"):
        for number in range(1, 4):  # of one of them it learns that the other one is gone
            step(joins, number)


def test_one_that_is_about_to_begin_counts_as_there(make: Callable[..., Replicas]) -> None:
    """Else one with other parameters than most in front of the first step would go on with its own."""
    other, late = make(0), make(1)
    assert not any(member.begun for member in late.members.others)
    assert late.members.newest_step() == 0 and not late.members.is_alone()
    other.members.tell(first=NEVER)
    assert late.members.is_alone()
    other.members.me = other.members.me.changed(begun=True)  # it does not tell of each step
    assert not late.members.is_alone()


@pytest.mark.parametrize(("step", "entered"), [(125, [140]), (110, []), (129, [140])])
def test_one_that_does_many_steps_a_second_enters_a_few_behind(
    step: int, entered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a second the others came from step 110 to 130, so in half of one they will have done ten more.

    It came from step 100 to this one: 5 steps take it 0.2 s, 20 would take it 2 s.
    """
    monkeypatch.setattr(membership.time, "monotonic", lambda: 8.0)
    one, found = catching_up(looked=(7.0, 100, 110), nearest=(7.0, 10), newest=130)
    Membership.choose_entry(one, step)
    assert found == entered and one._looked == (8.0, step, 130)
    found.clear()
    one._looked = None  # the first look, which says nothing of how fast they are: only where it is near it enters
    Membership.choose_entry(one, step)
    assert found == ([132] if step == 129 else []) and one._looked == (8.0, step, 130)


def test_one_that_falls_behind_enters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Totals take it 5 s a step, as over a slow link, and the only other one a second: it never would catch up."""
    monkeypatch.setattr(membership.time, "monotonic", lambda: 15.0)
    one, found = catching_up(looked=(10.0, 100, 103), nearest=(10.0, 3), newest=108)
    Membership.choose_entry(one, 101)
    assert found == [110]
    found.clear()
    one._looked, one._nearest = (10.0, 100, 103), (10.0, 6)  # it gains less than a step at a time
    Membership.choose_entry(one, 101)
    assert not found
    one._looked, one._nearest = (10.0, 100, 103), (-300.0, 6)
    Membership.choose_entry(one, 101)
    assert found == [110]
    found.clear()
    one._looked, one._nearest = (10.0, 100, 103), (10.0, 8)  # it was further behind than now
    Membership.choose_entry(one, 101)
    assert not found and one._nearest == (15.0, 7)
    one.newest_step = lambda: NOBODY  # out of reach for a moment
    one.look(101)
    assert one._nearest == (15.0, 7)


@pytest.mark.parametrize(("ahead", "entered"), [(0, [2]), (1, [3]), (2, [])])
def test_one_that_begins_where_the_others_are_enters_at_once(ahead: int, entered: list[int]) -> None:
    """All start together, and one is the first: the others need none of its state."""
    one, found = catching_up(looked=None, nearest=(0.0, 0), newest=ahead)
    Membership.choose_entry(one, 0)
    assert found == entered
    one._looked, heard = None, iter([0, 1])  # they do a step while they are asked: they would be past the entry
    one.newest_step = lambda: next(heard)
    found.clear()
    Membership.choose_entry(one, 0)
    assert not found


def catching_up(*, looked: Any, nearest: Any, newest: int) -> tuple[Any, list[int]]:
    """Returns a member that is behind the others, who are at the step `newest`, and at which step it enters."""
    found: list[int] = []
    one: Any = SimpleNamespace(
        _looked=looked,
        _nearest=nearest,
        _agree=lambda value: [value],
        tell=lambda: None,
        newest_step=lambda: newest,
        enter=found.append,
    )
    one.look = partial(Membership.look, one)
    return one, found


def test_one_that_is_gone_while_it_takes_no_part_is_noticed(make: Callable[..., Replicas]) -> None:
    """Nobody waits for it, so nobody else finds out; and the totals that it would need would be kept."""
    stays, joins, leaves = make(0), make(1), make(2)
    joins.members.tell(first=NEVER, begun=False)
    leaves.members.tell(last=3)
    stays.members.tell(begun=True)
    stays.members.step = 4
    for one in (joins, leaves):
        one.close()
    until(lambda: not stays.members.others)


def test_one_whose_address_cannot_be_written_is_to_be_started_again(
    make: Callable[..., Replicas], tmp_path: Path
) -> None:
    (tmp_path / "0").touch()
    with pytest.raises(ResumableError, match=f"cannot write to {tmp_path}: .*; see that the disk has room"):
        make(0)


def test_all_are_told_at_once(make: Callable[..., Replicas], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gets this member's shares meanwhile: of two behind cut links the second must not wait for the first."""
    here, _, _ = (make(number) for number in range(3))
    monkeypatch.setattr(membership, "SEEK_S", 600.0)
    both = threading.Barrier(2)

    def drops(*_: Any, **how: Any) -> str:
        both.wait(60)
        return "silent"

    monkeypatch.setattr(Membership, "_greet", drops)
    here.members.tell()
    assert not both.broken and not here.members.others


def test_each_of_two_that_join_gets_its_copies_of_the_state() -> None:
    """The second one is there before the first has all of its own: it lost them, and both began again for ever."""
    copies = StateCopies(threading.Condition())
    arrays = [np.arange(3.0), np.array(7)]
    for member, step in ((1, 2), (2, 5)):
        copies.answer({"op": "copy", "step": step, "arrays": [0, 1]}, member)
        copies.at_step(step, [x + step for x in arrays])
    for member, number, step in ((1, 0, 2), (2, 1, 5), (1, 1, 2), (2, 0, 5)):
        sent = copies.answer({"op": "state", "step": step, "array": number}, member)
        np.testing.assert_array_equal(np.frombuffer(sent, arrays[number].dtype), np.ravel(arrays[number] + step))
    assert not any(copies._copies.values())  # nobody keeps what all have
    with pytest.raises(LookupError):
        copies.answer({"op": "state", "step": 2, "array": 0}, 1)


def test_copies_that_nobody_waits_for_are_dropped() -> None:
    """Those of a member that asks again, for a later step, or is lost; what another one wants stays."""
    copies, arrays = StateCopies(threading.Condition()), [np.zeros(2), np.ones(2)]
    for step in range(3):
        copies.answer({"op": "copy", "step": step, "arrays": [0, 1]}, 1)
        copies.at_step(step, arrays)
        assert [*copies._copies] == [step]
    copies.answer({"op": "copy", "step": 3, "arrays": [1]}, 2)
    copies.answer({"op": "copy", "step": 3, "arrays": [0]}, 3)
    copies.drop(3)
    copies.at_step(3, arrays)
    copies.drop(1)
    assert {step: [*of] for step, of in copies._copies.items()} == {3: [1]}
    assert copies.answer({"op": "state", "step": 3, "array": 1}, 2).tobytes() == arrays[1].tobytes()
    assert not copies._copies


def test_one_that_is_lost_while_its_copy_is_made_keeps_none() -> None:
    copies = StateCopies(threading.Condition())

    class Lost:
        """An array whose copy takes a while, in which the member that wants it is lost."""

        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            copies.drop(1)
            return np.zeros(2)

    copies.answer({"op": "copy", "step": 1, "arrays": [0]}, 1)
    copies.at_step(1, [Lost()])
    assert not copies._copies


def test_one_that_leaves_is_not_asked_for_the_state_after_its_last_step(
    make: Callable[..., Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    stays, leaves, joins = make(0), make(1), make(2)
    for member in (stays, leaves):
        member.members.tell(step=9, begun=True, first=0)
    leaves.members.tell(last=9)
    until(lambda: all(m.begun for m in joins.members.others) and len(joins.members.others) == 2)
    until(lambda: joins.members.others[1].last == 9)
    asked: list[list[int]] = []
    fetch = lambda connect, addresses, *_: asked.append([a.process for a in addresses]) or {0: memoryview(b"")}
    monkeypatch.setattr("replicas.group.fetch_copies", fetch)
    assert joins.fetch_state([0])
    assert asked == [[0]]


def test_one_that_lacks_the_state_waits_until_those_that_leave_are_gone(make: Callable[..., Replicas]) -> None:
    """They may save for minutes; then it goes on from its own state, or from theirs, which is saved."""
    leaves, joins = make(0), make(1)
    leaves.members.tell(step=10, begun=True, first=0, last=9)
    with ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(joins.fetch_state, [0])
        with pytest.raises(TimeoutError):
            fetched.result(1)
        leaves.close()
        assert fetched.result(PATIENCE_S) is None
    assert not joins.members.all_leave_before(5)  # there is nobody to leave


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


def test_one_that_leaves_waits_for_the_last_of_those_about_to_enter(
    make: Callable[..., Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them goes on, and has sums of its own steps alone."""
    monkeypatch.setattr(membership, "_LEAVE_S", 2 * PATIENCE_S)
    leaves, quick, slow = [make(number) for number in range(3)]
    for joins, first in ((quick, 3), (slow, 9)):
        joins.members.tell(first=first)
    for number in range(2):
        check(step(leaves, number), number)
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(leaves.members.leave, 2)
        for number in range(3):
            check(step(quick, number), number)
        with pytest.raises(TimeoutError):
            left.result(1)
        for number in range(2):
            check(step(slow, number), number)
        left.result(PATIENCE_S)
    check(step(slow, 2), 2)


def test_one_that_leaves_waits_for_nobody_that_others_can_help(
    make: Callable[..., Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that stay keep the totals for who is about to enter, and one that has left before needs none."""
    monkeypatch.setattr(membership, "_LEAVE_S", 2 * PATIENCE_S)
    stays, leaves, joins, gone = [make(number) for number in range(4)]
    joins.members.tell(first=5)
    gone.members.tell(first=NEVER)
    with ThreadPoolExecutor(2) as pool:
        for number in range(2):
            for totals in pool.map(lambda member, number=number: step(member, number), (stays, leaves)):
                check(totals, number)
        gone.members.tell(first=0, last=0, step=1)
        pool.submit(leaves.members.leave, 2).result(PATIENCE_S)


def test_nobody_waits_for_what_one_that_has_left_will_not_have(make: Callable[..., Replicas]) -> None:
    """A state, and what its parameters are: it may live on for minutes, while it saves a checkpoint."""
    stays, leaves = make(0), make(1)
    leaves.copies.answer({"op": "copy", "step": 3, "arrays": [0]}, 1)
    leaves.copies.at_step(3, [np.arange(2)])
    requests = [{"op": "state", "step": 4, "array": 0}, {"op": "digest", "step": 4}]

    def ask(request: dict[str, Any]) -> bytes:
        with stays.members.connect(leaves.members.me.address) as connection:
            return b"".join(connection.get(request, 16, wait_s=20))

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ask, request) for request in requests]
        leaves.members.tell(last=3)
        leaves.copies.close()
        for one in waiting:
            with pytest.raises(PeerError, match=f"{LEAVES}|KeyError: 4"):
                one.result(60)
    assert ask({"op": "state", "step": 3, "array": 0}) == np.arange(2).tobytes()  # it is on its way


def test_nobody_waits_for_a_hash_that_one_has_passed_or_will_not_have(make: Callable[..., Replicas]) -> None:
    """Delayed, a step's sum is a step behind its hash; one that fetches the others' state waits for them."""
    asks, other = make(0), make(1)
    assert other.members.me.takes_part(5)

    def ask(step: int) -> bytes:
        with asks.members.connect(other.members.me.address) as connection:
            return b"".join(connection.get({"op": "digest", "step": step}, 16, wait_s=20))

    with ThreadPoolExecutor(2) as pool:
        passed, never = pool.submit(ask, 3), pool.submit(ask, 5)
        with other._changed:
            other._digests = {4: "the hash"}
            other._changed.notify_all()
        with pytest.raises(PeerError, match="KeyError: 3"):
            passed.result(60)
        other.members.tell(first=NEVER)
        with pytest.raises(PeerError, match="KeyError: 5"):
            never.result(60)


def test_one_to_whom_nobody_sends_the_state_does_not_go_on(
    make: Callable[..., Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own is older than theirs."""
    tried: list[int] = []

    def fail(connect: Any, addresses: Any, step: int, *_: object) -> Any:
        tried.append(step)
        raise PeerError("that step has passed")

    _, joins = make(0), make(1)
    monkeypatch.setattr("replicas.group.fetch_copies", fail)
    with pytest.raises(ResumableError, match="do not send the state"):
        joins.fetch_state([0])
    assert tried == [2, 4, 6, 8, 10]


def test_for_one_that_joins_and_does_not_go_on_few_totals_are_kept(
    make: Callable[..., Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "KEPT_STEPS", 2)
    trains, hangs = make(0), make(1)
    hangs.members.tell(first=NEVER)
    for number in range(9):
        check(step(trains, number), number)
    assert [*trains._steps] == [6, 7, 8]


def test_a_closed_member_answers_nobody(make: Callable[..., Replicas]) -> None:
    """Its process may live on for a while: the others would take it for one that has come back."""
    stays, ended = make(0), make(1)
    with stays.members.connect(ended.members.me.address) as connection:
        ended.close()
        with pytest.raises(PeerError, match=LEAVES):
            connection.ask({"op": "member", "member": stays.members.me.as_dict()}, 1000)
