"""Records name commits that exist, and measured ones only grow: a line of any commit is still there, at most marked."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import pages, records
from lab.records import COMMIT_LOST, DERIVED, MEASURED, RESULTS, SUPERSEDED, Records, add, is_recorded, put, recorded

ROOT = Path(__file__).resolve().parents[1]
FOLDER = MEASURED.relative_to(ROOT)
ME = ("-c", "user.name=a", "-c", "user.email=a@b")
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
    """Whether `new` is `old`, or `old` with more marks, each with a reason."""
    before, after = json.loads(old), json.loads(new)
    reasons = [after.pop(mark) for mark in (SUPERSEDED, COMMIT_LOST) if mark in after and mark not in before]
    said = all(isinstance(reason, str) and reason.strip() for reason in reasons)
    return old == new or (bool(reasons) and said and list(after.items()) == list(before.items()))


def losses(root: Path) -> list[str]:
    """Returns a sentence for each version of a record of which the working tree lacks a line."""
    found = []
    for name, before in versions(root):
        now = (root / name).read_text().splitlines() if (root / name).exists() else []
        if (line := lost(before, now)) is not None:
            found.append(f"{name} had a line that was edited or deleted: {line[:80]}")
    return found


# ----------------------------------------------------------------------------------------------- this repository


WITH_HISTORY = pytest.mark.usefixtures("history")


@pytest.fixture
def history() -> None:
    """An unpacked archive has none."""
    if not (ROOT / ".git").exists():
        pytest.skip("no repository: the records were not compared with their history")


@pytest.mark.document
@WITH_HISTORY
def test_no_measured_line_was_ever_edited_or_deleted() -> None:
    """Of any commit since these records are in a folder of their own. A shallow clone fails, saying what it lacks."""
    assert not losses(ROOT)


@WITH_HISTORY
def test_a_line_names_a_commit_of_the_history_or_says_that_it_is_gone() -> None:
    try:
        check_history(ROOT)
    except HistoryError as error:
        pytest.skip(str(error))  # such as a shallow clone
    history = {*git(ROOT, "rev-list", "HEAD").split()}
    lines = [(file.name, line) for file in RESULTS.glob("*/*.jsonl") for line in recorded(file, superseded=True)]
    wrong = [(name, line["commit"]) for name, line in lines if (line["commit"] in history) == (COMMIT_LOST in line)]
    assert len(lines) > 1000 and not wrong


def test_a_derived_line_stands_once() -> None:
    for file in DERIVED.glob("*.jsonl"):
        keys = [[line[name] for name in DERIVED_KEYS[file.stem]] for line in recorded(file)]
        assert len({*map(json.dumps, keys)}) == len(keys) > 0, file


# ------------------------------------------------------------------------------------------------- the comparison

A, B, C = ('{"a": 1, "seconds": 2.5}', '{"a": 2, "seconds": NaN}', '{"a": 3, "seconds": 1e-05}')
OLD = '{"a": 1, "seconds": 2.5, "superseded": "by another program"}'
MARKED = '{"a": 2, "seconds": NaN, "superseded": "by another program"}'
GONE = '{"a": 1, "seconds": 2.5, "superseded": "by another program", "commit_lost": "a rebase removed it"}'


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
    git(root, *ME, "commit", "-q", "--allow-empty", "-m", "x")


@pytest.mark.document
def test_a_commit_that_deletes_or_edits_a_line_is_found(repository: Path) -> None:
    first = git(repository, "rev-parse", "HEAD").strip()
    for now, kept in [
        *(([OLD, *now], True) for now in ([B, C], [C, B], [C, B, A], [MARKED])),  # added or marked
        ([GONE, B], True),
        ([OLD], False),  # deleted
        ([B, OLD], False),  # in another order
        ([OLD, B.replace("2", "3")], False),  # edited
        ([OLD, MARKED.replace("NaN", "1.0")], False),  # edited and marked
        ([OLD, MARKED.replace("by another program", " ")], False),  # no reason
        ([A, B], False),  # no longer marked
        (None, False),  # the file
    ]:
        git(repository, "reset", "-q", "--hard", first)
        commit(repository, now)
        found = losses(repository)
        assert kept == (not found), now
        assert kept or "speed.jsonl had a line that was edited or deleted: {" in found[0]


@pytest.mark.document
def test_a_merge_that_drops_the_lines_of_a_branch_is_found(repository: Path) -> None:
    git(repository, "checkout", "-q", "-b", "other")
    commit(repository, [OLD, B, C])
    git(repository, "checkout", "-q", "-")
    git(repository, *ME, "merge", "-q", "--no-ff", "-s", "ours", "-m", "x", "other")
    assert len(losses(repository)) == 1


@pytest.mark.document
def test_a_history_that_is_missing_is_named(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# ------------------------------------------------------------------------------------------------- lab.records


def test_a_new_line_is_refused_unless_its_commit_is_an_ancestor(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebase during a run removes the commit that the run was started at; the refused line is in the message."""
    monkeypatch.setattr(records, "RESULTS", repository / FOLDER.parent)
    file, elsewhere = repository / FOLDER / "new.jsonl", tmp_path / "new.jsonl"
    git(repository, "checkout", "-q", "-b", "other")
    commit(repository, [OLD, B, C])
    rebased = git(repository, "rev-parse", "HEAD").strip()
    git(repository, "reset", "-q", "--hard", "HEAD~")
    first = git(repository, "rev-parse", "HEAD").strip()
    commit(repository, [OLD, B])
    for write in (add, lambda file, line: put(file, line, ["seconds"])):
        for name in (rebased, "0" * 40, None):
            short = name and name[:7]
            with pytest.raises(ValueError, match=rf'its commit \({short}\) is not an ancestor of HEAD; .*"seconds": 2'):
                write(file, {"seconds": 2, "commit": name})
        write(file, {"seconds": 1, "commit": first})
        write(elsewhere, {"seconds": 1, "commit": rebased})  # not a record
    add(file, {"seconds": 3, "commit": rebased, COMMIT_LOST: "a rebase removed it"})  # an old line, which stays
    put(file, {"seconds": 4, "commit": first}, ["seconds"])
    assert [line["commit"] for line in recorded(file)] == [first, rebased, first] and len(recorded(elsewhere)) == 1


