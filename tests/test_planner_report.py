"""What the planner says of a plan: tables of at most 120 columns, changes with their cost in loss, and a page."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.parsed_page import EVIL, PIXEL, Page
from support.planning import FILE, WORDS, one_row, own_cache, recorded_plan, small  # noqa: F401 (fixture)
from support.refusals import refused
from support.running import IGNORED

from configs import losses
from lab.benchmarks.planner_records import RECORDS, curves
from planner import __main__ as planner
from planner import clusters
from planner.candidates import of_strategies
from planner.day import DAY_S, Downtime
from planner.predict import Prediction
from planner.rates import rows
from planner.report import (
    NO_LOSS,
    Plan,
    candidate_rows,
    changed_rows,
    from_json,
    plan_page,
    plan_text,
    run_text,
    scaling_rows,
    scaling_text,
    time_rows,
    to_json,
    to_loss_rows,
)
from training.metrics.units import format_bytes

pytestmark = IGNORED

LONG = "all_reduce=int8+all_gather_inter=int8+reduce_scatter_inter=int8+inner_steps=50"


def example() -> Plan:
    return replace(recorded_plan(), notes=())


def named(words: Sequence[str], seconds: Sequence[float]) -> tuple[Prediction, ...]:
    found = zip(of_strategies(words, small()), seconds, strict=True)
    return tuple(replace(example().best, candidate=candidate, step_s=step_s) for candidate, step_s in found)


def test_json_comes_back() -> None:
    text = RECORDS["example"].read_text()
    plans = from_json(text)
    assert to_json(plans) + "\n" == text and plans[0].counts and plans[0].changed and plans[0].day


def test_a_plan_has_the_steps_tokens_time_and_cost_of_the_run() -> None:
    plan = replace(example(), steps=1000, day=())
    best = replace(plan.best, step_s=36.0, tokens_per_s=1e6, usd_on_demand=100.0)
    lost = Downtime(name="checkpoints", times=2.0, each_s=DAY_S / 4, about="")
    plan = replace(plan, predictions=(best,), replicas=replace(best, step_s=72.0))
    assert run_text(plan) == "the run: 1,000 steps, 36.0 G tokens, 10h 00m of steps, 3,600 $"
    with_losses = (
        "the run: 1,000 steps, 36.0 G tokens, 10h 00m of steps, 20h 00m with what a day loses besides, 7,200 $"
    )
    assert run_text(replace(plan, day=(lost,))) == with_losses
    free = replace(plan, predictions=(replace(best, usd_on_demand=None),))
    assert run_text(free) == "the run: 1,000 steps, 36.0 G tokens, 10h 00m of steps"
    assert [row[0] for row in candidate_rows(plan)] == ["", "1", ""] and "1m 12s" in candidate_rows(plan)[2]


def test_tables_fit_120_columns() -> None:
    plan = replace(example(), predictions=named([f"mics(64)+{LONG}", "zero3"], [1, 2]))
    plan = replace(plan, changed=named([f"mics(64)+{LONG}"], [0.5]))
    lines = plan_text(plan).splitlines()
    assert max(map(len, lines)) <= 120
    assert lines.count(f"   +{LONG}") == 2  # below its row in both tables, as --strategy takes it
    assert [line.split()[:2] for line in lines if line.startswith(("1  ", "2  "))] == [
        ["1", "mics(64)"],
        ["2", "zero3"],
        ["1", "mics(64)"],
    ]
    several = scaling_text(["a + b do not fit", plan], [1, 16]).splitlines()
    assert max(map(len, several)) <= 120 and several[1].endswith("a + b do not fit") and LONG in several[3]


AVERAGES = {"local_sgd.inner_steps": "10", "local_sgd.outer_learning_rate": "1.0", "local_sgd.outer_momentum": "0.0"}


def test_changes_are_printed_with_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several records the one with the highest mean, with its model."""
    means = [0.001, 0.039, -0.01]
    int8 = [one_row(setting={"compression.all_reduce": "int8"}, mean=mean, parameters=300_000) for mean in means]
    monkeypatch.setattr(losses, "rows", lambda: [*int8, one_row(setting=AVERAGES)])
    words = ["hsdp+all_reduce=int8", "hsdp+inner_steps=10", "hsdp+inner_steps=10+outer_momentum=0.6"]
    plan = replace(example(), predictions=named(["hsdp"], [10.0]), changed=named(words, [8.0, 5.0, 4.0]))
    _, _, table = plan_text(replace(plan, optimizer="adamw")).partition("with another result than the config's:\n")
    head, *lines = table.partition("loss:")[0].splitlines()
    names = ["strategy", "micro", "gather", "memory", "step", "shorter", "exposed", "loss", "recorded", "on"]
    assert head.split() == names
    found = [line for line in lines if line[:1].isdigit()]
    assert [row.split(" s  ")[1].split()[0] for row in found] == ["20.0", "50.0", "60.0"]  # per cent shorter
    costs = [
        "+0.039 (+0.200 to +0.200)  0.3 M parameters",
        "+0.200 (+0.200 to +0.200)    2 M parameters",
        "not recorded",
    ]
    assert all(line.endswith(cost) for line, cost in zip(found, costs, strict=True))
    assert "cheapest way" not in table  # none of them reaches the loss
    unknown = plan_text(replace(plan, optimizer=""))  # no record holds for the run
    assert "0.200" not in unknown and "recorded on" not in unknown and NO_LOSS in " ".join(unknown.split())


