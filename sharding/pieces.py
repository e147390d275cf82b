"""Cuts tensors for an exchange in the micro-steps: a part of each tensor in a step, a piece of it in a micro-step.

All trees contain a device's shards, by group of parameters. Shards are flattened and cut: `[...]` into `[count, N]`. In
the groups `stacks` each layer is cut: `[L, ...]` into `[L, count, N]`. Sizes that do not divide are padded with zeros.
"""

from collections.abc import Callable, Collection
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from sharding.trees import PyTree

StackNames = Collection[str]  # names of groups


def cut(stacks: StackNames, tree: PyTree, count: int) -> PyTree:
    """Returns the tensors as `count` rows each: `[count, N]`, of a stack `[L, count, N]`."""
    return _by_group(stacks, partial(_cut, count=count), tree)


def joined(stacks: StackNames, rows: PyTree, like: PyTree) -> PyTree:
    """Undoes `cut`: `[count, N]` becomes tensors `like` these."""
    return _by_group(stacks, lambda x, like, axis: _joined(x, like.shape, axis), rows, like)


def part_of(stacks: StackNames, tree: PyTree, i: jax.Array, parts: int) -> PyTree:
    """Returns part `i` of each tensor: `[N]`, of a stack `[L, N]`."""

    def part(x: jax.Array, axis: int) -> jax.Array:
        return lax.dynamic_index_in_dim(_cut(x, axis, parts), i, axis, keepdims=False)

    return _by_group(stacks, part, tree)


def with_part(stacks: StackNames, tree: PyTree, part: PyTree, i: jax.Array, parts: int) -> PyTree:
    """Returns the tensors with their part `i`, `[N]` or `[L, N]`, replaced."""

    def put(x: jax.Array, part: jax.Array, axis: int) -> jax.Array:
        rows = jnp.expand_dims(part, axis)
        if parts > 1:  # a choice for each element, which XLA makes where the result is used
            here = (jnp.arange(parts) == i).reshape([1] * axis + [parts, 1])
            rows = jnp.where(here, rows, _cut(x, axis, parts))
        return _joined(rows, x.shape, axis)

    return _by_group(stacks, put, tree, part)


def is_in_part(stacks: StackNames, tree: PyTree, i: jax.Array, parts: int) -> PyTree:
    """Returns which elements are in part `i`: bools like the tensors `[...]`."""
    nowhere = jax.tree.map(lambda x: jnp.zeros(x.shape, bool), tree)
    here = jax.tree.map(jnp.ones_like, part_of(stacks, nowhere, i, parts))
    return with_part(stacks, nowhere, here, i, parts)


def _by_group(stacks: StackNames, function: Callable[..., jax.Array], tree: PyTree, *others: PyTree) -> PyTree:
    """Maps `function(leaf, ..., axis=...)`, where `axis` is the axis of the rows; None stays None."""
    return tree and {
        name: jax.tree.map(partial(function, axis=int(name in stacks)), group, *(other[name] for other in others))
        for name, group in tree.items()
    }


def _cut(x: jax.Array, axis: int, count: int) -> jax.Array:
    flat = x.reshape(*x.shape[:axis], -1)
    flat = jnp.pad(flat, [(0, 0)] * axis + [(0, -flat.shape[-1] % count)])
    return flat.reshape(*x.shape[:axis], count, -1)


def _joined(rows: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    return rows.reshape(*shape[:axis], -1)[..., : prod(shape[axis:])].reshape(shape)
