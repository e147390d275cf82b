"""Hop two on the shards of each device: the shard_map around every method, and the check for non-finite values."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding.plan import ShardingPlan, gradient_specs
from sharding.spec import is_placement, pspecs

PyTree = Any
Shards = list[jax.Array]


def on_shards(
    plan: ShardingPlan, function: Callable[..., tuple[Any, ...]], grads: PyTree, *kept: PyTree, replicated: PyTree = ()
) -> tuple[Any, ...]:
    """Runs hop two on each device: `function(replicated, grads_R, *kept_R)`, with lists of its shards `[1, ...]`.

    `grads` and `kept` (the state per replica) are trees `[R, ...]`; `replicated` is replicated on every device. The
    function returns lists of its shards of the means, in the optimizer's scope, and of the new state trees, and the new
    replicated values. `on_shards` returns the same as trees of global arrays.
    """
    leaves, tree = jax.tree.flatten(grads)
    specs_R = jax.tree.leaves(gradient_specs(plan))
    placements = jax.tree.leaves(plan.placements, is_leaf=is_placement)
    means = [p.pspec(plan.layout.optimizer) for p in placements]
    *trees, replicated = jax.shard_map(
        function,
        mesh=plan.mesh,
        in_specs=(PartitionSpec(), specs_R, *(specs_R for _ in kept)),
        out_specs=(means, *(specs_R for _ in kept), PartitionSpec()),
    )(replicated, leaves, *map(jax.tree.leaves, kept))
    return *map(tree.unflatten, trees), replicated


def own_copies(plan: ShardingPlan, tree: PyTree) -> PyTree:
    """Returns `[R, ...]` as one tree in the optimizer's scope, without communication: each device has its part."""
    leaves, structure = jax.tree.flatten(tree)
    means = jax.tree.leaves(pspecs(plan.placements, plan.layout.optimizer))
    own = jax.shard_map(
        lambda xs: to_optimizer_scope(plan, [x[0] for x in xs]),
        mesh=plan.mesh,
        in_specs=(jax.tree.leaves(gradient_specs(plan)),),
        out_specs=means,
        check_vma=False,  # that what is not cut is equal on all replicas, their type does not say
    )
    return structure.unflatten(own(leaves))


def to_optimizer_scope(plan: ShardingPlan, shards: Shards) -> Shards:
    """Slices a device's shards from the gradients' scope down to the optimizer's."""
    return plan.group(plan.placements, plan.layout.optimizer_beyond_gradients, tensor_is_manual=True).slice(shards)


def not_finite(xs: Sequence[jax.Array], axes: tuple[str, ...]) -> jax.Array:
    """Returns f32 []: NaN if a value on a device of `axes` is not finite, else 0; a codec would send a number."""
    bad = sum(jnp.sum(~jnp.isfinite(x), dtype=jnp.float32) for x in xs)
    return jnp.where(lax.psum(bad, axes) > 0, jnp.nan, 0.0)
