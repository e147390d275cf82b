"""The runner of the benchmarks: what a record lacks is run, in turn, and a failed run is one line."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lab.benchmarks import runner
from lab.benchmarks.runner import FailedRunError, Key, alternating, run_missing
from lab.records import recorded


def test_every_choice_is_run_once_before_any_is_run_again() -> None:
    keys = alternating(2, rate=["1gbit"], name=("a", "b"))
    assert keys == [{"rate": "1gbit", "name": n, "repetition": r} for r in (0, 1) for n in ("a", "b")]


def test_what_the_record_lacks_is_run_and_a_failure_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, ran = tmp_path / "x.jsonl", list[Any]()

    def measure(key: Key) -> dict[str, Any]:
        ran.append(key["name"])
        if key["name"] == "b" and ran.count("b") == 1:
            raise FailedRunError("no\nluck")
        return {"seconds": 1.5}

    keys = alternating(1, name=("a", "b", "c"))
    assert run_missing(file, keys, measure) == 1
    assert capsys.readouterr().err == "error: b, 0: no luck\n"
    assert run_missing(file, keys, measure) == 0
    assert ran == ["a", "b", "c", "b"]
    assert run_missing(file, keys[:1], measure, again=True) == 0  # in its place
    lines = recorded(file)
    assert [line["name"] for line in lines] == ["c", "b", "a"]
    assert all(line["seconds"] == 1.5 and {"commit", "machine", "jax", "repetition"} <= line.keys() for line in lines)


def test_lines_name_the_code_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages, records and tests may differ; where the code does, before a run or after one, nothing more is run."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)

    def git(*words: str) -> str:
        me = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *me, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    results = tmp_path / "results"
    code, record, page = tmp_path / "train.py", results / "x.jsonl", tmp_path / "docs" / "x.txt"
    for file in (code, record, page):
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "x")
    commit = git("rev-parse", "HEAD").strip()
    for name, value in {"ROOT": tmp_path, "RESULTS": results, "machine": lambda: {"commit": commit}}.items():
        monkeypatch.setattr(runner, name, value)

    def measure(key: Key) -> dict[str, Any]:
        if key["repetition"]:
            code.write_text("pass")
        return {}

    keys = alternating(3)
    page.write_text("edited")
    with pytest.raises(ValueError, match=f"^train.py is not as in commit {commit[:7]}"):
        run_missing(record, keys, measure)
    assert [line["repetition"] for line in recorded(record)] == [0, 1]
    assert run_missing(tmp_path / "trial.jsonl", keys, measure) == 0  # no record


def test_a_run_begins_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an earlier run would count as those of this one."""
    workdir = tmp_path / "run"

    def start(command: list[str]) -> str:
        assert command[0] == "before" and f"--workdir={workdir}" in command and not workdir.exists()
        workdir.mkdir()
        (workdir / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        return ""

    monkeypatch.setattr(runner, "started", start)
    for _ in range(2):
        run, command = runner.train(workdir, "configs/quickstart.py", {"num_steps": 1}, ["before"])
        assert [row["loss"] for row in run.rows] == [2.0] and command.endswith("--config.num_steps=1")
