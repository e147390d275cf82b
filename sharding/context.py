"""Attention over rows whose positions are divided among devices: all-to-alls over heads (Ulysses, arXiv 2309.14509).

Each of `c` devices has `T / c` consecutive positions of its rows. For attention it receives all positions of `K / c` of
the key-value heads, with the queries that use them. Nothing else in a layer needs other positions. Models are
independent of the mesh and receive the context with the gather (`experts.context_of`). The code runs inside a
`shard_map` whose data axes are manual.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from sharding.coded import as_integers
from sharding.trees import Axes, PyTree

AttentionFunction = Callable[
    [jax.Array, jax.Array, jax.Array], jax.Array
]  # [B, T, N, H], twice [B, T, K, H] -> [B, T, N, H]


@dataclass(frozen=True, kw_only=True)
class Context:
    """The devices of `axes` share rows. Without axes each device has whole rows, and nothing is sent."""

    axes: Axes = ()

    @property
    def size(self) -> int:
        """Number of devices that share a row."""
        return lax.axis_size(self.axes) if self.axes else 1

    @jax.named_scope("context")
    def whole(self, tree: PyTree) -> PyTree:
        """Returns arrays of whole rows `[B, T, ...]`, given arrays of local positions `[B, T / c, ...]`."""
        return jax.tree.map(lambda x: lax.all_gather(x, self.axes, axis=1, tiled=True), tree) if self.axes else tree

    def own(self, tree: PyTree) -> PyTree:
        """Returns the local positions of arrays `[B, T, ...]`."""
        return jax.tree.map(self._own, tree) if self.axes else tree

    def _own(self, x: jax.Array) -> jax.Array:
        length = x.shape[1] // self.size
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axes) * length, length, axis=1)

    def attend(self, attention: AttentionFunction, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Returns `attention(q, k, v)` over whole rows, `[B, T / c, N, H]`, for the local positions of all arrays.

        Queries, keys and values are sent together: `2 (N + K) H (c - 1) / c` values per position, in both directions.
        """
        if not self.axes:
            return attention(q, k, v)
        (batch, length, heads, head_dim), kv_heads = q.shape, k.shape[2]
        # per key-value head: its key, value and queries
        together = jnp.concatenate([x.reshape(batch, length, kv_heads, -1) for x in (q, k, v)], -1)
        cuts = head_dim * (heads // kv_heads), head_dim * (heads // kv_heads + 1)
        parts = jnp.split(self._send(together, 2, 1), cuts, -1)
        return self._send(attention(*(x.reshape(*x.shape[:2], -1, head_dim) for x in parts)), 1, 2)

    def _send(self, x: jax.Array, cut: int, joined: int) -> jax.Array:
        """Sends parts of dim `cut` of `[...]`, one to each device.

        Returns the received parts, joined on dim `joined`.
        """

        def sender(cut: int, joined: int) -> Callable[[jax.Array], jax.Array]:
            send = partial(lax.all_to_all, axis_name=self.axes, split_axis=cut, concat_axis=joined, tiled=True)
            return jax.named_scope("context")(partial(as_integers, send))

        return transposable(sender(cut, joined), sender(joined, cut))(x)


def transposable(
    forward: Callable[[jax.Array], jax.Array], transposed: Callable[[jax.Array], jax.Array]
) -> Callable[[jax.Array], jax.Array]:
    """Returns `forward`, a permutation of values `[...]` between devices, whose gradients are sent by `transposed`."""
    send = jax.custom_vjp(forward)
    send.defvjp(lambda x: (forward(x), None), lambda _, g: (transposed(g),))
    return send
