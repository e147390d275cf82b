"""The world of a run and its steps of training. A world is all devices together, or an independent replica.

    world = make_world(config, workdir, group, supervisor)
    world.join(address)  # with the other processes
    world.lock()  # the run's directory
    world.attach(ex)
    world.read(dataset, start)
    world.compile()
    for step, state, metrics in world.steps(state, start, say):
        ...

`OneWorld.steps` is the loop of plain training; sharding/step.py has the step that it calls.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self

import jax

from configs.schema import Config
from configs.schema.own import OWN
from input_pipeline.noise import RowData
from runtime import launchers
from runtime.files.run_directory import CHECKPOINTS, REPLICAS
from runtime.phases import Phase
from runtime.supervisor import Supervisor
from runtime.workdir_lock import workdir_lock
from sharding.step import TrainState
from training import groups, resume
from training.experiment import Experiment
from training.independent import Independent
from training.intervals import Interval, Meetings

Metrics = dict[str, jax.Array | float]
Steps = Iterator[tuple[int, TrainState, Metrics]]  # the steps done, the state after them, the metrics of the last one
Say = Callable[[str], object]


class _Program:
    """The directory and the processes of a program; its context ends reading, and connections to other replicas."""

    is_awaited = False  # other programs of the run wait for this one
    replica: int | None = None  # the number of this program among independent replicas
    synced = True  # whether the replicas have exchanged their updates in the last step: always, but with local SGD

    def __init__(self, config: Config, workdir: Path, checkpoints: Path, supervisor: Supervisor) -> None:
        """`workdir` is the directory of this program; replicas share the folder `checkpoints`."""
        self.config, self.workdir, self.checkpoints = config, workdir, checkpoints
        self._supervisor = supervisor

    def join(self, address: launchers.Address) -> None:
        """Joins the other processes of this program, if any. ValueError says which flags are needed."""
        elastic = self.config.elastic
        silence = {"silence_s": elastic.silence_s, "stall_s": elastic.stall_s}
        self._supervisor.join(address, workdir=self.workdir, is_awaited=self.is_awaited, **silence)

    def __enter__(self) -> Self:
        return self


class OneWorld(_Program):
    """All devices together run one program."""

    def is_finished(self, *, extends: bool) -> bool:
        """Whether the run is finished, which is then printed; `extends`: num_steps may have been raised since."""
        return resume.is_finished(self.config, self.workdir, extends=extends)

    def lock(self) -> None:
        """Keeps other programs out of the directory until the run ends. ValueError if one stays there."""
        self._supervisor.register(workdir_lock(self.workdir))

    def attach(self, ex: Experiment) -> None:
        """Takes the parts of the run. Nothing is compiled, and no other program is contacted."""
        self._ex = ex

    def read(self, dataset: RowData, step: int) -> None:
        """Begins to read the rows of the steps from `step` on, and waits for the first. Raises errors of reading."""
        self._batches = self._ex.batches.read(dataset, step, prefetch=self.config.data.prefetch)
        self._supervisor.register(self._batches)
        self._batches.await_next()

    @property
    def wait_s(self) -> float:
        """Seconds for which the last step has waited for rows."""
        return self._batches.wait_s

    def compile(self) -> jax.stages.Compiled:
        """Compiles all programs of a step; returns the program with most of the work."""
        self._train_step = self._ex.compile_train_step()
        return self._train_step

    def steps(self, state: TrainState, start: int, say: Say) -> Steps:
        """Yields after each step, from the state after `start` steps until the run ends or is asked to stop."""
        config, step = self.config, start
        meetings = self._meetings(say)
        while step < config.num_steps and not self._supervisor.stop_requested():
            state, metrics = self._step(state, step, meetings)
            step += 1
            every = config.local_sgd.inner_steps or 1
            self.synced = meetings.last == step if meetings else step % every == 0
            yield step, state, metrics

    def _meetings(self, say: Say) -> Meetings | None:
        """Returns the meetings of local SGD that a registered interval chooses; None if the interval is fixed."""
        local = self.config.local_sgd
        interval: Interval | None = OWN["interval"].get(local.interval)
        return interval.start(local, self.config.num_steps, say) if interval and local.inner_steps else None

    def _step(self, state: TrainState, step: int, meetings: Meetings | None) -> tuple[TrainState, Metrics]:
        """Returns the state after the step that follows `step` steps, and its metrics."""
        self._supervisor.enter(Phase.READING)
        batch = self._ex.batches.to_devices(next(self._batches))
        self._supervisor.enter(Phase.STEPPING)
        with jax.profiler.StepTraceAnnotation("step", step_num=step + 1):
            if meetings:
                return self._ex.block(meetings(self._train_step, state, batch, step))
            return self._ex.block(self._train_step(state, batch))

    def state_for_checkpoint(self, state: TrainState) -> TrainState | None:
        """Returns the part of a state that this program saves; None if another replica saves it."""
        return state.checkpoint_state

    def __exit__(self, *_: object) -> None:
        self._batches.close()


class ReplicaWorld(_Program):
    """One of several independent replicas, each a program with a directory and a number. Methods as in `OneWorld`."""

    is_awaited = True

    def __init__(self, config: Config, run_dir: Path, number: int, supervisor: Supervisor) -> None:
        """The replica takes no snapshots, because the other replicas have its state."""
        config = replace(config, elastic=replace(config.elastic, snapshot_every=0))
        super().__init__(config, run_dir / REPLICAS / str(number), run_dir / CHECKPOINTS, supervisor)
        self._run_dir, self.replica, self._number = run_dir, number, number

    def join(self, address: launchers.Address) -> None:
        """Joins the other processes of this replica. A TPU slice must not join the other replicas' slices."""
        launchers.leave_other_slices()
        super().join(address)

    def is_finished(self, *, extends: bool) -> bool:
        """False, because a replica of a finished run restores the last step, and then has no step to do."""
        return False

    def lock(self) -> None:
        """Waits for a program on another host that trains under this number, too."""
        self._supervisor.register(workdir_lock(self.workdir, others_go_on=True))
        groups.check_number_is_free(self._run_dir, self._number)

    def attach(self, ex: Experiment) -> None:
        self._replica = Independent(ex, self._supervisor, number=self._number, workdir=self._run_dir)

    def read(self, dataset: RowData, step: int) -> None:
        self._supervisor.register(self._replica.read(dataset, step))
        self._replica.wait_for_data()

    @property
    def wait_s(self) -> float:
        return self._replica.wait_s

    def compile(self) -> jax.stages.Compiled:
        return self._replica.compile()

    def steps(self, state: TrainState, start: int, say: Say) -> Steps:
        """Joins the other replicas before the first step, and leaves them after the last one."""
        self._replica.begin(start, say)
        step, stop_requested = start, self._supervisor.stop_requested
        while step < self.config.num_steps and not self._replica.can_stop(step, asked=stop_requested()):
            if done := self._replica(state, step):  # else it is asked to stop, and the state is as it was
                state, metrics, step = done
                yield step, state, metrics
        self._replica.end(step, state)

    def state_for_checkpoint(self, state: TrainState) -> TrainState | None:
        return self._replica.state_for_checkpoint(state)

    def __exit__(self, *_: object) -> None:
        self._replica.close()


World = OneWorld | ReplicaWorld


def make_world(config: Config, workdir: Path, group: int | None, supervisor: Supervisor) -> World:
    """Returns the world of a run in `workdir`; `group` is the number of an independent replica, if it has replicas."""
    if group is None:
        return OneWorld(config, workdir, workdir / CHECKPOINTS, supervisor)
    return ReplicaWorld(config, workdir, group, supervisor)
