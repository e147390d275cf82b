"""What goes wrong while a run trains: a clear line, exit code 1, and nothing lost that was there before."""

import gc
import json
import resource
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from support.running import arguments, arrays, at_step, changed, check_same_end, losses, rows, run_here
from support.waiting import until

from runtime.events import EventReader
from runtime.files import run_directory
from runtime.heartbeat import is_of_a_link


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # TensorBoard's file stays open
@pytest.mark.slow
@pytest.mark.parametrize("room", [20_000, 100])
def test_full_disk_ends_the_run_with_one_line(tmp_path: Path, room: int, capsys: pytest.CaptureFixture[str]) -> None:
    """From step 9 on no file may be larger than `room`; with 100 the report cannot be written either."""
    undisturbed, workdir = tmp_path / "undisturbed", tmp_path / "run"
    assert run_here(*arguments(undisturbed)) == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_disk() -> None:
        until((workdir / "checkpoints" / "5").exists)  # it is saved in a thread
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))

    capsys.readouterr()
    try:
        code = run_here(*arguments(workdir), hooks=[at_step(9, fill_disk)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    err = capsys.readouterr().err
    assert code == 1, err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    if room == 100:  # the metrics have no room either
        assert f"cannot write to {workdir}: File too large" in err
    else:
        assert "saving step 10" in err and "newest: 5" in err and "File too large" in err
    assert not (workdir / "checkpoints" / "10").exists()

    assert run_here(*arguments(workdir)) == 0
    check_same_end(workdir, undisturbed)
    gc.collect()  # writes of the failed save that nobody awaited: else the next test would hear of them


@pytest.mark.slow
def test_a_deleted_workdir_is_noticed_at_the_next_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The state is saved there again, so the same command continues."""
    undisturbed, workdir = tmp_path / "undisturbed", tmp_path / "run"
    assert run_here(*arguments(undisturbed)) == 0
    capsys.readouterr()
    assert run_here(*arguments(workdir), hooks=[at_step(2, lambda: shutil.rmtree(workdir))]) == 75
    err = capsys.readouterr().err
    assert f"{workdir} was deleted or moved during the run: " in err and "step 5 is saved there again" in err
    assert err.count("\n") == 1
    assert run_here(*arguments(workdir)) == 0
    assert [row["loss"] for row in rows(workdir)] == losses(undisturbed)[5:]


@pytest.mark.slow
def test_too_many_non_finite_updates_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"optimizer__learning_rate": 1e16, "optimizer__max_skipped": 3, "checkpoint__every": 1, "num_steps": 20}
    assert run_here(*arguments(tmp_path, **changes)) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: 3 updates in a row were not finite, the last at step ")
    assert captured.err.count("\n") == 1
    found = rows(tmp_path)
    assert [row["skipped_steps"] for row in found[-3:]] == [1, 2, 3] and found[-4]["skipped_steps"] == 0
    rate = found[-4]["learning_rate"]
    assert [row["learning_rate"] for row in found[-3:]] == [rate] * 3  # the schedule waits
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["exit_reason"].startswith("failed: 3 updates in a row were not finite")
    assert (tmp_path / "report.html").exists()
    *_, last = EventReader(tmp_path).new()
    assert (last["event"], last["code"]) == ("exited", 1) and last["why"].startswith("3 updates in a row were not")
    written = (tmp_path / run_directory.EVENTS).read_text()
    assert run_here(*arguments(tmp_path)) == 2  # a mistake writes nothing into another run's directory
    assert (tmp_path / run_directory.EVENTS).read_text() == written
    saved = arrays(tmp_path, found[-1]["step"] - 1)
    assert all(np.isfinite(x).all() for name, x in saved.items() if name.startswith("params"))


def test_unexpected_error_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("out of the blue")

    assert run_here(*arguments(tmp_path), hooks=[at_step(3, fail)]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1] == "error: out of the blue"
    assert len(losses(tmp_path)) == 3
    assert json.loads((tmp_path / "summary.json").read_text())["exit_reason"] == "failed: out of the blue"


def test_a_broken_connection_is_resumable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of processes that all live: nobody is lost."""
    broken = jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Read error: Connection reset by peer")

    def fail() -> None:
        raise broken

    assert run_here(*arguments(tmp_path), hooks=[at_step(3, fail)]) == 75
    err = capsys.readouterr().err
    assert "Traceback" not in err and str(broken) in err


def test_messages_of_broken_connections() -> None:
    is_broken = {
        "UNKNOWN: Gloo all-reduce failed: Read error [10.0.0.9]:4711: Connection reset by peer": True,
        "INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited or there was a network error": True,
        "INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled cuda error": False,
        "INTERNAL: NCCL operation ncclCommInitRank failed: unhandled system error": False,  # /dev/shm may be full
    }
    assert {said: is_of_a_link(jax.errors.JaxRuntimeError(said)) for said in is_broken} == is_broken


@pytest.mark.parametrize("name", ["compile_train_step", pytest.param("init_state", marks=pytest.mark.slow)])
def test_unexpected_error_before_step_1_is_not_bad_input(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ValueError("out of the blue")

    assert run_here(*arguments(tmp_path), make=changed(**{name: fail})) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1] == "error: out of the blue"


def test_log_that_fails_to_start_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "config.partial")

    monkeypatch.setattr("training.log.RunLog", fail)
    assert run_here(*arguments(tmp_path)) == 1
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device: 'config.partial'\n"
