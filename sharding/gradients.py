"""The gradients of a batch: micro-steps in a `shard_map` with all collectives but a replica all-reduce after them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding.accumulation import Accumulating, Rule, values_of
from sharding.collectives import vary
from sharding.experts import Gather
from sharding.frozen import joined, part_like
from sharding.gathers import (
    auto_gather,
    gather_tree,
    layer_gather,
    no_gather,
    reduce_scatter,
    to_gradient_scope,
    used_placements,
)
from sharding.in_step_exchange import (
    Carry,
    Early,
    Exchanged,
    GroupExchange,
    Sums,
)
from sharding.pieces import is_in_part
from sharding.plan import REPLICATED, ShardingPlan, gradient_specs, run_manual
from sharding.scopes import beyond
from sharding.spec import Placement, pspecs
from sharding.trees import Batch, Grads, GradsR, Means, Params, Placements, PyTree

Value = TypeVar("Value")
# the weighted sum of the losses of the rows given, and those of the auxiliary metrics
Loss = Callable[[Params, Batch, Gather], tuple[jax.Array, Means]]
# a device's shards of its replica's parameters, its rows, the sum of all weights, and what is to happen in the last of
# them (Early: the replica all-reduce; sharding.shares.HandOut), or None ->
# the sums of its gradients, and its part of the means; of global arrays where XLA's partitioner chooses the collectives
MicroSteps = Callable[[ShardingPlan, Params, Batch, jax.Array, Any], tuple[Sums, Means]]


def batch_gradients(
    micro_steps: MicroSteps,
    plan: ShardingPlan,
    params: Params,
    batch: Batch,
    drift_R: GradsR | None = None,
    early: Early | None = None,
    scale: jax.Array | None = None,
) -> tuple[GradsR | None, Exchanged | None, Means]:
    """Returns the gradients `[R, ...]`, one for each replica and reduced inside its group, and the means, `loss` too.

    `params` are all parameters; of the frozen ones there is no gradient.

    The replica all-reduce remains to be done: the mean over R (MiCS section 3.4). With `early` the micro-steps do it,
    and the second result has what they exchanged: what waited, or the gradients, and then the first result is None.
    With `drift_R` each replica is at `params + drift_R[r]`, and its gradients are the mean over its own rows: nothing
    travels between replicas, and in the place of the means there are weighted sums `[R]`, and `weight`. The micro-steps
    differentiate
    `scale` times the loss, a power of two; what leaves them, into the replica all-reduce too, is divided by it.
    """
    layout, alone = plan.layout, drift_R is not None
    total = jnp.ones(()) if alone else jnp.sum(batch["weights"])
    inside = beyond(layout.replica_axes if alone else (), layout.varying_axes)
    if scale is not None:
        total = total / scale
        early = early and replace(early, scale=scale)
    of_gradients = early is not None and early.waiting is None

    def unscaled(tree: PyTree) -> PyTree:
        return tree if scale is None else jax.tree.map(lambda x: x / scale, tree)

    if layout.is_automatic:
        sums, means = micro_steps(plan, params, batch, total, None)
        return unscaled(jax.tree.map(lambda g: g[None], sums.grads)), None, unscaled(means)

    def on_device(
        params: Params, batch: Batch, total: jax.Array, drift_R: GradsR | None, early: Early | None
    ) -> tuple[GradsR | None, Exchanged | None, Means]:
        if early:
            own = jax.tree.map(lambda x: vary(x[0], layout.data_axes), (early.kept, early.waiting))
            early = replace(early, kept=own[0], waiting=own[1])
        weight = lax.psum(jnp.sum(batch["weights"]), beyond(layout.replica_axes, layout.data_axes)) if alone else total
        if alone:
            total = total * jnp.where(weight > 0, weight, 1)  # a replica may have no rows but what fills them up
        sums, means = micro_steps(plan, replica_parameters(plan, params, drift_R), batch, total, early)
        means = lax.psum(means, inside)
        if alone:
            means = {name: (x * weight)[None] for name, x in means.items()} | {"weight": weight[None]}
        trees = sums.grads, sums.kept, sums.waiting
        grads, kept, waiting = (tree and plan.map(same_on_copies, tree) for tree in trees)
        if not (
            alone or of_gradients
        ):  # the replica all-reduce takes the mean; divided by the `total` of all they are to add up
            grads = jax.tree.map(lambda g: g * layout.num_replicas, grads)
        grads_R, kept_R, waiting_R = jax.tree.map(lambda x: x[None], (grads, kept, waiting))
        if early is None:
            return grads_R, None, means
        counts = lax.pmean(sums.total_counts(), layout.data_axes)
        if of_gradients:
            return None, Exchanged(mean_R=grads_R, kept_R=kept_R, counts=counts), means
        part = is_in_part(plan.stacks, grads, early.done % early.parts, early.parts)
        return grads_R, Exchanged(mean_R=waiting_R, kept_R=kept_R, counts=counts, part=part), means

    def same_on_copies(p: Placement, x: jax.Array) -> jax.Array:
        """What is not cut of `[...]` is equal on all devices of the scope: its type is to say so. It is small."""
        axes = () if p.dim is not None else p.not_held(layout.gradients)
        return lax.pmean(vary(x, axes), axes) if axes else x

    specs_R = gradient_specs(plan, tensor=False)
    kept_specs, drift_specs = (None if x is None else specs_R for x in (early and early.kept, drift_R))
    given = done = None
    if early:
        waiting_specs, scale_spec = None if of_gradients else specs_R, None if scale is None else REPLICATED
        given = replace(early, done=REPLICATED, kept=kept_specs, waiting=waiting_specs, scale=scale_spec)
        part = None if of_gradients else pspecs(plan.placements, layout.gradients, tensor=False)
        done = Exchanged(mean_R=specs_R, kept_R=kept_specs, counts=REPLICATED, part=part)
    out_specs = (None if of_gradients else specs_R, done, PartitionSpec(layout.replica_axes) if alone else REPLICATED)
    run = run_manual(plan, on_device, out_specs, (REPLICATED, drift_specs, given))
    grads_R, exchanged, means = run(params, batch, total, drift_R, early)
    weights = {"weight": means.pop("weight")} if alone else {}
    return unscaled(grads_R), exchanged, unscaled(means) | weights


def replica_parameters(plan: ShardingPlan, params: Params, drift_R: GradsR | None) -> Params:
    """Returns this device's shards `[...]` of its replica's parameters.

    With two hops their types differ between replicas, so that autodiff sums nothing over them: the replica all-reduce
    is deferred.
    """
    axes = plan.layout.varying_axes
    if plan.layout.two_hop:
        params = jax.tree.map(lambda x: vary(x, axes), params)
    if drift_R is not None:
        trained, frozen = part_like(params, plan.placements)
        params = joined(jax.tree.map(lambda x, d: x + vary(d[0], axes), trained, drift_R), frozen)
    return params


def accumulated(loss: Loss) -> MicroSteps:
    """Returns the micro-steps of a loss: the rows of each in turn, forward and backward."""

    def micro_steps(plan: ShardingPlan, *given: Any) -> tuple[Sums, Means]:
        return (_automatic if plan.layout.is_automatic else _manual)(loss, plan, *given)

    return micro_steps


def _manual(
    loss: Loss, plan: ShardingPlan, params: Params, batch: Batch, total: jax.Array, early: Any
) -> tuple[Sums, Means]:
    """Returns the sums over the micro-steps of this device's gradients `[...]`, in their scope, and of its losses.

    With `early` they are summed over the replicas too, or in their place what waits is.
    """
    gathered, sums = before_micro_steps(plan, params)

    def micro_step(
        carry: Carry, item: tuple[jax.Array, Batch], exchange: GroupExchange | None = None
    ) -> tuple[Any, Means]:
        sums, value = carry
        i, micro = item
        used = tied(plan, gathered, i)

        # forward and backward pass; what is gathered in it is reduce-scattered on the way back: the group
        # reduce-scatter
        def mean(sums: Sums) -> tuple[jax.Array, Means]:
            value, aux = micro_loss(loss, plan, accumulating(plan, used, sums, exchange), micro)
            return value / total, jax.tree.map(lambda x: x / total, aux)

        (more, aux), sums = jax.value_and_grad(mean, has_aux=True)(sums)
        return (sums, value + more), aux

    carry = (sums, vary(jnp.zeros(()), plan.layout.data_axes))
    items = (jnp.arange(batch["weights"].shape[0]), dict(batch))
    if early is None:
        (sums, value), aux = lax.scan(micro_step, carry, items)
    else:
        (sums, value), aux = early.run(plan, micro_step, carry, items)
    return sums, _means(value, aux)


def before_micro_steps(plan: ShardingPlan, params: Params) -> tuple[Params, Sums]:
    """Returns the shards `[...]` after the gather of what all micro-steps use, and zero sums in their scope."""
    policy, parameters = plan.layout.gather, plan.layout.parameters
    gathered = params
    if policy.each_step:
        gathered = gather_tree(plan, plan.all_placements, params, policy.each_step(parameters))
    trained, _ = part_like(params, plan.placements)
    # a zero that XLA does not know: zeros that it knows it shares with later ones, and keeps for the whole step
    zero = lax.optimization_barrier(jnp.zeros(()))
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x) + zero, trained)
    return gathered, Sums(to_gradient_scope(plan, plan.placements, zeros, zeros=True))


def _means(loss: jax.Array, aux: Means) -> Means:
    """Returns the loss and the sums over the micro-steps of the auxiliary metrics, `[accum]` each."""
    return {"loss": loss} | jax.tree.map(jnp.sum, aux)


def tied(plan: ShardingPlan, gathered: Params, i: jax.Array) -> Params:
    """Returns shards `[...]` tied to iteration `i`, or XLA would move gathers out of the loop and keep the results."""
    if plan.layout.gather.each_step:
        return gathered
    return jax.tree.map(lambda x: lax.optimization_barrier((x, i))[0], gathered)


def accumulating(plan: ShardingPlan, params: Params, sums: Sums, exchange: GroupExchange | None) -> PyTree:
    """Returns the shards `[...]` so that their gradients are added to `sums`, and exchanged by `exchange`, if any."""
    policy = plan.layout.gather
    keeps = plan.overlap and policy.each_micro_step

    def rule(name: str, placements: Placements, every: Placements) -> Rule:
        """The placements are of the trained parameters of a group, and of every one of it."""

        def add(sums: Sums, grads: Grads) -> Sums:
            if policy.each_step:
                grads = reduce_scatter(plan, placements, grads)
            grads = to_gradient_scope(plan, placements, grads)
            return sums._replace(grads=jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums.grads, grads))

        return Rule(
            name=name or "its parameters",
            add=add,
            exchange=partial(exchange, name, placements) if exchange else None,
            overlap=plan.overlap,
            part=partial(part_like, like=placements),
            keep=partial(_gather_for_micro_step, plan, every) if keeps else None,
        )

    def group(name: str) -> PyTree:
        if name not in plan.placements:  # all of it is frozen
            return _gather_for_micro_step(plan, plan.frozen[name], params[name]) if keeps else params[name]
        places = (used_placements(plan, name, tree) for tree in (plan.placements, plan.all_placements))
        return Accumulating(values=params[name], sums=sums.group(name), rule=rule(name, *places))

    if (policy.each_step or policy.each_micro_step) and not plan.overlap:  # gradients do not come out by layer
        return Accumulating(values=params, sums=sums, rule=rule("", plan.placements, plan.all_placements))
    return {name: group(name) for name in params}


def micro_loss(loss: Callable[[Params, Batch, Gather], Value], plan: ShardingPlan, kept: PyTree, micro: Batch) -> Value:
    """Returns the loss of this device's rows `[rows, ...]`, gathering what the policy gathers in a micro-step."""
    policy, parameters = plan.layout.gather, plan.layout.parameters
    kept = values_of(kept)  # a policy that gathers for the whole micro-step accumulates after it
    if policy.each_micro_step and not plan.overlap:  # with overlap it is gathered a layer at a time
        kept = _gather_for_micro_step(plan, plan.all_placements, kept)
    if policy.each_use:
        return loss(kept, micro, layer_gather(plan, policy.each_use(parameters)))
    return loss(kept, micro, no_gather(plan))


