"""`HopTwo`: a method of hop two, with what it builds, and which optimizer it replaces.

Each method's module defines its `HopTwo`; compression/methods.py lists them all. A method is an optax transform from
gradients `[R, ...]` to their mean, the first of the chain. Most are no more than a `Primitive`, the exchange of one
group of shards, which the transform maps over all of them and which the step may call earlier, in the micro-steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from compression.delayed import delayed
from compression.statistics import State
from configs.schema import CompressionConfig, OptimizerConfig
from sharding.hop_two import Early, Exchange
from sharding.plan import ShardingPlan
from sharding.trees import Grads, GradsR, Params, PyTree


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts of a run that a hop-two method needs."""

    compression: CompressionConfig
    optimizer: OptimizerConfig
    plan: ShardingPlan
    specs: PyTree  # of ParamSpec


@dataclass(frozen=True, kw_only=True)
class Primitive:
    """The exchange of one group of shards, and how many numbers it counts."""

    exchange: Exchange
    num_counts: int = 0

    def early(self, state: State) -> Early:
        """Returns what the micro-steps need to exchange gradients by it, of the transform's state."""
        done = state.step if state.sent else jnp.zeros((), jnp.int32)
        kept_R = state.residual.tree if state.residual else None
        return Early(exchange=self.exchange, num_counts=self.num_counts, done=done, kept=kept_R)


@dataclass(frozen=True, kw_only=True)
class HopTwo:
    """A method of hop two: one value of the key `compression.hop_two`."""

    name: str
    # the transform: takes gradients `[R, ...]` and returns one gradient, or update, in the optimizer's scope
    build: Callable[[Setup], optax.GradientTransformation]
    # the optimizer that the method implements itself: it then returns that optimizer's update, not a gradient
    takes_over: Literal["sgd", "adamw"] | None = None
    # the settings of the downstream optimizer, without the parts that the method implements itself
    downstream: Callable[[OptimizerConfig], OptimizerConfig] = lambda optimizer: optimizer
    # hop two of one layer, or of a piece of each of its tensors, for `sharding.overlap`, `delayed` and streaming local
    # SGD; None: the method needs all gradients at once
    primitive: Callable[[Setup], Primitive] | None = None

    @property
    def hands_on(self) -> str:
        """What the method passes to the next transform, whose norm the guard computes: `grad` or `update`."""
        return "update" if self.takes_over else "grad"

    def transform(self, setup: Setup) -> optax.GradientTransformationExtraArgs:
        """Returns the hop-two transform of a run."""
        hop_two = self.build(setup)
        if setup.compression.delayed:
            hop_two = delayed(hop_two, setup.plan.layout.num_replicas)
        return optax.with_extra_args_support(hop_two)

    def early(self, setup: Setup) -> Callable[[Any], Early] | None:
        """Returns what the micro-steps need to do hop two, of the transform's state.

        None where it comes after the micro-steps: where the method needs all gradients at once, or `delayed` cuts
        pieces that a wider optimizer scope could not divide.
        """
        plan, layout = setup.plan, setup.plan.layout
        by_layer = plan.overlap and layout.shape.tensor == 1 and bool(layout.replica_axes)
        in_pieces = setup.compression.delayed and layout.optimizer_beyond_gradients
        if self.primitive is None or not by_layer or in_pieces:
            return None
        early = self.primitive(setup).early
        if not setup.compression.delayed:
            return early
        return lambda state: replace(early(state.exchange), waiting=state.waiting.tree)


def unless_not_finite(hop_two: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns the transform, whose state stays as it was where the result is not finite: the optimizer skips the step.

    What the micro-steps have exchanged leaves a state that is good after a skipped step too: to restore the one before
    would take a second copy of it from there to here.
    """
    inner = optax.with_extra_args_support(hop_two)

    def update(updates: GradsR, state: Any, params: Params | None = None, **extra: Any) -> tuple[Grads, Any]:
        out, after = inner.update(updates, state, params, **extra)
        if extra.get("exchanged") is not None:
            return out, after
        finite = jnp.isfinite(optax.tree.norm(out))
        return out, jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)
