"""train.py with the memory tier: a run that is killed continues from its last snapshot as if nothing had happened."""

import errno
import json
import os
import shutil
import socket
from pathlib import Path

import pytest
from support.running import (
    arguments,
    check_same_end,
    finish,
    losses,
    manifest,
    rows,
    run_here,
    start,
    steps_logged,
    stop_after,
    wait_until,
)

from runtime import workdir_lock
from runtime.exit_codes import ResumableError

RESUMABLE = 75


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("undisturbed")
    assert run_here(*arguments(workdir)) == 0
    return workdir


def with_memory(workdir: Path, memory: Path, every: int = 1, **changes: object) -> list[str]:
    memory.mkdir(exist_ok=True)
    return arguments(workdir, elastic__snapshot_every=every, elastic__memory_dir=memory, **changes)


def files(memory: Path) -> list[str]:
    return sorted(path.suffix for path in memory.rglob("*") if path.is_file())


@pytest.mark.slow
def test_killed_and_resumed_from_memory(tmp_path: Path, undisturbed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """SIGKILL while it trains; the continued run equals the undisturbed run to the last bit."""
    memory, run = tmp_path / "memory", tmp_path / "run"
    args = with_memory(run, memory, every=3)
    process = start(args, pause_s=3.0)
    wait_until(lambda: steps_logged(run) >= 7, process)
    process.kill()
    finish(process)
    done = len(losses(run))
    assert 7 <= done < 10
    shutil.rmtree(run / "checkpoints")
    capfd.readouterr()
    assert run_here(*args) == 0
    began_at = json.loads((run / "attempts.json").read_text())["began_at"]
    assert began_at in ([0, 6], [0, 9])
    again = f"from memory (1 of 1 node had it); steps done again: {done - began_at[1]}"
    assert f"resumed at step {began_at[1]} of 10 in {run}, {again}" in capfd.readouterr().out
    check_same_end(run, undisturbed)
    assert files(memory) == []
    assert next(row["step"] for row in rows(run) if "snapshot_s" in row) == 4  # the snapshot of step 3


@pytest.mark.slow
def test_stopped_and_resumed_from_memory(tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that no snapshot was due at; it is in a checkpoint too, should the node go away."""
    memory, run = tmp_path / "memory", tmp_path / "run"
    args = with_memory(run, memory, every=100)
    assert run_here(*args, hooks=[stop_after(7)]) == RESUMABLE
    done = len(losses(run))
    assert manifest(run, done)["step"] == done and files(memory) == [".data", ".json"]
    (run / "checkpoints" / str(done) / "data" / "metadata").unlink()  # it is not even looked at
    assert run_here(*args, "--config.elastic.snapshot_every=1") == 0
    assert f"resumed at step {done} of 10" in capsys.readouterr().out
    check_same_end(run, undisturbed)


@pytest.mark.slow
def test_a_snapshot_of_another_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the memory identifies the run."""
    args = with_memory(tmp_path / "run", tmp_path / "memory")
    assert run_here(*args, hooks=[stop_after(4)]) == RESUMABLE
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    for file in ("metrics.jsonl", "config.json", "summary.json"):
        (tmp_path / "run" / file).unlink()
    kept = files(tmp_path / "memory")
    capsys.readouterr()
    assert run_here(*args, "--config.seed=3") == 2
    error = capsys.readouterr().err
    said = f"error: {tmp_path / 'run'} holds a run of another config: seed was 0 and is 3; choose another --workdir"
    assert error.splitlines()[-1] == said and files(tmp_path / "memory") == kept
    assert run_here(*args) == 0


@pytest.mark.slow
def test_stopped_again_before_a_step(tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The state restored from memory gets a checkpoint then."""
    memory, run = tmp_path / "memory", tmp_path / "run"
    args = with_memory(run, memory)
    assert run_here(*args, hooks=[stop_after(4)]) == RESUMABLE
    done = len(losses(run))
    shutil.rmtree(run / "checkpoints")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("runtime.preemption.PreemptionHandler.requested", lambda self: True)
        assert run_here(*args) == RESUMABLE
    assert manifest(run, done)["step"] == done
    shutil.rmtree(next(memory.iterdir()))
    assert run_here(*args, "--config.sharding.partition_size=16") == RESUMABLE  # it may get its nodes back
    assert run_here(*args) == 0
    assert f"resumed at step {done} of 10 in" in capsys.readouterr().out
    check_same_end(run, undisturbed)


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = with_memory(tmp_path / "run", tmp_path / "memory")
    assert run_here(*args, f"--config.elastic.memory_dir={tmp_path / 'none'}") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: elastic.memory_dir=") and error.count("\n") == 1
    assert run_here(*args, "--config.elastic.snapshot_every=-2") == 2
    assert "elastic.snapshot_every=-2 must be at least -1" in capsys.readouterr().err
    assert run_here(*args, "--config.sharding.partition_size=16") == 2
    assert "needs 8 nodes of 2, 4 more than are here" in capsys.readouterr().err


def test_a_lock_without_room_ends_a_replica_for_a_while_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for owner, name in ((workdir_lock.locks, "locked"), (Path, "mkdir")):  # the lock; its folder
        for others_go_on, error in ((True, ResumableError), (False, ValueError)):
            with monkeypatch.context() as patch, pytest.raises(error, match="No space left on device"):
                patch.setattr(owner, name, full)
                workdir_lock.workdir_lock(tmp_path, others_go_on=others_go_on).__enter__()


def test_two_in_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one waits a little, then says what is wrong; it takes nothing from the first."""
    monkeypatch.setattr(workdir_lock, "_WAIT_S", 0.3)
    with workdir_lock.workdir_lock(tmp_path / "run"):
        assert run_here(*with_memory(tmp_path / "run", tmp_path / "memory")) == 2
        waiting, error = capsys.readouterr().err.splitlines()
        assert "waiting" in waiting and error.startswith("error: another train.py") and "--workdir" in error
        lock = tmp_path / "run" / f"lock-{socket.gethostname()}"
        assert [*(tmp_path / "run").iterdir()] == [lock] and lock.stat().st_mode & 0o777 == 0o600
        assert files(tmp_path / "memory") == []
        with workdir_lock.workdir_lock(tmp_path / "other"):
            pass
    with workdir_lock.workdir_lock(tmp_path / "run"):
        pass
