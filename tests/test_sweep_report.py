"""The tables, the page and the live table of a sweep, parsed independently."""

import csv
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.parsed_page import Page
from support.sweeping import DIVERGES, FAILS, run_sweep, seeds, sweep_file
from support.tables import every_row

from launch.sweeps.charts import Point, as_number, axis_of, sweep_chart
from launch.sweeps.live import Live
from launch.sweeps.plan import plan
from launch.sweeps.pool import SweepJob
from launch.sweeps.records import RunState
from training.metrics.charts import Chart
from training.metrics.units import UNKNOWN

GRID = "def sweep_lr(): return over('optimizer.learning_rate', (0.001, 0.01, 0.1))\n" + seeds(0, FAILS, DIVERGES, 7)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of 3 rates x 4 seeds: losses are 1000 x rate + seed; one fails, one diverges."""
    folder = tmp_path_factory.mktemp("grid")
    assert run_sweep(folder, sweep_file(folder, GRID), "--workers=6") == 1
    return folder / "runs"


def test_the_csv_has_every_run_and_number(grid: Path) -> None:
    rows = list(csv.DictReader((grid / "results.csv").read_text().splitlines()))
    assert [(float(row["optimizer.learning_rate"]), int(row["seed"])) for row in rows] == [
        (rate, seed) for rate in (0.001, 0.01, 0.1) for seed in (0, FAILS, DIVERGES, 7)
    ]
    for row in rows:
        rate, seed = float(row["optimizer.learning_rate"]), int(row["seed"])
        if seed == FAILS:
            assert (row["state"], row["validation_loss"]) == ("failed", "")
            assert row["error"] == "error: the loss is not a number"
        else:
            assert row["state"] == "finished" and row["wall_time_s"] == "65.0"
            assert row["validation_loss"] == ("nan" if seed == DIVERGES else str(1000 * rate + seed))


def test_the_markdown_shows_the_best_in_bold(grid: Path) -> None:
    text = (grid / "results.md").read_text()
    assert "12 runs: 9 finished, 3 failed. Lowest validation_loss: 1.0000 (learning_rate=0.001,seed=0-" in text
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert table[0] == ["optimizer.learning_rate", "seed", "validation_loss", "step time", "wall time", "state"]
    assert {len(row) for row in table} == {6} and len(table) == 14
    bold = [row for row in table if "**" in row[0]]
    assert bold == [["**0.001**", "**0**", "**1.0000**", f"**{UNKNOWN}**", "**1m 05s**", "**finished**"]]


def test_the_page_is_complete_and_self_contained(grid: Path) -> None:
    page = Page((grid / "index.html").read_text())
    assert page.tags.count("svg") == 1  # the seeds are repetitions, no axis
    assert page.tags.count("circle") == 6 and any("median over seed" in text for text in page.texts["p"])
    assert len(page.addresses) == 9 and all((grid / link).read_text() == "the run's page" for link in page.addresses)
    assert page.texts["td"].count("0.1") == 4
    tips = [text for text in page.texts["title"] if text.startswith("learning_rate=0.1,seed=7-")]
    assert len(tips) == 1 and tips[0].endswith(": 107.0000")
    assert sum(text.endswith(": nan") for text in page.texts["title"]) == 3


def test_words_of_users_are_escaped(tmp_path: Path) -> None:
    body = "def sweep_x(): return over('sample.prompt', ('<b>&', 'a|b', 'c\\nd'))"
    assert run_sweep(tmp_path, sweep_file(tmp_path, body)) == 0
    text = (tmp_path / "runs" / "index.html").read_text()
    assert "<b>" not in text and "&lt;b&gt;&amp;" in text
    table = (tmp_path / "runs" / "results.md").read_text()
    assert "a\\|b" in table and "| c d | " in table
    assert "sample.prompt=_b" not in text and len(list((tmp_path / "runs").glob("prompt=_b_-*"))) == 1


def test_the_page_and_the_table_show_every_key_of_random_runs(tmp_path: Path) -> None:
    keys = ("optimizer.learning_rate", "optimizer.weight_decay", "optimizer.b2")  # all values of each are distinct
    body = f"def sweep_r(): return sample(12, dict.fromkeys({keys}, uniform(0.1, 0.9)), seed=0)"
    assert run_sweep(tmp_path, sweep_file(tmp_path, body), "--workers=6") == 0
    assert f"\n| {' | '.join(keys)} | validation_loss | " in (tmp_path / "runs" / "results.md").read_text()
    page = Page((tmp_path / "runs" / "index.html").read_text())
    assert tuple(page.texts["th"][:3]) == keys
    assert [t for t in page.texts["h2"] if " over " in t] == [f"validation_loss over {key}" for key in keys]
    assert not any("median" in note for note in page.texts["p"])  # no line goes through dots at random


def test_a_chart_has_lines_of_a_key_that_does_not_decide_its_own(tmp_path: Path) -> None:
    body = """
