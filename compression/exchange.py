"""Hop two as an optax transform: the mean of gradients `[R, ...]` over the replicas, with an optional codec."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from compression.by_config import make_codec
from compression.hop_two import HopTwo, Primitive, Setup
from compression.route import Axes, Route
from compression.shards import Shards, not_finite, on_shards, own_copies
from compression.statistics import Sent, added, nothing_sent
from sharding.collectives import Codec, buckets, join, slice_apart, split
from sharding.hop_two import Exchanged
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
) -> optax.GradientTransformationExtraArgs:
    """Returns the transform from gradients `[R, ...]` to their mean over R, in the optimizer's scope.

    It is the first of the chain: downstream transforms see ordinary global arrays, so that their norms are correct.
    Where the optimizer's scope is wider than the gradients', it reduce-scatters over the difference and all-reduces
    over the remaining replica axes (MiCS section 3.4; docs/concepts.md: `2 (M/p) (R-1)/R` bytes per device).

    A codec encodes what crosses nodes (compression/route.py), except parameters with one dim per layer. Those are
    small, and their gradients differ in magnitude from those of matrices, with which they must not share a scale.
    `error_feedback` adds the encoding error to the next step's gradients (arXiv 1901.09847): the sum of all results,
    plus the residuals, is the sum of all gradients. A non-finite value makes the whole result non-finite: the step is
    skipped, and the residuals stay. Those of an exchange in the micro-steps have taken in the skipped gradients by
    then, and become zero.
    """
    layout, with_state = plan.layout, codec is not None
    primitive = encoded(plan, codec, error_feedback=error_feedback) if codec else summed(plan)

    def init(params: PyTree) -> PyTree:
        if not with_state:
            return optax.EmptyState()
        zeros = jax.tree.map(lambda p: jnp.zeros((layout.num_replicas, *p.shape), jnp.float32), params)
        residual = PerReplica(zeros if error_feedback else (), combine="sum")
        return ExchangeState(step=jnp.zeros((), jnp.int32), residual=residual, sent=nothing_sent())

    def following(state: Any, kept_R: PyTree, sent: Sent) -> PyTree:
        if not with_state:
            return state
        residual = replace(state.residual, tree=() if kept_R is None else kept_R)
        return ExchangeState(step=state.step + 1, residual=residual, sent=sent)

    def exchange_shards(done: jax.Array, grads_R: Shards, *kept_R: Shards) -> tuple[Any, ...]:
        # this replica's share of the mean
        shares = [x_R[0].astype(jnp.float32) / layout.num_replicas for x_R in grads_R]
        kept = [x_R[0] for x_R in kept_R[0]] if kept_R else None
        key = jax.random.fold_in(jax.random.key(0), done)
        totals, kept, counts = primitive.exchange(plan.group(plan.placements, ()).placements, shares, kept, key)
        out = [total.astype(g.dtype) for total, g in zip(totals, grads_R, strict=True)]
        return out, *([x[None] for x in kept or []] for _ in kept_R), added(counts, plan.mesh.axis_names)

    @jax.named_scope("hop_two")
    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, *, exchanged: Exchanged | None = None, **_: Any
    ) -> tuple[PyTree, PyTree]:
        del params
        if exchanged:
            out = own_copies(plan, exchanged.mean_R)
            finite = jnp.isfinite(optax.tree.norm(out))
            kept_R = jax.tree.map(lambda x: jnp.where(finite, x, 0), exchanged.kept_R)
            return out, following(state, kept_R, Sent(*exchanged.counts) if with_state else nothing_sent())
        if not layout.replica_axes:  # one replica: nothing to exchange, at most a local slice
            return plan.constrain(jax.tree.map(lambda x: x[0], updates), layout.optimizer), state
        done, kept_R = primitive.kept(state)
        kept = () if kept_R is None else (kept_R,)
        out, *kept, sent = on_shards(plan, exchange_shards, updates, *kept, replicated=done)
        return out, following(state, kept[0] if kept else None, sent)

    return optax.GradientTransformationExtraArgs(init, update)


def refuse_nothing_to_encode(setup: Setup) -> None:
    """Raises ValueError if no two replicas are on different nodes."""
    if not setup.plan.layout.replicas_cross_nodes:
        raise ValueError(
            "compression.hop_two has nothing to encode: no two replicas are on different nodes; set it to none, or "
            "choose a smaller partition group (with sharding.two_hop, and sharding.partitioner=manual)"
        )


def summed(plan: ShardingPlan, *, packed: bool = False) -> Primitive:
    """Returns the exchange of shards as they are: reduce-scattered to the optimizer's scope, or all-reduced.

    `packed` into one all-reduce: a layer's are small, and XLA leaves them apart in a loop; of all at once it makes few.
    """

    def exchange_group(
        placements: Sequence[Placement], xs: Shards, kept: Shards | None, key: jax.Array
    ) -> tuple[Shards, Shards | None, list[Sent]]:
        del key
        return _sums(plan, placements, xs, packed=packed), kept, []

    return Primitive(exchange=exchange_group)


def encoded(plan: ShardingPlan, codec: Codec, *, error_feedback: bool = True) -> Primitive:
    """Returns the exchange of shards with a codec, and their residuals with error feedback."""

    def exchange_group(
        placements: Sequence[Placement], xs: Shards, kept: Shards | None, key: jax.Array
    ) -> tuple[Shards, Shards | None, list[Sent]]:
        xs = xs if kept is None else [x + k for x, k in zip(xs, kept, strict=True)]
        exchanged, counts = _exchange_all(plan, codec, placements, xs, key)
        return [x.total for x in exchanged], [x.kept for x in exchanged] if error_feedback else None, counts

    def kept(state: ExchangeState) -> tuple[jax.Array, PyTree]:
        return state.step, state.residual.tree if error_feedback else None

    return Primitive(exchange=exchange_group, num_counts=len(Sent._fields), kept=kept)


def with_codec(name: str) -> HopTwo:
    """Returns the method that exchanges gradients with the codec called `name`."""

    def of(function: Callable[..., Any]) -> Callable[[Setup], Any]:
        def made(setup: Setup) -> Any:
            codec = make_codec(name, setup.compression, rounding=setup.compression.rounding)
            assert codec is not None
            return function(setup.plan, codec, error_feedback=setup.compression.error_feedback)

        return made

    return HopTwo(name=name, build=of(exchange), refuse=refuse_nothing_to_encode, primitive=of(encoded))


NONE = HopTwo(
    name="none",
    build=lambda setup: exchange(setup.plan),
    refuse=lambda setup: None,
    primitive=lambda setup: summed(setup.plan, packed=True),
)
EXCHANGES = (NONE, *map(with_codec, ("bf16", "int8", "int4", "two_bit", "one_bit")))


def _sums(plan: ShardingPlan, placements: Sequence[Placement], xs: Shards, *, packed: bool = False) -> Shards:
    """Returns the sums of shards over the replicas, in the optimizer's scope."""
    layout, beyond = plan.layout, plan.layout.optimizer_beyond_gradients
    scattered = [i for i, p in enumerate(placements) if p.dim is not None and beyond]
    rest = [i for i in range(len(xs)) if i not in scattered]
    group = plan.group([placements[i] for i in scattered], beyond, tensor_is_manual=True)
    chunks = group.reduce_scatter([xs[i] for i in scattered])
    reduce = _packed_sums if packed else lambda xs, axes: [lax.psum(x, axes) for x in xs]
    if layout.all_reduced_axes:
        chunks = reduce(chunks, layout.all_reduced_axes)
    sums = zip([*scattered, *rest], [*chunks, *reduce([xs[i] for i in rest], layout.replica_axes)], strict=True)
    return [x for _, x in sorted(sums, key=lambda item: item[0])]


def _packed_sums(xs: Shards, axes: Axes) -> Shards:
    """Returns the sums over `axes`, in one all-reduce."""
    if not xs:
        return []
    return slice_apart(lax.psum(jnp.concatenate([x.reshape(-1) for x in xs]), axes), [x.shape for x in xs])


# ------------------------------------------------------------------------------------------------ with a codec


class Result(NamedTuple):
    """The result for one shard: its sum over the replicas, in the optimizer's scope, and this replica's residual."""

    total: jax.Array
    kept: jax.Array


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
