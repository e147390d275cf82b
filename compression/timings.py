"""When the replica all-reduce runs, if not after the micro-steps (`sharding.step.AfterMicroSteps`).

    Overlapped          in the last backward pass: each layer's gradient as soon as it has been summed
    Delayed             next to the micro-steps of the following step, a piece next to each
    delayed             a step later too, but after the micro-steps: a transform for `AfterMicroSteps`

Local SGD, every few steps, is in compression/local_sgd.py. `ByGroup` connects the two that run in the micro-steps with
a method of the replica all-reduce: it exchanges one group of shards after the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from compression.exchange import own_copies, state_after, transform
from compression.statistics import Sent, State, with_zero_counts
from sharding.gradients import MicroSteps
from sharding.in_step_exchange import (
    Exchange,
    Exchanged,
    ExchangeInEachMicroStep,
    ExchangeInLastMicroStep,
    exchanged_gradients,
    gradients_and_exchange,
)
from sharding.plan import ShardingPlan
from sharding.replicas import PerReplica
from sharding.step import AllReduce, Chained, States
from sharding.trees import Batch, Grads, GradsR, Means, Params, PyTree


@dataclass(frozen=True)
class ExactByGroup:
    """Exact sums. The state of a method without its codec, because no link between nodes is used, waits unchanged."""

    plan: ShardingPlan
    exchange: Exchange

    def inputs(self, state: PyTree) -> Mapping[str, PyTree]:
        """Returns the arguments of an ExchangeInLastMicroStep (or EachMicroStep) without residuals and counts."""
        del state
        return {"exchange": self.exchange, "num_counts": 0, "done": jnp.zeros((), jnp.int32), "kept": None}

    @jax.named_scope("replica_all_reduce")
    def outputs(self, exchanged: Exchanged[GradsR], state: PyTree) -> tuple[Grads, PyTree]:
        """Returns the mean `[...]` in the optimizer's scope, and the state with counts of zero."""
        return own_copies(self.plan, exchanged.mean), with_zero_counts(state)


@dataclass(frozen=True)
class CodedByGroup:
    """Sums of encoded values, of a method that keeps a State."""

    plan: ShardingPlan
    exchange: Exchange

    def inputs(self, state: State) -> Mapping[str, PyTree]:
        """Returns the arguments of an ExchangeInLastMicroStep, with the residuals `[R, ...]` if the method has any."""
        kept_R = state.residual.tree if state.residual else None
        return {"exchange": self.exchange, "num_counts": len(Sent._fields), "done": state.step, "kept": kept_R}

    @jax.named_scope("replica_all_reduce")
    def outputs(self, exchanged: Exchanged[GradsR], state: State) -> tuple[Grads, State]:
        """Returns the mean `[...]` in the optimizer's scope, and the state after the exchange.

        Where the mean is not finite, the step is skipped. The residuals have taken in the skipped gradients by then, so
        they become zero: to restore them would take a second copy of them until here.
        """
        mean = own_copies(self.plan, exchanged.mean)
        finite = jnp.isfinite(optax.tree.norm(mean))
        kept_R = jax.tree.map(lambda x: jnp.where(finite, x, 0), exchanged.kept)
        return mean, state_after(state, (), kept_R, Sent(*exchanged.counts))


# the exchange of one group of shards after the other, and the method's state before and after it
ByGroup = ExactByGroup | CodedByGroup


@dataclass(frozen=True, kw_only=True)
class Overlapped(Chained):
    """A Timing: the last backward pass exchanges each group of gradients as soon as it is summed."""

    by_group: ByGroup

    def gradients(
        self, micro_steps: MicroSteps, plan: ShardingPlan, params: Params, batch: Batch, states: States
    ) -> tuple[Exchanged[GradsR], Means]:
        """Returns the gradients' mean over the replicas, and the means of the batch."""
        loop = ExchangeInLastMicroStep(**self.by_group.inputs(states[0]))
        return exchanged_gradients(micro_steps, plan, params, batch, loop)

    def update(self, gradients: Exchanged[GradsR], states: States, params: Params) -> tuple[Grads, States]:
        """Returns the optimizer's update by the mean, and the states after it."""
        all_reduce, opt_state = states
        mean, all_reduce = self.by_group.outputs(gradients, all_reduce)
        updates, opt_state = self.optimizer.update(mean, opt_state, params)
        return updates, (all_reduce, opt_state)


