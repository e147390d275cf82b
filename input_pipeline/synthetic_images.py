"""Synthetic images of ten classes: a coarse pattern of the class under noise; nothing is downloaded."""

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np

from input_pipeline import index
from input_pipeline.synthetic import KEY_TAG, NUM_WINDOWS

if TYPE_CHECKING:
    from PIL.Image import Image

PATTERN = 4  # squares per side of a class's pattern
CLASS_KEY = (1 << 63) + 2  # beside the keys of the splits


class SyntheticImages:
    """Images of `size` x `size` pixels that are a pure function of (split, number), and so are their labels.

    A pixel is the mean of noise and of its class's pattern, each uniform in [0, 255].
    """

    num_classes = 10
    threads = 16

    def __init__(self, size: int, channels: int, split: str) -> None:
        self._size, self._channels, self._split = size, channels, split
        squares = np.arange(size) * PATTERN // size
        bits = index.random_bits((0, CLASS_KEY), (self.num_classes, PATTERN, PATTERN, channels))
        self._patterns = (bits >> np.uint64(56)).astype(np.uint16)[:, squares][:, :, squares]
        rule = f"synthetic images 1 {split} {NUM_WINDOWS[split]} {size} {channels} {self.num_classes} {PATTERN}"
        self.content = hashlib.sha256(rule.encode()).hexdigest()

    def __len__(self) -> int:
        return NUM_WINDOWS[self._split]

    def __getitem__(self, number: int) -> "tuple[Image, int]":
        from PIL.Image import fromarray

        shape = (self._size, self._size, self._channels)
        values = math.prod(shape)
        bits = index.random_bits((number, KEY_TAG[self._split]), (1 + -(-values // 8),))
        label = int(bits[0] % np.uint64(self.num_classes))
        noise = bits[1:].astype("<u8").view(np.uint8)[:values].reshape(shape)  # eight values in 64 bits
        pixels = ((noise + self._patterns[label]) // 2).astype(np.uint8)
        return fromarray(pixels if self._channels == 3 else pixels[..., 0]), label
