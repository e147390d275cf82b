"""Type names for the trees and lists of arrays in a step. A type checker sees `Any`."""

from collections.abc import Mapping
from typing import Any

import jax

PyTree = Any  # a pytree of arrays, or of one value per array
Params = Any  # the parameters by group, or a tree of the same structure; on a device, its shards
Grads = Any  # same structure as Params
GradsR = Any  # same structure as Params, `[R, ...]`: one gradient per replica, only on its devices
Placements = Any  # Placements in the structure of Params
Shards = list[jax.Array]  # a device's shards, in the order of the tree's leaves
Axes = tuple[str, ...]  # mesh axes
Batch = Mapping[str, jax.Array]  # arrays [accum, rows, ...], rows over the data axes; for one micro-batch, [rows, ...]
Means = dict[str, jax.Array]  # `loss` and a model's auxiliary metrics of a step, by name
