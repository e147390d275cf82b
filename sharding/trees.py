"""Types of the trees and lists of arrays in a step.

A type checker tells `Params`, `Grads`, `GradsR`, `Placements` and `Specs` apart; at run time each is a nested dict.
`jax.tree.map` returns any of them. `Params({...})` marks a dict.
"""

from collections.abc import Mapping
from typing import Any, NewType

import jax

PyTree = Any  # any pytree, such as a group of parameters, one layer, or an optimizer's state
Params = NewType("Params", Mapping[str, PyTree])  # the parameters by group; on a device, its shards
Grads = NewType("Grads", Mapping[str, PyTree])  # gradients or updates of parameters
GradsR = NewType("GradsR", Mapping[str, PyTree])  # one gradient per replica, `[R, ...]`, only on the replica's devices
Placements = NewType("Placements", Mapping[str, PyTree])  # a Placement of each parameter
Specs = NewType("Specs", Mapping[str, PyTree])  # a ParamSpec of each parameter
Shards = list[jax.Array]  # a device's shards, in the order of the tree's leaves
Axes = tuple[str, ...]  # mesh axes
Batch = Mapping[str, jax.Array]  # arrays [accum, rows, ...], rows over the data axes; for one micro-batch, [rows, ...]
Means = dict[str, jax.Array]  # `loss` and a model's auxiliary metrics of a step, by name
