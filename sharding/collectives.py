"""Gathers and reduce-scatters of whole groups of parameters, with a collective for each tensor and network level.

A tensor travels along the dim by which it is cut, so that nothing is copied. Three cases pack local shards into one
vector, which is gathered and sliced apart: codecs, which work on vectors, gloo (CPUs of several processes), where each
call costs, and flat gathers over several axes, whose chunks arrive in the devices' order. Everything here runs inside a
`shard_map` whose data axes are manual. Where `tensor` is automatic, a nested `shard_map` makes it manual around each
collective (XLA would replicate the payload over it otherwise).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import lcm, prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharding.coded import PLAIN, LevelCodecs, as_integers, coded_all_gather, coded_reduce_scatter, filled, levels
from sharding.mesh import DATA_AXES
from sharding.spec import Placement
from sharding.trees import Axes

PackedCollective = Callable[[jax.Array], jax.Array]  # packed shards to packed chunks, or back

BUCKET_BYTES = 512 * 2**20  # tensors packed into one collective: bounds the memory for packing
ALONE_BYTES = 3 * 2**19  # over gloo, from this size on a call costs less than the copies of packing


def all_gather_chunks(
    x: jax.Array, scope: Sequence[str], *, hierarchical: bool, to: str = "varying", codecs: LevelCodecs = PLAIN
) -> jax.Array:
    """Gathers local chunks `[N]` into `[p, N]`, chunks in CHUNK_ORDER of `scope`."""
    size = x.size
    for axes in levels(scope, hierarchical=hierarchical):
        codec, gather = codecs.over(axes), partial(lax.all_gather, axis_name=axes, to=to)
        x = coded_all_gather(x, axes, codec, to, codecs.tile_bytes) if codec else as_integers(gather, x)
    if not hierarchical and len(scope) > 1:  # the devices' order, outermost first: convert it to CHUNK_ORDER
        x = x.reshape(*(lax.axis_size(axis) for axis in reversed(scope)), size).transpose(
            *reversed(range(len(scope))), -1
        )
    return x.reshape(-1, size)


def reduce_scatter_chunks(
    x: jax.Array, scope: Sequence[str], *, hierarchical: bool, by_ring: bool = False, codecs: LevelCodecs = PLAIN
) -> jax.Array:
    """Sums `[p, N]` over the devices of `scope` and returns this device's chunk `[N]`: the gather, transposed."""
    size = x.shape[-1]
    x = x.reshape(*(lax.axis_size(axis) for axis in scope), size)
    if not hierarchical and len(scope) > 1:
        x = x.transpose(*reversed(range(len(scope))), -1)
    for axes in reversed(levels(scope, hierarchical=hierarchical)):
        rows = x.reshape(lax.axis_size(axes), -1)
        if codec := codecs.over(axes):
            x = coded_reduce_scatter(rows, axes, codec)
        else:
            x = ring_reduce_scatter(rows, axes) if by_ring else lax.psum_scatter(rows, axes)
    return x.reshape(size)


def ring_reduce_scatter(x: jax.Array, axes: Axes) -> jax.Array:
    """Sums `[n, N]` over the `n` devices of `axes` in a ring, and returns this device's row.

    It replaces `lax.psum_scatter`, which gloo (CPUs of several processes) implements by recursive halving and doubling.
    Two nodes of four devices then send a third more than the formula, the link is idle during additions, and inside a
    node it takes ten times as long (docs/results/emulated_links.md).
    """
    size, index = lax.axis_size(axes), lax.axis_index(axes)
    # `ppermute` numbers devices in the mesh's order, and from jax 0.11 on accepts its axes in no other order.
    # `axis_index` numbers them in the order of `axes`.
    outermost_first = sorted(range(len(axes)), key=lambda i: DATA_AXES.index(axes[i]))
    in_mesh = tuple(axes[i] for i in outermost_first)
    numbers = np.arange(size).reshape([lax.axis_size(axis) for axis in axes]).transpose(outermost_first)
    number_of = np.argsort(numbers.ravel()).tolist()
    ring = [(number_of[i], number_of[(i + 1) % size]) for i in range(size)]
    total = x[(index - 1) % size]
    for hop in range(2, size + 1):
        total = lax.ppermute(total, in_mesh, ring) + x[(index - hop) % size]
    return total


