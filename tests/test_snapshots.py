"""Snapshots in memory, in one process: what is kept, what comes back, and what is not used."""

import io
import json
import os
import re
import shutil
import socket
import zlib
from collections import Counter, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpointing import abstract as abstract_of
from support.checkpointing import files_no_larger_than
from support.keeping import SHAPES, Run, a_run, abstract, check, keep, shardings, state_of, values_of  # noqa: F401 (fixture)

from configs.schema.sections import AUTOMATIC
from elastic.manifest import Leaf
from elastic.memory_files import MemoryFolder
from elastic.pace import Pace
from elastic.recovery import Copy, Found, load
from elastic.snapshots import Snapshots, lost_together, owned_shards, partner, partner_process
from elastic.transfer import PURPOSE, Answers
from runtime.addresses import own_address
from runtime.blobs import BlobService, PeerError


@pytest.fixture(name="damaged_run", scope="module")
def a_run_with_two_snapshots(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("damaged"))
    run.keep(1, 2)
    return run


def test_the_memory_that_snapshots_take_is_known_before(run: Run) -> None:
    with run.attempt() as snapshots:
        needs = snapshots.needs(abstract())
    run.keep(1, 2)
    sizes = [file.stat().st_size for file in run.files("data")]
    assert needs and len(sizes) == 2 and needs.kept == sum(sizes) == 2 * needs.pinned
    with run.attempt() as snapshots:
        after = snapshots.needs(abstract())
    assert needs.there == 0 and after and after.there == sum(file.stat().st_size for file in run.files("*"))


def test_any_mesh_bit_by_bit(run: Run) -> None:
    run.keep(1, 2, 3)
    for a, b in [(4, 2), (2, 2), (8, 1), (1, 1)]:
        wanted = abstract(a, b)
        restored = run.restore(wanted)
        check(restored, 3)
        assert restored and all(restored.state[name].sharding == x.sharding for name, x in wanted.items())
    assert run.said == []


def test_the_state_may_be_donated_at_once(run: Run) -> None:
    """And is donated in place: a snapshot holds no device memory."""
    change = jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)
    big = change(
        jax.device_put(np.zeros((8, 1 << 15), np.float32), shardings(8, 1)["h"])
    )  # numpy keeps what is its own
    with run.attempt() as snapshots:
        snapshots.begin(0)
        for step in (1, 2, 3):
            before = [shard.data.unsafe_buffer_pointer() for shard in big.addressable_shards]
            keep(snapshots, step, {"x": big})
            big = jax.block_until_ready(change(big))
            assert before == [shard.data.unsafe_buffer_pointer() for shard in big.addressable_shards]
    restored = run.restore(abstract_of({"x": big}))
    assert restored and restored.step == 3 and (np.asarray(restored.state["x"]) == 3).all()


def test_each_shard_is_written_once_and_two_steps_stay(run: Run) -> None:
    run.keep(1, 2, 3, 4)
    num_bytes = sum(value.nbytes for value in values_of(0).values())
    assert [file.stat().st_size for file in run.files("data")] == [num_bytes] * 2
    assert sorted(json.loads(file.read_bytes().split(b"\n")[1])["step"] for file in run.files("json")) == [3, 4]


@settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
@given(ending=st.sampled_from(["data", "json"]), how=st.sampled_from(["flip", "cut", "delete"]), data=st.data())
def test_damage_leaves_the_step_before(damaged_run: Run, ending: str, how: str, data: st.DataObject) -> None:
    run = damaged_run
    file = run.files(ending)[-1]
    content, times = file.read_bytes(), file.stat()
    run.said.clear()
    place = data.draw(st.integers(0, len(content) - 1))
    flipped = bytes([content[place] ^ data.draw(st.integers(1, 255))]) + content[place + 1 :]
    file.unlink() if how == "delete" else file.write_bytes(content[:place] + flipped * (how == "flip"))
    check(run.restore(), 1)
    silent = (ending, how) == ("json", "delete")  # a snapshot that was in the making
    assert len(run.said) == (not silent) and all(file.stem in line and "not used" in line for line in run.said)
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    check(run.restore(), 2)


