"""Weights in MXFP4, read as floats (OCP Microscaling Formats 1.0, sections 5.3.3, 5.4.1 and 6.3).

gpt-oss stores a tensor NAME `[E, in, out]` as two uint8 tensors: `NAME_blocks` `[E, out, in / 32, 16]` has two codes in
each byte, the lower bits first, and `NAME_scales` `[E, out, in / 32]` has the exponent of each block's scale, plus 127.
A code is a sign bit and three bits that choose a value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names
SIZE = 32  # values of a block
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_CODES = np.concatenate([_VALUES, -_VALUES])
_PAIRS = (_CODES[None] + 1j * _CODES[:, None]).ravel()  # both values of each byte; the real part has the lower bits


@dataclass(frozen=True)
class Tensor:
    """A tensor in MXFP4, with the interface of a slice of safetensors."""

    blocks: Any
    scales: Any

    def get_shape(self) -> list[int]:
        """Returns `[E, in, out]`."""
        experts, columns, count, _ = self.blocks.get_shape()
        return [experts, count * SIZE, columns]

    def get_dtype(self) -> str:
        """Returns the narrowest dtype that holds the values."""
        return "BF16"

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a region in float32. The rows have no step."""
        experts, rows, columns = (*index, *[slice(None)] * (3 - len(index)))
        start, stop, _ = rows.indices(self.get_shape()[1])
        at = experts, columns, slice(start // SIZE, -(-stop // SIZE))
        values = np.take(_PAIRS, self.blocks[at]).view(np.float32)
        values *= np.ldexp(np.float32(1), self.scales[at].astype(np.int32) - 127)[..., None]
        first = start % SIZE
        return values.reshape(*values.shape[:2], -1)[..., first : first + stop - start].swapaxes(1, 2)


@dataclass(frozen=True)
class _Pair:
    """A pair of open files, with the interface of safetensors."""

    blocks_file: Any
    scales_file: Any

    def get_slice(self, name: str) -> Tensor:
        return Tensor(self.blocks_file.get_slice(name + BLOCKS), self.scales_file.get_slice(name + SCALES))


def unpacked(files: Mapping[str, tuple[Path, Any]]) -> dict[str, tuple[Path, Any]]:
    """Returns the open file of each tensor by name, where one tensor replaces its blocks and scales.

    ValueError for blocks without fitting scales.
    """
    found = dict(files)
    for whole in [name for name in files if name.endswith(BLOCKS)]:
        name = whole.removesuffix(BLOCKS)
        (path, blocks_file), (_, scales_file) = found.pop(whole), found.pop(name + SCALES, (None, None))
        blocks, scales = blocks_file.get_slice(whole), scales_file and scales_file.get_slice(name + SCALES)
        shape, dtypes = blocks.get_shape(), {x.get_dtype() for x in (blocks, scales) if x}
        if not scales or dtypes != {"U8"} or shape[3:] != [SIZE // 2] or scales.get_shape() != shape[:3]:
            raise ValueError(f"{path}: {whole} is not in MXFP4, or its scales are missing or of another shape")
        found[name] = path, _Pair(blocks_file, scales_file)
    return found
