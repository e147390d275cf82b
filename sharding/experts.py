"""Sends tokens to the devices that hold their experts, and back, over the experts' scope.

With a capacity of the experts these are all-to-alls (GShard, 3.2). Without one each device receives all tokens of the
scope, and sends back the sums of its experts' outputs, because a token may go to any number of its experts.

Models are independent of the mesh and receive the exchange with the gather (`exchange_of`). On one device it sends
nothing. The code runs inside a `shard_map` whose data axes are manual.

Bytes that a device sends per micro-step and layer, if the slots of its rows have S bytes (`rows E C D` values) and the
scope has n devices on m nodes, g on each: `6 (g-1)/g S` inside the node and `6 (m-1)/m S` between nodes, because each
of the forward pass, its recomputation and the backward pass sends tokens there and back. Without recomputation
(`model.remat=dots` or `none`, and the last layer with `sharding.overlap`) it is 4 instead of 6. Without the hierarchy
`6 (g-1)/(g m) S` stay inside the node, and the messages between nodes are g times as many. A layer's experts of M_e
bytes are gathered and reduced over the rest of a partition group of p devices: `3 (p-n) M_e/(p n)`.

Without a capacity, if the tokens of its rows have X bytes (`rows T D` values) and their routing R bytes (`rows T 2 k`
float32 values): `5 (m-1) X + 3 (m-1) R` between nodes and `m (g-1)` in place of `m-1` inside the node. Without
recomputation it is 4 and 2 instead of 5 and 3. Without the hierarchy a gather is a ring over the `n = m g` devices, and
a sum is sent to each of them: `3 (n-1)/g X + 2 (m-1) g X + 2 (n-1)/g R + (m-1) g R` between nodes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sharding.coded import PLAIN, LevelCodecs, all_to_all_levels, coded_all_to_all_rows, levels
from sharding.collectives import all_gather_chunks
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

    def spread(self, x: jax.Array) -> jax.Array:
        """Returns the tokens of all devices, `[n N, ...]`, from local tokens `[N, ...]`."""
        return keep(transposable(self._spread, self._collect)(x)) if self.scope else x

    def collect(self, y: jax.Array) -> jax.Array:
        """Returns the sums over all devices of local tokens' rows, `[N, ...]`, from rows of all tokens `[n N, ...]`.

        Sums are float32, and rounded on each network level.
        """
        return keep(transposable(self._collect, self._spread)(y)) if self.scope else y

    def first(self, num_local: int) -> jax.Array | int:
        """Returns the number of the first local expert, an int32 `[]`."""
        return lax.axis_index(self.scope) * num_local if self.scope else 0

    @jax.named_scope("experts")
    def _spread(self, x: jax.Array) -> jax.Array:
        chunks = all_gather_chunks(x.reshape(-1), self.scope, hierarchical=self.hierarchical, codecs=self.codecs)
        return chunks.reshape(-1, *x.shape[1:])

    @jax.named_scope("experts")
    def _collect(self, y: jax.Array) -> jax.Array:
        rows = y.reshape(*(lax.axis_size(axis) for axis in self.scope), -1)
        if not self.hierarchical:
            rows = rows.transpose(*reversed(range(len(self.scope))), -1)
        for axes in reversed(levels(self.scope, hierarchical=self.hierarchical)):
            received = coded_all_to_all_rows(rows.reshape(lax.axis_size(axes), -1), axes, self.codecs.over(axes))
            rows = jnp.sum(received, axis=0, dtype=jnp.float32).astype(y.dtype)
        return rows.reshape(-1, *y.shape[1:])

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
