"""Dropout of the residual stream and of attention (Srivastava et al. 2014; Vaswani et al. 2017, section 5.4).

The masks follow from the batch's `noise`, two random numbers of each token (input_pipeline/noise.py), and from the
numbers of the layer, the site and the head. They depend neither on the mesh nor on the split into micro-steps, and a
layer that is computed again draws the same masks. Rows without noise, as in a validation, lose nothing.

Shapes: B batch, T positions of the queries, S positions of the keys, D hidden, N heads, K key-value heads, G heads that
share one.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from configs.schema import TransformerConfig
from sharding.context import Context

WEIGHTS, ATTENTION_OUTPUT, MLP_OUTPUT, SITES = range(4)  # where a layer drops values, and the number of these sites


class NoDropout:
    """A layer that keeps all values."""

    drops_weights = False

    def values(self, x_BTD: Array, site: int) -> Array:
        """Returns the values that a branch adds to the residual stream."""
        del site
        return x_BTD

    def weights(self, weights_BKGTS: Array) -> Array:
        """Returns the weights of attention, of the local heads."""
        return weights_BKGTS


@dataclass(frozen=True)
class Dropout(NoDropout):
    """A layer that drops each value with the model's rates, and divides the others by the share that is kept.

    `noise` `[B, T, 2]` is of whole rows, as float32. `layer` counts from 0; the embedding has the number after the last
    layer.
    """

    config: TransformerConfig
    noise_BT2: Array
    layer: Array | int
    context: Context

    @property
    def drops_weights(self) -> bool:
        """Whether weights of attention are dropped."""
        return self.config.attention_dropout > 0

    def values(self, x_BTD: Array, site: int) -> Array:
        """Returns the values of the local positions, each dropped at random."""
        return _dropped(self._keys(self.context.own(self.noise_BT2), site), x_BTD, self.config.dropout)

    def weights(self, weights_BKGTS: Array) -> Array:
        """Returns the weights of whole rows, each dropped at random."""
        heads_1N = self.context.own(jnp.arange(self.config.num_heads)[None])  # divided as positions are
        heads_1KG1 = heads_1N.reshape(1, *weights_BKGTS.shape[1:3], 1)
        keys_BKGT = self._keys(self.noise_BT2[:, None, None], WEIGHTS, heads_1KG1)
        return _dropped(keys_BKGT, weights_BKGTS, self.config.attention_dropout)

    def _keys(self, noise: Array, site: int, head: Array | int = 0) -> Array:
        """Returns random keys `[..., T]` of noise `[..., T, 2]`, numbers of 24 and 16 bits, for a site and for heads.

        The head is in the upper bits of one word of a key, layer and site are in the upper bits of the other one.
        """
        number = jnp.asarray(self.layer * SITES + site, jnp.uint32)
        first = noise[..., 0].astype(jnp.uint32) + (jnp.asarray(head, jnp.uint32) << 24)
        second = noise[..., 1].astype(jnp.uint32) + (number << 16)
        words = jnp.stack(jnp.broadcast_arrays(first, second), axis=-1)
        return jax.random.wrap_key_data(words, impl="threefry2x32")


def _dropped(keys: Array, x: Array, rate: float) -> Array:
    """Returns `x` `[..., D]`, in which a key of `[...]` draws the values that are dropped."""
    if not rate:
        return x
    draw = lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[-1:])
    for _ in keys.shape:
        draw = jax.vmap(draw)
    return jnp.where(draw(keys), x / (1 - rate), 0)
