"""When the replicas of local SGD meet, chosen from what meetings and steps take (`local_sgd.target_utilisation`).

With a step of c seconds and a meeting of m more, an interval of H steps puts H c / (H c + m) of the time into steps. So
H is the least with which that is the target, from 2 to `local_sgd.inner_steps`: on a fast link the replicas meet often,
which costs the least loss; on a slow one they never meet more rarely than the user found good.
"""

import time
from collections.abc import Callable
from math import ceil
from statistics import median
from typing import Any

import jax
import numpy as np
import optax

from configs.schema import LEAST_INTERVAL, LocalSGDConfig
from runtime.consensus import broadcast, new_key
from sharding.step import TrainState

STEPS = 100  # whose median a step's time is


class Meetings:
    """Runs steps, measures them, and decides after each meeting when the next one is."""

    def __init__(
        self,
        config: LocalSGDConfig,
        num_steps: int,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config, self._num_steps, self._say, self._clock = config, num_steps, say, clock
        self._at = self._interval = 0  # 0: not read yet
        self._begun_s: float | None = None  # the last step, if it was no meeting
        self._steps_s: list[float] = []

    def __call__(self, step_fn: Callable[..., Any], state: TrainState, batch: Any, step: int) -> tuple[TrainState, Any]:
        """Returns what `step_fn(state, batch)` does, of the step after `step` steps."""
        if not self._at:
            self._at = int(optax.tree.get(state.opt_state, "meets_at"))
        meets = step + 1 >= self._at
        if meets:
            jax.block_until_ready(state)
        started_s = self._clock()
        if self._begun_s is not None:
            self._steps_s = [*self._steps_s, started_s - self._begun_s][-STEPS:]
        self._begun_s = started_s
        state, metrics = step_fn(state, batch)
        if meets:
            jax.block_until_ready(metrics)
            state = self._meet_again(state, step + 1, self._clock() - started_s)
            self._begun_s = None
        return state, metrics

    def _meet_again(self, state: TrainState, step: int, met_s: float) -> TrainState:
        """Returns the state with the step of the next meeting, after one that took `met_s` with its step."""
        before, self._interval = self._interval, broadcast(new_key("meetings"), lambda: self._chosen(met_s))
        self._at = min(step + self._interval, self._num_steps)
        if self._interval != before and self._steps_s:
            self._say(
                f"step {step}: a meeting took {met_s:.3g} s, a step {median(self._steps_s):.3g} s; replicas meet every "
                f"{self._interval} steps"
            )
        old = optax.tree.get(state.opt_state, "meets_at")
        new = jax.make_array_from_callback((), old.sharding, lambda _: np.asarray(self._at, np.int32))
        return jax.tree.map(lambda x: new if x is old else x, state)

    def _chosen(self, met_s: float) -> int:
        most, target = self._config.inner_steps, self._config.target_utilisation
        if not self._steps_s:  # the first step after a start
            return self._interval or most
        step_s = median(self._steps_s)
        wanted = ceil(target / (1 - target) * max(met_s - step_s, 0) / step_s)
        return min(max(wanted, LEAST_INTERVAL), most)
