"""The arrays of an example, which are the rows of a batch."""

from typing import NamedTuple

import numpy as np

from configs.schema import DataConfig


class RowArray(NamedTuple):
    """Shape and dtype of one array of an example; a batch has one such row for each of its examples."""

    shape: tuple[int, ...]
    dtype: type[np.generic]


def row_arrays(config: DataConfig) -> dict[str, RowArray]:
    """Returns the arrays of an example by name; the first is the model's input, `weights` is among them."""
    if config.objective == "classify":
        shape = (config.image_size, config.image_size, config.channels)
        return {
            "images": RowArray(shape, np.float32),
            "labels": RowArray((), np.int32),
            "weights": RowArray((), np.float32),
        }
    return {
        "tokens": RowArray((config.seq_len,), np.int32),
        "targets": RowArray((config.seq_len,), np.int32),
        "weights": RowArray((config.seq_len,), np.float32),
    }
