"""Two processes with a memory each, as on two nodes: copies of a partner, regions that are fetched, one voice.

Run as a program (`python tests/test_snapshots_processes.py PORT RANK DIR`) this file runs as either process.
"""

import re
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import multihost
from support.checkpointing import abstract, as_one_of_two, files_no_larger_than, run_two

from configs.schema import CheckpointConfig
from elastic import recovery, transfer
from elastic.checkpointer import Checkpointer
from elastic.memory_files import MemoryFolder
from elastic.snapshots import Needs, Snapshots
from elastic.tree import Restored
from runtime.consensus import barrier
from sharding.replicas import PerReplica
from training.resume import restore_newest

SHAPES = {"w": (16, 4), "b": (5,), "residual": (2, 8), "t": (3, 8)}
SPECS = {"w": ("node", "device"), "residual": ("node",), "t": (None, "device")}  # t is whole on each node
BYTES_ALONE = 16 * 4 * 4 + 2 * 8 * 4
BYTES = BYTES_ALONE + 5 * 4 + 3 * 8 * 4


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    run_two(__file__, tmp_path)


def values_of(step: int, replicas: int = 2) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(step)
    values = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    if replicas != 2:
        values["residual"] = np.tile(values["residual"].sum(0) / replicas, (replicas, 1))
    return values


def shardings(across: str) -> dict[str, NamedSharding]:
    """Two nodes of two devices; `across` them, or with the devices in another order."""
    devices = np.array(jax.devices()).reshape(2, 2)
    mesh = Mesh(devices if across == "nodes" else devices.T, ("node", "device"))
    return {name: NamedSharding(mesh, PartitionSpec(*SPECS.get(name, ()))) for name in SHAPES}


def place(values: dict[str, np.ndarray], across: str = "nodes") -> dict[str, Any]:
    where = shardings(across)
    placed: dict[str, Any] = {
        name: jax.make_array_from_callback(value.shape, where[name], lambda index, value=value: value[index])
        for name, value in values.items()
    }
    return placed | {"residual": PerReplica(placed["residual"], combine="sum")}


class Node:
    """One of two nodes; both do the same."""

    def __init__(self, rank: int, directory: Path) -> None:
        self.rank, self.directory, self.said = rank, directory, list[str]()
        self.run = self.node = 0
        self.needs: Needs | None = None  # as said before the last snapshots

    def new_run(self) -> None:
        self.run += 1

    def lost(self, rank: int) -> None:
        """The node of a process is replaced by one whose memory is empty."""
        self.node += rank == self.rank

    @property
    def memory(self) -> Path:
        path = self.directory / f"run{self.run}-rank{self.rank}-node{self.node}"
        path.mkdir(exist_ok=True)
        return path

    def bytes_kept(self) -> list[int]:
        return sorted(file.stat().st_size for file in self.memory.rglob("*.data"))

    def attempt(self, memory: Path | None = None) -> Snapshots:
        workdir = self.directory / f"run{self.run}"
        return Snapshots(workdir, str(memory or self.memory), 1, report=self.said.append)

    def checkpoints(self) -> Checkpointer:
        folder = self.directory / f"run{self.run}" / "checkpoints"
        return Checkpointer(folder, CheckpointConfig(every=1, keep_last=9), report=self.said.append)

    def keep(self, *steps: int, memory: Path | None = None) -> None:
        with self.checkpoints() as checkpointer, self.attempt(memory) as memory_tier:
            restored = restore_newest(abstract(place(values_of(0))), checkpointer, memory_tier)
            memory_tier.begin(restored.step if restored else 0)
            self.needs = memory_tier.needs(abstract(place(values_of(0))))
            for step in steps:
                memory_tier.save(step, place(values_of(step)), data={"step": step}, config={"seed": 1})
            memory_tier.wait()

    def restore(self, across: str = "nodes", replicas: int = 2) -> Restored | None:
        with self.checkpoints() as checkpointer, self.attempt() as memory_tier:
            restored = restore_newest(abstract(place(values_of(0, replicas), across)), checkpointer, memory_tier)
            barrier("restored")  # or the other may ask a service that is closed: in a run it is open to the end
        return restored

    def take_said(self) -> list[str]:
        said, self.said = self.said, []
        return said


