"""Codecs encode values as the bytes that cross the slow network. sharding/coded.py defines the interface.

Payloads are byte arrays rather than arrays of a narrow dtype: XLA may widen the latter (a bf16 sum on CPUs) or move the
conversion across a collective, but it leaves bytes unchanged. The bytes sent therefore equal the payload's size, and
can be read in the compiled program. The caller stores the encoding error (compression/exchange.py).
"""

from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from configs.schema import CompressionConfig
from configs.schema.own import OWN
from sharding.coded import Codec, LevelCodecs

SCALE_BYTES = 4  # one f32 per block


@dataclass(frozen=True, kw_only=True)
class BFloat16:
    """bf16: half the bytes, 8 bits of precision, the same range as f32.

    Finite values that would round to infinity become the largest finite number.
    """

    multiple: int = 1

    def encode(self, x: jax.Array, key: jax.Array, real: jax.Array | None = None) -> jax.Array:
        """Returns `uint8 [..., 2 N]` of `f32 [..., N]`: two bytes per value."""
        del key, real
        largest = float(jnp.finfo(jnp.bfloat16).max)
        x = jnp.where(jnp.isinf(x), x, jnp.clip(x, -largest, largest))
        bits = lax.bitcast_convert_type(lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7), jnp.uint32)
        return _to_bytes((bits >> 16).astype(jnp.uint16))  # XLA would materialise a bf16 array first

    def decode(self, payload: jax.Array) -> jax.Array:
        """Returns the values `f32 [..., N]` of a payload."""
        return _from_bytes(payload, jnp.bfloat16).astype(jnp.float32)


