"""`HopTwo`: a method of hop two as one value, what it does, what it refuses and what it claims to save.

Each method defines its value beside its code; compression/methods.py has all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import optax

from compression.delayed import delayed
from configs.schema import CompressionConfig, OptimizerConfig
from sharding.gradients import HopTwoInBackward
from sharding.plan import ShardingPlan

PyTree = Any


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The run that a hop two is for."""

    compression: CompressionConfig
    optimizer: OptimizerConfig
    plan: ShardingPlan
    specs: PyTree  # of ParamSpec
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What a finished run tells about the bytes of its hop two."""

    ratio: float  # of values in f32 to the payload, in a step after the warm-up
    replicas: int
    warmup: float  # share of the steps


@dataclass(frozen=True, kw_only=True)
class HopTwo:
    """A method of hop two: one value of the key `compression.hop_two`."""

    name: str
    # takes gradients `[R, ...]`; hands on one gradient, or update, in the optimizer's scope
    build: Callable[[Setup], optax.GradientTransformation]
    # raises ValueError for a layout, or a value of a key, that the method cannot work with
    refuse: Callable[[Setup], None]
    # the optimizer whose work the method does: what it hands on is that optimizer's update, not a gradient
    takes_over: Literal["sgd", "adamw"] | None = None
    # the settings of the downstream optimizer, without the work that the method has done
    downstream: Callable[[OptimizerConfig], OptimizerConfig] = lambda optimizer: optimizer
    # hop two of a layer at a time, for `sharding.overlap_hop_two`; None: the method needs all gradients at once
    in_backward: Callable[[Setup], HopTwoInBackward] | None = None
    # how many times fewer bytes than an all-reduce in f32 a run has sent between nodes
    times_smaller: Callable[[Counted], float] = lambda counted: counted.ratio

    @property
    def hands_on(self) -> str:
        """What the next transform gets, and the guard takes the norm of: `grad` or `update`."""
        return "update" if self.takes_over else "grad"

    def check(self, setup: Setup) -> None:
        """Raises ValueError if the method does not go with the rest of the run."""
        compression, optimizer = setup.compression, setup.optimizer
        if self.takes_over and optimizer.name != self.takes_over:
            raise ValueError(
                f"compression.hop_two={self.name} does the work of optimizer.name={self.takes_over}, not of "
                f"{optimizer.name}; set that to {self.takes_over}"
            )
        self.refuse(setup)
        if compression.delayed and not setup.plan.layout.replica_axes:
            raise ValueError("compression.delayed has nothing to delay: there is one partition group alone")
        if self.takes_over and compression.warmup_steps >= setup.num_steps:
            raise ValueError(
                f"compression.warmup_steps={compression.warmup_steps} is the whole run of num_steps={setup.num_steps}: "
                f"{self.name} would never get past its warm-up; set it lower"
            )

    def transform(self, setup: Setup) -> optax.GradientTransformation:
        """Returns hop two for a run. ValueError as in `check`."""
        self.check(setup)
        hop_two = self.build(setup)
        return delayed(hop_two, setup.plan.layout.num_replicas) if setup.compression.delayed else hop_two

    def overlapped(self, setup: Setup, choice: str) -> HopTwoInBackward | None:
        """Returns hop two inside the backward pass, as the key `sharding.overlap_hop_two` wants it; None: after it.

        ValueError if it is wanted and cannot be.
        """
        if choice == "off" or (choice == "auto" and setup.plan.mesh.devices.flat[0].platform == "cpu"):
            return None
        obstacle = self._obstacle(setup)
        if obstacle and choice == "on":
            raise ValueError(f"sharding.overlap_hop_two=on needs {obstacle}; change that, or set it to auto or off")
        return None if obstacle or not self.in_backward else self.in_backward(setup)

    def _obstacle(self, setup: Setup) -> str:
        """Returns what keeps hop two out of the backward pass: what it would need, or an empty string."""
        layout = setup.plan.layout
        if not layout.replica_axes:
            return "replicas that synchronise once per step: several partition groups and sharding.two_hop"
        if not layout.gather.only_where_used:
            return f"sharding.gather=layer, not {layout.gather.name}: gradients come out a layer at a time"
        if not layout.parameters == layout.gradients == layout.optimizer:
            return "one scope for parameters, gradients and optimizer state: ddp, hsdp or mics"
        if layout.shape.tensor > 1:
            return f"mesh.tensor=1, not {layout.shape.tensor}"
        if setup.compression.delayed:
            return "compression.delayed=False"
        return "" if self.in_backward else f"another compression.hop_two: {self.name} works on all gradients at once"
