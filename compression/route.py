"""`Route`: the collectives of the replica all-reduce with a codec.

    1. inside nodes    reduce-scatter in f32: each device continues with its part
    2. between nodes   encode, all-to-all, decode, sum in f32: first half of a two-phase all-reduce (1-bit Adam, qgZ)
    3. between nodes   encode the sum, all-gather, decode: second half, not over axes that shard the optimizer state
    4. inside nodes    all-gather in f32

Each device stores its encoding errors as a residual: the result plus all residuals is the sum of all inputs. One
residual serves both halves, because a device that encodes a sum adds the error to its own residual.
Everything here runs inside a `shard_map` whose axes are all manual.
"""

from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from compression.statistics import Sent
from sharding.coded import Codec, all_to_all_rows, gather_payload
from sharding.collectives import all_gather_chunks, reduce_scatter_chunks
from sharding.mesh import inter_part, intra_part
from sharding.trees import Axes


@dataclass(frozen=True, kw_only=True)
class Route:
    """Axes of the replica all-reduce; its result is sharded over `scatter`, in CHUNK_ORDER, and not over `gather`."""

    codec: Codec
    scatter: Axes
    gather: Axes
    over_gloo: bool = False
    tile_bytes: int = 1  # of gathered payloads

    @property
    def intra(self) -> Axes:
        """The axes inside a node."""
        return intra_part(self.scatter) + intra_part(self.gather)

    @property
    def inter(self) -> Axes:
        """The axes between nodes, over which values are encoded."""
        return inter_part(self.scatter) + inter_part(self.gather)

    def exchange(self, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, Sent]:
        """Sums `x` `[d, N]`, d chunks over `scatter`, over all axes; returns this device's chunk `[N]` and residual.

        The residual `[d, N]` is the error of both encodings; the caller adds it to the next `x`.
        """
        # 1. inside nodes, k devices each, on m nodes: n = d N / (k m) values, N padded
        parts = self._parts(x)  # [k, m n]
        rows = reduce_scatter_chunks(parts, self.intra, hierarchical=True, by_ring=self.over_gloo)  # [m n]
        rows = rows.reshape(lax.axis_size(self.inter), -1)  # [m, n], a row per node
        first, second = jax.random.split(key)

        # 2. between nodes: reduce-scatter of payloads
        real = self._real(rows.shape, x.shape[-1])  # [m, n]
        payload = self.codec.encode(rows, first, real)  # uint8 [m, bytes]
        received = all_to_all_rows(payload, self.inter)  # uint8 [m, bytes]: this node's row, from each node
        total = reduce(jnp.add, [self.codec.decode(row) for row in received])  # [n]; a reduction would write [m, n]
        kept = rows - self.codec.decode(payload)  # [m, n]
        payloads = [payload]

        # 3. between nodes: all-gather of payloads
        whole = total
        if between := inter_part(self.gather):
            payload = self.codec.encode(total, second, real[lax.axis_index(self.inter)])  # uint8 [bytes]
            payloads.append(payload)
            gathered = gather_payload(payload, between, "invarying", self.tile_bytes)  # uint8 [nodes, bytes]
            whole = self.codec.decode(gathered).reshape(-1)  # [nodes n]
            own = jnp.arange(len(rows))[:, None] == lax.axis_index(self.inter)
            kept += jnp.where(own, total - self.codec.decode(payload), 0)
        # 4. inside nodes: all-gather of values
        if inside := intra_part(self.gather):
            whole = all_gather_chunks(whole, inside, hierarchical=True, to="invarying").reshape(-1)  # [N], padded

        mine = lax.axis_index(self.intra) if self.intra else 0
        kept = jnp.zeros_like(parts).at[mine].set(kept.reshape(-1))  # [k, m n]
        in_first = x.size / lax.axis_size(self.intra)  # without padding; the mean over the devices
        num_values = in_first * (1 + (len(payloads) - 1) / lax.axis_size(self.inter))
        sent = Sent(sum(payload.size for payload in payloads), num_values, num_values)
        return whole[: x.shape[-1]], self._chunks(kept, x.shape), sent

    def _parts(self, x: jax.Array) -> jax.Array:
        """Returns `[d, N]`, padded, as `[devices per node, nodes * n]`: each chunk split further, a part per device."""
        full = lax.axis_size(self.gather) * self.codec.multiple
        x = jnp.pad(x, ((0, 0), (0, -x.shape[-1] % full)))
        x = x.reshape(*self._grid, -1)
        return x.transpose(0, 2, 1, 3, 4).reshape(lax.axis_size(self.intra), -1)

    def _real(self, shape: tuple[int, ...], size: int) -> jax.Array:
        """Returns which values of this device's rows `[nodes, n]` are real values of chunks `[N]`, not padding."""
        gather = self._grid[-1]
        inside = lax.axis_index(intra_part(self.gather)) if intra_part(self.gather) else 0
        part = inside * gather + jnp.arange(shape[0]) % gather
        return part[:, None] * shape[1] + jnp.arange(shape[1])[None] < size

    def _chunks(self, parts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `_parts`: returns `[d, N]`."""
        a, b, c, d = self._grid
        x = parts.reshape(a, c, b, d, -1).transpose(0, 2, 1, 3, 4)
        return x.reshape(shape[0], -1)[:, : shape[-1]]

    @property
    def _grid(self) -> tuple[int, int, int, int]:
        """The sizes of four groups of axes: `scatter` inside and between nodes, `gather` inside and between nodes."""
        scatter, gather = self.scatter, self.gather
        return (
            lax.axis_size(intra_part(scatter)),
            lax.axis_size(inter_part(scatter)),
            lax.axis_size(intra_part(gather)),
            lax.axis_size(inter_part(gather)),
        )
