"""Gathers and reduce-scatters of whole groups of parameters: one collective a network level, however many tensors.

Local shards are packed into one vector, gathered, and sliced apart, while the parameters themselves stay separate
arrays. Everything here runs inside a `shard_map` whose data axes are manual. Where `tensor` is automatic, a nested
`shard_map` makes it manual around each collective (XLA would replicate the payload over it otherwise).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from sharding.mesh import INTER_AXES
from sharding.spec import Placement

Collective = Callable[[jax.Array], jax.Array]  # packed shards to packed chunks, or back

BUCKET_BYTES = 512 * 2**20  # tensors packed into one collective: bounds the memory that packing takes
ALONE_BYTES = 3 * 2**19  # over gloo, from here on a call costs less than the copies of packing


def levels(scope: Sequence[str], *, hierarchical: bool) -> list[tuple[str, ...]]:
    """Returns the axes that each collective of a gather crosses, in order.

    Hierarchical (MiCS section 3.3): between nodes first, then inside the node. Flat: all at once.
    """
    inter = tuple(axis for axis in scope if axis in INTER_AXES)
    intra = tuple(axis for axis in scope if axis not in INTER_AXES)
    if hierarchical:
        return [axes for axes in (inter, intra) if axes]
    return [inter[::-1] + intra[::-1]] if scope else []


def all_gather_chunks(x: jax.Array, scope: Sequence[str], *, hierarchical: bool, to: str = "varying") -> jax.Array:
    """Gathers local chunks `[N]` into `[p, N]`, chunks in CHUNK_ORDER of `scope`.

    Sixteen-bit floats travel as integers: XLA may not widen those (CPU), nor move a conversion across the gather.
    """
    if x.dtype == jnp.bfloat16:
        gathered = all_gather_chunks(lax.bitcast_convert_type(x, jnp.uint16), scope, hierarchical=hierarchical, to=to)
        return lax.bitcast_convert_type(gathered, x.dtype)
    size = x.size
    for axes in levels(scope, hierarchical=hierarchical):
        x = lax.all_gather(x, axes, to=to)
    if not hierarchical and len(scope) > 1:  # devices' order, outermost first: turn it into CHUNK_ORDER
        x = x.reshape(*(lax.axis_size(axis) for axis in reversed(scope)), size).transpose(
            *reversed(range(len(scope))), -1
        )
    return x.reshape(-1, size)


def reduce_scatter_chunks(
    x: jax.Array, scope: Sequence[str], *, hierarchical: bool, by_ring: bool = False
) -> jax.Array:
    """Sums `[p, N]` over the devices of `scope` and returns this device's chunk `[N]`: the gather, transposed."""
    size = x.shape[-1]
    x = x.reshape(*(lax.axis_size(axis) for axis in scope), size)
    if not hierarchical and len(scope) > 1:
        x = x.transpose(*reversed(range(len(scope))), -1)
    for axes in reversed(levels(scope, hierarchical=hierarchical)):
        rows = x.reshape(prod(lax.axis_size(axis) for axis in axes), -1)
        x = ring_reduce_scatter(rows, axes) if by_ring else lax.psum_scatter(rows, axes)
    return x.reshape(size)