def test_a_table_says_that_a_rebase_removed_the_commits_of_its_lines() -> None:
    found = Records({"old": [{"a": 1, COMMIT_LOST: "x"}, {"a": 1}, {"a": 2, COMMIT_LOST: "x"}], "new": [{"a": 1}]})

    def text(*names: str, **key: int) -> str:
        return pages.with_note(found, lambda: ", ".join(str(len(found.lines(name, **key))) for name in names))

    assert text("new", "old", "old").split("\n\n") == [
        "1, 3, 3",
        "Lines whose commit a rebase removed are among the records: 2 of `old.jsonl`.",
    ]
    assert "1 of `old.jsonl`" in text("old", a=2) and text("new") == "1"


def test_superseded_lines_are_read_only_where_they_are_asked_for(tmp_path: Path) -> None:
    """So that no table has them, and what they measured is missing and runs again."""
    file = tmp_path / "x.jsonl"
    file.write_text(f"{OLD}\n{C}\n")
    assert recorded(file) == [json.loads(C)]
    assert recorded(file, superseded=True) == [json.loads(OLD), json.loads(C)]
    assert recorded(tmp_path / "none.jsonl") == []
    found = Records({"x": recorded(file, superseded=True)})
    assert found.lines("x") == [json.loads(C)] and len(found.lines("x", superseded=True)) == 2


def test_a_derived_line_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "derived" / "x.jsonl"
    for name, keys, value in (("a", {"k": (1,)}, 1), ("b", {}, 2), ("a", {"k": (1,)}, 3), ("a", {}, 4)):
        put(file, {"name": name, "keys": keys, "value": value}, ("name", "keys"))
    found = [(line["name"], line["keys"], line["value"]) for line in recorded(file)]
    assert found == [("b", {}, 2), ("a", {"k": [1]}, 3), ("a", {}, 4)]


def test_a_line_without_a_value_is_none_with_another_one(tmp_path: Path) -> None:
    """A key of None asks for a line that lacks it, or has None."""
    file = tmp_path / "losses.jsonl"
    file.write_text('{"steps": 5, "seeds": [3]}\n')
    assert is_recorded(file, {"steps": 5, "seeds": (3,), "state": None})
    assert not is_recorded(file, {"steps": 5, "seeds": None})