def test_a_process_that_had_nothing_to_keep(run: Run) -> None:
    """And was the only one to commit the last step: its description holds nothing."""
    run.keep(1)
    folder = MemoryFolder(run.memory, run.run_id, "standby")
    (kept,) = folder.snapshots()[0]
    folder.describe(replace(kept, name="0-1-a", step=2, pieces=()))
    check(run.restore(), 1)
    assert run.said == []


def test_copies_that_differ_are_not_used(run: Run) -> None:
    """Each matches its own hashes."""
    run.keep(1, 2)
    folder = MemoryFolder(run.memory, run.run_id, "standby")
    newest = max(folder.snapshots()[0], key=lambda snapshot: snapshot.step)
    content = bytearray((folder.path / f"{newest.name}.data").read_bytes())
    differences: list[tuple[int, dict[str, Any], str]] = [
        (4, {}, "two copies of a part of .* differ"),
        (0, {"config": {"seed": 2}}, "of different configs or data"),
    ]
    for flipped, changes, said in differences:
        copy = bytes([content[0] ^ flipped]) + content[1:]
        (folder.path / "0-1-a.data").write_bytes(copy)
        pieces = tuple(replace(p, crc32=zlib.crc32(copy[p.offset : p.offset + p.size])) for p in newest.pieces)
        folder.describe(replace(newest, name="0-1-a", pieces=pieces, **changes))
        run.said.clear()
        check(run.restore(), 1)
        assert len(run.said) == 1 and re.search(f"step 2 are not used: .*{said}", run.said[0])


def test_snapshots_of_other_runs(run: Run, tmp_path: Path) -> None:
    run.keep(1, 2)
    other = Run(tmp_path, "other")
    assert other.restore() is None
    copy = Run(tmp_path, "copy")
    shutil.copytree(run.workdir, copy.workdir)
    assert copy.restore() is None
    assert len(copy.said) == 1 and "is a copy of another run's directory" in copy.said[0]
    planted = run.files("json")[-1]
    copy.keep(1)
    shutil.copy(planted, copy.files("json")[-1])
    assert copy.restore() is None and f"of run {run.run_id}" in copy.said[-1]
    check(run.restore(), 2)


def test_another_model(run: Run) -> None:
    run.keep(1)
    wanted = abstract() | {"b": jax.ShapeDtypeStruct((6,), np.float32, sharding=shardings(4, 2)["b"])}
    assert run.restore(wanted) is None
    assert len(run.said) == 1 and "another model: b is float32[5]" in run.said[0]


def test_no_room(tmp_path: Path) -> None:
    """For nothing, for a part of the data, and for the data but not its description."""
    for room in (0, 300, 900):
        run = Run(tmp_path, f"room for {room}")
        with run.attempt() as snapshots:
            snapshots.begin(0)
            keep(snapshots, 1, state_of(1))
            snapshots.wait()
            with files_no_larger_than(room):
                for step in (2, 3):
                    keep(snapshots, step, state_of(step))
                    snapshots.wait()
            assert len(run.said) == 1 and "warning: the snapshot of step 2" in run.said[0], run.said
            assert "File too large" in run.said[0] and "elastic.memory_dir" in run.said[0]
            assert room == 900 or run.files("data")[-1].stat().st_size == 0  # half a snapshot would only take room
            check(run.restore(), 1)
            keep(snapshots, 4, state_of(4))
        check(run.restore(), 4)
        assert len(run.said) == 1


def test_a_folder_that_was_emptied_between_two_snapshots(run: Run) -> None:
    """As by the last logout of its user: that is a warning, and the run goes on."""
    with run.attempt() as snapshots:
        snapshots.begin(0)
        for step in (1, 2):
            keep(snapshots, step, state_of(step))
        assert snapshots._saving
        snapshots._saving.result()
        shutil.rmtree(next(run.memory.glob("mics-jax-*")))
        keep(snapshots, 3, state_of(3))
        snapshots.wait()
        snapshots.end(finished=False)
    assert len(run.said) == 1 and "warning: the snapshot of step 3" in run.said[0], run.said


