"""The replica all-reduce in the micro-steps, while they compute, instead of after them as a transform of the chain.

A method of the replica all-reduce provides one primitive, the exchange of one group of shards (`Exchange`); when it is
called is up to the step. After the micro-steps it is called with all shards at once (compression/exchange.py). `Early`
asks for it in the micro-steps: inside the last backward pass, by each layer as soon as its gradient is summed; or, of
what waits since the step before, a piece beside each micro-step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
from jax import lax

from sharding.accumulation import at, length, put
from sharding.collectives import vary
from sharding.gathers import used_placements
from sharding.pieces import cut, joined, part_of, with_part
from sharding.plan import ShardingPlan
from sharding.spec import Placement, is_placement
from sharding.trees import PyTree, Shards

Counts = Sequence[jax.typing.ArrayLike]  # of one collective: numbers that add up
# (placements, a replica's shares of the mean, what is kept of them or None, key) -> the sums over the replicas in the
# optimizer's scope, what is kept, and the counts of each collective
Exchange = Callable[
    [Sequence[Placement], Shards, Shards | None, jax.Array], tuple[Shards, Shards | None, Sequence[Counts]]
]
Carry = tuple["Sums", jax.Array]  # of the micro-steps: what they add to, and the loss
GroupExchange = Callable[[str, PyTree, "Sums", jax.Array | int], "Sums"]  # (name, placements, sums, layer) -> sums
MicroStep = Callable[..., tuple[Any, Any]]  # (carry, (i, micro-batch), exchange=GroupExchange) -> (carry, means)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Early:
    """State that the micro-steps need to exchange gradients `[R, ...]`, or pending gradients in their place.

    With `waiting` that is exchanged, a piece beside each micro-step (without `sharding.overlap` all of it after them);
    else the gradients are, inside the last backward pass.
    """

    exchange: Exchange = field(metadata={"static": True})
    num_counts: int = field(default=0, metadata={"static": True})
    done: jax.Array  # int32 []: exchanges done
    kept: PyTree = None  # what the replica all-reduce keeps for each replica, `[R, ...]`, like the parameters
    waiting: PyTree = None  # `[R, ...]`, like the parameters
    # the steps in which all of `waiting` is exchanged: part `done % parts` of each tensor in this one
    parts: int = field(default=1, metadata={"static": True})
    scale: jax.Array | None = None  # f32 []: the gradients' sums are multiplied by it, not what waits

    def run(
        self, plan: ShardingPlan, micro_step: "MicroStep", carry: "Carry", items: tuple[jax.Array, PyTree]
    ) -> tuple["Carry", Any]:
        """Runs the micro-steps on `items` `[accum, ...]`, and the replica all-reduce in them."""
        run = in_last_micro_step if self.waiting is None else beside_micro_steps
        return run(plan, self, micro_step, carry, items)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """Results of the exchange in the micro-steps: the second input of its transform, next to gradients `[R, ...]`."""

    mean_R: PyTree  # `[R, ...]`, equal on all replicas in what one device's optimizer reads
    kept_R: PyTree = None
    counts: Any = ()  # `f32 [num_counts]`, the mean of all devices
    part: PyTree = None  # of what waited, bools like the parameters: the elements that were exchanged; the others are 0


class Sums(NamedTuple):
    """What a micro-step adds to; the replica all-reduce in it changes what it keeps and counts.

    By group of parameters. `done`, `piece` and `counts` of a stack are `[L]`, `[L]` and `[L, num_counts]`, of other
    groups `[]`, `[]` and `[num_counts]`. What waits and what is kept of it are cut into `[pieces, N]`, of a stack
    `[L, pieces, N]`.
    """

    grads: PyTree
    kept: PyTree = None
    waiting: PyTree = None
    # in f32 because they are differentiated: integers have no cotangents
    done: Any = None  # exchanges done
    piece: Any = None  # the next piece of what waits
    counts: Any = None
    scale: Any = None  # by which the gradients are multiplied; of a stack `[L]`

    def group(self, name: str) -> "Sums":
        """Returns the part of one group of parameters."""
        return Sums(*(None if part is None else part[name] for part in self))

    def total_counts(self) -> jax.Array:
        """Returns the counts of all groups and layers together, `[num_counts]`."""
        by_group = [x.sum(axis=tuple(range(x.ndim - 1))) for x in jax.tree.leaves(self.counts)]
        return jnp.sum(jnp.stack(by_group), axis=0)


def in_last_micro_step(
    plan: ShardingPlan, early: Early, micro_step: MicroStep, carry: Carry, items: tuple[jax.Array, PyTree]
) -> tuple[Carry, Any]:
    """Runs the micro-steps on `items` `[accum, ...]`; the last backward pass exchanges the sums between replicas."""
    (sums, value), aux = lax.scan(micro_step, carry, jax.tree.map(lambda x: x[:-1], items))
    sums = _first_sums(plan, early, sums.grads, early.kept)
    return run_last(partial(micro_step, exchange=partial(_exchange_group, plan, early)), (sums, value), items, aux)


def run_last(micro_step: MicroStep, carry: Carry, items: tuple[jax.Array, PyTree], aux: PyTree) -> tuple[Carry, Any]:
    """Runs the last micro-step on `items` `[accum, ...]`; `aux` `[accum - 1]` is of the others."""
    # after the others: its forward pass needs nothing of them, and run before them it would hold its layers' inputs
    last, value = lax.optimization_barrier((jax.tree.map(lambda x: x[-1], items), carry[1]))
    carry, more = micro_step((carry[0], value), last)
    return carry, jax.tree.map(lambda x, y: jnp.append(x, y), aux, more)


def beside_micro_steps(
    plan: ShardingPlan, early: Early, micro_step: MicroStep, carry: Carry, items: tuple[jax.Array, PyTree]
) -> tuple[Carry, Any]:
    """Runs the micro-steps on `items` `[accum, ...]`, and exchanges the due part of the pending gradients.

    A piece of it beside each of them, or without `sharding.overlap` all of it after them.
    """
    turn, parts = early.done % early.parts, early.parts
    kept, waiting = (part_of(plan.stacks, tree, turn, parts) for tree in (early.kept, early.waiting))
    if plan.overlap:
        rows = [cut(plan.stacks, tree, items[0].size) for tree in (kept, waiting)]
        start = _first_sums(plan, early, carry[0].grads, *rows)
        step = partial(micro_step, exchange=partial(_exchange_piece, plan, early))
        (sums, value), aux = lax.scan(step, (start, carry[1]), items)
        kept, waiting = (joined(plan.stacks, *x) for x in ((sums.kept, kept), (sums.waiting, waiting)))
    else:
        (sums, value), aux = lax.scan(micro_step, carry, items)
        counts = {}
        for name in waiting:
            placements, of_group = used_placements(plan, name, plan.placements), kept and kept[name]
            waiting[name], of_group, counts[name] = _all_reduce(
                plan, early, (name, early.done), placements, waiting[name], of_group
            )
            kept = kept and kept | {name: of_group}
        sums = sums._replace(counts=counts)
    kept = with_part(plan.stacks, early.kept, kept, turn, parts)
    waiting = with_part(plan.stacks, jax.tree.map(jnp.zeros_like, early.waiting), waiting, turn, parts)
    return (sums._replace(kept=kept, waiting=waiting), value), aux


def _first_sums(plan: ShardingPlan, early: Early, grads: PyTree, kept: PyTree, waiting: PyTree = None) -> Sums:
    """Returns the sums that the first micro-step with the replica all-reduce in it starts from."""

    def fill(value: jax.Array | float, *shape: int) -> dict[str, jax.Array]:
        layers = {name: (length(group),) if name in plan.stacks else () for name, group in grads.items()}
        value = vary(jnp.asarray(value, jnp.float32), plan.layout.data_axes)
        return {name: jnp.broadcast_to(value, (*layers[name], *shape)) for name in grads}

    piece, scale = None if waiting is None else fill(0), None if early.scale is None else fill(early.scale)
    return Sums(grads, kept, waiting, fill(early.done), piece, fill(0, early.num_counts), scale)


def _exchange_group(
    plan: ShardingPlan, early: Early, name: str, placements: PyTree, sums: Sums, layer: jax.Array | int
) -> Sums:
    """Runs the replica all-reduce on the sums `[...]` of a group, or of one layer."""
    numbers = (name, sums.done.astype(jnp.int32), layer)
    grads = sums.grads if sums.scale is None else jax.tree.map(lambda g: g / sums.scale, sums.grads)
    grads, kept, counts = _all_reduce(plan, early, numbers, placements, grads, sums.kept)
    return sums._replace(grads=grads, kept=kept, counts=counts)


def _exchange_piece(
    plan: ShardingPlan, early: Early, name: str, placements: PyTree, sums: Sums, layer: jax.Array | int
) -> Sums:
    """Runs the replica all-reduce on the next piece `[N]`, `sums.piece`, of what waits of a group, or of one layer."""
    piece = sums.piece.astype(jnp.int32)
    rows = (sums.waiting, sums.kept)
    waiting, kept = at(rows, piece)
    numbers = (name, sums.done.astype(jnp.int32), layer, piece)
    *changed, counts = _all_reduce(plan, early, numbers, placements, waiting, kept)
    waiting, kept = put(rows, tuple(changed), piece)
    return sums._replace(waiting=waiting, kept=kept, piece=sums.piece + 1, counts=sums.counts + counts)


@jax.named_scope("replica_all_reduce")
def _all_reduce(
    plan: ShardingPlan, early: Early, numbers: tuple[Any, ...], placements: PyTree, sums: PyTree, kept: PyTree
) -> tuple[PyTree, PyTree, jax.Array]:
    """Returns the sums over the replicas, what is kept, and the counts `[num_counts]`.

    A device's chunk of a sum lies where its optimizer reads it, in a tensor like `sums`. `numbers`, a name first, make
    the random key. What waited are a replica's gradients, of which its share of the mean is summed.
    """
    key = jax.random.key(crc32(numbers[0].encode()))
    for number in numbers[1:]:
        key = jax.random.fold_in(key, number)
    leaves, tree = jax.tree.flatten(sums)
    if early.waiting is not None:
        leaves = [x / plan.layout.num_replicas for x in leaves]
    of_leaves = None if kept is None else jax.tree.leaves(kept)
    places = jax.tree.leaves(placements, is_leaf=is_placement)
    totals, of_leaves, counts = early.exchange(places, leaves, of_leaves, key)
    if beyond := plan.layout.optimizer_beyond_gradients:
        totals = plan.group(places, beyond).put(leaves, totals)
    total_counts = jnp.stack([sum(column, jnp.zeros(())) for column in zip(*counts, strict=True)] or [jnp.zeros(0)])
    done = jax.tree.map(lambda x: vary(x, plan.layout.data_axes), (totals, of_leaves, total_counts.reshape(-1)))
    leaves, of_leaves, total_counts = done
    return tree.unflatten(leaves), None if of_leaves is None else tree.unflatten(of_leaves), total_counts
