"""Gradients that are summed over the micro-steps inside the backward pass, and communication during its compute.

A micro-step is differentiated with respect to the sums of the gradients before it, not to the parameters: a group of
parameters is handed to the model as an `Accumulating`, and where its gradients would come out of the backward pass
they are added to those sums. The sums of a stack of layers travel backwards through its loop as the carry, so that
XLA updates them in place and no second copy of the gradients exists.

With `AccumulationRule.overlap` a loop over layers is pipelined, in both directions: while a layer computes, the
parameters of the next one are gathered, and the gradients of the one before are reduced (the group reduce-scatter),
added to the sums and, in the last micro-step (delayed: a piece in each), exchanged with the other replicas (the replica
all-reduce). None of these depends on the layer's compute.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding.frozen import joined
from sharding.trees import PyTree

Index = jax.Array | int
Body = Callable[..., PyTree]  # (x, one layer's gathered parameters, *args) -> x, floats


@dataclass(frozen=True, kw_only=True, eq=False)
class AccumulationRule:
    """How the gradients of a group, or of one layer of a stack, are added up. Made anew for each trace."""

    name: str
    add: Callable[[PyTree, PyTree, Index], PyTree]  # (sums, gradients of trained parameters, layer) -> sums
    overlap: bool = False
    # splits a group's values into trained values, which have sums and gradients, and frozen values
    part: Callable[[PyTree], tuple[PyTree, PyTree]] = lambda values: (values, {})
    # a first gather, whose result stays for the backward pass (between nodes: ZeRO++'s hpZ); only with `overlap`
    keep: Callable[[PyTree], PyTree] | None = None
    uses: list[str] = field(default_factory=list)

    def use(self) -> None:
        """Notes that the model takes the group's values. ValueError for a second time: the sums would count twice."""
        if self.uses:
            raise ValueError(f"the model gathers {self.name} twice in one pass; gather it once and keep the result")
        self.uses.append(self.name)

    def finish(self, sums: PyTree, grads: PyTree, layer: Index = 0) -> PyTree:
        """Returns the sums with the gradients added, except the gradients of frozen values."""
        return self.add(sums, self.part(grads)[0], layer)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Accumulating:
    """A group of parameters, and the sums of its gradients so far; for a stack, both are `[L, ...]`.

    `sums` may hold more than the sums, as long as `AccumulationRule.add` knows it, such as the residuals of the replica
    all-reduce.
    """

    values: PyTree
    sums: PyTree
    rule: AccumulationRule = field(metadata={"static": True})


def values_of(group: PyTree) -> PyTree:
    """Returns the values of a group, after `AccumulationRule.keep`; backwards, their gradients go into its sums.

    ValueError for a second use.
    """
    if not isinstance(group, Accumulating):
        return group
    rule = group.rule
    rule.use()

    keep = rule.keep or (lambda values: values)

    @jax.custom_vjp
    def values(values: PyTree, sums: PyTree) -> PyTree:
        del sums
        return keep(values)

    def backward(residuals: tuple[PyTree, PyTree], grads: PyTree) -> tuple[None, PyTree]:
        values, sums = residuals
        (own,) = jax.vjp(keep, values)[1](grads)
        return None, rule.finish(sums, own)

    values.defvjp(lambda values, sums: (keep(values), (values, sums)), backward)
    return values(group.values, group.sums)


