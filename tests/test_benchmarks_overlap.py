"""The cases of the table of what overlaps: their configs are accepted."""

from pathlib import Path

import pytest

from configs import command_line
from lab.benchmarks import overlap_table
from lab.benchmarks.names import config_file
from lab.benchmarks.overlap_table import CASES, keys_of


def test_without_xla_for_gpus_it_is_an_error_of_one_line_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("planner.compile.WHEELS", tmp_path / "none")
    monkeypatch.setattr(overlap_table, "start_devices", lambda count: None)  # this process has its own
    monkeypatch.setattr(overlap_table, "RESULTS", tmp_path / "overlap.jsonl")
    assert overlap_table.main(["--only==zero3"]) == 1 and overlap_table.main(["--only==zero"]) == 2
    *said, unknown = capsys.readouterr().err.splitlines()
    assert said[0] == "error: zero3, False, 100gbit: XLA for GPUs is not installed: make .venv/h100/installed"
    assert len(said) == 6 and unknown.startswith(
        "error: --only==zero is in no name; there are mics(8), mics(8), micro-"
    )


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
