"""All-gathers of parameters and their transposes, the group reduce-scatters, between the three scopes.

All but `auto_gather` run inside a `shard_map` whose data axes are manual.
"""

from dataclasses import replace
from itertools import compress

import jax
from jax import lax
from jax.sharding import NamedSharding

from sharding.accumulation import values_of
from sharding.collectives import TensorGroup, vary
from sharding.experts import Gather, GatherWithExchange
from sharding.padding import unpadded
from sharding.plan import ShardingPlan
from sharding.spec import Placement, is_placement
from sharding.trees import Axes, Grads, Params, Placements, PyTree


def layer_gather(plan: ShardingPlan, scope: Axes | None = None) -> Gather:
    """Returns the gather that a model calls once for each group, over the parameters' scope or a part of it.

    Its transpose is the group reduce-scatter.
    """

    def gather(name: str, tree: PyTree) -> PyTree:
        placements = used_placements(plan, name, plan.all_placements)
        return _unpadded(placements, gather_tree(plan, placements, values_of(tree), scope))

    return GatherWithExchange(gather=gather, exchange=plan.exchange, context=plan.context)


def no_gather(plan: ShardingPlan) -> Gather:
    """Returns the gather of a model whose parameters were gathered before: only tokens travel."""

    def gather(name: str, tree: PyTree) -> PyTree:
        return _unpadded(used_placements(plan, name, plan.all_placements), tree)

    return GatherWithExchange(gather=gather, exchange=plan.exchange, context=plan.context)


