"""Hop two inside the backward passes: of finished sums layer by layer in the last one, of what waits in all of them.

`HopTwoInBackward` is what the trainer hands in; `Sums` are what the micro-steps carry of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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

PyTree = Any
Shards = list[jax.Array]
Carry = tuple["Sums", jax.Array]  # of the micro-steps: what they add to, and the loss
GroupExchange = Callable[[str, PyTree, "Sums", jax.Array | int], "Sums"]  # (name, placements, sums, layer) -> sums
MicroStep = Callable[..., tuple[Any, Any]]  # (carry, (i, micro-batch), exchange=GroupExchange) -> (carry, means)


@dataclass(frozen=True, kw_only=True)
class HopTwoInBackward:
    """Hop two of a group of parameters, or of one layer, inside the last backward pass; of what waits, inside each."""

    # of the optimizer's state: exchanges done, and what hop two keeps for each replica, `[R, ...]`, or None
    kept: Callable[[PyTree], tuple[jax.Array, PyTree]]
    # (placements, a replica's shards, what is kept of them or None, key) -> the sums over the replicas, what is kept,
    # and counts `f32 [num_counts]` that are added up
    exchange: Callable[[Sequence[Placement], Shards, Shards | None, jax.Array], tuple[Shards, Shards | None, jax.Array]]
    num_counts: int = 0
    # of the optimizer's state: what waits, `[R, ...]`, and is exchanged in place of the gradients of this step, a piece
    # beside each micro-step (`sharding.overlap`; else after them)
    waiting: Callable[[PyTree], PyTree] | None = None
    # the steps in which all of that is exchanged: part `done % parts` of each tensor in this one
    parts: int = 1

    def within(self, part: Callable[[PyTree], PyTree]) -> "HopTwoInBackward":
        """Returns the same for an optimizer's state of which `part(state)` is hop two's own."""
        kept, waiting = self.kept, self.waiting
        return replace(
            self,
            kept=lambda state: kept(part(state)),
            waiting=None if waiting is None else lambda state: waiting(part(state)),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """Gradients whose hop two is done: `[R, ...]`, equal on all replicas in what one device's optimizer reads."""

    grads_R: PyTree
    kept_R: PyTree = None  # what hop two keeps of each replica
    counts: Any = ()  # `f32 [num_counts]`, the mean of all devices
    part: PyTree = None  # bools, like the parameters: the elements that were exchanged, the others being 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Delayed:
    """Gradients `[R, ...]` whose hop two is not done, and what waited before this step, whose hop two is done."""

    grads_R: PyTree
    before: Exchanged


class Sums(NamedTuple):
    """What a micro-step adds to; hop two in it changes what it keeps and counts.

    In the last micro-step, or in each if something waits. By group of parameters; `done`, `piece` and `counts` of a
    stack are `[L]`, `[L]` and `[L, num_counts]`, of other groups `[]`, `[]` and `[num_counts]`. What waits and what is
    kept of it are cut into `[pieces, N]`, of a stack `[L, pieces, N]`.
    """

    grads: PyTree
    kept: PyTree = None
    waiting: PyTree = None
    # in f32 because they are differentiated: integers have no cotangents
    done: Any = None  # exchanges done
    piece: Any = None  # the next piece of what waits
    counts: Any = None

    def group(self, name: str) -> "Sums":
        """Returns the part of one group of parameters."""
        return Sums(*(None if part is None else part[name] for part in self))

    def total_counts(self) -> jax.Array:
        """Returns the counts of all groups and layers together."""
        by_group = [x.sum(axis=tuple(range(x.ndim - 1))) for x in jax.tree.leaves(self.counts)]
        return jnp.sum(jnp.stack(by_group), axis=0) if by_group else jnp.zeros(0)


def first_sums(
    plan: ShardingPlan,
    grads: PyTree,
    kept: PyTree,
    done: jax.Array | int,
    num_counts: int,
    waiting: PyTree = None,
) -> Sums:
    """Returns the sums that the first micro-step with hop two in it starts from."""

    def fill(value: jax.Array | float, *shape: int) -> dict[str, jax.Array]:
        layers = {name: (length(group),) if name == "layers" else () for name, group in grads.items()}
        value = vary(jnp.asarray(value, jnp.float32), plan.layout.data_axes)
        return {name: jnp.broadcast_to(value, (*layers[name], *shape)) for name in grads}

    return Sums(grads, kept, waiting, fill(done), None if waiting is None else fill(0), fill(0, num_counts))