class DelayedState(NamedTuple):
    """State of `delayed` and `Delayed`."""

    waiting: PerReplica  # the previous step's gradients
    exchange: PyTree  # the state of the method


@dataclass(frozen=True, kw_only=True)
class Delayed(Chained):
    """A Timing: the previous step's gradients are exchanged, a piece next to each micro-step.

    They are zero in the first step. Non-finite gradients never enter the state: they make the result non-finite too, so
    that the step is skipped. Then the exchanged mean waits on every replica, and the residuals hold the codec's errors:
    together they are the gradients that waited before.
    """

    by_group: ByGroup

    def gradients(
        self, micro_steps: MicroSteps, plan: ShardingPlan, params: Params, batch: Batch, states: States
    ) -> tuple[tuple[GradsR, Exchanged[GradsR]], Means]:
        """Returns each replica's gradients `[R, ...]` and the mean of the previous ones, and the means of the batch."""
        state: DelayedState = states[0]
        loop = ExchangeInEachMicroStep(pending=state.waiting.tree, **self.by_group.inputs(state.exchange))
        return gradients_and_exchange(micro_steps, plan, params, batch, loop)

    def update(
        self, gradients: tuple[GradsR, Exchanged[GradsR]], states: States, params: Params
    ) -> tuple[Grads, States]:
        """Returns the optimizer's update by the previous gradients' mean, and the states after it."""
        (grads_R, exchanged), state = gradients, states[0]
        mean, exchange = self.by_group.outputs(exchanged, state.exchange)
        mean = _not_finite_with(grads_R, mean)
        waiting = replace(state.waiting, tree=if_finite(grads_R, grads_R, exchanged.mean))
        updates, opt_state = self.optimizer.update(mean, states[1], params)
        return updates, (DelayedState(waiting=waiting, exchange=exchange), opt_state)


def delayed(all_reduce: AllReduce, replicas: int) -> optax.GradientTransformation:
    """Returns the replica all-reduce of the previous step's gradients `[R, ...]`, which are zero in the first step.

    In a step only the optimizer has to wait for it. Non-finite gradients never enter the state: they make the result
    non-finite too, so that the step is skipped and the state stays, including the waiting gradients. Waiting
    gradients in the checkpoint of an independent replica may not be finite: they cost one step, after
    which the new gradients wait.
    """

    def init(params: Params) -> DelayedState:
        zeros = jax.tree.map(lambda p: jnp.zeros((replicas, *p.shape), p.dtype), params)
        waiting = PerReplica(zeros, combine="mean", label="local")
        return DelayedState(waiting=waiting, exchange=all_reduce.init(params))

    def update(updates: GradsR, state: PyTree, params: Params | None = None) -> tuple[Grads, PyTree]:
        mean, exchange = all_reduce.update(state.waiting.tree, state.exchange, params)
        mean = _not_finite_with(updates, mean)
        waiting = replace(state.waiting, tree=if_finite(updates, updates, state.waiting.tree))
        return mean, DelayedState(waiting=waiting, exchange=if_finite(mean, exchange, state.exchange))

    return transform(init, update)


def if_finite(values: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """Returns `new` where all values are finite, else `old`."""
    finite = jnp.isfinite(optax.tree.norm(values))
    return jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)


def _not_finite_with(values: PyTree, mean: Grads) -> Grads:
    """Returns the mean `[...]`, or NaN in its place where not all values are finite."""
    return if_finite(values, mean, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), mean))