def test_the_cheapest_way_to_the_loss_has_the_fewest_steps_times_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    int8, delayed = {"compression.all_reduce": "int8"}, {"compression.delayed": "True"}
    rows = [one_row(setting=int8, steps=1.0), one_row(setting=int8, steps=1.5, seeds=1, parameters=300_000)]
    rows += [one_row(setting=AVERAGES, steps=1.4), one_row(setting=delayed, steps=0.1), one_row(setting=delayed)]
    monkeypatch.setattr(losses, "rows", lambda: rows)
    plan = replace(example(), predictions=named(["hsdp"], [10.0]), steps=100, optimizer="adamw")
    muon = {"compression.all_reduce": "int4", "optimizer.name": "muon"}
    rows += [one_row(setting=muon, steps=0.5)]
    words = ["hsdp+all_reduce=int8", "hsdp+inner_steps=10", "hsdp+delayed=True", "hsdp+all_reduce=bf16"]
    words.insert(0, "hsdp+all_reduce=int4+optimizer.name=muon")
    plan = replace(plan, changed=named(words, [1.0, 8.0, 5.0, 1.0, 1.0]))
    head, *found = to_loss_rows(plan)
    assert head == ["", "strategy", "micro", "step", "steps", "takes", "costs", "recorded on"]
    usd_per_s = clusters.CLUSTERS["p4d.24xlarge"].on_demand * 16 / 3600
    # averages: 140 steps of 5 s; dense: 100 of 10; int8: by the record that needs most, 150 of 8
    expected = [
        ("hsdp+inner_steps=10", "140", "11m 40s", 700, "text, 2 M parameters, 3 seeds"),
        ("hsdp", "100", "16m 40s", 1000, ""),
        ("hsdp+all_reduce=int8", "150", "20m 00s", 1200, "text, 0.3 M parameters, 1 seed"),
        # the fastest
        ("hsdp+all_reduce=int4+optimizer.name=muon", "50", "50.0 s", 50, "text, 2 M parameters, 3 seeds"),
    ]
    assert [(row[1], *row[4:6], row[7]) for row in found] == [(*row[:3], row[4]) for row in expected]
    assert [row[6] for row in found] == [f"{usd_per_s * row[3]:,.0f} $" for row in expected]
    assert [row[0] for row in found] == ["1", "2", "3", "4*"] and [row[0] for row in changed_rows(plan)][-1] == "5*"
    assert max(map(len, plan_text(plan).splitlines())) <= 120
    text = " ".join(plan_text(plan).split())
    assert text.count("* another optimizer than the config's, listed last") == 2  # below both tables
    own = replace(plan, changed=plan.changed[1:])
    assert "another optimizer" not in plan_text(own) and [row[0] for row in changed_rows(own)][-1] == "4"
    assert to_loss_rows(replace(plan, optimizer="sgd")) == [] == to_loss_rows(replace(plan, changed=()))


def test_a_cluster_without_a_figure_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [row for row in rows() if (row.of, row.figure) != ("p4d.24xlarge", "node link")]
    monkeypatch.setattr(clusters, "rows", lambda: left)
    monkeypatch.setattr(clusters, "CLUSTERS", clusters.all_clusters(clusters.Rates(left)))
    with pytest.raises(ValueError, match=r"rates.csv has no 'node link' of p4d.24xlarge: add a row, with its source"):
        clusters.find_cluster("p4d.24xlarge")


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
    for head, *table in (candidate_rows(plan), changed_rows(plan)):  # on a phone a cell is beside its column's name
        assert {cell for row in table for cell in zip(head, row, strict=True) if cell[1]} <= {*page.cells}


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
    wrong = ["planner", *WORDS, "--html=/nowhere/plan.html"]
    assert "choose another --html" in refused(capsys, lambda: planner.main(wrong))


def test_the_legend_of_the_recorded_curves_is_inside_the_picture() -> None:
    figure = curves()
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
