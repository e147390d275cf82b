"""The step of independent replicas, which are separate JAX programs: a compiled share of the gradients, and the update.

    share(params, batch) -> means                      # hands out gradients during its last backward pass
    update(state, grads_R, means) -> (state, metrics)

The sum over all shares, between the two, is not compiled: the programs exchange it (elastic/replicas/).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from sharding.accumulation import Index, at, length
from sharding.gradients import (
    Carry,
    Items,
    MicroStep,
    MicroSteps,
    add_gradients,
    replica_parameters,
    run_last,
    scan_micro_steps,
)
from sharding.plan import REPLICATED, ShardingPlan, gradient_specs
from sharding.spec import Placement, is_placement, pspecs
from sharding.step import Timing, TrainState, updated
from sharding.trees import Batch, Grads, GradsR, Means, Params, Placements, PyTree

# (group, number of the device in its mesh, layer, the device's shards of the sums): it must not wait, nor read them
Hand = Callable[[str, jax.Array, jax.Array, Sequence[jax.Array]], None]


@dataclass(frozen=True, kw_only=True)
class GradientCallback:
    """A MicroStepLoop that hands each group of gradients to the host as soon as the last micro-step has summed it.

    `order` has the names of the groups, in the order in which the backward pass completes them, once it was traced.
    """

    hand: Hand
    order: list[str] = field(default_factory=list)

    def run(self, plan: ShardingPlan, micro_step: MicroStep, carry: Carry, items: Items) -> tuple[Carry, Means]:
        """Returns the sums of the gradients and of the losses, and auxiliary metrics `[accum]`."""
        carry, aux = scan_micro_steps(micro_step, carry, jax.tree.map(lambda x: x[:-1], items))
        return run_last(partial(micro_step, add=partial(self._add_and_hand, plan)), carry, items, aux)

    def _add_and_hand(
        self, plan: ShardingPlan, name: str, placements: Placements, sums: Grads, grads: Grads, layer: Index
    ) -> Grads:
        sums = add_gradients(name, placements, sums, grads, layer)
        if name:
            self._give(plan, name, layer, sums)
            return sums
        for group, of_group in sums.items():  # gathered for the whole micro-step, they are summed all at once
            if group in plan.stacks:
                for i in range(length(of_group)):
                    self._give(plan, group, i, at(of_group, i))
            else:
                self._give(plan, group, 0, of_group)
        return sums

    def _give(self, plan: ShardingPlan, name: str, layer: jax.Array | int, grads: PyTree) -> None:
        if name not in self.order:
            self.order.append(name)
        device = lax.axis_index(plan.layout.data_axes)
        io_callback(partial(self.hand, name), None, device, jnp.asarray(layer), jax.tree.leaves(grads), ordered=False)


def build_share(
    micro_steps: MicroSteps, plan: ShardingPlan, callback: GradientCallback
) -> Callable[[Params, Batch], Means]:
    """Returns `share(params, batch) -> means`: weighted sums over the batch, and `weight`, f32 [].

    The gradients of the weighted sum leave it through `callback`. The partition group is all devices; `tensor` is 1,
    since jax takes callbacks only where all axes are manual.
    """

    def on_device(params: Params, batch: Batch) -> Means:
        one = jnp.ones((), jnp.float32)
        _, means = micro_steps(plan, replica_parameters(plan, params), batch, one, callback)
        return lax.psum(means, plan.layout.varying_axes) if plan.layout.varying_axes else means

    def share(params: Params, batch: Batch) -> Means:
        specs = pspecs(plan.all_placements, plan.layout.parameters, tensor=False), plan.batch_spec
        mapped = jax.shard_map(on_device, mesh=plan.mesh, in_specs=specs, out_specs=REPLICATED)
        return mapped(params, batch) | {"weight": jnp.sum(batch["weights"])}

    return share


def build_update(plan: ShardingPlan, timing: Timing) -> Callable[[TrainState, GradsR, Means], tuple[TrainState, Means]]:
    """Returns `update(state, grads_R, means) -> (state, metrics)`, for the sums over all shares."""

    def update(state: TrainState, grads_R: GradsR, means: Means) -> tuple[TrainState, Means]:
        weight = means["weight"]
        metrics = {name: x / weight for name, x in means.items() if name != "weight"}
        return updated(plan, timing, state, jax.tree.map(lambda g: g / weight, grads_R), metrics)

    return update


def gradient_shapes(plan: ShardingPlan, params: Params) -> GradsR:
    """Returns the shapes `f32 [1, ...]` of gradients that an update takes, for parameters like the shapes `params`."""

    def shape(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *leaf.shape), jnp.float32, sharding=NamedSharding(plan.mesh, spec))

    return jax.tree.map(shape, params, gradient_specs(plan))


@dataclass(frozen=True, kw_only=True)
class FlatGradients:
    """The gradients of this process' devices as one vector, f32 `[size]`, in the order in which they are handed out.

    Gradients of parameters with one dim per layer follow all others. A gradient that several devices hold whole is
    stored once, for the first device.
    """

    plan: ShardingPlan
    slots: Mapping[tuple[str, int, int], Sequence[tuple[int, int]]]  # (group, layer, device): (start, size) of a leaf
    size: int
    num_coded: int  # values of the others, which come first

    @classmethod
    def make(cls, plan: ShardingPlan, params: Params, order: Sequence[str]) -> "FlatGradients":
        """Returns the layout for parameters like the shapes `params`, of groups in this order."""
        sizes, here = {}, cls.local(plan)
        for name in order:
            layers = length(params[name]) if name in plan.stacks else 1
            for layer in reversed(range(layers)):
                for device in here:
                    leaves = sizes[name, layer, device] = []
                    for placement, shape in _leaves(plan, name, params):
                        whole = not placement.cut_by(plan.layout.gradients)
                        size = int(np.prod(shape)) // layers if device == here[0] or not whole else 0
                        leaves.append((placement.is_vector, size))
        num_coded = sum(size for leaves in sizes.values() for is_vector, size in leaves if not is_vector)
        slots, ends = {}, {False: 0, True: num_coded}
        for key, leaves in sizes.items():
            slots[key] = []
            for is_vector, size in leaves:
                slots[key].append((ends[is_vector], size))
                ends[is_vector] += size
        return cls(plan=plan, slots=slots, size=ends[True], num_coded=num_coded)

    @staticmethod
    def local(plan: ShardingPlan) -> list[int]:
        """Returns the numbers in the mesh of this process' devices."""
        return [i for i, device in enumerate(plan.mesh.devices.flat) if device.process_index == jax.process_index()]

    def put(self, flat: np.ndarray, name: str, device: int, layer: int, leaves: Sequence[ArrayLike]) -> tuple[int, int]:
        """Writes a layer's gradients (`leaves`) to `flat`; returns the start and end of their coded part."""
        slots = self.slots[name, layer, device]
        for (start, size), leaf in zip(slots, leaves, strict=True):
            if size:
                flat[start : start + size] = np.asarray(leaf).reshape(-1)
        coded = [(start, start + size) for start, size in slots if start < self.num_coded]
        return (coded[0][0], coded[-1][1]) if coded else (0, 0)

    def arrays(self, flat: np.ndarray, params: Params) -> GradsR:
        """Returns the gradients `[1, ...]` that a vector holds, for parameters like the shapes `params`."""
        devices, here = list(self.plan.mesh.devices.flat), self.local(self.plan)
        shapes = gradient_shapes(self.plan, params)
        found = {}
        for name in params:
            layers = length(params[name]) if name in self.plan.stacks else 0
            arrays = []
            tree = jax.tree.structure(params[name])
            of_group = zip(_leaves(self.plan, name, params), jax.tree.leaves(shapes[name]), strict=True)
            for i, ((placement, shape), leaf) in enumerate(of_group):
                whole = not placement.cut_by(self.plan.layout.gradients)
                shards = []
                for number in here:
                    parts = []
                    for layer in range(max(layers, 1)):
                        start, size = self.slots[name, layer, here[0] if whole else number][i]
                        parts.append(flat[start : start + size])
                    shard = np.concatenate(parts) if layers > 1 else parts[0]
                    shards.append(jax.device_put(shard.reshape(1, *shape), devices[number]))
                arrays.append(jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards))
            found[name] = tree.unflatten(arrays)
        return GradsR(found)


def _leaves(plan: ShardingPlan, name: str, params: Params) -> list[tuple[Placement, tuple[int, ...]]]:
    """Returns the placement and the shape of a device's shard of each parameter of a group."""
    placements = jax.tree.leaves(plan.placements[name], is_leaf=is_placement)
    shapes = [
        NamedSharding(plan.mesh, p.pspec(plan.layout.gradients)).shard_shape(x.shape)
        for p, x in zip(placements, jax.tree.leaves(params[name]), strict=True)
    ]
    return list(zip(placements, shapes, strict=True))
