"""SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706): local SGD sends the largest values, in two bits each.

    e <- decay e + d      d: this replica's outer gradient over R, of H inner steps; e: the residual, its unsent values
    send the largest |e| of each chunk, in two bits; e <- e - sent values; the outer gradient is the sum of all sent

The decaying residual takes the place of the outer momentum. Two bits encode the sign and one of two magnitudes: the
mean of the upper quarter of a chunk's magnitudes, and the mean of the rest. Replicas inside a node are first summed
in f32; each device then continues with its part. Parameters with one dim per layer are averaged without compression.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from compression.all_reduce import AllReduceMethod, Setup
from compression.exchange import by_groups
from compression.primitives import kinds, not_finite, sums
from compression.statistics import Sent
from configs.schema.codecs import SCALE_BYTES
from sharding.collectives import all_gather_chunks, buckets, reduce_scatter_chunks, slice_apart
from sharding.in_step_exchange import Exchange
from sharding.mesh import inter_part, intra_part
from sharding.plan import ShardingPlan
from sharding.spec import Placement
from sharding.trees import Axes, Shards

CHUNK = 4096  # an index in a chunk is 12 bits


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The division of `size` values into equal chunks; `count` values of each chunk are sent, a multiple of 8."""

    size: int
    density: float

    @property
    def number(self) -> int:
        """The number of chunks."""
        return -(-self.size // CHUNK)

    @property
    def length(self) -> int:
        """The length of a chunk; the last is padded with zeros."""
        return -(-self.size // self.number // 8) * 8

    @property
    def count(self) -> int:
        """The number of values sent per chunk."""
        return max(8, 8 * round(self.length * self.density / 8))

    @property
    def payload_bytes(self) -> int:
        """The bytes of all chunks: 12 bits of index and a sign bit per value, and two magnitudes per chunk."""
        return self.number * (self.count * 13 // 8 + 2 * SCALE_BYTES)

    def encode(self, x: jax.Array) -> jax.Array:
        """Returns `uint8 [payload_bytes]` of `f32 [size]`.

        Values are in the order of their magnitudes, so the position of a value determines which magnitude it gets.
        """
        chunks = jnp.pad(x, (0, self.number * self.length - self.size)).reshape(self.number, self.length)
        # without barriers XLA:CPU makes one slice of top_k's and those below, and sorts whole chunks: 80 times slower;
        # with one around both it ends with a failed check (jax 0.10.2)
        sizes, where = map(lax.optimization_barrier, lax.top_k(jnp.abs(chunks), self.count))
        signs = jnp.packbits(jnp.take_along_axis(chunks, where, axis=1) >= 0, axis=1)
        means = jnp.stack([part.mean(axis=1) for part in jnp.split(sizes, [self.count // 4], axis=1)], axis=1)
        first, second = where.reshape(self.number, -1, 2).transpose(2, 0, 1)  # two of 12 bits in three bytes
        indices = jnp.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], axis=-1).astype(jnp.uint8)
        parts = (lax.bitcast_convert_type(means, jnp.uint8), indices, signs)
        return jnp.concatenate([part.reshape(self.number, -1) for part in parts], axis=1).reshape(-1)

    def decode(self, payload: jax.Array) -> jax.Array:
        """Returns the values `f32 [size]` of a payload `uint8 [payload_bytes]`, zero where none was sent."""
        rows = payload.reshape(self.number, -1)
        means, indices, signs = jnp.split(rows, [2 * SCALE_BYTES, 2 * SCALE_BYTES + self.count * 3 // 2], axis=1)
        means = lax.bitcast_convert_type(means.reshape(self.number, 2, SCALE_BYTES), jnp.float32)
        high, middle, low = indices.reshape(self.number, -1, 3).astype(jnp.int32).transpose(2, 0, 1)
        where = jnp.stack([high << 4 | middle >> 4, (middle & 15) << 8 | low], axis=-1).reshape(self.number, -1)
        sizes = jnp.where(jnp.arange(self.count) < self.count // 4, means[:, :1], means[:, 1:])
        values = jnp.where(jnp.unpackbits(signs, axis=1) == 1, sizes, -sizes)
        chunks = jnp.zeros((self.number, self.length)).at[jnp.arange(self.number)[:, None], where].set(values)
        return chunks.reshape(-1)[: self.size]


def sparse(plan: ShardingPlan, *, density: float, decay: float) -> Exchange:
    """Returns the exchange of shards that sends a fraction of their values, and decays the residual of the others."""
    axes = plan.layout.replica_axes
    intra, inter = intra_part(axes), inter_part(axes)

    def exchange_group(
        placements: Sequence[Placement], xs: Shards, kept: Shards | None, key: jax.Array
    ) -> tuple[Shards, Shards, list[Sent]]:
        del key
        assert kept is not None
        vectors = [i for i, p in enumerate(placements) if p.is_vector]  # not encoded
        totals = dict(zip(vectors, sums(plan, [placements[i] for i in vectors], [xs[i] for i in vectors]), strict=True))
        left = {i: jnp.zeros_like(xs[i]) for i in vectors}
        counts = [Sent(4 * xs[i].size, xs[i].size, xs[i].size) for i in vectors]
        for members, _ in kinds(placements, plan.layout.gradients):
            poison = not_finite([xs[i] for i in members], axes)
            for bucket in buckets(members, [x.nbytes for x in xs], over_gloo=plan.over_gloo):
                waiting = [xs[i] + decay * kept[i] for i in bucket]
                found, unsent, sent = _exchange(waiting, intra, inter, density)
                totals |= {i: x + poison for i, x in zip(bucket, found, strict=True)}
                left |= dict(zip(bucket, unsent, strict=True))
                counts.append(sent)
        return [totals[i] for i in range(len(xs))], [left[i] for i in range(len(xs))], counts

    return exchange_group


def _exchange(xs: Shards, intra: Axes, inter: Axes, density: float) -> tuple[Shards, Shards, Sent]:
    """Returns the sums of the values sent by all devices of tensors `[...]`, their residuals, and the counts."""
    devices, shapes = lax.axis_size(intra), [x.shape for x in xs]
    rows = [jnp.pad(x.reshape(-1), (0, -x.size % devices)).reshape(devices, -1) for x in xs]
    chunks = [Chunks(size=row.shape[1], density=density) for row in rows]
    mine = reduce_scatter_chunks(jnp.concatenate(rows, axis=1), intra, hierarchical=True)
    parts = slice_apart(mine, [(c.size,) for c in chunks])
    payloads = [c.encode(part) for c, part in zip(chunks, parts, strict=True)]
    received = all_gather_chunks(jnp.concatenate(payloads), inter, hierarchical=True, to="invarying")
    pieces = slice_apart(received, [(c.payload_bytes,) for c in chunks])  # [nodes, payload_bytes]
    total = jnp.concatenate([reduce(jnp.add, map(c.decode, piece)) for c, piece in zip(chunks, pieces, strict=True)])
    kept = mine - jnp.concatenate([c.decode(payload) for c, payload in zip(chunks, payloads, strict=True)])
    whole = all_gather_chunks(total, intra, hierarchical=True, to="invarying")
    placed = jnp.zeros_like(whole).at[lax.axis_index(intra) if intra else 0].set(kept)

    def joined(rows: jax.Array) -> Shards:
        apart = slice_apart(rows, [(c.size,) for c in chunks])  # [devices, size]
        return [x.reshape(-1)[: xs[i].size].reshape(shapes[i]) for i, x in enumerate(apart)]

    num_values = sum(x.size for x in xs) / devices  # without padding
    sent = Sent(sum(c.payload_bytes for c in chunks), num_values, sum(c.number * c.count for c in chunks))
    return joined(whole), joined(placed), sent


def check_settings(sparsity: float, decay: float) -> None:
    """Raises ValueError if `sparsity` or `decay` is out of range."""
    if not 0 < sparsity < 1 or not 0 <= decay <= 1:
        raise ValueError(f"sparsity={sparsity} must be between 0 and 1, and decay={decay} from 0 to 1")


def method(sparsity: float = 0.999, decay: float = 0.95) -> AllReduceMethod:
    """Returns the method, for `register`: `sparsity` is the fraction of values that are not sent.

    The residual, the unsent values, is multiplied by `decay`. ValueError for settings out of range.
    """
    check_settings(sparsity, decay)

    def primitive(setup: Setup) -> Exchange:
        return sparse(setup.plan, density=1 - sparsity, decay=decay)

    return AllReduceMethod(
        name="sparse_loco", build=lambda setup: by_groups(setup.plan, primitive(setup)), primitive=primitive
    )
