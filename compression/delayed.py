"""Delayed hop two: it overlaps with the next step's micro-steps, and the optimizer uses gradients one step old.

This resembles a parameter server's asynchronous updates, but every gradient is exactly one step old. The exchanged
gradients come from the state, so that in a step only the optimizer has to wait for the exchange. With
`sharding.overlap` and no codec the micro-steps exchange them, a piece beside each (sharding/gradients.py).
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sharding.gradients import Delayed
from sharding.replicas import PerReplica

PyTree = Any


class DelayedState(NamedTuple):
    """State of `delayed`."""

    waiting: PerReplica  # the previous step's gradients
    exchange: PyTree


def delayed(exchange: optax.GradientTransformation, replicas: int) -> optax.GradientTransformation:
    """Returns a hop two that exchanges the previous step's gradients `[R, ...]`; in the first step they are zero.

    Non-finite gradients never enter the state: they make the result non-finite too, so the downstream guard skips the
    step and restores the state, including the waiting gradients.
    """

    def init(params: PyTree) -> PyTree:
        zeros = jax.tree.map(lambda p: jnp.zeros((replicas, *p.shape), p.dtype), params)
        waiting = PerReplica(zeros, combine="mean", label="local")
        return DelayedState(waiting=waiting, exchange=exchange.init(params))

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        waiting: Any = state.waiting.tree
        if isinstance(updates, Delayed):  # exchanged already, beside the micro-steps
            updates, waiting = updates.grads_R, updates.before
        mean, exchanged = exchange.update(waiting, state.exchange, params)
        poison = jnp.where(jnp.isfinite(optax.tree.norm(updates)), 0.0, jnp.nan)
        mean = jax.tree.map(lambda x: x + poison, mean)
        return mean, DelayedState(waiting=replace(state.waiting, tree=updates), exchange=exchanged)

    return optax.GradientTransformation(init, update)
