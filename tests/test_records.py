"""Measured records only grow: each line that was ever committed is still there, in order, at most marked superseded."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.records import DERIVED, MEASURED, Records, put, recorded

pytestmark = pytest.mark.document

ROOT = Path(__file__).resolve().parents[1]
FOLDER = MEASURED.relative_to(ROOT)
FLAG = "superseded"
DERIVED_KEYS = {  # what tells a line from others
    "agreement": ["processes"],
    "compiled": ["kind", "name", "devices", "accum", "strategy"],
    "full_scale": ["model", "gpus", "strategy", "cluster", "network"],
    "overlap": ["case", "overlap", "rate"],
    "planner": ["name", "rate", "beside_the_rates"],
}


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


def versions(root: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """Yields the lines of each committed version of each measured record: commit, file and lines.

    HistoryError if that cannot be told: no repository, or a shallow clone, which lacks older versions.
    """
    if Path(git(root, "rev-parse", "--show-toplevel").strip()) != root.resolve():
        raise HistoryError(f"{root} is no git repository of its own")  # an unpacked archive inside another one
    if git(root, "rev-parse", "--is-shallow-repository").strip() == "true":
        raise HistoryError("this clone is shallow: git fetch --unshallow")
    seen = set()
    for commit in git(root, "rev-list", "--full-history", "HEAD", "--", str(FOLDER)).split():
        for entry in git(root, "ls-tree", "-r", commit, "--", str(FOLDER)).splitlines():  # mode, kind, blob, tab, name
            about, _, name = entry.partition("\t")
            if (name, blob := about.split()[2]) not in seen:
                seen.add((name, blob))
                yield commit, Path(name), git(root, "cat-file", "blob", blob).splitlines()


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
    for commit, name, before in versions(root):
        file = root / name
        now = file.read_text().splitlines() if file.exists() else []
        if (line := lost(before, now)) is not None:
            found.append(f"{name} of commit {commit[:7]} has a line that was edited or deleted: {line[:80]}")
    return found


# ----------------------------------------------------------------------------------------------- this repository


def test_no_measured_line_was_ever_edited_or_deleted() -> None:
    """Of any commit since these records are in a folder of their own. A shallow clone fails, saying what it lacks."""
    if not (ROOT / ".git").exists():
        pytest.skip("no repository, such as an unpacked archive: the records were not compared with their history")
    assert not losses(ROOT)


def test_every_record_is_measured_or_derived() -> None:
    """By what writes it, and no file is beside the two folders."""
    measured = {"accuracy", "compression", "cpu_rates", "data_tiers", "dynamic_training", "elastic", "fidelity", "gpu"}
    measured |= {"papers", "pipelines", "reduce_dtype", "strategies"}
    derived = {"agreement", "compiled", "full_scale", "overlap", "planner"}
    derived |= {"planner_curves", "planner_example", "planner_spot"}
    assert {file.name for file in MEASURED.parent.iterdir()} == {"measured", "derived"}
    assert {file.stem for file in MEASURED.iterdir()} | {"gpu"} == measured  # nobody has had a GPU yet
    assert {file.stem for file in DERIVED.iterdir()} == derived and not measured & derived


@pytest.mark.parametrize("file", sorted(DERIVED.glob("*.jsonl")), ids=lambda file: file.stem)
def test_a_derived_line_stands_once(file: Path) -> None:
    keys = [[line[name] for name in DERIVED_KEYS[file.stem]] for line in recorded(file)]
    assert len({*map(json.dumps, keys)}) == len(keys) > 0


def test_a_superseded_line_has_a_reason() -> None:
    for file in MEASURED.iterdir():
        for line in recorded(file, superseded=True):
            assert FLAG not in line or len(line[FLAG]) > 10, file


# ------------------------------------------------------------------------------------------------- the comparison

A, B, C = ('{"a": 1, "seconds": 2.5}', '{"a": 2, "seconds": NaN}', '{"a": 3, "seconds": 1e-05}')
OLD = '{"a": 1, "seconds": 2.5, "superseded": "by another program"}'


@pytest.mark.parametrize("now", [[A, B], [A, B, C], [C, A, B], [OLD, B], [A, C, B, A]])
def test_what_is_added_or_marked_is_kept(now: list[str]) -> None:
    assert lost([A, B], now) is None


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        ([A, B], [B], A),  # deleted
        ([A, B], [A], B),
        ([A, B], [B, A], B),  # in another order
        ([A, A], [A], A),  # one of two
        ([A], [A.replace("2.5", "2.4")], A),  # edited
        ([A], [OLD.replace("2.5", "2.4")], A),  # edited and marked
        ([A], [OLD.replace("by another program", " ")], A),  # no reason
        ([A], [OLD.replace('"by another program"', "true")], A),
        ([OLD], [A], OLD),  # no longer marked
        ([OLD], [OLD.replace("another", "some")], OLD),  # for another reason
        ([A], [], A),
    ],
)
def test_what_is_edited_or_deleted_is_lost(before: list[str], now: list[str], line: str) -> None:
    assert lost(before, now) == line


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose first commit has a record of two lines."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q")
    commit(root, [A, B])
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


def test_commits_that_add_and_mark_pass(repository: Path) -> None:
    commit(repository, [OLD, B])
    commit(repository, [OLD, B, C])
    assert losses(repository) == []


@pytest.mark.parametrize("lines", [[A], [B, A], None])
def test_a_commit_that_loses_a_line_fails_and_so_do_those_after_it(repository: Path, lines: list[str] | None) -> None:
    commit(repository, lines)
    (found,) = losses(repository)
    assert "speed.jsonl of commit" in found and "edited or deleted: {" in found
    commit(repository, [C])
    assert len(losses(repository)) >= 1


def test_the_working_tree_counts_before_it_is_committed(repository: Path) -> None:
    (repository / FOLDER / "speed.jsonl").write_text(f"{A}\n")
    assert len(losses(repository)) == 1


def test_a_merge_that_drops_the_lines_of_a_branch_fails(repository: Path) -> None:
    git(repository, "checkout", "-q", "-b", "other")
    commit(repository, [A, B, C])
    git(repository, "checkout", "-q", "-")
    me = ("-c", "user.name=a", "-c", "user.email=a@b")
    git(repository, *me, "merge", "-q", "--no-ff", "-s", "ours", "-m", "x", "other")
    assert len(losses(repository)) == 1


def test_history_that_is_not_there_is_said(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(repository, [A, B, C])
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
