"""The replica all-reduce as an optax transform: the mean of gradients `[R, ...]` over replicas, maybe with a codec."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from compression.primitives import encoded, summed
from compression.statistics import Sent, State, added, dense_sent, nothing_sent, with_zero_counts, zeros_R
from sharding.coded import Codec
from sharding.hlo import WARM_UP
from sharding.in_step_exchange import Counts, Exchange
from sharding.plan import ShardingPlan, gradient_specs
from sharding.spec import pspecs
from sharding.step import AllReduce
from sharding.trees import Grads, GradsR, Params, PyTree, Shards

# (step and factors, a replica's gradients, its residuals) -> the sums of their shares of the mean in the
# optimizer's scope, the factors, what is kept, and the counts of each collective
OnShards = Callable[[State, Shards, Shards | None], tuple[Shards, PyTree, Shards | None, Sequence[Counts]]]


class Update(Protocol):
    """The function `update` of a replica all-reduce."""

    def __call__(self, updates: GradsR, state: PyTree, params: Params | None = None, /) -> tuple[Grads, PyTree]:
        """Returns the mean of gradients `[R, ...]`, in the optimizer's scope, and the state after it."""
        ...


def transform(init: Callable[[Params], PyTree], update: Update) -> optax.GradientTransformation:
    """Returns a replica all-reduce as an optax transform, whose type takes and returns any tree."""
    return optax.GradientTransformation(cast(optax.TransformInitFn, init), cast(optax.TransformUpdateFn, update))


def exchange(
    plan: ShardingPlan, codec: Codec | None = None, *, error_feedback: bool = True
) -> optax.GradientTransformation:
    """Returns the transform from gradients `[R, ...]` to their mean over R, in the optimizer's scope.

    It is the first of the chain: downstream transforms see ordinary global arrays, so that their norms are correct.
    Where the optimizer's scope is wider than the gradients', it reduce-scatters over the difference and all-reduces
    over the remaining replica axes (MiCS section 3.4; docs/concepts.md: `2 (M/p) (R-1)/R` bytes per device).

    A codec encodes the values that cross nodes (compression/route.py), except parameters with one dim per layer. They
    are small, and their gradients differ in magnitude from matrices' gradients, with which they must not share a scale.
    `error_feedback` adds the encoding error to the next step's gradients (arXiv 1901.09847): the sum of all results,
    plus the residuals, is the sum of all gradients. A non-finite value makes the whole result non-finite, and
    `unless_not_finite` restores the state.
    """
    primitive = encoded(plan, codec, error_feedback=error_feedback) if codec else summed(plan)
    method = by_groups(plan, primitive, encodes=codec is not None, error_feedback=error_feedback)
    if plan.layout.replica_axes:
        return method

    def update(updates: GradsR, state: PyTree, params: Params | None = None) -> tuple[Grads, PyTree]:
        """One replica has nothing to exchange; its device takes at most a slice."""
        del params
        return plan.constrain(jax.tree.map(lambda x: x[0], updates), plan.layout.optimizer), state

    return transform(method.init, update)


def exact(plan: ShardingPlan) -> AllReduce:
    """Returns the replica all-reduce without a codec."""
    return exchange(plan)


def idle(plan: ShardingPlan, method: AllReduce) -> optax.GradientTransformation:
    """Returns the transform of a method without its compression: exact means, and its state as it was.

    For replicas that no link between nodes connects. The state stays in checkpoints, so that the run can continue on
    several nodes; only the counts of the last exchange become zero.
    """
    dense = exact(plan)

    def update(updates: GradsR, state: PyTree, params: Params | None = None) -> tuple[Grads, PyTree]:
        mean, _ = dense.update(updates, State(), params)
        return mean, with_zero_counts(state)

    return transform(method.init, update)


def uncounted(method: AllReduce) -> optax.GradientTransformation:
    """Returns the transform of a method that sends nothing between nodes: its counts are zero."""

    def update(updates: GradsR, state: PyTree, params: Params | None = None) -> tuple[Grads, PyTree]:
        out, after = method.update(updates, state, params)
        return out, with_zero_counts(after)

    return transform(method.init, update)


def by_groups(
    plan: ShardingPlan, primitive: Exchange, *, encodes: bool = True, error_feedback: bool = True
) -> optax.GradientTransformation:
    """Returns the transform that calls a primitive with all shards at once.

    `encodes`: it takes f32 and counts the values that it sends; then it may keep a residual of each shard.
    """
    layout = plan.layout

    def init(params: Params) -> State:
        if not encodes:
            return State()
        residual = zeros_R(layout.num_replicas, params) if error_feedback else ()
        return State(step=jnp.zeros((), jnp.int32), residual=residual, sent=nothing_sent())

    def on_shards(shared: State, grads: Shards, kept: Shards | None) -> tuple[PyTree, ...]:
        key = jax.random.fold_in(jax.random.key(0), shared.step) if encodes else jax.random.key(0)
        shares = [(x.astype(jnp.float32) if encodes else x) / layout.num_replicas for x in grads]
        placements = plan.group(plan.placements, ()).placements
        totals, kept, counts = primitive(placements, shares, kept, key)
        return totals, (), kept, counts

    return of_all_shards(plan, init, on_shards)


