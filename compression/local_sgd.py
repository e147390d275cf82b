"""Local SGD and DiLoCo (Douillard et al. 2023, arXiv 2311.08105): replicas synchronise only every H steps.

    inner   each replica has its own optimizer and its drift from the shared parameters: drift <- drift + update
    outer   every H steps: the mean of -drift over the replicas is the gradient of Nesterov's SGD on the parameters,
            and the drifts are reset to zero

With an outer learning rate of 1 and no momentum the parameters become the replicas' mean: local SGD (arXiv 1805.09767).
The outer gradient passes through hop two, including its codec, once every H steps. Running averages, such as batch
norm's, always become the replicas' mean: an outer momentum would carry them beyond every value that was seen.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from compression.statistics import with_zero_counts
from configs.schema import LocalSGDConfig
from sharding.averages import part_averages
from sharding.replicas import PerReplica
from sharding.scopes import Layout

PyTree = Any


def check_local_sgd(config: LocalSGDConfig, layout: Layout, num_steps: int) -> None:
    """Raises ValueError if local SGD does not work with this layout or number of steps."""
    if not layout.replica_axes:
        raise ValueError(
            "local_sgd needs several replicas, but there is only one partition group; set local_sgd.inner_steps=0, or "
            "choose a smaller group (with sharding.partitioner=manual)"
        )
    if not layout.parameters == layout.gradients == layout.optimizer:
        raise ValueError(
            "local_sgd needs a whole optimizer in each replica: sharding.strategy=ddp, hsdp or mics (one scope for "
            "parameters, gradients and optimizer state)"
        )
    if num_steps % config.inner_steps:
        raise ValueError(
            f"num_steps={num_steps} must be a multiple of local_sgd.inner_steps={config.inner_steps}, or the "
            "updates of the last steps would be lost"
        )


class LocalState(NamedTuple):
    """State of `local_sgd`."""

    step: jax.Array  # int32 []: inner steps done
    inner: PerReplica  # the state of each replica's optimizer
    drift: PerReplica  # each replica's parameters minus the shared ones
    outer: PyTree
    exchange: PyTree


def drift(opt_state: PyTree) -> PyTree | None:
    """Returns each replica's parameters minus the shared ones, `[R, ...]`; None without local SGD."""
    return opt_state.drift.tree if isinstance(opt_state, LocalState) else None


def local_sgd(
    exchange: optax.GradientTransformation,
    inner: optax.GradientTransformation,
    config: LocalSGDConfig,
    replicas: int,
) -> optax.GradientTransformation:
    """Returns the transform of gradients `[R, ...]` that moves the shared parameters every `inner_steps` steps.

    The gradients are each replica's own, at `params + drift`. The transforms of `inner` are mapped over the replicas,
    so that a guard among them skips the step of one replica without affecting the others.
    """
    outer = optax.sgd(config.outer_learning_rate, config.outer_momentum or None, nesterov=True)

    def spread(tree: PyTree) -> PerReplica:
        tree_R = jax.tree.map(lambda x: jnp.broadcast_to(x, (replicas, *jnp.shape(x))), tree)
        return PerReplica(tree_R, combine="mean", label="local")

    def init(params: PyTree) -> PyTree:
        return LocalState(
            step=jnp.zeros((), jnp.int32),
            inner=spread(inner.init(params)),
            drift=spread(jax.tree.map(jnp.zeros_like, params)),
            outer=outer.init(part_averages(params)[0]),
            exchange=exchange.init(params),
        )

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        assert params is not None
        own_R = jax.tree.map(lambda p, d_R: p[None] + d_R, params, state.drift.tree)
        moves_R, inner_state = jax.vmap(inner.update)(updates, state.inner.tree, own_R)
        drift_R = jax.tree.map(jnp.add, state.drift.tree, moves_R)
        step = state.step + 1

        def synchronise() -> tuple[PyTree, ...]:
            mean, exchanged = exchange.update(jax.tree.map(jnp.negative, drift_R), state.exchange, params)
            mean, averages = part_averages(mean)
            moves: Any
            moves, outer_state = outer.update(mean, state.outer)
            if averages:
                moves = {**moves, **jax.tree.map(jnp.negative, averages)}
            return moves, jax.tree.map(jnp.zeros_like, drift_R), outer_state, exchanged

        def continue_locally() -> tuple[PyTree, ...]:
            return jax.tree.map(jnp.zeros_like, params), drift_R, state.outer, with_zero_counts(state.exchange)

        moves, drift_R, outer_state, exchanged = lax.cond(step % config.inner_steps == 0, synchronise, continue_locally)
        return moves, LocalState(
            step=step,
            inner=replace(state.inner, tree=inner_state),
            drift=replace(state.drift, tree=drift_R),
            outer=outer_state,
            exchange=exchanged,
        )

    return optax.GradientTransformation(init, update)
