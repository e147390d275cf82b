"""The gradients of a batch: micro-steps in a `shard_map`, with gathers, hop one and, if it is to overlap, hop two."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import jax
import jax.numpy as jnp
from jax import lax

from sharding.accumulation import Accumulating, Rule, values_of
from sharding.collectives import vary
from sharding.experts import Gather
from sharding.gathers import (
    auto_gather,
    gather_tree,
    hop_one,
    layer_gather,
    no_gather,
    to_gradient_scope,
    used_placements,
)
from sharding.mesh import STAGE
from sharding.pieces import cut, joined, part_of, which, with_part
from sharding.pipeline import StagedLoss, forward_and_backward
from sharding.plan import REPLICATED, ShardingPlan, gradient_specs, run_manual
from sharding.spec import Placement, is_placement, pspecs

PyTree = Any
Value = TypeVar("Value")
Shards = list[jax.Array]
Batch = Mapping[str, jax.Array]  # each [accum, rows, ...], rows over the data axes
Means = dict[str, jax.Array]  # `loss` and what else a model tells of a step, by name
# the weighted sum of the losses of the rows given, and weighted sums of what else is told of them
Loss = Callable[[PyTree, Batch, Gather], tuple[jax.Array, Means]]
GroupExchange = Callable[[str, PyTree, "Sums", jax.Array | int], "Sums"]  # (name, placements, sums, layer) -> sums


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
    """Gradients whose hop two is done: `[R, ...]`, equal on all replicas."""

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


def manual_gradients(
    loss: Loss | StagedLoss,
    plan: ShardingPlan,
    params: PyTree,
    batch: Batch,
    drift_R: PyTree | None = None,
    hop_two: HopTwoInBackward | None = None,
    opt_state: PyTree = None,
) -> tuple[PyTree, Means]:
    """Returns the gradients `[R, ...]`, one for each replica and reduced inside its group, and the means, `loss` too.

    Hop two remains to be done: the mean over R (MiCS section 3.4); unless `hop_two` did it, which makes them an
    Exchanged, or did that of what waited, which makes them a Delayed. With `drift_R` each replica is at
    `params + drift_R[r]`. With a StagedLoss the micro-steps are the micro-batches of a pipeline.
    """
    layout = plan.layout
    done, kept_R = hop_two.kept(opt_state) if hop_two else (jnp.zeros((), jnp.int32), None)
    waiting_R = hop_two.waiting(opt_state) if hop_two and hop_two.waiting else None
    is_done = hop_two is not None and waiting_R is None

    def on_device(
        params: PyTree, batch: Batch, total: jax.Array, done: jax.Array, drift_R: PyTree, of_hop_two_R: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array, Means]:
        own = replica_parameters(plan, params, drift_R)
        kept, waiting = jax.tree.map(lambda x: vary(x[0], layout.data_axes), of_hop_two_R)
        sums, means = micro_steps(loss, plan, own, batch, total, hop_two, kept, done, waiting)
        # what is not cut is equal on all devices of the scope: its type is to say so
        grads, kept, waiting = (
            tree
            and plan.map(
                lambda p, x: x if p.dim is not None else same_on_all(x, p.not_held(layout.gradients)),
                tree,
            )
            for tree in (sums.grads, sums.kept, sums.waiting)
        )
        if isinstance(loss, StagedLoss):
            grads = plan.map(lambda p, g: g if p.staged else sum_of_stages(g), grads)
        # times R: hop two takes the mean, and divided by the `total` of all replicas their gradients are to add up
        scale = 1 if is_done else layout.num_replicas
        trees_R = jax.tree.map(lambda x: x[None], (jax.tree.map(lambda g: g * scale, grads), kept, waiting))
        counts = lax.pmean(sums.total_counts(), layout.data_axes)
        part = which(params, done % hop_two.parts, hop_two.parts) if hop_two and waiting_R is not None else None
        return trees_R, part, counts, lax.psum(means, layout.varying_axes)

    specs_R = gradient_specs(plan, tensor=False)
    drift_specs, *of_hop_two = (None if tree is None else specs_R for tree in (drift_R, kept_R, waiting_R))
    part_specs = None if waiting_R is None else pspecs(plan.placements, layout.gradients, tensor=False)
    run = run_manual(
        plan,
        on_device,
        ((specs_R, *of_hop_two), part_specs, REPLICATED, REPLICATED),
        (REPLICATED, REPLICATED, drift_specs, tuple(of_hop_two)),
    )
    trees_R, part, counts, means = run(params, batch, jnp.sum(batch["weights"]), done, drift_R, (kept_R, waiting_R))
    grads_R, kept_R, waiting_R = trees_R
    if is_done:
        return Exchanged(grads_R=grads_R, kept_R=kept_R, counts=counts), means
    if hop_two:
        before = Exchanged(grads_R=waiting_R, kept_R=kept_R, counts=counts, part=part)
        return Delayed(grads_R=grads_R, before=before), means
    return grads_R, means


def replica_parameters(plan: ShardingPlan, params: PyTree, drift_R: PyTree | None) -> PyTree:
    """Returns this device's shards of its replica's parameters.

    With two hops their types differ between replicas, so that autodiff sums nothing over them: hop two is deferred.
    """
    axes = plan.layout.varying_axes
    if plan.layout.two_hop:
        params = jax.tree.map(lambda x: vary(x, axes), params)
    if drift_R is not None:
        params = jax.tree.map(lambda x, d: x + vary(d[0], axes), params, drift_R)
    return params


def micro_steps(
    loss: Loss | StagedLoss,
    plan: ShardingPlan,
    params: PyTree,
    batch: Batch,
    total: jax.Array,
    hop_two: HopTwoInBackward | None = None,
    kept: PyTree = None,
    done: jax.Array | int = 0,
    waiting: PyTree = None,
) -> tuple["Sums", Means]:
    """Returns the sums over the micro-steps of this device's gradients, in their scope, and of its sums over `total`.

    With `hop_two` the gradients are summed over the replicas too, or in their place the part of what is `waiting`
    whose turn it is after `done` times; `kept` is what hop two keeps of them.
    """
    policy, parameters = plan.layout.gather, plan.layout.parameters

    # before the micro-steps: gather what is used in all of them
    gathered = gather_tree(plan, plan.placements, params, policy.each_step(parameters)) if policy.each_step else params

    # a zero that XLA does not know: zeros that it knows it shares with later ones, and keeps for the whole step
    zero = lax.optimization_barrier(jnp.zeros(()))
    grads = to_gradient_scope(
        plan, plan.placements, jax.tree.map(lambda x: jnp.zeros_like(x) + zero, params), zeros=True
    )
    if isinstance(loss, StagedLoss):
        assert hop_two is None
        return _through_stages(loss, plan, gathered, Sums(grads), batch, total)

    def micro_step(
        carry: tuple[Sums, jax.Array], item: tuple[jax.Array, Batch], exchange: GroupExchange | None = None
    ) -> tuple[Any, Means]:
        sums, value = carry
        i, micro = item
        used = tied(plan, gathered, i)

        # forward and backward pass; what is gathered in it is reduce-scattered on the way back: hop one
        def mean(sums: Sums) -> tuple[jax.Array, Means]:
            value, told = micro_loss(loss, plan, accumulating(plan, used, sums, exchange), micro)
            return value / total, jax.tree.map(lambda x: x / total, told)

        (more, told), sums = jax.value_and_grad(mean, has_aux=True)(sums)
        return (sums, value + more), told

    carry = (Sums(grads), vary(jnp.zeros(()), plan.layout.data_axes))
    accumulation = batch["weights"].shape[0]
    items = (jnp.arange(accumulation), dict(batch))
    if hop_two is None:
        (sums, value), told = lax.scan(micro_step, carry, items)
        return sums, _means(value, told)
    if waiting is not None:
        return _with_waiting(plan, hop_two, micro_step, carry, items, kept, waiting, done)
    (sums, value), told = lax.scan(micro_step, carry, jax.tree.map(lambda x: x[:-1], items))
    sums = with_hop_two(plan, sums.grads, kept, done, hop_two.num_counts)
    # after the others: its forward pass needs nothing of them, and run before them it would hold its layers' inputs
    last, value = lax.optimization_barrier((jax.tree.map(lambda x: x[-1], items), value))
    (sums, value), more = micro_step((sums, value), last, partial(_exchange_group, plan, hop_two))
    return sums, _means(value, jax.tree.map(lambda x, y: jnp.append(x, y), told, more))


def _means(loss: jax.Array, told: Means) -> Means:
    """Returns the loss and the sums over the micro-steps of what is told, `[accum]` each."""
    return {"loss": loss} | jax.tree.map(jnp.sum, told)


def tied(plan: ShardingPlan, gathered: PyTree, i: jax.Array) -> PyTree:
    """Returns the parameters tied to iteration `i`, or XLA would move gathers out of the loop and keep the results."""
    if plan.layout.gather.each_step:
        return gathered
    return jax.tree.map(lambda x: lax.optimization_barrier((x, i))[0], gathered)


def _through_stages(
    loss: StagedLoss, plan: ShardingPlan, gathered: PyTree, sums: "Sums", batch: Batch, total: jax.Array
) -> tuple["Sums", Means]:
    """Returns what `micro_steps` does, the micro-steps being those of a pipeline."""

    def forward(x: jax.Array, rows: Batch, tick: jax.Array) -> jax.Array:
        run = lambda params, rows, gather: loss.forward(params, x, rows, gather)
        return micro_loss(run, plan, tied(plan, gathered, tick), rows)

    def backward(
        sums: Sums, x: jax.Array, rows: Batch, g: jax.Array, counts: jax.Array, tick: jax.Array
    ) -> tuple[Sums, jax.Array, jax.Array]:
        used = tied(plan, gathered, tick)

        def stage(sums: Sums, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            run = lambda params, rows, gather: loss.with_loss(params, x, rows, gather)
            y, value = micro_loss(run, plan, accumulating(plan, used, sums, None), rows)
            return y, value / total

        (_, value), pullback = jax.vjp(stage, sums, x)
        sums, g = pullback((g, vary(counts, plan.layout.varying_axes)))
        return sums, g, value

    zeros = loss.zeros(batch, plan.layout.varying_axes)
    sums, value = forward_and_backward(forward, backward, sums, batch, zeros)
    return sums, {"loss": value}


@jax.named_scope("pipeline")
def sum_of_stages(grad: jax.Array) -> jax.Array:
    """Returns the gradient of a parameter that is on every stage: the first and the last one add to it."""
    return lax.psum(grad, STAGE)


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


def with_hop_two(
    plan: ShardingPlan,
    grads: PyTree,
    kept: PyTree,
    done: jax.Array | int,
    num_counts: int,
    waiting: PyTree = None,
) -> Sums:
    """Returns the sums that the first micro-step with hop two in it starts from."""

    def fill(value: jax.Array | float, *shape: int) -> dict[str, jax.Array]:
        layers = {name: (_length(group),) if name == "layers" else () for name, group in grads.items()}
        value = vary(jnp.asarray(value, jnp.float32), plan.layout.data_axes)
        return {name: jnp.broadcast_to(value, (*layers[name], *shape)) for name in grads}

    return Sums(grads, kept, waiting, fill(done), None if waiting is None else fill(0), fill(0, num_counts))


def _with_waiting(
    plan: ShardingPlan,
    hop_two: HopTwoInBackward,
    micro_step: Callable[..., tuple[Any, Means]],
    carry: tuple[Sums, jax.Array],
    items: tuple[jax.Array, Batch],
    kept: PyTree,
    waiting: PyTree,
    done: jax.Array | int,
) -> tuple[Sums, Means]:
    """Runs the micro-steps, and hop two of the part of what is `waiting` whose turn it is.

    A piece of it beside each of them, or without `sharding.overlap` all of it after them.
    """
    turn, parts = jnp.asarray(done) % hop_two.parts, hop_two.parts
    own, shares = (part_of(tree, turn, parts) for tree in (kept, waiting))
    if plan.overlap:
        rows = [cut(tree, items[0].size) for tree in (own, shares)]
        start = with_hop_two(plan, carry[0].grads, rows[0], done, hop_two.num_counts, rows[1])
        beside = partial(micro_step, exchange=partial(_exchange_piece, plan, hop_two))
        (sums, value), told = lax.scan(beside, (start, carry[1]), items)
        own, shares = joined(sums.kept, own), joined(sums.waiting, shares)
    else:
        (sums, value), told = lax.scan(micro_step, carry, items)
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
    return sums._replace(kept=kept, waiting=waiting), _means(value, told)


def _length(stack: PyTree) -> int:
    return jax.tree.leaves(stack)[0].shape[0]


def accumulating(plan: ShardingPlan, params: PyTree, sums: Sums, exchange: GroupExchange | None) -> PyTree:
    """Returns the parameters so that their gradients are added to `sums`, and exchanged if there is an `exchange`."""
    policy = plan.layout.gather

    def rule(name: str, placements: PyTree) -> Rule:
        def add(sums: Sums, grads: PyTree) -> Sums:
            if policy.each_step:
                grads = hop_one(plan, placements, grads)
            grads = to_gradient_scope(plan, placements, grads)
            return sums._replace(grads=jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums.grads, grads))

        return Rule(
            name=name or "its parameters",
            add=add,
            exchange=partial(exchange, name, placements) if exchange else None,
            overlap=plan.overlap,
            keep=partial(_gather_for_micro_step, plan, placements) if plan.overlap and policy.each_micro_step else None,
        )

    if not (policy.only_where_used or plan.overlap):
        return Accumulating(values=params, sums=sums, rule=rule("", plan.placements))
    return {
        name: Accumulating(values=params[name], sums=sums.group(name), rule=rule(name, used_placements(plan, name)))
        for name in params
    }


def _exchange_group(
    plan: ShardingPlan, hop_two: HopTwoInBackward, name: str, placements: PyTree, sums: Sums, layer: jax.Array | int
) -> Sums:
    """Runs hop two on the sums of a group, or of one layer."""
    numbers = (name, sums.done.astype(jnp.int32), layer)
    grads, kept, counts = _hop_two(plan, hop_two, numbers, placements, sums.grads, sums.kept)
    if kept is not None:  # of a gradient that is not finite it stays as it was
        kept = jax.tree.map(lambda g, new, old: jnp.where(jnp.isfinite(g), new, old), grads, kept, sums.kept)
    return sums._replace(grads=grads, kept=kept, counts=counts)


def _exchange_piece(
    plan: ShardingPlan, hop_two: HopTwoInBackward, name: str, placements: PyTree, sums: Sums, layer: jax.Array | int
) -> Sums:
    """Runs hop two on the next piece, `sums.piece`, of what waits of a group, or of one layer."""
    piece = sums.piece.astype(jnp.int32)
    rows = (sums.waiting, sums.kept)
    waiting, kept = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, piece, keepdims=False), rows)
    numbers = (name, sums.done.astype(jnp.int32), layer, piece)
    *changed, counts = _hop_two(plan, hop_two, numbers, placements, waiting, kept, waited=True)
    waiting, kept = jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, piece, 0), rows, tuple(changed))
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


def micro_loss(loss: Callable[[PyTree, Batch, Gather], Value], plan: ShardingPlan, kept: PyTree, micro: Batch) -> Value:
    """Returns the loss of this device's rows `[rows, ...]`, gathering what the policy gathers in a micro-step."""
    policy, parameters = plan.layout.gather, plan.layout.parameters
    kept = values_of(kept)  # a policy that gathers for the whole micro-step accumulates after it
    if policy.each_micro_step and not plan.overlap:  # with overlap it is gathered a layer at a time
        kept = _gather_for_micro_step(plan, plan.placements, kept)
    if policy.each_use:
        return loss(kept, micro, layer_gather(plan, policy.each_use(parameters)))
    return loss(kept, micro, no_gather(plan))


