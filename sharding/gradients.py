"""The gradients of a batch: micro-steps in a `shard_map`, with all collectives except the replica all-reduce.

`replica_gradients` returns each replica's part of the batch's gradient, `local_gradients` the gradients of replicas
that train apart (local SGD). The replica all-reduce comes later, before the optimizer (compression/exchange.py), or it
runs in the micro-steps (sharding/in_step_exchange.py).
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding.accumulation import Accumulating, AccumulationRule, Index, at, length, values_of
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
from sharding.plan import REPLICATED, ShardingPlan, gradient_specs, run_manual
from sharding.scopes import beyond
from sharding.spec import Placement
from sharding.trees import Batch, Grads, GradsR, Means, Params, Placements, PyTree

Value = TypeVar("Value")
Entry = TypeVar("Entry")
# the weighted sums over the rows given, of the loss and of the auxiliary metrics
Loss = Callable[[Params, Batch, Gather], tuple[jax.Array, Means]]
# (group, its placements, its sums, a micro-step's gradients, layer) -> the sums after it
Add = Callable[[str, Placements, PyTree, Grads, Index], PyTree]
Carry = tuple[PyTree, jax.Array]  # the micro-steps' sums by group of parameters, and the loss
Items = tuple[jax.Array, Batch]  # the numbers `[accum]` of the micro-steps, and their rows


class MicroStep(Protocol):
    """A forward and a backward pass, whose gradients `add` adds to the sums."""

    def __call__(self, carry: Carry, item: Items, add: Add = ...) -> tuple[Carry, Means]:
        """Returns the sums and the loss after it, and its auxiliary metrics."""
        ...


class MicroStepLoop(Protocol):
    """Runs the micro-steps one after the other, and may send gradients while they compute."""

    def run(
        self, plan: ShardingPlan, micro_step: MicroStep, carry: Carry, items: Items
    ) -> tuple[tuple[PyTree, jax.Array], Means]:
        """Returns the gradients or their exchange's results, the loss, and auxiliary metrics `[accum]`."""
        ...


class PlainLoop:
    """Micro-steps that only add up gradients."""

    def run(self, plan: ShardingPlan, micro_step: MicroStep, carry: Carry, items: Items) -> tuple[Carry, Means]:
        """Returns the sums of the gradients and of the losses, and auxiliary metrics `[accum]`."""
        del plan
        return scan_micro_steps(micro_step, carry, items)


def scan_micro_steps(
    step: Callable[[Value, Entry], tuple[Value, Means]], carry: Value, items: Entry
) -> tuple[Value, Means]:
    """Returns `lax.scan(step, carry, items)` for items `[accum, ...]`, without a loop around a single micro-step.

    With such a loop XLA for TPUs computes the forward pass twice.
    """
    if length(items) != 1:
        return lax.scan(step, carry, items)
    carry, aux = step(carry, at(items, 0))
    return carry, jax.tree.map(lambda x: x[None], aux)


def run_last(micro_step: MicroStep, carry: Carry, items: Items, aux: Means) -> tuple[tuple[PyTree, jax.Array], Means]:
    """Runs the last micro-step on `items` `[accum, ...]`; `aux` `[accum - 1]` is of the others."""
    # after the others' gradients: its forward pass needs none of them, and run before them it would hold its values
    last, carry = lax.optimization_barrier((jax.tree.map(lambda x: x[-1], items), carry))
    carry, more = micro_step(carry, last)
    return carry, jax.tree.map(lambda x, y: jnp.append(x, y), aux, more)


# (plan, a device's shards of its replica's parameters, its rows, the sum of all weights, loop) -> the loop's result,
# and this device's part of the means; with global arrays where XLA's partitioner chooses the collectives
MicroSteps = Callable[[ShardingPlan, Params, Batch, jax.Array, MicroStepLoop], tuple[PyTree, Means]]