def sweep_batch(): return zip_(over("batch.global_size", (16, 32)), over("num_steps", (300, 150)))
def sweep_lr(): return over("optimizer.learning_rate", (0.001, 0.01))
"""
    assert run_sweep(tmp_path, sweep_file(tmp_path, body), "--workers=4") == 0
    page = (tmp_path / "runs" / "index.html").read_text()
    legends = [re.search(r'class="legend"><span>([^<]*)', part) for part in page.split("<h2>validation_loss over ")[1:]]
    rate, batch = "optimizer.learning_rate", "batch.global_size"
    assert [legend and legend[1] for legend in legends] == [rate, rate, batch]
    assert "median" not in page  # each point of the lines is one run


def test_the_best_is_the_highest_where_the_file_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_sweep(tmp_path, sweep_file(tmp_path, seeds(7, 9, 0) + "GOAL = 'max'\nMETRIC = 'loss'")) == 0
    assert "best loss: 10.0000 in seed=9-" in capsys.readouterr().out
    assert "Highest loss: 10.0000 (seed=9-" in (tmp_path / "runs" / "results.md").read_text()


def test_a_metric_that_no_run_has_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_sweep(tmp_path, sweep_file(tmp_path, seeds(0, FAILS, 6) + "METRIC = 'gb'")) == 1  # one run fails
    out = capsys.readouterr().out
    assert re.search(r"^METRIC='gb' is not in .*/seed=0-\w+; the nearest there is 'gib'$", out, re.MULTILINE)


@every_row(
    ("values", "log"),
    [
        ((1e-3, 2e-3, 4e-3, 8e-3), True),
        ((1, 2, 3, 4, 5), False),
        ((0, 10, 100), False),
        ((0.001, 0.1), True),
    ],
)
def test_axes_of_wide_ranges_are_logarithmic(values: Any, log: bool) -> None:
    places = [axis_of(values).position(value) for value in values]
    assert places == sorted(places) and 0 < places[0] < places[-1] < 1
    even = np.diff(np.log(values) if log else values)
    np.testing.assert_allclose(np.diff(places) / np.diff(places)[0], even / even[0])


def test_rates_are_numbers_and_words_stand_side_by_side() -> None:
    assert [as_number(rate) for rate in ("1gbit", "200mbit", "1.5kbit", "9bit", "none", True)] == [
        1e9,
        200e6,
        1500,
        9,
        None,
        None,
    ]
    rates = axis_of(["1gbit", "10mbit", "100mbit"])
    assert [label for _, label in sorted(rates.ticks)] == ["10mbit", "100mbit", "1gbit"] and rates.numeric
    words = axis_of(["zero3", "ddp", "zero3"])
    assert [label for _, label in words.ticks] == ["zero3", "ddp"] and not words.numeric


def dots_of(chart: Chart) -> list[tuple[float, float]]:
    return [(x, y) for one in chart.series for x, y, _ in chart.dots(one) if y is not None]


def lines_of(chart: Chart) -> list[list[str]]:
    return [run for one in chart.series for run in chart.runs(one)]


def test_dots_and_lines_are_where_the_values_are() -> None:
    points = [Point(x=x, line=n, y=x * n, tip="") for n in (1, 3) for x in (1, 2, 3)]  # 1 2 3 and 3 6 9
    chart = sweep_chart(points, x_name="x", line_name="n", metric="y")
    dots = dots_of(chart)
    assert dots[1][0] - dots[0][0] == pytest.approx(dots[2][0] - dots[1][0], abs=0.2)
    heights = [y for _, y in dots]
    assert (heights[0] - heights[5]) == pytest.approx(8 * (heights[0] - heights[1]), abs=0.8)
    first, second = lines_of(chart)
    assert len(first) == len(second) == 3
    assert tuple(map(float, first[0].split())) == dots[0]


def test_dots_over_words_stand_apart_and_are_not_joined() -> None:
    points = [Point(x=x, line=n, y=1.0, tip="") for n in "ab" for x in ("ddp", "zero3")]
    chart = sweep_chart(points, x_name="x", line_name="n", metric="y")
    assert len(set(dots_of(chart))) == 4 and not lines_of(chart)


def test_the_live_table_shows_what_fits(grid: Path) -> None:
    runs = plan(str(grid.parent / "mine.py"), [{"seed": seed} for seed in (0, FAILS, DIVERGES)], workdir=grid)
    states = (RunState.FINISHED, RunState.FAILED, RunState.WAITING)
    jobs = [SweepJob(run=run, state=state, error="oh no" * (state == "failed")) for run, state in zip(runs, states)]
    screen = io.StringIO()
    with Live("validation_loss", Console(file=screen, force_terminal=True, width=120, height=30)) as live:
        live.show(jobs)
    lines = [re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", line) for line in screen.getvalue().splitlines()]
    row = next(line for line in lines if "seed=0-" in line)
    assert row.split()[1:4] == ["finished", "3/20", "1.0000"]
    assert all(any(words in line for line in lines) for words in ("failed  oh no", "3 runs: 1 waiting, 1 finished"))
