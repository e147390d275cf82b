"""The codecs that a config chooses, of the table and registered ones, for all collectives."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from compression.codecs import BODIES
from configs.schema import CompressionConfig
from configs.schema.codecs import COLLECTIVES
from configs.schema.own import OWN
from sharding.coded import Codec, LevelCodecs


@dataclass(frozen=True, kw_only=True)
class Marked:
    """A user's codec, which may turn NaN and infinity into numbers. An additional byte per row records their presence.

    All values of such a row become NaN. The replica all-reduce does not need this, because it checks all devices
    (compression/primitives.py).
    """

    codec: Codec

    @property
    def multiple(self) -> int:
        """The multiple of the wrapped codec."""
        return self.codec.multiple

    def encode(self, x: jax.Array, key: jax.Array, real: jax.Array | None = None) -> jax.Array:
        """Returns `uint8 [..., M + 1]` of `f32 [..., N]`."""
        is_bad = ~jnp.isfinite(x).all(axis=-1, keepdims=True)
        return jnp.concatenate([self.codec.encode(x, key, real), is_bad.astype(jnp.uint8)], axis=-1)

    def decode(self, payload: jax.Array) -> jax.Array:
        """Returns the values `f32 [..., N]` of a payload."""
        return jnp.where(payload[..., -1:] > 0, jnp.nan, self.codec.decode(payload[..., :-1]))


def make_codec(name: str, config: CompressionConfig) -> Codec | None:
    """Returns the codec called `name`, or None for `none`."""
    if name in OWN["codec"]:
        return OWN["codec"][name](config)
    return None if name == "none" else BODIES[name](config.block)


def make_codecs(config: CompressionConfig) -> tuple[LevelCodecs, LevelCodecs, LevelCodecs, LevelCodecs]:
    """Returns codecs of gathers, group reduce-scatters, experts' tokens and weight differences.

    The first two are ZeRO++'s qwZ and qgZ (arXiv 2306.10209), the last one SDP4Bit's qWD (arXiv 2410.15526).
    """

    def codec_for(key: str) -> Codec | None:
        name = getattr(config, key)
        codec = make_codec(name, config)
        return Marked(codec=codec) if codec and name in OWN["codec"] else codec

    def codecs_for(collective: str) -> LevelCodecs:
        return LevelCodecs(inter=codec_for(f"{collective}_inter"), intra=codec_for(f"{collective}_intra"))

    gather, reduce_scatter, experts, differences = map(codecs_for, COLLECTIVES)
    return gather, reduce_scatter, experts, differences
