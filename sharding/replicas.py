"""`PerReplica`: the part of a state that differs between replicas, as arrays `[R, ...]`.

Only its type marks this part. Code that inspects a state by paths (shardings, checkpoints, snapshots, the planner)
finds a `ReplicaKey` in the path of each of its arrays, which no parameter's name can equal.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

import jax
from jax.tree_util import KeyPath

from sharding.trees import PyTree

Combine = Literal["sum", "mean"]


@dataclass(frozen=True, kw_only=True)
class ReplicaKey:
    """The entry in a tree path that leads from a PerReplica to its tree."""

    combine: Combine
    label: str

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True)
class PerReplica:
    """A tree of arrays `[R, ...]`. Entry r belongs to replica r, and is stored only on its devices.

    `combine` states which quantity keeps its meaning for another number of replicas. It is the sum over R for residuals
    (the total that all replicas have still to send), or the mean for copies that have drifted apart (the largest value
    for their counters). `label` is a name in the paths of its arrays, and so in checkpoints. Without a label the paths
    are the tree's.
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


def replica_key(path: KeyPath) -> ReplicaKey | None:
    """Returns the path's entry that leads into a PerReplica, or None for an array that all replicas share."""
    return next((key for key in path if isinstance(key, ReplicaKey)), None)
