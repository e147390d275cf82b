"""Running averages, such as batch norm's: parameters that no gradient moves, in the group `averages`.

A model with running averages returns minus their new values, the means over the batch, as their gradients
(models/norms.py). The group reduce-scatter and the replica all-reduce then average these values over all devices, like
gradients. This module separates the group from the other parameters, so that norms, clipping, decay and momenta exclude
it, and the optimizer moves it towards its new values.
"""

from collections.abc import Mapping

from sharding.trees import PyTree

AVERAGES = "averages"  # the top-level key of the group


def part_averages(tree: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
    """Returns the tree without its group of running averages, and that group, or {} if it has none.

    `{**trained, **averages}` restores the tree.
    """
    if not isinstance(tree, Mapping) or AVERAGES not in tree:
        return tree, {}
    trained = {name: group for name, group in tree.items() if name != AVERAGES}
    return trained, {AVERAGES: tree[AVERAGES]}
