"""`ParamSpec`, the only declaration of a parameter, and `Placement`, the dims on which it is partitioned."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, Sharding
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from sharding.mesh import STAGE, divisors
from sharding.scopes import Layout
from sharding.trees import Axes, Placements, PyTree, Specs

# dims that the `tensor` axis splits (Megatron's choice); every other dim may only be partitioned
TENSOR_DIMS = ("mlp", "heads", "kv_heads", "vocab")
EXPERTS_DIM = "experts"  # divided over the scope `sharding.experts`, and never gathered


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """Shape, dtype and dim names of one parameter.

    `dims` names every dim of `shape` (in transformers `layers`, `embed`, `mlp`, `heads`, `kv_heads`, `vocab`,
    `position`,
    `token_type`, `norm`, `head`, `experts`). A stack of layers has `layers` first. `mlp`, `heads`, `kv_heads` and
    `vocab` may be split over the `tensor` axis, and `experts` over the experts' scope. `frozen`: no step changes it.
    `replicate` keeps a whole copy on every device of a partition group. Without it, only parameters with the dim `head`
    may stay whole.
    """

    shape: tuple[int, ...]
    dims: Axes
    dtype: DTypeLike = jnp.float32
    replicate: bool = False
    frozen: bool = False

    @property
    def stacked(self) -> bool:
        """Whether it is a stack of layers."""
        return "layers" in self.dims

    @property
    def by_expert(self) -> bool:
        """Whether it has an entry for each expert."""
        return EXPERTS_DIM in self.dims

    @property
    def is_vector(self) -> bool:
        """Whether the slice of a layer, and of an expert, has one dim, or none: scales and biases."""
        return len(self.shape) - self.stacked - self.by_expert < 2

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.dims):
            raise ValueError(f"a parameter of shape {self.shape} needs {len(self.shape)} dim names, not {self.dims}")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The dim of a parameter that is partitioned (`dim`) and the dim split over `tensor` (`tensor_dim`). None: neither.

    `stacked` if its first dim is `layers`, `staged` if that is divided over the stages of a pipeline. `by_expert` if it
    has a dim `experts`. Divided experts are placed separately: the axes `held` shard `expert_dim`, which is never
    gathered, and `dim` is partitioned over the other axes of a scope.
    """

    dim: int | None
    tensor_dim: int | None
    ndim: int
    stacked: bool = False
    staged: bool = False
    by_expert: bool = False
    expert_dim: int | None = None
    held: Axes = ()  # in CHUNK_ORDER
    frozen: bool = False
    padding: int = 0  # zeros at the end of `dim`, so that the widest scope divides it (sharding/padding.py)

    @property
    def is_vector(self) -> bool:
        """Whether the slice of a layer, and of an expert, has one dim, or none, as in `ParamSpec`."""
        return self.ndim - self.stacked - self.by_expert < 2

    def not_held(self, scope: Sequence[str]) -> Axes:
        """Returns the axes of `scope` over which it is gathered and reduced: all except the axes that hold experts."""
        return tuple(axis for axis in scope if axis not in self.held)

    def cut_by(self, scope: Sequence[str]) -> Axes:
        """Returns the axes of `scope` that shard it. Over the other axes its copies are equal."""
        return tuple(axis for axis in scope if self.dim is not None or axis in self.held)

    def pspec(self, scope: Sequence[str], *, tensor: bool = True, stage: bool = True) -> PartitionSpec:
        """Returns the spec under `scope` (axes, major first), without `tensor` or `stage` if these are False."""
        entries: list[str | Axes | None] = [None] * self.ndim
        held = tuple(axis for axis in scope if axis in self.held)
        for dim, axes in ((self.expert_dim, held), (self.dim, self.not_held(scope))):
            if dim is not None and axes:
                entries[dim] = axes[0] if len(axes) == 1 else axes
        if tensor and self.tensor_dim is not None:
            entries[self.tensor_dim] = "tensor"
        if stage and self.staged:
            entries[0] = STAGE
        return PartitionSpec(*entries)

    def without_layers(self) -> "Placement":
        """Returns the placement of one layer's slice of a stack."""
        names = "dim", "tensor_dim", "expert_dim", "ndim"
        dims = {name: n - 1 for name in names if (n := getattr(self, name)) is not None}
        return replace(self, **dims, stacked=False, staged=False)