def scan_layers(
    body: Body,
    x: PyTree,
    stack: PyTree,
    *args: PyTree,
    gather: Callable[[PyTree], PyTree],
    rematerialise: Callable[[Body], Body],
    unroll: bool = False,
) -> PyTree:
    """Returns `x` after `body(x, gather(layer), *args)` for each layer of a stack `[L, ...]`.

    The stack is an Accumulating or plain arrays; `args` hold floats. `rematerialise` wraps the gather and the body of
    one layer, and decides which values the backward pass recomputes; with `overlap` it recomputes all but the layer's
    `x`. `unroll`, without `overlap`: the program has the layers one after the other, not a loop. A loop copies the
    values that it keeps for the backward pass into stacks and out of them. ValueError if an Accumulating was used
    before.
    """
    if isinstance(stack, Accumulating):
        stack.rule.use()
    if isinstance(stack, Accumulating) and stack.rule.overlap:
        return _scan_pipelined(body, x, stack, args, gather)
    run = rematerialise(lambda x, layer: body(x, gather(layer), *args))
    if isinstance(stack, Accumulating):
        return _scan_adding(run, x, stack, unroll)
    return lax.scan(lambda x, layer: (run(x, layer), None), x, stack, unroll=unroll)[0]


def _scan_adding(run: Body, x: PyTree, stack: Accumulating, unroll: bool) -> PyTree:
    """Runs the layers of a stack `[L, ...]`; backwards, each adds its gradients to the sums `[L, ...]`."""

    def finish(i: jax.Array, grads: PyTree, sums: PyTree) -> tuple[None, PyTree]:
        return None, put(sums, stack.rule.finish(at(sums, i), grads, i), i)

    def layer(carry: tuple[PyTree, PyTree], item: tuple[jax.Array, PyTree]) -> tuple[PyTree, None]:
        x, sums = carry
        i, values = item
        values, sums = _tap(finish, i, values, sums)
        return (run(x, values), sums), None

    items = jnp.arange(length(stack.values)), stack.values
    (x, sums), _ = lax.scan(layer, (x, stack.sums), items, unroll=unroll)
    return _tap(lambda first, g, _: (g, first), stack.sums, x, sums)[0]  # backwards, it starts with the sums so far


class _Kept(NamedTuple):
    """Values that the forward loop over L layers keeps for the backward loop."""

    xs: PyTree  # the inputs `[L - 1, ...]` of all layers but the last
    x_last: PyTree  # the last layer's input `[...]`
    full_last: PyTree  # the last layer's gathered parameters `[...]`
    parts: PyTree  # `AccumulationRule.keep`'s results for all layers but the last, `[L - 1, ...]`; None without it


class _Backward(NamedTuple):
    """The carry of the backward loop, from a layer to the layer before it."""

    g: PyTree  # the cotangent of the layer's input, like `x`
    full: PyTree  # the gathered parameters of the layer before
    grads: PyTree  # the layer's gradients: gathered, not yet reduced
    args_grads: PyTree  # the sums of the gradients of `args` over the layers so far
    sums: PyTree  # `Accumulating.sums` `[L, ...]`, with the gradients of later layers