def replica_gradients(
    micro_steps: MicroSteps, plan: ShardingPlan, params: Params, batch: Batch
) -> tuple[GradsR, Means]:
    """Returns gradients `[R, ...]`, reduced inside each replica, and the batch's mean `loss` and auxiliary metrics.

    The mean over R, the replica all-reduce (MiCS section 3.4), is the gradient of the loss. `params` are all parameters
    `[...]`; frozen ones have no gradient.
    """
    total = jnp.sum(batch["weights"])
    if plan.layout.is_automatic:
        grads, means = micro_steps(plan, params, batch, total, PlainLoop())
        return jax.tree.map(lambda g: g[None], grads), means

    def on_device(params: Params, batch: Batch, total: jax.Array) -> tuple[GradsR, Means]:
        grads, means = micro_steps(plan, replica_parameters(plan, params), batch, total, PlainLoop())
        return times_replicas(plan, per_replica(plan, grads)), lax.psum(means, plan.layout.varying_axes)

    run = run_manual(plan, on_device, (gradient_specs(plan, tensor=False), REPLICATED), (REPLICATED,))
    return run(params, batch, total)


def local_gradients(
    micro_steps: MicroSteps, plan: ShardingPlan, params: Params, batch: Batch, delta_R: GradsR
) -> tuple[GradsR, Means]:
    """Returns the gradients `[R, ...]` of replicas at `params + delta_R[r]`, each the mean over the replica's rows.

    Nothing travels between replicas. The second result has each replica's weighted sums `[R]` of loss and auxiliary
    metrics, and `weight`.
    """

    def on_device(params: Params, batch: Batch, delta_R: GradsR) -> tuple[GradsR, Means]:
        grads, sums = run_on_own_rows(micro_steps, plan, params, batch, delta_R, PlainLoop())
        return per_replica(plan, grads), sums

    specs_R = gradient_specs(plan, tensor=False)
    run = run_manual(plan, on_device, (specs_R, PartitionSpec(plan.layout.replica_axes)), (specs_R,))
    return run(params, batch, delta_R)


def run_on_own_rows(
    micro_steps: MicroSteps, plan: ShardingPlan, params: Params, batch: Batch, delta_R: GradsR, loop: MicroStepLoop
) -> tuple[PyTree, Means]:
    """Returns the loop's result for the mean over a replica's rows, and its weighted sums `[1]`, `weight` too."""
    layout = plan.layout
    weight = lax.psum(jnp.sum(batch["weights"]), beyond(layout.replica_axes, layout.data_axes))
    total = jnp.where(weight > 0, weight, 1)  # a replica may have only rows that fill up the batch
    result, means = micro_steps(plan, local_parameters(plan, params, delta_R), batch, total, loop)
    means = lax.psum(means, beyond(layout.replica_axes, layout.varying_axes))
    return result, {name: (x * weight)[None] for name, x in means.items()} | {"weight": weight[None]}


def per_replica(plan: ShardingPlan, grads: Grads) -> GradsR:
    """Returns a device's shards `[...]` of its replica's gradients, or of a tree like them, as shards of `[R, ...]`."""

    def same_on_copies(p: Placement, x: jax.Array) -> jax.Array:
        """What is not cut is equal on all devices of the scope, and small; a mean makes its type say so."""
        axes = () if p.dim is not None else p.not_held(plan.layout.gradients)
        return lax.pmean(vary(x, axes), axes) if axes else x

    return jax.tree.map(lambda x: x[None], plan.map(same_on_copies, grads))


def times_replicas(plan: ShardingPlan, grads_R: GradsR) -> GradsR:
    """Returns gradients `[R, ...]` times R: the replica all-reduce takes the mean, and they must add up."""
    return jax.tree.map(lambda g: g * plan.layout.num_replicas, grads_R)


