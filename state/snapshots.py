"""The memory tier: every few steps each node keeps its shards of the state on its RAM disk (docs/elasticity.md).

Each region that a node holds is written once: the processes of the node share the work. A partner process on another
node keeps a copy of the regions that no other node holds. `save` returns when the arrays are copied to the host, so
that the caller may donate the state; a thread hashes them, commits them, and sends the partner its copy. A process
overwrites the newest complete snapshot only after all processes have a newer one.
"""

import math
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from runtime.blobs import Address, BlobService
from runtime.consensus import all_gather, barrier, broadcast, new_key
from runtime.handshake import shared_token
from state import tree
from state.attempts import newest_checkpoint, newest_set_aside, read_attempts, write_attempts
from state.checkpointer import Checkpointer, Restored, Source, print_to_stderr
from state.manifest import Leaf
from state.memory_files import (
    MemoryFolder,
    Piece,
    Region,
    SnapshotManifest,
    as_bytes,
    laid_out,
    region_of,
    remove_run,
)
from state.recovery import Found, find, load
from state.transfer import PURPOSE, Answers, connect, send_copy

AUTOMATIC = -1  # as often as possible at a cost below SHARE of the time
SHARE = 0.02
_MEASURED = 3  # snapshots: the first two of an attempt are far slower, because they allocate their memory


