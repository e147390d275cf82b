"""The replica all-reduce in the micro-steps, so that communication overlaps with compute.

A method of the replica all-reduce provides one primitive, the exchange of one group of shards (`Exchange`). After the
micro-steps it is called once, with all shards (compression/exchange.py). Two loops call it in the micro-steps:

    ExchangeInLastMicroStep     each layer's gradient, in the last backward pass, as soon as it has been summed
    ExchangeInEachMicroStep     a piece of the gradients, or of local SGD's deltas, that the step before left
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar
from zlib import crc32

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding.accumulation import Index, at, length, put
from sharding.collectives import vary
from sharding.gathers import used_placements
from sharding.gradients import (
    Carry,
    Items,
    MicroStep,
    MicroSteps,
    add_gradients,
    per_replica,
    replica_parameters,
    run_last,
    run_on_own_rows,
    scan_micro_steps,
    times_replicas,
)
from sharding.pieces import cut, is_in_part, joined, part_of, with_part
from sharding.plan import REPLICATED, ShardingPlan, gradient_specs, run_manual
from sharding.spec import Placement, is_placement, pspecs
from sharding.trees import Batch, Grads, GradsR, Means, Params, Placements, PyTree, Shards

Tree = TypeVar("Tree", Grads, GradsR)
Counts = Sequence[jax.typing.ArrayLike]  # numbers of one collective, which add up
# (placements, a replica's shares of the mean, their residuals or None, key) -> the sums over the replicas in the
# optimizer's scope, the residuals, and the counts of each collective
Exchange = Callable[
    [Sequence[Placement], Shards, Shards | None, jax.Array], tuple[Shards, Shards | None, Sequence[Counts]]
]


class Exchanged(NamedTuple, Generic[Tree]):
    """Results of an exchange in the micro-steps: of arrays `[R, ...]`, or on a device, of its shards `[...]`."""

    mean: Tree  # equal on all replicas in the part that one device's optimizer reads
    kept: Tree | None  # the residuals, None for a method without
    counts: PyTree  # f32 `[num_counts]`, the mean over all devices


class GroupSums(NamedTuple):
    """The last micro-step's sums of a group of parameters, which it exchanges; for a stack all are `[L, ...]`."""

    grads: PyTree
    kept: PyTree
    numbers: tuple[jax.Array, ...]  # f32 []: `ExchangeInLastMicroStep.numbers`
    counts: jax.Array  # f32 [num_counts]


