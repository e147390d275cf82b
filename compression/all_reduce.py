"""`AllReduceMethod`: a method of the replica all-reduce, its transform, and the optimizer that it replaces.

Each method's module defines its `AllReduceMethod`; compression/methods.py lists them all. A method is an optax
transform from gradients `[R, ...]` to their mean, before the optimizer. Most are no more than the exchange of one group
of shards, which the transform calls with all shards, and which a timing may call in the micro-steps
(compression/timings.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from compression.exchange import idle, transform, uncounted
from compression.primitives import summed
from compression.timings import ByGroup, CodedByGroup, ExactByGroup, delayed, if_finite
from configs.schema import CompressionConfig, OptimizerConfig
from sharding.in_step_exchange import Exchange
from sharding.mesh import inter_part
from sharding.plan import ShardingPlan
from sharding.scopes import Layout
from sharding.step import AllReduce
from sharding.trees import Grads, GradsR, Params, PyTree, Specs


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts of a run that a method of the replica all-reduce needs."""

    compression: CompressionConfig
    optimizer: OptimizerConfig
    plan: ShardingPlan
    specs: Specs


@dataclass(frozen=True, kw_only=True)
class AllReduceMethod:
    """A method of the replica all-reduce: one value of the key `compression.all_reduce`."""

    name: str
    # the transform: takes gradients `[R, ...]` and returns one gradient, or update, in the optimizer's scope
    build: Callable[[Setup], AllReduce]
    # the optimizer that the method implements itself: it then returns that optimizer's update, not a gradient
    takes_over: Literal["sgd", "adamw"] | None = None
    # the settings of the downstream optimizer, without the parts that the method implements itself
    downstream: Callable[[OptimizerConfig], OptimizerConfig] = lambda optimizer: optimizer
    # the replica all-reduce of one layer, or of a piece of each of its tensors, for `sharding.overlap`, `delayed` and
    # streaming local SGD; None: the method needs all gradients at once
    primitive: Callable[[Setup], Exchange] | None = None
    encodes: bool = True  # the transform keeps a State, and the primitive counts the values that it sends

    def transform(self, setup: Setup) -> AllReduce:
        """Returns the method's transform for a run, whose state takes nothing of a step that is skipped."""
        all_reduce = self.build(setup)
        if self.is_idle(setup.plan.layout):
            all_reduce = idle(setup.plan, all_reduce)
        elif not inter_part(setup.plan.layout.replica_axes):
            all_reduce = uncounted(all_reduce)
        if setup.compression.delayed:
            return delayed(all_reduce, setup.plan.layout.num_replicas)
        return unless_not_finite(all_reduce)

    def runs_in_micro_steps(self, setup: Setup) -> bool:
        """Whether the replica all-reduce runs in the micro-steps (of local SGD, `local_sgd.streaming` says so).

        Otherwise it comes after them: where the method needs all gradients at once, or where `delayed` cuts pieces that
        a wider optimizer scope could not divide.
        """
        plan, layout = setup.plan, setup.plan.layout
        by_layer = plan.overlap and layout.shape.tensor == 1 and bool(layout.replica_axes)
        in_pieces = setup.compression.delayed and layout.optimizer_beyond_gradients
        return self.primitive is not None and by_layer and not in_pieces

    def is_idle(self, layout: Layout) -> bool:
        """Whether no traffic needs compression, because no replicas are on different nodes.

        A method that replaces the optimizer is never idle: without it the parameters would be updated otherwise.
        """
        return self.takes_over is None and not inter_part(layout.replica_axes)

    def by_group(self, setup: Setup) -> ByGroup:
        """Returns the exchange of one group of shards after the other, of a method that has a primitive."""
        assert self.primitive
        if self.is_idle(setup.plan.layout):
            return ExactByGroup(setup.plan, summed(setup.plan, packed=True))
        exchange = self.primitive(setup)
        return CodedByGroup(setup.plan, exchange) if self.encodes else ExactByGroup(setup.plan, exchange)


def unless_not_finite(all_reduce: AllReduce) -> AllReduce:
    """Returns the transform, whose state stays where the result is not finite: the optimizer skips the step."""

    def update(updates: GradsR, state: PyTree, params: Params | None = None) -> tuple[Grads, PyTree]:
        out, after = all_reduce.update(updates, state, params)
        return out, if_finite(out, after, state)

    return transform(all_reduce.init, update)