def _scan_pipelined(
    body: Body, x: PyTree, stack: Accumulating, args: tuple[PyTree, ...], gather: Callable[[PyTree], PyTree]
) -> PyTree:
    """Runs the layers of a stack `[L, ...]` while their neighbours communicate.

    The last layer stays out of both loops, and its gathered parameters are kept from the forward to the backward pass.
    The backward loop's last iteration gathers the first layer once more, in vain: the number of gathers is the same as
    without overlap, two per layer. `AccumulationRule.keep` gathers once, in the forward loop.
    """
    rule, last = stack.rule, length(stack.values) - 1
    keep = rule.keep or (lambda values: values)

    def forward(x: PyTree, values: PyTree, args: tuple[PyTree, ...]) -> tuple[PyTree, _Kept]:
        def layer(carry: tuple[PyTree, ...], i: jax.Array) -> tuple[PyTree, None]:
            x, part, full, room = carry  # input `[...]` and parameters `[...]` of layer i; [L - 1, ...]
            following = keep(at(values, i + 1))
            room = put(room, (x, part), i)
            return (body(x, full, *args), following if rule.keep else None, gather(following), room), None

        first = keep(at(values, 0))
        part = first if rule.keep else None
        # made from this x, not from zeros like the stacked outputs of a scan: XLA makes the zeros of all unrolled
        # micro-steps before the first one, so that the room of the last is taken from the start
        room = jax.tree.map(lambda y: jnp.broadcast_to(y, (max(last, 1), *y.shape)), (x, part))
        (x_last, _, full, (xs, parts)), _ = lax.scan(layer, (x, part, gather(first), room), jnp.arange(last))
        return body(x_last, full, *args), _Kept(xs, x_last, full, parts)

    @jax.custom_vjp
    def run(x: PyTree, values: PyTree, sums: PyTree, args: tuple[PyTree, ...]) -> PyTree:
        del sums
        return forward(x, values, args)[0]

    def run_forward(x: PyTree, values: PyTree, sums: PyTree, args: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        x, kept = forward(x, values, args)
        return x, (kept, values, sums, args)

    def run_backward(residuals: tuple[PyTree, ...], g: PyTree) -> tuple[PyTree, None, PyTree, PyTree]:
        kept, values, sums, args = residuals
        parts = kept.parts if rule.keep else values  # cut, [L - 1, ...] or [L, ...]

        def layer_backward(x: PyTree, full: PyTree, g: PyTree) -> tuple[PyTree, PyTree, PyTree]:
            trained, frozen = rule.part(full)
            return jax.vjp(lambda x, trained, args: body(x, joined(trained, frozen), *args), x, trained, args)[1](g)

        def finish(sums: PyTree, grads: PyTree, i: Index) -> PyTree:
            trained, frozen = rule.part(at(values, i))
            gathered = lambda x: rule.part(gather(keep(joined(x, frozen))))[0]
            (own,) = jax.vjp(gathered, trained)[1](grads)  # the group reduce-scatter: the gathers' transpose
            return put(sums, rule.finish(at(sums, i), own, i), i)

        def layer(carry: _Backward, item: tuple[jax.Array, PyTree]) -> tuple[_Backward, None]:
            i, x = item
            full = gather(at(parts, jnp.maximum(i - 1, 0)))  # of layer i - 1, while layer i computes
            sums = finish(carry.sums, carry.grads, i + 1)
            g, grads, more = layer_backward(x, carry.full, carry.g)
            return _Backward(g, full, grads, jax.tree.map(jnp.add, carry.args_grads, more), sums), None

        if not last:
            g, grads, args_grads = layer_backward(kept.x_last, kept.full_last, g)
            return g, None, finish(sums, grads, 0), args_grads
        full = gather(at(parts, last - 1))
        g, grads, args_grads = layer_backward(kept.x_last, kept.full_last, g)
        carry = _Backward(g, full, grads, args_grads, sums)
        carry, _ = lax.scan(layer, carry, (jnp.arange(last), kept.xs), reverse=True)
        return carry.g, None, finish(carry.sums, carry.grads, 0), carry.args_grads

    run.defvjp(run_forward, run_backward)
    return run(x, stack.values, stack.sums, args)


def _tap(backward: Callable[..., tuple[PyTree, ...]], given: PyTree, *trees: PyTree) -> tuple[PyTree, ...]:
    """Returns the trees of `[...]`; `backward(given, *cotangents)` returns their cotangents, None for zero."""

    @jax.custom_vjp
    def identity(given: PyTree, *trees: PyTree) -> tuple[PyTree, ...]:
        del given
        return trees

    identity.defvjp(lambda given, *trees: (trees, given), lambda given, grads: (None, *backward(given, *grads)))
    return identity(given, *trees)


def length(stack: PyTree) -> int:
    """Returns L of a stack `[L, ...]`."""
    return jax.tree.leaves(stack)[0].shape[0]


def at(stack: PyTree, i: Index) -> PyTree:
    """Returns entry `i`, `[...]`, of each tensor `[L, ...]`."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), stack)


def put(stack: PyTree, layer: PyTree, i: Index) -> PyTree:
    """Returns the stack `[L, ...]` with its entries `i` replaced by `[...]`."""
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0), stack, layer)
