"""Finds the newest step that is complete across the memories of the nodes, and restores it onto any mesh."""

import contextlib
import functools
import math
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from elastic import tree
from elastic.attempts import Attempts
from elastic.manifest import Leaf
from elastic.memory_files import MemoryFolder, Region, SnapshotManifest, StoredRegion, region_of
from elastic.transfer import connect, fetch
from runtime.blobs import BlobAddress, Connection
from runtime.consensus import all_gather, new_key
from runtime.files.json_objects import JsonObject
from sharding.padding import from_regions
from sharding.trees import PyTree


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A piece that verifies, and the process that can read it."""

    process: int
    snapshot: SnapshotManifest
    number: int  # index of the piece in the snapshot

    @property
    def piece(self) -> StoredRegion:
        return self.snapshot.pieces[self.number]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A step that is complete across the nodes."""

    snapshot: SnapshotManifest  # a snapshot of this step
    copies: Mapping[str, Sequence[Copy]]  # by path

    @property
    def step(self) -> int:
        return self.snapshot.step

    @property
    def processes(self) -> set[int]:
        """The processes that read a part of it: at most one per node."""
        return {copy.process for copies in self.copies.values() for copy in copies}


def find(
    folder: MemoryFolder,
    reads: bool,
    attempts: Attempts,
    saved: int,
    wanted: Mapping[str, tree.Wanted],
    report: Callable[[str], None],
    progress: Callable[[], object],
) -> Found | None:
    """Returns the newest step that is complete and verifies, the same in every process, or None.

    On each node, one process `reads` the folder. `saved` is the newest checkpoint, possibly set aside. In
    process 0, `report` gets a line for each snapshot that is ignored, but none for an incomplete step: the newest one
    may have been in progress. `progress` is called for each piece that is verified here.
    """
    own, damaged = folder.snapshots() if reads else ([], [])
    told = {"host": socket.gethostname(), "damaged": damaged, "snapshots": [x.as_json() for x in own]}
    everyone = all_gather(new_key("snapshots"), told)
    if jax.process_index() != 0:
        report = lambda line: None
    by_step: dict[tuple[int, tuple[int, ...]], list[Copy]] = defaultdict(list)
    for process, said in enumerate(everyone):
        for line in said["damaged"]:
            report(f"snapshot on {said['host']}: {line}")
        for snapshot in map(SnapshotManifest.from_json, said["snapshots"]):
            for number in range(len(snapshot.pieces)):  # a snapshot without pieces proves nothing
                copy = Copy(process=process, snapshot=snapshot, number=number)
                by_step[snapshot.step, snapshot.history].append(copy)
    by_step = {key: found for key, found in by_step.items() if not attempts.has_discarded(key[1], key[0])}
    known = max([attempts.saved, *(copies[0].snapshot.saved for copies in by_step.values())])
    for step, history in sorted(by_step, reverse=True):
        copies = by_step[step, history]
        objection = _set_back(step, saved, known) or _disagreement(copies)
        if objection := objection or tree.difference("the snapshot", copies[0].snapshot.tree, wanted):
            report(f"the snapshots of step {step} are not used: {objection}")
        elif _complete(copies):
            copies = _without_damaged(folder, copies, [said["host"] for said in everyone], report, progress)
            if by_path := _complete(copies):
                return Found(snapshot=copies[0].snapshot, copies=by_path)
    return None


def load(
    found: Found,
    abstract_state: PyTree,
    folder: MemoryFolder,
    reader: int,
    addresses: list[BlobAddress],
    token: str,
    turn: int,
    progress: Callable[[], object],
) -> PyTree:
    """Returns the state with the shardings of `abstract_state`. OSError if a part cannot be fetched.

    Pieces of `reader`, the process that reads for this node, come from the local folder, all others from their
    processes: in another `turn` from others, if several have them. `progress` is called before each array, and while
    one comes. Arrays with a row per replica are adapted to the new number of replicas; their sum or mean is preserved.
    These programs need all processes: so an OSError comes only after the last array.
    """
    wanted = tree.flatten_abstract(abstract_state)
    saved = {leaf.path: leaf for leaf in found.snapshot.tree}
    with contextlib.ExitStack() as connections:
        to = lambda process: connect(addresses[process], token, jax.process_index())
        connection = functools.cache(lambda process: connections.enter_context(to(process)))
        reading = _Reader(folder, reader, connection, turn, progress)
        arrays = []
        for path, asked in wanted.items():
            progress()
            is_empty = not asked.abstract.size
            arrays.append(
                tree.empty(asked.abstract) if is_empty else reading.array(asked, saved[path], found.copies[path])
            )
        if reading.failed:
            raise reading.failed[0]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), jax.block_until_ready(arrays))


