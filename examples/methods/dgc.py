"""Deep Gradient Compression (Lin et al. 2018, arXiv 1712.01887): replicas send the largest values of their momenta.

    u <- momentum u + g; v <- v + u / R    u: this replica's velocity; v: its residual, the unsent values
    send the largest |v| of each tensor's shard; u, v <- 0 where a value was sent; the mean is the sum of all sent

An index and a value take 8 bytes. The method replaces SGD with momentum, without clipping. The paper also clips
locally, and raises the sparsity in a warm-up.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
from jax import lax

from compression.all_reduce import AllReduceMethod, Setup
from compression.exchange import by_groups, to_optimizer_scope, transform
from compression.primitives import not_finite
from compression.statistics import Sent
from sharding.collectives import all_gather_chunks
from sharding.in_step_exchange import Exchange
from sharding.plan import ShardingPlan
from sharding.replicas import PerReplica
from sharding.spec import Placement
from sharding.step import AllReduce
from sharding.trees import Grads, GradsR, Params, PyTree, Shards


def largest(plan: ShardingPlan, density: float) -> Exchange:
    """Returns the exchange of shards that sends a fraction of the values of each, and keeps the others."""
    axes = plan.layout.replica_axes

    def exchange_group(
        placements: Sequence[Placement], xs: Shards, kept: Shards | None, key: jax.Array
    ) -> tuple[Shards, Shards, list[Sent]]:
        del placements, key
        assert kept is not None
        totals, unsent, counts = [], [], []
        for x in (x + k for x, k in zip(xs, kept, strict=True)):
            flat, count = x.reshape(-1), max(1, round(x.size * density))
            _, indices = lax.top_k(jnp.abs(flat), count)
            indices_R, values_R = (  # [R, count]
                all_gather_chunks(sent, axes, hierarchical=True, to="invarying") for sent in (indices, flat[indices])
            )
            total = jnp.zeros(x.size).at[indices_R].add(values_R).reshape(x.shape)
            totals.append(total + not_finite([x], axes))  # a NaN makes the optimizer skip the step
            unsent.append(flat.at[indices].set(0).reshape(x.shape))
            counts.append(Sent(8 * count, x.size, count))
        return to_optimizer_scope(plan, totals), unsent, counts

    return exchange_group


def build(setup: Setup, density: float) -> optax.GradientTransformation:
    """Returns the transform; its state is the exchange's, and the velocities `[R, ...]`."""
    return of_velocities(by_groups(setup.plan, largest(setup.plan, density)), setup.optimizer.momentum)


def of_velocities(all_reduce: AllReduce, momentum: float) -> optax.GradientTransformation:
    """Returns the transform that sends velocities instead of gradients, and clears them where they were sent."""

    def init(params: Params) -> PyTree:
        state = all_reduce.init(params)
        return state, PerReplica(state.residual.tree, combine="mean", label="velocity")

    def update(updates: GradsR, state: PyTree, params: Params | None = None) -> tuple[Grads, PyTree]:
        exchanged, velocity = state
        moved_R = jax.tree.map(lambda u, g: momentum * u + g, velocity.tree, updates)
        mean, exchanged = all_reduce.update(moved_R, exchanged, params)
        masked_R = jax.tree.map(lambda u, unsent: jnp.where(unsent == 0, 0, u), moved_R, exchanged.residual.tree)
        return mean, (exchanged, replace(velocity, tree=masked_R))

    return transform(init, update)


def method(sparsity: float = 0.99) -> AllReduceMethod:
    """Returns the method, for `register`: `sparsity` is the fraction of values that are not sent.

    ValueError for a sparsity out of range.
    """
    if not 0 < sparsity < 1:
        raise ValueError(f"sparsity={sparsity} of DGC must be between 0 and 1")
    return AllReduceMethod(
        name="dgc",
        build=lambda setup: build(setup, 1 - sparsity),
        takes_over="sgd",
        downstream=lambda optimizer: replace(optimizer, momentum=0.0, clip_norm=0.0),
    )
