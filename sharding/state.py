"""The shardings of a state's arrays: the parameters, and the optimizer's arrays for each of them."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from sharding.padding import Padded, padded, unpadded
from sharding.plan import REPLICATED, ShardingPlan, gradient_specs
from sharding.replicas import replica_key
from sharding.spec import Placement, is_placement, path_name
from sharding.step import Optimizer, TrainState
from sharding.trees import Grads, Params, PyTree

# (name, shape) of an array that belongs to no parameter -> the dim to shard over the optimizer's scope; None: none
Cut = Callable[[str, tuple[int, ...]], int | None]


def by_name(tree: PyTree, is_leaf: Callable[[object], bool] | None = None) -> dict[str, PyTree]:
    """Returns the leaves of a tree by their names."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)}


def owner(path: KeyPath, x: jax.ShapeDtypeStruct, params: Mapping[str, jax.ShapeDtypeStruct]) -> str:
    """Returns the name of the parameter to which an array of the optimizer state belongs, or "".

    The array has the parameter's shape (after R, if replicas have separate arrays), and its path ends in the
    parameter's name. If an optimizer acts on each layer of a stack separately, the stack's name may be earlier in the
    path.
    """
    shape = x.shape[1:] if replica_key(path) else x.shape
    keys = [str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    names = ["/".join(keys[start:]) for start in range(len(keys))]
    names += [f"{stack}/{name}" for i, stack in enumerate(keys) for name in names[i + 1 :]]
    return next((name for name in names if name in params and params[name].shape == shape), "")


def state_shardings(plan: ShardingPlan, shapes: TrainState, cut: Cut = lambda name, shape: None) -> PyTree:
    """Returns the NamedSharding of every array of a state, given the tree of its shapes.

    An array in the state of the replica all-reduce or the optimizer that belongs to a parameter is sharded like it,
    over the optimizer's scope. Counters are replicated on all devices. So are all other arrays (PowerSGD's factors,
    factored moments) unless they belong to the optimizer and `cut` shards them. Separate state per replica (PerReplica,
    `[R, ...]`) is only on the replica's devices: sharded like the gradient of its parameter, or without a parameter
    whole on each device.
    ValueError for a dim that the scope does not divide.
    """
    layout = plan.layout
    placements, params = by_name(plan.placements, is_leaf=is_placement), by_name(shapes.params)
    gradients = by_name(gradient_specs(plan))
    degree = layout.shape.size(layout.optimizer)

    def spec_of(path: KeyPath, x: jax.ShapeDtypeStruct, cut: Cut) -> PartitionSpec:
        name = owner(path, x, params)
        if replica_key(path):
            return gradients[name] if name else PartitionSpec(layout.replica_axes)
        if name:
            return placements[name].pspec(layout.optimizer)
        in_stack = any(isinstance(key, jax.tree_util.DictKey) and key.key in plan.stacks for key in path)
        if degree == 1 or x.ndim <= in_stack:  # a counter, with one entry per layer in a stack
            return REPLICATED
        if (dim := cut(path_name(path), x.shape)) is None:
            return REPLICATED
        if x.shape[dim] % degree:
            raise ValueError(
                f"{path_name(path)} {list(x.shape)} cannot be cut into {degree} shards in dim {dim}; let the "
                f"optimizer's `cut` return a dim that {degree} divides, or None for a whole copy on each device"
            )
        return PartitionSpec(*[None] * dim, layout.optimizer)

    def placed(tree: PyTree, cut: Cut) -> PyTree:
        return jax.tree_util.tree_map_with_path(lambda path, x: NamedSharding(plan.mesh, spec_of(path, x, cut)), tree)

    return dataclasses.replace(
        jax.tree.map(lambda _: NamedSharding(plan.mesh, REPLICATED), shapes),
        params=plan.shardings(plan.layout.parameters),
        frozen=jax.tree.map(
            lambda p: NamedSharding(plan.mesh, p.pspec(plan.layout.parameters)), plan.frozen, is_leaf=is_placement
        ),
        all_reduce=placed(shapes.all_reduce, lambda name, shape: None),
        opt_state=placed(shapes.opt_state, cut),
    )


def map_owned(
    plan: ShardingPlan, function: Callable[[Placement, PyTree], PyTree], tree: PyTree, params: Params
) -> PyTree:
    """Maps `function(placement, array)` over the arrays of a state that belong to trained parameters `[...]`."""
    placements, owners = by_name(plan.placements, is_leaf=is_placement), by_name(params)

    def mapped(path: KeyPath, x: PyTree) -> PyTree:
        name = owner(path, x, owners)
        return function(placements[name], x) if name else x

    return jax.tree_util.tree_map_with_path(mapped, tree)


def in_files(plan: ShardingPlan, state: TrainState) -> TrainState:
    """Returns a state, or its shapes, to save or restore: with a Padded for each padded array."""

    def wrapped(p: Placement, x: jax.Array) -> PyTree:
        return Padded(x, jax.eval_shape(lambda x: unpadded(p, x), x).shape) if p.padding else x

    return map_owned(plan, wrapped, state, state.params)


@dataclass(frozen=True)
class OnTrueShapes:
    """An optimizer that sees no padding, with padded parameters, updates and state.

    XLA's partitioner stores an uneven tensor like the padded one, so that cutting and padding send nothing.
    """

    plan: ShardingPlan
    optimizer: Optimizer

    def init(self, params: Params) -> PyTree:
        """Returns the state before the first step."""
        params = self.plan.map(unpadded, params)
        return map_owned(self.plan, padded, self.optimizer.init(params), params)

    def update(self, updates: Grads, state: PyTree, params: Params | None = None) -> tuple[PyTree, PyTree]:
        """Returns how far the parameters move by a gradient, and the state after it."""
        assert params is not None
        true = self.plan.map(unpadded, params)
        state = map_owned(self.plan, unpadded, state, params)
        updates, state = self.optimizer.update(self.plan.map(unpadded, updates), state, true)
        return self.plan.map(padded, updates), map_owned(self.plan, padded, state, true)
