"""When the replicas of local SGD meet, where a config file registers a choice for it (`local_sgd.interval`)."""

from collections.abc import Callable
from typing import Protocol

from configs.schema import LocalSGDConfig
from sharding.step import TrainState
from sharding.trees import Batch, Means

StepFn = Callable[[TrainState, Batch], tuple[TrainState, Means]]


class Meetings(Protocol):
    """The steps of a run between meetings; the state has the step of the next meeting (`LocalState.meets_at`)."""

    @property
    def last(self) -> int:
        """The step of the last meeting; before the first meeting, the first step since a start."""
        ...

    def __call__(self, step_fn: StepFn, state: TrainState, batch: Batch, step: int) -> tuple[TrainState, Means]:
        """Returns the results of `step_fn(state, batch)`, the step after `step` steps; may change the next meeting."""
        ...


class Interval(Protocol):
    """A registered value of `local_sgd.interval`. Intervals are LEAST_INTERVAL steps or longer."""

    def start(self, config: LocalSGDConfig, num_steps: int, say: Callable[[str], object]) -> Meetings:
        """Returns the meetings of a run; `say` prints a line."""
        ...

    def planned(self, config: LocalSGDConfig, step_s: float, meeting_s: float) -> int:
        """Returns the interval that a run would choose; a meeting adds `meeting_s` seconds to a step of `step_s`."""
        ...
