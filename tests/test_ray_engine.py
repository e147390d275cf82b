"""The engine's generations, with supervisors that are told what happens to them: no Ray, no processes."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster import ray_train
from cluster.ray_plan import Limits, Patience
from cluster.ray_supervisor import News
from cluster.ray_train import Engine

Story = Callable[["Members"], Iterator[object]]


@dataclass(eq=False)
class Member:
    """A node whose program does what the story says."""

    host: str
    cluster: "Members"
    answers: bool = True
    has_begun: bool = True  # its supervisor has; else nothing is known of it
    added_s: float = field(default_factory=time.monotonic)
    is_leaving: bool = False
    ignores: bool = False  # signals
    codes: dict[int, int | None] = field(default_factory=dict)  # of the generations
    arguments: dict[int, Sequence[str]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)  # that it says at each turn
    ready: set[int] = field(default_factory=set)  # the generations that have compiled

    @property
    def node(self) -> str:
        return self.host

    @property
    def address(self) -> str:
        return f"ip-{self.host}"

    @property
    def news(self) -> News | None:
        if not self.has_begun:
            return None
        return News(
            codes=dict(self.codes),
            lines=[(self.cluster.training, line) for line in self.lines]
            + [(generation, ray_train.READY) for generation in self.ready],
            is_leaving=self.is_leaving,
            is_warm=True,
            free_port=4000,
        )

    @property
    def code(self) -> int | None:
        """How the program ended that was the last to be told to train; None if it runs."""
        return self.codes.get(self.cluster.training, 0)

    @code.setter
    def code(self, code: int) -> None:
        self.codes[self.cluster.training] = code

    def start(self, generation: int, arguments: Sequence[str]) -> None:
        self.codes[generation], self.arguments[generation] = None, arguments
        if "--standby" not in arguments:
            self.cluster.training = generation

    def send(self, generation: int, number: int) -> None:
        self.cluster.sent.append((self.host, number))
        if self.ignores:
            return
        if number == signal.SIGTERM:  # all agree on a step
            self.cluster.end_all(75)
        elif number == signal.SIGUSR1:
            assert generation in self.ready, "it would be killed"
            self.cluster.training = generation
        elif self.codes[generation] is None:
            self.codes[generation] = -number

    def warm_up(self) -> None:
        self.cluster.warmed += 1


class Members:
    """Stands for `ray_members.Members`; the story goes on by one `yield` a turn."""

    def __init__(self, hosts: str, story: Story, workdir: Path) -> None:
        self.by_node: dict[str, Member] = {}
        self.spare_hosts: list[str] = []
        self.draining: set[str] = set()
        self.sent: list[tuple[str, int]] = []
        self.dropped: list[str] = []
        self.warmed = self.training = 0  # the generation that was told to train
        self.metrics = workdir / "metrics.jsonl"
        for host in hosts:
            self.join(host)
        self._story = story(self)

    def join(self, host: str) -> None:
        self.by_node[host] = Member(host, self)

    def end_all(self, code: int) -> None:
        for member in self.by_node.values():
            if member.code is None and not member.ignores:
                member.code = code

    def step(self, step: int) -> None:
        with self.metrics.open("a") as file:
            file.write(f'{{"step": {step}}}\n')

    def turn(self) -> list[Member]:
        assert next(self._story, "over") != "over", "the engine goes on after the end of the story"
        return [member for member in self.by_node.values() if member.has_begun]

    def is_going(self, member: Member) -> bool:
        return member.node in self.draining or member.is_leaving

    def give_back(self) -> None:
        for member in [m for m in self.by_node.values() if self.is_going(m)]:
            self.drop(member.node, "")

    def drop(self, node: str, why: str) -> None:
        self.dropped.append(node)
        del self.by_node[node]

    def world(self) -> str:
        """Returns the hosts whose program runs, in the order of their processes, if those are all."""
        there = [m for m in self.by_node.values() if m.code is None]
        count = f"--num_processes={len(there)}"
        if any(m.arguments[self.training][1] != count for m in there):
            return "some have ended"
        return "".join(m.host for m in sorted(there, key=lambda m: m.arguments[self.training][2]))


def play(
    hosts: str,
    story: Story,
    workdir: Path,
    *,
    least: int = 1,
    most: int = 4,
    group: int = 1,
    max_failures: int = 5,
    compile_ahead: bool = False,
) -> tuple[int, Members]:
    """Runs an engine through a story; returns its exit code."""
    members = Members(hosts, story, workdir)
    limits = Limits(min_nodes=least, max_nodes=most, nodes_per_group=group)
    patience = Patience(max_failures=max_failures)
    ahead = {"compile_ahead": compile_ahead, "notice_s": 0.1}
    engine = Engine(members, limits, patience, workdir, **ahead)  # pyright: ignore[reportArgumentType]
    return engine.run(), members


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STOP_S", "LAST_S", "FAILED_S", "KILL_S", "STARTING_S", "NOTICE_S"):
        monkeypatch.setattr(ray_train, name, 0.05)


def until(condition: Callable[[], object]) -> Iterator[None]:
    """Lets turns pass until something is so."""
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
        yield


def test_a_node_joins_and_another_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def story(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "ab")
        assert cluster.by_node["b"].arguments[1][0] == "--coordinator=ip-a:4000"
        cluster.join("c")
        yield from (None for _ in range(10))
        assert not cluster.sent  # a start is not stopped
        cluster.step(1)
        yield from until(lambda: cluster.world() == "abc")
        assert cluster.sent == [("a", signal.SIGTERM)] and cluster.warmed == 3
        cluster.draining.add("b")
        yield from until(lambda: cluster.world() == "ac")
        assert cluster.dropped == ["b"]
        cluster.by_node["a"].is_leaving = True
        yield from until(lambda: cluster.world() == "c")
        cluster.end_all(0)
        yield

    assert play("ab", story, tmp_path)[0] == 0
    said = capsys.readouterr().err
    assert "generation 2: 3 nodes: a, b, c; spares: none" in said and "c joined" in said
    assert "generation 1: step 1 is done" in said


def test_a_lost_node_ends_the_generation_and_a_spare_helps(tmp_path: Path) -> None:
    def story(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "abcd")
        cluster.by_node["a"].ignores = cluster.by_node["d"].ignores = True  # they hang in a collective
        cluster.drop("b", "")
        yield from until(lambda: ("a", signal.SIGKILL) in cluster.sent)
        cluster.by_node["a"].code, cluster.by_node["a"].ignores = (
            -9,
            False,
        )  # d does not even answer: its supervisor ends
        yield from until(lambda: cluster.dropped == ["b", "d"])
        yield from until(lambda: cluster.world() == "ac")
        cluster.step(1)
        cluster.join("f")
        yield from until(lambda: cluster.world() == "acef")
        cluster.end_all(0)
        yield

    code, cluster = play("abcde", story, tmp_path, least=2, group=2)
    assert code == 0
    assert ("b", signal.SIGKILL) not in cluster.sent


def test_a_cut_node_is_left_out(tmp_path: Path) -> None:
    """Ray says that it is alive, but its supervisor is silent: the others go on, and it joins when it answers."""

    def story(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "abc")
        cut = cluster.by_node["b"]
        cut.answers, cut.ignores = False, True
        cluster.end_all(75)
        yield from until(lambda: cluster.world() == "ac")
        cluster.step(1)
        cluster.join("b")
        yield from until(lambda: cluster.world() == "acb")
        cluster.end_all(0)
        yield

    assert play("abc", story, tmp_path)[0] == 0


def test_a_silent_supervisor_is_not_waited_for(tmp_path: Path) -> None:
    def story(cluster: Members) -> Iterator[object]:
        cluster.by_node["b"].answers = False
        yield from until(lambda: cluster.world() == "ac")
        cluster.end_all(0)
        yield

    assert play("abc", story, tmp_path)[0] == 0


def test_a_run_grows_beside_a_node_that_never_begins(tmp_path: Path) -> None:
    """Another job holds its CPUs: its supervisor waits for them."""

    def story(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "a")
        cluster.step(1)
        cluster.join("b")
        cluster.by_node["b"].has_begun = cluster.by_node["b"].answers = False
        cluster.join("c")
        yield from until(lambda: cluster.world() == "ac")
        cluster.end_all(0)
        yield

    assert play("a", story, tmp_path)[0] == 0


def test_a_run_without_metrics_grows_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says of a first step that came late when that was."""
    monkeypatch.setattr(ray_train, "SETTLED_S", 0.05)

    def story(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "a")
        cluster.join("b")
        yield from until(lambda: cluster.world() == "ab")
        yield from until(lambda: cluster.warmed > 2)  # both are settled
        cluster.step(1)
        yield
        cluster.end_all(0)
        yield

    assert play("a", story, tmp_path)[0] == 0
    assert "generation 2: step 1 is done" in capsys.readouterr().err


