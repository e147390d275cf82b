"""Sends tokens to the devices that hold their experts, and back: all-to-alls over the experts' scope (GShard, 3.2).

Models are independent of the mesh and receive the exchange with the gather (`exchange_of`). On one device it sends
nothing. The code runs inside a `shard_map` whose data axes are manual.

Bytes that a device sends per micro-step and layer, if the slots of its rows have S bytes (`rows E C D` values) and the
scope has n devices on m nodes, g on each: `6 (g-1)/g S` inside the node and `6 (m-1)/m S` between nodes, because each
of the forward pass, its recomputation and the backward pass sends tokens there and back. Without recomputation
(`model.remat=dots` or `none`, and the last layer with `sharding.overlap`) it is 4 instead of 6. Without the hierarchy
`6 (g-1)/(g m) S` stay inside the node, and the messages between nodes are g times as many. A layer's experts of M_e
bytes are gathered and reduced over the rest of a partition group of p devices: `3 (p-n) M_e/(p n)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sharding.coded import PLAIN, LevelCodecs, all_to_all_levels, coded_all_to_all_rows
from sharding.context import Context, transposable
from sharding.trees import Axes, PyTree

Gather = Callable[[str, PyTree], PyTree]
KEPT = "kept by model.remat=dots"


@dataclass(frozen=True, kw_only=True)
class TokenExchange:
    """The all-to-alls of a layer's tokens between the `n` devices of `scope`, which hold `E / n` experts each.

    Expert `e` is on the device whose index in CHUNK_ORDER is `e // (E / n)`. Hierarchical: tokens for another node pass
    through the device of their node that has the same position as their destination, first inside the node, then
    between nodes. The bytes between nodes are the same, in fewer and larger messages. Gradients take the same route,
    with the same codecs.
    """

    scope: Axes = ()
    hierarchical: bool = True
    codecs: LevelCodecs = PLAIN

    @property
    def levels(self) -> list[Axes]:
        """The axes of each all-to-all, in the order of the forward direction."""
        return all_to_all_levels(self.scope, hierarchical=self.hierarchical)

    def there(self, x: jax.Array) -> jax.Array:
        """Sends local tokens `[E, ...]`, sorted by expert.

        Returns all devices' tokens for local experts, `[E/n, n, ...]`.
        """
        return keep(transposable(self._there, self._back)(x)) if self.scope else x[:, None]

    def back(self, y: jax.Array) -> jax.Array:
        """Sends the outputs `[E/n, n, ...]` of local experts back. Returns the outputs for local tokens, `[E, ...]`."""
        return keep(transposable(self._back, self._there)(y)) if self.scope else y[:, 0]

    def _there(self, x: jax.Array) -> jax.Array:
        sizes = self._sizes()
        x = x.reshape(*sizes, x.shape[0] // prod(sizes), *x.shape[1:])
        for dim, axes in enumerate(self.levels):
            x = self._send(x, dim, axes)
        x = x.reshape(prod(sizes), *x.shape[len(sizes) :])
        return jnp.moveaxis(x, 0, 1)

    def _back(self, y: jax.Array) -> jax.Array:
        sizes = self._sizes()
        y = jnp.moveaxis(y, 1, 0)
        y = y.reshape(*sizes, *y.shape[1:])
        for dim, axes in reversed(list(enumerate(self.levels))):
            y = self._send(y, dim, axes)
        return y.reshape(-1, *y.shape[len(sizes) + 1 :])

    def _sizes(self) -> list[int]:
        return [lax.axis_size(axes) for axes in self.levels]

    @jax.named_scope("experts")
    def _send(self, x: jax.Array, dim: int, axes: Axes) -> jax.Array:
        """Sends entry i of dim `dim` of `[...]` to device i of `axes`. Returns the received entries in the same dim."""
        rows = jnp.moveaxis(x, dim, 0)
        received = coded_all_to_all_rows(rows.reshape(len(rows), -1), axes, self.codecs.over(axes))
        return jnp.moveaxis(received.reshape(rows.shape), 0, dim)


ALONE = TokenExchange()  # on one device, or where experts are gathered


def keep(x: jax.Array) -> jax.Array:
    """Marks `[...]` to be saved for the backward pass by `model.remat=dots`, in addition to products with weights."""
    return checkpoint_name(x, KEPT)


@dataclass(frozen=True, kw_only=True)
class GatherWithExchange:
    """The gather that a model calls, the exchange of tokens for experts that are not gathered, and the context."""

    gather: Gather
    exchange: TokenExchange
    context: Context

    def __call__(self, name: str, tree: PyTree) -> PyTree:
        return self.gather(name, tree)


def exchange_of(gather: Gather) -> TokenExchange:
    """Returns the exchange that comes with a gather. A gather without an exchange leaves experts on every device."""
    return gather.exchange if isinstance(gather, GatherWithExchange) else ALONE


def context_of(gather: Gather) -> Context:
    """Returns the context that comes with a gather: the devices that share rows.

    By default each device has whole rows.
    """
    return gather.context if isinstance(gather, GatherWithExchange) else Context()
