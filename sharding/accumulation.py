"""Gradients that are summed over the micro-steps inside the backward pass, and communication during its compute.

A micro-step is differentiated with respect to the sums of the gradients before it, not to the parameters: a group of
parameters is handed to the model as an `Accumulating`, and where its gradients would come out of the backward pass
they are added to those sums. The sums of a stack of layers travel backwards through its loop as the carry, so that
XLA updates them in place and no second copy of the gradients exists.

With `AccumulationRule.overlap` a loop over layers is pipelined, in both directions: while a layer computes, the
parameters of the next one are gathered, the gradients of the one before are reduced (the group reduce-scatter), and the
gradients of the layer before that are added to the sums and, in the last micro-step (delayed: a piece in each),
exchanged with the other replicas (the replica all-reduce). None of these depends on the layer's compute.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives import vary
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
    one layer, with `overlap` only the body, and decides which values the backward pass recomputes. `unroll`, without
    `overlap`: the program has the layers one after the other, not a loop. A loop copies the values that it keeps for
    the backward pass into stacks and out of them. ValueError if an Accumulating was used before.
    """
    if isinstance(stack, Accumulating):
        stack.rule.use()
    if isinstance(stack, Accumulating) and stack.rule.overlap:
        return _scan_pipelined(rematerialise(body), x, stack, args, gather)
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


