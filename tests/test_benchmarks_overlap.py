"""The cases of the table of what overlaps: their configs are accepted."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from configs import command_line
from lab.benchmarks import compiled, overlap_table
from lab.benchmarks.names import config_file
from lab.benchmarks.overlap_table import CASES, keys_of
from lab.benchmarks.runner import run_missing


def run_elsewhere(file: Path, _: Path, keys: Any, measure: Any, *, again: bool) -> int:
    return run_missing(file, keys, measure, again=again)


def test_without_xla_for_gpus_it_is_an_error_of_one_line_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("planner.compile.WHEELS", tmp_path / "none")
    monkeypatch.setattr(compiled, "start_devices", lambda count: None)  # this process has its own
    monkeypatch.setattr(compiled, "run_missing", partial(run_elsewhere, tmp_path / "overlap.jsonl"))
    assert overlap_table.main(["--only=1.3 B, zero3"]) == 1 and overlap_table.main(["--only=zero4"]) == 2
    *said, unknown = capsys.readouterr().err.splitlines()
    assert said[0] == "error: 1.3 B, zero3, False, 100gbit: XLA for GPUs is not installed: make .venv/h100/installed"
    assert len(said) == 6 and unknown == "error: --only=zero4 is in no name, such as mics(8)"


def test_the_configs_of_the_cases_are_accepted(subtests: pytest.Subtests) -> None:
    for case in CASES:
        with subtests.test(case=case):
            for overlap in (False, True):
                keys = keys_of(case, overlap=overlap)
                words = [
                    f"--config={config_file(CASES[case]['config'])}",
                    *(f"--config.{key}={keys[key]}" for key in keys),
                ]
                config = command_line.parse(["x", *words])
                assert config.sharding.overlap == ("auto" if overlap else "off")
