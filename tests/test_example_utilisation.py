"""`local_sgd.interval=utilisation`: the interval follows the time of meetings, and nothing else of a run changes."""

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from support.examples import example_methods  # noqa: F401 (fixture)
from support.running import arguments, arrays, rows, run_here, stop_after

from configs.schema import LocalSGDConfig
from examples.methods.utilisation import Meetings, Utilisation
from sharding.step import TrainState


class Local(NamedTuple):
    meets_at: Any
    meets_every: Any


class Link:
    """Steps of 0.25 s on a simulated clock; a meeting also takes the time of the link."""

    def __init__(self, target: float, most: int, num_steps: int, *, at: int = 2, every: int = 0) -> None:
        self.now_s, self.said, self.met, self.meeting_s = 0.0, [], [], 0.0
        config, choice = LocalSGDConfig(inner_steps=most), Utilisation(target)
        self._meetings = Meetings(choice, config, num_steps, self.said.append, clock=lambda: self.now_s)
        local = Local(jnp.int32(at), jnp.int32(every))
        self.state = TrainState(step=jnp.int32(0), params={}, all_reduce=(), opt_state=local)

    def step_fn(self, state: TrainState, batch: int) -> tuple[TrainState, dict[str, Any]]:
        self.now_s += 0.25
        if batch + 1 >= int(state.opt_state.meets_at):
            self.met.append(batch + 1)
            self.now_s += self.meeting_s
        return state, {}

    def run(self, first: int, last: int, meeting_s: float) -> float:
        """Does the steps after `first` and returns the share of the time that went into steps."""
        self.meeting_s, before_s = meeting_s, self.now_s
        for step in range(first, last):
            self.state, _ = self._meetings(self.step_fn, self.state, step, step)
        return 0.25 * (last - first) / (self.now_s - before_s)


def test_the_interval_follows_the_link() -> None:
    """By hand: for 19 / 20 of the time in steps of 0.25 s a meeting of 1 s needs 76 steps, and of 0.01 s 2 steps."""
    link = Link(0.95, most=200, num_steps=2000)
    link.run(0, 2, 9.0)  # which connects
    link.run(2, 8, 1.0)  # three meetings measure the time of a meeting
    assert link.met == [2, 4, 6, 8] and link.said[0].startswith("step 2: replicas meet after 2 steps more")
    assert link.run(8, 8 + 76 * 3, 1.0) == pytest.approx(0.95)
    link.now_s += 60  # a checkpoint
    link.run(236, 388, 1.0)
    assert link.met[4:] == [8 + 76 * n for n in range(1, 6)]
    link.run(388, 388 + 2 * 76, 0.01)  # a fast link is noticed at the second meeting
    assert link.run(540, 1000, 0.01) > 0.95 and link.met[-2:] == [998, 1000]
    link.run(1000, 1004, 20.0)
    assert "meet every 200 steps" in link.said[-1] and link.met[-1] == 1004
    link.run(1004, 2000, 20.0)
    assert link.met[-5:] == [1204, 1404, 1604, 1804, 2000]  # never later than inner_steps, and at the end of the run
    assert not any(line.startswith("step 2000") for line in link.said)


def test_a_run_that_resumes_goes_on_with_its_interval() -> None:
    """From between two meetings, until three meetings are measured; the first connects."""
    link = Link(0.95, most=200, num_steps=2000)
    link.run(0, 100, 1.0)
    state = link.state.opt_state
    assert (link.met[-1], int(state.meets_at), int(state.meets_every)) == (84, 160, 76)
    link = Link(0.95, most=200, num_steps=2000, at=160, every=76)
    link.run(100, 160, 9.0)
    link.run(160, 312 + 152, 2.0)
    assert link.met == [160, 236, 312, 464]
    assert len(link.said) == 1 and link.said[0].endswith("every 152 steps")


