"""Loss scaling for gradients in float16, which has 5 bits of exponent and loses what is below 6e-8 (V100, T4).

The loss is multiplied by a scale, and the float32 sums of the gradients are divided by it before the replica all-reduce
(Micikevicius et al. 2018, arXiv 1710.03740, section 3.2). The scale follows the gradients: an overflow, which the guard
skips, halves it, and 2000 finite steps in a row double it. Rule and numbers are torch.amp.GradScaler's and apex's.
Scales are powers of two: apart from overflow and underflow in float16, a step is the same under each to the last
bit.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from compression.local_sgd import LocalState
from compression.weight_differences import DifferencesState
from configs.schema import BatchConfig
from sharding.gradients import MicroStepLoop, MicroSteps
from sharding.in_step_exchange import ExchangeInEachMicroStep, ExchangeInLastMicroStep
from sharding.plan import ShardingPlan
from sharding.step import States, Timing, Watch
from sharding.trees import Batch, Grads, Means, Params, PyTree
from training.optimizers import GuardState

FIRST, PATIENCE = 2.0**16, 2000  # scale of the mean loss of a micro-batch; finite steps before it doubles
LEAST, MOST = 1.0, 2.0**64  # at LEAST an overflow is the run's, not the scale's (DeepSpeed: min_loss_scale)


class ScaledState(NamedTuple):
    """State of an optimizer with a scaled loss."""

    inner: PyTree  # the optimizer's
    scale: jax.Array  # f32 []: the next step's
    finite_steps: jax.Array  # int32 []: since the scale changed
    skipped_at_least: jax.Array  # int32 []: in a row, at the smallest scale


def first_scale(batch: BatchConfig) -> float:
    """Returns the first scale, for the mean over the step's batch: so that a micro-batch's mean is scaled by FIRST."""
    return FIRST * 2 ** (max(1, batch.global_size // batch.micro_size).bit_length() - 1)


def with_loss_scale(timing: Timing, first: float) -> "Scaled":
    """Returns the timing with a scaled loss, by `first` at first; one scale for all replicas, also of local SGD."""

    def watch(states: States) -> Means:
        scalars = {"loss_scale": states[1].scale, "skipped_in_a_row": states[1].skipped_at_least}
        return timing.watch(_unscaled(states)) | scalars

    return Scaled(timing, first, watch)


@dataclass(frozen=True)
class Scaled:
    """A Timing around another, whose micro-steps differentiate a multiple of the loss."""

    timing: Timing
    first: float
    watch: Watch

    def init(self, params: Params) -> States:
        """Returns the states before the first step, of parameters `[...]`; the optimizer's is a ScaledState."""
        all_reduce, inner = self.timing.init(params)
        zero = jnp.zeros((), jnp.int32)
        return all_reduce, ScaledState(inner, jnp.float32(self.first), zero, zero)

    def gradients(
        self, micro_steps: MicroSteps, plan: ShardingPlan, params: Params, batch: Batch, states: States
    ) -> tuple[PyTree, Means]:
        """Returns the timing's gradients and means, without the scale."""
        scaled = partial(_scaled_micro_steps, micro_steps, states[1].scale)
        return self.timing.gradients(scaled, plan, params, batch, _unscaled(states))

    def update(self, gradients: PyTree, states: States, params: Params) -> tuple[Grads, States]:
        """Returns the timing's update, and the states after it, with the scale of the next step."""
        _, before = states
        moves, (all_reduce, inner) = self.timing.update(gradients, _unscaled(states), params)
        finite = jnp.all(guard_of(inner).skipped == guard_of(before.inner).skipped)
        return moves, (all_reduce, _follow(before, finite)._replace(inner=inner))


def _scaled_micro_steps(
    micro_steps: MicroSteps,
    scale: jax.Array,
    plan: ShardingPlan,
    params: Params,
    batch: Batch,
    total: jax.Array,
    loop: MicroStepLoop,
) -> tuple[PyTree, Means]:
    """Runs micro-steps that differentiate `scale` times the loss; returns their results without the scale."""

    def unscaled(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x / scale, tree)

    run = partial(micro_steps, plan, params, batch, total / scale)
    match loop:
        case ExchangeInLastMicroStep():  # it exchanges gradients, which must have no scale by then
            exchanged, means = run(UnscalingExchange(**vars(loop), scale=scale))
            return exchanged, unscaled(means)
        case ExchangeInEachMicroStep():  # its pending values have none
            (grads, exchanged), means = run(loop)
            return (unscaled(grads), exchanged), unscaled(means)
    grads, means = run(loop)
    return unscaled(grads), unscaled(means)


@dataclass(frozen=True, kw_only=True)
class UnscalingExchange(ExchangeInLastMicroStep):
    """Divides the sums of gradients by their scale before it exchanges them."""

    scale: jax.Array  # f32 []

    @property
    def numbers(self) -> tuple[jax.Array, ...]:
        """Numbers [] for the backward pass, the scale last."""
        return (*super().numbers, self.scale)

    def to_exchange(self, grads: Grads, numbers: tuple[jax.Array, ...]) -> Grads:
        """Returns the summed gradients `[...]` without their scale."""
        return jax.tree.map(lambda g: g / numbers[-1], grads)


def guard_of(opt_state: PyTree) -> GuardState:
    """Returns the state of an optimizer's guard; with local SGD it is `[R]`."""
    match opt_state:
        case LocalState():
            return opt_state.inner.tree
        case DifferencesState():
            return opt_state.inner
    return opt_state


def _unscaled(states: States) -> States:
    """Returns the states of the timing within."""
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
