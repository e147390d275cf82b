"""`ParamSpec`, the one declaration of a parameter, and `Placement`, the dims on which it is partitioned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sharding.mesh import STAGE
from sharding.replicas import ReplicaKey
from sharding.scopes import Layout

PyTree = Any

# dims that the `tensor` axis splits (Megatron's choice); every other dim may only be partitioned
TENSOR_DIMS = ("mlp", "heads", "kv_heads", "vocab")


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """Shape, dtype and dim names of one parameter.

    `dims` names every dim of `shape` (of transformers `layers`, `embed`, `mlp`, `heads`, `kv_heads`, `vocab`,
    `position`, `token_type`, `norm`): a stack of layers has `layers` first; `mlp`, `heads`, `kv_heads` and `vocab` may
    be split over the `tensor` axis.
    `replicate` is the only way to keep a whole copy on every device of a partition group.
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    dtype: Any = jnp.float32
    replicate: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.dims):
            raise ValueError(f"a parameter of shape {self.shape} needs {len(self.shape)} dim names, not {self.dims}")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which dim of a parameter is partitioned (`dim`) and which over `tensor` (`tensor_dim`); None: neither.

    `stacked` if its first dim is `layers`, `staged` if that is cut over the stages of a pipeline.
    """

    dim: int | None
    tensor_dim: int | None
    ndim: int
    stacked: bool = False
    staged: bool = False

    @property
    def is_vector(self) -> bool:
        """Whether a layer's slice has one dim, or none."""
        return self.ndim - self.stacked < 2

    def pspec(self, scope: Sequence[str], *, tensor: bool = True, stage: bool = True) -> PartitionSpec:
        """Returns the spec under `scope` (axes, major first); without `tensor` or `stage` if those are False."""
        entries: list[Any] = [None] * self.ndim
        if self.dim is not None and scope:
            entries[self.dim] = tuple(scope) if len(scope) > 1 else scope[0]
        if tensor and self.tensor_dim is not None:
            entries[self.tensor_dim] = "tensor"
        if stage and self.staged:
            entries[0] = STAGE
        return PartitionSpec(*entries)

    def without_layers(self) -> "Placement":
        """Returns the placement of one layer's slice of a stack."""
        return Placement(
            dim=None if self.dim is None else self.dim - 1,
            tensor_dim=None if self.tensor_dim is None else self.tensor_dim - 1,
            ndim=self.ndim - 1,
        )


def place(name: str, spec: ParamSpec, layout: Layout) -> Placement:
    """Returns where a parameter is cut: the first dim (never `layers`) that the widest scope divides.

    All three scopes cut the same dim, so that going from one scope to another only joins or splits chunks. A matrix'
    first dim in TENSOR_DIMS goes to `tensor`, `layers` to the stages of a pipeline. ValueError if no dim can be
    partitioned and the spec does not replicate, and for layers that the stages do not divide.
    """
    shape, ndim, stacked = layout.shape, len(spec.shape), "layers" in spec.dims
    staged = stacked and shape.stage > 1
    if staged and spec.shape[0] % shape.stage:
        raise ValueError(
            f"mesh.stages={shape.stage} does not divide the {spec.shape[0]} layers; every stage has as many"
        )
    tensor_dim = None
    free = [i for i, dim in enumerate(spec.dims) if dim != "layers"]
    if shape.tensor > 1 and len(free) > 1:
        tensor_dim = next((i for i in free if spec.dims[i] in TENSOR_DIMS), None)
        if tensor_dim is not None and spec.shape[tensor_dim] % shape.tensor:
            raise ValueError(
                f"{name}: dim {spec.dims[tensor_dim]}={spec.shape[tensor_dim]} is not a multiple of "
                f"mesh.tensor={shape.tensor}"
            )
    degree = shape.size(layout.optimizer)  # the widest scope
    if degree == 1 or spec.replicate:
        return Placement(dim=None, tensor_dim=tensor_dim, ndim=ndim, stacked=stacked, staged=staged)
    dim = next((i for i in free if i != tensor_dim and spec.shape[i] and spec.shape[i] % degree == 0), None)
    if dim is None:
        sizes = ", ".join(f"{spec.dims[i]}={spec.shape[i]}" for i in free if i != tensor_dim) or "none left"
        raise ValueError(
            f"{name}: no dim can be cut into {degree} shards ({sizes}); choose sizes that {degree} divides, a smaller "
            f"scope, or declare the parameter with replicate=True"
        )
    return Placement(dim=dim, tensor_dim=tensor_dim, ndim=ndim, stacked=stacked, staged=staged)


def has_tensor_dims(specs: PyTree) -> bool:
    """Whether the `tensor` axis splits any parameter of a tree of ParamSpecs."""
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParamSpec))
    return any(dim in TENSOR_DIMS for spec in leaves for dim in spec.dims)


def place_all(specs: PyTree, layout: Layout) -> PyTree:
    """Returns the tree of Placements for a tree of ParamSpecs."""
    return jax.tree_util.tree_map_with_path(
        lambda path, spec: place(path_name(path), spec, layout), specs, is_leaf=lambda x: isinstance(x, ParamSpec)
    )


def pspecs(placements: PyTree, scope: Sequence[str], *, tensor: bool = True) -> PyTree:
    """Returns the tree of PartitionSpecs of parameters under a scope."""
    return jax.tree.map(lambda p: p.pspec(scope, tensor=tensor), placements, is_leaf=is_placement)


def is_placement(x: object) -> bool:
    """Whether a node of a tree is a Placement: the `is_leaf` of trees of them."""
    return isinstance(x, Placement)


def path_name(path: Sequence[Any], separator: str = "/") -> str:
    """Returns the name of a tree path as `layers/attention/query`; a PerReplica without a label adds nothing to it."""
    named = tuple(key for key in path if not isinstance(key, ReplicaKey) or key.label)
    return jax.tree_util.keystr(named, simple=True, separator=separator)
