"""Regions of arrays, as devices hold them, and which of them each process of a node keeps in memory."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from state.manifest import Leaf

Device = Any  # a jax.Device


@dataclass(frozen=True, kw_only=True)
class Region:
    """A rectangular part of the array at `path`: it begins at index `start` and has `shape`."""

    path: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: "Region") -> "Region | None":
        """Returns the intersection of two regions of the same array; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        ends = (min(s + n, t + m) for s, n, t, m in zip(self.start, self.shape, other.start, other.shape, strict=True))
        shape = tuple(end - s for s, end in zip(start, ends, strict=True))
        return Region(path=self.path, start=start, shape=shape) if all(n > 0 for n in shape) else None

    def within(self, outer: "Region") -> tuple[slice, ...]:
        """Returns the index of this region in an array that holds the region `outer`."""
        starts = [s - t for s, t in zip(self.start, outer.start, strict=True)]
        return tuple(slice(s, s + n) for s, n in zip(starts, self.shape, strict=True))


@dataclass(frozen=True, kw_only=True)
class OwnedShard:
    """A region that a process keeps in the memory of its node."""

    region: Region
    device: Device  # a device of this process that holds the region
    size_bytes: int
    is_only_copy: bool  # no other node holds this region


def owned_shards(
    process: int, nodes: Sequence[str], arrays: Mapping[str, jax.Array], tree: Sequence[Leaf]
) -> Iterator[OwnedShard]:
    """Yields the regions that a process keeps in its node's memory; `nodes` names the node of each process.

    Of each region that a node holds, one process of the node keeps it; the processes take turns.
    """
    number = 0
    for leaf in tree:
        holders: dict[Region, dict[int, Device]] = {}
        for device, index in arrays[leaf.path].sharding.devices_indices_map(leaf.shape).items():
            assert index is not None
            holders.setdefault(region_of(leaf, index), {}).setdefault(device.process_index, device)
        for region, devices in holders.items():
            number += 1
            here = sorted(other for other in devices if nodes[other] == nodes[process])
            if math.prod(region.shape) and here and here[number % len(here)] == process:
                is_only_copy = len(set(nodes)) > 1 and len({nodes[other] for other in devices}) == 1
                size_bytes = math.prod(region.shape) * arrays[leaf.path].dtype.itemsize
                yield OwnedShard(
                    region=region, device=devices[process], size_bytes=size_bytes, is_only_copy=is_only_copy
                )


def whole(leaf: Leaf) -> Region:
    """Returns the region that is the whole array."""
    return Region(path=leaf.path, start=(0,) * len(leaf.shape), shape=leaf.shape)


def region_of(leaf: Leaf, index: tuple[slice, ...]) -> Region:
    """Returns the region of an index as jax's shardings give it."""
    ranges = [part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True)]
    start, shape = tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges)
    return Region(path=leaf.path, start=start, shape=shape)


def covers(regions: Iterable[Region], leaf: Leaf) -> bool:
    """Whether regions of one sharding, which are equal or disjoint, cover the whole array."""
    return sum(math.prod(region.shape) for region in set(regions)) == math.prod(leaf.shape)
