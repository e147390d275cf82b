"""What is saved comes back, bit by bit: any pytree, dtype, mesh and spec; retention; errors a user can act on."""

import errno
import logging
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.future import ChainedFuture
from support.checkpointing import KEEP_ALL, abstract, check_restores, save_small, small_state

from configs.schema import CheckpointConfig
from elastic import __main__ as command_line
from elastic import latest_config, manifest, tree
from elastic.checkpointer import Checkpointer, CheckpointError
from runtime.exit_codes import ResumableError
from runtime.files import atomic


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Counters:
    step: jax.Array
    skipped: jax.Array


class TrainState(NamedTuple):
    params: Any
    opt_state: Any
    counters: Counters
    key: jax.Array


def mesh_of(*shape: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("a", "b")[: len(shape)])


def numbers(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Random bits, so that NaNs, infinities and denormals are among them."""
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_any_pytree_comes_back_with_its_structure_and_bits(tmp_path: Path) -> None:
    sharded = NamedSharding(mesh_of(8), PartitionSpec("a"))
    params = {
        "w": jax.device_put(numbers((16, 4), np.float32, 0), sharded),
        "layers": [jax.device_put(numbers((8, 3), jnp.bfloat16, 1), sharded), jnp.zeros((0, 4)), jnp.float32(-0.0)],
        "with.dot": (jnp.array(numbers((5,), np.int8, 2)), jnp.array([True, False])),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = TrainState(
        params=params,
        opt_state=optimizer.init(params),
        counters=Counters(step=jnp.uint32(7), skipped=jnp.int32(-1)),
        key=jax.random.key_data(jax.random.key(3)),
    )
    data, config = {"step": 5, "seed": 0, "fingerprint": "ab"}, {"model": {"layers": [1, 2]}, "name": "é"}
    with Checkpointer(tmp_path, KEEP_ALL) as checkpointer:
        checkpointer.save(5, state, data=data, config=config)
        restored = checkpointer.restore(abstract(state))
    assert restored is not None
    assert (restored.step, restored.data, restored.config) == (5, data, config)
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    assert isinstance(restored.state.opt_state[1][0], optax.ScaleByAdamState)
    assert bits(restored.state) == bits(state)
    for wanted, got in zip(jax.tree.leaves(state), jax.tree.leaves(restored.state), strict=True):
        assert (got.dtype, got.shape, got.sharding) == (wanted.dtype, wanted.shape, wanted.sharding)


def test_restores_bitwise_on_other_meshes_and_specs(tmp_path: Path) -> None:
    values = {"w": numbers((24, 16), np.float32, 0), "b": numbers((16,), jnp.bfloat16, 1), "n": np.int32(4)}
    mesh = mesh_of(2, 4)

    def by_rank(x: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*mesh.axis_names[: x.ndim]))

    state = jax.tree.map(lambda x: jax.device_put(x, by_rank(x)), values)
    layouts = [
        (mesh_of(8), PartitionSpec()),
        (mesh_of(4, 2), PartitionSpec(("b", "a"))),
        (mesh_of(4), PartitionSpec("a")),
        (mesh_of(1), PartitionSpec("a")),
    ]
    with Checkpointer(tmp_path, KEEP_ALL) as checkpointer:
        checkpointer.save(1, state, data={}, config={})
        for new_mesh, spec in layouts:
            place = {
                name: NamedSharding(new_mesh, spec if np.ndim(x) else PartitionSpec()) for name, x in values.items()
            }
            wanted = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place[n]) for n, x in values.items()}
            restored = checkpointer.restore(wanted)
            assert restored is not None
            assert bits(restored.state) == bits(values)
            for name in values:
                assert restored.state[name].sharding == place[name]


def test_a_save_is_not_changed_by_donation_after_it_returned(tmp_path: Path) -> None:
    update = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
    x = jax.device_put(np.arange(1 << 20, dtype=np.float32), NamedSharding(mesh_of(8), PartitionSpec("a")))
    before, wanted = np.array(x), abstract(x)
    data = {"step": [1]}
    with Checkpointer(tmp_path, KEEP_ALL) as checkpointer:
        checkpointer.save(1, {"x": x}, data=data, config={})
        data["step"].append(2)
        for _ in range(20):
            x = update(x)
        restored = checkpointer.restore({"x": wanted})
    assert restored is not None
    np.testing.assert_array_equal(np.asarray(restored.state["x"]), before)
    assert restored.data == {"step": [1]}


def test_retention_keeps_last_every_and_best(tmp_path: Path) -> None:
    """The newer of two equal losses is better; a missing loss or NaN is never the best."""
    losses = {1: float("nan"), 2: 1.0, 3: 2.0, 4: 5.0, 5: 2.0, 7: 3.5, 8: 3.6, 9: float("nan"), 10: 3.7, 11: 3.8}
    config = CheckpointConfig(every=1, keep_last=2, keep_every=4, keep_best=2)
    with Checkpointer(tmp_path, config) as checkpointer:
        save_small(checkpointer, *range(1, 12), losses=losses)
        checkpointer.wait()
        assert checkpointer.steps() == [2, 4, 5, 8, 10, 11]
        restored = checkpointer.restore(abstract(small_state(0)))
        assert restored is not None and restored.step == 11
    assert latest_config(tmp_path) == {"seed": 1}
    assert not (tmp_path / manifest.UNFINISHED).exists()


def test_a_step_that_cannot_be_deleted_is_left_to_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NFS a file that another host has open leaves a file in its folder."""
    rmtree, lines = shutil.rmtree, list[str]()

    def busy(path: Path, *, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        rmtree(path, ignore_errors=True)

    monkeypatch.setattr(shutil, "rmtree", busy)
    with Checkpointer(tmp_path, CheckpointConfig(every=1, keep_last=1), report=lines.append) as checkpointer:
        save_small(checkpointer, 1, 2)
        checkpointer.wait()
        assert checkpointer.steps() == [2]
        assert len(lines) == 1 and re.search("1 is not deleted yet: .*Directory not empty", lines[0])
    assert not (tmp_path / manifest.UNFINISHED).exists()


def test_replicas_that_save_at_once_do_not_harm_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one saves step 5, another saves an older one, the same, or newer ones."""
    for others, there, is_late in (((4,), [4, 5], False), ((5,), [5], True), ((6, 7), [6, 7], True)):
        with monkeypatch.context() as patch:
            check_saves_at_once(tmp_path / str(others[0]), patch, others, there, is_late)


def check_saves_at_once(
    folder: Path, patch: pytest.MonkeyPatch, others: tuple[int, ...], there: list[int], is_late: bool
) -> None:
    describe, arrived, may_go_on = manifest.describe, threading.Event(), threading.Event()

    def describe_late(*how: Any) -> Any:
        if not arrived.is_set():
            arrived.set()
            assert may_go_on.wait(60)
        return describe(*how)

    patch.setattr(manifest, "describe", describe_late)
    lines: list[str] = []
    with (
        Checkpointer(folder, KEEP_ALL, replica=1, report=lines.append) as one,
        Checkpointer(folder, KEEP_ALL, replica=12, report=pytest.fail) as two,
    ):
        save_small(one, 5)
        assert arrived.wait(60)
        save_small(two, *others)
        two.wait()
        may_go_on.set()
        one.wait()
        assert one.steps() == there
        check_restores(two, there[-1])
    assert len(lines) == is_late
    assert all("saving step 5 to" in x and x.endswith(f"another replica has saved step {there[-1]}") for x in lines)
    assert not [*(folder / manifest.UNFINISHED).glob("*/")]


def test_a_group_whose_save_failed_ends_though_another_replica_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Perhaps only a single process of it has failed."""
    with Checkpointer(tmp_path, KEEP_ALL, replica=1, report=pytest.fail) as checkpointer:
        save_small(checkpointer, 5)
        checkpointer.wait()
        said = "another replica has saved step 5: run the same command again"
        with monkeypatch.context() as patch, pytest.raises(ResumableError, match=said):
            patch.setattr(jax, "process_count", lambda: 2)
            checkpointer._failed(5, OSError("no route to the file system"))


def test_a_file_system_that_is_gone_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale mount cannot even be asked for its steps."""

    def stale(directory: Path) -> list[int]:
        raise OSError(errno.ESTALE, "Stale file handle", str(directory))

    with (
        pytest.raises(ResumableError, match="the first error"),
        Checkpointer(tmp_path, KEEP_ALL, report=pytest.fail, replica=1) as checkpointer,
    ):
        save_small(checkpointer, 5)
        checkpointer.wait()
        monkeypatch.setattr(manifest, "step_numbers", stale)
        with pytest.raises(ResumableError, match=r"saving step 6 .* failed: no route; .*\(newest: None\)"):
            checkpointer._failed(6, OSError("no route"))
        raise ResumableError("the first error")


def test_a_step_is_on_the_disk_before_an_older_one_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a machine that loses its power in between has neither."""
    there, sync = list[set[str]](), atomic.sync

    def look(folder: Path) -> None:
        sync(folder)
        if folder == tmp_path:
            there.append({path.name for path in folder.iterdir()} - {manifest.UNFINISHED})

    monkeypatch.setattr(atomic, "sync", look)
    with Checkpointer(tmp_path, CheckpointConfig(every=1, keep_last=1)) as checkpointer:
        save_small(checkpointer, 1, 2)
        checkpointer.wait()
        assert there == [{"1"}, {"1", "2"}] and checkpointer.steps() == [2]


def test_a_replica_deletes_its_own_failed_saves(tmp_path: Path) -> None:
    """Else each try of a single replica would take space on a full disk."""
    own, of_others = (tmp_path / manifest.UNFINISHED / f"{number}-ab" for number in (1, 12))
    for folder in (own, of_others):
        (folder / "7").mkdir(parents=True)
    with Checkpointer(tmp_path, KEEP_ALL, replica=1) as checkpointer:
        save_small(checkpointer, 6)
        checkpointer.wait()
    assert not own.exists() and of_others.exists()


def test_a_step_that_another_replica_deletes_while_it_is_read_is_to_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Checkpointer(tmp_path, CheckpointConfig(every=1, keep_last=1), replica=0) as other,
        Checkpointer(tmp_path, KEEP_ALL, replica=1, report=pytest.fail) as checkpointer,
    ):
        for step, reads in ((1, (manifest, "verify")), (3, (tree, "load"))):
            save_small(other, step)
            other.wait()

            read = getattr(*reads)

            def read_late(*how: Any, step: int = step, read: Any = read, **keys: Any) -> Any:
                save_small(other, step + 1)
                other.wait()
                return read(*how, **keys)

            said = f"another replica .* step {step} in"
            with monkeypatch.context() as patched, pytest.raises(ResumableError, match=said):
                patched.setattr(*reads, read_late)
                checkpointer.restore(abstract(small_state(0)))
            check_restores(checkpointer, step + 1)


def test_a_failing_save_keeps_the_old_step_and_reaches_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the background, and before anything is written: the next one is tried. A replica starts again."""
    cases: list[tuple[tuple[Any, str], int | None, type[Exception], int]] = [
        ((manifest, "write"), None, CheckpointError, 3),
        ((Path, "mkdir"), None, CheckpointError, 3),
        ((manifest, "write"), 0, ResumableError, 2),
    ]
    for number, case in enumerate(cases):
        check_fails(tmp_path / str(number), monkeypatch, *case)


def check_fails(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: tuple[Any, str],
    replica: int | None,
    error: type[Exception],
    step: int,
) -> None:
    checkpointer = Checkpointer(folder, CheckpointConfig(every=1, keep_last=1), replica=replica)
    save_small(checkpointer, 1)
    checkpointer.wait()
    with monkeypatch.context() as patch:

        def no_space(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(*failing, no_space)
        save_small(checkpointer, 2)
        with pytest.raises(error, match=rf"saving step {step} to .*No space left.*newest: 1") as failure:
            save_small(checkpointer, 3)
    assert "\n" not in str(failure.value)
    assert checkpointer.steps() == [1]
    save_small(checkpointer, 2)  # after the user made room
    checkpointer.close()
    assert checkpointer.steps() == [2]


def test_what_follows_a_save_that_failed_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be room by now, and no other chance; else the next one ends the run (above)."""
    lines: list[str] = []
    checkpointer = Checkpointer(tmp_path, KEEP_ALL, report=lines.append)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write", lambda *_: 1 / 0)
        save_small(checkpointer, 1)
        assert checkpointer._saving and checkpointer._saving[1].exception()
    save_small(checkpointer, 2)
    assert checkpointer.steps() == [2]
    assert len(lines) == 1 and "saving step 1 to" in lines[0] and lines[0].endswith("; step 2 is tried first")


def test_a_save_may_take_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax's own bound is 20 minutes, in which a slow disk takes no 100 GB."""
    bounds, result = list[float](), ChainedFuture.result

    def waits(self: Any, timeout: float) -> Any:
        bounds.append(timeout)
        return result(self, timeout)

    monkeypatch.setattr(ChainedFuture, "result", waits)
    with Checkpointer(tmp_path, KEEP_ALL) as checkpointer:
        save_small(checkpointer, 1)
    assert bounds and min(bounds) > 12 * 3600


def test_a_writer_that_fails_at_once_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(ocp.AsyncCheckpointer, "save", lambda *_, **__: (tmp_path / "no" / "folder").mkdir())
    monkeypatch.setattr(ocp.AsyncCheckpointer, "close", lambda self: closed.append(self))
    with Checkpointer(tmp_path, KEEP_ALL) as checkpointer:
        with pytest.raises(CheckpointError, match="saving step 1 to .*No such file"):
            save_small(checkpointer, 1)
        assert len(closed) == 1


def test_an_error_of_the_last_save_does_not_hide_why_the_program_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(manifest, "write", lambda *_: 1 / 0)
    with pytest.raises(KeyboardInterrupt), Checkpointer(tmp_path, KEEP_ALL, report=lines.append) as checkpointer:
        save_small(checkpointer, 1)
        raise KeyboardInterrupt
    assert len(lines) == 1 and "division by zero" in lines[0]


def test_another_model_is_named_and_nothing_is_moved(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, KEEP_ALL, report=pytest.fail) as checkpointer:
        save_small(checkpointer, 1, 2)
        wanted = abstract(small_state(0))
        other_shape = {**wanted, "w": jax.ShapeDtypeStruct((65,), jnp.float32, sharding=wanted["w"].sharding)}
        with pytest.raises(ValueError, match=r"another model: w is float32\[64\] in the checkpoint and float32\[65\]"):
            checkpointer.restore(other_shape)
        other_dtype = {**wanted, "b": jax.ShapeDtypeStruct((3,), jnp.uint32, sharding=wanted["b"].sharding)}
        with pytest.raises(ValueError, match=r"another model: b is int32\[3\] in the checkpoint and uint32\[3\]"):
            checkpointer.restore(other_dtype)
        with pytest.raises(ValueError, match=r"w2 is absent in the checkpoint and float32\[64\]"):
            checkpointer.restore({**wanted, "w2": wanted["w"]})
        with pytest.raises(ValueError, match=r"b is int32\[3\] in the checkpoint and absent in this run"):
            checkpointer.restore({"w": wanted["w"]})
        assert checkpointer.steps() == [1, 2]
        (tmp_path / "2" / "data" / "metadata").write_text("{}")  # even where a newer step is damaged
        with pytest.raises(ValueError, match="another model"):
            checkpointer.restore(other_shape)
    assert not (tmp_path / manifest.SET_ASIDE).exists()


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    for bad in ({"every": -1, "keep_last": 1}, {"every": 1, "keep_last": 0}, {"every": 1, "keep_last": 1.5}):
        with pytest.raises(ValueError, match=r"checkpoint\.(every|keep_last)=\S+ must be (at least \d|a whole number)"):
            CheckpointConfig(**bad)  # pyright: ignore[reportArgumentType]
    state = small_state(0)
    with Checkpointer(tmp_path, KEEP_ALL) as checkpointer:
        save_small(checkpointer, 1)
        for other in ({"data": {"step": 1, "seed": 2}, "config": {"seed": 1}}, {"data": {"step": 1}, "config": {}}):
            with pytest.raises(ValueError, match="/1 is a checkpoint of another run; choose another directory"):
                checkpointer.save(1, state, **other)
        with pytest.raises(ValueError, match="integer of at least 0; it is -1"):
            save_small(checkpointer, -1)
        with pytest.raises(ValueError, match="n is a int: save jnp"):
            checkpointer.save(2, {"n": 3}, data={}, config={})
        with pytest.raises(ValueError, match="key_data"):
            checkpointer.save(2, {"k": jax.random.key(0)}, data={}, config={})
        with pytest.raises(ValueError, match=r"two leaves of the state have the path 'a\.b'"):
            checkpointer.save(2, {"a.b": state["w"], "a": {"b": state["w"]}}, data={}, config={})
        with pytest.raises(ValueError, match="checkpoint's config must be JSON"):
            checkpointer.save(2, state, data={}, config={"f": print})
        with pytest.raises(ValueError, match="restore needs to know where b goes"):
            checkpointer.restore(jax.eval_shape(lambda: small_state(0)))
        assert checkpointer.steps() == [1]


def test_large_shards_are_stored_in_small_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_CHUNK_BYTES", 1024)
    with Checkpointer(tmp_path, KEEP_ALL) as checkpointer:
        checkpointer.save(1, {"w": jnp.ones((64, 32))}, data={}, config={})
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        stored = reader.metadata(tmp_path / "1" / "state").item_metadata.tree["w"].storage
    assert 0 < np.prod(stored.chunk_shape) * 4 <= 1024


def test_what_a_restore_reads_ahead_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[float] = []

    handler = ocp.PyTreeCheckpointHandler

    def spy(*, restore_concurrent_gb: float) -> ocp.PyTreeCheckpointHandler:
        bounds.append(restore_concurrent_gb * 1e9)
        return handler(restore_concurrent_gb=restore_concurrent_gb)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(tree, "_LEAST_IN_FLIGHT_BYTES", 1)
    monkeypatch.setattr(tree.ocp, "PyTreeCheckpointHandler", spy)
    many = {
        f"w{i}": jax.device_put(np.ones(1024, np.float32), NamedSharding(mesh_of(4), PartitionSpec("a")))
        for i in range(8)
    }
    replicated = {"w": jax.device_put(np.ones(1024, np.float32), NamedSharding(mesh_of(2), PartitionSpec()))}
    for name, state in (("many", many), ("one", replicated)):
        with Checkpointer(tmp_path / name, KEEP_ALL) as checkpointer:
            checkpointer.save(1, state, data={}, config={})
            bounds.clear()
            restored = checkpointer.restore(abstract(state))
        assert restored is not None
        assert bits(restored.state) == bits(state)
        assert bounds == [pytest.approx(8 * 4096 / 4 if name == "many" else 4097)]


def test_orbax_does_not_talk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    absl_logger = logging.getLogger("absl")
    with caplog.at_level(logging.INFO, logger="absl"), Checkpointer(tmp_path, KEEP_ALL) as checkpointer:
        save_small(checkpointer, 1)
        checkpointer.wait()
        absl_logger.info("somebody else")
        absl_logger.handle(logging.LogRecord("absl", logging.WARNING, ocp.__file__, 1, "matters", None, None))
        for coroutine in (ocp.__file__, "other.py"):  # the second of two writes that failed
            logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: <at %s:1>", coroutine)
        for raises in (
            lambda: ocp.CheckpointManagerOptions(save_interval_steps=-1, max_to_keep=-1),
            lambda: 1 / 0,
        ):
            try:
                raises()
            except (ValueError, ZeroDivisionError):
                logging.getLogger("asyncio").exception("_GatheringFuture exception was never retrieved")
    said = [record.getMessage() for record in caplog.records]
    assert said[:2] == ["somebody else", "matters"] and len(said) == 4 and "other.py" in said[2]


def test_command_line_lists_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpointer(tmp_path, KEEP_ALL) as checkpointer:
        save_small(checkpointer, 1, 2, losses={2: 1.25})
    assert command_line.verify(tmp_path) == 0 and capsys.readouterr().out.count(": good: ") == 2
    assert command_line.ls(tmp_path) == 0
    assert re.search(r"step +2 .*committed  validation_loss=1.25", capsys.readouterr().out)
    (tmp_path / "1" / "data" / "metadata").write_text('{"step": 2}')
    (tmp_path / "3").mkdir()
    assert command_line.verify(tmp_path) == 1
    damaged, _, empty = capsys.readouterr().out.splitlines()
    assert "step 1: DAMAGED: data/metadata does not match its hash" in damaged
    assert "step 3: DAMAGED: manifest.json is missing" in empty
    assert command_line.verify(tmp_path / "2") == 2  # a step, not the folder of steps


@pytest.mark.slow
def test_command_line_needs_no_jax(tmp_path: Path) -> None:
    code = "import sys, runpy; sys.modules['jax'] = None; runpy.run_module('elastic', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, "ls", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr == f"{tmp_path} holds no checkpoint\n"


def test_a_path_that_orbax_cannot_restore_from_is_refused(tmp_path: Path) -> None:
    for name in ("run[1]", "a*", "what?", "back\\slash", "run[1]/below"):
        character = next(c for c in "[*?\\" if c in name)
        said = re.escape(f"no checkpoint can be restored from {tmp_path / name}, because of {character} in the path")
        with pytest.raises(ValueError, match=said):
            Checkpointer(tmp_path / name, KEEP_ALL)
    assert not any(tmp_path.iterdir())
    with Checkpointer(tmp_path / "a]{b,c}~ %20#é:1!$&", KEEP_ALL) as checkpointer:
        save_small(checkpointer, 1)
        check_restores(checkpointer, 1)


def test_what_orbax_did_not_merge_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax only warns if it finds nothing to merge, and the rest cannot be restored."""
    monkeypatch.setattr("elastic.checkpointer.check_path", lambda directory: None)
    checkpointer = Checkpointer(tmp_path / "run[1]", KEEP_ALL)
    save_small(checkpointer, 1)
    with pytest.raises(CheckpointError, match=r"step 1 .*state/manifest\.ocdbt is missing.*newest: None"):
        checkpointer.wait()
    assert checkpointer.steps() == []


def test_a_damaged_step_of_an_earlier_attempt_is_set_aside_and_saved(tmp_path: Path) -> None:
    lines: list[str] = []
    with Checkpointer(tmp_path, KEEP_ALL, report=lines.append) as checkpointer:
        save_small(checkpointer, 1)
        checkpointer.wait()
        (tmp_path / "1" / "data" / "metadata").write_text("{}")
        save_small(checkpointer, 1)
        check_restores(checkpointer, 1)
    assert len(lines) == 1 and "moved to" in lines[0] and lines[0].endswith("step 1 is saved again")
    assert (tmp_path / manifest.SET_ASIDE / "1-1").is_dir()
