"""Gradients that are summed over the micro-steps inside the backward pass, and hop two of the last one beside it.

A micro-step is differentiated with respect to the sums of the gradients before it, not to the parameters: a group of
parameters is handed to the model as an `Accumulating`, and where its gradients would come out of the backward pass
they are added to those sums. The sums of a stack of layers travel backwards through its loop as the cotangent of a
carry, so that XLA updates them in place and no second copy of the gradients exists. In the last micro-step hop two
exchanges the finished sums of a layer while the layer before it computes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

PyTree = Any
Index = jax.Array | int
Body = Callable[[jax.Array, PyTree], jax.Array]  # (x, one layer's parameters) -> x


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """What is done with the gradients of a group; of a stack, with those of one layer."""

    add: Callable[[PyTree, PyTree], PyTree]  # (sums, gradients) -> sums
    exchange: Callable[[PyTree, Index], PyTree] | None = None  # hop two of finished sums; the index is the layer's


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Accumulating:
    """A group of parameters, and the sums of its gradients so far; of a stack, both are `[L, ...]`.

    `sums` may hold more than the sums, as long as `rule` knows it: what hop two keeps from step to step.
    """

    values: PyTree
    sums: PyTree
    rule: Rule = field(metadata={"static": True})


def values_of(group: PyTree) -> PyTree:
    """Returns the values of a group that is used once; backwards, their gradients go into its sums."""
    if not isinstance(group, Accumulating):
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
    body: Body, x: jax.Array, stack: PyTree, rematerialise: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> jax.Array:
    """Returns `x` after `body(x, layer)` for each layer of a stack `[L, ...]`, an Accumulating or plain arrays.

    `rematerialise` wraps what one layer runs, and says what its backward pass computes again.
    """
    if not isinstance(stack, Accumulating):
        run = rematerialise(body)
        return lax.scan(lambda x, layer: (run(x, layer), None), x, stack)[0]
    if stack.rule.exchange is None:
        return _scan_adding(rematerialise(body), x, stack)
    return _scan_exchanging(body, x, stack, stack.rule.exchange, rematerialise)


def _scan_adding(run: Body, x: jax.Array, stack: Accumulating) -> jax.Array:
    """Runs the layers; backwards, each adds its gradients to the sums."""

    def add(i: jax.Array, grads: PyTree, sums: PyTree) -> tuple[None, PyTree]:
        return None, _put(sums, stack.rule.add(_at(sums, i), grads), i)

    def layer(carry: tuple[jax.Array, PyTree], item: tuple[jax.Array, PyTree]) -> tuple[Any, None]:
        x, sums = carry
        i, values = item
        values, sums = _tap(add, i, values, sums)
        return (run(x, values), sums), None

    (x, sums), _ = lax.scan(layer, (x, stack.sums), (jnp.arange(_length(stack)), stack.values))
    return _start_backwards(x, sums, stack.sums)


def _scan_exchanging(
    body: Body,
    x: jax.Array,
    stack: Accumulating,
    exchange: Callable[[PyTree, Index], PyTree],
    rematerialise: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> jax.Array:
    """Runs the layers; backwards, a layer's finished sums wait in the carry and are exchanged beside the next layer.

    The backward pass begins with the last layer, which stays out of the loop: nothing waits there yet. After the loop
    the first layer's sums wait.
    """
    last = _length(stack) - 1
    add = stack.rule.add

    def add_last(_: None, grads: PyTree, sums: PyTree, waiting: PyTree) -> tuple[None, PyTree, PyTree]:
        del waiting
        return None, sums, add(_at(sums, last), grads)

    def add_and_exchange(i: jax.Array, grads: PyTree, sums: PyTree, waiting: PyTree) -> tuple[None, PyTree, PyTree]:
        finished = add(_at(sums, i), grads)
        return None, _put(sums, exchange(waiting, i + 1), i + 1), finished

    def exchange_first(_: None, sums: PyTree, waiting: PyTree) -> tuple[PyTree, PyTree]:
        return _put(sums, exchange(waiting, 0), 0), waiting

    # A layer's parameters are taken from the stack inside of what is rematerialised, or a copy of all would be kept.
    @rematerialise
    def layer(i: jax.Array, x: jax.Array, sums: PyTree, waiting: PyTree) -> tuple[jax.Array, PyTree, PyTree]:
        values, sums, waiting = _tap(add_and_exchange, i, _at(stack.values, i), sums, waiting)
        return body(x, values), sums, waiting

    @rematerialise
    def last_layer(x: jax.Array, sums: PyTree, waiting: PyTree) -> tuple[jax.Array, PyTree, PyTree]:
        values, sums, waiting = _tap(add_last, None, _at(stack.values, last), sums, waiting)
        return body(x, values), sums, waiting

    waiting = jax.tree.map(jnp.zeros_like, _at(stack.sums, last))  # its cotangent alone is used
    sums, waiting = _tap(exchange_first, None, stack.sums, waiting)
    carry, _ = lax.scan(lambda carry, i: (layer(i, *carry), None), (x, sums, waiting), jnp.arange(last))
    x, *carried = last_layer(*carry)
    return _start_backwards(x, tuple(carried), (stack.sums, waiting))


def _tap(backward: Callable[..., tuple[PyTree, ...]], i: jax.Array | None, *trees: PyTree) -> tuple[PyTree, ...]:
    """Returns the trees; their cotangents are what `backward(i, *cotangents)` returns, None for zero."""

    @jax.custom_vjp
    def identity(i: jax.Array | None, *trees: PyTree) -> tuple[PyTree, ...]:
        del i
        return trees

    identity.defvjp(lambda i, *trees: (trees, i), lambda i, cotangents: (None, *backward(i, *cotangents)))
    return identity(i, *trees)


def _start_backwards(x: jax.Array, carried: PyTree, first: PyTree) -> jax.Array:
    """Returns `x`; backwards, `first` is the cotangent of `carried`."""

    @jax.custom_vjp
    def start(x: jax.Array, carried: PyTree, first: PyTree) -> jax.Array:
        del carried, first
        return x

    start.defvjp(lambda x, carried, first: (x, first), lambda first, cotangent: (cotangent, first, None))
    return start(x, carried, first)


def _length(stack: Accumulating) -> int:
    return jax.tree.leaves(stack.values)[0].shape[0]


def _at(stack: PyTree, i: Index) -> PyTree:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), stack)


def _put(stack: PyTree, layer: PyTree, i: Index) -> PyTree:
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0), stack, layer)
