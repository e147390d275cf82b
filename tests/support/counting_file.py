"""Counts what is read of a checkpoint in safetensors; it starts no devices, so that a run's process can import it."""

from collections import Counter
from typing import Any

import numpy as np


class CountingFile:
    """A file of safetensors that counts the bytes of what is taken from it, and the most at once."""

    taken: Counter[str] = Counter()
    most = 0

    def __init__(self, file: Any) -> None:
        self._file = file

    def keys(self) -> Any:
        return self._file.keys()

    def get_slice(self, name: str) -> Any:
        found = self._file.get_slice(name)

        class Slice:
            get_shape, get_dtype = found.get_shape, found.get_dtype

            def __getitem__(self, index: Any) -> np.ndarray:
                value = found[index]
                CountingFile.taken[name] += value.nbytes
                CountingFile.most = max(CountingFile.most, value.nbytes)
                return value

        return Slice()
