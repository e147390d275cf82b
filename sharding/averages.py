"""Running averages, such as batch norm's: parameters that no gradient moves, in the group `averages`.

A model that has them gives each of them minus its new value, the mean over the batch, as gradient (models/norms.py).
Then both hops average the values over all devices, as they do gradients. What follows is to keep them out of norms,
clipping, decay and momenta, and to move them towards their values: it takes the two parts of a tree apart, and handles
each in its way.
"""

from collections.abc import Mapping

from sharding.trees import PyTree

AVERAGES = "averages"  # the top-level key of the group


def part_averages(tree: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
    """Returns a tree like the parameters without its group of running averages, and that group; {} if it has none.

    `{**trained, **averages}` is the tree again.
    """
    if not isinstance(tree, Mapping) or AVERAGES not in tree:
        return tree, {}
    trained = {name: group for name, group in tree.items() if name != AVERAGES}
    return trained, {AVERAGES: tree[AVERAGES]}
