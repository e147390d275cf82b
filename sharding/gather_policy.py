"""`GatherPolicy`: when the micro-steps gather which part of the parameters' scope, and so how long they keep it."""

from collections.abc import Callable
from dataclasses import dataclass

from sharding.mesh import inter_part, intra_part

Axes = tuple[str, ...]
Part = Callable[[Axes], Axes]  # from the parameters' scope to the part of it that is gathered


def whole(scope: Axes) -> Axes:
    """Returns the whole scope."""
    return scope


@dataclass(frozen=True, kw_only=True)
class GatherPolicy:
    """A value of the key `sharding.gather`: what is gathered at each of three moments; None: nothing."""

    name: str
    each_step: Part | None = None  # before the first micro-step
    each_micro_step: Part | None = None  # before the forward pass
    each_use: Part | None = None  # where a layer uses its parameters, in the forward and in the backward pass

    @property
    def by_layer(self) -> bool:
        """Whether each layer's parameters can be gathered apart from the others'."""
        return self.each_use is not None

    @property
    def only_where_used(self) -> bool:
        """Whether all is gathered where it is used, so that gradients come out a layer at a time."""
        return not (self.each_step or self.each_micro_step)

    def scopes(self, parameters: Axes) -> tuple[Axes, ...]:
        """Returns the axes of each gather, for parameters cut over `parameters`."""
        parts = (self.each_step, self.each_micro_step, self.each_use)
        return tuple(part(parameters) for part in parts if part)


LAYER = GatherPolicy(name="layer", each_use=whole)
NODE = GatherPolicy(name="node", each_micro_step=inter_part, each_use=intra_part)  # hpZ of ZeRO++, arXiv 2306.10209
MICRO_STEP = GatherPolicy(name="micro_step", each_micro_step=whole)
STEP = GatherPolicy(name="step", each_step=whole)
GATHER_POLICIES = {policy.name: policy for policy in (LAYER, NODE, MICRO_STEP, STEP)}
