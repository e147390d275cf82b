"""Boxes: the parts of arrays that devices hold, and which process of a node keeps which of them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from state.manifest import Leaf

Device = Any  # a jax.Device


@dataclass(frozen=True, kw_only=True)
class Box:
    """A part of an array: `shape` numbers a dim from `start` on."""

    path: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: "Box") -> "Box | None":
        """Returns what both hold of the same array."""
        start = tuple(map(max, self.start, other.start))
        ends = (min(s + n, t + m) for s, n, t, m in zip(self.start, self.shape, other.start, other.shape, strict=True))
        shape = tuple(end - s for s, end in zip(start, ends, strict=True))
        return Box(path=self.path, start=start, shape=shape) if all(n > 0 for n in shape) else None

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Returns where this box is in an array that holds `outer`."""
        starts = [s - t for s, t in zip(self.start, outer.start, strict=True)]
        return tuple(slice(s, s + n) for s, n in zip(starts, self.shape, strict=True))


@dataclass(frozen=True, kw_only=True)
class OwnedShard:
    """A box that this process keeps in the memory of its node."""

    box: Box
    device: Device  # of this process, which holds it
    size_bytes: int
    alone: bool  # no other node holds it


def owned_shards(
    process: int, nodes: Sequence[str], arrays: Mapping[str, jax.Array], tree: Sequence[Leaf]
) -> Iterator[OwnedShard]:
    """Yields the boxes that a process keeps: each box that its node holds is kept by one process of the node, in turns.

    `nodes` says where each process runs.
    """
    number = 0
    for leaf in tree:
        holders: dict[Box, dict[int, Device]] = {}
        for device, index in arrays[leaf.path].sharding.devices_indices_map(leaf.shape).items():
            assert index is not None
            holders.setdefault(box_of(leaf, index), {}).setdefault(device.process_index, device)
        for box, devices in holders.items():
            number += 1
            here = sorted(other for other in devices if nodes[other] == nodes[process])
            if math.prod(box.shape) and here and here[number % len(here)] == process:
                alone = len(set(nodes)) > 1 and len({nodes[other] for other in devices}) == 1
                size_bytes = math.prod(box.shape) * arrays[leaf.path].dtype.itemsize
                yield OwnedShard(box=box, device=devices[process], size_bytes=size_bytes, alone=alone)


def whole(leaf: Leaf) -> Box:
    """Returns the box of a whole array."""
    return Box(path=leaf.path, start=(0,) * len(leaf.shape), shape=leaf.shape)


def box_of(leaf: Leaf, index: tuple[slice, ...]) -> Box:
    """Returns the box that an index of a jax sharding means."""
    ranges = [part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True)]
    start, shape = tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges)
    return Box(path=leaf.path, start=start, shape=shape)


def covers(boxes: Iterable[Box], leaf: Leaf) -> bool:
    """Whether boxes of one sharding (equal or disjoint) make up the whole array."""
    return sum(math.prod(box.shape) for box in set(boxes)) == math.prod(leaf.shape)
