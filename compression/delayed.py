"""Delayed hop two: it overlaps with the next step's micro-steps, and the optimizer uses gradients one step old.

This resembles a parameter server's asynchronous updates, but every gradient is exactly one step old. The exchanged
gradients come from the state, so that in a step only the optimizer has to wait for the exchange. With
`sharding.overlap` the micro-steps exchange them, a piece beside each (sharding/hop_two_in_backward.py).
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sharding.hop_two_in_backward import Delayed
from sharding.replicas import PerReplica

PyTree = Any


class DelayedState(NamedTuple):
    """State of `delayed`."""

    waiting: PerReplica  # the previous step's gradients
    exchange: PyTree


def delayed(exchange: optax.GradientTransformation, replicas: int) -> optax.GradientTransformation:
    """Returns a hop two that exchanges the previous step's gradients `[R, ...]`; in the first step they are zero.

    Non-finite gradients never enter the state: they make the result non-finite too, so the downstream guard skips the
    step and restores the state, including the waiting gradients. Of what was exchanged beside the micro-steps it keeps
    the new state, because restoring the old one would need a second copy of the gradients. On a skipped step `waiting`
    therefore becomes the exchanged mean on every replica, and the residuals hold what the codec left out: together
    they are what waited before.
    """

    def init(params: PyTree) -> PyTree:
        zeros = jax.tree.map(lambda p: jnp.zeros((replicas, *p.shape), p.dtype), params)
        waiting = PerReplica(zeros, combine="mean", label="local")
        return DelayedState(waiting=waiting, exchange=exchange.init(params))

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        beside: Any = updates.before if isinstance(updates, Delayed) else None
        grads_R: Any = updates.grads_R if isinstance(updates, Delayed) else updates
        mean, exchanged = exchange.update(beside or state.waiting.tree, state.exchange, params)
        finite = jnp.isfinite(optax.tree.norm(grads_R))
        mean = jax.tree.map(lambda x: jnp.where(finite, x, jnp.nan), mean)
        if beside:
            grads_R = jax.tree.map(lambda new, mean: jnp.where(finite, new, mean), grads_R, beside.grads_R)
        return mean, DelayedState(waiting=replace(state.waiting, tree=grads_R), exchange=exchanged)

    return optax.GradientTransformation(init, update)
