"""Handwritten digits: 1797 grey images of 8 x 8 pixels that come with scikit-learn; nothing is downloaded."""

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from input_pipeline import index

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE, BRIGHTEST = 8, 16  # side of an image, largest pixel value
NUM_VALIDATION = 360  # images, a fifth
SPLIT_SEED = 0  # the same split for every run


class Digits:
    """The digits of a split; which images it has is fixed."""

    num_classes = 10
    threads = 1

    def __init__(self, split: str) -> None:
        from sklearn.datasets import load_digits  # a slow import (1 s) that only these runs need

        values, labels = load_digits(return_X_y=True)
        order = [index.window_of(i, windows=len(labels), seed=SPLIT_SEED) for i in range(len(labels))]
        chosen = order[:-NUM_VALIDATION] if split == "train" else order[-NUM_VALIDATION:]
        self._pixels = np.round(values[chosen] * (255 / BRIGHTEST)).astype(np.uint8).reshape(-1, SIZE, SIZE)
        self._labels = np.asarray(labels[chosen], np.uint8)
        self.content = hashlib.sha256(self._pixels.tobytes() + self._labels.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, number: int) -> "tuple[Image, int]":
        from PIL.Image import fromarray

        return fromarray(self._pixels[number]), int(self._labels[number])
