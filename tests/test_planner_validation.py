"""The planner's predictions beside measured steps: how they are compared, and where the CPU's figures come from."""

from statistics import harmonic_mean, median
from typing import Any

import pytest

from benchmarks import cpu_rates, planner_validation
from benchmarks.records import recorded
from paper.records import read_records
from paper.replays import PLANNER
from paper.throughput import figure_7
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
    text = planner_validation.summary(LINES)
    assert text.startswith("4 of 6 steps are predicted within 10%, nine of ten within 67%")
    assert "the mean error is -10.1%, from -67% to +15%" in text
    assert planner_validation.bests(LINES).splitlines() == [
        "- fastest of 2 at 1gbit: predicted ddp, right",
        "- fastest of 2 at 200mbit: predicted ddp, measured mics(2), which was 2.0% faster",
        "- fastest of 2 at 100mbit: predicted zero3, measured mics(2), which was 150.0% faster",
    ]


def test_a_quantile_is_an_error_that_so_many_do_not_exceed() -> None:
    errors = [(-1) ** n * n / 100 for n in range(1, 11)]
    assert planner_validation.quantile(errors, 0.9) == pytest.approx(0.09)
    assert planner_validation.quantile(errors, 1.0) == pytest.approx(0.10)


def test_the_page_has_the_recorded_comparison() -> None:
    text = planner_validation.page(recorded(planner_validation.RESULTS))
    assert text in planner_validation.PAGE.read_text()


def test_every_timed_step_was_predicted() -> None:
    timed = list(planner_validation.timed_steps())
    assert [{key: line[key] for key in timed[0]} for line in recorded(planner_validation.RESULTS)] == timed


def test_the_figures_of_the_cpu_are_those_that_were_measured() -> None:
    newest = recorded(cpu_rates.RESULTS)[-1]
    device = clusters.CPU
    ours = device.peak_flops["f32"], device.memory_bandwidth, device.functions_per_s
    for figure, kind in zip(ours, ("products", "moves", "functions"), strict=True):
        rate = harmonic_mean(map(median, newest[kind]))  # as much of each case
        assert figure == pytest.approx(1e9 * rate, rel=0.01)


def test_error_bars_are_those_of_the_comparisons() -> None:
    """Of the emulated cluster, and of the MiCS paper's steps by the planner's own figures."""
    beside = [line for line in recorded(planner_validation.RESULTS) if line["beside_the_rates"]]
    errors = {"cpu": [planner_validation.error(line) for line in beside]}
    cells = [cell for cell in figure_7(read_records(), PLANNER) if cell.system == "MiCS"]
    errors["gpu"] = [cell.published / cell.ours - 1 for cell in cells if cell.published and cell.ours]  # of seconds
    for kind, bar in clusters.ERROR_BARS.items():
        assert "the planner was built with" in str(bar)  # not held back
        assert bar.of.startswith(f"{len(errors[kind])} steps")
        assert bar.half_within == round(planner_validation.quantile(errors[kind], 0.5), 2)
        assert bar.nine_of_ten_within == round(planner_validation.quantile(errors[kind], 0.9), 2)
