"""Measured records only grow: each line that was ever committed is still there, in order, at most marked superseded."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.records import DERIVED, MEASURED, RESULTS, Records, is_recorded, put, recorded

pytestmark = pytest.mark.document

ROOT = Path(__file__).resolve().parents[1]
FOLDER = MEASURED.relative_to(ROOT)
FLAG = "superseded"
DERIVED_KEYS = {  # what tells a line from others
    "agreement": ["processes"],
    "compiled": ["kind", "name", "devices", "accum", "strategy"],
    "published_steps": ["gpu", "gpus", "model", "seq", "micro_batch", "global_batch"],
    "full_scale": ["model", "gpus", "strategy", "cluster", "network"],
    "overlap": ["case", "overlap", "rate"],
    "planner_configs": ["config"],
    "planner": ["name", "rate", "timed"],
    "planner_replicas": ["mode", "rate", "run"],
    "planner_gpu": ["size", "side"],
}


# commits of lines whose branch was rebased after the measurement
REBASED = """
0174def 013d686 0227a30 1f47952 2401e5d 3f40649 49e0c21 4cb5ca7 4e8a1e6 5563d42 567095d 5d36e11 5d39e37 61a98ae
7a84196 7b1bf4b 7d2f824 7f49d65 962107f 96aed08 bf07b51 c4afc3c d46d183 d8f1a5a d944131 e0490cc e5074d8 e85ef0c
"""


class HistoryError(Exception):
    """There is no history to compare with, or only the end of it."""


def git(root: Path, *words: str) -> str:
    """Returns what git prints. HistoryError if it fails, or is not there."""
    try:
        done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise HistoryError("there is no git here") from None
    if done.returncode:
        raise HistoryError(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout


def check_history(root: Path) -> None:
    """Raises HistoryError if there is none: no repository, or a shallow clone, which lacks older versions."""
    if Path(git(root, "rev-parse", "--show-toplevel").strip()) != root.resolve():
        raise HistoryError(f"{root} is no git repository of its own")  # an unpacked archive inside another one
    if git(root, "rev-parse", "--is-shallow-repository").strip() == "true":
        raise HistoryError("this clone is shallow: git fetch --unshallow")


def versions(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yields the lines of each committed version of each measured record. HistoryError without a history."""
    check_history(root)
    for entry in git(root, "rev-list", "--objects", "--full-history", "HEAD", "--", str(FOLDER)).splitlines():
        blob, _, name = entry.partition(" ")  # commits and folders are listed too
        if name.endswith(".jsonl"):
            yield Path(name), git(root, "cat-file", "blob", blob).splitlines()


def lost(before: list[str], now: list[str]) -> str | None:
    """Returns the first line of `before` that is not in `now`, in order, as it was or marked; None if all are."""
    left = iter(now)
    return next((old for old in before if not any(is_kept(old, new) for new in left)), None)


def is_kept(old: str, new: str) -> bool:
    """Whether `new` is `old`, or `old` marked as superseded, with a reason."""
    if old == new:
        return True
    before, after = json.loads(old), json.loads(new)
    reason = None if FLAG in before else after.pop(FLAG, None)
    return isinstance(reason, str) and bool(reason.strip()) and list(after.items()) == list(before.items())


def losses(root: Path) -> list[str]:
    """Returns what is wrong: a sentence for each version of a record of which the working tree lacks a line."""
    found = []
    for name, before in versions(root):
        now = (root / name).read_text().splitlines() if (root / name).exists() else []
        if (line := lost(before, now)) is not None:
            found.append(f"{name} had a line that was edited or deleted: {line[:80]}")
    return found


# ----------------------------------------------------------------------------------------------- this repository


WITH_HISTORY = pytest.mark.skipif(
    not (ROOT / ".git").exists(),
    reason="no repository, such as an unpacked archive: the records were not compared with their history",
)


@WITH_HISTORY
def test_no_measured_line_was_ever_edited_or_deleted() -> None:
    """Of any commit since these records are in a folder of their own. A shallow clone fails, saying what it lacks."""
    assert not losses(ROOT)


@WITH_HISTORY
def test_the_commit_that_a_line_names_is_in_the_history() -> None:
    """But for those that are listed, to which none are added."""
    check_history(ROOT)
    named = {line["commit"] for file in RESULTS.glob("*/*.jsonl") for line in recorded(file, superseded=True)}
    gone = named - {*git(ROOT, "rev-list", "HEAD").split()}
    assert {commit[:7] for commit in gone} <= {*REBASED.split()}


