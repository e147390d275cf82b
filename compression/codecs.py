"""Codecs encode values as the bytes that cross the slow network: one body each, for arrays of numpy and of jax.

configs/schema/codecs.py has the table of their names and sizes, and sharding/coded.py their interface inside a compiled
program. Independent replicas encode on the host, with numpy (elastic/replicas/payloads.py), and frozen weights are
encoded once, where they are read (models/lora.py). jax is imported only by the three operations that numpy lacks.

Payloads are byte arrays rather than arrays of a narrow dtype: XLA may widen the latter (a bf16 sum on CPUs) or move the
conversion across a collective, but it leaves bytes unchanged. The bytes sent therefore equal the payload's size, and
can be read in the compiled program. The caller stores the encoding error (compression/exchange.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
from ml_dtypes import bfloat16, finfo

from configs.schema.codecs import COLUMNS, SCALE_BYTES

Array = Any  # of numpy or jax
_LARGEST = float(finfo(bfloat16).max)
_FINITE, _INFINITY = np.uint16(0x7FFF), np.uint16(0x7F80)  # all bits of a bf16 except its sign; the bits of infinity


@dataclass(frozen=True, kw_only=True)
class Float32:
    """The values themselves."""

    multiple: int = 1

    def encode(self, x: Array, key: Any = None, real: Array | None = None) -> Array:
        """Returns `uint8 [..., 4 N]` of `f32 [..., N]`."""
        del key, real
        return x.view(np.uint8)

    def decode(self, payload: Array) -> Array:
        """Returns the values `f32 [..., N]` of a payload."""
        return payload.view(np.float32)


@dataclass(frozen=True, kw_only=True)
class BFloat16:
    """bf16: half the bytes, 8 bits of precision, the same range as f32.

    Finite values that would round to infinity become the largest finite number.
    """

    multiple: int = 1

    def encode(self, x: Array, key: Any = None, real: Array | None = None) -> Array:
        """Returns `uint8 [..., 2 N]` of `f32 [..., N]`: two bytes per value."""
        del key, real
        if isinstance(x, np.ndarray):  # a third of the time of clipping first
            bits = x.astype(bfloat16).view(np.uint16)
            if (overflown := (bits & _FINITE) == _INFINITY).any():
                bits[overflown & np.isfinite(x)] -= 1  # the bits before infinity: the largest number
            return bits.view(np.uint8)
        from jax import lax

        xp = x.__array_namespace__()
        x = xp.where(xp.isinf(x), x, xp.clip(x, -_LARGEST, _LARGEST))
        bits = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).view(np.uint32)
        return (bits >> 16).astype(np.uint16).view(np.uint8)  # XLA would materialise a bf16 array first

    def decode(self, payload: Array) -> Array:
        """Returns the values `f32 [..., N]` of a payload."""
        return payload.view(bfloat16).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Blockwise:
    """Symmetric integers of 8 or 4 bits, with one f32 scale per block (ZeRO++ section 3, arXiv 2306.10209).

    The largest magnitude of a block becomes 127 or 7. With `stochastic`, rounding is unbiased: the probability of
    rounding up is the value's distance to the lower neighbour. It needs arrays and a key of jax.
    """

    bits: int
    block: int
    stochastic: bool = False

    @property
    def multiple(self) -> int:
        """Rows are whole blocks (an even number of values, so that 4-bit values fill bytes)."""
        return self.block

    @np.errstate(invalid="ignore")
    def encode(self, x: Array, key: Any = None, real: Array | None = None) -> Array:
        """Returns `uint8 [..., M]` of `f32 [..., N]`: the integers, then the scales."""
        del real  # padding is zero, which does not change the maximum
        xp = x.__array_namespace__()
        most = 2 ** (self.bits - 1) - 1
        blocks = _barrier(_blocks(x, self.block))
        scales = xp.max(xp.abs(blocks), axis=-1, keepdims=True) * (1 / most)
        scaled = blocks / xp.where(scales > 0, scales, 1.0)
        out = {"out": scaled} if xp is np else {}  # half the time of new arrays
        if self.stochastic:
            from jax import random

            rounded = xp.floor(scaled + random.uniform(key, scaled.shape))
        else:
            rounded = xp.round(scaled, **out)
        integers = xp.clip(rounded, -most, most, **out).astype(np.int8).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
        return xp.concat([self._pack(integers), scales[..., 0].view(np.uint8)], axis=-1)

    @np.errstate(invalid="ignore")
    def decode(self, payload: Array) -> Array:
        """Returns the values `f32 [..., N]` of a payload."""
        xp = payload.__array_namespace__()
        num_blocks = -(-payload.shape[-1] // (self.block * self.bits // 8 + SCALE_BYTES))
        packed, scales = xp.split(payload, [payload.shape[-1] - SCALE_BYTES * num_blocks], axis=-1)
        values = _blocks(self._unpack(packed), self.block) * scales.view(np.float32)[..., None]
        return values.reshape(*payload.shape[:-1], -1)

    def _pack(self, integers: Array) -> Array:
        as_bytes = integers.view(np.uint8)
        if self.bits == 8:
            return as_bytes
        xp = integers.__array_namespace__()
        low, high = xp.split(_padded(as_bytes, 2), 2, axis=-1)  # pairs values of both halves: no strided access
        return (low & 15) | (high << 4)

    def _unpack(self, packed: Array) -> Array:
        if self.bits == 8:
            return packed.view(np.int8)
        both = packed.__array_namespace__().concat([packed << 4, packed & 0xF0], axis=-1)
        return both.view(np.int8) >> 4  # an arithmetic shift keeps the sign


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

    def encode(self, x: Array, key: Any = None, real: Array | None = None) -> Array:
        """Returns `uint8 [..., M]` of `f32 [..., N]`: signs, then scales."""
        del key
        xp = x.__array_namespace__()
        sizes = xp.abs(_barrier(_blocks(x, self.block)))
        if real is None:
            shares = 1 / self.block
        else:
            there = _barrier(_blocks(real, self.block))
            shares = there / xp.maximum(xp.sum(there, axis=-1, keepdims=True), 1)
        scales = xp.sum(sizes * shares, axis=-1, keepdims=True)  # the mean; a division before the sum avoids overflow
        return _packed((x >= 0).astype(np.uint8), 1, scales)

    def decode(self, payload: Array) -> Array:
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

    def encode(self, x: Array, key: Any = None, real: Array | None = None) -> Array:
        """Returns `uint8 [..., M]` of `f32 [..., N]`: signs, flags of large values, then magnitudes."""
        del key
        xp = x.__array_namespace__()
        sum_of = lambda values: xp.sum(values, axis=-1, keepdims=True, dtype=np.float32)
        sizes, count = xp.abs(_barrier(_blocks(x, self.block))) * (1 / self.block), self.block  # sums cannot overflow
        if real is not None:
            there = xp.broadcast_to(_barrier(_blocks(real, self.block)), sizes.shape)
            sizes, count = xp.where(there, sizes, 0), sum_of(there)
        large = sizes > self.SPLIT / xp.maximum(count, 1) * sum_of(sizes)
        num_large = sum_of(large)
        of_small = sum_of(xp.where(large, 0, sizes)) * (self.block / xp.maximum(count - num_large, 1))
        of_large = sum_of(xp.where(large, sizes, 0)) * (self.block / xp.maximum(num_large, 1))
        codes = (x >= 0).astype(np.uint8) | large.astype(np.uint8).reshape(x.shape) << 1
        return _packed(codes, 2, xp.concat([of_small, of_large], axis=-1))

    def decode(self, payload: Array) -> Array:
        """Returns the values `f32 [..., N]` of a payload."""
        codes, means = _unpacked(payload, self.block, 2)
        where = payload.__array_namespace__().where
        return _signed(codes & 1 == 1, where(codes >= 2, means[..., 1:], means[..., :1]))


CodecBody = Float32 | BFloat16 | Blockwise | OneBit | Statistical
BODIES: Mapping[
    str, Callable[[int], CodecBody]
] = {  # by their names in the table, for `compression.block` values per scale
    "none": lambda _: Float32(),
    "bf16": lambda _: BFloat16(),
    "int8": lambda block: Blockwise(bits=8, block=block),
    "int4": lambda block: Blockwise(bits=4, block=block),
    "statistical": lambda block: Statistical(block=block),
    "one_bit": lambda block: OneBit(block=block),
}


# ------------------------------------------------------------------------------------------- frozen weights (BASES)
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
    + [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
    + [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    np.float32,
)


def encode_matrices(x: Array, base: str) -> dict[str, Array]:
    """Returns the codes and scales of matrices `[..., in, out]`, to be sharded like them.

    The scale of COLUMNS columns is their largest magnitude, of which `int8` codes are the nearest 1/127 and `nf4` codes
    the nearest of the sixteen values of QLoRA (Dettmers et al. 2023, arXiv 2305.14314, appendix E), two per byte.
    """
    xp = x.__array_namespace__()
    blocks = _blocks(x, COLUMNS)
    scales = xp.max(xp.abs(blocks), axis=-1).astype(bfloat16)
    divisors = scales.astype(np.float32)[..., None]
    shares = (blocks / xp.where(divisors == 0, 1, divisors)).reshape(x.shape)
    if base == "int8":
        return {"codes": xp.clip(xp.round(shares * 127), -127, 127).astype(np.int8), "scales": scales}
    codes = xp.zeros(shares.shape, np.uint8)
    for bound in (NF4[1:] + NF4[:-1]) / 2:  # a third of the time of numpy's searchsorted, without its int64 result
        codes += shares > bound
    return {"codes": codes[..., ::2] | codes[..., 1::2] << 4, "scales": scales}


def decode_matrices(stored: dict[str, Array], dtype: np.dtype) -> Array:
    """Returns the matrices `[..., in, out]` encoded by codes and scales."""
    codes = stored["codes"]
    xp = codes.__array_namespace__()
    if codes.dtype == np.int8:
        shares = codes.astype(np.float32) / 127
    else:
        pairs = xp.stack([codes & 15, codes >> 4], axis=-1)
        shares = xp.asarray(NF4)[pairs.reshape(*codes.shape[:-1], -1)]
    blocks = _blocks(shares, COLUMNS) * stored["scales"].astype(np.float32)[..., None]
    return blocks.reshape(shares.shape).astype(dtype)


# ---------------------------------------------------------------------------------------------------------- in bytes
def _blocks(x: Array, size: int) -> Array:
    """Returns `[..., N]`, padded with zeros, as `[..., blocks, size]`."""
    return _padded(x, size).reshape(*x.shape[:-1], -1, size)


def _padded(x: Array, multiple: int) -> Array:
    if padding := -x.shape[-1] % multiple:
        return x.__array_namespace__().pad(x, [*[(0, 0)] * (x.ndim - 1), (0, padding)])
    return x


def _barrier(x: Array) -> Array:
    """Returns `x`, which XLA computes once, and before anything that uses it.

    Otherwise XLA:CPU takes absolute values before it cuts `x` into blocks, and materialises them, which makes computing
    the scales four times slower. It also computes packed codes again for each part of a byte.
    """
    if isinstance(x, np.ndarray):
        return x
    from jax import lax

    return lax.optimization_barrier(x)


def _packed(codes: Array, bits: int, sizes: Array) -> Array:
    """Returns codes `uint8 [..., N]` of `bits` bits each, then sizes `f32 [..., blocks, n]`, as bytes.

    A byte combines one code from each part of a row, the first part in the lowest bits. Neighbouring codes in a byte
    would need strided access.
    """
    xp = codes.__array_namespace__()
    parts = xp.split(_barrier(codes), 8 // bits, axis=-1)
    packed = reduce(or_, (part << bits * i for i, part in enumerate(parts)))
    return xp.concat([packed, sizes.reshape(*sizes.shape[:-2], -1).view(np.uint8)], axis=-1)


def _unpacked(payload: Array, block: int, bits: int) -> tuple[Array, Array]:
    """Undoes `_packed` for `bits` sizes per block: returns codes `[..., blocks, block]`, and sizes."""
    xp = payload.__array_namespace__()
    blocks = payload.shape[-1] // (bits * (block // 8 + SCALE_BYTES))
    packed, sizes = xp.split(payload, [bits * blocks * block // 8], axis=-1)
    codes = xp.concat([packed >> i & 2**bits - 1 for i in range(0, 8, bits)], axis=-1)
    shape = (*payload.shape[:-1], blocks)
    return codes.reshape(*shape, block), sizes.view(np.float32).reshape(*shape, bits)


def _signed(positive: Array, sizes: Array) -> Array:
    """Returns values `f32 [..., N]` with these sizes and signs."""
    values = positive.__array_namespace__().where(positive, sizes, -sizes)  # [..., blocks, block]
    return values.reshape(*values.shape[:-2], -1)
