"""The table of what overlaps, from lines of a record, and its cases."""

import sys
from pathlib import Path
from typing import Any

import pytest
from running import IGNORED

from benchmarks import overlap_table
from benchmarks.overlap_table import BEGIN, CASES, END, KEY, PAGE, Case, aims, chosen, table
from benchmarks.records import put, recorded
from configs import command_line

SECONDS = {"hop_two_s": 6.049, "hop_two_exposed_s": 5.0, "gathers_hop_one_s": 1.0, "gathers_hop_one_exposed_s": 0.25}


def line(case: str, *, overlap: bool, rate: str = "100gbit", step_s: float = 20.0) -> dict[str, Any]:
    sizes = {"temporary_bytes": 17_900_000_000, "compute_s": 14.4, "step_s": step_s, "commit": "a", "machine": "b"}
    slow = {"slow_compute_s": 24.0, "slow_step_s": 25.0}
    return {"case": case, "overlap": overlap, "rate": rate, **SECONDS, **sizes, **slow}


def test_a_row_a_case_and_rate() -> None:
    lines = [line("zero3", overlap=True), line("mics(8)", overlap=False)]
    assert table(lines).splitlines()[2:] == [
        "| mics(8) | off | 100 | 14.40 s | 6.05 (5.00) | 1.00 (0.25) | 20.00 s | 24.00 | 1.00 | 25.00 | 17.9 GB |",
        "| zero3 | on | 100 | 14.40 s | 6.05 (5.00) | 1.00 (0.25) | 20.00 s | 24.00 | 1.00 | 25.00 | 17.9 GB |",
    ]


def test_what_had_an_aim_is_shown_with_both_speeds_of_kernels() -> None:
    lines = [line("zero3", overlap=on, rate="3200gbit") for on in (True, False)]
    assert aims([*lines, line("mics(16)", overlap=True)]).splitlines() == [
        "| step, with overlap | link, Gbit/s | exposed, 795 TFLOP/s | exposed, 450 TFLOP/s |",
        "|---|---|---|---|",
        "| zero3 | 3200 | 28.0 % | 4.0 % |",
    ]


def test_only_the_text_between_the_marks_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    monkeypatch.setattr(overlap_table, "PAGE", page)
    overlap_table.write([line("mics(8)", overlap=True)])
    assert page.read_text().startswith(f"before\n{BEGIN}\n\n| step, with") and page.read_text().endswith(
        f"{END}\nafter\n"
    )


def test_a_case_that_is_compiled_again_replaces_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_table, "RESULTS", tmp_path / "overlap.jsonl")
    monkeypatch.setattr(overlap_table, "write", lambda lines: None)
    steps = iter((20.0, 19.0))
    monkeypatch.setattr(overlap_table, "measured", lambda case: [line(case.name, overlap=True, step_s=next(steps))])
    other = line("another", overlap=True)
    put(tmp_path / "overlap.jsonl", other, KEY)
    monkeypatch.setattr(overlap_table, "CASES", CASES[:1])
    for _ in range(2):
        assert overlap_table.main(["overlap_table"]) == 0
    assert recorded(tmp_path / "overlap.jsonl") == [other, line(CASES[0].name, overlap=True, step_s=19.0)]


def test_without_xla_for_gpus_it_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("planner.compile.WHEELS", tmp_path / "none")
    monkeypatch.setattr(overlap_table, "write", lambda lines: None)
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
def test_the_page_has_the_table_of_the_record() -> None:
    text, lines = PAGE.read_text(), recorded(overlap_table.RESULTS)
    assert table(lines) in text and aims(lines) in text, "python -m benchmarks.overlap_table --report"
    shares = [float(row.split(" | ")[2].removesuffix(" %")) for row in aims(lines).splitlines()[2:]]
    assert (len(shares), sum(share <= 5 for share in shares)) == (6, 3) and "three of six reach it" in text
