"""What travels between replicas: pieces of gradients, f32 `[N]`, as they are or encoded, on the host.

The values are those of compression/codecs.py, whose codecs run inside a compiled program: these do not occupy the
devices while they compute.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np

SCALE_BYTES = 4
PIECES = 64  # at least, if they are not too small; fixed sizes: bits must not depend on the number of replicas
LEAST, MOST = 1 << 14, 1 << 20  # values of a piece
_FINITE, _INFINITY = np.uint16(0x7FFF), np.uint16(0x7F80)  # bits of a bf16 but its sign; those of infinity


class Payload(Protocol):
    """How a piece is written."""

    @property
    def bytes_per_value(self) -> float:
        """What it takes, on average."""
        ...

    def encode(self, values: np.ndarray) -> memoryview:
        """Returns the bytes of `f32 [N]`."""
        ...

    def decode(self, payload: memoryview) -> np.ndarray:
        """Returns the values `f32 [N]`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Float32:
    """As they are."""

    bytes_per_value: float = 4.0

    def encode(self, values: np.ndarray) -> memoryview:
        return values.data.cast("B")

    def decode(self, payload: memoryview) -> np.ndarray:
        return np.frombuffer(payload, np.float32)


@dataclass(frozen=True, kw_only=True)
class BFloat16:
    """bf16; finite values that would round to infinity become the largest finite number."""

    bytes_per_value: float = 2.0

    def encode(self, values: np.ndarray) -> memoryview:
        rounded = values.astype(ml_dtypes.bfloat16)
        bits = rounded.view(np.uint16)
        if (overflown := (bits & _FINITE) == _INFINITY).any():
            bits[overflown & np.isfinite(values)] -= 1  # the bits before those of infinity: the largest number
        return bits.data.cast("B")

    def decode(self, payload: memoryview) -> np.ndarray:
        return np.frombuffer(payload, ml_dtypes.bfloat16).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Int8:
    """Symmetric integers of 8 bits with one f32 scale per block (ZeRO++ section 3, arXiv 2306.10209)."""

    block: int

    @property
    def bytes_per_value(self) -> float:
        return 1 + SCALE_BYTES / self.block

    def encode(self, values: np.ndarray) -> memoryview:
        blocks = np.zeros(-(-values.size // self.block) * self.block, np.float32)
        blocks[: values.size] = values
        blocks = blocks.reshape(-1, self.block)
        scales = np.abs(blocks).max(axis=1, keepdims=True) * np.float32(1 / 127)
        # what is not finite must stay so in the sum: its block's scale is not finite
        with np.errstate(invalid="ignore"):
            integers = np.clip(np.rint(blocks / np.where(scales > 0, scales, np.float32(1))), -127, 127)
            packed = np.nan_to_num(integers).astype(np.int8)
        return np.concatenate(
            [packed.reshape(-1)[: values.size].view(np.uint8), scales.reshape(-1).view(np.uint8)]
        ).data

    def decode(self, payload: memoryview) -> np.ndarray:
        blocks = -(-len(payload) // (self.block + SCALE_BYTES))
        size = len(payload) - blocks * SCALE_BYTES
        values = np.zeros(blocks * self.block, np.float32)
        values[:size] = np.frombuffer(payload, np.int8, size)
        scales = np.frombuffer(payload, np.float32, blocks, size)
        with np.errstate(invalid="ignore"):
            return (values.reshape(blocks, self.block) * scales[:, None]).reshape(-1)[:size]


PAYLOADS: Mapping[str, Callable[[int], Payload]] = {
    "none": lambda _: Float32(),
    "bf16": lambda _: BFloat16(),
    "int8": lambda block: Int8(block=block),
}


def make_payload(name: str, block: int) -> Payload:
    """Returns the payload called `name`, one of `PAYLOADS`."""
    return PAYLOADS[name](block)


def pieces(size: int, block: int) -> list[tuple[int, int]]:
    """Returns where the pieces of a vector of `size` values begin and end: multiples of a codec's block."""
    each = min(max(-(-size // PIECES), LEAST), MOST)
    each = -(-each // block) * block
    return [(start, min(start + each, size)) for start in range(0, size, each)]