def place(name: str, spec: ParamSpec, layout: Layout) -> Placement:
    """Returns a parameter's placement: partitioned on the first dim (never `layers`) that the widest scope divides.

    If it divides none, the dim that needs the least padding is padded. All three scopes partition the same dim, so that
    a change of scope only joins or splits chunks. A vector of a `head`'s size is kept whole if the scope does not
    divide it. Frozen parameters have only the parameters' scope. A matrix' first dim in TENSOR_DIMS goes to `tensor`,
    `layers` to the stages of a pipeline, the dim `experts` to the experts' scope.
    ValueError if no dim is left and the spec does not replicate, and for layers or experts that cannot be divided.
    """
    shape, ndim = layout.shape, len(spec.shape)
    staged = spec.stacked and shape.stage > 1
    if staged and spec.shape[0] % shape.stage:
        raise ValueError(
            f"mesh.stages={shape.stage} does not divide the {spec.shape[0]} layers; set it to one of "
            f"{divisors(spec.shape[0])}"
        )
    tensor_dim = None
    free = [i for i, dim in enumerate(spec.dims) if dim != "layers"]
    if shape.tensor > 1 and not spec.is_vector:
        tensor_dim = next((i for i in free if spec.dims[i] in TENSOR_DIMS), None)
        if tensor_dim is not None and spec.shape[tensor_dim] % shape.tensor:
            raise ValueError(
                f"{name}: dim {spec.dims[tensor_dim]}={spec.shape[tensor_dim]} is not a multiple of "
                f"mesh.tensor={shape.tensor}"
            )
    held = layout.experts if spec.by_expert else ()
    expert_dim = spec.dims.index(EXPERTS_DIM) if held else None
    if expert_dim is not None and spec.shape[expert_dim] % shape.size(held):
        raise ValueError(
            f"{name}: {spec.shape[expert_dim]} experts cannot be divided among the {shape.size(held)} shards of "
            f"sharding.experts; choose another sharding.experts, or in a new run a multiple of {shape.size(held)} for "
            "model.num_experts"
        )
    of_spec = {"ndim": ndim, "stacked": spec.stacked, "by_expert": spec.by_expert, "frozen": spec.frozen}
    whole = Placement(dim=None, tensor_dim=tensor_dim, staged=staged, expert_dim=expert_dim, held=held, **of_spec)
    widest = layout.parameters if spec.frozen else layout.optimizer
    degree = shape.size(whole.not_held(widest))
    if degree == 1 or spec.replicate:
        return whole
    paddings = {i: -spec.shape[i] % degree for i in free if i not in (tensor_dim, expert_dim) and spec.shape[i]}
    if "head" in spec.dims and all(paddings.values()):
        return whole
    if not paddings:
        raise ValueError(
            f"{name}: no dim is left to be cut into {degree} shards; choose a smaller scope, or declare the parameter "
            "with replicate=True"
        )
    dim = min(paddings, key=lambda i: paddings[i] / spec.shape[i])
    return replace(whole, dim=dim, padding=paddings[dim])


def has_dims(specs: Specs, dims: Sequence[str]) -> bool:
    """Whether any parameter in a tree of ParamSpecs has any of these dims."""
    return any(dim in dims for spec in jax.tree.leaves(specs, is_leaf=is_spec) for dim in spec.dims)


def place_all(specs: Specs, layout: Layout) -> Placements:
    """Returns the tree of Placements for a tree of ParamSpecs."""
    place_one = lambda path, spec: place(path_name(path), spec, layout)
    return jax.tree_util.tree_map_with_path(place_one, specs, is_leaf=is_spec)


def pspecs(placements: Placements, scope: Sequence[str], *, tensor: bool = True) -> PyTree:
    """Returns the tree of PartitionSpecs of parameters under a scope."""
    return jax.tree.map(lambda p: p.pspec(scope, tensor=tensor), placements, is_leaf=is_placement)


def is_stack(group: PyTree) -> bool:
    """Whether a group of parameters is a stack of layers: all of its Placements or ParamSpecs are stacked."""
    leaves = jax.tree.leaves(group, is_leaf=lambda x: isinstance(x, Placement | ParamSpec))
    return bool(leaves) and all(x.stacked for x in leaves)


def is_spec(x: object) -> bool:
    """Whether a node of a tree is a ParamSpec: the `is_leaf` for trees of ParamSpecs."""
    return isinstance(x, ParamSpec)


def is_placement(x: object) -> bool:
    """Whether a node of a tree is a Placement: the `is_leaf` for trees of Placements."""
    return isinstance(x, Placement)


def path_name(path: KeyPath, separator: str = "/") -> str:
    """Returns the name of a tree path as `layers/attention/query`. Keys without a text add nothing to it."""
    named = tuple(key for key in path if str(key))
    return jax.tree_util.keystr(named, simple=True, separator=separator)


def nbytes(x: jax.ShapeDtypeStruct, sharding: Sharding | None = None) -> int:
    """Returns the bytes of an array, or of one device's shard if a sharding is given."""
    return prod(sharding.shard_shape(x.shape) if sharding else x.shape) * x.dtype.itemsize
