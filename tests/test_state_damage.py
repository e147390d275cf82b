"""No damaged checkpoint is ever restored silently: always back at the newest good step, and the bad one set aside."""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.checkpointing import KEEP_ALL, abstract, check_equal

from configs.schema import CheckpointConfig
from elastic import __main__ as command_line
from elastic import latest_config, manifest
from elastic.checkpointer import Checkpointer

GOOD, NEWEST = 10, 20


def state_of(step: int) -> dict[str, jax.Array]:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), "a"), PartitionSpec("a"))
    w = np.random.default_rng(step).standard_normal((16, 8), dtype=np.float32)
    return {"w": jax.device_put(w, sharding), "step": jnp.int32(step)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the steps GOOD and NEWEST, both whole before and after each test."""
    directory = tmp_path_factory.mktemp("checkpoints")
    with Checkpointer(directory, KEEP_ALL) as checkpointer:
        for step in (GOOD, NEWEST):
            checkpointer.save(step, state_of(step), data={"step": step}, config={"step": step})
    assert newest_restored(directory, []) == NEWEST
    return directory


def newest_restored(directory: Path, lines: list[str]) -> int:
    """Returns the step that a restore gives, after comparing the state with the saved state of this step."""
    with Checkpointer(directory, KEEP_ALL, report=lines.append, replica=0) as checkpointer:
        restored = checkpointer.restore(abstract(state_of(0)))
    assert restored is not None
    check_equal(restored.state, state_of(restored.step))
    assert restored.data == restored.config == {"step": restored.step}
    return restored.step


@contextmanager
def undone(directory: Path) -> Iterator[Path]:
    """Gives the newest step to be damaged, and puts everything back afterwards."""
    backup = directory.parent / "backup"
    shutil.copytree(directory, backup)
    try:
        yield directory / str(NEWEST)
    finally:
        shutil.rmtree(directory)
        backup.rename(directory)


def check_falls_back(directory: Path, mentions: str) -> None:
    """Checks that a restore takes GOOD, says why in one line, sets NEWEST aside, and is at peace the second time."""
    lines: list[str] = []
    assert newest_restored(directory, lines) == GOOD, mentions
    assert len(lines) == 1 and mentions in lines[0] and "\n" not in lines[0], lines
    assert f"{NEWEST} is damaged" in lines[0] and f"step {GOOD} is used instead" in lines[0]
    assert (directory / manifest.SET_ASIDE / f"{NEWEST}-1").is_dir()
    assert not (directory / str(NEWEST)).exists()
    lines.clear()
    assert newest_restored(directory, lines) == GOOD and lines == []


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def replaced(path: Path, kind: str) -> None:
    """Puts something else in the place of a file that a reader would wait for, or read without end."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"zeros": "/dev/zero", "circle": path.name, "other": "/etc/passwd"}[kind])


def added(newest: Path, kind: str) -> str:
    """Adds a file that the manifest does not list; returns its name. Orbax would read some of them."""
    name = {"file": "state/checkpoint", "partial": "manifest.partial", "folder": "config/.hidden"}.get(kind, "state/d2")
    if kind in ("file", "partial"):
        shutil.copy(newest / "state" / "array_metadatas" / "process_0", newest / name)
    elif kind == "folder":
        (newest / name).mkdir()
    else:
        (newest / name).symlink_to("/")
    return name


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    how=st.sampled_from(["flipped", "cut", "grown", "deleted", "pipe", "folder", "zeros", "circle", "other", "added"]),
    data=st.data(),
)
def test_any_damage_of_any_file(saved: Path, how: str, data: st.DataObject) -> None:
    with undone(saved) as newest:
        if how == "added":
            name = added(newest, data.draw(st.sampled_from(["file", "partial", "folder", "link"])))
            check_falls_back(saved, f"{name} is not in the manifest")
            return
        path = data.draw(st.sampled_from([path for path in files_of(newest) if path.stat().st_size]))
        content = path.read_bytes()
        if how == "deleted":
            path.unlink()
        elif how == "grown":  # a hole: it is not read, which would take minutes
            os.truncate(path, 1 << 36)
        elif how in ("flipped", "cut"):
            place = data.draw(st.integers(0, len(content) - 1))
            flipped = bytes([content[place] ^ data.draw(st.integers(1, 255))]) + content[place + 1 :]
            path.write_bytes(content[:place] + flipped * (how == "flipped"))
        else:
            replaced(path, how)
        if how == "circle":  # a link that cannot be followed may be a mount that is gone
            with pytest.raises(OSError, match=f"{path} cannot be read"):
                newest_restored(saved, [])
        else:
            size = f" has {1 << 36} bytes" if how == "grown" and path.name != manifest.FILE_NAME else ""
            check_falls_back(saved, f"{path.relative_to(newest).as_posix()}{size}")


