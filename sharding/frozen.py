"""Frozen parameters: gathered like all others, but never reduced, and not changed by the optimizer.

Adapters (models/lora.py) are added to frozen parameters. A ParamSpec marks them. The trained parameters are `params` of
the train state, the frozen parameters are `frozen`, and a model gets both in one tree. Trees are nested dicts.
"""

from sharding.trees import PyTree


def part_frozen(specs: PyTree) -> tuple[PyTree, PyTree]:
    """Splits a tree of ParamSpecs or Placements into the trained parameters and the frozen parameters."""
    if not isinstance(specs, dict):
        return specs, {}
    parts: tuple[dict[str, PyTree], dict[str, PyTree]] = {}, {}
    for name, x in specs.items():
        if not isinstance(x, dict):
            parts[x.frozen][name] = x
            continue
        for part, of_x in zip(parts, part_frozen(x), strict=True):
            if of_x:
                part[name] = of_x
    return parts


def part_like(tree: PyTree, like: PyTree) -> tuple[PyTree, PyTree]:
    """Splits a tree into the part with the names of the tree `like`, and the rest."""
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
    """Joins both parts of a tree."""
    if not isinstance(trained, dict) or not frozen:
        return trained
    both = {name: joined(x, frozen.get(name)) for name, x in trained.items()}
    return both | {name: x for name, x in frozen.items() if name not in both}