def vary(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Returns `x` `[...]` typed as differing between the devices of `axes`, so that autodiff sums nothing over them."""
    missing = tuple(axis for axis in axes if axis not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Tensors of one gather or reduce-scatter: their placements, and the scope over which they are sharded.

    Experts use the axes of the scope that do not hold them. If these are fewer, experts have separate collectives.
    """

    placements: tuple[Placement, ...]
    scope: Axes
    hierarchical: bool
    over_gloo: bool = False  # reduce-scatters are our ring implementation, and only small tensors are packed
    gather_codecs: LevelCodecs = PLAIN
    reduce_scatter_codecs: LevelCodecs = PLAIN
    tensor_is_manual: bool = False

    def gather(self, shards: Sequence[jax.Array], *, to: str = "varying") -> list[jax.Array]:
        """Returns the full tensors of local `shards` `[...]`.

        Tensors without a partitioned dim are returned unchanged.
        """
        collective = partial(all_gather_chunks, hierarchical=self.hierarchical, to=to)
        return self._exchange(_gather_packed, collective, partial(_gather_alone, to=to), self.gather_codecs, shards)

    def reduce_scatter(self, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns this device's shards of the sums of full `tensors` `[...]` over the scope.

        Unpartitioned tensors return whole sums.
        """
        if not self.scope:
            return list(tensors)
        collective = partial(reduce_scatter_chunks, hierarchical=self.hierarchical, by_ring=self.over_gloo)
        whole = [
            lax.psum(x, axes) if p.dim is None and (axes := p.not_held(self.scope)) else x
            for x, p in zip(tensors, self.placements, strict=True)
        ]
        return self._exchange(_scatter_packed, collective, _scatter_alone, self.reduce_scatter_codecs, whole)

    def all_reduce_then_slice(self, tensors: Sequence[jax.Array], over: Sequence[str]) -> list[jax.Array]:
        """Sums full `tensors` `[...]` over the axes `over`. Returns this device's shards (MiCS section 3.4)."""
        summed = [
            lax.psum(x, axes) if (axes := p.not_held(over)) else x
            for x, p in zip(tensors, self.placements, strict=True)
        ]
        return self.slice(summed)

    def slice(self, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns this device's shards `[...]` of full `tensors`, without communication."""
        return [
            split(x, p.dim, lax.axis_size(axes))[lax.axis_index(axes)]
            if p.dim is not None and (axes := p.not_held(self.scope))
            else x
            for x, p in zip(tensors, self.placements, strict=True)
        ]

    def put(self, tensors: Sequence[jax.Array], shards: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the full `tensors` `[...]` with this device's shards written to the positions that `slice` reads."""
        return [
            lax.dynamic_update_slice_in_dim(x, shard, lax.axis_index(axes) * shard.shape[p.dim], p.dim)
            if p.dim is not None and (axes := p.not_held(self.scope))
            else shard
            for x, shard, p in zip(tensors, shards, self.placements, strict=True)
        ]

    def _exchange(
        self,
        packed: Callable[..., tuple],
        collective: Callable[..., jax.Array],
        alone: Callable[..., tuple],
        codecs: LevelCodecs,
        xs: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Runs `alone`, or with a codec, over gloo, or flat `packed`, on buckets of partitioned tensors `[...]`.

        Tensors split over `tensor` or stages are packed separately. With a codec, vectors are sent separately and
        unencoded, because they are few and differ in magnitude from matrices (scales of norms are near 1, weights near
        0.02). So are frozen parameters, because their adapters are trained for the exact values. Each other tensor
        begins a new block of the codec. Tensors of different dtypes are sent separately, too.
        """
        out = list(xs)
        kinds: dict[tuple[Axes, bool, bool, bool, str], list[int]] = {}
        for i, p in enumerate(self.placements):
            if p.dim is not None and (scope := p.not_held(self.scope)):
                goes_coded = not (p.is_vector or p.frozen)
                coded = bool(codecs.used(scope, hierarchical=self.hierarchical)) and goes_coded
                kind = scope, p.tensor_dim is not None, p.staged, coded, xs[i].dtype.name
                kinds.setdefault(kind, []).append(i)
        for (scope, over_tensor, _, coded, _), members in kinds.items():
            used = codecs.used(scope, hierarchical=self.hierarchical)
            for bucket in buckets(members, [x.nbytes for x in xs], over_gloo=self.over_gloo):
                places = tuple(self.placements[i] for i in bucket)
                if coded or self.over_gloo or (len(scope) > 1 and not self.hierarchical):
                    exchange = partial(
                        packed,
                        places=places,
                        collective=partial(collective, scope=scope, codecs=codecs if coded else PLAIN),
                        degree=lax.axis_size(scope),
                        multiple=lcm(*(codec.multiple for codec in used)) if coded else 1,
                    )
                else:
                    exchange = partial(alone, places=places, scope=scope)
                if over_tensor and not self.tensor_is_manual:
                    specs = tuple(p.pspec((), stage=False) for p in places)
                    # Checkpointed, because a rematerialised layer would otherwise keep its constants, in a sharding
                    # that it cannot accept.
                    exchange = jax.checkpoint(
                        jax.shard_map(exchange, in_specs=specs, out_specs=specs, axis_names={"tensor"})
                    )
                for i, x in zip(bucket, exchange(*(xs[i] for i in bucket)), strict=True):
                    out[i] = x
        return out


def buckets(members: Sequence[int], nbytes: Sequence[int], *, over_gloo: bool) -> list[list[int]]:
    """Divides `members`, tensors of `nbytes`, into buckets to send together: as few collectives as memory allows."""
    alone_bytes = ALONE_BYTES if over_gloo else BUCKET_BYTES
    found = [[i] for i in members if nbytes[i] >= alone_bytes]
    room = -1
    for i in (i for i in members if nbytes[i] < alone_bytes):
        if nbytes[i] > room:
            found.append([])
            room = BUCKET_BYTES
        found[-1].append(i)
        room -= nbytes[i]
    return found


def _gather_alone(*shards: jax.Array, places: Sequence[Placement], scope: Axes, to: str) -> tuple[jax.Array, ...]:
    """Gathers each shard `[...]` along the dim by which it is cut."""
    full = list(shards)
    for axes in levels(scope, hierarchical=True):
        for i, p in enumerate(places):
            assert p.dim is not None
            full[i] = as_integers(partial(lax.all_gather, axis_name=axes, axis=p.dim, tiled=True, to=to), full[i])
    return tuple(full)


def _scatter_alone(*tensors: jax.Array, places: Sequence[Placement], scope: Axes) -> tuple[jax.Array, ...]:
    """Reduce-scatters each tensor `[...]` along the dim by which its shards are cut."""
    sums = list(tensors)
    for axes in reversed(levels(scope, hierarchical=True)):
        for i, p in enumerate(places):
            assert p.dim is not None
            sums[i] = lax.psum_scatter(sums[i], axes, scatter_dimension=p.dim, tiled=True)
    return tuple(sums)


def _gather_packed(
    *shards: jax.Array, places: Sequence[Placement], collective: PackedCollective, degree: int, multiple: int
) -> tuple[jax.Array, ...]:
    """Packs shards into `[N]`, gathers `[p, N]`, slices it apart and joins the chunks of each tensor."""
    del degree
    chunks = collective(_pack([x.reshape(1, -1) for x in shards], multiple)[0])
    pieces = slice_apart(chunks, [x.shape for x in shards], multiple)
    return tuple(join(piece, p.dim) for piece, p in zip(pieces, places, strict=True))


def _scatter_packed(
    *tensors: jax.Array, places: Sequence[Placement], collective: PackedCollective, degree: int, multiple: int
) -> tuple[jax.Array, ...]:
    """Splits tensors into chunks packed as `[p, N]`, reduce-scatters to `[N]` and slices that apart."""
    rows = [split(x, p.dim, degree) for x, p in zip(tensors, places, strict=True)]
    summed = collective(_pack([row.reshape(degree, -1) for row in rows], multiple))
    return tuple(slice_apart(summed, [row.shape[1:] for row in rows], multiple))


def _pack(rows: Sequence[jax.Array], multiple: int) -> jax.Array:
    """Concatenates rows `[n, N_i]`, each starting at a multiple of `multiple`."""
    return jnp.concatenate([filled(row, multiple) for row in rows], axis=1)


def slice_apart(packed: jax.Array, shapes: Sequence[tuple[int, ...]], multiple: int = 1) -> list[jax.Array]:
    """Cuts `[..., N]` into a piece `[..., *shape]` for each shape, each starting at a multiple of `multiple`."""
    sizes = [prod(shape) for shape in shapes]
    starts = accumulate((size + -size % multiple for size in sizes[:-1]), initial=0)
    return [
        packed[..., start : start + size].reshape(*packed.shape[:-1], *shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=True)
    ]


def split(x: jax.Array, dim: int | None, degree: int) -> jax.Array:
    """Cuts dim `dim` of a tensor into `degree` chunks: `[p, *shard]`."""
    assert dim is not None
    shape = x.shape
    x = x.reshape(*shape[:dim], degree, shape[dim] // degree, *shape[dim + 1 :])
    return jnp.moveaxis(x, dim, 0)


def join(chunks: jax.Array, dim: int | None) -> jax.Array:
    """Undoes `split`: `[p, *shard]` becomes the tensor."""
    assert dim is not None
    x = jnp.moveaxis(chunks, 0, dim)
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