def replica_parameters(plan: ShardingPlan, params: Params) -> Params:
    """Returns this device's shards `[...]` of its replica's parameters.

    With two hops their types differ between replicas, so that autodiff sums nothing over them: the replica all-reduce
    is deferred.
    """
    if not plan.layout.two_hop:
        return params
    return jax.tree.map(lambda x: vary(x, plan.layout.varying_axes), params)


def local_parameters(plan: ShardingPlan, params: Params, delta_R: GradsR) -> Params:
    """Returns this device's shards `[...]` of its replica's parameters, `params + delta_R[r]`."""
    axes = plan.layout.varying_axes
    trained, frozen = part_like(replica_parameters(plan, params), plan.placements)
    return joined(jax.tree.map(lambda x, d: x + vary(d[0], axes), trained, delta_R), frozen)


def accumulated(loss: Loss) -> MicroSteps:
    """Returns the micro-steps of a loss: the rows of each in turn, forward and backward."""

    def micro_steps(
        plan: ShardingPlan, params: Params, batch: Batch, total: jax.Array, loop: MicroStepLoop
    ) -> tuple[PyTree, Means]:
        if plan.layout.is_automatic:
            return _automatic(loss, plan, params, batch, total)
        return _manual(loss, plan, params, batch, total, loop)

    return micro_steps


def _manual(
    loss: Loss, plan: ShardingPlan, params: Params, batch: Batch, total: jax.Array, loop: MicroStepLoop
) -> tuple[PyTree, Means]:
    """Returns the loop's result from the sums of this device's gradients `[...]`, in their scope, and its losses."""
    gathered, sums = before_micro_steps(plan, params)

    def micro_step(carry: Carry, item: Items, add: Add = add_gradients) -> tuple[Carry, Means]:
        sums, value = carry
        i, micro = item
        used = tied(plan, gathered, i)

        # forward and backward pass; what is gathered in it is reduce-scattered on the way back: the group
        # reduce-scatter
        def mean(sums: PyTree) -> tuple[jax.Array, Means]:
            value, aux = micro_loss(loss, plan, accumulating(plan, used, sums, add), micro)
            return value / total, jax.tree.map(lambda x: x / total, aux)

        (more, aux), sums = jax.value_and_grad(mean, has_aux=True)(sums)
        return (sums, value + more), aux

    carry = (sums, vary(jnp.zeros(()), plan.layout.data_axes))
    items = (jnp.arange(batch["weights"].shape[0]), dict(batch))
    (result, value), aux = loop.run(plan, micro_step, carry, items)
    return result, _means(value, aux)


def add_gradients(name: str, placements: Placements, sums: Grads, grads: Grads, layer: Index) -> Grads:
    """Returns the sums `[...]` of a group's gradients with a micro-step's gradients added."""
    del name, placements, layer
    return jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, grads)


def before_micro_steps(plan: ShardingPlan, params: Params) -> tuple[Params, Grads]:
    """Returns the shards `[...]` after the gather for all micro-steps, and zero sums in their scope."""
    policy, parameters = plan.layout.gather, plan.layout.parameters
    gathered = params
    if policy.each_step:
        gathered = gather_tree(plan, plan.all_placements, params, policy.each_step(parameters))
    trained, _ = part_like(params, plan.placements)
    # a zero that XLA does not know: zeros that it knows it shares with later ones, and keeps for the whole step
    zero = lax.optimization_barrier(jnp.zeros(()))
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x) + zero, trained)
    return gathered, to_gradient_scope(plan, plan.placements, zeros, zeros=True)


def _means(loss: jax.Array, aux: Means) -> Means:
    """Returns the loss and the sums over the micro-steps of the auxiliary metrics, `[accum, ...]` each."""
    return {"loss": loss} | jax.tree.map(lambda x: jnp.sum(x, axis=0), aux)


def tied(plan: ShardingPlan, gathered: Params, i: jax.Array) -> Params:
    """Returns shards `[...]` tied to iteration `i`, or XLA would move gathers out of the loop and keep the results."""
    if plan.layout.gather.each_step:
        return gathered
    return jax.tree.map(lambda x: lax.optimization_barrier((x, i))[0], gathered)


