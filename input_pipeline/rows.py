"""Shapes and dtypes of the arrays of an example, which is one row of a batch."""

from typing import NamedTuple

import numpy as np

from configs.schema import DataConfig


class RowArray(NamedTuple):
    """Shape and dtype of one array of an example."""

    shape: tuple[int, ...]
    dtype: type[np.generic]


def row_arrays(config: DataConfig) -> dict[str, RowArray]:
    """Returns the arrays of an example by name; the first is the model's input; one is `weights`."""
    if config.objective == "classify":
        shape = (config.image_size, config.image_size, config.channels)
        return {
            "images": RowArray(shape, np.float32),
            "labels": RowArray((), np.int32),
            "weights": RowArray((), np.float32),
        }
    segments = {} if config.packing == "stream" else {"segments": RowArray((config.seq_len,), np.int32)}
    return {
        "tokens": RowArray((config.seq_len,), np.int32),
        "targets": RowArray((config.seq_len,), np.int32),
        "weights": RowArray((config.seq_len,), np.float32),
    } | segments
