"""Synthetic data that a small model learns within a few hundred steps. Nothing is downloaded.

Tokens count up, with random jumps. Images of ten classes are a coarse pattern of the class plus noise.
"""

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np

from input_pipeline import index

if TYPE_CHECKING:
    from PIL.Image import Image

STRIDE = 7  # the next token is the current one plus STRIDE, modulo the number of ids,
JUMP_RATE = 0.1  # or random with this probability
NUM_WINDOWS = {"train": 1 << 16, "validation": 1 << 12}
KEY_TAG = {"train": 1 << 63, "validation": (1 << 63) + 1}  # all other keys of `random_bits` are below 2**63
PATTERN = 4  # squares per side of a class's pattern
CLASS_KEY = (1 << 63) + 2  # differs from the keys of the splits


class SyntheticWindows(index.Windows):
    """Windows that are a pure function of (split, index). A token depends on its predecessor and on random bits.

    A model that has learnt the rule reaches a loss of about 0.88 nats with 256 ids; an untrained model has ln 256 =
    5.55.
    """

    bytes_per_token = 1.0

    def __init__(self, seq_len: int, objective: str, num_ids: int, split: str) -> None:
        self._length = seq_len + (objective == "causal")
        self._num_ids, self._split = num_ids, split
        rule = f"synthetic 1 {split} {NUM_WINDOWS[split]} {num_ids} {STRIDE} {JUMP_RATE}"
        self.content = hashlib.sha256(rule.encode()).hexdigest()

    def __len__(self) -> int:
        return NUM_WINDOWS[self._split]

    def __getitem__(self, window: int) -> np.ndarray:
        chance, value = index.random_bits((window, KEY_TAG[self._split]), (2, self._length))
        place = np.arange(self._length)
        jump = (index.uniform(chance) < JUMP_RATE) | (place == 0)
        last_jump = np.maximum.accumulate(np.where(jump, place, 0))
        start = (value % np.uint64(self._num_ids)).astype(np.int64)[last_jump]
        return ((start + STRIDE * (place - last_jump)) % self._num_ids).astype(np.int32)


class SyntheticImages:
    """Images of `size` x `size` pixels and their labels, which are pure functions of (split, number).

    A pixel is the mean of noise and its class's pattern, each uniform in [0, 255].
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
        noise = bits[1:].astype("<u8").view(np.uint8)[:values].reshape(shape)  # eight values per 64 bits
        pixels = ((noise + self._patterns[label]) // 2).astype(np.uint8)
        return fromarray(pixels if self._channels == 3 else pixels[..., 0]), label
