"""The training step: the gradients of a batch, the replica all-reduce and the optimizer under `jit`."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import GetAttrKey

from sharding.experts import Gather
from sharding.frozen import joined
from sharding.gathers import auto_gather, layer_gather, to_parameter_scope
from sharding.gradients import MicroSteps, batch_gradients
from sharding.in_step_exchange import Early, Exchanged
from sharding.plan import ShardingPlan, run_manual
from sharding.trees import Batch, Grads, GradsR, Means, Params

# (plan, a device's shards, its rows, gather) -> weighted sums over the rows, by name
Measures = Callable[[ShardingPlan, Params, Batch, Gather], Means]
States = tuple[Any, Any]  # the replica all-reduce's, and the optimizer's


@dataclass(frozen=True)
class Chain:
    """The replica all-reduce and the optimizer, and what the rest of the step needs of their states."""

    # an optax.GradientTransformationExtraArgs of gradients `[R, ...]` whose state is a pair, as optax.chain makes it;
    # `exchanged=` is what the micro-steps exchanged
    tx: Any
    _: KW_ONLY
    early: Callable[[States], Early] | None = None  # the replica all-reduce in the micro-steps; None: after them
    drift: Callable[[States], GradsR] | None = None  # each replica's parameters minus the shared ones, `[R, ...]`
    watch: Callable[[States], Means] = lambda states: {}  # to report: scalars, or with a drift each replica's, `[R]`
    scale: Callable[[States], jax.Array] | None = None  # what the loss is multiplied by, f32 [], for float16
    # of local SGD whose replicas meet outside the step: how far the parameters move by the drifts' mean, and the states
    meet: Callable[[States, Params], tuple[Grads, States]] | None = None


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that a step changes, what a checkpoint holds; and the frozen parameters, if there are any."""

    step: jax.Array  # int32 []: steps done
    params: Params  # the trained ones
    all_reduce: Any  # what the replica all-reduce keeps: residuals, what waits, counters
    opt_state: Any
    frozen: Params = field(default_factory=dict)

    @property
    def all_params(self) -> Params:
        """The parameters of the model, trained and frozen."""
        return joined(self.params, self.frozen)

    @property
    def checkpoint_state(self) -> "TrainState":
        """What a checkpoint or a snapshot keeps of it."""
        return replace(self, frozen={})

    @property
    def chain(self) -> States:
        """The states of the chain."""
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


def first_state(chain: Chain, params: Params, frozen: Params | None = None) -> TrainState:
    """Returns the state before the first step, of trained and frozen parameters `[...]`."""
    all_reduce, opt_state = chain.tx.init(params)
    parts = {"params": params, "all_reduce": all_reduce, "opt_state": opt_state}
    return TrainState(step=jnp.zeros((), jnp.int32), **parts, frozen=frozen or {})


def build_train_step(
    micro_steps: MicroSteps, plan: ShardingPlan, chain: Chain
) -> Callable[[TrainState, Batch], tuple[TrainState, Means]]:
    """Returns `step(state, batch) -> (state, metrics)`, to be jitted with the state donated.

    Every array of the batch is `[accum, rows, ...]`, `weights` is among them, and the loss is the weighted mean over
    the whole of it, whatever the number of devices (rows of weight zero fill up). The metrics are the loss, the model's
    auxiliary metrics as means, and what the chain watches; where replicas drift apart they are `[R]`, each one's own
    (`training.optimizer_chain.of_all_replicas`), so that a step sends nothing between replicas. `micro_steps` are
    `accumulated(loss)`, or a pipeline's `partial(through_stages, loss)`, where the `accum` micro-steps are
    micro-batches.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Means]:
        states = state.chain
        drift_R, early = chain.drift and chain.drift(states), chain.early and chain.early(states)
        scale = chain.scale and chain.scale(states)
        grads_R, exchanged, means = batch_gradients(micro_steps, plan, state.all_params, batch, drift_R, early, scale)
        state, metrics = updated(plan, chain, state, grads_R, exchanged, means)
        return state, jax.tree.map(lambda x: plan.of_each_replica(x) if x.ndim else x, metrics)

    return step


def updated(
    plan: ShardingPlan,
    chain: Chain,
    state: TrainState,
    grads_R: GradsR | None,
    exchanged: Exchanged | None,
    means: Means,
) -> tuple[TrainState, Means]:
    """Returns the state after the chain's update by gradients `[R, ...]`, and the means with what the chain watches."""
    params = plan.constrain(state.params, plan.layout.optimizer)
    updates, (all_reduce, opt_state) = chain.tx.update(grads_R, state.chain, params, exchanged=exchanged)
    metrics = means | chain.watch((all_reduce, opt_state))
    moved = replace(state, step=state.step + 1, all_reduce=all_reduce, opt_state=opt_state)
    return replace(moved, params=to_parameter_scope(plan, applied(params, updates))), metrics


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
