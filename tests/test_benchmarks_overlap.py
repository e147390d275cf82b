"""The cases of the table of what overlaps: their configs are accepted, and a derived line is replaced."""

import sys
from pathlib import Path
from typing import Any

import pytest
from running import IGNORED

from configs import command_line
from lab.benchmarks import overlap_table
from lab.benchmarks.overlap_table import CASES, KEY, Case, chosen
from lab.benchmarks.records import put, recorded


def line(case: str, step_s: float) -> dict[str, Any]:
    return {"case": case, "overlap": True, "rate": "100gbit", "step_s": step_s}


def test_a_case_that_is_compiled_again_replaces_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_table, "RESULTS", tmp_path / "overlap.jsonl")
    steps = iter((20.0, 19.0))
    monkeypatch.setattr(overlap_table, "measured", lambda case: [line(case.name, next(steps))])
    other = line("another", 20.0)
    put(tmp_path / "overlap.jsonl", other, KEY)
    monkeypatch.setattr(overlap_table, "CASES", CASES[:1])
    for _ in range(2):
        assert overlap_table.main(["overlap_table"]) == 0
    assert recorded(tmp_path / "overlap.jsonl") == [other, line(CASES[0].name, 19.0)]


def test_without_xla_for_gpus_it_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("planner.compile.WHEELS", tmp_path / "none")
    assert overlap_table.main(["overlap_table", "--only==zero3"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == 2 * ["error: zero3: XLA for GPUs is not installed: make .venv/h100/installed"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.overlap}")
@IGNORED
def test_the_configs_of_the_cases_are_accepted(case: Case) -> None:
    sys.modules.pop("config_config", None)  # ml_collections would load the config file on top of the last one
    config = command_line.parse(["x", *case.flags])
    assert config.sharding.overlap == ("auto" if case.overlap else "off")
    assert chosen(case, "=" + case.name) and not chosen(case, "=" + case.name[:-1])


@pytest.mark.document
def test_the_bounds_of_the_page_are_the_record_s() -> None:
    """Of the steps with an aim of 5 % exposed, three of six reach it; and temporaries grow by 26 % at most."""
    found = {tuple(line[name] for name in KEY): line for line in recorded(overlap_table.RESULTS)}
    exposed = {(case, rate): 1 - x["compute_s"] / x["step_s"] for (case, on, rate), x in found.items() if on}
    names = ["mics(8), hop two int8, micro-batch 32", "mics(8), hop two delayed", "mics(8), local SGD, streaming"]
    aimed = [*((name, "100gbit") for name in names), ("mics(8), hop two delayed, int8", "100gbit")]
    aimed += [("mics(8), micro-batch 16", "400gbit"), ("zero3", "3200gbit")]
    assert [exposed[step] <= 0.05 for step in aimed].count(True) == 3
    for (case, on, rate), with_overlap in found.items():
        assert not on or with_overlap["temporary_bytes"] <= 1.26 * found[case, False, rate]["temporary_bytes"]
