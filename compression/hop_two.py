"""`HopTwo`: a method of hop two, with what it builds, and which optimizer it replaces.

Each method's module defines its `HopTwo`; compression/methods.py lists them all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import optax

from compression.delayed import delayed
from configs.schema import CompressionConfig, OptimizerConfig
from sharding.hop_two_in_backward import HopTwoInBackward
from sharding.plan import ShardingPlan

PyTree = Any


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts of a run that a hop-two method needs."""

    compression: CompressionConfig
    optimizer: OptimizerConfig
    plan: ShardingPlan
    specs: PyTree  # of ParamSpec


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
    in_backward: Callable[[Setup], HopTwoInBackward] | None = None

    @property
    def hands_on(self) -> str:
        """What the method passes to the next transform, whose norm the guard computes: `grad` or `update`."""
        return "update" if self.takes_over else "grad"

    def transform(self, setup: Setup) -> optax.GradientTransformation:
        """Returns the hop-two transform of a run."""
        hop_two = self.build(setup)
        return delayed(hop_two, setup.plan.layout.num_replicas) if setup.compression.delayed else hop_two

    def overlapped(self, setup: Setup) -> HopTwoInBackward | None:
        """Returns hop two inside the backward pass: the last micro-step's, or with `delayed` that of each.

        None where it comes after the micro-steps: where the method needs all gradients at once, or `delayed` cuts
        pieces that a wider optimizer scope could not divide.
        """
        plan, layout = setup.plan, setup.plan.layout
        by_layer = plan.overlap and layout.shape.tensor == 1 and bool(layout.replica_axes)
        in_pieces = setup.compression.delayed and layout.optimizer_beyond_gradients
        if self.in_backward is None or not by_layer or in_pieces:
            return None
        found = self.in_backward(setup)
        if not setup.compression.delayed:
            return found
        return replace(found.within(lambda state: state.exchange), waiting=lambda state: state.waiting.tree)
