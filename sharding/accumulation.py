"""Gradients summed over the micro-steps inside the backward pass, and hop two of the last one beside it.

A micro-step differentiates its loss with respect to the sums of the micro-steps before it instead of the parameters:
the parameters' group is replaced by an `Accumulating`, whose transpose adds the new gradients to those sums. For a
stack of layers the sums are carried backwards through the scan and updated in place, so that no second copy of all
gradients ever exists, and in the last micro-step a layer's finished sum is exchanged with the other replicas while
the next layer computes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

PyTree = Any
Index = jax.Array | int


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """What becomes of a group's gradients; for a stack the trees are those of one layer."""

    add: Callable[[PyTree, PyTree], PyTree]  # (sums, gradients) -> sums
    exchange: Callable[[PyTree, Index], PyTree] | None = None  # (finished sums, index of the layer) -> over all replicas


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Accumulating:
    """A group of parameters, for a stack `[L, ...]`, and the sums of its gradients so far."""

    values: PyTree
    sums: PyTree
    rule: Rule = field(metadata={"static": True})


def is_accumulating(x: object) -> bool:
    """Whether a node of a tree is Accumulating: the `is_leaf` of trees of them."""
    return isinstance(x, Accumulating)


def values_of(group: PyTree) -> PyTree:
    """Returns the values of a group; backwards their gradients are added to its sums, and exchanged if it is time."""
    if not is_accumulating(group):
        return group
    rule = group.rule

    @jax.custom_vjp
    def values(values: PyTree, sums: PyTree) -> PyTree:
        del sums
        return values

    def backward(sums: PyTree, grads: PyTree) -> tuple[None, PyTree]:
        sums = rule.add(sums, grads)
        return None, rule.exchange(sums, 0) if rule.exchange else sums

    values.defvjp(lambda values, sums: (values, sums), backward)
    return values(group.values, group.sums)


def scan_layers(
    body: Callable[[jax.Array, PyTree], jax.Array],
    x: jax.Array,
    stack: PyTree,
    rematerialise: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> jax.Array:
    """Returns `x` after `body(x, layer)` for each layer of a stack `[L, ...]`, in a loop."""
    if is_accumulating(stack) and stack.rule.exchange:
        return _scan_exchanging(body, x, stack, stack.rule.exchange, rematerialise)
    body = rematerialise(body)
    if is_accumulating(stack):
        return _scan_adding(body, x, stack)
    return lax.scan(lambda x, layer: (body(x, layer), None), x, stack)[0]


def _scan_adding(body: Callable[..., jax.Array], x: jax.Array, stack: Accumulating) -> jax.Array:
    """The sums travel backwards as the cotangent of a carry."""

    @jax.custom_vjp
    def tap(layer: PyTree, sums: PyTree, i: jax.Array) -> tuple[PyTree, PyTree]:
        del i
        return layer, sums

    def backward(i: jax.Array, cotangents: tuple[PyTree, PyTree]) -> tuple[None, PyTree, None]:
        grads, sums = cotangents
        return None, _put(sums, stack.rule.add(_at(sums, i), grads), i), None

    tap.defvjp(lambda layer, sums, i: ((layer, sums), i), backward)

    def step(carry: tuple[jax.Array, PyTree], item: tuple[jax.Array, PyTree]) -> tuple[Any, None]:
        x, sums = carry
        i, layer = item
        layer, sums = tap(layer, sums, i)
        return (body(x, layer), sums), None

    items = jnp.arange(_length(stack.values)), stack.values
    (x, sums), _ = lax.scan(step, (x, stack.sums), items)
    return _backwards_from(x, sums, stack.sums)


def _scan_exchanging(
    body: Callable[..., jax.Array], x: jax.Array, stack: Accumulating, exchange: Callable[[PyTree, Index], PyTree], rematerialise: Any
) -> jax.Array:
    """The same, and backwards a layer's finished sums wait for one layer: they are exchanged beside its compute.

    The last layer, whose backward pass is the first, has nothing to exchange yet and stays out of the loop; what
    waits after the loop is the first layer's.
    """
    last = _length(stack.values) - 1
    rule = stack.rule

    @jax.custom_vjp
    def first(sums: PyTree, waiting: PyTree) -> tuple[PyTree, PyTree]:
        return sums, waiting

    def first_backward(_: None, cotangents: tuple[PyTree, PyTree]) -> tuple[PyTree, None]:
        sums, waiting = cotangents
        return _put(sums, exchange(waiting, 0), 0), None

    first.defvjp(lambda sums, waiting: ((sums, waiting), None), first_backward)

    @partial(jax.custom_vjp)
    def tap(layer: PyTree, sums: PyTree, waiting: PyTree, i: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        del i
        return layer, sums, waiting

    def backward(i: jax.Array, cotangents: tuple[PyTree, PyTree, PyTree]) -> tuple[None, PyTree, PyTree, None]:
        grads, sums, waiting = cotangents
        finished = rule.add(_at(sums, i), grads)
        return None, _put(sums, exchange(waiting, i + 1), i + 1), finished, None

    tap.defvjp(lambda layer, sums, waiting, i: ((layer, sums, waiting), i), backward)

    @jax.custom_vjp
    def tap_last(layer: PyTree, sums: PyTree, waiting: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        return layer, sums, waiting

    def last_backward(_: None, cotangents: tuple[PyTree, PyTree, PyTree]) -> tuple[None, PyTree, PyTree]:
        grads, sums, _waiting = cotangents
        return None, sums, rule.add(_at(sums, last), grads)

    tap_last.defvjp(lambda layer, sums, waiting: ((layer, sums, waiting), None), last_backward)

    @rematerialise
    def run(i, x, sums, waiting):
        layer, sums, waiting = tap(_at(stack.values, i), sums, waiting, i)
        return body(x, layer), sums, waiting

    @rematerialise
    def run_last(x, sums, waiting):
        layer, sums, waiting = tap_last(_at(stack.values, last), sums, waiting)
        return body(x, layer), sums, waiting

    def step(carry: tuple[jax.Array, PyTree, PyTree], i: jax.Array) -> tuple[Any, None]:
        return run(i, *carry), None

    waiting = jax.tree.map(jnp.zeros_like, _at(stack.sums, 0))  # only its cotangent matters
    sums, waiting = first(stack.sums, waiting)
    (x, sums, waiting), _ = lax.scan(step, (x, sums, waiting), jnp.arange(last))
    x, sums, waiting = run_last(x, sums, waiting)
    return _backwards_from(x, (sums, waiting), (stack.sums, waiting))


def _backwards_from(x: jax.Array, carried: PyTree, sums: PyTree) -> jax.Array:
    """Returns `x`; backwards, the cotangent of what was `carried` starts as `sums`."""

    @jax.custom_vjp
    def start(x: jax.Array, carried: PyTree, sums: PyTree) -> jax.Array:
        del carried, sums
        return x

    start.defvjp(lambda x, carried, sums: (x, sums), lambda sums, g: (g, sums, None))
    return start(x, carried, sums)


def _length(stack: PyTree) -> int:
    return jax.tree.leaves(stack)[0].shape[0]


def _at(stack: PyTree, i: Index) -> PyTree:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), stack)


def _put(stack: PyTree, layer: PyTree, i: Index) -> PyTree:
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0), stack, layer)
