"""The planner's predictions beside measured steps: how they are compared, and where the CPU's figures come from."""

from statistics import fmean, median
from typing import Any

import pytest

from benchmarks import cpu_rates, planner_validation
from benchmarks.records import recorded
from planner import clusters


def line(name: str, rate: str, measured_s: float, predicted_s: float) -> dict[str, Any]:
    return {"name": name, "rate": rate, "runs": 1, "measured_s": measured_s, "predicted_s": predicted_s}


LINES = [
    line("ddp", "1gbit", 10.0, 9.0),
    line("zero3", "1gbit", 20.0, 23.0),
    line("ddp", "200mbit", 10.0, 9.9),
    line("mics(2)", "200mbit", 9.8, 10.0),
    line("zero3", "100mbit", 30.0, 10.0),
    line("mics(2)", "100mbit", 12.0, 12.0),
]


def test_errors_are_those_of_the_predictions() -> None:
    first, second = planner_validation.summary(LINES)
    assert first.startswith("4 of 6 steps are predicted within 10%, and nine of ten within 67%")
    assert "the mean error is -10.0%, from -67% to +15%" in first
    assert second.splitlines() == [
        "- fastest of 2 at 1gbit: predicted ddp, right",
        "- fastest of 2 at 200mbit: predicted ddp, measured mics(2), which was 2.0% faster: the same but for noise",
        "- fastest of 2 at 100mbit: predicted zero3, measured mics(2)",
    ]


def test_a_quantile_is_an_error_that_so_many_lines_do_not_exceed() -> None:
    lines = [line("ddp", "1gbit", 100.0, 100.0 + n) for n in range(1, 11)]
    assert planner_validation.quantile(lines, 0.9) == pytest.approx(0.09)
    assert planner_validation.quantile(lines, 1.0) == pytest.approx(0.10)


def test_the_page_has_the_recorded_comparison() -> None:
    text = planner_validation.page(recorded(planner_validation.RESULTS))
    assert text in planner_validation.PAGE.read_text()


def test_every_measured_step_was_predicted() -> None:
    found = {(line["name"], line["rate"]): line["measured_s"] for line in recorded(planner_validation.RESULTS)}
    assert found == {(line["name"], line["rate"]): line["measured_s"] for line in planner_validation.timed_steps()}


def test_the_figures_of_the_cpu_are_those_that_were_measured() -> None:
    newest = recorded(cpu_rates.RESULTS)[-1]
    device = clusters.CPU
    assert device.peak_flops["f32"] == pytest.approx(1e9 * fmean(map(median, newest["products"])), rel=0.01)
    assert device.memory_bandwidth == pytest.approx(1e9 * median(newest["moves"][0]), rel=0.01)
    assert device.functions_per_s == pytest.approx(1e9 * median(newest["functions"][0]), rel=0.01)