@dataclass(frozen=True, kw_only=True)
class Blockwise:
    """Symmetric integers of 8 or 4 bits, with one f32 scale per block (ZeRO++ section 3, arXiv 2306.10209).

    The largest magnitude of a block becomes 127 or 7. With `stochastic`, rounding is unbiased: the probability of
    rounding up is the value's distance to the lower neighbour.
    """

    bits: int
    block: int
    stochastic: bool = False

    @property
    def multiple(self) -> int:
        """Rows are whole blocks (an even number of values, so that 4-bit values fill bytes)."""
        return self.block

    def encode(self, x: jax.Array, key: jax.Array, real: jax.Array | None = None) -> jax.Array:
        """Returns `uint8 [..., M]` of `f32 [..., N]`: the integers, then the scales."""
        del real  # padding is zero, which does not change the maximum
        most = 2 ** (self.bits - 1) - 1
        blocks = _blocks(x, self.block)
        scales = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) * (1 / most)
        scaled = blocks / jnp.where(scales > 0, scales, 1.0)
        if self.stochastic:
            rounded = jnp.floor(scaled + jax.random.uniform(key, scaled.shape))
        else:
            rounded = jnp.round(scaled)
        integers = jnp.clip(rounded, -most, most).astype(jnp.int8).reshape(x.shape)
        return jnp.concatenate([self._pack(integers), _to_bytes(scales[..., 0])], axis=-1)

    def decode(self, payload: jax.Array) -> jax.Array:
        """Returns the values `f32 [..., N]` of a payload."""
        blocks = payload.shape[-1] // (self.block * self.bits // 8 + SCALE_BYTES)
        packed, scales = jnp.split(payload, [blocks * self.block * self.bits // 8], axis=-1)
        integers = self._unpack(packed).reshape(*payload.shape[:-1], blocks, self.block)
        values = integers.astype(jnp.float32) * _from_bytes(scales, jnp.float32)[..., None]
        return values.reshape(*payload.shape[:-1], blocks * self.block)

    def _pack(self, integers: jax.Array) -> jax.Array:
        as_bytes = lax.bitcast_convert_type(integers, jnp.uint8)
        if self.bits == 8:
            return as_bytes
        low, high = jnp.split(as_bytes, 2, axis=-1)  # pairs values of both halves: no strided access
        return (low & 15) | (high << 4)

    def _unpack(self, packed: jax.Array) -> jax.Array:
        if self.bits == 8:
            return lax.bitcast_convert_type(packed, jnp.int8)
        both = lax.bitcast_convert_type(jnp.concatenate([packed << 4, packed & 0xF0], axis=-1), jnp.int8)
        return both >> 4  # an arithmetic shift keeps the sign


@dataclass(frozen=True, kw_only=True)
class OneBit:
    """The sign, and one scale per block: the mean of its absolute values (EF-SignSGD, arXiv 1901.09847).

    This scale minimises the squared error. 1-bit Adam (arXiv 2102.02888) sends momenta in this form. Gradients sent
    before the optimizer lead to a far higher loss, so `compression.all_reduce` does not offer it. The codec needs error
    feedback.
    """

    block: int

    @property
    def multiple(self) -> int:
        """Rows are whole blocks."""
        return self.block

    def encode(self, x: jax.Array, key: jax.Array, real: jax.Array | None = None) -> jax.Array:
        """Returns `uint8 [..., M]` of `f32 [..., N]`: signs, then scales."""
        del key
        sizes = jnp.abs(_blocks(x, self.block))
        if real is None:
            shares = 1 / self.block
        else:
            there = _blocks(real, self.block)
            shares = there / jnp.maximum(jnp.sum(there, axis=-1, keepdims=True), 1)
        scales = jnp.sum(sizes * shares, axis=-1, keepdims=True)  # the mean; a division before the sum avoids overflow
        return _packed(_as_uint8(x >= 0), 1, scales)

    def decode(self, payload: jax.Array) -> jax.Array:
        """Returns the values `f32 [..., N]` of a payload."""
        codes, scales = _unpacked(payload, self.block, 1)
        return _signed(codes == 1, scales)


@dataclass(frozen=True, kw_only=True)
class Statistical:
    """The sign and one of two magnitudes per block: the means of the values below and above a threshold (MuLoCo).

    MuLoCo (arXiv 2505.23725) derives bins from the standard deviation, and uses each bin's mean. Here the threshold is
    SPLIT times the mean absolute value, which minimises the squared error for Gaussian values (Lloyd and Max). The
    codec needs error feedback.
    """

    block: int
    SPLIT = 1.23

    @property
    def multiple(self) -> int:
        """Rows are whole blocks."""
        return self.block

    def encode(self, x: jax.Array, key: jax.Array, real: jax.Array | None = None) -> jax.Array:
        """Returns `uint8 [..., M]` of `f32 [..., N]`: signs, flags of large values, then magnitudes."""
        del key
        sum_of = lambda values: jnp.sum(values, axis=-1, keepdims=True, dtype=jnp.float32)
        sizes, count = jnp.abs(_blocks(x, self.block)) * (1 / self.block), self.block  # sums cannot overflow
        if real is not None:
            there = jnp.broadcast_to(_blocks(real, self.block), sizes.shape)
            sizes, count = jnp.where(there, sizes, 0), sum_of(there)
        large = sizes > self.SPLIT / jnp.maximum(count, 1) * sum_of(sizes)
        num_large = sum_of(large)
        of_small = sum_of(jnp.where(large, 0, sizes)) * (self.block / jnp.maximum(count - num_large, 1))
        of_large = sum_of(jnp.where(large, sizes, 0)) * (self.block / jnp.maximum(num_large, 1))
        codes = _as_uint8(x >= 0) | _as_uint8(large).reshape(x.shape) << 1
        return _packed(codes, 2, jnp.concatenate([of_small, of_large], axis=-1))

    def decode(self, payload: jax.Array) -> jax.Array:
        """Returns the values `f32 [..., N]` of a payload."""
        codes, means = _unpacked(payload, self.block, 2)
        return _signed(codes & 1 == 1, jnp.where(codes >= 2, means[..., 1:], means[..., :1]))


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
    match name:
        case "bf16":
            return BFloat16()
        case "int8" | "int4":
            return Blockwise(bits=int(name[3:]), block=config.block)
        case "statistical":
            return Statistical(block=config.block)
        case "none":
            return None
    return OWN["codec"][name](config)


def make_codecs(config: CompressionConfig) -> tuple[LevelCodecs, LevelCodecs, LevelCodecs]:
    """Returns codecs of gathers, group reduce-scatters (ZeRO++'s qwZ, qgZ, arXiv 2306.10209) and experts' tokens."""

    def codec_for(key: str) -> Codec | None:
        name = getattr(config, key)
        codec = make_codec(name, config)
        return Marked(codec=codec) if codec and name in OWN["codec"] else codec

    def codecs_for(collective: str) -> LevelCodecs:
        return LevelCodecs(inter=codec_for(f"{collective}_inter"), intra=codec_for(f"{collective}_intra"))

    return codecs_for("all_gather"), codecs_for("reduce_scatter"), codecs_for("experts")


def _blocks(x: jax.Array, size: int) -> jax.Array:
    """Returns `[..., N]` as `[..., blocks, size]`.

    Without the barrier, XLA:CPU takes absolute values before the reshape and materialises them, which makes computing
    the scales four times slower.
    """
    return lax.optimization_barrier(x.reshape(*x.shape[:-1], -1, size))


def _packed(codes: jax.Array, bits: int, sizes: jax.Array) -> jax.Array:
    """Returns codes `uint8 [..., N]` of `bits` bits each, then sizes `f32 [..., blocks, n]`, as bytes.

    A byte combines one code from each part of a row, the first part in the lowest bits. Neighbouring codes in a byte
    would need strided access. The barrier keeps XLA:CPU from recomputing the codes for each part.
    """
    parts = jnp.split(lax.optimization_barrier(codes), 8 // bits, axis=-1)
    packed = reduce(jnp.bitwise_or, (part << bits * i for i, part in enumerate(parts)))
    return jnp.concatenate([packed, _to_bytes(sizes.reshape(*sizes.shape[:-2], -1))], axis=-1)


def _unpacked(payload: jax.Array, block: int, bits: int) -> tuple[jax.Array, jax.Array]:
    """Undoes `_packed` for `bits` sizes per block: returns codes `[..., blocks, block]`, and sizes."""
    blocks = payload.shape[-1] // (bits * (block // 8 + SCALE_BYTES))
    packed, sizes = jnp.split(payload, [bits * blocks * block // 8], axis=-1)
    codes = jnp.concatenate([packed >> i & 2**bits - 1 for i in range(0, 8, bits)], axis=-1)
    shape = (*payload.shape[:-1], blocks)
    return codes.reshape(*shape, block), _from_bytes(sizes, jnp.float32).reshape(*shape, bits)


def _as_uint8(x: jax.Array) -> jax.Array:
    return x.astype(jnp.uint8)


def _signed(positive: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns values `f32 [..., N]` with these sizes and signs."""
    values = jnp.where(positive, sizes, -sizes)  # [..., blocks, block]
    return values.reshape(*values.shape[:-2], -1)


def _to_bytes(x: jax.Array) -> jax.Array:
    """Returns `[..., N]` as bytes `[..., N * itemsize]`."""
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)


def _from_bytes(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Undoes `_to_bytes`: `[..., N * itemsize]` becomes `[..., N]`."""
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, jnp.dtype(dtype).itemsize), dtype)
