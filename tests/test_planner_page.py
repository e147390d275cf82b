"""The planner's page: one file, nested as HTML must be, with the numbers of the plans that the text has."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.parsed_page import EVIL, PIXEL, Page
from support.planning import FILE, WORDS, own_cache, recorded_plan  # noqa: F401 (fixture)
from support.running import IGNORED

from lab.benchmarks.planner_records import RECORDS
from planner import __main__ as planner
from planner.report import Plan, candidate_rows, changed_rows, from_json, plan_page, scaling_rows, time_rows
from training.metrics.units import format_bytes

pytestmark = IGNORED


def page_of(plans: list[Plan | str], nodes: list[int], spot: str = "") -> Page:
    pictures = {"timeline": PIXEL, "curves": PIXEL}
    html = plan_page("bert_10b", plans, nodes, pictures, "python -m planner", spot)
    page = Page(html)
    assert all(address.startswith("data:") for address in page.addresses)  # it needs nothing else
    return page


def test_a_plan_of_several_candidates() -> None:
    plan = recorded_plan()
    page = page_of([plan], [plan.nodes])
    for row in [*candidate_rows(plan), *time_rows(plan.best)]:
        assert " | ".join(cell for cell in row if cell) in page.text, row
    for name, size in plan.best.memory.parts.items():
        assert f"{name} {format_bytes(size)}" in page.text
    assert plan.counts and f"{plan.counts.candidates} candidates" in page.text and plan.error_bar in page.text
    assert page.tags.count("img") == 1  # the timeline
    assert "Scaling with nodes" not in page.text
    for head, *rows in (candidate_rows(plan), changed_rows(plan)):  # on a phone a cell is beside its column's name
        assert {cell for row in rows for cell in zip(head, row, strict=True) if cell[1]} <= {*page.cells}


def test_plans_of_several_numbers_of_nodes() -> None:
    """One without a plan says why, and the rest is of the largest."""
    first, last = from_json(RECORDS["spot"].read_text())
    page = page_of(["nothing fits", first, last], [4, first.nodes, last.nodes], spot="goodput 76.8 %")
    for row in scaling_rows(["nothing fits", first, last], [4, first.nodes, last.nodes]):
        assert " | ".join(cell for cell in row if cell) in page.text, row
    assert last.title in page.text and first.title not in page.text and "goodput 76.8 %" in page.text
    assert page.tags.count("img") == 2  # and the curves


def test_a_bar_is_as_long_as_its_parts() -> None:
    plan = recorded_plan()
    html = plan_page("x", [plan], [16], {"timeline": PIXEL}, "", "")
    memory, times = [part.partition("</div>")[0] for part in html.split('<div class="bar">')[1:]]
    widths = [sum(float(width.partition("%")[0]) for width in bar.split("width:")[1:]) for bar in (memory, times)]
    best = plan.best
    assert widths[0] == pytest.approx(100 * best.memory.total / best.memory.capacity, abs=0.01)
    assert 99 < widths[1] <= 100.01


def test_names_are_escaped() -> None:
    plan = recorded_plan()
    page = page_of([replace(plan, title=EVIL, notes=(EVIL,), error_bar=EVIL)], [16], spot=EVIL)
    assert "script" not in page.tags and page.text.count("alert") == 4


@pytest.mark.slow
def test_the_program_writes_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    words = ("--cluster=emulated", "--nodes=4", "--strategy=mics(2),zero3", f"--html={file}")
    assert planner.main(["planner", *WORDS, *words]) == 0
    assert f"page: {file}" in capsys.readouterr().out
    page = Page(file.read_text())
    assert "mics(2)" in page.text and FILE in page.text and page.tags.count("img") == 1
    assert planner.main(["planner", *WORDS, "--html=/nowhere/plan.html"]) == 2
    assert "choose another --html" in capsys.readouterr().err
