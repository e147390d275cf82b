"""Windows of tokens in shards: the windows of a split, their order, and the shards that they need.

The order is a pure function of (seed, example) and friendly to a cache of few shards. An epoch is a permutation of the
shards, cut into blocks of consecutive shards. The windows of a block are permuted among themselves. Every window is
therefore visited once per epoch, and a step needs the shards of one or two blocks.
"""

import json
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from itertools import accumulate

import numpy as np

from input_pipeline import index
from input_pipeline.folder import VALIDATION_SHARE, named_splits, validation_names
from input_pipeline.shard_index import Shard
from input_pipeline.shard_tiers import OpenShards

_KEY_TAG = (1 << 63) + 2  # all other keys of `random_bits` differ


@dataclass(frozen=True, kw_only=True)
class TokenRange:
    """The tokens [start, stop) of a shard."""

    shard: Shard
    start: int
    stop: int


def parts(shards: tuple[Shard, ...], split: str) -> list[TokenRange]:
    """Returns the parts of a split: whole shards by name, or the first 95 % or last 5 % of a single shard.

    The split `all` has every shard completely.
    """
    whole = [TokenRange(shard=shard, start=0, stop=shard.num_tokens) for shard in shards]
    if split == "all":
        return whole
    trained, validated = named_splits([shard.name for shard in shards])
    if validated:
        return [part for part in whole if part.shard.name in (validated if split == "validation" else trained)]
    whole = [part for part in whole if part.shard.name in trained]
    if len(whole) == 1:
        (only,) = whole
        cut = round(only.stop * (1 - VALIDATION_SHARE))
        return [replace(only, stop=cut) if split == "train" else replace(only, start=cut)]
    held_out = validation_names(trained)
    return [part for part in whole if (part.shard.name in held_out) == (split == "validation")]


class ShardWindows(index.Windows):
    """Windows of `seq_len` tokens (plus one if causal), none of which crosses from one shard into the next."""

    def __init__(
        self, of: list[TokenRange], seq_len: int, objective: str, shards_per_block: int, opened: OpenShards
    ) -> None:
        counts = [max(0, index.num_windows(part.stop - part.start, seq_len, objective)) for part in of]
        self._parts = [part for part, count in zip(of, counts, strict=True) if count]
        self._counts = [count for count in counts if count]
        self._ends = list(accumulate(self._counts))  # last window of each shard, plus 1, in the order of names
        self._seq_len, self._overlap = seq_len, int(objective == "causal")
        self._per_block = shards_per_block
        content = [[part.shard.sha256, part.start, part.stop] for part in self._parts]
        self.content = sha256(json.dumps([content, shards_per_block]).encode()).hexdigest()
        tokens = sum(part.shard.num_tokens for part in self._parts)
        self.bytes_per_token = sum(part.shard.text_bytes for part in self._parts) / max(1, tokens)
        self._order = lru_cache(maxsize=4)(lambda seed: ShardOrder(self._counts, seed, shards_per_block))
        self._block = (-1, -1)  # seed and number of the block being read
        self._open = opened

    @property
    def needed_bytes(self) -> int:
        """The most bytes that the shards of two blocks can have."""
        sizes = sorted((part.shard.size_bytes for part in self._parts), reverse=True)
        return sum(sizes[: 2 * self._per_block])

    @property
    def num_shards(self) -> int:
        """The number of shards that have a window."""
        return len(self._parts)

    @property
    def shuffled_together(self) -> int:
        return sum(sorted(self._counts, reverse=True)[: self._per_block])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def window_of(self, i: int, seed: int) -> int:
        """Returns the window of example `i`, and starts to read ahead the shards of its block and of the next block."""
        order = self._order(seed)
        at = (seed, order.block_of(i))
        if at != self._block:
            self._block = at
            now, later = (order.shards_of(block) for block in (at[1], at[1] + 1))
            self._open.read_ahead(*([self._parts[shard].shard for shard in shards] for shards in (now, later)))
        shard, window = order(i)
        return self._ends[shard] - self._counts[shard] + window

    def __getitem__(self, window: int) -> np.ndarray:
        at = bisect_right(self._ends, window)
        part = self._parts[at]
        start = part.start + (window - self._ends[at] + self._counts[at]) * self._seq_len
        tokens = self._open.get(part.shard)[start : start + self._seq_len + self._overlap]
        return np.asarray(tokens, np.int32)


@dataclass(frozen=True)
class _Epoch:
    """An epoch: the shards in their order, the first window of each shard, and the first shard of each block."""

    shards: list[int]
    starts: list[int]  # [S + 1]
    blocks: list[int]  # [B + 1]


class ShardOrder:
    """The order for shards of `counts` windows each: `order(i)` is the shard of example `i` and its window there."""

    def __init__(self, counts: list[int], seed: int, shards_per_block: int) -> None:
        """Costs O(shards) once per epoch, and O(log shards) per example."""
        self._counts, self._seed, self._per_block = counts, seed, shards_per_block
        self.total = sum(counts)
        self.num_blocks = -(-len(counts) // shards_per_block)
        self._epoch = lru_cache(maxsize=4)(self._make_epoch)

    def __call__(self, i: int) -> tuple[int, int]:
        """Returns the shard of example `i` >= 0, and the window within it."""
        epoch, place = divmod(i, self.total)
        order = self._epoch(epoch)
        block = bisect_right(order.blocks, place) - 1
        first, end = order.blocks[block], order.blocks[block + 1]
        place = first + index.shuffled(place - first, end - first, self._seed, epoch, block + 2)
        at = bisect_right(order.starts, place) - 1
        return order.shards[at], place - order.starts[at]

    def block_of(self, i: int) -> int:
        """Returns the number of the block of example `i`, counted over all epochs."""
        epoch, place = divmod(i, self.total)
        return epoch * self.num_blocks + bisect_right(self._epoch(epoch).blocks, place) - 1

    def shards_of(self, block: int) -> list[int]:
        """Returns the shards of a block. Blocks are counted over all epochs."""
        epoch, number = divmod(block, self.num_blocks)
        start = number * self._per_block
        return self._epoch(epoch).shards[start : start + self._per_block]

    def _make_epoch(self, epoch: int) -> _Epoch:
        key = index.seed_of(self._seed, epoch, 1)  # blocks count from 2, because a last 0 would change nothing
        bits = index.random_bits((key, _KEY_TAG), (len(self._counts),))
        shards = np.argsort(bits, kind="stable").tolist()
        starts = [0, *np.cumsum([self._counts[shard] for shard in shards]).tolist()]
        return _Epoch(shards, starts, [*starts[:-1][:: self._per_block], starts[-1]])
