"""The exchange of a group of shards over the replicas: unencoded, or encoded between nodes."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from compression.route import Route
from compression.statistics import Sent
from sharding.coded import Codec
from sharding.collectives import buckets, join, slice_apart, split
from sharding.in_step_exchange import Exchange
from sharding.mesh import STAGE
from sharding.plan import ShardingPlan
from sharding.spec import Placement
from sharding.trees import Axes, Shards

Results = dict[int, tuple[jax.Array, jax.Array]]  # by number of the shard: its sum, and this replica's residual


def summed(plan: ShardingPlan, *, packed: bool = False) -> Exchange:
    """Returns the exchange of unencoded shards: reduce-scattered to the optimizer's scope, or all-reduced.

    `packed` into one all-reduce: a layer's shards are small, and XLA does not combine their all-reduces in a loop. It
    does combine the all-reduces of all layers at once, except over gloo, where small shards are always packed: a ring's
    messages take a round trip each.
    """

    def exchange_group(
        placements: Sequence[Placement], xs: Shards, kept: Shards | None, key: jax.Array
    ) -> tuple[Shards, Shards | None, list[Sent]]:
        del key
        return sums(plan, placements, xs, packed=packed), kept, []

    return exchange_group


def sums(plan: ShardingPlan, placements: Sequence[Placement], xs: Shards, *, packed: bool = False) -> Shards:
    """Returns the sums over the replicas of shards `[...]`, as shards in the optimizer's scope."""
    layout, beyond = plan.layout, plan.layout.optimizer_beyond_gradients
    scattered = [i for i, p in enumerate(placements) if p.dim is not None and beyond]
    rest = [i for i in range(len(xs)) if i not in scattered]
    group = plan.group([placements[i] for i in scattered], beyond, tensor_is_manual=True)
    chunks = group.reduce_scatter([xs[i] for i in scattered])
    reduce = partial(_packed, over_gloo=plan.over_gloo) if packed or plan.over_gloo else _one_by_one
    if layout.all_reduced_axes:
        chunks = reduce(chunks, layout.all_reduced_axes)
    found = zip([*scattered, *rest], [*chunks, *reduce([xs[i] for i in rest], layout.replica_axes)], strict=True)
    return [x for _, x in sorted(found, key=lambda item: item[0])]


def _one_by_one(xs: Shards, axes: Axes) -> Shards:
    """Returns the sums over `axes` of tensors `[...]`."""
    return [lax.psum(x, axes) for x in xs]


def _packed(xs: Shards, axes: Axes, *, over_gloo: bool) -> Shards:
    """Returns the sums over `axes` of tensors `[...]`, in as few all-reduces as `buckets` allows."""
    found = dict[int, jax.Array]()
    for bucket in buckets(range(len(xs)), [x.nbytes for x in xs], over_gloo=over_gloo):
        total = lax.psum(jnp.concatenate([xs[i].reshape(-1) for i in bucket]), axes)
        found |= zip(bucket, slice_apart(total, [xs[i].shape for i in bucket]), strict=True)
    return [found[i] for i in range(len(xs))]


def encoded(plan: ShardingPlan, codec: Codec, *, error_feedback: bool = True) -> Exchange:
    """Returns the exchange of shards with a codec, but for vectors, and of residuals with error feedback."""

    def exchange_group(
        placements: Sequence[Placement], xs: Shards, kept: Shards | None, key: jax.Array
    ) -> tuple[Shards, Shards | None, list[Sent]]:
        xs = xs if kept is None else [x + k for x, k in zip(xs, kept, strict=True)]
        vectors = [i for i, p in enumerate(placements) if p.is_vector]  # not encoded
        totals = sums(plan, [placements[i] for i in vectors], [xs[i] for i in vectors])
        found: Results = {i: (total, jnp.zeros_like(xs[i])) for i, total in zip(vectors, totals, strict=True)}
        counts = [Sent(4 * xs[i].size, xs[i].size, xs[i].size) for i in vectors]
        for members, cut_by in kinds(placements, plan.layout.gradients):
            counts += _exchange_encoded(plan, codec, placements, members, cut_by, xs, key, found)
        out = [found[i] for i in range(len(xs))]
        return [total for total, _ in out], [kept for _, kept in out] if error_feedback else None, counts

    return exchange_group


def _exchange_encoded(
    plan: ShardingPlan,
    codec: Codec,
    placements: Sequence[Placement],
    members: Sequence[int],
    cut_by: Axes,
    xs: Shards,
    key: jax.Array,
    found: Results,
) -> list[Sent]:
    """Exchanges the shards `[...]` of `members`, all cut by `cut_by`, and puts the results into `found`.

    Returns the counts of each collective.
    """
    layout = plan.layout
    # if the optimizer's scope is wider, each device gets only its chunk of the sum
    scatters = bool(layout.optimizer_beyond_gradients) and placements[members[0]].dim is not None
    scatter = layout.optimizer_beyond_gradients if scatters else ()
    gather = layout.all_reduced_axes if scatters else layout.replica_axes
    route = Route(codec=codec, scatter=scatter, gather=gather, over_gloo=plan.over_gloo, tile_bytes=plan.tile_bytes)
    # stochastic rounding differs between shards, but is the same for all copies of a shard
    key = jax.random.fold_in(key, members[0])
    key = jax.random.fold_in(key, lax.axis_index(layout.replica_axes + cut_by))
    poison = not_finite([xs[i] for i in members], layout.replica_axes)
    counts = []
    for bucket in buckets(members, [x.nbytes for x in xs], over_gloo=plan.over_gloo):
        # pack into `[degree, N]`, exchange, slice apart
        degree = layout.shape.size(scatter)
        rows = [split(xs[i], placements[i].dim, degree) if scatters else xs[i][None] for i in bucket]
        packed = jnp.concatenate([row.reshape(degree, -1) for row in rows], axis=1)
        total, error, sent = route.exchange(packed, jax.random.fold_in(key, bucket[0]))
        counts.append(sent)
        shapes = [row.shape[1:] for row in rows]
        for i, x, e in zip(bucket, slice_apart(total, shapes), slice_apart(error, shapes), strict=True):
            found[i] = x + poison, join(e, placements[i].dim) if scatters else e[0]
    return counts


def kinds(placements: Sequence[Placement], scope: Axes) -> list[tuple[list[int], Axes]]:
    """Groups the tensors to encode by the axes that shard them; a group can share collectives."""
    found: dict[tuple[bool, Axes], list[int]] = {}
    for i, p in enumerate(placements):
        if not p.is_vector:
            axes = p.cut_by(scope) + ("tensor",) * (p.tensor_dim is not None) + (STAGE,) * p.staged
            found.setdefault((p.dim is not None, axes), []).append(i)
    return [(members, axes) for (_, axes), members in found.items()]


def not_finite(xs: Sequence[jax.Array], axes: Axes) -> jax.Array:
    """Returns f32 []: NaN if a value of `[...]` on a device of `axes` is not finite, else 0: a codec sends numbers."""
    bad = sum(jnp.sum(~jnp.isfinite(x), dtype=jnp.float32) for x in xs)
    return jnp.where(lax.psum(bad, axes) > 0, jnp.nan, 0.0)
