"""The order of windows that lie in shards: a pure function of (seed, example), kind to a cache of few shards.

An epoch is a permutation of the shards, cut into blocks of consecutive shards; the windows of a block are permuted
among themselves. So every window is visited once per epoch, and a step needs the shards of one block, or of two.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from grain.experimental import index_shuffle

from input_pipeline.index import random_bits

_KEY_TAG = (1 << 63) + 2  # all other keys of `random_bits` differ


@dataclass(frozen=True)
class _Epoch:
    """An epoch: the shards in their order, the first window of each place, and the first one of each block."""

    shards: list[int]
    starts: list[int]  # [S + 1]
    blocks: list[int]  # [B + 1]


class ShardOrder:
    """The order for shards of `counts` windows each: `order(i)` is the (shard, window in it) of example `i`."""

    def __init__(self, counts: list[int], seed: int, shards_per_block: int) -> None:
        """An epoch costs O(shards) once, an example O(log shards)."""
        self._counts, self._seed, self._per_block = counts, seed, shards_per_block
        self.total = sum(counts)
        self.num_blocks = -(-len(counts) // shards_per_block)
        self._epoch = lru_cache(maxsize=4)(self._make_epoch)

    def __call__(self, i: int) -> tuple[int, int]:
        """Returns the shard, and the window in it, of example `i` >= 0."""
        epoch, place = divmod(i, self.total)
        order = self._epoch(epoch)
        block = bisect_right(order.blocks, place) - 1
        first, end = order.blocks[block], order.blocks[block + 1]
        place = first + index_shuffle(
            place - first, max_index=end - first - 1, seed=_block_seed(self._seed, epoch, block), rounds=4
        )
        at = bisect_right(order.starts, place) - 1
        return order.shards[at], place - order.starts[at]

    def block_of(self, i: int) -> int:
        """Returns the number of the block of example `i`, counted over all epochs."""
        epoch, place = divmod(i, self.total)
        return epoch * self.num_blocks + bisect_right(self._epoch(epoch).blocks, place) - 1

    def shards_of(self, block: int) -> list[int]:
        """Returns the shards of a block, which is counted over all epochs."""
        epoch, number = divmod(block, self.num_blocks)
        start = number * self._per_block
        return self._epoch(epoch).shards[start : start + self._per_block]

    def _make_epoch(self, epoch: int) -> _Epoch:
        bits = random_bits((_block_seed(self._seed, epoch, -1), _KEY_TAG), (len(self._counts),))
        shards = np.argsort(bits, kind="stable").tolist()
        starts = [0, *np.cumsum([self._counts[shard] for shard in shards]).tolist()]
        return _Epoch(shards, starts, [*starts[:-1][:: self._per_block], starts[-1]])


@lru_cache(maxsize=64)
def _block_seed(seed: int, epoch: int, block: int) -> int:
    """Returns a 32-bit hash; block -1 is the permutation of the shards. (A last 0 would change nothing.)"""
    return int(np.random.SeedSequence([seed, epoch, block + 2]).generate_state(1)[0])