def ring_reduce_scatter(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sums `[n, N]` over the `n` devices of `axes` and returns this device's row: a sum travels once around the ring.

    What `lax.psum_scatter` should be. Gloo's (CPUs of several processes) halves and doubles: two nodes of four send a
    third more than the formula, the link is idle while it adds, and inside a node it takes ten times as long
    (docs/performance.md).
    """
    size, index = lax.axis_size(axes), lax.axis_index(axes)
    ring = [(i, (i + 1) % size) for i in range(size)]
    total = x[(index - 1) % size]
    for hop in range(2, size + 1):
        total = lax.ppermute(total, axes, ring) + x[(index - hop) % size]
    return total


def vary(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Returns `x` typed as differing between the devices of `axes`, so that autodiff sums nothing over them."""
    missing = tuple(axis for axis in axes if axis not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tensors that travel together: their placements and the scope over which their shards are cut."""

    placements: tuple[Placement, ...]
    scope: tuple[str, ...]
    hierarchical: bool
    over_gloo: bool = False  # reduce-scatters are rings of our own, and only small tensors are packed
    tensor_is_manual: bool = False

    @property
    def _degree(self) -> int:
        return prod(lax.axis_size(axis) for axis in self.scope)

    def gather(self, shards: Sequence[jax.Array], *, to: str = "varying") -> list[jax.Array]:
        """Returns the full tensors of local `shards`; those without a partitioned dim come back as they are."""
        collective = partial(all_gather_chunks, scope=self.scope, hierarchical=self.hierarchical, to=to)
        return self._exchange(_gather_packed, collective, shards)

    def reduce_scatter(self, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns this device's shards of the sums of full `tensors` over the scope; unpartitioned ones, their sums."""
        if not self.scope:
            return list(tensors)
        collective = partial(
            reduce_scatter_chunks, scope=self.scope, hierarchical=self.hierarchical, by_ring=self.over_gloo
        )
        whole = [lax.psum(x, self.scope) if p.dim is None else x for x, p in zip(tensors, self.placements, strict=True)]
        return self._exchange(_scatter_packed, collective, whole)

    def all_reduce_then_slice(self, tensors: Sequence[jax.Array], over: Sequence[str]) -> list[jax.Array]:
        """Sums full `tensors` over the axes `over`, returns this device's shards: MiCS section 3.4's alternative."""
        return self.slice([lax.psum(x, tuple(over)) for x in tensors] if over else tensors)

    def slice(self, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns this device's shards of full `tensors`, without communication."""
        return [
            x if p.dim is None or not self.scope else split(x, p.dim, self._degree)[lax.axis_index(self.scope)]
            for x, p in zip(tensors, self.placements, strict=True)
        ]

    def _exchange(
        self, packed: Callable[..., tuple], collective: Collective, xs: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Runs `packed` on buckets of the partitioned tensors; those split over `tensor` travel apart."""
        out = list(xs)
        for over_tensor in (False, True) if self.scope else ():
            members = [
                i
                for i, p in enumerate(self.placements)
                if p.dim is not None and (p.tensor_dim is not None) == over_tensor
            ]
            for bucket in _buckets(members, [x.nbytes for x in xs], ALONE_BYTES if self.over_gloo else BUCKET_BYTES):
                places = tuple(self.placements[i] for i in bucket)
                exchange = partial(packed, places=places, collective=collective, degree=self._degree)
                if over_tensor and not self.tensor_is_manual:
                    specs = tuple(p.pspec(()) for p in places)
                    exchange = jax.shard_map(exchange, in_specs=specs, out_specs=specs, axis_names={"tensor"})
                for i, x in zip(bucket, exchange(*(xs[i] for i in bucket)), strict=True):
                    out[i] = x
        return out


def _buckets(members: Sequence[int], nbytes: Sequence[int], alone_bytes: int) -> list[list[int]]:
    """Cuts `members` into runs of at most BUCKET_BYTES; tensors of `alone_bytes` or more are alone."""
    buckets = [[i] for i in members if nbytes[i] >= alone_bytes]
    room = -1
    for i in (i for i in members if nbytes[i] < alone_bytes):
        if nbytes[i] > room:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(i)
        room -= nbytes[i]
    return buckets


def _gather_packed(
    *shards: jax.Array, places: Sequence[Placement], collective: Collective, degree: int
) -> tuple[jax.Array, ...]:
    """Packs shards into `[N]`, gathers `[p, N]`, slices it apart and joins the chunks of each tensor."""
    del degree
    chunks = collective(jnp.concatenate([x.reshape(-1) for x in shards]))
    pieces = _slice_apart(chunks, [x.shape for x in shards])
    return tuple(join(piece, p.dim) for piece, p in zip(pieces, places, strict=True))


def _scatter_packed(
    *tensors: jax.Array, places: Sequence[Placement], collective: Collective, degree: int
) -> tuple[jax.Array, ...]:
    """Splits tensors into chunks packed as `[p, N]`, reduce-scatters to `[N]` and slices that apart."""
    rows = [split(x, p.dim, degree) for x, p in zip(tensors, places, strict=True)]
    summed = collective(jnp.concatenate([row.reshape(degree, -1) for row in rows], axis=1))
    return tuple(_slice_apart(summed, [row.shape[1:] for row in rows]))


def _slice_apart(packed: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Cuts `[..., N]` into a piece `[..., *shape]` for each shape."""
    ends = list(accumulate(prod(shape) for shape in shapes))
    starts = [0, *ends[:-1]]
    return [
        packed[..., start:end].reshape(*packed.shape[:-1], *shape)
        for start, end, shape in zip(starts, ends, shapes, strict=True)
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