def check(restored: Restored | None, step: int, source: str, replicas: int = 2) -> None:
    assert restored is not None and (restored.step, restored.source_text) == (step, source)
    assert restored.data == {"step": step}
    for name, value in values_of(step, replicas).items():
        (array,) = jax.tree.leaves(restored.state[name])
        for shard in array.addressable_shards:
            same = np.array_equal if replicas == 2 or name != "residual" else np.allclose
            assert same(np.asarray(shard.data), value[shard.index]), name


def a_lost_node(node: Node) -> None:
    """Either node: the partner has the regions that only it held, and the new node fetches all."""
    for lost in (0, 1):
        node.new_run()
        node.keep(1, 2, 3)
        own = BYTES - BYTES_ALONE // 2
        assert node.bytes_kept() == [BYTES_ALONE // 2] * 2 + [own] * 2, node.bytes_kept()
        assert node.needs and (node.needs.pinned, node.needs.kept) == (own, sum(node.bytes_kept())), node.needs
        node.lost(lost)
        check(node.restore(), 3, "memory (1 of 2 nodes had it)")
    check(node.restore(replicas=4), 3, "memory (1 of 2 nodes had it)", replicas=4)
    node.lost(0)
    node.lost(1)
    assert node.restore() is None and node.take_said() == []


def another_mesh(node: Node) -> None:
    node.new_run()
    node.keep(1, 2)
    check(node.restore("devices"), 2, "memory (2 of 2 nodes had it)")
    node.keep(3)
    check(node.restore("devices"), 3, "memory (2 of 2 nodes had it)")


def two_processes_of_a_node(node: Node) -> None:
    """Regions that both hold are written once, by turns, and nothing goes to a partner.

    A late process clears the folder of old files, but not of files that the other process writes in the same start. At
    the end it removes the folder; the other process does not remove it before.
    """
    node.new_run()
    shared = node.directory / "shared"
    shared.mkdir(exist_ok=True)
    names = MemoryFolder.names

    def late(folder: MemoryFolder) -> set[str]:
        time.sleep(0.5)
        return names(folder)

    MemoryFolder.names = late
    node.keep(1, memory=shared)
    check_files(shared, snapshots=1)
    node.keep(2, 3, memory=shared)
    check_files(shared, snapshots=2)
    with node.attempt(shared) as memory_tier:
        memory_tier.begin(0)
        memory_tier.save(1, place(values_of(1)), data={"step": 1}, config={"seed": 1})
        memory_tier.end(finished=True)
        barrier("ended")
    MemoryFolder.names = names
    assert node.take_said() == [] and not list(shared.rglob("*.data"))


def check_files(shared: Path, snapshots: int) -> None:
    """Checks that the two processes of a node hold each snapshot once between them."""
    barrier("written")
    sizes = [file.stat().st_size for file in shared.rglob("*.data")]
    assert len(sizes) == 2 * snapshots and sum(sizes) == snapshots * BYTES, sizes
    barrier("looked")


def no_room_on_one(node: Node) -> None:
    """Neither for its own part of a step nor for the copy of its partner, which hears of it.

    Snapshots that all have stay, even if only the other process repeatedly keeps more.
    """
    node.new_run()
    with node.attempt() as memory_tier:
        memory_tier.begin(0)

        def keep(step: int) -> None:
            memory_tier.save(step, place(values_of(step)), data={"step": step}, config={"seed": 1})
            memory_tier.wait()

        for step in range(1, 6):
            with files_no_larger_than(100) if node.rank == 1 and step > 2 else nullcontext():
                barrier("full")
                keep(step)
        said = node.take_said()
        assert len(said) == 1 and "snapshot of step 3" in said[0] and "File too large" in said[0], said
        check(node.restore(), 2, "memory (2 of 2 nodes had it)")
        keep(6)
    check(node.restore(), 6, "memory (2 of 2 nodes had it)")


def a_fetch_that_fails(node: Node) -> None:
    """In one process: all take the checkpoint, also where the residual is adapted, by a program of both."""
    node.new_run()
    node.keep(1, 2)
    with node.checkpoints() as checkpointer:
        checkpointer.save(1, place(values_of(1)), data={"step": 1}, config={})
    node.lost(1)
    connect, tries = recovery.connect, []

    def refused(*where: Any, most: int = 99) -> Any:
        tries.append(where)
        if len(tries) > most:
            return connect(*where)
        raise OSError("a firewall")

    if node.rank == 1:
        recovery.connect = refused
    for replicas in (2, 4):
        check(node.restore(replicas=replicas), 1, "its checkpoint", replicas)
        said = node.take_said()
        assert len(said) == 3 * (node.rank == 0) and all("process 1" in x and "a firewall" in x for x in said), said
        assert [x.endswith("trying again") for x in said] == [True, True, False][: len(said)]
    if node.rank == 1:
        tries.clear()
        recovery.connect = partial(refused, most=2)
    check(node.restore(), 2, "memory (1 of 2 nodes had it)")
    assert len(tries) == 3 * (node.rank == 1) and len(node.take_said()) == 2 * (node.rank == 0)
    recovery.connect = connect


def what_a_partner_may_send(node: Node) -> None:
    """Its own part of this start of this run: no member of the run plants another's."""
    node.new_run()
    node.keep(1)
    with node.attempt() as memory_tier:
        memory_tier.begin(1)
        memory_tier.save(2, place(values_of(2)), data={"step": 2}, config={"seed": 1})
        memory_tier.wait()
        told = multihost.get_jax_distributed_client().key_value_dir_get("consensus/")
        assert told and not [key for key, value in told if memory_tier._token in value]  # jax tells it to anybody
        (own,) = [x for x in memory_tier._folder.snapshots()[0] if x.name == f"1-{node.rank}-a"]
        before = sorted(memory_tier._folder.names())
        other, earlier = f"1-{1 - node.rank}-b", f"0-{node.rank}-b"
        wrong = [replace(own, name=other), replace(own, name=earlier, history=(0,)), replace(own, run_id="0" * 16)]
        for planted, me in [*((x, node.rank) for x in wrong), (replace(own, name=other), 1 - node.rank)]:
            with transfer.connect(memory_tier._addresses[1 - node.rank], memory_tier._token, me) as connection:
                try:
                    transfer.send_copy(connection, memory_tier._folder, planted, [])
                except OSError as error:
                    assert "closed the connection" in str(error), error
                else:
                    raise AssertionError(planted.name)
        barrier("planted")
        assert sorted(memory_tier._folder.names()) == before
        barrier("looked")


def a_work_directory_that_is_not_shared(node: Node) -> None:
    """All hear of it."""
    node.new_run()
    own = node.directory / f"of{node.rank}"
    try:
        Snapshots(own, str(node.memory), 1, report=node.said.append)
    except ValueError as error:
        said = r"process 1 on .* cannot use .*of1/token: No such file or directory; all processes need the same --work"
        assert re.search(said, str(error)), error
    else:
        raise AssertionError


SCENARIOS = (
    a_lost_node,
    another_mesh,
    two_processes_of_a_node,
    no_room_on_one,
    a_fetch_that_fails,
    what_a_partner_may_send,
    a_work_directory_that_is_not_shared,
)


def one_of_two(rank: int, directory: Path) -> None:
    node = Node(rank, directory)
    for scenario in SCENARIOS:
        print(scenario.__name__, flush=True)
        scenario(node)


if __name__ == "__main__":
    as_one_of_two(one_of_two)
