"""The arrays of an example, and pure functions from (seed, example) to its window and its masked tokens."""

import abc
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from grain.experimental import index_shuffle

from configs.schema import DataConfig

MAX_WINDOWS = 2**31  # Grain's shuffle works on 32-bit numbers


class RowArray(NamedTuple):
    """Shape and dtype of one array of an example, which is one row of a batch."""

    shape: tuple[int, ...]
    dtype: type[np.generic]


def row_arrays(config: DataConfig) -> dict[str, RowArray]:
    """Returns the arrays of an example by name; the first is the model's input; one is `weights`."""
    if config.objective == "classify":
        shape = (config.image_size, config.image_size, config.channels)
        arrays = {"images": RowArray(shape, np.float32), "labels": RowArray((), np.int32)}
        return arrays | {"weights": RowArray((), np.float32)}
    ids = RowArray((config.seq_len,), np.int32)
    segments = {} if config.packing == "stream" else {"segments": ids}
    return {"tokens": ids, "targets": ids, "weights": RowArray((config.seq_len,), np.float32)} | segments


def num_windows(num_tokens: int, seq_len: int, objective: str) -> int:
    """Returns the number of windows of a stream; consecutive causal windows share one token."""
    return (num_tokens - 1) // seq_len if objective == "causal" else num_tokens // seq_len


def window_of(index: int, *, windows: int, seed: int) -> int:
    """Returns the window in [0, windows) of example `index` >= 0. Every epoch is a different permutation."""
    epoch, place = divmod(index, windows)
    return shuffled(place, windows, seed, epoch)


def shuffled(place: int, count: int, *seeds: int) -> int:
    """Returns element `place` of a permutation of [0, count) that the seeds choose."""
    return index_shuffle(place, max_index=count - 1, seed=seed_of(*seeds), rounds=4)


@lru_cache(maxsize=64)
def seed_of(*seeds: int) -> int:
    """Returns a 32-bit hash of all seeds. With `seed + epoch`, as in `MapDataset.shuffle`, seeds would share epochs."""
    return int(np.random.SeedSequence(seeds).generate_state(1)[0])


class Windows(abc.ABC):
    """Token windows by number, in the order of the text."""

    content: str  # hash of all tokens
    bytes_per_token: float
    filled = 1.0  # fraction of the positions that hold tokens; the other positions have weight 0
    summary = ""  # a line for the user, or ""
    skipped: Sequence[str] = ()  # place and fault of each broken document that was left out

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, window: int) -> np.ndarray:
        """Returns int32 [T + 1] for a causal model, [T] for a masked one."""

    @property
    def shuffled_together(self) -> int:
        """The number of windows in one permutation."""
        return len(self)

    def window_of(self, i: int, seed: int) -> int:
        """Returns the window of example `i` >= 0. Each epoch of `len` examples visits every window once."""
        return window_of(i, windows=len(self), seed=seed)


def random_bits(key: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """Returns uint64 random bits for a key of two 64-bit numbers (Philox: the same bits in every numpy version)."""
    bits = np.random.Philox(key=np.array(key, np.uint64)).random_raw(math.prod(shape))
    return np.asarray(bits, np.uint64).reshape(shape)


def uniform(bits: np.ndarray) -> np.ndarray:
    """Returns float64 in [0, 1) from uint64 bits."""
    return (bits >> np.uint64(11)) * 2.0**-53


def mask_tokens(
    tokens: np.ndarray, *, key: tuple[int, int], rate: float, mask_id: int, num_ids: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs int32 [T] and weights float32 [T] of BERT's masking (Devlin et al. 2018, section 3.1).

    `rate` of the positions (rounded, at least one) get weight 1. Of these, 80 % become `mask_id`, 10 % an id drawn
    from [0, num_ids), 10 % stay as they are.
    """
    length = len(tokens)
    order, action, random_id = random_bits(key, (3, length))
    chosen = np.argsort(order, kind="stable")[: max(1, round(rate * length))]
    action = uniform(action[chosen])
    replaced = np.where(action < 0.9, random_id[chosen] % np.uint64(num_ids), tokens[chosen])
    inputs, weights = tokens.astype(np.int32), np.zeros(length, np.float32)
    inputs[chosen] = np.where(action < 0.8, mask_id, replaced)
    weights[chosen] = 1
    return inputs, weights
