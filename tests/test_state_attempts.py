"""Where checkpoints cannot be, and what earlier attempts of the same run left or still do beside a save."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from checkpointing import KEEP_ALL, check_restores, save_small, start

import state.checkpointer
from state import Checkpointer, CheckpointError, manifest


@pytest.mark.parametrize("name", ["run[1]", "a*", "what?", "back\\slash", "run[1]/below"])
def test_a_path_that_orbax_cannot_restore_from_is_refused(tmp_path: Path, name: str) -> None:
    character = next(c for c in "[*?\\" if c in name)
    with pytest.raises(ValueError, match=re.escape(f"no checkpoint can be restored from {tmp_path / name}")) as caught:
        Checkpointer(tmp_path / name, KEEP_ALL)
    assert f"because of {character} in the path; choose a directory" in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_a_path_that_looks_like_no_pattern_is_none(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "a]{b,c}~ %20#é:1!$&", KEEP_ALL) as checkpointer:
        save_small(checkpointer, 1)
        check_restores(checkpointer, 1)


def test_what_orbax_did_not_merge_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It only warns if it finds nothing to merge, and nobody can restore the rest."""
    monkeypatch.setattr(state.checkpointer, "check_path", lambda directory: None)
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


def test_a_save_that_was_killed_before_its_rename_is_in_nobodys_way(tmp_path: Path) -> None:
    """Not even if the next attempt has the same process id, as in a pod, and the first one's step is complete."""

    def attempt(then: str) -> int:
        process = start(__file__, tmp_path, then)
        process.communicate(timeout=120)
        return process.returncode

    assert attempt("is killed") == -signal.SIGKILL
    left = [path.parent.name for path in (tmp_path / manifest.UNFINISHED).glob(f"*/*/{manifest.STATE_FILE}")]
    assert manifest.step_numbers(tmp_path) == [] and left == ["state"]
    assert list(tmp_path.rglob("manifest.partial"))
    assert attempt("ends") == 0
    assert not (tmp_path / manifest.UNFINISHED).exists()
    with Checkpointer(tmp_path, KEEP_ALL, report=pytest.fail) as checkpointer:
        check_restores(checkpointer, 1)


def save_as_process_one(directory: Path, then: str) -> None:
    """Saves a step; on request it is killed between Orbax's end and the rename, with a temporary file in the step."""
    pid = os.getpid()
    os.getpid = lambda: 1
    if then == "is killed":
        Path.rename = lambda *_: os.kill(pid, signal.SIGKILL)
    with Checkpointer(directory, KEEP_ALL) as checkpointer:
        save_small(checkpointer, 1)


if __name__ == "__main__":
    save_as_process_one(Path(sys.argv[1]), sys.argv[2])