def _gather_for_micro_step(plan: ShardingPlan, placements: PyTree, shards: PyTree) -> PyTree:
    """Gathers what stays gathered for a micro-step."""
    part = plan.layout.gather.each_micro_step
    assert part
    return gather_tree(plan, placements, shards, part(plan.layout.parameters))


def same_on_all(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns `x`, equal on all devices of `axes`, with a type that says so; it is small where there is an axis."""
    return lax.pmean(vary(x, axes), axes) if axes else x


def auto_gradients(loss: Loss, plan: ShardingPlan, params: PyTree, batch: Batch) -> tuple[PyTree, Means]:
    """Returns the same as `manual_gradients` with R = 1, all collectives chosen by XLA's partitioner."""
    layout = plan.layout
    total = jnp.sum(batch["weights"])
    gather = auto_gather(plan)

    def micro_step(carry: tuple[PyTree, jax.Array], micro: Batch) -> tuple[tuple[PyTree, jax.Array], Means]:
        def mean(params: PyTree) -> tuple[jax.Array, Means]:
            return jax.tree.map(lambda x: x / total, loss(params, micro, gather))

        (value, told), grads = jax.value_and_grad(mean, has_aux=True)(params)
        grads = plan.constrain(grads, layout.gradients)
        return jax.tree.map(jnp.add, carry, (grads, value)), told

    zeros = plan.constrain(jax.tree.map(jnp.zeros_like, params), layout.gradients)
    (grads, value), told = lax.scan(micro_step, (zeros, jnp.zeros(())), dict(batch))
    return jax.tree.map(lambda g: g[None], grads), _means(value, told)
