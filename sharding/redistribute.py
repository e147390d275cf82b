"""Functions of whole tensors: each tensor is assembled on a device that holds one of its shards.

An all-to-all turns "each device has a shard of all" into "each device has some whole tensors". The function runs there,
and a second all-to-all turns the results into shards again. A tensor crosses each network level once in each direction:
`(d-1)/d` of the bytes of a device's shards, for the `d` devices of the level. Copies of a tensor on other nodes are
computed there again, so that nothing more is sent between nodes. Copies inside a node share the work, and gather the
results.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding.coded import all_to_all_levels
from sharding.collectives import buckets, join, slice_apart, split
from sharding.mesh import AXES, STAGE, intra_part
from sharding.padding import padded, unpadded
from sharding.plan import ShardingPlan
from sharding.spec import ParamSpec, Placement, place
from sharding.trees import Axes

Kind = Hashable
Stacks = list[jax.Array]
OfStacks = Callable[[Kind, jax.Array], jax.Array]  # (kind, stack `[n, *shape]`) -> stack, tensor by tensor


def on_whole_tensors(
    plan: ShardingPlan,
    function: OfStacks,
    specs: Sequence[ParamSpec],
    kinds: Sequence[Kind],
    stacks: Stacks,
    *,
    each: bool = False,
) -> Stacks:
    """Returns `function(kind, stack)` of each stack `[n, *shape]`. The function must keep shapes.

    The stacks are sharded like the parameters of `specs` under the optimizer's scope, and so are the results. Stacks of
    equal shape, placement and kind are merged. The devices that share the work get the same number of tensors of each
    kind. The difference is padded with zeros, which the function must accept. With `each` the stacks are `[R, n,
    *shape]`, with separate entries for each replica.
    """
    layout = plan.layout
    places = [place("a whole tensor", spec, layout) for spec in specs]
    # also for a single tensor, when vmap asks for the shape of a result
    stages = [STAGE if p.staged and x.shape[each] > 1 else None for p, x in zip(places, stacks, strict=True)]
    places = [p.without_layers() if p.stacked else p for p in places]
    own = (layout.replica_axes,) if each else ()
    stack_specs = [
        PartitionSpec(*own, stage, *p.pspec(layout.optimizer)) for stage, p in zip(stages, places, strict=True)
    ]

    def run(shards: Stacks) -> Stacks:
        if each:
            shards = [x[0] for x in shards]
        alike: dict[tuple[Hashable, ...], list[int]] = {}
        for i, x in enumerate(shards):
            alike.setdefault((places[i], x.shape[1:], x.dtype, kinds[i]), []).append(i)
        together: dict[tuple[Sharing, jnp.dtype], list[list[int]]] = {}
        for members in alike.values():
            sharing = _sharing(plan, places[members[0]], each=each)
            together.setdefault((sharing, shards[members[0]].dtype), []).append(members)
        out = list(shards)
        for (sharing, _), classes in together.items():
            nbytes = [sum(shards[i].nbytes for i in members) for members in classes]
            for bucket in buckets(range(len(classes)), nbytes, over_gloo=plan.over_gloo):
                parts = [classes[i] for i in bucket]
                done = sharing.run(
                    [partial(function, kinds[members[0]]) for members in parts],
                    [places[members[0]] for members in parts],
                    [jnp.concatenate([shards[i] for i in members]) for members in parts],
                )
                for members, x in zip(parts, done, strict=True):
                    ends = [*accumulate(len(shards[i]) for i in members)]
                    for i, stack in zip(members, jnp.split(x, ends[:-1]), strict=True):
                        out[i] = stack[None] if each else stack
        return out

    swap = jax.shard_map(run, mesh=plan.mesh, in_specs=(stack_specs,), out_specs=stack_specs)
    results = swap([padded(p, x) for p, x in zip(places, stacks, strict=True)])
    return [unpadded(p, x) for p, x in zip(places, results, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The axes that shard tensors, major first, and the axes inside the node over which tensors are replicated.

    The `tensor` axis comes first, then the scope in CHUNK_ORDER: axes inside the node before axes between nodes.
    """

    cut: Axes
    copies: Axes
    hierarchical: bool

    def run(
        self,
        functions: Sequence[Callable[[jax.Array], jax.Array]],
        placements: Sequence[Placement],
        shards: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Applies functions to whole tensors, given this device's shards `[n, *shard]`.

        Returns shards of the results.
        """
        copies, chunks = (lax.axis_size(axes) for axes in (self.copies, self.cut))
        filled = [jnp.pad(x, [(0, -len(x) % (copies * chunks)), *((0, 0) for _ in x.shape[1:])]) for x in shards]
        packed = jnp.concatenate([x.reshape(copies, chunks, -1) for x in filled], axis=-1)
        own = packed[lax.axis_index(self.copies)] if self.copies else packed[0]
        shapes = [(len(x) // (copies * chunks), *x.shape[1:]) for x in filled]
        pieces = slice_apart(self._swap(own), shapes)  # [chunks, tensors of this device, *shard]
        whole = [
            padded(p, function(unpadded(p, self._join(x, p))))
            for function, x, p in zip(functions, pieces, placements, strict=True)
        ]
        rows = [self._split(x, p).reshape(chunks, -1) for x, p in zip(whole, placements, strict=True)]
        back = self._swap(jnp.concatenate(rows, axis=-1))
        if self.copies:
            back = lax.all_gather(back, self.copies, to="invarying")
        found = slice_apart(back.reshape(copies * chunks, -1), shapes)
        return [x.reshape(-1, *x.shape[2:])[: len(old)] for x, old in zip(found, shards, strict=True)]

    def _swap(self, rows: jax.Array) -> jax.Array:
        """Sends row i of `[chunks, N]` to device i of `cut`. Returns the rows of all devices for this one."""
        if not self.cut:
            return rows
        by_level = all_to_all_levels(self.cut, hierarchical=self.hierarchical)  # the major axes are inside the node
        x = rows.reshape(*(lax.axis_size(axes) for axes in by_level), -1)
        for i, axes in enumerate(by_level):
            x = lax.all_to_all(x, axes, split_axis=i, concat_axis=i, tiled=True)
        return x.reshape(rows.shape)

    def _join(self, chunks: jax.Array, p: Placement) -> jax.Array:
        """Assembles tensors: `[chunks, n, *shard]` becomes `[n, *shape]`."""
        x = chunks
        if p.tensor_dim is not None:
            size = lax.axis_size("tensor")
            x = join(x.reshape(size, -1, *x.shape[1:]), 2 + p.tensor_dim)  # [chunks of the scope, n, ...]
        return x[0] if p.dim is None else join(x, 1 + p.dim)

    def _split(self, x: jax.Array, p: Placement) -> jax.Array:
        """Undoes `_join`: `[n, *shape]` becomes `[chunks, n, *shard]`."""
        tensor = 1 if p.tensor_dim is None else lax.axis_size("tensor")
        chunks = lax.axis_size(self.cut) // tensor
        x = x[None] if p.dim is None else split(x, 1 + p.dim, chunks)
        if p.tensor_dim is not None:
            x = split(x, 2 + p.tensor_dim, tensor)
            x = x.reshape(-1, *x.shape[2:])
        return x


def _sharing(plan: ShardingPlan, p: Placement, *, each: bool) -> Sharing:
    """Returns which axes shard tensors of a placement, and which axes inside a node replicate them.

    The devices that hold copies divide the work on them. Shards of experts are neither: each device works on its own.
    With `each`, tensors differ between replicas, so that replicas hold no copies.
    """
    layout = plan.layout
    tensor = ("tensor",) if p.tensor_dim is not None else ()
    cut = tensor + (p.not_held(layout.optimizer) if p.dim is not None else ())
    others = cut + p.held + (layout.replica_axes if each else ())
    copies = tuple(axis for axis in layout.shape.used(intra_part(AXES)) if axis not in others)
    return Sharing(cut=cut, copies=copies, hierarchical=layout.hierarchical)
