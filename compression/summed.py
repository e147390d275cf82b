"""Hop two without a codec: the sums of a group of shards over the replicas."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from compression.hop_two import Primitive
from compression.statistics import Sent
from sharding.collectives import slice_apart
from sharding.plan import ShardingPlan
from sharding.spec import Placement
from sharding.trees import Axes, Shards


def summed(plan: ShardingPlan, *, packed: bool = False) -> Primitive:
    """Returns the exchange of shards as they are: reduce-scattered to the optimizer's scope, or all-reduced.

    `packed` into one all-reduce: a layer's are small, and XLA leaves them apart in a loop; of all at once it makes few.
    """

    def exchange_group(
        placements: Sequence[Placement], xs: Shards, kept: Shards | None, key: jax.Array
    ) -> tuple[Shards, Shards | None, list[Sent]]:
        del key
        return sums(plan, placements, xs, packed=packed), kept, []

    return Primitive(exchange=exchange_group)


def sums(plan: ShardingPlan, placements: Sequence[Placement], xs: Shards, *, packed: bool = False) -> Shards:
    """Returns the sums over the replicas of shards `[...]`, as shards in the optimizer's scope."""
    layout, beyond = plan.layout, plan.layout.optimizer_beyond_gradients
    scattered = [i for i, p in enumerate(placements) if p.dim is not None and beyond]
    rest = [i for i in range(len(xs)) if i not in scattered]
    group = plan.group([placements[i] for i in scattered], beyond, tensor_is_manual=True)
    chunks = group.reduce_scatter([xs[i] for i in scattered])
    reduce = _packed if packed else lambda xs, axes: [lax.psum(x, axes) for x in xs]
    if layout.all_reduced_axes:
        chunks = reduce(chunks, layout.all_reduced_axes)
    found = zip([*scattered, *rest], [*chunks, *reduce([xs[i] for i in rest], layout.replica_axes)], strict=True)
    return [x for _, x in sorted(found, key=lambda item: item[0])]


def _packed(xs: Shards, axes: Axes) -> Shards:
    """Returns the sums over `axes` of tensors `[...]`, in one all-reduce."""
    if not xs:
        return []
    return slice_apart(lax.psum(jnp.concatenate([x.reshape(-1) for x in xs]), axes), [x.shape for x in xs])
