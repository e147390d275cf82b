"""The training step under `jit`: the gradients of a batch, the replica all-reduce, the optimizer, the new parameters.

`Timing` says when the replicas exchange gradients. `AfterMicroSteps`, here, is the plain one. compression/timings.py
has the timings that overlap the exchange with compute, compression/local_sgd.py the timings of every few steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import GetAttrKey

from sharding.experts import Gather
from sharding.frozen import joined
from sharding.gathers import auto_gather, layer_gather, to_parameter_scope
from sharding.gradients import MicroSteps, replica_gradients
from sharding.plan import ShardingPlan, run_manual
from sharding.trees import Batch, Grads, GradsR, Means, Params, PyTree

# (plan, a device's shards, its rows, gather) -> weighted sums over the rows, by name
Measures = Callable[[ShardingPlan, Params, Batch, Gather], Means]
States = tuple[PyTree, PyTree]  # the replica all-reduce's, and the optimizer's


class Watch(Protocol):
    """Selects the metrics of a step from the states after it."""

    def __call__(self, states: States, /) -> Means:
        """Returns scalars, or with local SGD each replica's, `[R]`."""
        ...


class Timing(Protocol):
    """When replicas exchange gradients, and by which optimizer their mean moves the parameters."""

    @property
    def watch(self) -> Watch:
        """Selects the metrics of a step."""
        ...

    def init(self, params: Params) -> States:
        """Returns the states before the first step, of parameters `[...]`."""
        ...

    def gradients(
        self, micro_steps: MicroSteps, plan: ShardingPlan, params: Params, batch: Batch, states: States
    ) -> tuple[PyTree, Means]:
        """Returns the input of `update`, and the means of a batch; `params` are trained and frozen ones."""
        ...

    def update(self, gradients: PyTree, states: States, params: Params) -> tuple[Grads, States]:
        """Returns how far the trained parameters `[...]` move, in the optimizer's scope, and the states after it."""
        ...


class AllReduce(Protocol):
    """The replica all-reduce, an optax.GradientTransformation to the mean of gradients, in the optimizer's scope."""

    def init(self, params: Params, /) -> PyTree:
        """Returns the state before the first step."""
        ...

    def update(self, updates: GradsR, state: PyTree, params: Params | None = None, /) -> tuple[PyTree, PyTree]:
        """Returns the mean (Grads) of gradients `[R, ...]`, and the state after it."""
        ...


class Optimizer(Protocol):
    """An optax.GradientTransformation of arrays in the optimizer's scope."""

    def init(self, params: Params, /) -> PyTree:
        """Returns the state before the first step."""
        ...

    def update(self, updates: Grads, state: PyTree, params: Params | None = None, /) -> tuple[PyTree, PyTree]:
        """Returns how far the parameters move (Grads) by a gradient, and the state after it."""
        ...


@dataclass(frozen=True)
class Chained:
    """The replica all-reduce and the optimizer of a Timing that runs one after the other."""

    all_reduce: AllReduce
    optimizer: Optimizer
    watch: Watch = lambda states: {}

    def init(self, params: Params) -> States:
        """Returns the states before the first step, of parameters `[...]`."""
        return self.all_reduce.init(params), self.optimizer.init(params)


