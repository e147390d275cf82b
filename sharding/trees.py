"""Names of the trees and lists of arrays that a step is about; a type checker sees `Any`."""

from collections.abc import Mapping
from typing import Any

import jax

PyTree = Any  # of arrays, or of whatever there is one of for each array
Params = Any  # the parameters by group, or what is like them; on a device, its shards of them
Grads = Any  # like Params
GradsR = Any  # like Params, `[R, ...]`: one for each replica, on whose devices alone it lies
Placements = Any  # like Params, of Placement
Shards = list[jax.Array]  # a device's, in the order of the tree's leaves
Axes = tuple[str, ...]  # of the mesh
Batch = Mapping[str, jax.Array]  # each [accum, rows, ...], rows over the data axes; of one micro-batch, [rows, ...]
Means = dict[str, jax.Array]  # `loss` and a model's auxiliary metrics of a step, by name
