"""The state of an independent replica: its shards as bytes, and the place where delayed gradients wait."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from xxhash import xxh3_128

from sharding.step import TrainState
from sharding.trees import GradsR, Means, PyTree


def waiting_in(state: TrainState) -> PyTree:
    """Returns what a state has in the place of the gradients that `compression.delayed` lets wait, `[1, ...]`."""
    return state.all_reduce.waiting.tree


def with_waiting(state: TrainState, tree: PyTree) -> TrainState:
    """Returns the state with `tree` in the place of those gradients."""
    all_reduce = state.all_reduce
    return replace(state, all_reduce=all_reduce._replace(waiting=replace(all_reduce.waiting, tree=tree)))


def by_waiting(update: Callable[..., tuple[TrainState, Means]]) -> Callable[..., tuple[TrainState, Means]]:
    """Returns an update by the gradients given; in the place of those that wait it leaves the parameters given."""

    def changed(state: TrainState, grads_R: GradsR, means: Means) -> tuple[TrainState, Means]:
        before = jax.tree.map(lambda p: p[None], state.params)
        none_yet = jax.tree.map(jnp.zeros_like, grads_R)
        state, metrics = update(with_waiting(state, grads_R), none_yet, means)
        return with_waiting(state, before), metrics

    return changed


def own_shards(tree: PyTree) -> list[Any]:
    """Returns the shards of a tree on this process' devices, one of each that are equal."""
    return [shard for leaf in jax.tree.leaves(tree) for shard in _unique(leaf)]


def _unique(leaf: jax.Array) -> list[Any]:
    return [*{str(shard.index): shard for shard in leaf.addressable_shards}.values()]


def own_size(leaf: Any) -> int:
    """Returns the values of an array's shards on this process' devices, one of each that are equal, by its shape."""
    places = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    return len({str(index) for index in places.values()}) * int(np.prod(leaf.sharding.shard_shape(leaf.shape)))


def digest_of(state: TrainState) -> str:
    """Returns a hash of the trained parameters on this process' devices."""
    found = xxh3_128()  # the others wait for it
    for shard in own_shards(state.params):
        found.update(np.asarray(shard.data).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def with_shards(state: TrainState, contents: Sequence[bytes | memoryview], *, consume: bool = False) -> TrainState:
    """Returns the state whose shards, in the order of `own_shards`, have these bytes.

    With `consume` the one given is deleted array by array: the devices never hold both.
    """
    remaining = iter(contents)

    def content(shard: Any) -> np.ndarray:
        return np.frombuffer(next(remaining), shard.data.dtype).reshape(shard.data.shape)

    def changed(leaf: jax.Array) -> jax.Array:
        found = filled(leaf, content)
        if consume:
            leaf.delete()
        return found

    return replace(jax.tree.map(changed, state.checkpoint_state), frozen=state.frozen)


def filled(leaf: jax.Array, values: Callable[[Any], np.ndarray]) -> jax.Array:
    """Returns an array like `leaf` of `values(shard)`, called for this process' shards, one of each that are equal."""
    found = {str(shard.index): values(shard) for shard in _unique(leaf)}
    parts = [jax.device_put(found[str(shard.index)], shard.device) for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
