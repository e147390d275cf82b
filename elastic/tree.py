"""The state as Orbax stores it: a flat dict from path to array.

A path joins keys, attribute names and indices with dots (`params.layers.w`, `opt_state.0.mu.head`). NamedTuples,
dataclasses and optax's empty states therefore need no special code, and a checkpoint does not depend on their classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from elastic.manifest import Leaf
from runtime.files.json_objects import JsonObject
from sharding.padding import true_shape
from sharding.replicas import Combine, replica_key
from sharding.spec import nbytes, path_name
from sharding.trees import PyTree

_CHUNK_BYTES = 16 << 20
_LEAST_IN_FLIGHT_BYTES = 64 << 20


class Source(StrEnum):
    """Where a state was restored from."""

    CHECKPOINT = "checkpoint"
    MEMORY = "memory"


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A restored state, with its origin."""

    step: int
    state: PyTree  # the requested pytree, with arrays in place of shapes
    data: JsonObject  # the position in the data
    config: JsonObject  # the config of the run that saved it
    source: Source = Source.CHECKPOINT
    source_nodes: int = 0  # memory: nodes that held a part of the state
    nodes: int = 0  # memory: nodes of the run

    @property
    def source_text(self) -> str:
        """The source for a message, to follow "from"."""
        if self.source is Source.CHECKPOINT:
            return "its checkpoint"
        return f"memory ({self.source_nodes} of {self.nodes} node{'s' if self.nodes > 1 else ''} had it)"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """An array to restore. For `[R, ...]`, a row per replica, also how to adapt it to another number of replicas."""

    leaf: Leaf
    abstract: jax.ShapeDtypeStruct  # with a sharding
    combine: Combine | None  # None: without a row per replica

    def fits(self, saved: Leaf | None) -> bool:
        """Whether it can be restored from the saved array."""
        if saved is None or self.combine is None:
            return saved == self.leaf
        return (saved.path, saved.dtype, saved.shape[1:]) == (self.leaf.path, self.leaf.dtype, self.leaf.shape[1:])


def flatten_arrays(state: PyTree) -> tuple[dict[str, jax.Array], tuple[Leaf, ...]]:
    """Returns the arrays of `state` by path, and their descriptions. Raises ValueError for anything but a jax.Array."""
    flat = _flatten(state)
    arrays = {path: value for path, (_, value) in flat.items()}
    for path, value in arrays.items():
        if not isinstance(value, jax.Array) or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            hint = "jax.random.key_data(key)" if isinstance(value, jax.Array) else "jnp.asarray(value)"
            raise ValueError(
                f"a checkpoint holds jax.Arrays of numbers; {path} is a {type(value).__name__}: save {hint}"
            )
    return arrays, tuple(_describe(path, *leaf) for path, leaf in flat.items())


def flatten_abstract(state: PyTree) -> dict[str, Wanted]:
    """Returns the wanted arrays by path. Raises ValueError for a shape without a sharding."""
    wanted = {}
    for path, (keys, value) in _flatten(state).items():
        if getattr(value, "sharding", None) is None:
            raise ValueError(
                f"restore needs to know where {path} goes: give a jax.ShapeDtypeStruct with a sharding, not {value!r}"
            )
        key = replica_key(keys)
        wanted[path] = Wanted(leaf=_describe(path, keys, value), abstract=value, combine=key.combine if key else None)
    return wanted


def difference(folder: Path | str, saved: tuple[Leaf, ...], wanted: Mapping[str, Wanted]) -> str:
    """Returns the first parameter that differs between the checkpoint and the wanted state, "" if none does."""
    saved_by_path = {leaf.path: leaf for leaf in saved}
    for path in [*wanted, *saved_by_path]:
        in_checkpoint, asked = saved_by_path.get(path), wanted.get(path)
        if asked is None or not asked.fits(in_checkpoint):
            return (
                f"{folder} is a checkpoint of another model: {path} is {in_checkpoint or 'absent'} in the checkpoint"
                f" and {asked.leaf if asked else 'absent'} in this run; use its config, or another directory"
            )
    return ""


def save_arguments(arrays: dict[str, jax.Array]) -> ocp.args.CheckpointArgs:
    """Returns Orbax's arguments for saving `arrays`, with a chunk size that suits restoring onto another mesh.

    By default a chunk is a whole shard, and a device that needs a slice of it would read and decompress all of it.
    """
    stored = {path: array for path, array in arrays.items() if array.size}  # Orbax refuses arrays of size zero
    return ocp.args.PyTreeSave(stored, save_args={path: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for path in stored})


