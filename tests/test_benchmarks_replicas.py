"""The numbers of docs/replicas.md by hand: steps, sums on links, events, and steps while nodes come and go."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.benchmarks import replica_events, replicas, runner
from lab.benchmarks.replica_events import COSTS, EVENT_A_MINUTE, GOODPUT, RANDOM
from lab.benchmarks.runner import FailedRunError


def cells(table: str) -> list[list[str]]:
    """The cells of each row, without the heads."""
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]


# --------------------------------------------------------------------------------------------------------- steps


def line(run: str, repetition: int, *times: float, commit: str = "a", cores: int = 2) -> dict[str, Any]:
    """A line of replicas.jsonl with the steps that it timed; 90 MB are sent."""
    about = {"mode": "four micro-steps", "rate": "200mbit", "run": run, "repetition": repetition, "commit": commit}
    found = {"step_time_s": -1.0, "step_times_s": list(times), "sent_bytes": 9e7}
    return {**about, **found, "machine": f"{cores} CPU cores"}


def test_steps_are_the_last_five_and_compared_within_a_repetition_at_one_commit() -> None:
    """PyTorch's first one, which is longer, counts nowhere; neither does one world's step of another day."""
    lines = [line("one_world none", i, *5 * [seconds]) for i, seconds in enumerate((10.0, 20.0, 40.0))]
    lines += [line("pytorch ddp", i, 99.0, 1.0, 1.0, s, 99.0, 99.0) for i, s in enumerate((8.0, 10.0, 16.0))]
    lines += [line("independent int8", 0, *5 * [5.0], commit="b"), line("independent int8", 1, *5 * [5.0])]
    lines += [line("independent int4", 0, *5 * [4.0], commit="b"), line("independent int8", 0, *5 * [0.96], cores=16)]
    assert cells(replicas.table(lines)) == [
        ["2", "4", "200mbit", "`one_world none`", "3", "20.0 (10.0 to 40.0)", "1.00 (1.00 to 1.00)", "90 MB"],
        ["2", "4", "200mbit", "`pytorch ddp`", "3", "10.0 (8.0 to 16.0)", "0.50 (0.40 to 0.80)", "90 MB"],
        ["2", "4", "200mbit", "`independent int8`", "2", "5.0 (5.0 to 5.0)", "0.25 (0.25 to 0.25)", "90 MB"],
        ["2", "4", "200mbit", "`independent int4`", "1", "4.0", "-", "90 MB"],
        ["16", "4", "200mbit", "`independent int8`", "1", "0.96", "-", "90 MB"],
    ]


def row(seconds: float, count: int, sent: float) -> dict[str, Any]:
    return {"step_time_s": seconds, "replicas": count, "wire_tx_bytes": sent}


def test_time_and_bytes_are_those_of_steps_that_all_replicas_took_part_in() -> None:
    rows = [row(9.0, 2, 1.0), row(9.0, 4, 1.0), *(row(i, 4, 10.0 * i) for i in (3.0, 1.0, 2.0, 5.0, 4.0))]
    assert replicas.timed(rows) == {"step_time_s": 3.0, "step_times_s": [3.0, 1.0, 2.0, 5.0, 4.0], "sent_bytes": 30.0}
    rows[2]["replicas"] = 3
    with pytest.raises(FailedRunError, match="had 3 of 4 replicas"):
        replicas.timed(rows)
    alone = [{name: value for name, value in one.items() if name != "replicas"} for one in rows]  # of one world
    assert replicas.timed(alone)["step_time_s"] == 3.0


def test_pytorch_skips_as_many_steps_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(command: list[str]) -> dict[str, Any]:
        asked.extend(command)
        return {"wire_tx_bytes": 7}

    monkeypatch.setattr(runner, "result_of", answer)
    key = {"mode": "one micro-step", "rate": "200mbit", "run": "pytorch ddp fp16"}
    assert replicas.measured(key, python="torch/python")["sent_bytes"] == 7
    assert asked[-5:] == ["ddp", "fp16", "accum=1", "steps=7", "skipped=2"] and "torch/python" in asked


# -------------------------------------------------------------------------------------------------------- events


def test_an_event_costs_its_longest_step_beyond_a_calm_one_of_its_run() -> None:
    runs = [{"none": [1.0, 1.0, 3.0], "kill": [1.0, 2.0, 4.0]}, {"none": [2.0, 2.0, 2.0], "kill": [2.0, 3.0, 9.0]}]
    lines = [{"mode": COSTS, "step_times_s": times} for times in runs] + [{"mode": RANDOM}]
    assert cells(replica_events.table(lines)) == [
        ["none", "2", "1.5 (1.0 to 2.0)", "2.5 (2.0 to 3.0)", "1.0 (0.0 to 2.0)"],
        ["kill", "2", "2.5 (2.0 to 3.0)", "6.5 (4.0 to 9.0)", "5.0 (3.0 to 7.0)"],
    ]


def test_a_trace_is_compressed_to_a_length_and_to_four_nodes(tmp_path: Path) -> None:
    assert replica_events.changes_of(EVENT_A_MINUTE, 3) == [(0.0, 4), (60.0, 3), (120.0, 4)]
    assert replica_events.changes_of("an event every 10 minutes", 21) == [(0.0, 4), (600.0, 3), (1200.0, 4)]
    trace = tmp_path / "trace.csv"
    trace.write_text("seconds,nodes\n0,16\n100,15\n500,8\n1000,8\n")  # 15 of 16 are 4 of 4
    assert replica_events.changes_of(str(trace), 1) == [(0.0, 4), (30.0, 2)]


class Nodes:
    """Replicas that do a step a second for each that trains; one that was added trains after JOIN_S."""

    JOIN_S = 6.0

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock, self.groups, self.steps = clock, [0, 1, 2, 3], 0.0
        self.since = dict.fromkeys(self.groups, -1.0)  # when each that is there trains

    @property
    def last(self) -> int:
        return round(self.steps)

    def done(self, group: int) -> int:
        return int(self.since.get(group, 0.0) <= self.clock.now)

    def control(self, verb: str, group: str) -> None:
        assert verb == "kill"
        del self.since[int(group)]

    def add(self) -> int:
        self.groups.append(len(self.groups))
        self.since[self.groups[-1]] = self.clock.now + self.JOIN_S
        return self.groups[-1]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        while not holds():
            self.steps += 0.125 * sum(since <= self.clock.now for since in self.since.values())
            self.clock.now += 0.125


def test_steps_are_compared_with_those_of_as_many_nodes_undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two minutes with 4 nodes and one with 3 between: 660 steps, of which a node that joins for 6 s lacks 6."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(replica_events, "time", SimpleNamespace(monotonic=lambda: clock.now))
    run: Any = Nodes(clock)
    found = replica_events.goodput(run, [(0.0, 4), (60.0, 3), (120.0, 4)], 180.0)
    assert found["calm_steps_per_s"] == pytest.approx({0: 0, 4: 4, 3: 3}, rel=0.02)
    assert found["possible"] == pytest.approx(660, rel=0.02)
    assert found["steps"] == pytest.approx(660 - 6, abs=2)
    about = partial(dict, mode=GOODPUT, minutes=3, changes=found["changes"], possible=660)
    lines = [about(trace=EVENT_A_MINUTE, steps=steps) for steps in (594, 660)] + [about(trace="a/b.csv", steps=330)]
    assert cells(replica_events.goodput_table(lines)) == [
        [EVENT_A_MINUTE, "2", "2", "3", "95.0 (90.0 to 100.0)"],
        ["`a/b.csv`", "1", "2", "3", "50.0"],
    ]


def test_where_events_are_far_apart_undisturbed_steps_are_those_of_the_run_between_them() -> None:
    """A step a second of 3 nodes, 2 of 4, which 4 pause for 60 s when the last one comes; calm phases were slower."""
    changes = [(0.0, 4), (600.0, 3), (1200.0, 4)]
    speeds = [(0, 600, 2.0), (600, 1200, 1.0), (1260, 1500, 2.0)]
    seen = [(1000.0 + at_s, 100) for at_s in (-5, 0)]
    for begin, end, rate in speeds:
        before = seen[-1][1]
        seen += [(1000.0 + begin + i / rate, before + i) for i in range(1, int(rate * (end - begin)) + 1)]
    line = {"changes": changes, "minutes": 25, "seen": {"0": seen[:700], "1": seen[600:]}, "possible": 99.0}
    assert replica_events.undisturbed(line | {"steps": seen[-1][1] - 100}) == pytest.approx(2400, abs=8)
    assert replica_events.undisturbed(line | {"changes": [(0.0, 4), (60.0, 3)]}) == 99.0
