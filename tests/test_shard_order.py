"""The order of windows in shards, against the same rule written out with lists."""

import numpy as np
from grain.experimental import index_shuffle

from input_pipeline.shard_windows import ShardOrder

CASES = [
    ([5], 1),
    ([30, 20], 1),
    ([1, 1, 1], 2),
    ([7, 3, 9, 1, 4, 4, 12, 2, 6], 2),
    (list(range(1, 16)), 4),
    ([3, 4], 9),
]


def epoch_written_out(counts: list[int], seed: int, per_block: int, epoch: int) -> list[tuple[int, int]]:
    """All (shard, window) of an epoch: shards permuted, blocks of them concatenated, and each list permuted."""
    key = int(np.random.SeedSequence([seed, epoch, 1]).generate_state(1)[0])
    bits = np.random.Philox(key=np.array([key, (1 << 63) + 2], np.uint64)).random_raw(len(counts))
    shards = sorted(range(len(counts)), key=lambda shard: int(bits[shard]))
    out = []
    for number in range(0, len(counts), per_block):
        block = [(shard, w) for shard in shards[number : number + per_block] for w in range(counts[shard])]
        block_seed = int(np.random.SeedSequence([seed, epoch, number // per_block + 2]).generate_state(1)[0])
        out += [block[index_shuffle(i, len(block) - 1, block_seed, 4)] for i in range(len(block))]
    return out


def test_order_is_that_of_the_lists() -> None:
    for counts, per_block in CASES:
        order, total = ShardOrder(counts, 3, per_block), sum(counts)
        expected = [pair for epoch in range(2) for pair in epoch_written_out(counts, 3, per_block, epoch)]
        assert [order(i) for i in range(2 * total)] == expected, (counts, per_block)
        for epoch in range(2):  # every window once
            found = sorted(expected[epoch * total : (epoch + 1) * total])
            assert found == [(shard, w) for shard, count in enumerate(counts) for w in range(count)]


def test_a_block_names_the_shards_that_its_examples_need():
    counts = [7, 3, 9, 1, 4, 4, 12, 2, 6]
    order = ShardOrder(counts, 5, 2)
    needed: dict[int, set[int]] = {}
    for i in range(3 * sum(counts)):
        needed.setdefault(order.block_of(i), set()).add(order(i)[0])
    assert sorted(needed) == list(range(15))
    assert all(needed[block] == set(order.shards_of(block)) for block in needed)