def beside_micro_steps(
    plan: ShardingPlan,
    hop_two: HopTwoInBackward,
    micro_step: MicroStep,
    carry: Carry,
    items: tuple[jax.Array, PyTree],
    kept: PyTree,
    waiting: PyTree,
    done: jax.Array | int,
) -> tuple[Carry, Any]:
    """Runs the micro-steps, and hop two of the part of what is `waiting` whose turn it is.

    A piece of it beside each of them, or without `sharding.overlap` all of it after them.
    """
    turn, parts = jnp.asarray(done) % hop_two.parts, hop_two.parts
    own, shares = (part_of(tree, turn, parts) for tree in (kept, waiting))
    if plan.overlap:
        rows = [cut(tree, items[0].size) for tree in (own, shares)]
        start = first_sums(plan, carry[0].grads, rows[0], done, hop_two.num_counts, rows[1])
        beside = partial(micro_step, exchange=partial(_exchange_piece, plan, hop_two))
        (sums, value), aux = lax.scan(beside, (start, carry[1]), items)
        own, shares = joined(sums.kept, own), joined(sums.waiting, shares)
    else:
        (sums, value), aux = lax.scan(micro_step, carry, items)
        counts = {}
        for name in shares:
            placements, of_group = used_placements(plan, name), own and own[name]
            shares[name], of_group, counts[name] = _hop_two(
                plan, hop_two, (name, done), placements, shares[name], of_group, waited=True
            )
            own = own and own | {name: of_group}
        sums = sums._replace(counts=counts)
    kept = with_part(kept, own, turn, parts)
    waiting = with_part(jax.tree.map(jnp.zeros_like, waiting), shares, turn, parts)
    return (sums._replace(kept=kept, waiting=waiting), value), aux


def exchange_group(
    plan: ShardingPlan, hop_two: HopTwoInBackward, name: str, placements: PyTree, sums: Sums, layer: jax.Array | int
) -> Sums:
    """Runs hop two on the sums of a group, or of one layer."""
    numbers = (name, sums.done.astype(jnp.int32), layer)
    grads, kept, counts = _hop_two(plan, hop_two, numbers, placements, sums.grads, sums.kept)
    return sums._replace(grads=grads, kept=kept, counts=counts)


def _exchange_piece(
    plan: ShardingPlan, hop_two: HopTwoInBackward, name: str, placements: PyTree, sums: Sums, layer: jax.Array | int
) -> Sums:
    """Runs hop two on the next piece, `sums.piece`, of what waits of a group, or of one layer."""
    piece = sums.piece.astype(jnp.int32)
    rows = (sums.waiting, sums.kept)
    waiting, kept = at(rows, piece)
    numbers = (name, sums.done.astype(jnp.int32), layer, piece)
    *changed, counts = _hop_two(plan, hop_two, numbers, placements, waiting, kept, waited=True)
    waiting, kept = put(rows, tuple(changed), piece)
    return sums._replace(waiting=waiting, kept=kept, piece=sums.piece + 1, counts=sums.counts + counts)


@jax.named_scope("hop_two")
def _hop_two(
    plan: ShardingPlan,
    hop_two: HopTwoInBackward,
    numbers: tuple[Any, ...],
    placements: PyTree,
    sums: PyTree,
    kept: PyTree,
    *,
    waited: bool = False,
) -> tuple[PyTree, PyTree, jax.Array]:
    """Returns the sums over the replicas, what is kept, and the counts; `numbers`, a name first, make the random key.

    What waited are a replica's gradients, of which its share of the mean is summed.
    """
    key = jax.random.key(crc32(numbers[0].encode()))
    for number in numbers[1:]:
        key = jax.random.fold_in(key, number)
    leaves, tree = jax.tree.flatten(sums)
    if waited:
        leaves = [x / plan.layout.num_replicas for x in leaves]
    of_leaves = None if kept is None else jax.tree.leaves(kept)
    exchanged = hop_two.exchange(jax.tree.leaves(placements, is_leaf=is_placement), leaves, of_leaves, key)
    leaves, of_leaves, counts = jax.tree.map(lambda x: vary(x, plan.layout.data_axes), exchanged)
    return tree.unflatten(leaves), None if of_leaves is None else tree.unflatten(of_leaves), counts
