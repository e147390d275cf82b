"""Asynchronous rounds of local SGD: a round takes the steps that each worker has done when the round ends.

    delta      the mean of the workers' deltas, weighted by their steps: sum(k d) / sum(k), with k steps of a worker
    state      the same mean of their optimizers' states; a counter rises as if the worker had done a whole round
    rows       a worker that does k < H steps skips its rows of the other H - k steps

A round is a function of the common state and of the workers' steps, which elastic/replicas/round_ends.py records. So
replicas compute a lost replica's part again, and one replica can replay a run from its record, to the same bits. The
weights follow Decoupled DiLoCo's weights by tokens (arXiv 2604.21428): all steps have the same number of rows.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from elastic.replicas.driver import Step
from elastic.replicas.round_ends import RoundEnds
from elastic.replicas.round_record import Round
from elastic.replicas.sums import Piece, Status
from sharding.step import TrainState
from sharding.trees import Batch
from training.replica_state import local_size
from training.round_units import RoundUnits, vector_of
from training.unit_loop import AtOnce, UnitLoop

Pieces = list[tuple[int, np.ndarray]]


class PartialRoundUnits(RoundUnits):
    """The programs of rounds whose workers do different numbers of steps."""

    @property
    def unit_layout(self) -> list[Piece]:
        """The size and payload of each piece of a unit; the number of steps is its last value."""
        *others, last = super().unit_layout
        return [*others, last._replace(size=last.size + 1)]

    def pieces(self, state: TrainState, batches: Iterator[Batch]) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the number and values of each piece of a worker, times its steps; `batches` has one per step."""
        taken = 0

        def counted() -> Iterator[Batch]:
            nonlocal taken
            for batch in batches:
                taken += 1
                yield batch

        last, size = len(self.unit_layout) - 1, self.sizes[2]
        for number, values in super().pieces(state, counted()):  # they begin after the last step
            steps = np.float32(taken)
            if number < last:
                yield number, values * steps
                continue
            rise = (values[:size] - self._exact(state)) * np.where(self._counts, np.float32(self.steps), steps)
            yield number, np.concatenate([rise, values[size:], [steps]], dtype=np.float32)

    def update(self, state: TrainState, total: np.ndarray) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state after a meeting, and the metrics, from the sums of all pieces over all workers."""
        means, start = total[:-1] / total[-1], sum(self.sizes[:2])
        exact = means[start : start + self.sizes[2]]
        exact += self._exact(state)
        exact[self._counts] = np.maximum(exact[self._counts], 0)
        return self.synced(state, means)

    def _exact(self, state: TrainState) -> np.ndarray:
        """Returns the unencoded values of a common state: deltas, which are zero, and counters."""
        return vector_of(self.parts(state.opt_state)[2])

    @property
    def _counts(self) -> np.ndarray:
        """Which of the unencoded values are counters, which must not depend on the steps of a round."""
        parts = self.parts(self._ex.state_shapes.opt_state)[2]
        are_counters = (np.full(local_size(x), jnp.issubdtype(x.dtype, jnp.integer)) for x in parts)
        return np.concatenate([*are_counters, np.zeros(0, bool)])


class AsynchronousRounds(AtOnce):
    """A round ends without the replicas that are not ready; its sums update the state in this round."""

    def __init__(self, loop: UnitLoop, work: PartialRoundUnits, ends: RoundEnds) -> None:
        super().__init__(loop)
        self._work, self._ends = work, ends

    def step(self, state: TrainState, at: int) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state after round `at`, and its metrics, with the share of its time that went into steps."""
        started_s, self._steps_s = time.perf_counter(), 0.0
        step = self._loop.replicas.step(at)
        held = dict[int, Pieces]()  # of units that wait for the end of the round
        if ended := self._ends.begin(at):
            self._put_known(step, state, ended, held)
        for unit in step.units():
            if not ended and (ended := self._ends.ended()):
                self._put_known(step, state, ended, held)
                step.leave_to(ended.replicas)
            if unit is Status.WAITING:
                self._loop.wait_for_sums()
                if not ended:
                    self._ends.arrive()
            elif ended:
                if unit not in held:
                    self._put(step, unit, self._computed(step, unit, state, range(ended.steps[unit])))
            else:
                held[unit] = self._computed(step, unit, state, self._ends.steps(unit))
        state, metrics = self._work.update(state, step.totals())
        return state, metrics | {"in_steps": self._steps_s / (time.perf_counter() - started_s)}

    def _put_known(self, step: Step, state: TrainState, ended: Round, held: dict[int, Pieces]) -> None:
        """Hands out the units without a step, whose pieces are zeros, and the units that were computed here."""
        for unit, count in enumerate(ended.steps):
            if unit not in held and not count:
                step.begin(unit)
                held[unit] = [(i, np.zeros(piece.size, np.float32)) for i, piece in enumerate(self._work.unit_layout)]
        for unit, pieces in held.items():
            count = ended.steps[unit]  # another one, if another replica that has this unit was heard
            is_known = pieces[-1][1][-1] == count
            self._put(step, unit, pieces if is_known else self._computed(step, unit, state, range(count)))

    def _computed(self, step: Step, unit: int, state: TrainState, inner_steps: Iterable[int]) -> Pieces:
        started_s = time.perf_counter()
        pieces = [*self._work.pieces(state, self._loop.batches(step.number, unit, inner_steps))]
        self._steps_s += time.perf_counter() - started_s
        return pieces

    def _put(self, step: Step, unit: int, pieces: Pieces) -> None:
        for piece, values in pieces:
            step.put(unit, piece, values)