@dataclass(frozen=True)
class _Reader:
    """Reads regions from the folder of this node if it has them, else from other processes."""

    folder: MemoryFolder
    reader: int  # the process that reads for this node
    connection: Callable[[int], Connection]  # to a process
    turn: int
    progress: Callable[[], object]
    failed: list[OSError] = field(default_factory=list)  # after the first, nothing is read

    def array(self, wanted: tree.Wanted, saved: Leaf, copies: Sequence[Copy]) -> jax.Array:
        """Returns an array with its wanted sharding; a region that several devices hold is read once."""
        content = functools.cache(lambda region: self.region(region, copies))
        array = from_regions(tree.as_saved(wanted, saved), lambda index: content(region_of(saved, index)))
        return tree.shared_out(array, wanted)

    def region(self, wanted: Region, copies: Sequence[Copy]) -> np.ndarray:
        """Returns the array of a region, assembled from the pieces that overlap with it; any values once `failed`."""
        by_region: dict[Region, list[Copy]] = defaultdict(list)
        for copy in copies:
            by_region[copy.piece.region].append(copy)
        result = np.empty(wanted.shape, copies[0].snapshot.dtypes[wanted.path])
        for region, of_region in by_region.items():
            if not self.failed and (part := wanted.overlap(region)):
                try:
                    result[part.within(wanted)] = self._read(part, self._nearest(of_region))
                except OSError as error:
                    self.failed.append(error)
        return result

    def _nearest(self, copies: list[Copy]) -> Copy:
        """Returns the copy on this node, if any; else a copy by the process index and the turn, to spread the load."""
        here = [copy for copy in copies if copy.process == self.reader]
        return here[0] if here else copies[(jax.process_index() + self.turn) % len(copies)]

    def _read(self, part: Region, copy: Copy) -> np.ndarray:
        if copy.process == self.reader:
            return self.folder.read(copy.snapshot, copy.piece)[part.within(copy.piece.region)]
        return fetch(self.connection(copy.process), copy.snapshot, copy.number, part, self.progress)


def _complete(copies: Sequence[Copy]) -> Mapping[str, Sequence[Copy]]:
    """Returns the copies by path if they cover all arrays, else nothing."""
    by_path: dict[str, list[Copy]] = defaultdict(list)
    for copy in copies:
        by_path[copy.piece.region.path].append(copy)
    for leaf in copies[0].snapshot.tree if copies else ():
        regions = {copy.piece.region for copy in by_path[leaf.path]}  # regions of one sharding: they do not overlap
        if sum(math.prod(region.shape) for region in regions) != math.prod(leaf.shape):
            return {}
    return by_path


def _set_back(step: int, saved: int, known: int) -> str:
    """Returns why a step is not used because the user has set the run back to checkpoint `saved`; "" if not.

    The user has if a newer checkpoint, `known`, was deleted. An old checkpoint alone does not mean that, nor does the
    deletion of all.
    """
    if 0 < saved < min(known, step):
        return f"the checkpoint of step {known}, which was there, is gone, and that of step {saved} is the newest"
    return ""


def _disagreement(copies: list[Copy]) -> str:
    """Returns the difference between two snapshots of one step; "" if they agree."""
    first = copies[0].snapshot
    hashes: dict[Region, Copy] = {}
    for copy in copies:
        other = copy.snapshot
        if (other.data, _learned(other), other.tree) != (first.data, _learned(first), first.tree):
            return f"they are of different configs or data ({first.name} and {other.name})"
        known = hashes.setdefault(copy.piece.region, copy)
        if known.piece.crc32 != copy.piece.crc32:
            return (
                f"two copies of a part of {copy.piece.region.path} differ (processes {known.process} and "
                f"{copy.process} read them)"
            )
    return ""


def _learned(snapshot: SnapshotManifest) -> JsonObject:
    """Returns the config without the section `elastic`, in which nodes may differ."""
    return {key: value for key, value in snapshot.config.items() if key != "elastic"}


def _without_damaged(
    folder: MemoryFolder,
    copies: list[Copy],
    hosts: list[str],
    report: Callable[[str], None],
    progress: Callable[[], object],
) -> list[Copy]:
    """Returns the copies whose bytes match their hashes; each process checks its own."""
    me = jax.process_index()
    own = {copy.snapshot.name: copy.snapshot for copy in copies if copy.process == me}
    damaged = {name: folder.damaged(snapshot, progress) for name, snapshot in own.items()}
    everyone = all_gather(new_key("damaged"), damaged)
    good = [x for x in copies if x.number not in everyone[x.process][x.snapshot.name]]
    for process, found in enumerate(everyone):
        for name, numbers in found.items():
            if numbers:
                report(
                    f"snapshot {name} on {hosts[process]}: {len(numbers)} of its pieces do not match their hash; they "
                    "are not used"
                )
    return good