def test_a_partner_that_cannot_be_reached(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*_: object) -> None:
        raise PeerError("process 1 at node-b:34567: timed out")

    with run.attempt() as snapshots:
        snapshots.begin(0)
        monkeypatch.setattr(MemoryFolder, "describe", cut)
        keep(snapshots, 1, state_of(1))
        snapshots.wait()
    assert len(run.said) == 1 and run.said[0].endswith("until that process can be reached; a firewall?")


def test_no_memory_that_devices_copy_to(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locked memory; any other error of the device ends the program."""

    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError(errors.pop())

    errors = ["INTERNAL: x", "RESOURCE_EXHAUSTED: x"]
    with run.attempt() as snapshots:
        snapshots.begin(0)
        with monkeypatch.context() as patch:
            patch.setattr(Snapshots, "_on_host", fail)
            keep(snapshots, 1, state_of(1))
            with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
                keep(snapshots, 2, state_of(2))
        keep(snapshots, 3, state_of(3))
    assert len(run.said) == 1 and "warning: the snapshot of step 1" in run.said[0]
    check(run.restore(), 3)


def test_a_partners_copy_whose_bytes_changed_on_the_way_is_not_kept(run: Run) -> None:
    """It would be described with its own hash, and be restored where the partner is lost."""
    run.keep(1)
    folder = MemoryFolder(run.memory, run.run_id, "standby")
    (sent,) = folder.snapshots()[0]
    content = bytearray(run.files("data")[-1].read_bytes())
    folder.remove([sent.name])
    answers = Answers(folder, 0)
    answers.copies_of = frozenset({0})
    answers({"put": sent.as_json()}, 0, io.BytesIO(content))
    assert folder.snapshots() == ([sent], [])
    content[0] ^= 4
    with pytest.raises(OSError, match="do not match their hash"):
        answers({"put": sent.as_json()}, 0, io.BytesIO(content))
    assert folder.names() == set()


def test_what_another_node_sends_is_progress(run: Run) -> None:
    """Over a slow link one array may take longer than `elastic.stall_s`, which counts from the last progress."""
    run.keep(1)
    folder, calls = MemoryFolder(run.memory, run.run_id, "standby"), list[None]()
    (snapshot,), _ = folder.snapshots()
    copies = defaultdict[str, list[Copy]](list)
    for number, piece in enumerate(snapshot.pieces):
        copies[piece.region.path].append(Copy(process=0, snapshot=snapshot, number=number))
    service = BlobService(PURPOSE, Answers(folder, 0), process=0, count=2, token="a" * 64)
    where = MemoryFolder(run.memory, run.run_id, "standby"), 1, [service.address], "a" * 64
    state = load(Found(snapshot=snapshot, copies=copies), abstract(), *where, 0, lambda: calls.append(None))
    service.close()
    for name, value in values_of(1).items():
        assert np.asarray(state[name]).tobytes() == value.tobytes(), name
    assert len(calls) >= len(SHAPES) + len(snapshot.pieces)


def test_a_host_whose_name_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is named to the others: they may know it."""

    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert own_address() == socket.gethostname()


def test_nothing_describes_what_is_half_written(run: Run) -> None:
    """So a kill during a write leaves the other slot alone, and a kill before its hashes are known does so, too."""
    run.keep(1, 2)
    folder = MemoryFolder(run.memory, run.run_id, "standby")
    old, new = sorted(folder.snapshots()[0], key=lambda snapshot: snapshot.step)
    described: list[set[str]] = []

    def half() -> Iterator[memoryview]:
        described.append({file.stem for file in run.files("json")})
        yield memoryview(b"half")

    folder.write(old.name, half())
    assert described == [{new.name}] == [{file.stem for file in run.files("json")}]
    check(run.restore(), 2)


def test_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that took 20 s to begin, with steps of 1 s: its first snapshot is after 20 more.

    Snapshots of 0.05 s: every third step costs less than 2 %, every second more. The first two take longer.
    """
    now_s = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    assert [Pace(3).due(step) for step in range(7)] == [True, False, False] * 2 + [True]
    assert not any(Pace(0).due(step) for step in range(9))
    pace, now_s, taken = Pace(AUTOMATIC), 20.0, list[int]()
    for step in range(11, 160):
        if pace.due(step):
            pace.begins(step)
            taken.append(step)
            pace.cost(0.7 if len(taken) < 3 else 0.05)
        now_s += 1.0 if step != 13 else 30.0  # with a validation after it
    assert taken[:6] == [31, 51, 51 + 35, 51 + 70, 51 + 73, 51 + 76]


def test_what_a_node_holds_is_kept_once_and_shared_out() -> None:
    """On nodes of two processes of two devices; a large and a small array, cut over the devices of a node."""
    groups = 3
    nodes = [f"node {process // 2}" for process in range(2 * groups)]
    device_type = namedtuple("device_type", ("id", "process_index"))
    devices = [device_type(i, i // 2) for i in range(4 * groups)]
    leaves = [Leaf(path=f"{size}{i}", shape=(size,), dtype="float32") for i in range(24) for size in (4 * 96, 4)]

    def indices(shape: tuple[int]) -> dict[Any, tuple[slice]]:
        part = shape[0] // 4
        return {device: (slice(part * (device.id % 4), part * (device.id % 4 + 1)),) for device in devices}

    sharding = SimpleNamespace(devices_indices_map=indices)
    float32 = np.dtype(np.float32)
    arrays: Any = {x.path: SimpleNamespace(sharding=sharding, shape=x.shape, dtype=float32) for x in leaves}
    owned = [owned_shards(process, nodes, arrays, leaves) for process in range(2 * groups)]
    keepers: dict[Any, set[str]] = defaultdict(set)
    for node, of_process in zip(nodes, owned, strict=True):
        for shard in of_process:
            keepers[shard.piece.region].add(node)
    assert len(keepers) == 4 * len(leaves) and {len(on) for on in keepers.values()} == {groups}
    whole = sum(4 * leaf.shape[0] for leaf in leaves)
    by_device = Counter({d.id: sum(x.piece.size for x in owned[d.process_index] if x.device is d) for d in devices})
    assert sum(by_device.values()) == groups * whole
    assert all(size == pytest.approx(whole / 4, rel=0.1) for size in by_device.values()), by_device
    assert not any(shard.is_only_copy for of_process in owned for shard in of_process)


@pytest.mark.parametrize("held", ["in each slice", "over all slices"])
def test_copies_of_a_tpu_slice_are_on_another_slice(held: str) -> None:
    """Two slices of two hosts of two devices: a slice is lost with all its hosts, whose copies are thus elsewhere."""
    nodes = lost_together([f"host {process}" for process in range(4)], [0, 0, 1, 1])
    assert [partner_process(process, nodes) for process in range(4)] == [2, 3, 0, 1]
    device_type = namedtuple("device_type", ("id", "process_index"))
    chunks = 4 if held == "in each slice" else 8
    indices = {device_type(i, i // 2): (slice(i % chunks, i % chunks + 1),) for i in range(8)}
    sharding = SimpleNamespace(devices_indices_map=lambda shape: indices)
    arrays: Any = {"x": SimpleNamespace(sharding=sharding, shape=(chunks,), dtype=np.dtype(np.float32))}
    leaves = [Leaf(path="x", shape=(chunks,), dtype="float32")]
    owned = [shard for process in range(4) for shard in owned_shards(process, nodes, arrays, leaves)]
    assert len(owned) == 8 and {shard.is_only_copy for shard in owned} == {chunks == 8}


def test_hosts_of_the_only_slice_are_nodes() -> None:
    hosts = ["a", "a", "b", "b"]
    assert lost_together(hosts, [0, 0, 0, 0]) == hosts
    assert [partner_process(process, hosts) for process in range(4)] == [2, 3, 0, 1]


def test_which_nodes_may_be_lost() -> None:
    """One of each pair must be left, and of an odd number of nodes two of the last three; every set is tried."""
    for count in range(2, 8):
        in_turn = set(range(count - 3, count)) if count % 2 else set()
        pairs = [{node, node + 1} for node in range(0, count - len(in_turn), 2)]
        for lost in (set(lost) for number in range(count + 1) for lost in combinations(range(count), number)):
            is_kept = all({node, partner(node, count)} - lost for node in range(count))
            assert is_kept == (len(in_turn & lost) <= 1 and all(pair - lost for pair in pairs))
