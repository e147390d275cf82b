"""An engine of launch.ray with simulated agents that follow a scenario: no Ray, no processes, a clock of turns."""

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch import ray_engine
from launch.ray_agent import News
from launch.ray_engine import ReplicaGroups, RestartingEngine
from launch.ray_plan import Limits

TURN_S, MOST_TURNS = 0.005, 10_000
SHORT = ("STOP_S", "LAST_S", "FAILED_S", "KILL_S", "STARTING_S")
Scenario = Callable[["Members"], Iterator[object]]


@dataclass(eq=False)
class Member:
    """A node whose program follows the scenario."""

    host: str
    cluster: "Members"
    answers: bool = True
    has_begun: bool = True  # its agent has; else nothing is known of it
    added_s: float = 0.0
    is_leaving: bool = False
    ignores: bool = False  # signals
    attempt: int = 0  # the newest, and how it ended; None if it runs
    code: int | None = 0
    arguments: dict[int, Sequence[str]] = field(default_factory=dict)  # by attempt
    lines: list[str] = field(default_factory=list)  # that it says at each turn

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
        return News(attempt=self.attempt, code=self.code, lines=self.lines, is_leaving=self.is_leaving, free_port=4000)

    def start(self, attempt: int, arguments: Sequence[str]) -> None:
        assert self.code is not None, "one after the other"
        self.attempt, self.code, self.arguments[attempt] = attempt, None, arguments

    def send(self, attempt: int, number: int) -> None:
        self.cluster.sent.append((self.host, number))
        if self.ignores:
            return
        if number == signal.SIGTERM:
            self.stop()
        elif self.attempt == attempt and self.code is None:
            self.code = -number

    def stop(self) -> None:
        self.cluster.end_all(75)  # all agree on a step

    def warm_up(self) -> None:
        self.cluster.warmed += 1


class Replica(Member):
    """A node whose program is independent of the other nodes' programs."""

    @property
    def group(self) -> str:
        """The numbers of its group and of its process in the group; empty if it does not run."""
        _, _, process, group = self.arguments[self.attempt] if self.code is None else [""] * 4
        return group.removeprefix("--group=") + process.replace("--process_id=", ".")

    def stop(self) -> None:
        if self.code is None:
            self.code = 75


class Members:
    """Replaces `ray_members.Members`; the scenario continues by one `yield` a turn. After it, all programs end."""

    def __init__(self, hosts: str, scenario: Scenario, workdir: Path, kind: type[Member] = Member) -> None:
        self.by_node: dict[str, Member] = {}
        self.idle_hosts: list[str] = []
        self.draining: set[str] = set()
        self.sent: list[tuple[str, int]] = []
        self.dropped: list[str] = []
        self.warmed = 0
        self.metrics, self.checkpoints = workdir / "metrics.jsonl", workdir / "checkpoints"
        self._kind, self.now_s, self._turns_left = kind, 1000.0, MOST_TURNS
        for host in hosts:
            self.join(host)
        self._scenario = scenario(self)

    def join(self, host: str) -> None:
        self.by_node[host] = self._kind(host, self, added_s=self.now_s)

    def end_all(self, code: int) -> None:
        for member in self.by_node.values():
            if member.code is None and not member.ignores:
                member.code = code

    def step(self, step: int) -> None:
        with self.metrics.open("a") as file:
            file.write(f'{{"step": {step}}}\n')

    def turn(self) -> list[Member]:
        self.now_s += TURN_S
        self._turns_left -= 1
        assert self._turns_left, "the scenario waits, or the engine goes on after its end"
        if next(self._scenario, "over") == "over":
            self.end_all(0)
        return [member for member in self.by_node.values() if member.has_begun]

    def is_going(self, member: Member) -> bool:
        return member.node in self.draining or member.is_leaving

    def going(self) -> list[str]:
        return [member.node for member in self.by_node.values() if self.is_going(member)]

    def give_back(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            self.drop(node, "")

    def drop(self, node: str, why: str) -> None:
        self.dropped.append(node)
        del self.by_node[node]

    def world(self) -> str:
        """Returns the hosts whose program runs, in the order of their processes, if those are all."""
        there = [m for m in self.by_node.values() if m.code is None]
        count = f"--num_processes={len(there)}"
        if any(m.arguments[m.attempt][1] != count for m in there):
            return "some have ended"
        return "".join(m.host for m in sorted(there, key=lambda m: m.arguments[m.attempt][2]))

    def groups(self) -> str:
        """Returns each replica's host with the group and process that it runs."""
        return " ".join(m.host + m.group for m in self.by_node.values() if isinstance(m, Replica))

    def trains_on(self, hosts: str) -> Iterator[None]:
        """Lets turns pass until the program runs on these hosts, in the order of its processes."""
        return until(lambda: self.world() == hosts)


def run_scenario(
    hosts: str,
    scenario: Scenario,
    workdir: Path,
    *,
    least: int = 1,
    most: int = 4,
    group: int = 1,
    max_failures: int = 5,
    independent: bool = False,
    **times_s: float,
) -> tuple[int, Members]:
    """Runs an engine through a scenario, with short times except for `times_s`; returns its exit code."""
    members = Members(hosts, scenario, workdir, Replica if independent else Member)
    limits = Limits(min_nodes=least, max_nodes=most, nodes_per_group=group)
    kind: Any = ReplicaGroups if independent else RestartingEngine
    engine = kind(members, limits, workdir, max_failures=max_failures)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_engine, "time", SimpleNamespace(monotonic=lambda: members.now_s))
        for name, time_s in (dict.fromkeys(SHORT, 0.05) | {"STOP_S": 0.5} | times_s).items():
            patch.setattr(ray_engine, name, time_s)
        try:
            code = engine.run()
            assert next(members._scenario, "over") == "over", "the engine ends before the end of the scenario"
            return code, members
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def story(hosts: str, *, code: int = 0, says: str = "", **options: Any) -> Callable[[Scenario], Callable[..., None]]:
    """Makes a test of a scenario: the engine ends with `code`, after it has said the lines of `says`."""

    def as_test(scenario: Scenario) -> Callable[..., None]:
        def test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
            assert run_scenario(hosts, scenario, tmp_path, **options)[0] == code
            err = capsys.readouterr().err
            assert all(line in err for line in says.split("|")), err

        return test

    return as_test


def until(condition: Callable[[], object]) -> Iterator[None]:
    """Lets turns pass until something is so."""
    while not condition():
        yield


def turns(count: int = 10) -> Iterator[None]:
    """Lets so many turns pass."""
    return (None for _ in range(count))
