"""SDP4Bit's Hadamard smoother (Jia et al. 2024, arXiv 2410.15526, section 3.2.2): rotated blocks in four bits.

    encode: x <- x H in groups of 32 values, then int4         decode: int4, then x <- x H         H H = 1

A rotation spreads an outlier over its group, so that the scale of a block is not the outlier's alone. The paper rotates
gradients, and neither weights nor their differences.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from compression.codecs import Blockwise
from configs.schema import CompressionConfig

GROUP = 32  # values that are rotated together: the paper's


def rotated(x: jax.Array) -> jax.Array:
    """Returns rows `[..., N]`, each group of GROUP values by the Walsh-Hadamard transform: log2(GROUP) sums a value."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    half = 1
    while half < GROUP:
        pairs = groups.reshape(*groups.shape[:-1], -1, 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        groups = jnp.stack([low + high, low - high], axis=-2).reshape(groups.shape)
        half *= 2
    return (groups * GROUP**-0.5).reshape(x.shape)


@dataclass(frozen=True, kw_only=True)
class Rotated:
    """A codec of rotated values. Its blocks are whole groups."""

    codec: Blockwise

    @property
    def multiple(self) -> int:
        """Rows are whole blocks."""
        return self.codec.multiple

    def encode(self, x: jax.Array, key: jax.Array, real: jax.Array | None = None) -> jax.Array:
        """Returns `uint8 [..., M]` of `f32 [..., N]`."""
        return self.codec.encode(rotated(x), key, real)

    def decode(self, payload: jax.Array) -> jax.Array:
        """Returns the values `f32 [..., N]` of a payload."""
        return rotated(self.codec.decode(payload))


def int4_rotated(config: CompressionConfig) -> Rotated:
    """Returns the codec with a scale for each `compression.block` values. ValueError for a block with a part group."""
    if config.block % GROUP:
        raise ValueError(f"compression.block={config.block} must be a multiple of {GROUP} for int4_rotated")
    return Rotated(codec=Blockwise(bits=4, block=config.block))
