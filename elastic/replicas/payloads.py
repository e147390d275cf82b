"""Codecs on the host for pieces of gradients, f32 `[N]`, that replicas send each other.

They give the same values as inside a compiled program, but do not occupy the devices.
"""

from dataclasses import dataclass

import numpy as np

from compression.codecs import BODIES
from configs.schema.codecs import TABLE

PIECES = 64  # at least, if they are not too small; sizes are fixed, or bits would depend on the number of replicas
LEAST, MOST = 1 << 14, 1 << 20  # values of a piece


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The form in which a piece is sent: by a codec of the table, with `block` values per scale."""

    codec: str = "none"
    block: int = 1

    @property
    def bytes_per_value(self) -> float:
        """Bytes that a value takes on average."""
        return TABLE[self.codec].bytes_per_value(self.block)

    def encode(self, values: np.ndarray) -> memoryview:
        """Returns the bytes of `f32 [N]`."""
        return BODIES[self.codec](self.block).encode(values).data

    def decode(self, payload: memoryview, size: int) -> np.ndarray:
        """Returns the values `f32 [size]`."""
        return BODIES[self.codec](self.block).decode(np.frombuffer(payload, np.uint8))[:size]


LOSSLESS = Payload()


def pieces(size: int, block: int) -> list[tuple[int, int]]:
    """Returns the beginning and end of each piece of a vector of `size` values: multiples of a codec's block."""
    each = min(max(-(-size // PIECES), LEAST), MOST)
    each = -(-each // block) * block
    return [(start, min(start + each, size)) for start in range(0, size, each)]
