"""Records: a line names a commit that exists, derived lines stand once, no measured line is edited or lost."""

import json
import lzma
import re
from pathlib import Path

import pytest
from support.repositories import commit, git, without_variables  # noqa: F401 (a fixture)

from lab import pages, records
from lab.records import (
    ARCHIVE,
    COMMIT_LOST,
    DERIVED,
    MEASURED,
    RESULTS,
    Records,
    add,
    archived,
    is_recorded,
    put,
    recorded,
    supersede,
)

ROOT = Path(__file__).resolve().parents[1]
DERIVED_KEYS = {  # the keys by which a line is found
    "agreement": ["processes"],
    "compiled": ["kind", "name", "devices", "accum", "strategy"],
    "published_steps": ["gpu", "gpus", "model", "seq", "micro_batch", "global_batch"],
    "published_tpu_steps": ["tpu", "chips_per_slice", "slices", "model"],
    "full_scale": ["model", "gpus", "strategy", "cluster", "network"],
    "overlap": ["case", "overlap", "rate"],
    "planner_configs": ["config"],
    "planner": ["name", "rate", "timed"],
    "planner_replicas": ["mode", "rate", "run"],
    "planner_gpu": ["size", "side"],
}


# ------------------------------------------------------------------------------------------------ the records here


def test_a_line_names_a_commit_of_the_history_or_is_marked_as_lost() -> None:
    """Skipped in an unpacked archive and in a shallow clone, which lack the history."""
    if not (ROOT / ".git").exists() or git(ROOT, "rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("no history")
    history = {*git(ROOT, "rev-list", "HEAD").split()}
    lines = [(file.name, line) for file in RESULTS.glob("*/*.jsonl") for line in recorded(file)]
    wrong = [(name, line["commit"]) for name, line in lines if (line["commit"] in history) == (COMMIT_LOST in line)]
    assert len(lines) > 1000 and not wrong


def content(line: str) -> str:
    """Returns a line without the marks that it may get later, in one form."""
    marks = ("record", COMMIT_LOST, "superseded")
    return json.dumps({key: value for key, value in json.loads(line).items() if key not in marks}, sort_keys=True)


@pytest.mark.release  # a clone may be shallow
def test_every_measured_line_of_the_history_is_a_record_or_archived() -> None:
    """No commit has edited or deleted one; a line may get marks, and move to the archive."""
    archive = lzma.decompress(ARCHIVE.read_bytes()).decode().splitlines()
    today = {*map(content, archive)}.union(
        *(map(content, file.read_text().splitlines()) for file in MEASURED.iterdir())
    )
    assert git(ROOT, "rev-parse", "--is-shallow-repository") == "false", "git fetch --unshallow"
    versions = git(ROOT, "rev-list", "--objects", "--full-history", "HEAD", "--", str(MEASURED.relative_to(ROOT)))
    blobs = [entry.partition(" ") for entry in versions.splitlines() if entry.endswith(".jsonl")]
    lost = {
        name
        for blob, _, name in blobs
        if not {*map(content, git(ROOT, "cat-file", "blob", blob).splitlines())} <= today
    }
    assert len(blobs) > 50 and not lost


def dates(file: Path) -> str:
    """Returns the days and the names of the oldest and the newest commit of a record's lines, as pages have them."""
    commits = {line["commit"] for line in recorded(file) if COMMIT_LOST not in line}
    times = git(ROOT, "log", "--no-walk", "--format=%ct %cs %H", *commits).splitlines()
    days = [f"{day} ({commit[:7]})" for _, day, commit in map(str.split, sorted(times))]
    return " to ".join(dict.fromkeys([days[0], days[-1]]))


@pytest.mark.document
def test_pages_date_their_records() -> None:
    """The lists at the start of pages of results."""
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "results").glob("*.md"))
    dated = dict(re.findall(r"(?m)^- `(\w+)\.jsonl`: (.*)$", text))
    assert dated == {name: dates(MEASURED / f"{name}.jsonl") for name in dated} and "accuracy" in dated


def test_a_derived_line_stands_once() -> None:
    for file in DERIVED.glob("*.jsonl"):
        keys = [[line[name] for name in DERIVED_KEYS[file.stem]] for line in recorded(file)]
        assert len({*map(json.dumps, keys)}) == len(keys) > 0, file


# ------------------------------------------------------------------------------------------------- lab.records


@pytest.mark.usefixtures("no_repository_around")
def test_a_new_line_is_refused_unless_its_commit_is_an_ancestor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebase during a run removes the commit that the run was started at; the refused line is in the message."""
    root = tmp_path / "repository"
    monkeypatch.setattr(records, "RESULTS", root / "lab" / "benchmarks" / "results")
    file, elsewhere = records.RESULTS / "measured" / "new.jsonl", tmp_path / "new.jsonl"
    file.parent.mkdir(parents=True)
    first, rebased = commit(root), commit(root)
    git(root, "reset", "-q", "--hard", first)
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


def test_outdated_lines_move_to_the_archive_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no table has them, and a measurement that is missing runs again."""
    monkeypatch.setattr(records, "ARCHIVE", tmp_path / "superseded.jsonl.xz")
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1, "seconds": NaN}\n{"a": 2}\n{"a": 3}\n')
    assert archived("x") == [] == recorded(tmp_path / "none.jsonl")
    for number in (3, 1):
        supersede(file, lambda line, number=number: line["a"] == number, "another program")
    assert recorded(file) == [{"a": 2}] and archived("y") == []
    assert [(line["a"], line["superseded"]) for line in archived("x")] == [(n, "another program") for n in (3, 1)]


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
