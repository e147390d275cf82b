"""The steps of a run as train.py's loop gets them: of one program, and of one of several independent replicas."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
from support.four_nodes import config

import train
from runtime.phases import Phase
from training.experiment import make_experiment
from training.world import OneWorld, ReplicaWorld, make_world

RUN = Path("run")
KEYS: dict[str, Any] = {"elastic.snapshot_every": 7, "optimizer.warmup_steps": 0}


class Recorder:
    """A supervisor, an experiment and an independent replica; notes the calls, and is asked to stop at a step."""

    def __init__(self, stops_at: int = 99) -> None:
        self.calls: list[Any] = []
        self.step, self.stops_at = 0, stops_at
        self.results: Iterator[Any] = iter(())
        self.batches = SimpleNamespace(to_devices=lambda rows: f"batch {rows}")

    def stop_requested(self) -> bool:
        self.calls.append("asks")
        return self.step >= self.stops_at

    def enter(self, phase: Phase) -> None:
        self.calls.append(phase)

    def block(self, done: Any) -> Any:
        self.calls.append("waits")
        return done

    def begin(self, step: int, say: object) -> None:
        self.calls.append(f"joins at {step}")

    def can_stop(self, step: int, *, asked: bool) -> bool:
        self.step = step
        return asked

    def __call__(self, state: str, step: int) -> Any:
        self.calls.append(f"step after {step} of {state}")
        return next(self.results)

    def end(self, step: int, state: str) -> None:
        self.calls.append(f"leaves after {step} with {state}")


def world_of(recorder: Recorder, group: int | None = None, **changes: Any) -> Any:
    """Returns a world whose supervisor, experiment and replica are the recorder, and which has read its rows."""
    keys = KEYS | {key.replace("__", "."): value for key, value in changes.items()}
    supervisor: Any = recorder
    world: Any = make_world(config(keys), RUN, group, supervisor)
    world._ex = world._replica = recorder
    world._batches = iter(range(10))
    world._train_step = lambda state, batch: (f"{state}, {batch}", {"loss": 0.0})
    return world


def test_train_py_composes_a_run_as_other_programs_do() -> None:
    ours, theirs = (make(config(KEYS)) for make in (train.make_experiment, make_experiment))
    assert ours.plan == theirs.plan and ours.model.config == theirs.model.config
    assert (ours.batches, ours.num_shares) == (theirs.batches, theirs.num_shares)
    assert type(ours.chain) is type(theirs.chain) and jax.tree.leaves(ours.state_shapes) == jax.tree.leaves(
        theirs.state_shapes
    )


def test_one_program_has_the_directory_for_itself() -> None:
    world = world_of(Recorder())
    assert isinstance(world, OneWorld) and (world.replica, world.is_awaited) == (None, False)
    assert (world.workdir, world.checkpoints) == (RUN, RUN / "checkpoints")
    assert world.config.elastic.snapshot_every == 7


def test_replicas_share_checkpoints_and_take_no_snapshots() -> None:
    """Another replica has the state that a snapshot would save."""
    world = world_of(Recorder(), group=3)
    assert isinstance(world, ReplicaWorld) and (world.replica, world.is_awaited) == (3, True)
    assert (world.workdir, world.checkpoints) == (RUN / "replicas" / "3", RUN / "checkpoints")
    same = config(KEYS)
    assert world.config == replace(same, elastic=replace(same.elastic, snapshot_every=0))


def test_each_step_of_one_program_reads_a_batch_and_waits_for_its_results() -> None:
    world = world_of(recorder := Recorder(), num_steps=5)
    found = []
    for step, state, metrics in world.steps("start", 3, print):
        found.append((step, state, metrics))
        recorder.calls.append("hooks")
    assert found == [(4, "start, batch 0", {"loss": 0.0}), (5, "start, batch 0, batch 1", {"loss": 0.0})]
    assert recorder.calls == ["asks", Phase.READING, Phase.STEPPING, "waits", "hooks"] * 2


def test_one_program_stops_before_the_step_at_which_it_is_asked() -> None:
    """It is asked before each step, once, and after the hooks of the step before."""
    world = world_of(recorder := Recorder(stops_at=5), num_steps=9)
    steps = []
    for step, *_ in world.steps("start", 3, print):
        recorder.step = step
        steps.append(step)
    assert steps == [4, 5] and recorder.calls.count("asks") == 3
    assert not [*world_of(Recorder(stops_at=0)).steps("start", 0, print)]


def test_replicas_of_one_program_are_synced_after_each_step_or_interval() -> None:
    world = world_of(Recorder(), num_steps=3)
    assert [world.synced for _ in world.steps("start", 0, print)] == [True] * 3
    world = world_of(Recorder(), local_sgd__inner_steps=3, num_steps=6)
    assert [world.synced for _ in world.steps("start", 1, print)] == [False, True, False, False, True]


def test_a_replica_joins_before_its_first_step_and_leaves_after_the_last_one() -> None:
    """A step may be a round of several, and a replica that was behind continues with the state of others."""
    world = world_of(recorder := Recorder(), group=0, num_steps=8)
    recorder.results = iter([("one", {}, 4), ("another's", {"loss": 0.0}, 8)])
    assert [*world.steps("start", 2, print)] == [(4, "one", {}), (8, "another's", {"loss": 0.0})]
    steps = ["asks", "step after 2 of start", "asks", "step after 4 of one"]
    assert recorder.calls == ["joins at 2", *steps, "leaves after 8 with another's"]


def test_a_step_that_a_replica_does_not_finish_is_not_yielded() -> None:
    """It was asked to stop meanwhile: the state is as it was before."""
    world = world_of(recorder := Recorder(), group=0, num_steps=8)

    def stopped() -> Iterator[None]:
        recorder.stops_at = 0
        yield None

    recorder.results = stopped()
    assert not [*world.steps("start", 2, print)]
    assert recorder.calls == ["joins at 2", "asks", "step after 2 of start", "asks", "leaves after 2 with start"]


def test_a_replica_of_a_finished_run_joins_and_leaves_without_a_step() -> None:
    world = world_of(recorder := Recorder(), group=0, num_steps=8)
    assert not [*world.steps("start", 8, print)]
    assert recorder.calls == ["joins at 8", "leaves after 8 with start"]
