"""The runner of the benchmarks: what a record lacks is run, in turn, and a failed run is one line."""

from pathlib import Path
from typing import Any

import pytest

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


def test_a_bad_rate_is_an_error_of_one_line() -> None:
    assert checked_rates("1gbit,200mbit") == ["1gbit", "200mbit"]
    with pytest.raises(ValueError, match="^--rate=fast"):
        checked_rates("1gbit,fast")
