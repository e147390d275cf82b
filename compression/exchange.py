"""Hop two as an optax transform: the mean of gradients `[R, ...]` over the replicas, with an optional codec."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from compression.by_config import make_codec
from compression.hop_two import HopTwo, Setup
from compression.route import Axes, Route
from compression.shards import Shards, not_finite, on_shards, own_copies
from compression.statistics import Sent, added, nothing_sent
from sharding.collectives import Codec, buckets, join, slice_apart, split
from sharding.hop_two_in_backward import Exchanged, HopTwoInBackward
from sharding.mesh import STAGE
from sharding.plan import ShardingPlan
from sharding.replicas import PerReplica
from sharding.spec import Placement

PyTree = Any


class ExchangeState(NamedTuple):
    """State of an exchange with a codec."""

    step: jax.Array  # int32 []: exchanges done
    residual: PerReplica  # each replica's encoding error, part of its next share of the mean; () without feedback
    sent: Sent


def exchange(
    plan: ShardingPlan, codec: Codec | None = None, *, error_feedback: bool = True
) -> optax.GradientTransformation:
    """Returns the transform from gradients `[R, ...]` to their mean over R, in the optimizer's scope.

    It is the first of the chain: downstream transforms see ordinary global arrays, so that their norms are correct.
    Where the optimizer's scope is wider than the gradients', it reduce-scatters over the difference and all-reduces
    over the remaining replica axes (MiCS section 3.4; docs/concepts.md: `2 (M/p) (R-1)/R` bytes per device).

    A codec encodes what crosses nodes (compression/route.py), except parameters with one dim per layer. Those are
    small, and their gradients differ in magnitude from those of matrices, with which they must not share a scale.
    `error_feedback` adds the encoding error to the next step's gradients (arXiv 1901.09847): the sum of all results,
    plus the residuals, is the sum of all gradients. A non-finite value makes the whole result non-finite; the
    downstream guard then skips the step and restores the residuals. Those of an exchange inside the backward pass have
    taken in the skipped gradients by then, and become zero: to restore them would take a second copy.
    """
    layout = plan.layout
    if codec is None:
        return _plain(plan)
    exchange_shards = partial(_exchange_shards, plan, codec)

    def init(params: PyTree) -> PyTree:
        replicas = layout.num_replicas
        zeros = jax.tree.map(lambda p: jnp.zeros((replicas, *p.shape), jnp.float32), params) if error_feedback else ()
        residual = PerReplica(zeros, combine="sum")
        return ExchangeState(step=jnp.zeros((), jnp.int32), residual=residual, sent=nothing_sent())

    @jax.named_scope("hop_two")
    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        del params
        if isinstance(updates, Exchanged):
            out = own_copies(plan, updates.grads_R)
            finite = jnp.isfinite(optax.tree.norm(out))
            kept_R = jax.tree.map(lambda x: jnp.where(finite, x, 0), updates.kept_R) if error_feedback else ()
            residual = replace(state.residual, tree=kept_R)
            return out, ExchangeState(step=state.step + 1, residual=residual, sent=Sent(*updates.counts))
        kept = (state.residual.tree,) if error_feedback else ()
        out, *kept, sent = on_shards(plan, exchange_shards, updates, *kept, replicated=state.step)
        residual = replace(state.residual, tree=kept[0] if error_feedback else ())
        return out, ExchangeState(step=state.step + 1, residual=residual, sent=sent)

    return optax.GradientTransformation(init, update)


def with_codec(name: str) -> HopTwo:
    """Returns the method that exchanges gradients with the codec called `name`."""

    def build(setup: Setup) -> optax.GradientTransformation:
        config = setup.compression
        return exchange(setup.plan, codec_of(setup), error_feedback=config.error_feedback)

    def in_backward(setup: Setup) -> HopTwoInBackward:
        plan, codec, feedback = setup.plan, codec_of(setup), setup.compression.error_feedback

        def exchange_group(
            placements: Sequence[Placement], xs: Shards, kept: Shards | None, key: jax.Array
        ) -> tuple[Shards, Shards | None, jax.Array]:
            xs = xs if kept is None else [x + k for x, k in zip(xs, kept, strict=True)]
            exchanged, counts = _exchange_all(plan, codec, placements, xs, key)
            sent = jnp.stack([sum(column, jnp.zeros(())) for column in zip(*counts, strict=True)])
            totals = [x.total for x in exchanged]
            if beyond := plan.layout.optimizer_beyond_gradients:
                # each device sees only its chunk: a sum that is not finite anywhere must not be finite in any
                whole = [jnp.where(jnp.isfinite(t).all(), x, jnp.nan) for x, t in zip(xs, totals, strict=True)]
                totals = plan.group(list(placements), beyond).put(whole, totals)
            return totals, [x.kept for x in exchanged] if feedback else None, sent

        def kept(state: ExchangeState) -> tuple[jax.Array, PyTree]:
            return state.step, state.residual.tree if feedback else None

        return HopTwoInBackward(kept=kept, exchange=exchange_group, num_counts=len(Sent._fields))

    def codec_of(setup: Setup) -> Codec:
        codec = make_codec(name, setup.compression, rounding=setup.compression.rounding)
        assert codec is not None
        return codec

    return HopTwo(name=name, build=build, in_backward=in_backward)


def _plain_in_backward(setup: Setup) -> HopTwoInBackward:
    """Returns the exchange of a group's sums as they are: reduce-scattered to the optimizer's scope, or all-reduced."""
    plan, layout = setup.plan, setup.plan.layout

    def exchange_group(
        placements: Sequence[Placement], xs: Shards, kept: Shards | None, key: jax.Array
    ) -> tuple[Shards, Shards | None, jax.Array]:
        del key
        beyond = layout.optimizer_beyond_gradients
        scattered = [i for i, p in enumerate(placements) if p.dim is not None and beyond]
        group = plan.group([placements[i] for i in scattered], beyond)
        chunks = group.reduce_scatter([xs[i] for i in scattered])
        if layout.all_reduced_axes:
            chunks = _packed_sums(chunks, layout.all_reduced_axes)
        rest = [i for i in range(len(xs)) if i not in scattered]
        out = dict(zip(rest, _packed_sums([xs[i] for i in rest], layout.replica_axes), strict=True))
        out |= dict(zip(scattered, group.put([xs[i] for i in scattered], chunks), strict=True))
        return [out[i] for i in range(len(xs))], kept, jnp.zeros(0)

    return HopTwoInBackward(kept=lambda state: (jnp.zeros((), jnp.int32), None), exchange=exchange_group)


def _packed_sums(xs: Shards, axes: Axes) -> Shards:
    """Returns the sums over `axes`, in one all-reduce."""
    if not xs:
        return []
    return slice_apart(lax.psum(jnp.concatenate([x.reshape(-1) for x in xs]), axes), [x.shape for x in xs])


NONE = HopTwo(
    name="none",
    build=lambda setup: exchange(setup.plan),
    in_backward=_plain_in_backward,
)
EXCHANGES = (NONE, *map(with_codec, ("bf16", "int8", "int4", "two_bit", "one_bit")))


def _sums(plan: ShardingPlan, placements: PyTree, xs: Shards) -> Shards:
    """Returns the uncompressed sums over the replicas, in the optimizer's scope."""
    group = plan.group(placements, plan.layout.optimizer_beyond_gradients, tensor_is_manual=True)
    axes = plan.layout.all_reduced_axes
    return [lax.psum(x, axes) if axes else x for x in group.reduce_scatter(xs)]


