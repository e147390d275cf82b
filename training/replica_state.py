"""The state of an independent replica: its shards as bytes, and the place of the pending gradients of `delayed`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from xxhash import xxh3_128

from sharding.step import TrainState
from sharding.trees import GradsR, Means, PyTree

LocalShard = Any  # a jax.Shard that has data


def pending(state: TrainState) -> PyTree:
    """Returns the field of the state that holds the pending gradients `[1, ...]` of `compression.delayed`.

    Between the update and the next step it holds the parameters before the update instead (`keeping_parameters`).
    """
    return state.all_reduce.waiting.tree


def with_pending(state: TrainState, tree: PyTree) -> TrainState:
    """Returns the state with `tree` in the field of the pending gradients."""
    all_reduce = state.all_reduce
    return replace(state, all_reduce=all_reduce._replace(waiting=replace(all_reduce.waiting, tree=tree)))


def keeping_parameters(update: Callable[..., tuple[TrainState, Means]]) -> Callable[..., tuple[TrainState, Means]]:
    """Returns an update by given gradients, after which the field of the pending gradients has the old parameters."""

    def update_and_keep(state: TrainState, grads_R: GradsR, means: Means) -> tuple[TrainState, Means]:
        before = jax.tree.map(lambda p: p[None], state.params)
        none_yet = jax.tree.map(jnp.zeros_like, grads_R)
        state, metrics = update(with_pending(state, grads_R), none_yet, means)
        return with_pending(state, before), metrics

    return update_and_keep


def local_shards(tree: PyTree) -> list[LocalShard]:
    """Returns the shards of a tree on this process' devices; of equal ones only one."""
    return [shard for leaf in jax.tree.leaves(tree) for shard in _unique(leaf)]


def _unique(leaf: jax.Array) -> list[LocalShard]:
    return [*{str(shard.index): shard for shard in leaf.addressable_shards}.values()]


def local_size(leaf: jax.Array) -> int:
    """Returns the number of values in the `local_shards` of an array, by its shape."""
    places = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    return len({str(index) for index in places.values()}) * int(np.prod(leaf.sharding.shard_shape(leaf.shape)))


def digest_of(state: TrainState) -> str:
    """Returns a hash of the trained parameters on this process' devices."""
    digest = xxh3_128()  # a fast one: peers wait for it
    for shard in local_shards(state.params):
        digest.update(np.asarray(shard.data).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def with_shards(state: TrainState, contents: Sequence[bytes | memoryview], *, consume: bool = False) -> TrainState:
    """Returns the state whose shards, in the order of `local_shards`, have these bytes.

    With `consume` the given state is deleted array by array, so that the devices never hold both.
    """
    remaining = iter(contents)

    def content(shard: LocalShard) -> np.ndarray:
        return np.frombuffer(next(remaining), shard.data.dtype).reshape(shard.data.shape)

    def replaced(leaf: jax.Array) -> jax.Array:
        array = with_values(leaf, content)
        if consume:
            leaf.delete()
        return array

    return replace(jax.tree.map(replaced, state.checkpoint_state), frozen=state.frozen)


def with_values(leaf: jax.Array, values: Callable[[LocalShard], np.ndarray]) -> jax.Array:
    """Returns an array like `leaf` of `values(shard)`, which is called for each of its `local_shards`."""
    by_index = {str(shard.index): values(shard) for shard in _unique(leaf)}
    parts = [jax.device_put(by_index[str(shard.index)], shard.device) for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
