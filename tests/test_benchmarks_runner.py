"""The runner of the benchmarks: what a record lacks is run, in turn, and a failed run is one line."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lab.benchmarks import checkpoints, runner
from lab.benchmarks.runner import FailedRunError, Key, alternating, checked_rates, run_missing
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


def test_what_is_measured_again_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep would take the finished run of an earlier commit for this one."""
    monkeypatch.setattr(runner, "WORKDIR", tmp_path)
    found: list[list[Path]] = []

    def run(config: str, overrides: list[Any], *, workdir: Path, **_: Any) -> Any:
        (planned,) = runner.plan(config, overrides, workdir=workdir)
        found.append([*planned.run_dir.rglob("*")])
        planned.run_dir.mkdir(parents=True)
        (planned.run_dir / "summary.json").write_text(json.dumps({"exit_reason": "finished"}))
        return [runner.sweep.record(planned, runner.State.FINISHED, "", "step_time_s")]

    monkeypatch.setattr(runner.sweep, "run", run)
    for _ in range(2):
        runner.train("again", str(runner.ROOT / "configs" / "quickstart.py"), {"num_steps": 20})
    assert found == [[], []]


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


def test_a_disk_is_unmounted_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(checkpoints, "_run", lambda *words: ran.append(words[0]) or "/dev/null")
    monkeypatch.setattr(checkpoints, "GROUP", tmp_path / "group")
    monkeypatch.setattr(checkpoints.Path, "read_text", lambda _: "7:0")  # of /sys/block
    with pytest.raises(KeyboardInterrupt), checkpoints.disk(tmp_path):
        raise KeyboardInterrupt
    assert ran[-2:] == ["umount", "losetup"]


def test_a_bad_rate_is_an_error_of_one_line() -> None:
    assert checked_rates("1gbit,200mbit") == ["1gbit", "200mbit"]
    with pytest.raises(ValueError, match="^--rate=fast"):
        checked_rates("1gbit,fast")