def _gather_for_micro_step(plan: ShardingPlan, placements: Placements, shards: Params) -> Params:
    """Gathers shards `[...]` into what stays gathered for a micro-step."""
    part = plan.layout.gather.each_micro_step
    assert part
    return gather_tree(plan, placements, shards, part(plan.layout.parameters))


def _automatic(
    loss: Loss, plan: ShardingPlan, params: Params, batch: Batch, total: jax.Array, early: None
) -> tuple[Sums, Means]:
    """Returns the sums over the micro-steps of global gradients `[...]`, collectives chosen by XLA's partitioner."""
    gather, scope = auto_gather(plan), plan.layout.gradients
    trained, frozen = part_like(params, plan.placements)

    def micro_step(carry: tuple[Grads, jax.Array], micro: Batch) -> tuple[tuple[Grads, jax.Array], Means]:
        def mean(params: Params) -> tuple[jax.Array, Means]:
            return jax.tree.map(lambda x: x / total, loss(joined(params, frozen), micro, gather))

        (value, aux), grads = jax.value_and_grad(mean, has_aux=True)(trained)
        return jax.tree.map(jnp.add, carry, (plan.constrain(grads, scope), value)), aux

    zeros = plan.constrain(jax.tree.map(jnp.zeros_like, trained), scope)
    (grads, value), aux = lax.scan(micro_step, (zeros, jnp.zeros(())), dict(batch))
    return Sums(grads), _means(value, aux)
