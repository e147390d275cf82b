"""The state from which a run continues, if attempts, snapshots or checkpoints were put back, deleted or copied."""

import os
import shutil
from pathlib import Path

from support.keeping import Run, a_run, abstract, check, keep, state_of  # noqa: F401 (fixture)

from elastic import manifest
from elastic.snapshots import Snapshots
from training.resume import restore_newest


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


def test_an_attempt_without_snapshots_counts(run: Run, tmp_path: Path) -> None:
    """It began at an older step: snapshots of the attempt before it have another history, and are deleted."""
    run.keep(5, 6)
    there, away = run.files("json")[0].parent, tmp_path / "away"
    shutil.copytree(there, away)
    with run.checkpoints() as checkpointer, Snapshots(run.workdir, str(run.memory), 0) as snapshots:
        assert restore_newest(abstract(), checkpointer, snapshots) is None
        snapshots.begin(0)
    assert not there.exists()
    shutil.copytree(away, there)  # on a node that comes back
    there.chmod(0o700)
    assert run.restore() is None


def test_checkpoints_are_deleted_to_go_back(tmp_path: Path) -> None:
    """Snapshots that know of them do not restore later steps; without a checkpoint they are the only state."""
    for stops in (True, False):
        check_goes_back(Run(tmp_path, f"stops {stops}"), stops)


def check_goes_back(run: Run, stops: bool) -> None:
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
    """Into the same folder: the memory holds steps of starts unknown to the copy, which repeats one of them."""
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
        restored = restore_newest(abstract(), checkpointer, snapshots)
        assert restored and restored.step == 2
        snapshots.begin(2)
    shutil.copytree(away, run.memory / f"mics-jax-{os.getuid()}" / run.run_id, dirs_exist_ok=True)
    check(run.restore(), 2, source="its checkpoint")


def test_a_damaged_checkpoint_was_set_aside(run: Run) -> None:
    """It counts as present: the user did not go back."""
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


def test_a_finished_run_leaves_nothing(run: Run) -> None:
    """Even if its last attempt kept no snapshots."""
    for every in (1, 0):
        run.keep(1)
        with Snapshots(run.workdir, str(run.memory), every) as snapshots:
            snapshots.end(finished=False)
            assert run.files("data")
            snapshots.end(finished=True)
        assert not any((run.memory / f"mics-jax-{os.getuid()}").iterdir())
