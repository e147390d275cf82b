"""Frozen parameters: gathered as all others are, while nothing is summed over them and no optimizer moves them.

They are what adapters (models/lora.py) stand beside. A ParamSpec says which they are; the trained ones are `params` of
the train state, these are `frozen`, and a model gets both in one tree. Trees are nested dicts.
"""

from typing import Any

from sharding.trees import PyTree


def part_frozen(specs: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the ParamSpecs, or Placements, of the trained parameters, and those of the frozen ones."""
    if not isinstance(specs, dict):
        return specs, {}
    parts: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for name, x in specs.items():
        if not isinstance(x, dict):
            parts[x.frozen][name] = x
            continue
        for part, of_x in zip(parts, part_frozen(x), strict=True):
            if of_x:
                part[name] = of_x
    return parts


def part_like(tree: PyTree, like: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the part of a tree that has the names of the tree `like`, and the rest."""
    if not isinstance(tree, dict):
        return tree, {}
    same, rest = {}, {}
    for name, x in tree.items():
        if name not in like:
            rest[name] = x
            continue
        same[name], others = part_like(x, like[name])
        if others:
            rest[name] = others
    return same, rest


def joined(trained: PyTree, frozen: PyTree) -> PyTree:
    """Returns both parts of a tree as one."""
    if not isinstance(trained, dict) or not frozen:
        return trained
    both = {name: joined(x, frozen.get(name)) for name, x in trained.items()}
    return both | {name: x for name, x in frozen.items() if name not in both}
