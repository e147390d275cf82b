"""`Route`: hop two with a codec, what goes through which collective.

    inside the node   reduce-scatter, f32: each device goes on with its part
    between nodes     encode, all-to-all, decode, sum in f32: the two-phase all-reduce's first half (1-bit Adam, qgZ)
    between nodes     encode the sum, all-gather, decode: the second half, not over axes that cut the optimizer's state
    inside the node   all-gather, f32

Each device keeps the error of what it encodes: what was handed on plus all that is kept is the sum of all inputs. One
residual serves both halves, because the device that encodes a sum adds that error to its own.
Everything here runs inside a `shard_map` whose axes are all manual.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from compression.statistics import Sent
from sharding.collectives import Codec, all_gather_chunks, all_to_all_rows, reduce_scatter_chunks
from sharding.mesh import inter_part, intra_part

Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Route:
    """The axes of hop two: `scatter`, in CHUNK_ORDER, cut what comes out; over `gather` all devices get the same."""

    codec: Codec
    scatter: Axes
    gather: Axes
    over_gloo: bool = False

    @property
    def intra(self) -> Axes:
        """The axes inside a node."""
        return intra_part(self.scatter) + intra_part(self.gather)

    @property
    def inter(self) -> Axes:
        """The axes between nodes: what crosses them is encoded."""
        return inter_part(self.scatter) + inter_part(self.gather)

    def exchange(self, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, Sent]:
        """Sums `x` `[d, N]`, d chunks over `scatter`, over all axes; returns this device's `[N]`, and what it keeps.

        What it keeps, `[d, N]`, is to be added to its next `x`: it makes up for what the two encodings lost. The
        values that a codec leaves out are counted in the first encoding, and taken to be as many in the second.
        """
        parts = self._parts(x)
        rows = reduce_scatter_chunks(parts, self.intra, hierarchical=True, by_ring=self.over_gloo)
        rows = rows.reshape(_size(self.inter), -1)
        first, second = jax.random.split(key)

        real = self._real(rows.shape, x.shape[-1])
        payload = self.codec.encode(rows, first, real)
        received = all_to_all_rows(payload, self.inter)
        total = reduce(jnp.add, [self.codec.decode(row) for row in received])  # a reduction would write all rows out
        decoded = self.codec.decode(payload)
        kept = rows - decoded
        payloads = [payload]

        whole = total
        if between := inter_part(self.gather):
            payload = self.codec.encode(total, second, real[lax.axis_index(self.inter)])
            payloads.append(payload)
            gathered = all_gather_chunks(payload, between, hierarchical=True, to="invarying")
            whole = self.codec.decode(gathered).reshape(-1)
            own = jnp.arange(len(rows))[:, None] == lax.axis_index(self.inter)
            kept += jnp.where(own, total - self.codec.decode(payload), 0)
        if inside := intra_part(self.gather):
            whole = all_gather_chunks(whole, inside, hierarchical=True, to="invarying").reshape(-1)

        mine = lax.axis_index(self.intra) if self.intra else 0
        kept = jnp.zeros_like(parts).at[mine].set(kept.reshape(-1))
        in_first = x.size / _size(self.intra)  # without what fills up; the mean of the devices
        num_values = in_first * (1 + (len(payloads) - 1) / _size(self.inter))
        share = jnp.count_nonzero(decoded) / in_first if self.codec.sparse else 1.0  # an f32 sum stops at 2**24
        sent = Sent(sum(payload.size for payload in payloads), num_values, num_values * share)
        return whole[: x.shape[-1]], self._chunks(kept, x.shape), sent

    def _parts(self, x: jax.Array) -> jax.Array:
        """Returns `[d, N]`, filled up, as `[devices of a node, nodes * n]`: chunks of chunks, one for each device."""
        full = _size(self.gather) * self.codec.multiple
        x = jnp.pad(x, ((0, 0), (0, -x.shape[-1] % full)))
        x = x.reshape(*self._grid, -1)
        return x.transpose(0, 2, 1, 3, 4).reshape(_size(self.intra), -1)

    def _real(self, shape: tuple[int, ...], size: int) -> jax.Array:
        """Returns which values of this device's rows `[nodes, n]` are of chunks `[N]`, and not what fills them up."""
        gather = self._grid[-1]
        inside = lax.axis_index(intra_part(self.gather)) if intra_part(self.gather) else 0
        part = inside * gather + jnp.arange(shape[0]) % gather
        return part[:, None] * shape[1] + jnp.arange(shape[1])[None] < size

    def _chunks(self, parts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Undoes `_parts`."""
        a, b, c, d = self._grid
        x = parts.reshape(a, c, b, d, -1).transpose(0, 2, 1, 3, 4)
        return x.reshape(shape[0], -1)[:, : shape[-1]]

    @property
    def _grid(self) -> tuple[int, int, int, int]:
        """How many devices cut a tensor: `scatter` inside and between nodes, `gather` inside and between nodes."""
        scatter, gather = self.scatter, self.gather
        return (
            _size(intra_part(scatter)),
            _size(inter_part(scatter)),
            _size(intra_part(gather)),
            _size(inter_part(gather)),
        )


def _size(axes: Sequence[str]) -> int:
    return prod(lax.axis_size(axis) for axis in axes)
