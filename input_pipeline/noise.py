"""Random numbers of each token, from which models draw the masks of their dropout (models/dropout.py)."""

import numpy as np

from configs.schema import Config
from input_pipeline.dataset import Dataset
from input_pipeline.index import RowArray, random_bits

NOISE = "noise"  # name of the array in an example
TAG = 1 << 63  # all other keys of `random_bits` end with a smaller number


def noise_arrays(config: Config) -> dict[str, RowArray]:
    """Returns the array that an example has for dropout, by name; none for a model without."""
    return {NOISE: RowArray((config.data.seq_len, 2), np.float32)} if config.model.drops else {}


class WithNoise:
    """The examples of a data set, each with `noise` float32 [T, 2]: integers of 24 and 16 bits by (seed, i)."""

    def __init__(self, dataset: Dataset, config: Config) -> None:
        self._dataset, self._seed, arrays = dataset, config.seed, noise_arrays(config)
        self._shape = arrays[NOISE].shape
        self.row_arrays = dataset.row_arrays | arrays
        self.threads, self.fingerprint = dataset.threads, dataset.fingerprint

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        bits = random_bits((self._seed, TAG + int(i)), self._shape)
        return self._dataset[i] | {NOISE: (bits >> np.array([40, 48], np.uint64)).astype(np.float32)}


RowData = Dataset | WithNoise


def with_noise(dataset: Dataset, config: Config) -> RowData:
    """Returns the examples as the training step of a config needs them."""
    return WithNoise(dataset, config) if config.model.drops else dataset