class LayerVjp:
    """A layer `run(x, given, constants)` whose backward pass runs later, from saved values.

    `given` and `constants` are not saved but passed to the backward pass once more. Constants have no gradients. With
    `model.remat=full` the layer's input is the only saved value. Made anew for each trace.
    """

    def __init__(self, run: Body) -> None:
        self._run = run
        self._backward: Any = None  # jax.vjp's function, without its arrays
        self._given: list[int | None] = []  # for each array its number in `given` and `constants`; None: it is saved
        self._on_host: list[bool] = []  # for each saved value

    def forward(self, x: PyTree, given: PyTree, constants: PyTree) -> tuple[PyTree, "_Saved"]:
        """Returns the layer's output and the saved values."""
        x, backward = jax.vjp(lambda x, given: self._run(x, given, constants), x, given)
        values, self._backward = jax.tree.flatten(backward)
        numbers = {id(value): n for n, value in enumerate(jax.tree.leaves((given, constants)))}
        self._given = [numbers.get(id(value)) for value in values]
        saved = [value for value, n in zip(values, self._given, strict=True) if n is None]
        self._on_host = [jax.typeof(value).memory_space == jax.memory.Space.Host for value in saved]
        on_device = [value for value, is_on_host in zip(saved, self._on_host, strict=True) if not is_on_host]
        return x, _Saved(on_device, [*compress(saved, self._on_host)])

    def backward(self, saved: "_Saved", g: PyTree, given: PyTree, constants: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the cotangents of `x` and `given` for the cotangent of the output."""
        on_device, on_host = map(iter, saved)
        rest = (next(on_host if is_on_host else on_device) for is_on_host in self._on_host)
        leaves = jax.tree.leaves((given, constants))
        values = [next(rest) if n is None else leaves[n] for n in self._given]
        return jax.tree.unflatten(self._backward, values)(g)


class _Saved(NamedTuple):
    """The saved values of a layer `[...]`, or of several `[L, ...]`."""

    on_device: list[jax.Array]
    on_host: list[jax.Array]


class _Kept(NamedTuple):
    """Values that the forward loop over L layers keeps for the backward loop."""

    saved: _Saved  # `[L - 1, ...]`: for the layers without the last one
    saved_last: _Saved  # the last layer's `[...]`
    full_last: PyTree  # the last layer's gathered parameters `[...]`
    parts: PyTree  # `AccumulationRule.keep`'s results for all layers but the last, `[L - 1, ...]`; None without it


class _Backward(NamedTuple):
    """The carry of the backward loop, from a layer to the layer before it."""

    g: PyTree  # the cotangent of the layer's input, like `x`
    full: PyTree  # the gathered parameters of the layer before
    grads: PyTree  # the layer's gradients: gathered, not yet reduced
    reduced: PyTree  # the following layer's gradients after the group reduce-scatter; None for the last layer
    args_grads: PyTree  # the sums of the gradients of `args` over the layers so far
    sums: PyTree  # `Accumulating.sums` `[L, ...]`, with the gradients of later layers


def _scan_pipelined(
    body: Body, x: PyTree, stack: Accumulating, args: tuple[PyTree, ...], gather: Callable[[PyTree], PyTree]
) -> PyTree:
    """Runs the layers of a stack `[L, ...]` while their neighbours communicate.

    The last layer stays out of both loops, and its gathered parameters are kept from the forward to the backward pass.
    The backward loop's last iteration gathers the first layer once more, in vain: the number of gathers is the same as
    without overlap, two per layer. `AccumulationRule.keep` gathers once, in the forward loop. A layer's gradients are
    reduced during the next iteration, and added and exchanged during the one after it. XLA would hide only the last
    collectives of a longer chain in one iteration. The layer before the last also stays out of the backward loop.
    """
    rule, last = stack.rule, length(stack.values) - 1
    keep = rule.keep or (lambda values: values)

    def run_layer(x: PyTree, given: tuple[PyTree, tuple[PyTree, ...]], frozen: PyTree) -> PyTree:
        trained, args = given
        return body(x, joined(trained, frozen), *args)

    def given(full: PyTree, args: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        trained, frozen = rule.part(full)
        return (trained, args), frozen

    looped, last_layer = LayerVjp(run_layer), LayerVjp(run_layer)

    def forward(x: PyTree, values: PyTree, args: tuple[PyTree, ...]) -> tuple[PyTree, _Kept]:
        def layer(carry: tuple[PyTree, ...], i: jax.Array) -> tuple[PyTree, list[jax.Array]]:
            x, part, full, room = carry  # input `[...]` and parameters `[...]` of layer i; [L - 1, ...]
            following = keep(at(values, i + 1))
            x, saved = looped.forward(x, *given(full, args))
            room = put(room, (saved.on_device, part), i)
            return (x, following if rule.keep else None, gather(following), room), saved.on_host

        first = keep(at(values, 0))
        part, full = first if rule.keep else None, gather(first)
        types = _types(lambda x, full: (looped.forward(x, *given(full, args))[1].on_device, part), x, full)
        room = _room(types, max(last, 1), jax.tree.leaves(x)[0])
        (x_last, _, full, (saved, parts)), on_host = lax.scan(layer, (x, part, full, room), jnp.arange(last))
        x, saved_last = last_layer.forward(x_last, *given(full, args))
        return x, _Kept(_Saved(saved, on_host), saved_last, full, parts)

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

        def reduce(grads: PyTree, i: Index) -> PyTree:
            trained, frozen = rule.part(at(values, i))
            gathered = lambda x: rule.part(gather(keep(joined(x, frozen))))[0]
            return jax.vjp(gathered, trained)[1](grads)[0]  # the group reduce-scatter: the gathers' transpose

        def finish(carry: _Backward, i: Index) -> PyTree:
            """Returns the sums with the reduced gradients of layer `i`, if it exists."""
            if carry.reduced is None:
                return carry.sums
            return put(carry.sums, rule.finish(at(carry.sums, i), carry.reduced, i), i)

        def layer(carry: _Backward, i: Index) -> tuple[_Backward, None]:
            # communication for the layers i - 1, i + 1 and i + 2, while layer i computes
            full = gather(at(parts, jnp.maximum(i - 1, 0)))
            reduced, sums = reduce(carry.grads, i + 1), finish(carry, i + 2)
            g, (grads, more) = looped.backward(at(kept.saved, i), carry.g, *given(carry.full, args))
            more = jax.tree.map(jnp.add, carry.args_grads, more)
            return _Backward(g, full, grads, reduced, more, sums), None

        full = gather(at(parts, last - 1)) if last else kept.full_last
        g, (grads, args_grads) = last_layer.backward(kept.saved_last, g, *given(kept.full_last, args))
        carry = _Backward(g, full, grads, None, args_grads, sums)
        if last:
            carry, _ = layer(carry, last - 1)
            carry, _ = lax.scan(layer, carry, jnp.arange(last - 1), reverse=True)
        carry = carry._replace(sums=finish(carry, 1), reduced=reduce(carry.grads, 0))
        return carry.g, None, finish(carry, 0), carry.args_grads

    run.defvjp(run_forward, run_backward)
    return run(x, stack.values, stack.sums, args)


def _types(function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Returns the types of the arrays that a function returns, without running it."""
    types: list[PyTree] = []
    jax.eval_shape(lambda *args: types.append(jax.tree.map(jax.typeof, function(*args))), *args)
    return types[0]


def _room(types: PyTree, length: int, x: jax.Array) -> PyTree:
    """Returns arrays `[length, ...]` to put values of `types` `[...]` into, made from a value of `x` `[...]`.

    Not from zeros, like the stacked outputs of a scan: XLA makes the zeros of all unrolled micro-steps before the first
    one, so that the room of the last is taken from the start.
    """
    x_axes, value = jax.typeof(x).manual_axis_type.varying, x[(0,) * x.ndim]

    def stack(entry: Any) -> jax.Array:
        axes = entry.manual_axis_type.varying
        first = value.astype(entry.dtype) if axes >= x_axes else jnp.zeros((), entry.dtype)  # the layer made a constant
        return jnp.broadcast_to(vary(first, sorted(axes)), (length, *entry.shape))

    return jax.tree.map(stack, types)


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