def dense_at_first(plan: ShardingPlan, steps: int, method: AllReduce) -> AllReduce:
    """Returns the transform of a method that keeps a State, with exact means in its first `steps` exchanges.

    They leave all that the method keeps as it was, but for the counts.
    """
    if not steps:
        return method
    dense = exact(plan)

    def init(params: Params) -> State:
        state = method.init(params)
        return state._replace(step=jnp.zeros((), jnp.int32))

    def update(updates: GradsR, state: PyTree, params: Params | None = None) -> tuple[Grads, PyTree]:
        @jax.named_scope(WARM_UP)  # which the planner leaves out
        def exactly() -> tuple[Grads, PyTree]:
            mean, _ = dense.update(updates, State(), params)
            return mean, state._replace(step=state.step + 1, sent=dense_sent(plan, mean))

        return lax.cond(state.step < steps, exactly, lambda: method.update(updates, state, params))

    return transform(init, update)


def of_all_shards(
    plan: ShardingPlan, init: Callable[[Params], State], on_shards: OnShards
) -> optax.GradientTransformation:
    """Returns the transform of a method that takes all gradients `[R, ...]` at once, and keeps a State."""

    @jax.named_scope("replica_all_reduce")
    def update(updates: GradsR, state: PyTree, params: Params | None = None) -> tuple[Grads, State]:
        del params
        return _run(plan, on_shards, updates, state)

    return transform(init, update)


def _run(plan: ShardingPlan, function: OnShards, grads_R: GradsR, state: State) -> tuple[Grads, State]:
    """Returns the means of gradients `[R, ...]` in the optimizer's scope, by `function` on each device's shards."""
    leaves, tree = jax.tree.flatten(grads_R)
    specs_R = jax.tree.leaves(gradient_specs(plan))
    kept_R = jax.tree.leaves(state.residual.tree) if state.residual else None
    kept_specs = specs_R if state.residual else None

    def on_device(shared: State, grads_R: Shards, kept_R: Shards | None) -> tuple[PyTree, ...]:
        grads, kept = jax.tree.map(lambda x: x[0], (grads_R, kept_R))
        totals, factors, kept, counts = function(shared, grads, kept)
        out = [total.astype(g.dtype) for total, g in zip(totals, grads, strict=True)]
        return out, jax.tree.map(lambda x: x[None], kept), (factors, added(counts, plan.mesh.axis_names))

    out, kept_R, (factors, sent) = jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(PartitionSpec(), specs_R, kept_specs),
        out_specs=(jax.tree.leaves(pspecs(plan.placements, plan.layout.optimizer)), kept_specs, PartitionSpec()),
    )(State(step=state.step, factors=state.factors), leaves, kept_R)
    kept_R = tree.unflatten(kept_R) if state.residual else None
    return tree.unflatten(out), state_after(state, factors, kept_R, sent) if state.sent else state


def state_after(state: State, factors: PyTree, kept_R: GradsR | None, sent: Sent) -> State:
    """Returns the state after an exchange."""
    residual = replace(state.residual, tree=kept_R) if state.residual else ()
    step = jax.tree.map(lambda n: n + 1, state.step)
    return state._replace(step=step, factors=factors, residual=residual, sent=sent)


def own_copies(plan: ShardingPlan, tree_R: GradsR) -> Grads:
    """Returns `[R, ...]` as one tree in the optimizer's scope, without communication: each device has its part."""
    leaves, structure = jax.tree.flatten(tree_R)
    own = jax.shard_map(
        lambda xs: to_optimizer_scope(plan, [x[0] for x in xs]),
        mesh=plan.mesh,
        in_specs=(jax.tree.leaves(gradient_specs(plan)),),
        out_specs=jax.tree.leaves(pspecs(plan.placements, plan.layout.optimizer)),
        check_vma=False,  # that what is not cut is equal on all replicas, their type does not say
    )
    return structure.unflatten(own(leaves))


def to_optimizer_scope(plan: ShardingPlan, shards: Shards) -> Shards:
    """Slices a device's shards `[...]` from the gradients' scope down to the optimizer's."""
    return plan.group(plan.placements, plan.layout.optimizer_beyond_gradients, tensor_is_manual=True).slice(shards)