class Snapshots:
    """The snapshots of one run in the memories of its nodes; a context manager.

    All processes must call the same methods in the same order: first `restore`, then `begin`.
    """

    def __init__(
        self, workdir: Path, memory_dir: str, every: int, *, report: Callable[[str], None] = print_to_stderr
    ) -> None:
        """Keeps every `every`-th step (0: none) in `memory_dir`. ValueError if other users could access it."""
        self._workdir, self._memory_dir, self._report, self._every = workdir, memory_dir, report, every
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

    def restore(self, abstract_state: Any, checkpointer: Checkpointer) -> Restored | None:
        """Returns the newest step in the nodes' memories or the checkpoints, with the shardings of `abstract_state`.

        None if there is no step. Errors are those of `Checkpointer.restore`.
        """
        if not self._every:
            return checkpointer.restore(abstract_state)
        wanted = tree.flatten_abstract(abstract_state)
        # A step set aside was there: what the last attempt recorded may be it, until this one records what is left.
        newest = lambda: max(newest_checkpoint(self._workdir), newest_set_aside(self._workdir))
        saved = broadcast(new_key("newest"), newest)
        found = find(self._folder, self._reader == self._me, self._attempts, saved, wanted, self._report)
        restored = checkpointer.restore(abstract_state, newer_than=found.snapshot.step if found else -1)
        if found and restored is None:
            restored = self._load(found, abstract_state)
            if restored:
                self._used = {copy.snapshot.name for copies in found.copies.values() for copy in copies}
            else:
                restored = checkpointer.restore(abstract_state)
        return restored

    def begin(self, step: int) -> None:
        """Begins the attempt at `step`, and deletes all snapshots but the one that was restored.

        An attempt without snapshots is recorded, too: it makes the later steps of earlier attempts invalid.
        """
        began_at = (*self._attempts.began_at, step)
        self._attempts = write_attempts(self._workdir, replace(self._attempts, began_at=began_at))
        if self._every:
            if self._reader == self._me:
                self._folder.remove(self._folder.names() - self._used)
            barrier("begun")  # else the reader could delete the first snapshot of another process of its node

    def due(self, step: int) -> bool:
        """Whether to take a snapshot after `step`."""
        return self._pace.due(step)

    def save(self, step: int, state: Any, *, data: dict[str, Any], config: dict[str, Any]) -> bool:
        """Begins a snapshot of `state` after `step`, with the data position and the config; False if it failed.

        Waits for the previous snapshot of all processes, and returns as soon as the arrays are copied: then the caller
        may donate them. If the RAM disk is full, a warning is printed once, and training continues.
        """
        if not self._every:
            return False
        self._pace.pauses(step)
        self.wait()
        self._pace.agree()
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
        try:
            self._copy(arrays, snapshot.name)
            self._saving = self._executor.submit(self._finish, snapshot, begun_s)
        except OSError as error:
            self._warn(step, error)
        self._pace.goes_on()
        return not self._failed

    def wait(self) -> None:
        """Returns when every process has committed the snapshot in progress, or has failed to write it."""
        if self._saving:
            saving, self._saving = self._saving, None
            saving.result()
        if not self._started:
            return
        self._started = False
        saved = newest_checkpoint(self._workdir) if self._me == 0 else 0
        has_news = self._failed or saved > self._attempts.saved
        told = all_gather(new_key("snapshot"), [self._failed, saved] if has_news else None)
        said = [news for news in told if news]
        self._attempts = replace(self._attempts, saved=max([self._attempts.saved, *(saved for _, saved in said)]))
        if any(failed for failed, _ in said):
            return  # the next snapshot overwrites this one, and not the previous one, which is complete
        self._slot = "b" if self._slot == "a" else "a"
        if self._reader == self._me:  # snapshots of earlier attempts are older
            ours = f"{self._attempt}-"
            self._folder.remove(name for name in self._folder.names() if not name.startswith(ours))

    def end(self, *, finished: bool) -> None:
        """Waits for the last snapshot; deletes those of a finished run, even if this attempt takes none."""
        if self._every:
            self.wait()
            if not finished:
                write_attempts(self._workdir, self._attempts)
        if finished and (not self._every or self._reader == self._me):  # one process per node deletes them
            remove_run(self._memory_dir, self._attempts.run_id)

    def _copy(self, arrays: dict[str, jax.Array], name: str) -> None:
        """Copies this process' regions to a slot. OSError if the disk is full."""
        by_device = {path: {x.device: x.data for x in array.addressable_shards} for path, array in arrays.items()}
        shards = [by_device[owned.piece.region.path][owned.device] for owned in self._owned]
        for shard in shards:
            shard.copy_to_host_async()
        # on CPUs these arrays alias the device's buffers: nothing may keep a reference
        self._folder.write(name, (as_bytes(np.asarray(shard)) for shard in shards))

    def _meet(self) -> None:
        """Exchanges nodes and addresses with the other processes, and starts the service."""
        count, answers = jax.process_count(), Answers(self._folder, self._attempt)
        self._token = shared_token(self._workdir) if count > 1 else ""
        if count > 1:
            self._service = BlobService(PURPOSE, answers, process=self._me, count=count, token=self._token)
        address = vars(self._service.address) if self._service else {}
        told = all_gather(new_key("nodes"), {"node": self._folder.identity, "address": address})
        self._nodes = [said["node"] for said in told]
        self._addresses = [Address(**said["address"]) for said in told] if self._service else []
        self._reader = self._nodes.index(self._nodes[self._me])
        if self._service:
            answers.copies_of = frozenset(i for i in range(count) if self._partner(i) == self._me)

    def _partner(self, process: int) -> int:
        """The process that keeps copies for `process`, on the partner of its node."""
        nodes = list(dict.fromkeys(self._nodes))
        mine = self._nodes[process]
        other = nodes[partner(nodes.index(mine), len(nodes))]
        of_node = {node: [i for i, there in enumerate(self._nodes) if there == node] for node in (mine, other)}
        return of_node[other][of_node[mine].index(process) % len(of_node[other])]

    def _load(self, found: Found, abstract_state: Any) -> Restored | None:
        """Returns the state of a step in memory; None, with a report, if a process cannot fetch its part."""
        error, state, snapshot = "", None, found.snapshot
        try:
            state = load(found, abstract_state, self._folder, self._reader, self._addresses, self._token)
        except OSError as failed:
            error = f"process {self._me} on {socket.gethostname()}: {failed}"
        errors = [said for said in all_gather(new_key("loaded"), error or None) if said]
        if errors:
            if self._me == 0:
                self._report(f"the snapshots of step {snapshot.step} cannot be fetched ({errors[0]}): not used")
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

    def _finish(self, snapshot: SnapshotManifest, begun_s: float) -> None:
        """Hashes and commits the copied data, and sends the partner the only copies (in a thread)."""
        try:
            snapshot = self._folder.commit(snapshot)
            only_copies = [number for number, owned in enumerate(self._owned) if owned.is_only_copy]
            if only_copies:
                with connect(self._addresses[self._partner(self._me)], self._token, self._me) as connection:
                    send_copy(connection, self._folder, snapshot, only_copies)
        except OSError as error:
            self._warn(snapshot.step, error)
        self._pace.cost(time.perf_counter() - begun_s)

    def _warn(self, step: int, error: OSError) -> None:
        self._failed = True
        if not self._warned:
            self._warned = True
            where = f"{self._folder.path} on {socket.gethostname()}"
            needed_mb = 2 * sum(owned.piece.size for owned in self._owned) / 1e6
            self._report(
                f"warning: the snapshot of step {step} in {where} failed: {error}; training goes on with checkpoints "
                f"alone until there is room (this process needs {needed_mb:.0f} MB, twice its part of the state), or "
                "set elastic.memory_dir to another RAM disk"
            )