def accumulating(plan: ShardingPlan, params: Params, sums: PyTree, add: Add = add_gradients) -> PyTree:
    """Returns the shards `[...]` so that their gradients are added to `sums`, by group, by `add`."""
    policy = plan.layout.gather
    keeps = plan.overlap and policy.each_micro_step

    def rule(name: str, placements: Placements, every: Placements) -> AccumulationRule:
        """`placements` has a group's trained parameters, `every` all of its parameters."""

        def reduce_and_add(sums: PyTree, grads: Grads, layer: Index) -> PyTree:
            if policy.each_step:
                grads = reduce_scatter(plan, placements, grads)
            return add(name, placements, sums, to_gradient_scope(plan, placements, grads), layer)

        return AccumulationRule(
            name=name or "its parameters",
            add=reduce_and_add,
            overlap=plan.overlap,
            part=partial(part_like, like=placements),
            keep=partial(_gather_for_micro_step, plan, every) if keeps else None,
        )

    def group(name: str) -> PyTree:
        if name not in plan.placements:  # all of it is frozen
            return _gather_for_micro_step(plan, plan.frozen[name], params[name]) if keeps else params[name]
        places = (used_placements(plan, name, tree) for tree in (plan.placements, plan.all_placements))
        return Accumulating(values=params[name], sums=sums[name], rule=rule(name, *places))

    if (policy.each_step or policy.each_micro_step) and not plan.overlap:  # gradients do not come out by layer
        return Accumulating(values=params, sums=sums, rule=rule("", plan.placements, plan.all_placements))
    return {name: group(name) for name in params}


def micro_loss(loss: Callable[[Params, Batch, Gather], Value], plan: ShardingPlan, kept: PyTree, micro: Batch) -> Value:
    """Returns the loss of this device's rows `[rows, ...]`, with the gathers of a micro-step."""
    policy, parameters = plan.layout.gather, plan.layout.parameters
    kept = values_of(kept)  # a policy that gathers for the whole micro-step accumulates after it
    if policy.each_micro_step and not plan.overlap:  # with overlap it is gathered a layer at a time
        kept = _gather_for_micro_step(plan, plan.all_placements, kept)
    if policy.each_use:
        return loss(kept, micro, layer_gather(plan, policy.each_use(parameters)))
    return loss(kept, micro, no_gather(plan))


def _gather_for_micro_step(plan: ShardingPlan, placements: Placements, shards: Params) -> Params:
    """Gathers shards `[...]` as far as they stay gathered for a micro-step."""
    part = plan.layout.gather.each_micro_step
    assert part
    return gather_tree(plan, placements, shards, part(plan.layout.parameters))


def _automatic(loss: Loss, plan: ShardingPlan, params: Params, batch: Batch, total: jax.Array) -> tuple[Grads, Means]:
    """Returns the sums over the micro-steps of global gradients `[...]`, collectives chosen by XLA's partitioner."""
    gather, scope = auto_gather(plan), plan.layout.gradients
    trained, frozen = part_like(params, plan.placements)

    def micro_step(carry: tuple[Grads, jax.Array], micro: Batch) -> tuple[tuple[Grads, jax.Array], Means]:
        def mean(params: Params) -> tuple[jax.Array, Means]:
            return jax.tree.map(lambda x: x / total, loss(joined(params, frozen), micro, gather))

        (value, aux), grads = jax.value_and_grad(mean, has_aux=True)(trained)
        return jax.tree.map(jnp.add, carry, (plan.constrain(grads, scope), value)), aux

    zeros = plan.constrain(jax.tree.map(jnp.zeros_like, trained), scope)
    (grads, value), aux = scan_micro_steps(micro_step, (zeros, jnp.zeros(())), dict(batch))
    return grads, _means(value, aux)
