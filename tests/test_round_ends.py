"""When an asynchronous round of local SGD ends: replicas in one process, whose links are calls."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from configs.schema import LocalSGDConfig
from elastic.replicas.peers import NEVER, Peer
from elastic.replicas.round_ends import RoundEnds
from elastic.replicas.round_record import Round, RoundRecord
from elastic.replicas.transport import SharedLock
from runtime.blobs import PeerError, RefusedError
from runtime.exit_codes import ResumableError

INNER = 4


@dataclass
class Members:
    """The membership of one of some replicas, which all take part."""

    me: Peer
    everyone: list[Peer]
    ends: dict[int, RoundEnds]
    silent: set[int]
    asked: set[int]
    lock: SharedLock = field(default_factory=SharedLock)
    closed: bool = False

    @property
    def peers(self) -> list[Peer]:
        return [peer for peer in self.everyone if peer.number != self.me.number]

    @property
    def transport(self) -> "Members":
        return self

    @contextmanager
    def connect(self, address: Any, silence_s: float | None = None) -> Iterator[Any]:
        del silence_s
        if address.process in self.silent:
            raise PeerError("silent")
        self.asked.add(self.me.number)
        yield Link(self.ends[address.process], self.me.number)


@dataclass
class Link:
    ends: RoundEnds
    caller: int

    def ask(self, request: Any, most: int) -> bytes:
        del most
        try:
            return bytes(self.ends.answer(json.loads(json.dumps(request)), self.caller))
        except (OSError, LookupError) as error:
            raise RefusedError(str(error)) from error


class Group:
    """Replicas of one worker each."""

    def __init__(self, folder: Path, count: int, quorum: int, grace_s: float) -> None:
        self.peers = [Peer(number=n, host="host", port=1 + n, first=0, last=NEVER) for n in range(count)]
        config = LocalSGDConfig(inner_steps=INNER, quorum=quorum, grace_s=grace_s)
        self.file, self.silent = folder / "rounds.jsonl", set[int]()
        self.ends: dict[int, RoundEnds] = {}
        self.asked = set[int]()  # replicas that asked another one
        self.records = [RoundRecord(self.file, count) for _ in range(count)]
        self.members: list[Any] = [Members(peer, self.peers, self.ends, self.silent, self.asked) for peer in self.peers]
        for number, members in enumerate(self.members):
            self.ends[number] = RoundEnds(config, self.records[number], members)

    def begin(self, number: int) -> None:
        assert [ends.begin(number) for ends in self.ends.values()] == [None] * len(self.ends)

    def do(self, replica: int, steps: int = INNER) -> Iterator[int]:
        """Does some steps of a replica's worker, which arrives after its last one; returns its further steps."""
        further = self.ends[replica].steps(replica)
        assert [next(further) for _ in range(steps)] == [*range(steps)]
        if steps == INNER:
            self.ends[replica].arrive()
        return further

    def lose(self, replica: int) -> None:
        """Ends a replica: the others do not count it any more, and those that wait for its answer get none."""
        self.silent.add(replica)
        self.peers[:] = [peer for peer in self.peers if peer.number != replica]
        members = self.members[replica]
        with members.lock:
            members.closed = True
            members.lock.notify_all()

    def ended(self, *replicas: int) -> Round:
        """Returns how the round ended for these replicas, which must agree."""
        until(lambda: all(self.ends[replica].ended() for replica in replicas))
        first, *others = (self.ends[replica].ended() for replica in replicas)
        assert first is not None and all(other == first for other in others)
        return first


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("slow", [0, 2])
def test_a_round_takes_the_steps_that_a_slow_worker_has_begun(slow: int, tmp_path: Path) -> None:
    """Also if the replica that ends rounds is slow; a promise ends its steps, and it arrives then."""
    group = Group(tmp_path, 3, quorum=2, grace_s=0.0)
    for number, steps in enumerate((2, 1)):
        group.begin(number)
        further = group.do(slow, steps)
        fast = [replica for replica in range(3) if replica != slow]
        for replica in fast:
            group.do(replica)
        expected = [steps if replica == slow else INNER for replica in range(3)]
        assert group.ended(*fast) == Round(replicas=[0, 1, 2], steps=expected)
        assert [*further] == []
        group.ends[slow].arrive()
        group.ended(0, 1, 2)
        assert lines(group.file)[number] == {"round": number, "replicas": [0, 1, 2], "steps": expected}


def test_within_the_grace_window_a_round_waits_for_all(tmp_path: Path) -> None:
    group = Group(tmp_path, 2, quorum=1, grace_s=600.0)
    group.begin(0)
    group.do(0)
    further = group.do(1, 2)
    assert group.ends[0].ended() is None
    assert [*further] == [2, 3]
    group.ends[1].arrive()
    assert group.ended(0, 1).steps == [INNER, INNER]


def test_a_round_waits_for_its_quorum(tmp_path: Path) -> None:
    group = Group(tmp_path, 3, quorum=2, grace_s=0.0)
    group.begin(0)
    group.do(0)
    group.do(1, 3)
    assert group.ends[0].ended() is None and not group.file.exists()
    group.do(2)
    assert group.ended(0, 2).steps == [INNER, 3, INNER]


def test_replicas_that_do_not_answer_or_have_not_begun_do_no_step(tmp_path: Path) -> None:
    """They find the round in the record when they come back, and their workers do not begin steps of it."""
    group = Group(tmp_path, 4, quorum=2, grace_s=0.0)
    for replica in (0, 1, 3):
        assert group.ends[replica].begin(0) is None
    group.silent.add(3)
    late = group.do(3, 1)
    for replica in (0, 1):
        group.do(replica)
    ended = Round(replicas=[0, 1], steps=[INNER, INNER, 0, 0])
    assert group.ended(0, 1) == ended
    assert group.ends[2].begin(0) == ended and [*group.ends[2].steps(2)] == []
    assert next(late) == 1  # nobody has told it
    group.ends[3].arrive()
    assert group.ended(3) == ended
    assert [*late] == []


