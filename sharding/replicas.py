"""`PerReplica`: the part of a state that each replica keeps for itself, as arrays `[R, ...]`.

Its type alone says so. Whoever looks at a state by paths (shardings, checkpoints, snapshots, the planner) finds a
`ReplicaKey` in the path of each of its arrays; no name of a parameter can be taken for one.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import jax

from sharding.trees import PyTree

Combine = Literal["sum", "mean"]


@dataclass(frozen=True, kw_only=True)
class ReplicaKey:
    """The step of a tree path from a PerReplica to its tree."""

    combine: Combine
    label: str

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True)
class PerReplica:
    """A tree of arrays `[R, ...]`: entry r is known to replica r alone, and lies on its devices only.

    `combine` says what keeps its meaning on another number of replicas: the sum over R (of residuals: what all have
    still to send) or the mean (of copies that have drifted apart; of their counters, the largest). `label` is a name in
    the paths of its arrays, and so in checkpoints; without one the paths are those of the tree.
    """

    tree: PyTree
    _: KW_ONLY
    combine: Combine
    label: str = ""


jax.tree_util.register_pytree_with_keys(
    PerReplica,
    lambda x: ([(key := ReplicaKey(combine=x.combine, label=x.label), x.tree)], key),
    lambda key, children: PerReplica(*children, combine=key.combine, label=key.label),
)


def replica_key(path: Sequence[Any]) -> ReplicaKey | None:
    """Returns the step of a path that enters a PerReplica; None for an array that all replicas share."""
    return next((key for key in path if isinstance(key, ReplicaKey)), None)