@pytest.mark.parametrize("file", sorted(DERIVED.glob("*.jsonl")), ids=lambda file: file.stem)
def test_a_derived_line_stands_once(file: Path) -> None:
    keys = [[line[name] for name in DERIVED_KEYS[file.stem]] for line in recorded(file)]
    assert len({*map(json.dumps, keys)}) == len(keys) > 0


# ------------------------------------------------------------------------------------------------- the comparison

A, B, C = ('{"a": 1, "seconds": 2.5}', '{"a": 2, "seconds": NaN}', '{"a": 3, "seconds": 1e-05}')
OLD = '{"a": 1, "seconds": 2.5, "superseded": "by another program"}'
MARKED = '{"a": 2, "seconds": NaN, "superseded": "by another program"}'


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose first commit has a record of two lines."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q")
    commit(root, [OLD, B])
    return root


def commit(root: Path, lines: list[str] | None) -> None:
    """Commits the lines of a record; None: its deletion."""
    file = root / FOLDER / "speed.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    if lines is None:
        file.unlink()
    else:
        file.write_text("".join(f"{line}\n" for line in lines))
    git(root, "add", "-A")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x")


@pytest.mark.parametrize(
    ("now", "is_kept"),
    [
        *(([OLD, *now], True) for now in ([B, C], [C, B], [C, B, A], [MARKED])),  # added or marked
        ([OLD], False),  # deleted
        ([B, OLD], False),  # in another order
        ([OLD, B.replace("2", "3")], False),  # edited
        ([OLD, MARKED.replace("NaN", "1.0")], False),  # edited and marked
        ([OLD, MARKED.replace("by another program", " ")], False),  # no reason
        ([A, B], False),  # no longer marked
        (None, False),  # the file
    ],
)
def test_what_a_commit_deletes_or_edits_is_lost(repository: Path, now: list[str] | None, is_kept: bool) -> None:
    commit(repository, now)
    found = losses(repository)
    assert is_kept == (not found)
    assert is_kept or "speed.jsonl had a line that was edited or deleted: {" in found[0]


def test_a_merge_that_drops_the_lines_of_a_branch_fails(repository: Path) -> None:
    git(repository, "checkout", "-q", "-b", "other")
    commit(repository, [OLD, B, C])
    git(repository, "checkout", "-q", "-")
    me = ("-c", "user.name=a", "-c", "user.email=a@b")
    git(repository, *me, "merge", "-q", "--no-ff", "-s", "ours", "-m", "x", "other")
    assert len(losses(repository)) == 1


def test_history_that_is_not_there_is_said(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(repository, [OLD, B, C])
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{repository}", str(shallow))
    with pytest.raises(HistoryError, match="shallow: git fetch --unshallow"):
        losses(shallow)
    (repository / "inside").mkdir()
    with pytest.raises(HistoryError, match="no git repository of its own"):
        losses(repository / "inside")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(HistoryError, match="there is no git here"):
        losses(repository)


def test_superseded_lines_are_read_only_where_they_are_asked_for(tmp_path: Path) -> None:
    """So that no table has them, and what they measured is missing and runs again."""
    file = tmp_path / "x.jsonl"
    file.write_text(f"{OLD}\n{C}\n")
    assert recorded(file) == [json.loads(C)]
    assert recorded(file, superseded=True) == [json.loads(OLD), json.loads(C)]
    assert recorded(tmp_path / "none.jsonl") == []
    records = Records({"x": recorded(file, superseded=True)})
    assert records.lines("x") == [json.loads(C)] and len(records.lines("x", superseded=True)) == 2


def test_a_derived_line_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    def line(name: str, keys: Any, value: int) -> dict[str, Any]:
        return {"name": name, "keys": keys, "value": value}

    file = tmp_path / "derived" / "x.jsonl"
    for one in (line("a", {"k": (1,)}, 1), line("b", {}, 2), line("a", {"k": (1,)}, 3), line("a", {}, 4)):
        put(file, one, ("name", "keys"))
    assert recorded(file) == [line("b", {}, 2), line("a", {"k": [1]}, 3), line("a", {}, 4)]


def test_a_line_without_a_value_is_none_with_another_one(tmp_path: Path) -> None:
    """A key of None asks for a line that lacks it, or has None."""
    file = tmp_path / "losses.jsonl"
    file.write_text('{"steps": 5, "seeds": [3]}\n')
    assert is_recorded(file, {"steps": 5, "seeds": (3,), "state": None})
    assert not is_recorded(file, {"steps": 5, "seeds": None})
