"""Padding of parameters whose partitioned dim the devices of a scope do not divide (`Placement.padding`).

Their stored arrays have zeros at the end of that dim, and so have their gradients and optimizer state. Models,
optimizers and files have the true shapes: the padding is cut off where a tensor is whole. A sign codec has no zero, and
may change the padding of a gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import KeyPath

from sharding.spec import Placement
from sharding.trees import PyTree


def padded(p: Placement, x: jax.Array) -> jax.Array:
    """Returns a tensor `[..., *shape]` with its padding."""
    if not p.padding:
        return x
    return jnp.pad(x, [(0, p.padding if dim == _padded_dim(p, x) else 0) for dim in range(x.ndim)])


def unpadded(p: Placement, x: jax.Array) -> jax.Array:
    """Returns a whole tensor `[..., *shape]` without its padding. Its transpose pads gradients with zeros."""
    if not p.padding:
        return x
    dim = _padded_dim(p, x)
    return lax.slice_in_dim(x, 0, x.shape[dim] - p.padding, axis=dim)


def _padded_dim(p: Placement, x: jax.Array) -> int:
    assert p.dim is not None
    return x.ndim - p.ndim + p.dim


def from_regions(like: jax.ShapeDtypeStruct, read: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
    """Returns an array `like` this, zero where the regions that `read` returns end before the padding."""
    assert like.sharding is not None
    shape = like.sharding.shard_shape(like.shape)

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        region = read(index)
        widths = [(0, n - m) for n, m in zip(shape, region.shape, strict=True)]
        return region if region.shape == shape else np.pad(region, widths)

    return jax.make_array_from_callback(like.shape, like.sharding, shard)


@dataclass(frozen=True)
class TrueShape:
    """The entry in a tree path that leads from a Padded to its array."""

    shape: tuple[int, ...]

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True)
class Padded:
    """An array to save without its padding, or its ShapeDtypeStruct to restore: `shape` is its shape in files."""

    array: jax.Array
    shape: tuple[int, ...]


jax.tree_util.register_pytree_with_keys(
    Padded,
    lambda x: ([(key := TrueShape(x.shape), x.array)], key),
    lambda key, children: Padded(next(iter(children)), key.shape),
)


def true_shape(path: KeyPath, x: jax.Array) -> tuple[int, ...]:
    """Returns the shape that an array at a tree path has in files."""
    return next((key.shape for key in path if isinstance(key, TrueShape)), tuple(x.shape))


def without_wrappers(tree: PyTree) -> PyTree:
    """Returns a tree with the arrays in place of each Padded."""
    is_padded = lambda x: isinstance(x, Padded)
    return jax.tree.map(lambda x: x.array if is_padded(x) else x, tree, is_leaf=is_padded)