def test_one_meeting_that_stalled_says_nothing() -> None:
    """Also if it is the first; and the work of a run after each meeting does not count as a step."""
    link = Link(0.95, most=200, num_steps=2000)
    link.run(0, 2, 0.1)
    link.run(2, 4, 60.0)
    for first in (4, 6):
        link.now_s += 1.0  # a row of the metrics
        link.run(first, first + 2, 0.1)
    assert link.met == [2, 4, 6, 8] and "every 8 steps" in link.said[-1]


def test_what_agreeing_takes_is_a_part_of_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the second of which the test above has 76 steps."""
    link = Link(0.95, most=200, num_steps=2000)

    def agree(key: object, measured: tuple[float, float]) -> list[tuple[float, float]]:
        link.now_s += 0.5
        return [measured]

    monkeypatch.setattr("examples.methods.utilisation.all_gather", agree)
    link.run(0, 8 + 76, 0.5)
    assert link.met == [2, 4, 6, 8, 84]


def intervals(*of_all: tuple[tuple[float, float], ...]) -> list[int]:
    """Returns what is chosen after each interval of 10 steps, of which the processes say these times."""
    meetings = Utilisation(0.95).start(LocalSGDConfig(inner_steps=500), 1000, print)
    meetings._interval = 10
    return [meetings._chosen(10, measured) for measured in of_all]


def test_a_meeting_takes_what_its_step_does_beyond_the_others() -> None:
    """1 s beyond steps of 0.25 s; it stays 1 s if all steps take twice as long, by a load that all have."""
    usual, loaded = ((1.25, 0.25), (1.25, 0.25)), ((1.5, 0.5), (1.5, 0.5))
    assert intervals(usual, usual, usual, loaded, loaded) == [10, 10, 76, 76, 76]


def test_waiting_for_who_comes_last_is_no_part_of_it() -> None:
    """It would grow with the interval, which would then grow with it."""
    always = ((1.75, 0.2), (1.25, 0.25))
    assert intervals(always, always, always) == [10, 10, 76]
    usual, waiting = ((1.25, 0.25), (1.25, 0.25)), ((9.25, 0.25), (1.35, 0.35))  # 1.05 s beyond steps of 0.3 s
    assert intervals(usual, usual, usual, waiting, waiting) == [10, 10, 76, 76, 80]


@pytest.mark.slow
@pytest.mark.usefixtures("example_methods")
def test_replicas_meet_when_it_was_chosen_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 2 steps, then every 3 as chosen here; a run that stops between two meetings continues as if it had not."""
    monkeypatch.setattr(Meetings, "_chosen", lambda self, *of_all: 3)
    local = {"local_sgd__inner_steps": 4, "local_sgd__interval": "utilisation", "sharding__partition_size": 2}
    settings = local | {"num_steps": 7, "log_every": 2, "checkpoint__every": 1, "checkpoint__keep_last": 7}
    assert run_here(*arguments(tmp_path / "whole", **settings)) == 0
    assert run_here(*arguments(tmp_path / "parts", **settings), hooks=[stop_after(4)]) == 75
    assert run_here(*arguments(tmp_path / "parts", **settings)) == 0
    whole, parts = ({row["step"]: row["loss"] for row in rows(tmp_path / name)} for name in ("whole", "parts"))
    # the first step of each start, and meetings: at 5, not at 4
    assert [*whole] == [1, 2, 5, 7] and [*parts] == [1, 2, 5, 7]
    assert (parts[1], parts[2], parts[7]) == (whole[1], whole[2], whole[7])  # at 5, of the steps since the start
    ends = [arrays(tmp_path / name, 7) for name in ("whole", "parts")]
    assert all(np.array_equal(ends[1][name], x) for name, x in ends[0].items())
    for run in ("whole", "parts"):
        drifts = {
            step: [x for name, x in arrays(tmp_path / run, step).items() if "drift" in name] for step in range(1, 8)
        }
        assert [step for step, found in drifts.items() if found and not any(x.any() for x in found)] == [2, 5, 7]
