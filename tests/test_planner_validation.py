"""The planner's predictions beside measured steps: how they are compared, and where the CPU's figures come from."""

from statistics import harmonic_mean, median

import pytest

from lab.benchmarks import planner_validation
from lab.paper.replays import PLANNER
from lab.paper.throughput import runs
from lab.records import read_records, recorded
from planner import clusters


def test_every_timed_step_was_predicted() -> None:
    timed = list(planner_validation.timed_steps())
    assert [{key: line[key] for key in timed[0]} for line in recorded(planner_validation.RESULTS)] == timed


def test_the_figures_of_the_cpu_are_those_that_were_measured() -> None:
    newest = recorded(planner_validation.CPU_RATES)[-1]
    device = clusters.CPU
    ours = device.peak_flops["f32"], device.memory_bandwidth, device.functions_per_s
    for figure, kind in zip(ours, ("products", "moves", "functions"), strict=True):
        rate = harmonic_mean(map(median, newest[kind]))  # as much of each case
        assert figure == pytest.approx(1e9 * rate, rel=0.01)


def test_error_bars_are_those_of_the_comparisons() -> None:
    """Of the emulated cluster, and of the MiCS paper's steps by the planner's own figures."""
    beside = [line for line in recorded(planner_validation.RESULTS) if line["beside_the_rates"]]
    errors = {"cpu": [planner_validation.error(line) for line in beside]}
    cells = [run.cell() for run in runs(read_records(), "figure 7", PLANNER) if run.bar.system == "MiCS"]
    errors["gpu"] = [cell.published / cell.ours - 1 for cell in cells if cell.published and cell.ours]  # of seconds
    for kind, bar in clusters.ERROR_BARS.items():
        assert "the planner was built with" in str(bar)  # not held back
        assert bar.of.startswith(f"{len(errors[kind])} steps")
        assert bar.half_within == round(planner_validation.quantile(errors[kind], 0.5), 2)
        assert bar.nine_of_ten_within == round(planner_validation.quantile(errors[kind], 0.9), 2)
