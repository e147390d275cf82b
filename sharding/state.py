"""Where the arrays of a state lie: the parameters, and whatever an optimizer keeps for each of them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from sharding.spec import is_placement, path_name
from sharding.step import REPLICATED, ShardingPlan, TrainState, gradient_specs

PyTree = Any


def by_name(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns the leaves of a tree by their names."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)}


def owner(path: tuple[Any, ...], x: jax.ShapeDtypeStruct, params: Mapping[str, jax.ShapeDtypeStruct]) -> str:
    """Returns which parameter an array of the optimizer state belongs to, "" for none.

    The array has the parameter's shape, and its path ends in the parameter's name (without `layers/` where an optimizer
    acts on each layer by itself).
    """
    keys = [str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    names = ["/".join(keys[start:]) for start in range(len(keys))]
    names += [f"layers/{name}" for name in names]
    return next((name for name in names if name in params and params[name].shape == x.shape), "")


def residual_owner(
    path: tuple[Any, ...], x: jax.ShapeDtypeStruct, params: Mapping[str, jax.ShapeDtypeStruct], replicas: int
) -> str:
    """Returns which parameter an array `[R, ...]` of the optimizer state belongs to, "" for none."""
    if x.shape[:1] != (replicas,):
        return ""
    return owner(path, jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)


def state_shardings(plan: ShardingPlan, shapes: TrainState) -> PyTree:
    """Returns the NamedSharding of every array of a state, given the tree of its shapes.

    An array of the optimizer state that belongs to a parameter is sharded like it, over the optimizer's scope; one with
    R in front (a residual of hop two) like the gradients. All others (counters, factored moments) are replicated, but
    those of a replica by itself, under a key `local`, only inside it.
    """
    layout = plan.layout
    placements, params = by_name(plan.placements, is_leaf=is_placement), by_name(shapes.params)
    gradients = by_name(gradient_specs(plan))
    replicated = NamedSharding(plan.mesh, REPLICATED)

    def place(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> NamedSharding:
        if name := owner(path, x, params):
            return NamedSharding(plan.mesh, placements[name].pspec(layout.optimizer))
        if name := residual_owner(path, x, params, layout.num_replicas):
            return NamedSharding(plan.mesh, gradients[name])
        if jax.tree_util.DictKey("local") in path:
            return NamedSharding(plan.mesh, PartitionSpec(layout.replica_axes))
        return replicated

    return dataclasses.replace(
        jax.tree.map(lambda _: replicated, shapes),
        params=plan.shardings(plan.layout.parameters),
        opt_state=jax.tree_util.tree_map_with_path(place, shapes.opt_state),
    )
