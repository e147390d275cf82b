"""Hop two as an optax transform: the mean of gradients `[R, ...]` over the replicas, with an optional codec."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from compression.encoded import encoded
from compression.shards import Shards, on_shards, own_copies
from compression.statistics import Sent, added, nothing_sent
from compression.summed import summed
from sharding.coded import Codec
from sharding.hop_two import Exchanged
from sharding.plan import ShardingPlan
from sharding.replicas import PerReplica

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
    plus the residuals, is the sum of all gradients. A non-finite value makes the whole result non-finite, and
    `unless_not_finite` restores the state. The residuals of an exchange in the micro-steps have taken in the skipped
    gradients by then, and become zero.
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
        dtype = jnp.float32 if codec else None  # codecs take f32
        shares = [x_R[0].astype(dtype or x_R.dtype) / layout.num_replicas for x_R in grads_R]
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