@dataclass(frozen=True)
class AfterMicroSteps(Chained):
    """A Timing: the replica all-reduce takes all gradients `[R, ...]` once the micro-steps have ended."""

    def gradients(
        self, micro_steps: MicroSteps, plan: ShardingPlan, params: Params, batch: Batch, states: States
    ) -> tuple[GradsR, Means]:
        """Returns each replica's gradients `[R, ...]`, and the means of the batch."""
        del states
        return replica_gradients(micro_steps, plan, params, batch)

    def update(self, gradients: GradsR, states: States, params: Params) -> tuple[Grads, States]:
        """Returns the optimizer's update by the mean over the replicas, and the states after it."""
        all_reduce, opt_state = states
        mean, all_reduce = self.all_reduce.update(gradients, all_reduce, params)
        updates, opt_state = self.optimizer.update(mean, opt_state, params)
        return updates, (all_reduce, opt_state)


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that a step changes and a checkpoint holds; and the frozen parameters, if any."""

    step: jax.Array  # int32 []: steps done
    params: Params  # the trained ones
    all_reduce: PyTree  # the replica all-reduce's: residuals, pending gradients, counters
    opt_state: PyTree
    frozen: Params = field(default_factory=lambda: Params({}))

    @property
    def all_params(self) -> Params:
        """The parameters of the model, trained and frozen."""
        return joined(self.params, self.frozen)

    @property
    def checkpoint_state(self) -> "TrainState":
        """The part that a checkpoint or a snapshot keeps."""
        return replace(self, frozen=Params({}))

    @property
    def chain(self) -> States:
        """The states of the replica all-reduce and the optimizer."""
        return self.all_reduce, self.opt_state


# fields, and their names in checkpoints
_NAMES = {
    "step": "step",
    "params": "params",
    "all_reduce": "opt_state.exchange",
    "opt_state": "opt_state",
    "frozen": "frozen",
}
jax.tree_util.register_pytree_with_keys(
    TrainState,
    lambda state: ([(GetAttrKey(name), getattr(state, field)) for field, name in _NAMES.items()], None),
    lambda _, children: TrainState(**dict(zip(_NAMES, children, strict=True))),
)


def first_state(timing: AllReduce | Timing, params: Params, frozen: Params | None = None) -> TrainState:
    """Returns the state before the first step, of trained and frozen parameters `[...]`.

    `timing` is a Timing, or an optax.chain of the replica all-reduce and the optimizer.
    """
    all_reduce, opt_state = timing.init(params)
    step, frozen = jnp.zeros((), jnp.int32), frozen or Params({})
    return TrainState(step=step, params=params, all_reduce=all_reduce, opt_state=opt_state, frozen=frozen)


def build_train_step(
    micro_steps: MicroSteps, plan: ShardingPlan, timing: Timing
) -> Callable[[TrainState, Batch], tuple[TrainState, Means]]:
    """Returns `step(state, batch) -> (state, metrics)`, to be jitted with the state donated.

    Every array of the batch is `[accum, rows, ...]`, `weights` is among them, and the loss is the weighted mean over
    the whole of it, for any number of devices (rows of weight zero fill up). The metrics are the loss, the model's
    auxiliary metrics as means, and the timing's metrics; where replicas train apart they are `[R]`, each one's own
    (`training.optimizer_chain.of_all_replicas`), so that a step sends nothing between replicas. `micro_steps` are
    `accumulated(loss)`, or a pipeline's `partial(through_stages, loss)`, where the `accum` micro-steps are
    micro-batches.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Means]:
        gradients, means = timing.gradients(micro_steps, plan, state.all_params, batch, state.chain)
        state, metrics = updated(plan, timing, state, gradients, means)
        return state, jax.tree.map(lambda x: plan.of_each_replica(x) if x.ndim else x, metrics)

    return step


def updated(
    plan: ShardingPlan, timing: Timing, state: TrainState, gradients: PyTree, means: Means
) -> tuple[TrainState, Means]:
    """Returns the state after the update by the timing's gradients, and the means with the timing's metrics."""
    params = plan.constrain(state.params, plan.layout.optimizer)
    updates, (all_reduce, opt_state) = timing.update(gradients, state.chain, params)
    if plan.sends_differences:  # gathered by the optimizer (compression/weight_differences.py)
        params = applied(plan.constrain(state.params, plan.layout.parameters), updates)
    else:
        params = to_parameter_scope(plan, applied(params, updates))
    after = replace(state, step=state.step + 1, params=params, all_reduce=all_reduce, opt_state=opt_state)
    return after, means | timing.watch(after.chain)


def applied(params: Params, updates: Grads) -> Params:
    """Returns the parameters, moved."""
    return jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, updates)


def in_turn(measures: Callable[[Params, Batch, Gather], Means]) -> Measures:
    """Returns the sums, f32 [], of a model's measures over all micro-steps, one after the other."""

    def sums(plan: ShardingPlan, params: Params, batch: Batch, gather: Gather) -> Means:
        return jax.tree.map(jnp.sum, lax.map(lambda micro: measures(params, micro, gather), dict(batch)))

    return sums


def build_eval_step(measures: Measures, plan: ShardingPlan) -> Callable[[Params, Batch], Means]:
    """Returns `evaluate(params, batch) -> sums`: `measures` of all rows, f32 [], and `weight`, of the weights.

    `measures` are `in_turn(evaluate)`, or a pipeline's `evaluated(loss)`.
    """

    def evaluate(params: Params, batch: Batch) -> Means:
        if plan.layout.is_automatic:
            sums = measures(plan, params, batch, auto_gather(plan))
        else:
            gather, axes = layer_gather(plan.without_codecs), plan.layout.varying_axes
            sums = run_manual(plan, lambda p, b: lax.psum(measures(plan, p, b, gather), axes))(params, batch)
        return sums | {"weight": jnp.sum(batch["weights"])}

    return evaluate
