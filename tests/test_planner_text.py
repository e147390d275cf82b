"""What the planner prints of a plan: tables of at most 120 columns, changes with their cost in loss."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from planning import small
from running import IGNORED

from lab.benchmarks.planner_records import RECORDS
from planner import clusters, costs
from planner.candidates import of_strategies
from planner.predict import Prediction
from planner.rates import rows
from planner.report import Plan, from_json, plan_text, scaling_text

pytestmark = IGNORED

LONG = "hop_two=int8+gather_inter=int8+hop_one_inter=int8+inner_steps=50"


def example() -> Plan:
    (plan,) = from_json(RECORDS["example"].read_text())
    return replace(plan, notes=())


def named(words: Sequence[str], seconds: Sequence[float]) -> tuple[Prediction, ...]:
    found = zip(of_strategies(words, small()), seconds, strict=True)
    return tuple(replace(example().best, candidate=candidate, step_s=step_s) for candidate, step_s in found)


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


def test_changes_are_printed_with_what_they_cost() -> None:
    recorded = next(row for row in costs.rows() if "inner_steps" in row.change)
    words = ["hsdp+hop_two=int8", f"hsdp+{recorded.change}", "hsdp+hop_two=int8+inner_steps=50"]
    plan = replace(example(), predictions=named(["hsdp"], [10.0]), changed=named(words, [8.0, 5.0, 4.0]))
    _, _, table = plan_text(plan).partition("with another result than the config's:\n")
    head, *lines = table.partition("loss:")[0].splitlines()
    assert head.split() == ["strategy", "micro", "gather", "memory", "step", "shorter", "exposed", "loss"]
    found = [line for line in lines if line[:1].isdigit()]
    assert [row.split(" s  ")[1].split()[0] for row in found] == ["20.0", "50.0", "60.0"]  # per cent shorter
    assert costs.cost_of("hop_two=int8") in found[0] and str(recorded) in found[1] and found[2].endswith("not recorded")


def test_a_cluster_without_a_figure_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [row for row in rows() if (row.of, row.figure) != ("p4d.24xlarge", "node link")]
    monkeypatch.setattr(clusters, "rows", lambda: left)
    monkeypatch.setattr(clusters, "CLUSTERS", clusters.all_clusters(clusters.Rates(left)))
    with pytest.raises(ValueError, match=r"rates.csv has no 'node link' of p4d.24xlarge: add a row, with its source"):
        clusters.find_cluster("p4d.24xlarge")
