"""Hop two with a codec: what crosses nodes of a group of shards is encoded, but for vectors (compression/route.py)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from compression.hop_two import Primitive
from compression.route import Axes, Route
from compression.shards import Shards, not_finite
from compression.statistics import Sent
from compression.summed import sums
from sharding.coded import Codec
from sharding.collectives import buckets, join, slice_apart, split
from sharding.mesh import STAGE
from sharding.plan import ShardingPlan
from sharding.spec import Placement

PyTree = Any


def encoded(plan: ShardingPlan, codec: Codec, *, error_feedback: bool = True) -> Primitive:
    """Returns the exchange of shards with a codec, and their residuals with error feedback."""

    def exchange_group(
        placements: Sequence[Placement], xs: Shards, kept: Shards | None, key: jax.Array
    ) -> tuple[Shards, Shards | None, list[Sent]]:
        xs = xs if kept is None else [x + k for x, k in zip(xs, kept, strict=True)]
        exchanged, counts = _exchange_all(plan, codec, placements, xs, key)
        return [x.total for x in exchanged], [x.kept for x in exchanged] if error_feedback else None, counts

    def kept(state: Any) -> tuple[jax.Array, PyTree]:
        return state.step, state.residual.tree if error_feedback else None

    return Primitive(exchange=exchange_group, num_counts=len(Sent._fields), kept=kept)


class Result(NamedTuple):
    """The result for one shard: its sum over the replicas, in the optimizer's scope, and this replica's residual."""

    total: jax.Array
    kept: jax.Array


def _exchange_all(
    plan: ShardingPlan, codec: Codec, placements: Sequence[Placement], xs: Shards, key: jax.Array
) -> tuple[list[Result], list[Sent]]:
    """Returns the result for each shard `[...]`, and the counts of each collective."""
    # vectors are not encoded
    exchanged, counts = _exchange_plain(plan, placements, [i for i, p in enumerate(placements) if p.is_vector], xs)
    # all others are encoded; those sharded over the same axes share collectives
    for members, cut_by in _kinds(placements, plan.layout.gradients):
        found, sent = _exchange_encoded(plan, codec, placements, members, cut_by, xs, key)
        exchanged |= found
        counts += sent
    return [exchanged[i] for i in range(len(xs))], counts


def _exchange_plain(
    plan: ShardingPlan, placements: Sequence[Placement], members: Sequence[int], xs: Shards
) -> tuple[dict[int, Result], list[Sent]]:
    """Returns the results for the shards `[...]` numbered `members`, summed in f32, and the counts of each."""
    totals = sums(plan, [placements[i] for i in members], [xs[i] for i in members])
    exchanged = {i: Result(total, jnp.zeros_like(xs[i])) for i, total in zip(members, totals, strict=True)}
    return exchanged, [Sent(4 * xs[i].size, xs[i].size, xs[i].size) for i in members]


def _exchange_encoded(
    plan: ShardingPlan,
    codec: Codec,
    placements: Sequence[Placement],
    members: Sequence[int],
    cut_by: Axes,
    xs: Shards,
    key: jax.Array,
) -> tuple[dict[int, Result], list[Sent]]:
    """Returns the results for shards `[...]`, those of `members`, all cut by `cut_by`, and each collective's counts."""
    layout = plan.layout
    # if the optimizer's scope is wider, each device gets only its chunk of the sum
    scatters = bool(layout.optimizer_beyond_gradients) and placements[members[0]].dim is not None
    scatter = layout.optimizer_beyond_gradients if scatters else ()
    gather = layout.all_reduced_axes if scatters else layout.replica_axes
    route = Route(codec=codec, scatter=scatter, gather=gather, over_gloo=plan.over_gloo)
    # stochastic rounding differs between shards, but is the same for all copies of a shard
    key = jax.random.fold_in(key, members[0])
    key = jax.random.fold_in(key, lax.axis_index(layout.replica_axes + cut_by))
    poison = not_finite([xs[i] for i in members], layout.replica_axes)
    exchanged: dict[int, Result] = {}
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
            exchanged[i] = Result(x + poison, join(e, placements[i].dim) if scatters else e[0])
    return exchanged, counts


def _kinds(placements: Sequence[Placement], scope: Axes) -> list[tuple[list[int], Axes]]:
    """Groups the tensors to encode by the axes that shard them; those of a group can share collectives."""
    kinds: dict[tuple[bool, Axes], list[int]] = {}
    for i, p in enumerate(placements):
        if p.is_vector:
            continue
        axes = p.cut_by(scope) + (("tensor",) if p.tensor_dim is not None else ())
        axes += (STAGE,) if p.staged else ()
        kinds.setdefault((p.dim is not None, axes), []).append(i)
    return [(members, axes) for (_, axes), members in kinds.items()]