def test_another_replica_ends_the_round_of_a_lost_one(tmp_path: Path) -> None:
    """A replica that waits for the answer of the lost one asks again."""
    group = Group(tmp_path, 3, quorum=2, grace_s=0.0)
    group.begin(0)
    group.do(1)
    until(lambda: group.asked)
    group.lose(0)
    group.do(2)
    ended = Round(replicas=[1, 2], steps=[0, INNER, INNER])
    assert group.ended(1, 2) == ended and lines(group.file) == [{"round": 0, "replicas": [1, 2], "steps": ended.steps}]


def test_the_line_of_a_lost_replica_counts(tmp_path: Path) -> None:
    """It may have recorded the round before it was lost."""
    group = Group(tmp_path, 3, quorum=2, grace_s=0.0)
    group.begin(0)
    recorded = RoundRecord(group.file, 3).add(0, Round(replicas=[0, 1], steps=[4, 4, 0]))
    group.lose(0)
    for replica in (1, 2):
        group.do(replica)
    assert group.ended(1, 2) == recorded and len(lines(group.file)) == 1


def test_a_replica_that_waits_for_its_quorum_sees_the_line_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas may take themselves for the first: replica 1 lost its connection to 0, which ends the round."""
    monkeypatch.setattr("elastic.replicas.round_ends.LOOK_S", 0.01)
    group = Group(tmp_path, 2, quorum=2, grace_s=0.0)
    group.begin(0)
    group.lose(0)
    find, looks = group.records[1].find, list[int]()
    monkeypatch.setattr(group.records[1], "find", lambda number: looks.append(number) or find(number))
    group.do(1)
    until(lambda: len(looks) > 3)  # after those before it waits
    recorded = RoundRecord(group.file, 2).add(0, Round(replicas=[0, 1], steps=[4, 4]))
    assert group.ended(1) == recorded


def test_an_older_arrival_does_not_replace_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of a replica may arrive in any order, when it asks again after a lost connection."""
    monkeypatch.setattr("elastic.replicas.round_ends.LOOK_S", 0.01)
    group = Group(tmp_path, 2, quorum=2, grace_s=0.0)
    group.begin(0)
    find, looks = group.records[0].find, list[int]()
    monkeypatch.setattr(group.records[0], "find", lambda number: looks.append(number) or find(number))
    for steps in (INNER, 2):
        looks.clear()
        request = {"op": "arrive", "step": 0, "steps": [[1, steps]]}
        threading.Thread(target=group.ends[0].answer, args=(request, 1), daemon=True).start()
        until(lambda: len(looks) > 5)  # so that both wait
    group.do(0)
    assert group.ended(0).steps == [INNER, INNER]


def test_a_round_that_cannot_be_recorded_ends_the_replica(tmp_path: Path) -> None:
    group = Group(tmp_path, 1, quorum=1, grace_s=0.0)
    group.begin(0)
    group.file.symlink_to(tmp_path / "no" / "such" / "folder")
    group.do(0)
    with pytest.raises(ResumableError, match="cannot record a round"):
        until(lambda: group.ends[0].ended() is not None)


def test_the_first_line_of_a_round_counts(tmp_path: Path) -> None:
    """Also after a torn line; a run that restarts repeats the recorded rounds, and other workers are refused."""
    file = tmp_path / "rounds.jsonl"
    one, two = RoundRecord(file, 2), RoundRecord(file, 2)
    first, second = Round(replicas=[0, 1], steps=[4, 1]), Round(replicas=[1], steps=[0, 4])
    assert one.add(0, first) == two.add(0, second) == first
    with file.open("a") as torn:
        torn.write('{"round": 1, "rep')
    assert two.add(1, second) == one.add(1, first) == second
    assert [RoundRecord(file, 2).find(number) for number in range(3)] == [first, second, None]
    with pytest.raises(ValueError, match="rounds of 2 workers, not of 3; set sharding.shares=2"):
        RoundRecord(file, 3).find(0)
    file.write_text('{"round": 0, "replicas": 7, "steps": [1, 2]}\n')
    with pytest.raises(ValueError, match=r"rounds.jsonl has a line that is no round: .*; remove it$"):
        RoundRecord(file, 2).find(0)


def test_a_line_written_without_the_lock_may_be_the_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where locks do not work, two replicas may record a round at a time; both take the line that comes first."""
    file = tmp_path / "rounds.jsonl"
    one, two = RoundRecord(file, 2), RoundRecord(file, 2)
    first, second = Round(replicas=[0, 1], steps=[4, 1]), Round(replicas=[1], steps=[0, 4])
    find = two.find

    def find_and_be_overtaken(number: int) -> Round | None:
        known = find(number)
        one.add(number, first)
        return known

    monkeypatch.setattr(two, "find", find_and_be_overtaken)
    monkeypatch.setattr("runtime.files.locks.take", lambda *_, **__: None)
    assert two.add(0, second) == first == one.find(0)
    assert file.read_text().count('"round"') == 2


def test_a_record_of_longer_rounds_is_refused(tmp_path: Path) -> None:
    RoundRecord(tmp_path / "rounds.jsonl", 2).add(0, Round(replicas=[0], steps=[4, INNER + 1]))
    group = Group(tmp_path, 2, quorum=1, grace_s=0)
    with pytest.raises(ValueError, match=r"a round of 5 steps, more than local_sgd\.inner_steps=4"):
        group.ends[0].begin(0)
