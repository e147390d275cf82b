"""Hop two one boundary late: it runs beside the next boundary's micro-steps, and the optimizer acts on stale gradients.

The synchronous cousin of a parameter server's asynchronous updates: every gradient is exactly one boundary old. What is
exchanged comes from the state, so nothing of the step has to wait for it but the optimizer.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sharding.replicas import PerReplica

PyTree = Any


class DelayedState(NamedTuple):
    """State of `delayed`."""

    waiting: PerReplica  # the last boundary's gradients
    exchange: PyTree


def delayed(exchange: optax.GradientTransformation, replicas: int) -> optax.GradientTransformation:
    """Returns a hop two that exchanges the previous boundary's gradients `[R, ...]`; at first they are zero.

    Gradients that are not finite are never kept: the result is then not finite either, the downstream guard drops the
    step, and the gradients that waited keep waiting.
    """

    def init(params: PyTree) -> PyTree:
        zeros = jax.tree.map(lambda p: jnp.zeros((replicas, *p.shape), p.dtype), params)
        waiting = PerReplica(zeros, combine="mean", label="local")
        return DelayedState(waiting=waiting, exchange=exchange.init(params))

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        mean, exchanged = exchange.update(state.waiting.tree, state.exchange, params)
        poison = jnp.where(jnp.isfinite(optax.tree.norm(updates)), 0.0, jnp.nan)
        waiting = replace(state.waiting, tree=updates)
        return jax.tree.map(lambda x: x + poison, mean), DelayedState(waiting=waiting, exchange=exchanged)

    return optax.GradientTransformation(init, update)
