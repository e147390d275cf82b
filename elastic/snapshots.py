"""The memory tier: every few steps each node keeps its shards of the state on its RAM disk (docs/elasticity.md).

Each region that a node holds is kept once: the processes and devices of the node share the work. A partner process on
another node keeps a copy of the regions that no other node holds. `save` returns when the copies to the host are
enqueued. The caller may donate the state, because the next program on the devices waits for the copies. A thread writes
and hashes them, commits them, and sends the partner its copy. A process overwrites the newest complete snapshot only
after all processes have a newer one.
"""

import math
import secrets
import shutil
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import jax

from elastic import tree
from elastic.attempts import Extension, newest_checkpoint, newest_set_aside, read_attempts, write_attempts
from elastic.manifest import Leaf
from elastic.memory_files import (
    MemoryFolder,
    Region,
    SnapshotManifest,
    StoredRegion,
    laid_out,
    region_of,
    remove_run,
)
from elastic.pace import Pace
from elastic.recovery import Found, find, load
from elastic.transfer import PURPOSE, Answers, connect, send_copy
from elastic.tree import Restored, Source
from runtime.blobs import BlobAddress, BlobService, PeerError, RefusedError
from runtime.command_line import print_to_stderr
from runtime.consensus import all_gather, barrier, broadcast, new_key
from runtime.files.json_objects import JsonObject
from runtime.handshake import shared_token
from sharding.mesh import Device, slice_of
from sharding.trees import PyTree

_HOST = "pinned_host"  # page-locked: devices copy to it on their own
_TRIES = 3  # to fetch a step; a step that is not fetched is lost, because a new attempt deletes unused snapshots


