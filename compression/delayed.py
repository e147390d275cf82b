"""Delayed hop two: it overlaps with the next step's micro-steps, and the optimizer uses gradients one step old.

This resembles a parameter server's asynchronous updates, but every gradient is exactly one step old. The exchanged
gradients come from the state, so that in a step only the optimizer has to wait for the exchange. With
`sharding.overlap` the micro-steps exchange them, a piece beside each (sharding/hop_two.py).
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sharding.hop_two import Exchanged
from sharding.replicas import PerReplica
from sharding.trees import Grads, GradsR, Params


class DelayedState(NamedTuple):
    """State of `delayed`."""

    waiting: PerReplica  # the previous step's gradients
    exchange: Any  # the state of the method


def delayed(exchange: optax.GradientTransformation, replicas: int) -> optax.GradientTransformationExtraArgs:
    """Returns a hop two that exchanges the previous step's gradients `[R, ...]`; in the first step they are zero.

    Non-finite gradients never enter the state: they make the result non-finite too, so that the step is skipped and the
    state stays, including the waiting gradients. Where the micro-steps have exchanged those, the state is the new one.
    On a skipped step `waiting` is then the exchanged mean on every replica, and the residuals hold what the codec left
    out: together they are what waited before.
    """
    inner = optax.with_extra_args_support(exchange)

    def init(params: Params) -> Any:
        zeros = jax.tree.map(lambda p: jnp.zeros((replicas, *p.shape), p.dtype), params)
        waiting = PerReplica(zeros, combine="mean", label="local")
        return DelayedState(waiting=waiting, exchange=inner.init(params))

    def update(
        updates: GradsR, state: Any, params: Params | None = None, *, exchanged: Exchanged | None = None, **_: Any
    ) -> tuple[Grads, Any]:
        mean, after = inner.update(state.waiting.tree, state.exchange, params, exchanged=exchanged)
        finite = jnp.isfinite(optax.tree.norm(updates))
        mean = jax.tree.map(lambda x: jnp.where(finite, x, jnp.nan), mean)
        if exchanged:
            updates = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updates, exchanged.mean_R)
        return mean, DelayedState(waiting=replace(state.waiting, tree=updates), exchange=after)

    return optax.GradientTransformationExtraArgs(init, update)
