"""Codecs: values as the bytes that cross the slow network; what a codec is, sharding/collectives.py says.

Payloads are bytes and no narrow dtypes, because XLA may widen those (a bf16 sum on CPUs) or move a conversion across a
collective, while integers arrive as they were sent: what a codec claims to send is the size of an array, and stands in
the compiled program. What encoding loses is the caller's to keep (compression/exchange.py).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

SCALE_BYTES = 4  # of a block: one f32


@dataclass(frozen=True, kw_only=True)
class BFloat16:
    """The upper half of each value: half the bytes, 8 bits of precision, nothing out of range.

    What would round to infinity becomes the largest number.
    """

    multiple: int = 1
    sparse: bool = False

    def encode(self, x: jax.Array, key: jax.Array, real: jax.Array | None = None) -> jax.Array:
        """Returns two bytes a value."""
        del key, real
        largest = float(jnp.finfo(jnp.bfloat16).max)
        x = jnp.where(jnp.isinf(x), x, jnp.clip(x, -largest, largest))
        bits = lax.bitcast_convert_type(lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7), jnp.uint32)
        return _to_bytes((bits >> 16).astype(jnp.uint16))  # a bf16 array would be written out first

    def decode(self, payload: jax.Array) -> jax.Array:
        """Returns the values."""
        return _from_bytes(payload, jnp.bfloat16).astype(jnp.float32)

    def payload_bytes(self, size: int) -> int:
        """Returns the bytes of a row of `size` values."""
        return 2 * size


@dataclass(frozen=True, kw_only=True)
class Blockwise:
    """Integers of 8 or 4 bits, symmetric, with one f32 scale a block (ZeRO++ section 3, arXiv 2306.10209).

    The largest value of a block becomes 127 or 7. `stochastic` rounds up as often as a value is nearer to the upper
    neighbour: the mean over many roundings is the value itself.
    """

    bits: int
    block: int
    stochastic: bool = False
    sparse: bool = False

    @property
    def multiple(self) -> int:
        """Whole blocks, and two values of 4 bits a byte."""
        return self.block

    def encode(self, x: jax.Array, key: jax.Array, real: jax.Array | None = None) -> jax.Array:
        """Returns the integers, then the scales."""
        del real  # zeros are no largest value
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
        """Returns the values."""
        blocks = payload.shape[-1] // self.payload_bytes(self.block)
        packed, scales = jnp.split(payload, [blocks * self.block * self.bits // 8], axis=-1)
        integers = self._unpack(packed).reshape(*payload.shape[:-1], blocks, self.block)
        values = integers.astype(jnp.float32) * _from_bytes(scales, jnp.float32)[..., None]
        return values.reshape(*payload.shape[:-1], blocks * self.block)

    def payload_bytes(self, size: int) -> int:
        """Returns the bytes of a row of `size` values."""
        return size * self.bits // 8 + size // self.block * SCALE_BYTES

    def _pack(self, integers: jax.Array) -> jax.Array:
        as_bytes = lax.bitcast_convert_type(integers, jnp.uint8)
        if self.bits == 8:
            return as_bytes
        low, high = jnp.split(as_bytes, 2, axis=-1)  # halves of the row, not neighbours: no strides
        return (low & 15) | (high << 4)

    def _unpack(self, packed: jax.Array) -> jax.Array:
        if self.bits == 8:
            return lax.bitcast_convert_type(packed, jnp.int8)
        both = lax.bitcast_convert_type(jnp.concatenate([packed << 4, packed & 0xF0], axis=-1), jnp.int8)
        return both >> 4  # the sign comes along


@dataclass(frozen=True, kw_only=True)
class TwoBit:
    """MXNet's: `+threshold`, `-threshold` or nothing, 16 values a 32-bit word (PR 8662 of apache/mxnet).

    Only of use with error feedback: a value below the threshold is never sent, it has to grow.
    """

    threshold: float
    multiple: int = 16
    sparse: bool = True

    def encode(self, x: jax.Array, key: jax.Array, real: jax.Array | None = None) -> jax.Array:
        """Returns four values a byte, the first in the highest bits: 11 is plus, 10 is minus, 00 is nothing."""
        del key, real
        codes = jnp.where(x >= self.threshold, 3, jnp.where(x <= -self.threshold, 2, 0)).astype(jnp.uint8)
        return _pack_bits(codes, bits=2)

    def decode(self, payload: jax.Array) -> jax.Array:
        """Returns the values."""
        codes = _unpack_bits(payload, bits=2)
        return jnp.where(codes == 3, self.threshold, jnp.where(codes == 2, -self.threshold, 0.0)).astype(jnp.float32)

    def payload_bytes(self, size: int) -> int:
        """Returns the bytes of a row of `size` values."""
        return size // 4


@dataclass(frozen=True, kw_only=True)
class OneBit:
    """The sign, and one scale a block: the mean of its absolute values (EF-SignSGD, arXiv 1901.09847).

    Of all scales it is the one with the smallest squared error. 1-bit Adam (arXiv 2102.02888) sends momenta this way.
    Only of use with error feedback.
    """

    block: int
    sparse: bool = False

    @property
    def multiple(self) -> int:
        """Whole blocks."""
        return self.block

    def encode(self, x: jax.Array, key: jax.Array, real: jax.Array | None = None) -> jax.Array:
        """Returns eight signs a byte, the first in the highest bit, then the scales."""
        del key
        sizes = jnp.abs(_blocks(x, self.block))
        if real is None:
            shares = 1 / self.block
        else:
            there = _blocks(real, self.block)
            shares = there / jnp.maximum(jnp.sum(there, axis=-1, keepdims=True), 1)
        scales = jnp.sum(sizes * shares, axis=-1)  # the mean, by no sum that is out of range
        return jnp.concatenate([_pack_bits((x >= 0).astype(jnp.uint8), bits=1), _to_bytes(scales)], axis=-1)

    def decode(self, payload: jax.Array) -> jax.Array:
        """Returns the values."""
        blocks = payload.shape[-1] // self.payload_bytes(self.block)
        signs, scales = jnp.split(payload, [blocks * self.block // 8], axis=-1)
        positive = _unpack_bits(signs, bits=1).reshape(*payload.shape[:-1], blocks, self.block)
        scales = _from_bytes(scales, jnp.float32)[..., None]
        return jnp.where(positive == 1, scales, -scales).reshape(*payload.shape[:-1], blocks * self.block)

    def payload_bytes(self, size: int) -> int:
        """Returns the bytes of a row of `size` values."""
        return size // 8 + size // self.block * SCALE_BYTES


def _blocks(x: jax.Array, size: int) -> jax.Array:
    """Returns `[..., N]` as `[..., blocks, size]`.

    The barrier keeps XLA:CPU from taking absolute values before the reshape, which it then writes out: four times the
    time of a scale.
    """
    return lax.optimization_barrier(x.reshape(*x.shape[:-1], -1, size))


def _to_bytes(x: jax.Array) -> jax.Array:
    """Returns `[..., N]` as bytes `[..., N * itemsize]`."""
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)


def _from_bytes(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Undoes `_to_bytes`."""
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, jnp.dtype(dtype).itemsize), dtype)


def _pack_bits(codes: jax.Array, *, bits: int) -> jax.Array:
    """Packs codes of `bits` bits into bytes, the first in the highest bits."""
    parts = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    return jnp.sum(parts << _shifts(parts.shape, bits), axis=-1, dtype=jnp.uint8)


def _unpack_bits(packed: jax.Array, *, bits: int) -> jax.Array:
    """Undoes `_pack_bits`."""
    shape = (*packed.shape, 8 // bits)
    codes = (jnp.broadcast_to(packed[..., None], shape) >> _shifts(shape, bits)) & (2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)


def _shifts(shape: tuple[int, ...], bits: int) -> jax.Array:
    """Returns how far the codes of each byte, in the last dim, are shifted: the first the farthest."""
    return (8 - bits - bits * lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)).astype(jnp.uint8)
