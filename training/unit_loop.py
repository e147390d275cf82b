"""`UnitLoop`: computes the work units of an independent replica; and when their sums update the state.

`AtOnce` updates the state by the sums of the same step, `DelayedUpdate` by the sums of the step before.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from elastic.replicas.driver import Replicas, Step
from elastic.replicas.sums import Status
from input_pipeline.batches import UnitBatches
from runtime.phases import Phase
from sharding.step import TrainState
from sharding.trees import Batch, GradsR
from training.batches import BatchLayout
from training.gradient_units import GradientUnits
from training.replica_state import pending, with_pending
from training.round_units import RoundUnits

Work = GradientUnits | RoundUnits
RATE_STEP, RATE_MEMORY = 1.1, 0.5
STOP_S = 10.0  # longest wait for the peers' sums of a single step after the request to stop


class StoppedError(Exception):
    """The run stops within a step or a round, or before it has its peers' state."""


class Stop:
    """The request to stop this replica. The processes of a replica get it at the same step, and only once."""

    def __init__(self, requested: Callable[[], bool], *, is_round: bool) -> None:
        """`is_round`: a step of the replicas is a round, which may take longer than the notice before a shutdown."""
        self._requested, self._is_round = requested, is_round
        self.is_asked = False
        self.has_ended_wait = False
        self._waits_since_s: float | None = None

    def poll(self) -> bool:
        """Returns whether this replica was asked to stop."""
        self.is_asked |= self._requested()
        return self.is_asked

    def end_if_asked(self) -> None:
        """Raises StoppedError if this replica was asked to stop."""
        if self.poll():
            raise StoppedError

    def end_wait_for_sums(self) -> None:
        """Raises StoppedError, in all processes, if this replica was asked to stop and sums do not come soon.

        The sums of a single step come within STOP_S, and then the peers need not compute this replica's units again.
        """
        if not self.poll():
            return
        if self._waits_since_s is None:
            self._waits_since_s = time.monotonic()
        is_late = self._is_round or time.monotonic() - self._waits_since_s > STOP_S
        if agreed(int(is_late))[0]:
            raise StoppedError

    def begin_wait(self) -> None:
        """Waits for sums again as long as at the first time."""
        self._waits_since_s = None


class UnitLoop:
    """Computes work units, and measures how long they take."""

    def __init__(
        self,
        work: Work,
        replicas: Replicas,
        rows: UnitBatches,
        layout: BatchLayout,
        stop: Stop,
        enter: Callable[[Phase], object],
    ) -> None:
        """`enter` is called when the process makes progress."""
        self.work, self.replicas = work, replicas
        self._rows, self._layout, self._stop, self._enter = rows, layout, stop, enter
        self.wait_s = 0.0  # for rows
        self._unit_s, self._longest_s = 0.0, 0.0  # average unit; slowest unit of this step

    def units(self, step: Step) -> Iterator[int]:
        """Yields each unit to compute until all totals of a step are here. StoppedError if the run stops before."""
        for unit in step.units():
            if unit is Status.WAITING:
                self.wait_for_sums()
            else:
                yield unit

    def wait_for_sums(self) -> None:
        """Notes that this replica waits for its peers' sums. StoppedError if the run stops."""
        self._enter(Phase.STEPPING)
        self._stop.end_wait_for_sums()

    def compute(self, step: Step, unit: int, state: TrainState) -> None:
        """Computes a work unit, and hands its pieces to the step as they become complete."""
        started_s, waited_s = time.perf_counter(), self.wait_s
        for piece, values in self.work.pieces(state, self.batches(step.number, unit, range(self.work.steps))):
            step.put(unit, piece, values)
        self._longest_s = max(self._longest_s, time.perf_counter() - started_s - (self.wait_s - waited_s))

    def batches(self, step: int, unit: int, inner_steps: Iterable[int]) -> Iterator[Batch]:
        """Yields the rows of a unit, on the devices, for some steps of training in a step of the replicas."""
        for inner in inner_steps:
            started_s = time.perf_counter()
            if self.work.steps > 1:
                self._enter(Phase.STEPPING)
                self._stop.end_if_asked()
            batch = self._layout.to_devices(self._rows.get(step * self.work.steps + inner, unit))
            self.wait_s += time.perf_counter() - started_s
            yield batch

    def tell_rate(self) -> None:
        """Sends the peers this replica's rate, by its slowest unit of the step, if the rate has changed much.

        On a machine that several replicas share, the last one computes fast while the others wait. It must not get more
        units for that.
        """
        if self._longest_s:
            before_s = self._unit_s or self._longest_s
            self._unit_s = RATE_MEMORY * before_s + (1 - RATE_MEMORY) * self._longest_s
            self._longest_s = 0.0
        unit_us = agreed(min(round(self._unit_s * 1e6), 2**31 - 1))[0]
        known = self.replicas.members.me.rate
        if unit_us and not known / RATE_STEP < 1e6 / unit_us < known * RATE_STEP:
            self.replicas.members.tell(rate=1e6 / unit_us)


