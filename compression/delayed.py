"""Hop two one boundary late: it runs beside the next boundary's micro-steps, and the optimizer acts on stale gradients.

The synchronous cousin of a parameter server's asynchronous updates: every gradient is exactly one boundary old. What is
exchanged comes from the state, so nothing of the step has to wait for it but the optimizer.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any


class DelayedState(NamedTuple):
    """State of `delayed`."""

    waiting: PyTree  # {"local": [R, ...]}: the last boundary's gradients
    exchange: PyTree


def delayed(exchange: optax.GradientTransformation, replicas: int) -> optax.GradientTransformation:
    """Returns a hop two that exchanges the gradients `[R, ...]` of the boundary before; at first they are zero.

    Gradients that are not finite are never kept: what is handed on is then not finite either, for the guard behind it
    to drop, and the gradients that waited go on waiting.
    """

    def init(params: PyTree) -> DelayedState:
        zeros = jax.tree.map(lambda p: jnp.zeros((replicas, *p.shape), p.dtype), params)
        return DelayedState(waiting={"local": zeros}, exchange=exchange.init(params))

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, DelayedState]:
        mean, exchanged = exchange.update(state.waiting["local"], state.exchange, params)
        poison = jnp.where(jnp.isfinite(optax.tree.norm(updates)), 0.0, jnp.nan)
        return jax.tree.map(lambda x: x + poison, mean), DelayedState(waiting={"local": updates}, exchange=exchanged)

    return optax.GradientTransformation(init, update)
