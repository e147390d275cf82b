"""Snapshots in memory, in one process: what comes back, what is not used, and what another user may not do."""

import errno
import hashlib
import json
import os
import re
import shutil
import socket
from collections import Counter, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpointing import abstract as abstract_of
from checkpointing import files_no_larger_than
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs.schema import CheckpointConfig
from runtime.addresses import own_address
from state import Checkpointer, Restored, manifest
from state.manifest import Leaf
from state.memory_files import MemoryFolder, SnapshotManifest
from state.snapshots import AUTOMATIC, Pace, Snapshots, owned_shards, partner

SHAPES = {"w": (16, 6), "t": (3, 8), "b": (5,), "h": (8, 3), "empty": (8, 0), "step": ()}
SPECS = {"w": ("a", "b"), "t": (None, "a"), "h": ("a",), "empty": ("a",)}


def values_of(step: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(step)
    values = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    return values | {"h": values["h"].astype(jnp.bfloat16), "step": np.array(step, np.int32)}


def shardings(a: int, b: int) -> dict[str, NamedSharding]:
    mesh = Mesh(np.array(jax.devices()[: a * b]).reshape(a, b), ("a", "b"))
    return {name: NamedSharding(mesh, PartitionSpec(*SPECS.get(name, ()))) for name in SHAPES}


def state_of(step: int, a: int = 4, b: int = 2) -> dict[str, jax.Array]:
    return jax.device_put(values_of(step), shardings(a, b))


def abstract(a: int = 4, b: int = 2) -> Any:
    return abstract_of(state_of(0, a, b))


class Run:
    """A run in one directory, whose attempts follow each other."""

    def __init__(self, tmp_path: Path, name: str = "run") -> None:
        self.workdir, self.memory = tmp_path / name, tmp_path
        self.said: list[str] = []

    def attempt(self) -> Snapshots:
        return Snapshots(self.workdir, str(self.memory), 1, report=self.said.append)

    def restore(self, wanted: Any = None) -> Restored | None:
        with self.checkpoints() as checkpointer, self.attempt() as snapshots:
            return snapshots.restore(wanted or abstract(), checkpointer)

    def checkpoints(self) -> Checkpointer:
        config = CheckpointConfig(every=1, keep_last=9)
        return Checkpointer(self.workdir / "checkpoints", config, report=self.said.append)

    def keep(self, *steps: int, make: Callable[[int], Any] = state_of) -> None:
        """An attempt that starts where the memory is, keeps some steps and is killed."""
        with self.checkpoints() as checkpointer, self.attempt() as snapshots:
            restored = snapshots.restore(abstract_of(make(steps[0])), checkpointer)
            snapshots.begin(restored.step if restored else 0)
            for step in steps:
                keep(snapshots, step, make(step))

    def save(self, *steps: int) -> None:
        with self.checkpoints() as checkpointer:
            for step in steps:
                checkpointer.save(step, state_of(step), data={"step": step}, config={})

    def files(self, ending: str) -> list[Path]:
        """The files of this run with an ending, that of the newest snapshot last."""
        found = self.memory.glob(f"mics-jax-*/{self.run_id}/*.{ending}")
        return sorted(found, key=lambda file: file.stat().st_mtime_ns)

    @property
    def run_id(self) -> str:
        return json.loads((self.workdir / "attempts.json").read_text())["run_id"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def keep(snapshots: Snapshots, step: int, state: Any) -> None:
    snapshots.save(step, state, data={"step": step}, config={"elastic": {}, "seed": 1})


def check(restored: Restored | None, step: int, source: str = "memory (1 of 1 node had it)") -> None:
    assert restored is not None and restored.step == step and restored.source_text == source
    assert restored.data == {"step": step}
    for name, value in values_of(step).items():
        got = np.asarray(restored.state[name])
        assert (got.dtype, got.shape, got.tobytes()) == (value.dtype, value.shape, value.tobytes()), name


@pytest.mark.parametrize(("a", "b"), [(4, 2), (2, 2), (8, 1), (1, 1)])
def test_any_mesh_bit_by_bit(run: Run, a: int, b: int) -> None:
    run.keep(1, 2, 3)
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


@pytest.mark.parametrize("ending", ["data", "json"])
@pytest.mark.parametrize("how", ["flip", "cut", "empty", "delete"])
def test_damage_leaves_the_step_before(run: Run, ending: str, how: str) -> None:
    run.keep(1, 2)
    file = run.files(ending)[-1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    match how:
        case "flip":
            file.write_bytes(content)
        case "cut":
            file.write_bytes(content[:-1])
        case "empty":
            file.write_bytes(b"")
        case "delete":
            file.unlink()
    check(run.restore(), 1)
    silent = (ending, how) == ("json", "delete")  # a snapshot that was in the making
    assert (ending, how) != ("json", "flip") or "does not match its own hash" in run.said[0]
    assert len(run.said) == (not silent) and all(file.stem in line and "not used" in line for line in run.said)


def test_a_process_that_had_nothing_to_keep(run: Run) -> None:
    """And was the only one to commit the last step: its description holds nothing."""
    run.keep(1)
    folder = MemoryFolder(run.memory, run.run_id, "standby")
    (kept,) = folder.snapshots()[0]
    folder.commit(replace(kept, name="0-1-a", step=2, pieces=()))
    check(run.restore(), 1)
    assert run.said == []


@pytest.mark.parametrize(
    ("flipped", "changes", "said"),
    [(4, {}, "two copies of a part of .* differ"), (0, {"config": {"seed": 2}}, "of different configs or data")],
)
def test_copies_that_differ_are_not_used(run: Run, flipped: int, changes: dict[str, Any], said: str) -> None:
    """Each matches its own hashes."""
    run.keep(1, 2)
    folder = MemoryFolder(run.memory, run.run_id, "standby")
    newest = max(folder.snapshots()[0], key=lambda snapshot: snapshot.step)
    content = bytearray((folder.path / f"{newest.name}.data").read_bytes())
    content[0] ^= flipped
    (folder.path / "0-1-a.data").write_bytes(content)
    folder.commit(replace(newest, name="0-1-a", **changes))
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


def test_the_newer_of_memory_and_checkpoints(run: Run) -> None:
    run.save(1, 2)
    run.keep(3)
    check(run.restore(), 3)
    run.save(3)
    check(run.restore(), 3)
    run.save(4)
    check(run.restore(), 4, source="its checkpoint")
    (run.workdir / "checkpoints" / "4" / "data" / "metadata").write_text("{}")
    check(run.restore(), 3)
    assert len(run.said) == 1 and "step 3 is used instead" in run.said[0]
    assert manifest.step_numbers(run.workdir / "checkpoints") == [1, 2, 3]


def test_what_was_not_restored_goes(run: Run) -> None:
    """So that no more than two snapshots of the state are there at a time."""
    for checkpoints, left in (((), 1), ((3,), 0)):
        run.keep(1, 2)
        half_written = run.files("json")[-1].with_name("0-1-a.partial")
        half_written.touch()
        run.save(*checkpoints)
        with run.checkpoints() as checkpointer, run.attempt() as snapshots:
            restored = snapshots.restore(abstract(), checkpointer)
            assert restored
            assert len(run.files("data")) == 2
            snapshots.begin(restored.step)
        assert len(run.files("data")) == len(run.files("json")) == left and not half_written.exists()


def test_a_later_attempt_that_began_earlier_counts(run: Run, tmp_path: Path) -> None:
    """A node that was away comes back with steps of a history that the run has left."""
    run.keep(4, 5)
    away = tmp_path / "away"
    shutil.copytree(run.files("json")[0].parent, away)
    run.files("json")[-1].unlink()
    run.keep(5)  # from step 4
    shutil.copytree(away, run.files("json")[0].parent, dirs_exist_ok=True)
    assert len(run.files("json")) == 3
    check(run.restore(), 5)
    newest = max(run.files("json"), key=lambda file: file.name)
    newest.unlink()
    check(run.restore(), 4)
    run.keep(5)
    assert {file.name.split("-")[0] for file in run.files("json")} == {"0", "2"}  # the step restored from stays
    run.keep(6, 7)
    assert {file.name.split("-")[0] for file in run.files("json")} == {"3"}


def test_an_attempt_without_snapshots_counts(run: Run) -> None:
    """It began at an older step: what the attempt before it had in memory is of another history."""
    run.keep(5, 6)
    with run.checkpoints() as checkpointer, Snapshots(run.workdir, str(run.memory), 0) as snapshots:
        assert snapshots.restore(abstract(), checkpointer) is None
        snapshots.begin(0)
    assert run.restore() is None


@pytest.mark.parametrize("room", [0, 300, 900])  # for nothing, a part of the data, the data but not its description
def test_no_room(run: Run, room: int) -> None:
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


@pytest.mark.parametrize("stops", [True, False])
def test_checkpoints_are_deleted_to_go_back(run: Run, stops: bool) -> None:
    """Snapshots that know of them do not bring back what came after; without a checkpoint they are all there is."""
    with run.attempt() as snapshots:
        snapshots.begin(0)
        run.save(1)
        for step in (2, 3):
            keep(snapshots, step, state_of(step))
            run.save(step)
        keep(snapshots, 4, state_of(4))
        if stops:
            run.save(4)
            snapshots.end(finished=False)
    check(run.restore(), 4)
    checkpoints = run.workdir / "checkpoints"
    shutil.rmtree(checkpoints / "4" if stops else checkpoints / "3")
    shutil.copytree(checkpoints, run.workdir / "all")
    shutil.rmtree(checkpoints)
    check(run.restore(), 4)
    (run.workdir / "all").rename(checkpoints)
    newest, gone = (3, 4) if stops else (2, 3)
    restored = run.restore()
    assert restored and restored.step == newest
    said = f"are not used: the checkpoint of step {gone}, which was there, is gone, and that of step {newest} is"
    assert len(run.said) == 4 - newest and all(said in line for line in run.said)


def test_an_older_copy_is_put_back(run: Run, tmp_path: Path) -> None:
    """Into the same folder: the memory holds steps of starts that it does not know of, one of which it makes again."""
    run.keep(1)
    run.save(1)
    shutil.copytree(run.workdir, tmp_path / "backup")
    run.keep(2, 3)
    check(run.restore(), 3)
    away = tmp_path / "away"
    shutil.copytree(run.files("json")[0].parent, away)
    shutil.copytree(tmp_path / "backup", run.workdir, dirs_exist_ok=True)
    check(run.restore(), 1, source="its checkpoint")
    run.save(2)
    with run.checkpoints() as checkpointer, run.attempt() as snapshots:
        restored = snapshots.restore(abstract(), checkpointer)
        assert restored and restored.step == 2
        snapshots.begin(2)
    shutil.copytree(away, run.memory / f"mics-jax-{os.getuid()}" / run.run_id, dirs_exist_ok=True)
    check(run.restore(), 2, source="its checkpoint")


def test_a_damaged_checkpoint_was_set_aside(run: Run) -> None:
    """It was there: nobody went back."""
    run.save(1, 2)
    run.keep(3)
    (run.workdir / "checkpoints" / "2" / "data" / "metadata").write_text("{}")
    shutil.rmtree(run.memory / f"mics-jax-{os.getuid()}")
    restored = run.restore()
    assert restored and restored.step == 1
    run.keep(3)
    check(run.restore(), 3)
    shutil.rmtree(run.workdir / "checkpoints" / manifest.SET_ASIDE)  # nor when it is cleaned up
    check(run.restore(), 3)


def test_a_host_whose_name_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is named to the others: they may know it."""

    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert own_address() == socket.gethostname()


@pytest.mark.parametrize("every", [1, 0])
def test_a_finished_run_leaves_nothing(run: Run, every: int) -> None:
    """Even if its last attempt kept no snapshots."""
    run.keep(1)
    with Snapshots(run.workdir, str(run.memory), every) as snapshots:
        snapshots.end(finished=False)
        assert run.files("data")
        snapshots.end(finished=True)
    assert not any((run.memory / f"mics-jax-{os.getuid()}").iterdir())


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


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (2, 1), (3, 1)])
def test_what_a_node_holds_is_kept_once_and_shared_out(groups: int, kept: float) -> None:
    """On nodes of two processes of two devices; a large and a small array, cut over the devices of a node."""
    nodes = [f"node {process // 2}" for process in range(2 * groups)]
    device_type = namedtuple("device_type", ("id", "process_index"))
    devices = [device_type(i, i // 2) for i in range(4 * groups)]
    leaves = [Leaf(path=f"{size}{i}", shape=(size,), dtype="float32") for i in range(24) for size in (4 * 96, 4)]

    def indices(shape: tuple[int]) -> dict[Any, tuple[slice]]:
        part = shape[0] // 4
        return {device: (slice(part * (device.id % 4), part * (device.id % 4 + 1)),) for device in devices}

    sharding = SimpleNamespace(devices_indices_map=indices)
    arrays: Any = {leaf.path: SimpleNamespace(sharding=sharding, dtype=np.dtype(np.float32)) for leaf in leaves}
    owned = [owned_shards(process, nodes, arrays, leaves) for process in range(2 * groups)]
    keepers: dict[Any, set[str]] = defaultdict(set)
    for node, of_process in zip(nodes, owned, strict=True):
        for shard in of_process:
            keepers[shard.piece.region].add(node)
    assert len(keepers) == 4 * len(leaves) and {len(on) for on in keepers.values()} == {groups}
    whole = sum(4 * leaf.shape[0] for leaf in leaves)
    by_device = Counter({d.id: sum(x.piece.size for x in owned[d.process_index] if x.device is d) for d in devices})
    assert sum(by_device.values()) == groups * whole
    assert all(size == pytest.approx(kept * whole / 4, rel=0.1) for size in by_device.values()), by_device
    assert not any(shard.is_only_copy for of_process in owned for shard in of_process)


# --------------------------------------------------------------------------------- folders, names and versions


def test_nobody_else_can_look_in(run: Run) -> None:
    before = os.umask(0)
    try:
        run.keep(1)
    finally:
        os.umask(before)
    folder = run.files("data")[0].parent
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700] * 2
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600] * 2


@pytest.mark.parametrize("how", ["readable", "link", "no folder", "replaceable", "somebody else's memory"])
def test_folders_of_others_are_refused(run: Run, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run.keep(1)
    folder = run.files("data")[0].parent
    expected = "is not a folder of this user alone"
    match how:
        case "readable":
            folder.chmod(0o750)
        case "link":
            folder.symlink_to(folder.rename(run.memory / "elsewhere"))
        case "no folder":
            shutil.rmtree(folder)
            folder.write_text("")
        case "replaceable":
            run.memory.chmod(0o777)
            expected = "can be written by others"
        case "somebody else's memory":
            run.memory.chmod(0o1777)
            status = run.memory.stat()
            stat = Path.stat
            others = os.stat_result((*status[:4], os.getuid() + 1, *status[5:]))
            monkeypatch.setattr(Path, "stat", lambda path, **_: others if path == run.memory else stat(path))
            expected = f"belongs to user {os.getuid() + 1}"
    with pytest.raises(ValueError, match=expected):
        run.attempt()
    if how == "replaceable":
        run.memory.chmod(0o1777)
        check(run.restore(), 1)


@pytest.mark.parametrize("how", ["link", "closed"])
def test_a_name_that_somebody_else_has_taken(run: Run, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is passed over; what was kept beside it is found again, also when the name is free, and goes with the run."""
    name = run.memory / f"mics-jax-{os.getuid()}"
    make_closed(name, monkeypatch) if how == "closed" else name.symlink_to("/")
    run.keep(1)
    check(run.restore(), 1)
    folder = run.files("json")[0].parent.parent
    assert folder != name and folder.stat().st_mode & 0o777 == 0o700 and len(list(run.memory.glob("mics-*"))) == 2
    if how == "link":
        name.unlink()
    check(run.restore(), 1)
    with run.attempt() as snapshots:
        snapshots.end(finished=True)
    assert list(run.memory.glob("mics-*")) == ([name] if how == "closed" else [])


def make_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a folder of somebody else, who lets nobody look at what is in it: not even root in this test."""
    folder.mkdir(mode=0o755)
    stat = Path.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:
        if folder in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)


def test_a_run_id_that_is_a_path(run: Run) -> None:
    """Would have a run delete that folder in the end."""
    run.keep(1)
    file = run.workdir / "attempts.json"
    victim = run.memory / "victim"
    victim.mkdir(mode=0o700)
    for run_id in ("../victim", "A" * 16, "0" * 15, 7):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"run_id": run_id}))
        with pytest.raises(ValueError, match=r"attempts.json is damaged .*; remove it"), run.attempt() as snapshots:
            snapshots.end(finished=True)
    assert victim.is_dir()


@pytest.mark.parametrize(
    "change", [{"name": "../0-0-a"}, {"name": "0-0-c"}, {"run_id": "../../home"}, {"name": "1-0-a"}]
)
def test_a_description_with_names_of_others(run: Run, change: dict[str, str]) -> None:
    run.keep(1)
    (kept,) = MemoryFolder(run.memory, run.run_id, "standby").snapshots()[0]
    content = json.loads(json.dumps(kept.as_json()))
    assert SnapshotManifest.from_json(content) == kept
    with pytest.raises(ValueError, match="is no snapshot"):
        SnapshotManifest.from_json(content | change)


def test_a_description_of_another_version(run: Run) -> None:
    """Is whole, and passed over: the checkpoint is what is left."""
    run.save(1)
    run.keep(2)
    (file,) = run.files("json")
    content = json.loads(file.read_text().partition("\n")[2])
    del content["history"]
    body = json.dumps(content | {"format": 1})
    file.write_text(f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}")
    check(run.restore(), 1, source="its checkpoint")
    (line,) = run.said
    assert line.endswith(f"{file.name} is not used: another version of the program wrote it")


@pytest.mark.parametrize("count", range(2, 8))
def test_which_nodes_may_be_lost(count: int) -> None:
    """One of each pair must be left, and of an odd number of nodes two of the last three; every set is tried."""
    in_turn = set(range(count - 3, count)) if count % 2 else set()
    pairs = [{node, node + 1} for node in range(0, count - len(in_turn), 2)]
    for number in range(count + 1):
        for lost in map(set, combinations(range(count), number)):
            is_kept = all({node, partner(node, count)} - lost for node in range(count))
            assert is_kept == (len(in_turn & lost) <= 1 and all(pair - lost for pair in pairs))