@dataclass(frozen=True, kw_only=True)
class OwnedShard:
    """A region that a process keeps in the memory of its node."""

    piece: Piece
    device: Any  # a jax.Device of this process that holds the region
    is_only_copy: bool  # no other node holds this region


def owned_shards(
    process: int, nodes: Sequence[str], arrays: Mapping[str, jax.Array], tree: Sequence[Leaf]
) -> list[OwnedShard]:
    """Returns the regions that a process keeps in its node's memory; `nodes` names the node of each process.

    Of each region that a node holds, one process of the node keeps it; the processes take turns.
    """
    number, owned = 0, []
    for leaf in tree:
        holders: dict[Region, dict[int, Any]] = {}
        for device, index in arrays[leaf.path].sharding.devices_indices_map(leaf.shape).items():
            assert index is not None
            holders.setdefault(region_of(leaf, index), {}).setdefault(device.process_index, device)
        for region, devices in holders.items():
            number += 1
            size = math.prod(region.shape) * arrays[leaf.path].dtype.itemsize
            here = sorted(other for other in devices if nodes[other] == nodes[process])
            if size and here and here[number % len(here)] == process:
                is_only_copy = len(set(nodes)) > 1 and len({nodes[other] for other in devices}) == 1
                piece = Piece(region=region, size=size)
                owned.append(OwnedShard(piece=piece, device=devices[process], is_only_copy=is_only_copy))
    return owned


class Pace:
    """Decides after which steps to take a snapshot: every n-th, or as often as costs under 2 % of the time.

    The cost is measured at the start of each attempt: a snapshot is taken after each of its first steps. It is the
    whole time from the copy to the commit, although training continues during most of it.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._count = 0  # snapshots so far
        self._cost_s, self._step_s = 0.0, math.inf
        self._went_on = 0, 0.0  # the last step with a snapshot, and when training resumed after it

    @property
    def is_measuring(self) -> bool:
        return self._every == AUTOMATIC

    def due(self, step: int) -> bool:
        return self.is_measuring or (self._every > 0 and step % self._every == 0)

    def pauses(self, step: int) -> None:
        """Records that training pauses for a snapshot after `step`."""
        last_step, at_s = self._went_on
        if self._count:  # the shortest time: it has no validation or checkpoint in it
            self._step_s = min(self._step_s, (time.perf_counter() - at_s) / max(1, step - last_step))
        self._went_on = step, at_s
        self._count += 1

    def goes_on(self) -> None:
        """Records that training resumes."""
        self._went_on = self._went_on[0], time.perf_counter()

    def cost(self, seconds: float) -> None:
        """Records the cost of the newest snapshot."""
        self._cost_s = seconds

    def agree(self) -> None:
        """Sets the interval once enough snapshots are measured; the slowest process decides."""
        if self.is_measuring and self._count > _MEASURED:
            wanted = all_gather(new_key("pace"), math.ceil(self._cost_s / (SHARE * self._step_s)))
            self._every = max(1, *wanted)


def partner(node: int, count: int) -> int:
    """Returns the node that keeps copies for a node, of so many: in pairs, and of an odd number the last three in turn.

    Pairs survive more failures than a ring of all nodes, which has twice as many neighbours (Gemini, SOSP 2023).
    """
    first = max(0, count - 3) if count % 2 else count  # of the three
    return node ^ 1 if node < first else first + (node - first + 1) % (count - first)
