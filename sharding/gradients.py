"""The gradients of a batch: micro-steps in a `shard_map`, with gathers, hop one and, if it is to overlap, hop two."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from sharding.accumulation import Accumulating, Rule, values_of
from sharding.collectives import vary
from sharding.experts import Gather
from sharding.gathers import (
    auto_gather,
    gather_tree,
    hop_one,
    layer_gather,
    no_gather,
    to_gradient_scope,
    used_placements,
)
from sharding.hop_two_in_backward import (
    Carry,
    Delayed,
    Exchanged,
    GroupExchange,
    HopTwoInBackward,
    Sums,
    beside_micro_steps,
    exchange_group,
    first_sums,
)
from sharding.mesh import STAGE
from sharding.pieces import is_in_part
from sharding.pipeline import Batch, StagedLoss, forward_and_backward
from sharding.plan import REPLICATED, ShardingPlan, gradient_specs, run_manual
from sharding.spec import pspecs

PyTree = Any
Value = TypeVar("Value")
Means = dict[str, jax.Array]  # `loss` and a model's auxiliary metrics of a step, by name
# the weighted sum of the losses of the rows given, and those of the auxiliary metrics
Loss = Callable[[PyTree, Batch, Gather], tuple[jax.Array, Means]]


def manual_gradients(
    loss: Loss | StagedLoss,
    plan: ShardingPlan,
    params: PyTree,
    batch: Batch,
    drift_R: PyTree | None = None,
    hop_two: HopTwoInBackward | None = None,
    opt_state: PyTree = None,
) -> tuple[PyTree, Means]:
    """Returns the gradients `[R, ...]`, one for each replica and reduced inside its group, and the means, `loss` too.

    Hop two remains to be done: the mean over R (MiCS section 3.4); unless `hop_two` did it, which makes them an
    Exchanged, or did that of what waited, which makes them a Delayed. With `drift_R` each replica is at
    `params + drift_R[r]`. With a StagedLoss the micro-steps are the micro-batches of a pipeline.
    """
    layout = plan.layout
    done, kept_R = hop_two.kept(opt_state) if hop_two else (jnp.zeros((), jnp.int32), None)
    waiting_R = hop_two.waiting(opt_state) if hop_two and hop_two.waiting else None
    is_done = hop_two is not None and waiting_R is None

    def on_device(
        params: PyTree, batch: Batch, total: jax.Array, done: jax.Array, drift_R: PyTree, of_hop_two_R: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array, Means]:
        own = replica_parameters(plan, params, drift_R)
        kept, waiting = jax.tree.map(lambda x: vary(x[0], layout.data_axes), of_hop_two_R)
        sums, means = micro_steps(loss, plan, own, batch, total, hop_two, kept, done, waiting)
        # what is not cut is equal on all devices of the scope: its type is to say so
        grads, kept, waiting = (
            tree
            and plan.map(
                lambda p, x: x if p.dim is not None else same_on_all(x, p.not_held(layout.gradients)),
                tree,
            )
            for tree in (sums.grads, sums.kept, sums.waiting)
        )
        if isinstance(loss, StagedLoss):
            grads = plan.map(lambda p, g: g if p.staged else sum_of_stages(g), grads)
        # times R: hop two takes the mean, and divided by the `total` of all replicas their gradients are to add up
        scale = 1 if is_done else layout.num_replicas
        trees_R = jax.tree.map(lambda x: x[None], (jax.tree.map(lambda g: g * scale, grads), kept, waiting))
        counts = lax.pmean(sums.total_counts(), layout.data_axes)
        part = is_in_part(grads, done % hop_two.parts, hop_two.parts) if hop_two and waiting_R is not None else None
        return trees_R, part, counts, lax.psum(means, layout.varying_axes)

    specs_R = gradient_specs(plan, tensor=False)
    drift_specs, *of_hop_two = (None if tree is None else specs_R for tree in (drift_R, kept_R, waiting_R))
    part_specs = None if waiting_R is None else pspecs(plan.placements, layout.gradients, tensor=False)
    run = run_manual(
        plan,
        on_device,
        ((specs_R, *of_hop_two), part_specs, REPLICATED, REPLICATED),
        (REPLICATED, REPLICATED, drift_specs, tuple(of_hop_two)),
    )
    trees_R, part, counts, means = run(params, batch, jnp.sum(batch["weights"]), done, drift_R, (kept_R, waiting_R))
    grads_R, kept_R, waiting_R = trees_R
    if is_done:
        return Exchanged(grads_R=grads_R, kept_R=kept_R, counts=counts), means
    if hop_two:
        before = Exchanged(grads_R=waiting_R, kept_R=kept_R, counts=counts, part=part)
        return Delayed(grads_R=grads_R, before=before), means
    return grads_R, means


def replica_parameters(plan: ShardingPlan, params: PyTree, drift_R: PyTree | None) -> PyTree:
    """Returns this device's shards of its replica's parameters.

    With two hops their types differ between replicas, so that autodiff sums nothing over them: hop two is deferred.
    """
    axes = plan.layout.varying_axes
    if plan.layout.two_hop:
        params = jax.tree.map(lambda x: vary(x, axes), params)
    if drift_R is not None:
        params = jax.tree.map(lambda x, d: x + vary(d[0], axes), params, drift_R)
    return params


def micro_steps(
    loss: Loss | StagedLoss,
    plan: ShardingPlan,
    params: PyTree,
    batch: Batch,
    total: jax.Array,
    hop_two: HopTwoInBackward | None = None,
    kept: PyTree = None,
    done: jax.Array | int = 0,
    waiting: PyTree = None,
) -> tuple[Sums, Means]:
    """Returns the sums over the micro-steps of this device's gradients, in their scope, and of its sums over `total`.

    With `hop_two` the gradients are summed over the replicas too, or in their place the part of what is `waiting`
    whose turn it is after `done` times; `kept` is what hop two keeps of them.
    """
    policy, parameters = plan.layout.gather, plan.layout.parameters

    # before the micro-steps: gather what is used in all of them
    gathered = gather_tree(plan, plan.placements, params, policy.each_step(parameters)) if policy.each_step else params

    # a zero that XLA does not know: zeros that it knows it shares with later ones, and keeps for the whole step
    zero = lax.optimization_barrier(jnp.zeros(()))
    grads = to_gradient_scope(
        plan, plan.placements, jax.tree.map(lambda x: jnp.zeros_like(x) + zero, params), zeros=True
    )
    if isinstance(loss, StagedLoss):
        assert hop_two is None
        return _through_stages(loss, plan, gathered, Sums(grads), batch, total)

    def micro_step(
        carry: Carry, item: tuple[jax.Array, Batch], exchange: GroupExchange | None = None
    ) -> tuple[Any, Means]:
        sums, value = carry
        i, micro = item
        used = tied(plan, gathered, i)

        # forward and backward pass; what is gathered in it is reduce-scattered on the way back: hop one
        def mean(sums: Sums) -> tuple[jax.Array, Means]:
            value, aux = micro_loss(loss, plan, accumulating(plan, used, sums, exchange), micro)
            return value / total, jax.tree.map(lambda x: x / total, aux)

        (more, aux), sums = jax.value_and_grad(mean, has_aux=True)(sums)
        return (sums, value + more), aux

    carry = (Sums(grads), vary(jnp.zeros(()), plan.layout.data_axes))
    accumulation = batch["weights"].shape[0]
    items = (jnp.arange(accumulation), dict(batch))
    if hop_two is None:
        (sums, value), aux = lax.scan(micro_step, carry, items)
        return sums, _means(value, aux)
    if waiting is not None:
        carry, aux = beside_micro_steps(plan, hop_two, micro_step, carry, items, kept, waiting, done)
        return carry[0], _means(carry[1], aux)
    (sums, value), aux = lax.scan(micro_step, carry, jax.tree.map(lambda x: x[:-1], items))
    sums = first_sums(plan, sums.grads, kept, done, hop_two.num_counts)
    # after the others: its forward pass needs nothing of them, and run before them it would hold its layers' inputs
    last, value = lax.optimization_barrier((jax.tree.map(lambda x: x[-1], items), value))
    (sums, value), more = micro_step((sums, value), last, partial(exchange_group, plan, hop_two))
    return sums, _means(value, jax.tree.map(lambda x, y: jnp.append(x, y), aux, more))


def _means(loss: jax.Array, aux: Means) -> Means:
    """Returns the loss and the sums over the micro-steps of the auxiliary metrics, `[accum]` each."""
    return {"loss": loss} | jax.tree.map(jnp.sum, aux)


def tied(plan: ShardingPlan, gathered: PyTree, i: jax.Array) -> PyTree:
    """Returns the parameters tied to iteration `i`, or XLA would move gathers out of the loop and keep the results."""
    if plan.layout.gather.each_step:
        return gathered
    return jax.tree.map(lambda x: lax.optimization_barrier((x, i))[0], gathered)


def _through_stages(
    loss: StagedLoss, plan: ShardingPlan, gathered: PyTree, sums: Sums, batch: Batch, total: jax.Array
) -> tuple[Sums, Means]:
    """Returns what `micro_steps` does, the micro-steps being those of a pipeline."""

    def forward(x: jax.Array, rows: Batch, tick: jax.Array) -> jax.Array:
        run = lambda params, rows, gather: loss.forward(params, x, rows, gather)
        return micro_loss(run, plan, tied(plan, gathered, tick), rows)

    def backward(
        sums: Sums, x: jax.Array, rows: Batch, g: jax.Array, counts: jax.Array, tick: jax.Array
    ) -> tuple[Sums, jax.Array, jax.Array]:
        used = tied(plan, gathered, tick)

        def stage(sums: Sums, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            run = lambda params, rows, gather: loss.with_loss(params, x, rows, gather)
            y, value = micro_loss(run, plan, accumulating(plan, used, sums, None), rows)
            return y, value / total

        (_, value), pullback = jax.vjp(stage, sums, x)
        sums, g = pullback((g, vary(counts, plan.layout.varying_axes)))
        return sums, g, value

    zeros = loss.zeros(batch, plan.layout.varying_axes)
    sums, value = forward_and_backward(forward, backward, sums, batch, zeros)
    return sums, {"loss": value}


@jax.named_scope("pipeline")
def sum_of_stages(grad: jax.Array) -> jax.Array:
    """Returns the gradient of a parameter that is on every stage: the first and the last one add to it."""
    return lax.psum(grad, STAGE)


def accumulating(plan: ShardingPlan, params: PyTree, sums: Sums, exchange: GroupExchange | None) -> PyTree:
    """Returns the parameters so that their gradients are added to `sums`, and exchanged if there is an `exchange`."""
    policy = plan.layout.gather

    def rule(name: str, placements: PyTree) -> Rule:
        def add(sums: Sums, grads: PyTree) -> Sums:
            if policy.each_step:
                grads = hop_one(plan, placements, grads)
            grads = to_gradient_scope(plan, placements, grads)
            return sums._replace(grads=jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums.grads, grads))

        return Rule(
            name=name or "its parameters",
            add=add,
            exchange=partial(exchange, name, placements) if exchange else None,
            overlap=plan.overlap,
            keep=partial(_gather_for_micro_step, plan, placements) if plan.overlap and policy.each_micro_step else None,
        )

    if not (policy.only_where_used or plan.overlap):
        return Accumulating(values=params, sums=sums, rule=rule("", plan.placements))
    return {
        name: Accumulating(values=params[name], sums=sums.group(name), rule=rule(name, used_placements(plan, name)))
        for name in params
    }


def micro_loss(loss: Callable[[PyTree, Batch, Gather], Value], plan: ShardingPlan, kept: PyTree, micro: Batch) -> Value:
    """Returns the loss of this device's rows `[rows, ...]`, gathering what the policy gathers in a micro-step."""
    policy, parameters = plan.layout.gather, plan.layout.parameters
    kept = values_of(kept)  # a policy that gathers for the whole micro-step accumulates after it
    if policy.each_micro_step and not plan.overlap:  # with overlap it is gathered a layer at a time
        kept = _gather_for_micro_step(plan, plan.placements, kept)
    if policy.each_use:
        return loss(kept, micro, layer_gather(plan, policy.each_use(parameters)))
    return loss(kept, micro, no_gather(plan))