class AtOnce:
    """The sums of a step update the state in this step."""

    def __init__(self, loop: UnitLoop) -> None:
        self._loop = loop

    def step(self, state: TrainState, at: int) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state after step `at` of the replicas, and its metrics."""
        step = self._loop.replicas.step(at)
        for unit in self._loop.units(step):
            self._loop.compute(step, unit, state)
        return self._loop.work.update(state, step.totals())

    def completed(self, state: TrainState) -> TrainState:
        """Returns the state with all sums on which it depends, and waits for them: none are pending."""
        return state

    def prepared_for_copies(self, state: TrainState, at: int) -> TrainState:
        """Returns the state after `at` steps of the replicas, completed if a peer wants a copy of it."""
        del at
        return state

    def drop_pending(self) -> None:
        """Drops sums that are under way, because the state was replaced."""


@dataclass
class LateStep:
    """A step whose gradients are under way while the next one computes."""

    step: int
    grads_R: GradsR | None = None  # the mean `[1, ...]`, once it is here
    means: dict[str, np.float32] = field(default_factory=dict)


class DelayedUpdate:
    """The sums of a step are exchanged during the next step, and update the state then (`compression.delayed`).

    Between two steps the state does not hold these gradients. Their field has the parameters by which they are
    computed, so that the units of a lost replica can be computed again. `completed` replaces them by the gradients. The
    other methods are as in `AtOnce`.
    """

    def __init__(self, loop: UnitLoop, work: GradientUnits) -> None:
        self._loop, self._work = loop, work
        self._late: LateStep | None = None

    def step(self, state: TrainState, at: int) -> tuple[TrainState, dict[str, Any]]:
        step = self._loop.replicas.step(at)
        for unit in step.units_without_waiting():
            self._loop.compute(step, unit, state)
        state, late = self.completed(state), self._late
        unknown = dict.fromkeys(self._work.means, np.float32("nan")) | {"weight": np.float32(1)}
        means = late.means if late else unknown
        state, metrics = self._work.apply(with_pending(state, None), pending(state), means)
        if not late:
            metrics = {name: x for name, x in metrics.items() if name not in unknown}
        self._late = LateStep(at)
        return state, metrics

    def completed(self, state: TrainState) -> TrainState:
        late = self._late
        if late is None:
            return state
        if late.grads_R is None:
            step = self._loop.replicas.step(late.step)
            for unit in self._loop.units(step):
                self._loop.compute(step, unit, replace(state, params=self._work.first_of_each(pending(state))))
            flat, means = self._work.sums(step.totals())
            late.means = {name: x / means["weight"] for name, x in means.items()}
            flat /= means["weight"]  # in place: new memory takes longer to touch than to fill
            late.grads_R = self._work.arrays(flat)
        return with_pending(state, late.grads_R)

    def prepared_for_copies(self, state: TrainState, at: int) -> TrainState:
        is_wanted = self._late is not None and any(agreed(self._loop.replicas.copies.are_wanted(at)))
        return self.completed(state) if is_wanted else state

    def drop_pending(self) -> None:
        self._late = None


UpdateTiming = AtOnce | DelayedUpdate


def agreed(value: int) -> list[int]:
    """Returns the values of all processes of this replica, below 2**31. Every process must call it."""
    if jax.process_count() == 1:
        return [value]
    return [int(x) for x in multihost_utils.process_allgather(np.int32(value))]