class PieceSums(NamedTuple):
    """A micro-step's sums of a group, and pending values, a piece of which it exchanges; for a stack `[L, ...]`."""

    grads: PyTree
    kept: PyTree  # the residuals, [pieces, N]
    pending: PyTree  # [pieces, N]
    # in f32 because they are differentiated: integers have no cotangents
    done: jax.Array  # f32 []: exchanges done
    piece: jax.Array  # f32 []: the next piece
    counts: jax.Array  # f32 [num_counts]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExchangeInLastMicroStep:
    """A MicroStepLoop whose last backward pass exchanges each group of gradients as soon as it is summed.

    Outside the `shard_map` the residuals are `[R, ...]`, like the parameters; on a device they are its shards `[...]`.
    """

    exchange: Exchange = field(metadata={"static": True})
    num_counts: int = field(metadata={"static": True})
    done: jax.Array  # int32 []: exchanges done
    kept: PyTree  # the residuals, None for a method without

    def specs(self, plan: ShardingPlan) -> "ExchangeInLastMicroStep":
        """Returns the specs of its arrays `[R, ...]`."""
        return replace(self, done=REPLICATED, kept=_result_specs(plan, self.kept).kept)

    def on_device(self, plan: ShardingPlan) -> "ExchangeInLastMicroStep":
        """Returns it with a device's shards `[...]`."""
        return replace(self, kept=_own(plan, self.kept))

    def run(
        self, plan: ShardingPlan, micro_step: MicroStep, carry: Carry, items: Items
    ) -> tuple[tuple[Exchanged[Grads], jax.Array], Means]:
        """Returns the results of the exchange, the loss, and auxiliary metrics `[accum]`."""
        first_items = jax.tree.map(lambda x: x[:-1], items)
        (grads, value), aux = scan_micro_steps(micro_step, carry, first_items)
        last_step = partial(micro_step, add=partial(self._add_and_exchange, plan))
        first_sums = {
            name: GroupSums(
                grads=group,
                kept=_group(self.kept, name),
                numbers=tuple(_for_each_layer(plan, name, group, number) for number in self.numbers),
                counts=_for_each_layer(plan, name, group, 0, self.num_counts),
            )
            for name, group in grads.items()
        }
        (sums, value), aux = run_last(last_step, (first_sums, value), items, aux)
        mean = Grads({name: group.grads for name, group in sums.items()})
        kept = None if self.kept is None else Grads({name: group.kept for name, group in sums.items()})
        counts = _total_counts({name: group.counts for name, group in sums.items()})
        return (Exchanged(mean=mean, kept=kept, counts=counts), value), aux

    @property
    def numbers(self) -> tuple[jax.Array, ...]:
        """Numbers [] for the backward pass. They travel as f32: they are differentiated, and integers cannot be."""
        return (self.done,)

    def to_exchange(self, grads: Grads, numbers: tuple[jax.Array, ...]) -> Grads:
        """Returns what is exchanged of the summed gradients `[...]`."""
        del numbers
        return grads

    def _add_and_exchange(
        self, plan: ShardingPlan, name: str, placements: Placements, sums: GroupSums, grads: Grads, layer: Index
    ) -> GroupSums:
        """Returns the sums of a group, or of one layer, with the last gradients, exchanged between the replicas."""
        grads = self.to_exchange(add_gradients(name, placements, sums.grads, grads, layer), sums.numbers)
        key = _key(name, sums.numbers[0].astype(jnp.int32), layer)
        grads, kept, counts = _all_reduce(plan, self.exchange, key, placements, grads, sums.kept)
        return sums._replace(grads=grads, kept=kept, counts=counts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExchangeInEachMicroStep:
    """A MicroStepLoop that exchanges pending values, a piece next to each micro-step.

    Without `sharding.overlap` all pieces come after the micro-steps. Outside the `shard_map` pending values and
    residuals are `[R, ...]`, like the parameters; on a device they are its shards `[...]`.
    """

    exchange: Exchange = field(metadata={"static": True})
    num_counts: int = field(metadata={"static": True})
    done: jax.Array  # int32 []: exchanges done
    kept: PyTree  # the residuals, None for a method without
    pending: PyTree
    # the steps in which all of `pending` is exchanged: part `done % parts` of each tensor in this one
    parts: int = field(default=1, metadata={"static": True})

    def specs(self, plan: ShardingPlan) -> "ExchangeInEachMicroStep":
        """Returns the specs of its arrays `[R, ...]`."""
        specs = _result_specs(plan, self.kept)
        return replace(self, done=REPLICATED, kept=specs.kept, pending=specs.mean)

    def on_device(self, plan: ShardingPlan) -> "ExchangeInEachMicroStep":
        """Returns it with a device's shards `[...]`."""
        return replace(self, kept=_own(plan, self.kept), pending=_own(plan, self.pending))

    def run(
        self, plan: ShardingPlan, micro_step: MicroStep, carry: Carry, items: Items
    ) -> tuple[tuple[tuple[Grads, Exchanged[Grads]], jax.Array], Means]:
        """Returns gradients and results of the exchange, the loss, and auxiliary metrics `[accum]`."""
        turn = self.done % self.parts
        due = [part_of(plan.stacks, tree, turn, self.parts) for tree in (self.kept, self.pending)]
        run = self._run_overlapped if plan.overlap else self._run_before_exchange
        (grads, value), aux, due, counts = run(plan, micro_step, carry, items, *due)
        kept = with_part(plan.stacks, self.kept, due[0], turn, self.parts)
        none_sent = jax.tree.map(jnp.zeros_like, self.pending)
        mean = with_part(plan.stacks, none_sent, due[1], turn, self.parts)
        return ((grads, Exchanged(mean=mean, kept=kept, counts=_total_counts(counts))), value), aux

    def _run_overlapped(
        self, plan: ShardingPlan, micro_step: MicroStep, carry: Carry, items: Items, kept: PyTree, pending: PyTree
    ) -> tuple[Carry, Means, list[PyTree], dict[str, jax.Array]]:
        """Runs the micro-steps, and the exchange of a piece of each tensor next to each."""
        grads, value = carry
        kept_pieces, pending_pieces = (cut(plan.stacks, tree, items[0].size) for tree in (kept, pending))
        first_sums = {
            name: PieceSums(
                grads=group,
                kept=_group(kept_pieces, name),
                pending=pending_pieces[name],
                done=_for_each_layer(plan, name, group, self.done),
                piece=_for_each_layer(plan, name, group, 0),
                counts=_for_each_layer(plan, name, group, 0, self.num_counts),
            )
            for name, group in grads.items()
        }
        step = partial(micro_step, add=partial(self._add_and_exchange_piece, plan))
        (sums, value), aux = scan_micro_steps(step, (first_sums, value), items)
        if kept is not None:
            kept = joined(plan.stacks, {name: group.kept for name, group in sums.items()}, kept)
        mean = joined(plan.stacks, {name: group.pending for name, group in sums.items()}, pending)
        grads = {name: group.grads for name, group in sums.items()}
        return (grads, value), aux, [kept, mean], {name: group.counts for name, group in sums.items()}

    def _add_and_exchange_piece(
        self, plan: ShardingPlan, name: str, placements: Placements, sums: PieceSums, grads: Grads, layer: Index
    ) -> PieceSums:
        """Returns the sums of a group, or of one layer, with a micro-step's gradients and its piece exchanged."""
        added = add_gradients(name, placements, sums.grads, grads, layer)
        piece = sums.piece.astype(jnp.int32)
        rows = (sums.pending, sums.kept)
        pending, kept = at(rows, piece)
        key = _key(name, sums.done.astype(jnp.int32), layer, piece)
        *changed, counts = self._all_reduce_pending(plan, key, placements, pending, kept)
        pending, kept = put(rows, tuple(changed), piece)
        return sums._replace(grads=added, kept=kept, pending=pending, piece=sums.piece + 1, counts=sums.counts + counts)

    def _run_before_exchange(
        self, plan: ShardingPlan, micro_step: MicroStep, carry: Carry, items: Items, kept: PyTree, pending: PyTree
    ) -> tuple[Carry, Means, list[PyTree], dict[str, jax.Array]]:
        """Runs the micro-steps, and then the exchange of the due part of each tensor."""
        carry, aux = scan_micro_steps(micro_step, carry, items)
        mean, kept_after, counts = {}, {}, {}
        for name, group in pending.items():
            placements, key = used_placements(plan, name, plan.placements), _key(name, self.done)
            mean[name], kept_after[name], counts[name] = self._all_reduce_pending(
                plan, key, placements, group, _group(kept, name)
            )
        return carry, aux, [None if kept is None else kept_after, mean], counts

    def _all_reduce_pending(
        self, plan: ShardingPlan, key: jax.Array, placements: Placements, pending: PyTree, kept: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array]:
        """Returns the mean of a replica's pending values `[...]`, the residuals, and the counts `[num_counts]`."""
        shares = jax.tree.map(lambda x: x / plan.layout.num_replicas, pending)
        return _all_reduce(plan, self.exchange, key, placements, shares, kept)


def exchanged_gradients(
    micro_steps: MicroSteps, plan: ShardingPlan, params: Params, batch: Batch, loop: ExchangeInLastMicroStep
) -> tuple[Exchanged[GradsR], Means]:
    """Returns the gradients' mean over the replicas, exchanged in the last backward pass, and the batch's means."""

    def on_device(
        params: Params, batch: Batch, total: jax.Array, loop: ExchangeInLastMicroStep
    ) -> tuple[Exchanged[GradsR], Means]:
        result, means = micro_steps(plan, replica_parameters(plan, params), batch, total, loop.on_device(plan))
        return _on_all_devices(plan, result), lax.psum(means, plan.layout.varying_axes)

    out_specs = _result_specs(plan, loop.kept), REPLICATED
    run = run_manual(plan, on_device, out_specs, (REPLICATED, loop.specs(plan)))
    return run(params, batch, jnp.sum(batch["weights"]), loop)


def gradients_and_exchange(
    micro_steps: MicroSteps, plan: ShardingPlan, params: Params, batch: Batch, loop: ExchangeInEachMicroStep
) -> tuple[tuple[GradsR, Exchanged[GradsR]], Means]:
    """Returns each replica's gradients `[R, ...]` and the mean of pending values; and the batch's means.

    See `sharding.gradients.replica_gradients`.
    """

    def on_device(
        params: Params, batch: Batch, total: jax.Array, loop: ExchangeInEachMicroStep
    ) -> tuple[tuple[GradsR, Exchanged[GradsR]], Means]:
        shards = replica_parameters(plan, params)
        (grads, result), means = micro_steps(plan, shards, batch, total, loop.on_device(plan))
        grads_R = times_replicas(plan, per_replica(plan, grads))
        return (grads_R, _on_all_devices(plan, result)), lax.psum(means, plan.layout.varying_axes)

    out_specs = (gradient_specs(plan, tensor=False), _result_specs(plan, loop.kept)), REPLICATED
    run = run_manual(plan, on_device, out_specs, (REPLICATED, loop.specs(plan)))
    return run(params, batch, jnp.sum(batch["weights"]), loop)


def local_gradients_and_exchange(
    micro_steps: MicroSteps,
    plan: ShardingPlan,
    params: Params,
    batch: Batch,
    delta_R: GradsR,
    loop: ExchangeInEachMicroStep,
) -> tuple[tuple[GradsR, Exchanged[GradsR], PyTree], Means]:
    """Returns gradients of replicas at `params + delta_R[r]`, the mean of pending values, and the elements in it.

    The elements are bools like the parameters `[...]`; other elements of the mean are zero. See
    `sharding.gradients.local_gradients`, also for the second result.
    """

    def on_device(
        params: Params, batch: Batch, delta_R: GradsR, loop: ExchangeInEachMicroStep
    ) -> tuple[tuple[GradsR, Exchanged[GradsR], PyTree], Means]:
        here = loop.on_device(plan)
        (grads, result), sums = run_on_own_rows(micro_steps, plan, params, batch, delta_R, here)
        is_exchanged = is_in_part(plan.stacks, grads, loop.done % loop.parts, loop.parts)
        return (per_replica(plan, grads), _on_all_devices(plan, result), is_exchanged), sums

    layout, specs_R = plan.layout, gradient_specs(plan, tensor=False)
    part_specs = pspecs(plan.placements, layout.gradients, tensor=False)
    out_specs = (specs_R, _result_specs(plan, loop.kept), part_specs), PartitionSpec(layout.replica_axes)
    run = run_manual(plan, on_device, out_specs, (specs_R, loop.specs(plan)))
    return run(params, batch, delta_R, loop)


def _result_specs(plan: ShardingPlan, kept: PyTree) -> Exchanged[GradsR]:
    """Returns the specs of an exchange's results, with or without residuals."""
    specs_R = gradient_specs(plan, tensor=False)
    return Exchanged(mean=specs_R, kept=None if kept is None else specs_R, counts=REPLICATED)


def _on_all_devices(plan: ShardingPlan, result: Exchanged[Grads]) -> Exchanged[GradsR]:
    """Returns a device's results as its shards of arrays `[R, ...]`, and the counts' mean over all devices."""
    kept_R = None if result.kept is None else per_replica(plan, result.kept)
    counts = lax.pmean(result.counts, plan.layout.data_axes)
    return Exchanged(mean=per_replica(plan, result.mean), kept=kept_R, counts=counts)


def _own(plan: ShardingPlan, tree_R: PyTree) -> PyTree:
    """Returns a device's shards `[...]` of its replica's entries of arrays `[R, ...]`; None stays None."""
    return jax.tree.map(lambda x: vary(x[0], plan.layout.data_axes), tree_R)


def _group(kept: PyTree, name: str) -> PyTree:
    """Returns the residuals of a group; None without residuals."""
    return None if kept is None else kept[name]


def _for_each_layer(
    plan: ShardingPlan, name: str, group: PyTree, value: jax.typing.ArrayLike, *shape: int
) -> jax.Array:
    """Returns `f32 [*shape]` of equal values for a group of parameters, for a stack `[L, *shape]`."""
    layers = (length(group),) if name in plan.stacks else ()
    return jnp.broadcast_to(vary(jnp.asarray(value, jnp.float32), plan.layout.data_axes), (*layers, *shape))


def _total_counts(counts: dict[str, jax.Array]) -> jax.Array:
    """Returns the counts of all groups `[num_counts]` and layers `[L, num_counts]` together, `[num_counts]`."""
    by_group = [x.sum(axis=tuple(range(x.ndim - 1))) for x in jax.tree.leaves(counts)]
    return jnp.sum(jnp.stack(by_group), axis=0)


def _key(name: str, *numbers: jax.typing.ArrayLike) -> jax.Array:
    """Returns the random key of an exchange, from the group's name, the step, the layer and the piece."""
    key = jax.random.key(crc32(name.encode()))
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


@jax.named_scope("replica_all_reduce")
def _all_reduce(
    plan: ShardingPlan, exchange: Exchange, key: jax.Array, placements: Placements, shares: PyTree, kept: PyTree
) -> tuple[PyTree, PyTree, jax.Array]:
    """Returns the sums over the replicas, the residuals, and the counts `[num_counts]`.

    A device's chunk of a sum lies where its optimizer reads it, in a tensor like `shares`.
    """
    leaves, tree = jax.tree.flatten(shares)
    kept_leaves = None if kept is None else jax.tree.leaves(kept)
    places = jax.tree.leaves(placements, is_leaf=is_placement)
    totals, kept_leaves, counts = exchange(places, leaves, kept_leaves, key)
    if beyond := plan.layout.optimizer_beyond_gradients:
        totals = plan.group(places, beyond).put(leaves, totals)
    total_counts = jnp.stack([sum(column, jnp.zeros(())) for column in zip(*counts, strict=True)] or [jnp.zeros(0)])
    done = jax.tree.map(lambda x: vary(x, plan.layout.data_axes), (totals, kept_leaves, total_counts.reshape(-1)))
    totals, kept_leaves, total_counts = done
    return tree.unflatten(totals), None if kept_leaves is None else tree.unflatten(kept_leaves), total_counts
