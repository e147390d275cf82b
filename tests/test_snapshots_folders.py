"""Folders, names and versions of snapshots: attacks of another user, and invalid descriptions."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from support.keeping import Run, a_run, check  # noqa: F401 (fixture)

from elastic.memory_files import MemoryFolder, SnapshotManifest


def test_nobody_else_can_look_in(run: Run) -> None:
    before = os.umask(0)
    try:
        run.keep(1)
    finally:
        os.umask(before)
    folder = run.files("data")[0].parent
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700] * 2
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600] * 2


def test_folders_of_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for how in ("readable", "link", "no folder"):
        run = Run(tmp_path, how)
        run.keep(1)
        folder = run.files("data")[0].parent
        if how == "readable":
            folder.chmod(0o750)
        elif how == "link":
            folder.symlink_to(folder.rename(tmp_path / "elsewhere"))
        else:
            shutil.rmtree(folder)
            folder.write_text("")
        with pytest.raises(ValueError, match="is not a folder of this user alone"):
            run.attempt()
    run = Run(tmp_path)
    run.keep(1)
    run.memory.chmod(0o777)
    with pytest.raises(ValueError, match="can be written by others"):
        run.attempt()
    run.memory.chmod(0o1777)
    check(run.restore(), 1)
    status, stat = run.memory.stat(), Path.stat
    others = os.stat_result((*status[:4], os.getuid() + 1, *status[5:]))
    monkeypatch.setattr(Path, "stat", lambda path, **_: others if path == run.memory else stat(path))
    with pytest.raises(ValueError, match=f"belongs to user {os.getuid() + 1}"):
        run.attempt()


def test_a_name_that_somebody_else_has_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is skipped; snapshots next to it are found again, also when the name is free, and are deleted with the run."""
    for how in ("link", "closed"):
        (tmp_path / how).mkdir(mode=0o700)
        check_is_passed_over(Run(tmp_path / how), how, monkeypatch)


def check_is_passed_over(run: Run, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Makes a folder of another user with an unreadable content, in this test even for root."""
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


def test_a_description_with_names_of_others(run: Run) -> None:
    run.keep(1)
    (kept,) = MemoryFolder(run.memory, run.run_id, "standby").snapshots()[0]
    content = json.loads(json.dumps(kept.as_json()))
    assert SnapshotManifest.from_json(content) == kept
    for change in ({"name": "../0-0-a"}, {"name": "0-0-c"}, {"run_id": "../../home"}, {"name": "1-0-a"}):
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