def test_a_file_that_cannot_be_read_is_not_damage(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its step may be undamaged: a restore fails and says so, and does not go back to an older step."""
    for name in (manifest.FILE_NAME, manifest.STATE_FILE, manifest.CONFIG_FILE):
        check_is_not_damage(saved, name, monkeypatch, capsys)


def check_is_not_damage(
    saved: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, real = saved / str(NEWEST) / name, os.open

    def fail(path_to_open: Any, *args: Any, **kwargs: Any) -> int:
        if Path(path_to_open) == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path_to_open, *args, **kwargs)

    lines: list[str] = []
    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(OSError, match=rf"^process 0 on \S+: {path} cannot be read \(Input/output error\)"):
        newest_restored(saved, lines)
    assert command_line.verify(saved) == 1 and f"step {NEWEST}: UNREADABLE: {path}" in capsys.readouterr().out
    if name != manifest.STATE_FILE:
        with pytest.raises(OSError, match="cannot be read"):
            latest_config(saved)
    monkeypatch.undo()
    assert lines == [] and newest_restored(saved, lines) == NEWEST and lines == []


def test_a_file_system_that_goes_away_is_not_damage(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the manifest and the other files: then the step has no file at all."""
    lines, elsewhere = list[str](), saved.parent / "elsewhere"
    real = os.open

    def unmount(path: Any, *args: Any, **kwargs: Any) -> int:
        if saved.exists() and Path(path).name != manifest.FILE_NAME and Path(path).is_relative_to(saved):
            saved.rename(elsewhere)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", unmount)
    with pytest.raises(OSError, match=f"{NEWEST}/.* cannot be read .No such file or directory."):
        newest_restored(saved, lines)
    monkeypatch.undo()
    elsewhere.rename(saved)
    assert lines == [] and newest_restored(saved, lines) == NEWEST


def test_a_file_behind_a_link_that_the_manifest_does_not_know(saved: Path) -> None:
    with undone(saved) as newest:
        elsewhere = saved / "elsewhere"
        (newest / "state").rename(elsewhere)
        (newest / "state").symlink_to(elsewhere)
        assert manifest.verify(newest).step == NEWEST
        (elsewhere / "checkpoint").touch()
        check_falls_back(saved, "state/checkpoint is not in the manifest")


def test_a_newer_format_is_said_and_never_moved(saved: Path) -> None:
    """The hash of its manifest is right, so it is not damage; with a wrong hash it is (see the idle bytes above)."""
    lines: list[str] = []
    with undone(saved) as newest:
        content = json.loads((newest / manifest.FILE_NAME).read_text())
        del content["sha256"]
        content |= {"format": 2, "tree": {"of another": "shape"}}
        content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        (newest / manifest.FILE_NAME).write_text(json.dumps(content))
        said = f"{NEWEST}/manifest.json has format 2 and this program reads format 1: use the version"
        for act in (lambda: newest_restored(saved, lines), lambda: latest_config(saved)):
            with pytest.raises(ValueError, match=said):
                act()
        with Checkpointer(saved, CheckpointConfig(every=1, keep_last=1), report=lines.append) as checkpointer:
            checkpointer.save(30, state_of(30), data={"step": 30}, config={"step": 30})
            checkpointer.wait()
            assert checkpointer.steps() == [30]  # our older step was deleted, not this one
        assert newest.is_dir() and lines == []
        done = subprocess.run(
            [sys.executable, "-m", "elastic", "verify", str(saved)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1 and f"step {NEWEST}: UNKNOWN FORMAT: " in done.stdout and said in done.stdout


def test_an_empty_step_and_one_under_another_number(saved: Path) -> None:
    for other, said in (("", manifest.FILE_NAME), (str(GOOD), f"belongs to step {GOOD}")):
        with undone(saved) as newest:
            shutil.rmtree(newest)
            shutil.copytree(saved / other, newest) if other else newest.mkdir()
            check_falls_back(saved, said)


def test_several_damaged_steps_are_each_reported(saved: Path) -> None:
    lines: list[str] = []
    with undone(saved) as newest:
        shutil.copytree(newest, saved / "30")
        (newest / "data" / "metadata").write_text("{}")
        assert newest_restored(saved, lines) == GOOD
        assert [line.split(" is damaged")[0].rpartition("/")[2] for line in lines] == ["30", "20"]
        (saved / str(NEWEST)).mkdir()  # damaged again under the same number: the first one is not overwritten
        assert newest_restored(saved, lines) == GOOD
        assert {path.name for path in (saved / manifest.SET_ASIDE).iterdir()} == {"30-1", "20-1", "20-2"}


def test_no_good_step_is_an_error_and_not_a_new_start(saved: Path) -> None:
    with undone(saved) as newest:
        for step in (newest, saved / str(GOOD)):
            (step / "config" / "metadata").unlink()
        for _ in range(2):  # nothing is moved, so the second time is the same
            with pytest.raises(ValueError, match=r"step 20: config/metadata is missing; step 10: config/metadata is"):
                newest_restored(saved, [])
        with pytest.raises(ValueError, match=r"no checkpoint in .* has a config that verifies"):
            latest_config(saved)


def test_the_config_comes_from_a_step_that_verifies(saved: Path) -> None:
    assert latest_config(saved) == {"step": NEWEST}
    with undone(saved) as newest:
        (newest / "config" / "metadata").write_text('{"step": 30}')
        assert latest_config(saved) == {"step": GOOD}


def test_other_folders_are_not_steps(saved: Path) -> None:
    with undone(saved):
        for name in ("30.orbax-checkpoint-tmp", "030", "-1", "step_40", "5e3", "٣٠"):
            (saved / name).mkdir()
        (saved / "50").write_text("a file")
        assert newest_restored(saved, []) == NEWEST
        assert (saved / "30.orbax-checkpoint-tmp").is_dir()


def test_a_step_that_the_run_deletes_while_others_are_looked_at_is_not_damage(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for look, command in (("verify", command_line.verify), ("read", command_line.ls)):
        real = getattr(manifest, look)

        def delete_and_look(folder: Path, real: Any = real) -> manifest.Manifest:
            if folder.name == str(NEWEST):
                shutil.rmtree(folder)
            return real(folder)

        with undone(saved), monkeypatch.context() as patch:
            patch.setattr(manifest, look, delete_and_look)
            assert command(saved) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert re.match(rf"step +{GOOD}\b", line) and "DAMAGED" not in line


def test_a_folder_without_checkpoints_is_a_mistake(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the work directory, below which they are."""
    for command in ("ls", "verify"):
        (tmp_path / command).mkdir()
        for hint in ("", f"; did you mean {tmp_path / command / 'checkpoints'}?"):
            monkeypatch.setattr(sys, "argv", ["state", command, str(tmp_path / command)])
            assert command_line.main() == 2
            said = capsys.readouterr()
            assert (said.out, said.err) == ("", f"{tmp_path / command} holds no checkpoint{hint}\n")
            (tmp_path / command / "checkpoints").mkdir(exist_ok=True)
        monkeypatch.setattr(sys, "argv", ["state", command, str(saved)])
        assert command_line.main() == 0 and "step " in capsys.readouterr().out
    (tmp_path / "ls" / manifest.SET_ASIDE / "10").mkdir(parents=True)
    assert command_line.ls(tmp_path / "ls") == 0 and capsys.readouterr().out.endswith("/10\n")