def _plain(plan: ShardingPlan) -> optax.GradientTransformation:
    """Returns the exchange without a codec."""
    layout = plan.layout

    def exchange_shards(replicated: tuple[()], grads_R: Shards) -> tuple[Shards, tuple[()]]:
        return _sums(plan, plan.placements, [x_R[0] / layout.num_replicas for x_R in grads_R]), replicated

    @jax.named_scope("hop_two")
    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        del params
        if isinstance(updates, Exchanged):
            return own_copies(plan, updates.grads_R), state
        if not layout.replica_axes:  # one replica: nothing to exchange, at most a local slice
            return plan.constrain(jax.tree.map(lambda x: x[0], updates), layout.optimizer), state
        return on_shards(plan, exchange_shards, updates)[0], state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


# ------------------------------------------------------------------------------------------------ with a codec


class Result(NamedTuple):
    """The result for one shard: its sum over the replicas, in the optimizer's scope, and this replica's residual."""

    total: jax.Array
    kept: jax.Array


def _exchange_shards(
    plan: ShardingPlan, codec: Codec, step: jax.Array, grads_R: Shards, *residual_R: Shards
) -> tuple[Any, ...]:
    """Exchanges this device's shards; with error feedback it takes and returns their residuals too."""
    placements = plan.group(plan.placements, ()).placements
    # this replica's share of the mean, plus its residual
    xs = [x_R[0].astype(jnp.float32) / plan.layout.num_replicas for x_R in grads_R]
    for kept_R in residual_R:
        xs = [x + kept[0] for x, kept in zip(xs, kept_R, strict=True)]
    exchanged, counts = _exchange_all(plan, codec, placements, xs, jax.random.fold_in(jax.random.key(0), step))
    out = [result.total.astype(g.dtype) for result, g in zip(exchanged, grads_R, strict=True)]
    kept = [result.kept[None] for result in exchanged]
    return out, *(kept for _ in residual_R), added(counts, plan.mesh.axis_names)


def _exchange_all(
    plan: ShardingPlan, codec: Codec, placements: Sequence[Placement], xs: Shards, key: jax.Array
) -> tuple[list[Result], list[Sent]]:
    """Returns the result for each shard, and the counts of each collective."""
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
    """Returns the results for the shards `members`, summed in f32, and the counts of each."""
    totals = _sums(plan, [placements[i] for i in members], [xs[i] for i in members])
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
    """Returns the results for the shards `members`, all sharded over `cut_by`, and the counts of each collective."""
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
