"""Codecs on the host for pieces of gradients, f32 `[N]`, that replicas send each other.

They give the same values as compression/codecs.py, whose codecs run inside a compiled program, but do not occupy the
devices.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np

SCALE_BYTES = 4
PIECES = 64  # at least, if they are not too small; sizes are fixed, or bits would depend on the number of replicas
LEAST, MOST = 1 << 14, 1 << 20  # values of a piece
_FINITE, _INFINITY = np.uint16(0x7FFF), np.uint16(0x7F80)  # all bits of a bf16 except its sign; the bits of infinity


class Payload(Protocol):
    """The form in which a piece is sent."""

    @property
    def bytes_per_value(self) -> float:
        """Bytes that a value takes on average."""
        ...

    def encode(self, values: np.ndarray) -> memoryview:
        """Returns the bytes of `f32 [N]`."""
        ...

    def decode(self, payload: memoryview, size: int) -> np.ndarray:
        """Returns the values `f32 [size]`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Float32:
    """Unencoded values."""

    bytes_per_value: float = 4.0

    def encode(self, values: np.ndarray) -> memoryview:
        return values.data.cast("B")

    def decode(self, payload: memoryview, size: int) -> np.ndarray:
        return np.frombuffer(payload, np.float32, size)


@dataclass(frozen=True, kw_only=True)
class BFloat16:
    """bf16; finite values that would round to infinity become the largest finite number."""

    bytes_per_value: float = 2.0

    def encode(self, values: np.ndarray) -> memoryview:
        rounded = values.astype(ml_dtypes.bfloat16)
        bits = rounded.view(np.uint16)
        if (overflown := (bits & _FINITE) == _INFINITY).any():
            bits[overflown & np.isfinite(values)] -= 1  # the bits before infinity: the largest number
        return bits.data.cast("B")

    def decode(self, payload: memoryview, size: int) -> np.ndarray:
        return np.frombuffer(payload, ml_dtypes.bfloat16, size).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Blockwise:
    """Symmetric integers of 8 or 4 bits with one f32 scale per block (ZeRO++ section 3, arXiv 2306.10209)."""

    bits: int
    block: int

    @property
    def bytes_per_value(self) -> float:
        return self.bits / 8 + SCALE_BYTES / self.block

    def encode(self, values: np.ndarray) -> memoryview:
        most, blocks = 2 ** (self.bits - 1) - 1, self._blocks(values)
        scales = np.abs(blocks).max(axis=1) * np.float32(1 / most)
        with np.errstate(invalid="ignore"):
            scaled = blocks / np.where(scales > 0, scales, np.float32(1))[:, None]
        # the sum of a value that is not finite must not be finite: its block's scale is not
        scaled[~np.isfinite(scales)] = 0
        np.clip(np.rint(scaled, out=scaled), -most, most, out=scaled)
        integers = scaled.reshape(-1)[: values.size].astype(np.int8)
        return np.concatenate([self._packed(integers), scales.view(np.uint8)]).data

    def decode(self, payload: memoryview, size: int) -> np.ndarray:
        num_blocks = -(-size // self.block)
        packed = np.frombuffer(payload, np.uint8)[: -SCALE_BYTES * num_blocks]
        scales = np.frombuffer(payload, np.float32, num_blocks, packed.size)
        with np.errstate(invalid="ignore"):
            return (self._blocks(self._unpacked(packed)[:size]) * scales[:, None]).reshape(-1)[:size]

    def _blocks(self, values: np.ndarray) -> np.ndarray:
        """Returns `[N]` as `[blocks, block]`, padded with zeros."""
        padding = -values.size % self.block
        return (np.pad(values, (0, padding)) if padding else values).reshape(-1, self.block)

    def _packed(self, integers: np.ndarray) -> np.ndarray:
        if self.bits == 8:
            return integers.view(np.uint8)
        low, high = np.pad(integers, (0, integers.size % 2)).view(np.uint8).reshape(2, -1)
        return (low & 15) | (high << 4)

    def _unpacked(self, packed: np.ndarray) -> np.ndarray:
        if self.bits == 8:
            return packed.view(np.int8)
        return np.concatenate([packed << 4, packed & 0xF0]).view(np.int8) >> 4  # an arithmetic shift keeps the sign


PAYLOADS: Mapping[str, Callable[[int], Payload]] = {
    "none": lambda _: Float32(),
    "bf16": lambda _: BFloat16(),
    "int8": lambda block: Blockwise(bits=8, block=block),
    "int4": lambda block: Blockwise(bits=4, block=block),
}


def make_payload(name: str, block: int) -> Payload:
    """Returns the payload named `name` in `PAYLOADS`."""
    return PAYLOADS[name](block)


def pieces(size: int, block: int) -> list[tuple[int, int]]:
    """Returns the beginning and end of each piece of a vector of `size` values: multiples of a codec's block."""
    each = min(max(-(-size // PIECES), LEAST), MOST)
    each = -(-each // block) * block
    return [(start, min(start + each, size)) for start in range(0, size, each)]