def _gather_for_micro_step(plan: ShardingPlan, placements: PyTree, shards: PyTree) -> PyTree:
    """Gathers what stays gathered for a micro-step."""
    part = plan.layout.gather.each_micro_step
    assert part
    return gather_tree(plan, placements, shards, part(plan.layout.parameters))


def same_on_all(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns `x`, equal on all devices of `axes`, with a type that says so; it is small where there is an axis."""
    return lax.pmean(vary(x, axes), axes) if axes else x


def auto_gradients(loss: Loss, plan: ShardingPlan, params: PyTree, batch: Batch) -> tuple[PyTree, Means]:
    """Returns the same as `manual_gradients` with R = 1, all collectives chosen by XLA's partitioner."""
    layout = plan.layout
    total = jnp.sum(batch["weights"])
    gather = auto_gather(plan)

    def micro_step(carry: tuple[PyTree, jax.Array], micro: Batch) -> tuple[tuple[PyTree, jax.Array], Means]:
        def mean(params: PyTree) -> tuple[jax.Array, Means]:
            return jax.tree.map(lambda x: x / total, loss(params, micro, gather))

        (value, aux), grads = jax.value_and_grad(mean, has_aux=True)(params)
        grads = plan.constrain(grads, layout.gradients)
        return jax.tree.map(jnp.add, carry, (grads, value)), aux

    zeros = plan.constrain(jax.tree.map(jnp.zeros_like, params), layout.gradients)
    (grads, value), aux = lax.scan(micro_step, (zeros, jnp.zeros(())), dict(batch))
    return jax.tree.map(lambda g: g[None], grads), _means(value, aux)