def auto_gather(plan: ShardingPlan) -> Gather:
    """Returns the gather of the automatic partitioner: a constraint to the unpartitioned sharding."""

    def whole(p: Placement, x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(_as_gathered(plan, p, x), NamedSharding(plan.mesh, p.pspec(())))

    def gather(name: str, tree: PyTree) -> PyTree:
        placements = used_placements(plan, name, plan.all_placements)
        return _unpadded(placements, jax.tree.map(whole, placements, tree, is_leaf=is_placement))

    return gather


def _unpadded(placements: PyTree, tree: PyTree) -> PyTree:
    return jax.tree.map(unpadded, placements, tree, is_leaf=is_placement)


def gather_tree(plan: ShardingPlan, placements: PyTree, shards: PyTree, scope: Axes | None = None) -> PyTree:
    """Gathers local shards `[...]` in the compute dtype, a collective per network level; its transpose reduce-scatters.

    Over the parameters' scope, or over `scope`, the last axes by which the shards are cut. Frozen parameters are
    gathered as they are stored (one more collective for each dtype), and have no way back.
    """
    layout = plan.layout
    scope = layout.parameters if scope is None else scope
    group = plan.group(placements, scope, coded=True)
    trained = [not p.frozen for p in group.placements]
    to_reduce = plan.group([*compress(group.placements, trained)], scope, coded=True)

    def backward(_: None, grads: list[jax.Array]) -> tuple[list[jax.Array | None]]:
        reduced = iter(_reduce_scatter_leaves(plan, to_reduce, [*compress(grads, trained)]))
        return ([next(reduced) if is_trained else None for is_trained in trained],)

    @jax.custom_vjp
    @jax.named_scope("gather")
    def gather(shards: list[jax.Array]) -> list[jax.Array]:
        return [vary(x, layout.data_axes) for x in group.gather(shards)]

    gather.defvjp(lambda shards: (gather(shards), None), backward)
    leaves, tree = jax.tree.flatten(shards)
    return tree.unflatten(gather([_as_gathered(plan, p, x) for p, x in zip(group.placements, leaves, strict=True)]))


def _as_gathered(plan: ShardingPlan, p: Placement, x: jax.Array) -> jax.Array:
    """Returns shards `[...]` in the dtype in which they travel."""
    return x.astype(plan.compute_dtype) if plan.casts and not p.frozen else x


def reduce_scatter(plan: ShardingPlan, placements: Placements, grads: Grads) -> Grads:
    """Reduce-scatters full gradients `[...]` inside each partition group (MiCS section 3.4)."""
    leaves, tree = jax.tree.flatten(grads)
    group = plan.group(placements, plan.layout.parameters, coded=True)
    return tree.unflatten(_reduce_scatter_leaves(plan, group, leaves))


@jax.named_scope("group_reduce_scatter")
def _reduce_scatter_leaves(plan: ShardingPlan, group: TensorGroup, grads: list[jax.Array]) -> list[jax.Array]:
    layout = plan.layout
    wide = [x.astype(plan.sum_dtype) for x in grads]
    if layout.two_hop:
        summed = [vary(x, layout.data_axes) for x in group.reduce_scatter(wide)]
    else:
        summed = group.all_reduce_then_slice(wide, layout.data_axes)
    return [x.astype(grad.dtype) for x, grad in zip(summed, grads, strict=True)]


@jax.named_scope("gradient_scope")
def to_gradient_scope(plan: ShardingPlan, placements: Placements, grads: Grads, *, zeros: bool = False) -> Grads:
    """Reduces gradients from the parameters' scope to their own, each micro-step (ZeRO-2); `zeros` needs no sum."""
    layout = plan.layout
    added_axes = layout.gradients_beyond_parameters
    group = plan.group(placements, added_axes, coded=True)
    leaves, tree = jax.tree.flatten(grads)
    if layout.two_hop and not zeros and added_axes:
        # the values came from the compute dtype: nothing is lost in casting back
        summed = group.reduce_scatter([x.astype(plan.sum_dtype) for x in leaves])
    else:
        summed = group.slice(leaves)
    if layout.two_hop:
        summed = [vary(x, layout.data_axes) for x in summed]
    return tree.unflatten(summed)


@jax.named_scope("parameter_scope")
def to_parameter_scope(plan: ShardingPlan, params: Params) -> Params:
    """Gathers updated parameters from the optimizer state's scope into their own, once a step."""
    layout = plan.layout
    if not layout.optimizer_beyond_parameters or layout.is_automatic:
        return plan.constrain(params, layout.parameters)

    group = plan.group(plan.placements, layout.optimizer_beyond_parameters, tensor_is_manual=True)
    leaves, tree = jax.tree.flatten(params)
    gather = jax.shard_map(
        lambda shards: group.gather(shards, to="invarying"),
        mesh=plan.mesh,
        in_specs=([p.pspec(layout.optimizer) for p in group.placements],),
        out_specs=[p.pspec(layout.parameters) for p in group.placements],
    )
    return tree.unflatten(gather(leaves))


@jax.named_scope("parameter_scope")
def gather_differences(plan: ShardingPlan, differences: Params) -> tuple[Params, Params]:
    """Gathers encoded differences `[...]` from the optimizer state's scope into the parameters', once a step.

    Returns the decoded differences, equal on all devices, and in the optimizer state's scope the encoding errors.
    """
    layout = plan.layout
    exact = plan.group(plan.placements, layout.optimizer_beyond_parameters, tensor_is_manual=True)
    group = replace(exact, gather_codecs=plan.in_tiles(plan.difference_codecs))
    in_optimizer, in_parameters = (
        [p.pspec(scope) for p in group.placements] for scope in (layout.optimizer, layout.parameters)
    )

    def gather(shards: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        decoded = group.gather(shards, to="invarying")
        return decoded, [x - y for x, y in zip(shards, group.slice(decoded), strict=True)]

    leaves, tree = jax.tree.flatten(differences)
    run = jax.shard_map(gather, mesh=plan.mesh, in_specs=(in_optimizer,), out_specs=(in_parameters, in_optimizer))
    decoded, errors = run(leaves)
    return tree.unflatten(decoded), tree.unflatten(errors)


def used_placements(plan: ShardingPlan, name: str, placements: Placements) -> PyTree:
    """Returns the placements of the parameters that a model gathers under `name`; for a stack, of one layer's slice."""
    group = placements[name]
    if name not in plan.stacks:
        return group
    return jax.tree.map(Placement.without_layers, group, is_leaf=is_placement)
