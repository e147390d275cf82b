"""Intervals of local SGD with a target fraction of the time for steps: replicas sync more often on a faster link.

With steps of c seconds and m more seconds for a sync, H steps and a sync spend H c / (H c + m) of the time in steps.
After each sync (here: meeting) H is the smallest interval that reaches the target, from 2 to `local_sgd.inner_steps`.
On a fast link the replicas sync often, which costs the least loss. On a slow link the user's `inner_steps` is the
limit.

m is the additional time of the step with the sync, on the process that arrives last, because the others wait for this
process at any interval. m is the median of the last three syncs. Before three syncs, replicas keep the smallest
interval, or the interval in the state from which a run resumes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import jax
import numpy as np
import optax

from configs.schema import LEAST_INTERVAL, LocalSGDConfig
from runtime.consensus import all_gather, new_key
from sharding.step import TrainState

INTERVALS = 9  # a step's time is the median of these: an interval with a checkpoint says little
LATEST = 3  # a meeting's time is the median of these: a changed link is noticed at the second meeting
IN_STATE = ("meets_at", "meets_every")  # of LocalState: a resumed run continues with its interval


@dataclass(frozen=True)
class Utilisation:
    """The intervals, for `register`; `target` is the fraction of the time for steps. ValueError for other numbers."""

    target: float

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise ValueError(f"target={self.target} of Utilisation must be between 0 and 1")

    def start(self, config: LocalSGDConfig, num_steps: int, say: Callable[[str], object]) -> "Meetings":
        """Returns the meetings of a run; `say` prints a line."""
        return Meetings(self, config, num_steps, say)

    def planned(self, config: LocalSGDConfig, step_s: float, meeting_s: float) -> int:
        """Returns the number of steps to the next meeting, which takes `meeting_s` more than a step of `step_s`."""
        wanted = ceil(self.target / (1 - self.target) * meeting_s / step_s)
        return min(max(wanted, LEAST_INTERVAL), config.inner_steps)


class Meetings:
    """Runs steps, measures them, and decides after each meeting when the next one is."""

    def __init__(
        self,
        choice: Utilisation,
        config: LocalSGDConfig,
        num_steps: int,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._choice, self._config, self._num_steps = choice, config, num_steps
        self._say, self._clock = say, clock
        self._at = self._interval = 0  # 0: not read yet, and not chosen
        self._since = 0, 0.0  # the step of the last meeting, and when the next one began
        self._agreeing_s = 0.0  # on the interval after the last meeting
        self._steps_s: list[np.ndarray] = []  # per interval, the mean step of each process without the meeting
        self._more_s: list[float] = []  # seconds of each of the latest meetings

    @property
    def last(self) -> int:
        """The step of the last meeting; before the first meeting, the first step since the start."""
        return self._since[0]

    def __call__(self, step_fn: Callable[..., Any], state: TrainState, batch: Any, step: int) -> tuple[TrainState, Any]:
        """Returns the result of `step_fn(state, batch)`, the step after `step` steps."""
        if not self._at:
            self._at, self._interval = (int(optax.tree.get(state.opt_state, name)) for name in IN_STATE)
            self._since = step, 0.0
        if step == self.last:  # excludes the time of metrics and validations since then
            self._since = step, self._clock()
        if step + 1 < self._at:
            return step_fn(state, batch)
        jax.block_until_ready(state)  # wait for the steps before, which do not communicate
        begun_s, (first, since_s) = self._clock(), self._since
        state, metrics = jax.block_until_ready(step_fn(state, batch))
        ended_s = self._clock()
        self._since = step + 1, ended_s
        if step + 1 == self._num_steps:
            return state, metrics
        mean_s = (begun_s - since_s) / (step - first) if step > first else 0.0
        measured = ended_s - begun_s + self._agreeing_s, mean_s
        self._interval = self._chosen(step + 1, all_gather(new_key("meetings"), measured))
        self._at = min(step + 1 + self._interval, self._num_steps)
        self._agreeing_s = self._clock() - ended_s
        return _with_meetings(state, self._at, self._interval), metrics

    def _chosen(self, step: int, of_all: Sequence[tuple[float, float]]) -> int:
        """Returns the interval after the meeting at `step`, from the measurements `of_all` processes.

        A measurement is the seconds of the step that met, with agreeing, and of the mean step before it (0 if none).
        """
        if not self._interval:  # until they have met, connections are made
            self._say(f"step {step}: replicas meet after {LEAST_INTERVAL} steps more, to see what a meeting takes")
            return LEAST_INTERVAL
        meetings_s, steps_s = np.array(of_all).T
        if not steps_s.min():
            return self._interval
        self._steps_s = [*self._steps_s, steps_s][-INTERVALS:]
        usual_s = np.median(self._steps_s, axis=0)
        step_s = usual_s.max()  # all wait for the slowest process
        last = np.argmin(meetings_s)  # to come; its own steps of this interval may have been slow for that reason
        more_s = meetings_s[last] - (usual_s[last] + (steps_s - usual_s).mean())
        self._more_s = [*self._more_s, more_s][-LATEST:]
        if len(self._more_s) < LATEST:
            return self._interval
        more_s = max(np.median(self._more_s), 0.0)
        interval = self._choice.planned(self._config, step_s, more_s)
        if interval != self._interval:
            self._say(
                f"step {step}: meetings took {more_s:.3g} s more than a step of {step_s:.3g} s; replicas meet "
                f"every {interval} steps"
            )
        return interval


def _with_meetings(state: TrainState, *numbers: int) -> TrainState:
    """Returns the state with other numbers IN_STATE: the step of the next meeting, and the interval before it."""
    sharding = optax.tree.get(state.opt_state, IN_STATE[0]).sharding
    arrays = (jax.make_array_from_callback((), sharding, lambda _, x=x: np.asarray(x, np.int32)) for x in numbers)
    return replace(state, opt_state=optax.tree.set(state.opt_state, **dict(zip(IN_STATE, arrays, strict=True))))