def test_a_world_that_is_too_small_says_what_it_waits_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def story(cluster: Members) -> Iterator[object]:
        yield from (None for _ in range(5))
        assert cluster.world() == ""
        cluster.join("b")
        yield from until(lambda: cluster.world() == "ab")
        cluster.end_all(0)
        yield

    assert play("a", story, tmp_path, least=2, group=2)[0] == 0
    assert capsys.readouterr().err.count("waiting for 1 more nodes; there: a") == 1


@pytest.mark.parametrize("code", [1, 2])
def test_an_error_of_the_program_ends_all(code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def story(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "ab")
        cluster.by_node["b"].lines = ["error: no such key"]
        cluster.by_node["b"].code = code
        yield
        cluster.by_node["b"].lines = []
        cluster.end_all(75)
        yield

    assert play("ab", story, tmp_path)[0] == code
    captured = capsys.readouterr()
    assert "[b] error: no such key" in captured.out and "on b with exit code" in captured.err


def test_failures_without_progress_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def story(cluster: Members) -> Iterator[object]:
        for step in (1, 2, 2, 2):
            yield from until(lambda: cluster.world() == "ab")
            cluster.step(step)
            yield from (None for _ in range(3))
            cluster.by_node["a"].code = -signal.SIGSEGV
            cluster.by_node["a"].lines = ["it crashed"]
            yield
            cluster.by_node["a"].lines = []
            cluster.end_all(75)
            yield

    assert play("ab", story, tmp_path, max_failures=1)[0] == 1
    assert "2 failures in a row without a new step; it said: it crashed" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------- compile ahead


def standing_by(cluster: Members, generation: int) -> str:
    """Returns the hosts where a generation waits for its turn."""
    there = [m for m in cluster.by_node.values() if m.codes.get(generation, 0) is None]
    assert all("--standby" in m.arguments[generation] for m in there)
    return "".join(m.host for m in there)


def test_the_next_generation_compiles_while_the_last_one_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def story(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "ab")
        cluster.join("c")
        cluster.step(1)
        yield from until(lambda: standing_by(cluster, 2) == "abc")
        yield from (None for _ in range(10))
        assert cluster.world() == "ab"
        cluster.step(2)
        assert not cluster.sent
        cluster.by_node["a"].ready.add(2)
        yield from until(lambda: cluster.world() == "abc")
        assert cluster.sent == [("a", signal.SIGTERM), ("a", signal.SIGUSR1)]
        cluster.step(3)
        cluster.by_node["a"].is_leaving = True
        yield from until(lambda: cluster.dropped == ["a"])  # it is not waited for long
        assert standing_by(cluster, 3) == "bc" and cluster.sent[2:] == [("a", signal.SIGTERM)]
        cluster.by_node["b"].ready.add(3)
        yield from until(lambda: cluster.world() == "bc")
        cluster.end_all(0)
        yield

    assert play("ab", story, tmp_path, compile_ahead=True)[0] == 0
    said = capsys.readouterr().err
    assert "c joined: generation 2 starts ahead: 3 nodes: a, b, c" in said and "generation 2: step 3 is done" in said


@pytest.mark.parametrize("what", ["lost", "failed", "going"])
def test_a_generation_that_cannot_take_its_turn_is_given_up(what: str, tmp_path: Path) -> None:
    """The change is made all the same: the next one starts when the last one has ended."""

    def story(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "ab")
        cluster.step(1)
        cluster.join("c")
        cluster.join("d")
        yield from until(lambda: standing_by(cluster, 2) == "abcd")
        if what == "lost":
            cluster.drop("c", "")
        elif what == "failed":
            cluster.by_node["c"].codes[2] = 2
        else:
            cluster.by_node["c"].is_leaving = True
        yield from until(lambda: cluster.world() == ("abcd" if what == "failed" else "abd"))
        killed = [("a", signal.SIGKILL), ("b", signal.SIGKILL), ("d", signal.SIGKILL)]
        assert [sent for sent in cluster.sent if sent[0] != "c"] == [*killed, ("a", signal.SIGTERM)]
        assert "--standby" not in cluster.by_node["a"].arguments[3]
        cluster.end_all(0)
        yield

    assert play("ab", story, tmp_path, compile_ahead=True)[0] == 0


def test_another_node_joins_after_one_was_lost(tmp_path: Path) -> None:
    """What was given up was for a change that is no more: the next change is prepared again."""

    def story(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "a")
        cluster.step(1)
        cluster.join("b")
        yield from until(lambda: standing_by(cluster, 2) == "ab")
        cluster.drop("b", "")
        yield from until(lambda: ("a", signal.SIGKILL) in cluster.sent)
        yield from (None for _ in range(10))
        assert cluster.world() == "a"
        cluster.join("c")
        yield from until(lambda: standing_by(cluster, 3) == "ac")
        cluster.by_node["a"].ready.add(3)
        yield from until(lambda: cluster.world() == "ac")
        cluster.end_all(0)
        yield

    assert play("a", story, tmp_path, compile_ahead=True)[0] == 0


def test_a_generation_that_never_gets_ready_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before has been stopped for it."""
    monkeypatch.setattr(ray_train, "JOINING_S", 0.05)

    def story(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "a")
        cluster.step(1)
        cluster.join("b")
        yield from until(lambda: cluster.training == 3)
        assert cluster.world() == "ab" and cluster.sent.count(("a", signal.SIGKILL)) == 1
        cluster.end_all(0)
        yield

    assert play("a", story, tmp_path, compile_ahead=True)[0] == 0


def test_a_failure_while_the_next_generation_compiles(tmp_path: Path) -> None:
    def story(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "ab")
        cluster.step(1)
        cluster.by_node["b"].is_leaving = True
        yield from until(lambda: standing_by(cluster, 2) == "a")
        cluster.drop("b", "")
        cluster.by_node["a"].code = 75
        yield from (None for _ in range(5))
        assert not cluster.sent
        cluster.by_node["a"].ready.add(2)
        yield from until(lambda: cluster.world() == "a")
        assert cluster.sent == [("a", signal.SIGUSR1)]
        cluster.end_all(0)
        yield

    assert play("ab", story, tmp_path, compile_ahead=True)[0] == 0


def test_a_spare_takes_the_place_of_a_node_that_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor is only just starting: the next generation is not prepared without it."""
    monkeypatch.setattr(ray_train, "STARTING_S", 60.0)
    monkeypatch.setattr(ray_train, "NOTICE_S", 0.5)

    def story(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "ab")
        cluster.step(1)
        cluster.by_node["b"].is_leaving = True
        yield from (None for _ in range(3))  # Ray's nodes are not looked at in every turn
        cluster.join("c")
        cluster.by_node["c"].has_begun = cluster.by_node["c"].answers = False
        yield from (None for _ in range(10))
        assert cluster.world() == "ab" and not cluster.sent
        cluster.by_node["c"].has_begun = cluster.by_node["c"].answers = True
        yield from until(lambda: standing_by(cluster, 2) == "ac")
        cluster.by_node["a"].ready.add(2)
        yield from until(lambda: cluster.world() == "ac")
        cluster.end_all(0)
        yield

    assert play("ab", story, tmp_path, least=2, most=2, compile_ahead=True)[0] == 0


def test_a_supervisor_is_silent_when_it_is_the_next_turn(tmp_path: Path) -> None:
    """It was silent while it compiled too, which does not matter."""

    def story(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "a")
        cluster.step(1)
        cluster.join("b")
        yield from until(lambda: standing_by(cluster, 2) == "ab")
        cluster.by_node["b"].answers = False
        yield from (None for _ in range(10))
        assert cluster.world() == "a"
        cluster.by_node["a"].ready.add(2)
        yield from until(lambda: cluster.training == 3)
        assert cluster.world() == "a" and ("b", signal.SIGKILL) in cluster.sent
        cluster.end_all(0)
        yield

    assert play("a", story, tmp_path, compile_ahead=True)[0] == 0


@pytest.mark.parametrize("code", [0, 75])
def test_the_end_while_the_next_generation_compiles(code: int, tmp_path: Path) -> None:
    """The run is finished, or this program is asked to stop."""

    def story(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "a")
        cluster.step(1)
        cluster.join("b")
        yield from until(lambda: standing_by(cluster, 2) == "ab")
        if code:
            signal.raise_signal(signal.SIGTERM)
        else:
            cluster.by_node["a"].code = 0
        while True:
            yield

    ended, cluster = play("a", story, tmp_path, compile_ahead=True)
    assert ended == code
    killed = {("a", signal.SIGKILL), ("b", signal.SIGKILL)}
    assert set(cluster.sent) == (killed | {("a", signal.SIGTERM)} if code else killed)


@pytest.mark.parametrize("hangs", [False, True])
def test_sigterm_stops_it_in_good_order(hangs: bool, tmp_path: Path) -> None:
    def story(cluster: Members) -> Iterator[object]:
        yield from until(lambda: cluster.world() == "ab")
        cluster.by_node["b"].ignores = hangs
        signal.raise_signal(signal.SIGTERM)
        yield from until(lambda: cluster.sent)
        yield from until(lambda: not hangs or cluster.dropped == ["b"])
        while True:
            yield

    code, cluster = play("ab", story, tmp_path)
    assert code == 75 and cluster.sent[0] == ("a", signal.SIGTERM)
    assert (("b", signal.SIGKILL) in cluster.sent) == hangs
