"""`AllReduceMethod`: a method of the replica all-reduce, with what it builds, and which optimizer it replaces.

Each method's module defines its `AllReduceMethod`; compression/methods.py lists them all. A method is an optax
transform from gradients `[R, ...]` to their mean, the first of the chain. Most are no more than the exchange of one
group of shards, which the transform maps over all of them and which the step may call earlier, in the micro-steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from compression.exchange import idle, uncounted
from compression.primitives import summed
from compression.statistics import State
from configs.schema import CompressionConfig, OptimizerConfig
from sharding.in_step_exchange import Early, Exchange, Exchanged
from sharding.mesh import inter_part
from sharding.plan import ShardingPlan
from sharding.replicas import PerReplica
from sharding.scopes import Layout
from sharding.trees import Grads, GradsR, Params, PyTree


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts of a run that a method of the replica all-reduce needs."""

    compression: CompressionConfig
    optimizer: OptimizerConfig
    plan: ShardingPlan
    specs: PyTree  # of ParamSpec


@dataclass(frozen=True, kw_only=True)
class AllReduceMethod:
    """A method of the replica all-reduce: one value of the key `compression.all_reduce`."""

    name: str
    # the transform: takes gradients `[R, ...]` and returns one gradient, or update, in the optimizer's scope
    build: Callable[[Setup], optax.GradientTransformation]
    # the optimizer that the method implements itself: it then returns that optimizer's update, not a gradient
    takes_over: Literal["sgd", "adamw"] | None = None
    # the settings of the downstream optimizer, without the parts that the method implements itself
    downstream: Callable[[OptimizerConfig], OptimizerConfig] = lambda optimizer: optimizer
    # the replica all-reduce of one layer, or of a piece of each of its tensors, for `sharding.overlap`, `delayed` and
    # streaming local SGD; None: the method needs all gradients at once
    primitive: Callable[[Setup], Exchange] | None = None

    def transform(self, setup: Setup) -> optax.GradientTransformationExtraArgs:
        """Returns the method's transform for a run, whose state takes nothing of a step that is skipped."""
        all_reduce = self.build(setup)
        if self.is_idle(setup.plan.layout):
            all_reduce = idle(setup.plan, all_reduce)
        elif not inter_part(setup.plan.layout.replica_axes):
            all_reduce = uncounted(all_reduce)
        if setup.compression.delayed:
            return delayed(all_reduce, setup.plan.layout.num_replicas)
        return unless_not_finite(all_reduce)

    def early(self, setup: Setup) -> Callable[[Any], Early] | None:
        """Returns what the micro-steps need to do the replica all-reduce, of the transform's state.

        None where it comes after the micro-steps: where the method needs all gradients at once, or `delayed` cuts
        pieces that a wider optimizer scope could not divide.
        """
        plan, layout = setup.plan, setup.plan.layout
        by_layer = plan.overlap and layout.shape.tensor == 1 and bool(layout.replica_axes)
        in_pieces = setup.compression.delayed and layout.optimizer_beyond_gradients
        if self.primitive is None or not by_layer or in_pieces:
            return None
        in_micro_steps = self.in_micro_steps(setup)
        if not setup.compression.delayed:
            return in_micro_steps
        return lambda state: replace(in_micro_steps(state.exchange), waiting=state.waiting.tree)

    def is_idle(self, layout: Layout) -> bool:
        """Whether there is nothing to compress, because no replicas are on different nodes.

        A method that replaces the optimizer is never idle: without it the parameters would be updated otherwise.
        """
        return self.takes_over is None and not inter_part(layout.replica_axes)

    def in_micro_steps(self, setup: Setup) -> Callable[[State], Early]:
        """Returns what the micro-steps need to exchange gradients, of the transform's state."""
        assert self.primitive
        if self.is_idle(setup.plan.layout):
            dense = summed(setup.plan, packed=True)
            return lambda state: Early(exchange=dense, done=jnp.zeros((), jnp.int32))
        exchange = self.primitive(setup)

        def early(state: State) -> Early:
            done = state.step if state.sent else jnp.zeros((), jnp.int32)
            kept_R = state.residual.tree if state.residual else None
            return Early(exchange=exchange, num_counts=len(state.sent), done=done, kept=kept_R)

        return early


def unless_not_finite(all_reduce: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns the transform, whose state stays as it was where the result is not finite: the optimizer skips the step.

    What the micro-steps have exchanged leaves a state that is good after a skipped step too: to restore the one before
    would take a second copy of it from there to here.
    """
    inner = optax.with_extra_args_support(all_reduce)

    def update(updates: GradsR, state: Any, params: Params | None = None, **extra: Any) -> tuple[Grads, Any]:
        out, after = inner.update(updates, state, params, **extra)
        return out, after if extra.get("exchanged") is not None else _if_finite(out, after, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _if_finite(values: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """Returns `new` where all values are finite, else `old`."""
    finite = jnp.isfinite(optax.tree.norm(values))
    return jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)


class DelayedState(NamedTuple):
    """State of `delayed`."""

    waiting: PerReplica  # the previous step's gradients
    exchange: Any  # the state of the method


def delayed(exchange: optax.GradientTransformation, replicas: int) -> optax.GradientTransformationExtraArgs:
    """Returns the exchange of the previous step's gradients `[R, ...]`, which are zero in the first step.

    In a step only the optimizer has to wait for it; with `sharding.overlap` the micro-steps exchange a piece each.
    Non-finite gradients never enter the state: they make the result non-finite too, so that the step is skipped and the
    state stays, including the waiting gradients. Where the micro-steps have exchanged those, the state is the new one.
    On a skipped step `waiting` is then the exchanged mean on every replica, and the residuals hold what the codec left
    out: together they are what waited before. What waits in the checkpoint of an independent replica may not be finite:
    it costs one step, after which the new gradients wait.
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
        mean = _if_finite(updates, mean, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), mean))
        waiting = _if_finite(updates, updates, exchanged.mean_R if exchanged else state.waiting.tree)
        if exchanged is None:
            after = _if_finite(mean, after, state.exchange)
        return mean, DelayedState(waiting=replace(state.waiting, tree=waiting), exchange=after)

    return optax.GradientTransformationExtraArgs(init, update)
