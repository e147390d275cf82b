"""The order of the devices of a TPU slice, so that a partition group is a contiguous box of the slice's torus.

A device has `coords` (x, y, z) in the slice. On Ironwood (tpu7x) a chip has two devices, told apart by `core_on_chip`.
A box is as compact as possible: 4 devices of a v5e slice form 2x2, where each has two links into the box, not a line.
"""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any


def boxes(devices: Sequence[Any], count: int) -> list[list[Any]]:
    """Returns the devices of a slice or a box as boxes of `count` devices, row by row. ValueError if none is possible.

    The devices of a chip stay together.
    """
    places = [(*reversed(device.coords), device.core_on_chip) for device in devices]  # z, y, x, device of the chip
    starts = [min(axis) for axis in zip(*places, strict=True)]
    sides = [max(axis) + 1 - start for axis, start in zip(zip(*places, strict=True), starts, strict=True)]
    torus = "x".join(map(str, sides[2::-1])) + (f" with {sides[3]} devices a chip" if sides[3] > 1 else "")
    if prod(sides) != len(devices):
        raise ValueError(f"{len(devices)} devices of a TPU slice do not fill their box of {torus}; use a whole box")
    possible = [*product(*([d for d in range(1, side + 1) if side % d == 0] for side in sides))]
    fitting = [box for box in possible if prod(box) == count]
    if not fitting:
        sizes = ", ".join(map(str, sorted({prod(box) for box in possible})))
        raise ValueError(f"{count} devices cannot be a box of {torus} in a TPU slice; groups of {sizes} can")
    box = min(fitting, key=lambda box: (-box[3], sum(box), box))

    def position(device: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        place = (*reversed(device.coords), device.core_on_chip)
        return tuple((at - start) // side for at, start, side in zip(place, starts, box, strict=True)), place

    ordered = sorted(devices, key=position)
    return [ordered[i : i + count] for i in range(0, len(ordered), count)]


def in_boxes(devices: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    """Returns the devices so that each `counts[0]` consecutive ones are a box, in it each `counts[1]`, and so on."""
    if not counts:
        return list(devices)
    return [device for box in boxes(devices, counts[0]) for device in in_boxes(box, counts[1:])]
