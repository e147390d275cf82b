"""How a run comes from step to step, and how it does where all devices are one world."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import jax

from input_pipeline import Dataset
from runtime.phases import Phase
from sharding.step import TrainState
from training.experiment import Experiment
from training.meetings import Meetings

# the state after a step, its metrics, and the steps done
Done = tuple[TrainState, dict[str, jax.Array | float], int]


class Steps(Protocol):
    """How a run comes from one step to the next."""

    @property
    def wait_s(self) -> float:
        """Seconds that the last step has waited for rows."""
        ...

    @property
    def synced(self) -> bool:
        """Whether the replicas have met in the last step: always, but with local SGD."""
        ...

    def read(self, dataset: Dataset, step: int) -> AbstractContextManager[object]:
        """Begins to read rows of the steps from `step` on; returns what ends that."""
        ...

    def wait_for_data(self) -> None:
        """Waits for the first rows; raises what reading them does."""
        ...

    def compile(self) -> jax.stages.Compiled:
        """Compiles what a step runs; returns the program with the most of its work."""
        ...

    def __call__(self, state: TrainState, step: int) -> Done | None:
        """Does the next step, or some; None where the run is to stop before they are done: the state is as it was."""
        ...

    def begin(self, step: int, say: Callable[[str], object]) -> None:
        """Is called when the state after `step` steps is there, before the first step."""
        ...

    def can_stop(self, step: int, *, asked: bool) -> bool:
        """Whether the run may stop before its next step, having been asked to or not."""
        ...

    def end(self, step: int, state: TrainState) -> None:
        """Is called after the last step."""
        ...

    def state_for_checkpoint(self, state: TrainState) -> TrainState | None:
        """Returns what a checkpoint keeps of a state; None if another world saves it."""
        ...


class OneWorld:
    """Steps of all devices together."""

    def __init__(self, ex: Experiment, enter: Callable[[Phase], object]) -> None:
        self._ex, self._enter = ex, enter
        self._meetings: Meetings | None = None
        self.synced = True

    def read(self, dataset: Dataset, step: int) -> AbstractContextManager[object]:
        self._batches = self._ex.batches.read(dataset, step, prefetch=self._ex.config.data.prefetch)
        return self._batches

    def wait_for_data(self) -> None:
        self._batches.await_next()

    @property
    def wait_s(self) -> float:
        return self._batches.wait_s

    def compile(self) -> jax.stages.Compiled:
        self._step_fn = self._ex.compile_train_step()
        return self._step_fn

    def __call__(self, state: TrainState, step: int) -> Done:
        self._enter(Phase.READING)
        batch = self._ex.batches.to_devices(next(self._batches))
        self._enter(Phase.STEPPING)
        done = self._meetings(self._step_fn, state, batch, step) if self._meetings else self._step_fn(state, batch)
        every = self._ex.config.local_sgd.inner_steps or 1
        self.synced = self._meetings.last == step + 1 if self._meetings else (step + 1) % every == 0
        return *self._ex.block(done), step + 1

    def begin(self, step: int, say: Callable[[str], object]) -> None:
        """The processes have joined before."""
        config = self._ex.config
        if config.local_sgd.target_utilisation:
            self._meetings = Meetings(config.local_sgd, config.num_steps, say)

    def can_stop(self, step: int, *, asked: bool) -> bool:
        return asked

    def end(self, step: int, state: TrainState) -> None:
        """Nobody waits for anything."""

    def state_for_checkpoint(self, state: TrainState) -> TrainState | None:
        return state.checkpoint_state
