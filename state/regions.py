"""Regions of arrays, as devices hold them."""

from dataclasses import dataclass

from state.manifest import Leaf


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


def region_of(leaf: Leaf, index: tuple[slice, ...]) -> Region:
    """Returns the region of an index as jax's shardings give it."""
    ranges = [part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True)]
    start, shape = tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges)
    return Region(path=leaf.path, start=start, shape=shape)
