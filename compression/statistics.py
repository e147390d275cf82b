"""State of the replica all-reduce, and its metrics: the payload between nodes, and the norm of the residuals."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from sharding.collectives import vary
from sharding.in_step_exchange import Counts
from sharding.plan import ShardingPlan
from sharding.replicas import PerReplica
from sharding.trees import Axes, Grads, Params, PyTree

RESIDUAL_NORM = "residual_norm"


class Sent(NamedTuple):
    """Counts of one device and one exchange, f32 scalars."""

    payload_bytes: jax.typing.ArrayLike
    num_values: jax.typing.ArrayLike  # values that the payload encodes, without padding
    num_sent: jax.typing.ArrayLike  # how many of these values are sent


class State(NamedTuple):
    """State of a method of the replica all-reduce; unused fields are `()`. Checkpoints use the same names."""

    step: PyTree = ()  # int32 []: exchanges done
    factors: PyTree = ()  # PowerSGD's Q of each matrix, [layers, *columns, rank]; () for other parameters
    residual: PyTree = ()  # PerReplica, `[R, ...]`: each replica's unsent values
    sent: PyTree = ()  # the counts of the last exchange


def zeros_R(replicas: int, params: Params) -> PerReplica:
    """Returns f32 zeros `[R, ...]` like the parameters, of which the sum over R counts."""
    zeros = jax.tree.map(lambda p: jnp.zeros((replicas, *p.shape), jnp.float32), params)
    return PerReplica(zeros, combine="sum")


def nothing_sent() -> Sent:
    """Returns the counts before the first exchange."""
    return Sent(*(jnp.zeros(()) for _ in Sent._fields))


def with_zero_counts(state: PyTree) -> PyTree:
    """Returns the state of a replica all-reduce that did not run in this step: the same with counts of zero."""
    is_sent = lambda x: isinstance(x, Sent)
    return jax.tree.map(lambda x: nothing_sent() if is_sent(x) else x, state, is_leaf=is_sent)


def dense_sent(plan: ShardingPlan, grads: Grads) -> Sent:
    """Returns the counts of an uncompressed exchange of gradients in f32."""
    specs = plan.map(lambda p: p.pspec(plan.layout.gradients))
    shapes = jax.tree.map(lambda x, spec: NamedSharding(plan.mesh, spec).shard_shape(x.shape), grads, specs)
    num_values = jnp.float32(sum(map(prod, jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple)))))
    return Sent(4 * num_values, num_values, num_values)


def added(counts: Sequence[Counts], axes: Axes) -> Sent:
    """Returns the sum of the counts of several collectives, averaged over the devices of `axes`."""
    if not counts:
        return nothing_sent()
    totals = (sum(column) for column in zip(*counts, strict=True))
    return Sent(*(lax.pmean(vary(x, axes), axes) if isinstance(x, jax.Array) else jnp.float32(x) for x in totals))


def statistics(opt_state: PyTree, *, each: bool = False) -> dict[str, jax.Array]:
    """Returns the replica all-reduce's metrics from an optimizer's state; {} if it does not compress.

    These are: the payload bytes per device, with scales and padding; the ratio of the values' f32 bytes, without scales
    and padding, to the payload; the share of the values that was sent; and the norm of all residuals; with
    `each`, one norm per replica, `[R]`.
    """
    states = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, State))
    state = next((x for x in states if isinstance(x, State) and x.sent), None)
    if state is None:
        return {}
    payload_bytes, num_values, num_sent = map(jnp.asarray, state.sent)
    found = {
        "all_reduce_payload_bytes": payload_bytes,
        "all_reduce_ratio": 4 * num_values / jnp.maximum(payload_bytes, 1),
        "all_reduce_fraction_sent": num_sent / jnp.maximum(num_values, 1),
    }
    if leaves := jax.tree.leaves(state.residual):
        # first of each replica: XLA would sum tensor by tensor over the replicas, and gloo one scalar after the other
        of_replicas = sum(jnp.sum(x * x, axis=range(1, x.ndim)) for x in leaves)
        found[RESIDUAL_NORM] = jnp.sqrt(of_replicas if each else jnp.sum(of_replicas))
    return found
