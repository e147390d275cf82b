"""Loss scaling for gradients in float16, which has 5 bits of exponent and loses what is below 6e-8 (V100, T4).

The loss is multiplied by a scale, and the float32 sums of the gradients are divided by it before the replica all-reduce
(Micikevicius et al. 2018, arXiv 1710.03740, section 3.2). The scale follows the gradients: an overflow, which the guard
skips, halves it, and 2000 finite steps in a row double it. Rule and numbers are those of torch.amp.GradScaler and apex.
Scales are powers of two: apart from what overflows or is lost in float16, a step is the same under each to the last
bit.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from compression.local_sgd import LocalState
from configs.schema import BatchConfig
from sharding.step import Chain, States
from sharding.trees import Grads, GradsR, Params, PyTree
from training.optimizers import GuardState

FIRST, PATIENCE = 2.0**16, 2000  # of the mean loss of a micro-batch; finite steps before it doubles
LEAST, MOST = 1.0, 2.0**64  # at LEAST an overflow is the run's, not the scale's (DeepSpeed: min_loss_scale)


class ScaledState(NamedTuple):
    """State of an optimizer behind a scaled loss."""

    inner: PyTree  # the optimizer's
    scale: jax.Array  # f32 []: of the next step
    finite_steps: jax.Array  # int32 []: since the scale changed
    skipped_at_least: jax.Array  # int32 []: in a row, at the smallest scale


def first_scale(batch: BatchConfig) -> float:
    """Returns the first scale, for the mean over the step's batch: so that a micro-batch's mean is scaled by FIRST."""
    return FIRST * 2 ** (max(1, batch.global_size // batch.micro_size).bit_length() - 1)


def with_loss_scale(chain: Chain, first: float) -> Chain:
    """Returns the chain whose loss is scaled, by `first` at first; one scale for all replicas, also of local SGD."""

    def init(params: Params) -> Any:
        all_reduce, inner = chain.tx.init(params)
        return all_reduce, ScaledState(inner, jnp.float32(first), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def update(updates: GradsR, state: Any, params: Params | None = None, **extra: Any) -> tuple[Grads, Any]:
        _, before = state
        moves, (all_reduce, inner) = chain.tx.update(updates, _unscaled(state), params, **extra)
        finite = jnp.all(guard_of(inner).skipped == guard_of(before.inner).skipped)
        return moves, (all_reduce, _follow(before, finite)._replace(inner=inner))

    def watch(states: States) -> dict[str, jax.Array]:
        found = {"loss_scale": states[1].scale, "skipped_in_a_row": states[1].skipped_at_least}
        return chain.watch(_unscaled(states)) | found

    early, drift = chain.early, chain.drift
    return replace(
        chain,
        tx=optax.GradientTransformationExtraArgs(init, update),
        early=early and (lambda states: early(_unscaled(states))),
        drift=drift and (lambda states: drift(_unscaled(states))),
        watch=watch,
        scale=lambda states: states[1].scale,
    )


def guard_of(opt_state: PyTree) -> GuardState:
    """Returns the state of an optimizer's guard; with local SGD it is `[R]`."""
    return opt_state.inner.tree if isinstance(opt_state, LocalState) else opt_state


def _unscaled(states: States) -> States:
    """Returns the states of the chain within."""
    return states[0], states[1].inner


def _follow(state: ScaledState, finite: jax.Array) -> ScaledState:
    """Returns the state after a step whose gradients were finite, or not."""
    count = state.finite_steps + 1
    doubles = finite & (count == PATIENCE)
    kept = jnp.where(doubles, jnp.minimum(2 * state.scale, MOST), state.scale)
    at_least = state.scale <= LEAST
    return state._replace(
        scale=jnp.where(finite, kept, jnp.maximum(state.scale / 2, LEAST)),
        finite_steps=jnp.where(finite & ~doubles, count, 0),
        skipped_at_least=jnp.where(at_least & ~finite, state.skipped_at_least + 1, 0),
    )