def cut_padding(folder: Path, arrays: Mapping[str, tuple[int, ...]]) -> None:
    """Gives arrays of an Orbax item their true shapes, by their paths; the values beyond are deleted."""
    for path, shape in arrays.items():
        store = {"driver": "ocdbt", "base": folder.as_uri(), "path": f"{path}/"}
        array = tensorstore.open({"driver": "zarr", "kvstore": store}).result()
        array.resize(exclusive_max=shape).result()


def load(folder: Path, wanted: Mapping[str, Wanted], saved: Sequence[Leaf]) -> list[jax.Array]:
    """Returns the arrays of `wanted`, in its order and with its shardings, from an Orbax item, which may have more.

    Data that is read but not yet on a device stays below a quarter of this process' shards, or the largest shard if it
    is larger. Arrays with a row per replica are adapted to the new number of replicas (`shared_out`).
    """
    saved_leaves = {leaf.path: leaf for leaf in saved}
    stored = {path: as_saved(x, saved_leaves[path]) for path, x in wanted.items() if x.abstract.size}
    restore_args = {  # not strict: padding, which is not in the file, becomes zero
        path: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype, strict=False)
        for path, x in stored.items()
    }
    limit_gb = _bytes_in_flight(stored) / 1e9  # Orbax multiplies by 10^9, a fraction is fine
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit_gb)  # pyright: ignore[reportArgumentType]
    with ocp.Checkpointer(handler) as reader:
        args = ocp.args.PyTreeRestore(item=stored, restore_args=restore_args, partial_restore=True)
        arrays = reader.restore(folder, args=args)
    return [shared_out(arrays[path], x) if path in stored else empty(x.abstract) for path, x in wanted.items()]


def as_saved(wanted: Wanted, saved: Leaf) -> jax.ShapeDtypeStruct:
    """Returns the wanted array with the saved number of rows per replica, sharded as far as this number allows."""
    x = wanted.abstract
    if wanted.combine is None or saved.shape[0] == x.shape[0]:
        return x
    assert isinstance(x.sharding, NamedSharding)
    first, *rest = tuple(x.sharding.spec) or (None,)
    try:
        NamedSharding(x.sharding.mesh, PartitionSpec(first)).shard_shape(saved.shape[:1])
    except ValueError:  # the new number of replicas does not divide the old one
        first = None
    sharding = NamedSharding(x.sharding.mesh, PartitionSpec(first, *rest))
    return jax.ShapeDtypeStruct((saved.shape[0], *x.shape[1:]), x.dtype, sharding=sharding)


def shared_out(array: jax.Array, wanted: Wanted) -> jax.Array:
    """Returns an array `[R, ...]` for another number of replicas R: equal rows that preserve the sum or the mean.

    Counters (integers) take the largest value, so that a step skipped by one replica is not averaged away.
    """
    abstract = wanted.abstract
    if array.shape == abstract.shape:
        return array
    assert wanted.combine is not None, wanted.leaf.path

    def share(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(abstract.dtype, jnp.integer):
            one = jnp.max(x, axis=0)
        else:
            one = jnp.sum(x, axis=0) / (abstract.shape[0] if wanted.combine == "sum" else x.shape[0])
        return jnp.broadcast_to(one.astype(abstract.dtype), abstract.shape)

    # one at a time: the collectives of two concurrent programs can deadlock on virtual CPU devices
    return jax.block_until_ready(jax.jit(share, out_shardings=abstract.sharding)(array))


def empty(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array of size zero with the sharding of `leaf`."""
    assert leaf.sharding is not None
    zeros = np.zeros(leaf.shape, leaf.dtype)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: zeros[index])


def _bytes_in_flight(wanted: dict[str, jax.ShapeDtypeStruct]) -> int:
    """Returns the number of bytes that a restore may hold in host memory, in addition to finished arrays."""
    sizes = [(nbytes(x, x.sharding), x.sharding.addressable_devices) for x in wanted.values() if x.sharding]
    total = sum(size * len(devices) for size, devices in sizes)
    largest = max((size for size, _ in sizes), default=0)
    return max(total // 4, largest + 1, _LEAST_IN_FLIGHT_BYTES)  # Orbax needs more than the largest shard


def _flatten(tree: PyTree) -> dict[str, tuple[KeyPath, PyTree]]:
    """Returns the leaves of a tree by path, each with its keys."""
    flat: dict[str, tuple[KeyPath, PyTree]] = {}
    for keys, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = path_name(keys, separator=".")
        if not path or path in flat:
            raise ValueError(f"two leaves of the state have the path {path!r}: rename one of them")
        flat[path] = keys, value
    return flat


def _describe(path: str, keys: KeyPath, x: Any) -> Leaf:
    return Leaf(path=path, shape=true_shape(keys, x), dtype=str(x.dtype))
