"""Hop two: the mean of `[R, ...]` gradients over the replicas, as an optax transform."""

from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import PartitionSpec

from sharding.step import Sharded, gradient_specs

PyTree = Any


def exchange(sharded: Sharded) -> optax.GradientTransformation:
    """Returns the transform that takes gradients `[R, ...]` and hands on their mean over R, in the optimizer's scope.

    The first of a chain: every transform behind it sees ordinary global arrays, so its norms are right by construction.
    Where the optimizer state's scope is wider than the gradients', it reduce-scatters over the difference and
    all-reduces only over what is left (MiCS section 3.4; docs/concepts.md: `2 (M/p) (R-1)/R` bytes a device).
    """
    layout = sharded.layout
    replicas = layout.replica_axes
    extra = tuple(axis for axis in layout.optimizer if axis not in layout.gradients)
    rest = tuple(axis for axis in replicas if axis not in extra)

    group = sharded.group(sharded.placements, extra, tensor_is_manual=True)

    def exchange_shards(grads_R: list[jax.Array]) -> list[jax.Array]:
        means = [x_R[0] / layout.num_replicas for x_R in grads_R]
        return [lax.psum(x, rest) if rest else x for x in group.reduce_scatter(means)]

    @jax.named_scope("hop_two")
    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        del params
        if not replicas:  # nothing left to exchange: at most a local slice
            return sharded.constrain(jax.tree.map(lambda x: x[0], updates), layout.optimizer), state
        leaves, tree = jax.tree.flatten(updates)
        exchanged = jax.shard_map(
            exchange_shards,
            mesh=sharded.mesh,
            in_specs=(jax.tree.leaves(gradient_specs(sharded), is_leaf=lambda x: isinstance(x, PartitionSpec)),),
            out_specs=[p.pspec(layout.optimizer) for p in group.placements],
        )(leaves)
        return tree.unflatten(exchanged), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