class Snapshots:
    """The snapshots of one run in the memories of its nodes; a context manager.

    All processes must call the same methods in the same order: first `find`, perhaps `load`, then `begin`.
    """

    def __init__(
        self,
        workdir: Path,
        memory_dir: str,
        every: int,
        *,
        report: Callable[[str], None] = print_to_stderr,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        """Keeps every `every`-th step (0: none) in `memory_dir`. ValueError if other users could access it.

        `progress` is called for each array that is restored, and while one comes from another node.
        """
        self._workdir, self._memory_dir, self._report, self._every = workdir, memory_dir, report, every
        self._progress = progress
        self._me = jax.process_index()
        self._executor = ThreadPoolExecutor(1, "snapshot")
        self._saving: Future[None] | None = None
        self._service: BlobService | None = None
        self._used: set[str] = set()  # the snapshots that were restored
        self._owned: list[OwnedShard] = []
        self._started = self._failed = False  # a snapshot was begun; this process failed to write it
        self._warned = False
        self._pace = Pace(every)
        self._attempts = read_attempts(workdir, report)
        if not every:
            return
        fallback = broadcast(new_key("fallback"), lambda: secrets.token_hex(8))
        self._folder = MemoryFolder(memory_dir, self._attempts.run_id, fallback)
        self._attempt = len(self._attempts.began_at)
        self._slot = "a"  # to be written next: the other has the newest snapshot that all processes have
        self._meet()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()
        if self._service:
            self._service.close()

    def find(self, abstract_state: PyTree) -> Found | None:
        """Returns the newest step in the nodes' memories that is complete and verifies; None without any."""
        if not self._every:
            return None
        wanted = tree.flatten_abstract(abstract_state)
        # Includes steps set aside: the last attempt may have recorded one, and this attempt has recorded nothing yet.
        newest = lambda: max(newest_checkpoint(self._workdir), newest_set_aside(self._workdir))
        saved = broadcast(new_key("newest"), newest)
        reads = self._reader == self._me
        return find(self._folder, reads, self._attempts, saved, wanted, self._report, self._progress)

    def load(self, found: Found, abstract_state: PyTree) -> Restored | None:
        """Returns the state of a step that was found, with the shardings of `abstract_state`.

        None, after a report, if a process cannot fetch its part.
        """
        tries = (self._load(found, abstract_state, turn) for turn in range(_TRIES))
        if restored := next(filter(None, tries), None):
            self._used = {copy.snapshot.name for copies in found.copies.values() for copy in copies}
        return restored

    def needs(self, abstract_state: PyTree) -> "Needs | None":
        """Returns the memory that snapshots of such a state need; None if the run takes none."""
        if not self._every:
            return None
        wanted = tree.flatten_abstract(abstract_state)
        arrays, leaves = {path: x.abstract for path, x in wanted.items()}, [x.leaf for x in wanted.values()]
        own = owned_shards(self._me, self._nodes, arrays, leaves)
        senders = [
            i
            for i in range(len(self._nodes))
            if len(set(self._nodes)) > 1 and partner_process(i, self._nodes) == self._me
        ]
        copies = [x for i in senders for x in owned_shards(i, self._nodes, arrays, leaves) if x.is_only_copy]
        sizes = [sum(owned.piece.size for owned in part) for part in (own, copies)]
        return Needs(
            pinned=sizes[0],
            kept=2 * sum(sizes),
            folder=str(self._folder.path),
            there=self._folder.size(),
            free=shutil.disk_usage(self._folder.path).free,
            is_in_memory=self._folder.is_in_memory,
        )

    def begin(self, step: int, extension: Extension | None = None) -> None:
        """Begins the attempt at `step`, and deletes all snapshots but the restored one.

        An attempt without snapshots is recorded, too: it makes the later steps of earlier attempts invalid. `extension`
        is recorded with it.
        """
        known = self._attempts
        extended = known.extended if extension is None else (*known.extended, extension)
        known = replace(known, began_at=(*known.began_at, step), extended=extended)
        self._attempts = write_attempts(self._workdir, known)
        if self._every:
            if self._reader == self._me:
                self._folder.remove(self._folder.names() - self._used)
            barrier("begun")  # else the reader could delete the first snapshot of another process of its node
        else:
            remove_run(self._memory_dir, self._attempts.run_id)  # of no use once this attempt takes a step

    def due(self, step: int) -> bool:
        """Whether to take a snapshot after `step`; every process must ask after every step."""
        return self._pace.due(step)

    def save(self, step: int, state: PyTree, *, data: JsonObject, config: JsonObject) -> bool:
        """Begins a snapshot of `state` after `step`, with the data position and the config; False if snapshots are off.

        Waits for the previous snapshot of all processes, but not for the copies: the caller may donate the arrays.
        Without enough memory for the copies a warning is printed once, and training continues.
        """
        if not self._every:
            return False
        self.wait()
        self._pace.begins(step)
        begun_s = time.perf_counter()
        arrays, leaves = tree.flatten_arrays(state)
        self._owned = self._owned or owned_shards(self._me, self._nodes, arrays, leaves)
        self._started, self._failed = True, False
        snapshot = SnapshotManifest(
            name=f"{self._attempt}-{self._me}-{self._slot}",
            run_id=self._attempts.run_id,
            history=self._attempts.began_at,
            saved=self._attempts.saved,
            step=step,
            data=data,
            config=config,
            tree=leaves,
            pieces=laid_out(owned.piece for owned in self._owned),
        )
        with self._warning(step):
            copies = self._on_host(arrays)
            self._saving = self._executor.submit(self._finish, snapshot, copies, begun_s)
        return True

    def wait(self) -> None:
        """Returns when every process has committed the snapshot in progress, or has failed to write it."""
        if self._saving:
            saving, self._saving = self._saving, None
            saving.result()
        if not self._started:
            return
        self._started = False
        saved = 0
        if self._me == 0:
            with suppress(OSError):  # the file system may be unavailable for a moment: it is not needed yet
                saved = newest_checkpoint(self._workdir)
        has_news = self._failed or saved > self._attempts.saved
        told = all_gather(new_key("snapshot"), [self._failed, saved] if has_news else None)
        said = [news for news in told if news]
        self._attempts = replace(self._attempts, saved=max([self._attempts.saved, *(saved for _, saved in said)]))
        if any(failed for failed, _ in said):
            return  # the next snapshot overwrites this one, and not the previous one, which is complete
        self._slot = "b" if self._slot == "a" else "a"
        if self._reader == self._me:  # snapshots of earlier attempts are older
            ours = f"{self._attempt}-"
            with suppress(FileNotFoundError):  # the folder may be empty: the next snapshot warns
                self._folder.remove(name for name in self._folder.names() if not name.startswith(ours))

    def end(self, *, finished: bool) -> None:
        """Waits for the last snapshot; deletes the snapshots of a finished run, even if this attempt takes none."""
        if self._every:
            self.wait()
            if not finished:
                write_attempts(self._workdir, self._attempts)
        if finished and (not self._every or self._reader == self._me):  # one process per node deletes them
            remove_run(self._memory_dir, self._attempts.run_id)

    def _on_host(self, arrays: dict[str, jax.Array]) -> list[jax.Array]:
        """Returns copies of this process' regions in the host's memory, which may still be on their way."""
        by_device = {path: {x.device: x.data for x in array.addressable_shards} for path, array in arrays.items()}
        shards = [by_device[owned.piece.region.path][owned.device] for owned in self._owned]
        hosts = [jax.sharding.SingleDeviceSharding(owned.device, memory_kind=_HOST) for owned in self._owned]
        return jax.device_put(shards, hosts)

    def _meet(self) -> None:
        """Exchanges nodes and addresses with the other processes, and starts the service."""
        count, answers = jax.process_count(), Answers(self._folder, self._attempt)
        self._token = shared_token(self._workdir) if count > 1 else ""
        if count > 1:
            self._service = BlobService(PURPOSE, answers, process=self._me, count=count, token=self._token)
        address = vars(self._service.address) if self._service else {}
        own = {"host": self._folder.identity, "slice": slice_of(jax.local_devices()[0]), "address": address}
        told = all_gather(new_key("nodes"), own)
        hosts = [said["host"] for said in told]
        self._nodes = lost_together(hosts, [said["slice"] for said in told])
        self._addresses = [BlobAddress(**said["address"]) for said in told] if self._service else []
        self._reader = hosts.index(hosts[self._me])
        if self._service:
            answers.copies_of = frozenset(i for i in range(count) if partner_process(i, self._nodes) == self._me)

    def _load(self, found: Found, abstract_state: PyTree, turn: int) -> Restored | None:
        """Returns the state of a step in memory; None, with a report, if a process cannot fetch its part in a turn."""
        error, state, snapshot = "", None, found.snapshot
        try:
            where = self._folder, self._reader, self._addresses, self._token
            state = load(found, abstract_state, *where, turn, self._progress)
        except OSError as failed:
            error = f"process {self._me} on {socket.gethostname()}: {failed}"
        errors = [said for said in all_gather(new_key("loaded"), error or None) if said]
        if errors:
            if self._me == 0:
                then = "not used" if turn + 1 == _TRIES else "trying again"
                self._report(f"the snapshots of step {snapshot.step} cannot be fetched ({errors[0]}): {then}")
            return None
        return Restored(
            step=snapshot.step,
            state=state,
            data=snapshot.data,
            config=snapshot.config,
            source=Source.MEMORY,
            source_nodes=len({self._nodes[i] for i in found.processes}),
            nodes=len(set(self._nodes)),
        )

    def _finish(self, snapshot: SnapshotManifest, copies: list[jax.Array], begun_s: float) -> None:
        """Writes and commits the copies, and sends the partner the only ones (in a thread)."""
        with self._warning(snapshot.step):
            snapshot = self._folder.copy(snapshot, copies)
            self._folder.describe(snapshot)
            only_copies = [number for number, owned in enumerate(self._owned) if owned.is_only_copy]
            if only_copies:
                with connect(
                    self._addresses[partner_process(self._me, self._nodes)], self._token, self._me
                ) as connection:
                    send_copy(connection, self._folder, snapshot, only_copies)
        self._pace.cost(time.perf_counter() - begun_s)

    @contextmanager
    def _warning(self, step: int) -> Iterator[None]:
        """Turns a lack of room, on the RAM disk or for the copies, into a warning."""
        try:
            yield
        except (OSError, jax.errors.JaxRuntimeError) as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self._warn(step, error)

    def _warn(self, step: int, error: Exception) -> None:
        self._failed = True
        if not self._warned:
            self._warned = True
            where = f"{self._folder.path} on {socket.gethostname()}"
            needed_mb = 2 * sum(owned.piece.size for owned in self._owned) / 1e6
            until = (
                "that process can be reached; a firewall?"
                if isinstance(error, PeerError) and not isinstance(error, RefusedError)
                else f"there is room (this process needs {needed_mb:.0f} MB, twice its part of the state), or set "
                "elastic.memory_dir to another RAM disk"
            )
            self._report(
                f"warning: the snapshot of step {step} in {where} failed: {error}; training continues with checkpoints "
                f"alone until {until}"
            )


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The bytes that the snapshots of a process take."""

    pinned: int  # page-locked, for the copies of the devices
    kept: int  # two snapshots in the node's folder, and two copies of the partner's
    folder: str
    there: int  # in the folder now, all processes of the node; new snapshots replace these
    free: int  # in the folder
    is_in_memory: bool  # the folder is


@dataclass(frozen=True, kw_only=True)
class OwnedShard:
    """A region that a process keeps in the memory of its node."""

    piece: StoredRegion
    device: Device  # of this process that holds the region
    is_only_copy: bool  # no other node holds this region


def lost_together(hosts: Sequence[str], slices: Sequence[int]) -> list[str]:
    """Returns the node of each process: its TPU slice, which is lost as a whole. With one slice it is the host."""
    return [f"slice {number}" for number in slices] if len(set(slices)) > 1 else list(hosts)


def owned_shards(
    process: int,
    nodes: Sequence[str],
    arrays: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
    tree: Sequence[Leaf],
) -> list[OwnedShard]:
    """Returns the regions that a process keeps in its node's memory; `nodes` names the node of each process.

    Each region on a node is kept by the process whose device has the fewest bytes to copy.
    """
    owned: list[OwnedShard] = []
    kept = Counter[Device]()  # bytes, by device
    for leaf in tree:
        holders: dict[Region, dict[str, list[Device]]] = defaultdict(lambda: defaultdict(list))
        for device, index in arrays[leaf.path].sharding.devices_indices_map(arrays[leaf.path].shape).items():
            assert index is not None
            holders[region_of(leaf, index)][nodes[int(device.process_index)]].append(device)
        for region, by_node in holders.items():
            size = math.prod(region.shape) * arrays[leaf.path].dtype.itemsize
            for of_node in by_node.values() if size else ():
                device = min(of_node, key=lambda device: kept[device])
                kept[device] += size
                if device.process_index == process:
                    is_only_copy = len(by_node) == 1 and len(set(nodes)) > 1
                    piece = StoredRegion(region=region, size=size)
                    owned.append(OwnedShard(piece=piece, device=device, is_only_copy=is_only_copy))
    return owned


def partner(node: int, count: int) -> int:
    """Returns the node that keeps copies for a node of `count`: in pairs; with an odd count the last three form a ring.

    Pairs survive more failures than a ring of all nodes, which has twice as many neighbours (Gemini, SOSP 2023).
    """
    first = max(0, count - 3) if count % 2 else count  # of the last three
    return node ^ 1 if node < first else first + (node - first + 1) % (count - first)


def partner_process(process: int, nodes: Sequence[str]) -> int:
    """Returns the process that keeps copies for `process`, on the partner of its node.

    `nodes` lists the node of each process.
    """
    names = list(dict.fromkeys(nodes))
    other = names[partner(names.index(nodes[process]), len(names))]
    mine, others = ([i for i, node in enumerate(nodes) if node == name] for name in (nodes[process], other))
    return others[mine.index(process) % len(others)]
