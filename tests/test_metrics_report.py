"""The report page: valid, self-contained, escaped, with the run's numbers and attempts, whatever the files contain."""

import base64
import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.metrics_runs import make_run
from support.parsed_page import EVIL, PIXEL, Page
from support.refusals import refused
from support.tables import every_row

from runtime.events import Event
from training.metrics.attempts import attempts_of, goodput, pauses, span_s
from training.metrics.charts import Chart, Curve, curve_chart, round_ticks, thin_out, trend
from training.metrics.report import charts_of, main, strategy_facts, write_report
from training.metrics.run_files import read_run

UNKNOWN = "\N{EN DASH}"


def report(folder: Path) -> tuple[str, Page]:
    path = write_report(read_run(folder))
    assert path == folder / "report.html"
    html = path.read_text(encoding="utf-8")
    return html, Page(html)


def test_the_page_has_the_numbers_of_the_run_and_needs_nothing_else(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    step_time_s = np.mean([row["step_time_s"] for row in rows if "step_time_s" in row])
    html, page = report(run)
    for part in (
        "quickstart:x | finished",
        "Training loss | 2.0071",
        "Validation loss | 2.0834",
        "Bits per byte | 3.0057",
        "Tokens/s | 40,960",
        f"Step time | {1e3 * step_time_s:.0f} ms",
        "Data wait | 2.00 ms",
        "Inside nodes | 4.43 MB",
        "Between nodes | 1.65 MB",
        "Steps | 120",
        "Wall time | 2m 13s | of the last attempt",
        "sharding.strategy | mics | sharding.partition_size | 2",
        "ablation.two_hop | no",
        "mesh.replica_inter | 4 | mesh.shard_inter | 1",
        f"replica-all-reduce | replica_inter | all-reduce | f32 | 1.10 MB | 1 | 1.65 MB | {UNKNOWN}",
        f"group-reduce-scatter | shard_intra | reduce-scatter | f32 | 1.10 MB | 4 | {UNKNOWN} | 2.22 MB",
        "Sum | 1.65 MB | 4.43 MB",
        "3.40 MB sent, 3.30 MB received",
        "git_commit | 0123abcd",
        "versions.jax | 0.10.2",
        "model.num_layers | 4",
    ):
        assert part in page.text, part
    assert ("ablation.two_hop", "no") in strategy_facts(read_run(run)), "next to the strategy, not only among all keys"
    assert page.tags.count("svg") == 6 and page.tags.count("details") == 2
    assert page.addresses == ["data:image/png;base64," + base64.b64encode(PIXEL).decode()]
    assert "url(" not in html and "@import" not in html and "<link" not in html and "http" not in html


def test_all_text_is_escaped(tmp_path: Path) -> None:
    run = make_run(tmp_path / EVIL.replace("/", "_"))
    (run / "environment.json").write_text(json.dumps({EVIL: EVIL, "command": [EVIL], "mesh": EVIL, "date": EVIL}))
    (run / "summary.json").write_text(json.dumps({"exit_reason": EVIL}))
    entry = {"name": EVIL, "kind": EVIL, "axes": [EVIL], "dtype": EVIL}
    (run / "collectives.json").write_text(json.dumps({"collectives": [entry]}))
    config = json.loads((run / "config.json").read_text())
    config["sharding"]["strategy"] = config["model"]["kind"] = config["name"] = EVIL
    (run / "config.json").write_text(json.dumps(config))
    html, page = report(run)
    assert "script" not in page.tags and "<script" not in html
    assert page.text.count(EVIL) >= 10  # shown as text


def test_missing_files_and_files_with_wrong_contents(tmp_path: Path) -> None:
    # missing files are named
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.25}\n{"step": 2, "lo')
    _, page = report(tmp_path)
    for part in ("Training loss | 3.2500", "no outcome recorded", "metrics.jsonl has 1 unreadable line, skipped"):
        assert part in page.text
    for name in ("config.json", "environment.json", "collectives.json", "mesh.png", "sample.txt"):
        assert f"{name} is missing" in page.text

    # files with wrong contents
    run = make_run(tmp_path)
    (run / "config.json").write_text("[1, 2]")
    (run / "environment.json").write_text('{"mesh": ')
    (run / "collectives.json").write_text('{"collectives": [3, {"axes": null, "times": "x"}], "inter_bytes": null}')
    (run / "metrics.jsonl").write_text('{"step": "x", "loss": null}\n{"loss": 2}\n3\n{"step": 1, "loss": [1]}\n')
    (run / "summary.json").write_text('{"steps": "NaN", "final_loss": "Infinity", "wall_time_s": {}}')
    (run / "sample.txt").write_bytes(b"\xff\xfe text")
    _, page = report(run)
    for name in ("config.json", "environment.json"):
        assert f"{name} is not a JSON object" in page.text


def test_the_command_writes_a_page_or_says_in_one_line_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert refused(capsys, partial(main, [str(folder)]), is_silent=True).startswith(f"{folder} ")
    assert not (tmp_path / "report.html").exists()
    assert main([str(make_run(tmp_path))]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"


def test_a_long_run_stays_a_small_page(tmp_path: Path) -> None:
    html, _ = report(make_run(tmp_path, num_steps=20_000))
    assert len(html) < 150_000


def test_a_curve_is_thinned_and_has_a_trend() -> None:
    # thinning keeps ends order and every spike
    points = [(float(i), 0.0) for i in range(10_000)]
    points[4321] = (4321.0, 7.0)
    points[8000] = (8000.0, -5.0)
    thin = thin_out(points, 600)
    assert len(thin) <= 600 and thin[0] == points[0] and thin[-1] == points[-1]
    assert points[4321] in thin and points[8000] in thin and thin == sorted(thin)
    assert thin_out(points[:600], 600) == points[:600]

    # the trend is the median of each interval
    values = np.random.default_rng(0).normal(size=1000)
    values[::37] = 100.0
    got = np.array(trend([*enumerate(map(float, values))], 100))
    np.testing.assert_allclose(got[:, 1], np.median(values.reshape(100, 10), axis=1))
    np.testing.assert_allclose(got[:, 0], np.arange(1000).reshape(100, 10).mean(axis=1))


def test_a_curve_is_drawn_where_it_should_be() -> None:
    # a curve is drawn where it should be with a gap at nan
    points = [(0.0, 0.0), (1.0, 10.0), (2.0, math.nan), (3.0, 5.0), (4.0, 10.0)]
    chart = curve_chart([Curve(label="a", points=points)], form="{:g}".format, label="a", zero=True)
    runs = list(chart.runs(chart.series[0]))
    assert len(runs) == 2
    x, y = np.array([[float(n) for n in place.split()] for run in runs for place in run]).T
    at_x, at_y = np.array([0, 1, 3, 4]), np.array([0, 10, 5, 10])
    np.testing.assert_allclose(np.interp(at_x, [0, 4], [x[0], x[-1]]), x, atol=0.1)  # step to the right
    np.testing.assert_allclose(y[0] + (y[1] - y[0]) * at_y / 10, y, atol=0.1)
    assert y[1] < y[0]  # greater values are higher up
    tips = list(chart.dots(chart.series[0]))
    assert [(x, y) for x, y, _ in tips] == [*zip(x, y, strict=True)] and tips[1][2] == "a, step 1: 10"

    # a few far outliers do not flatten the curve
    points = [(float(i), 0.2) for i in range(200)]
    points[50], points[150] = (50.0, 30.0), (150.0, 40.0)
    chart = curve_chart([Curve(label="a", points=points)], form="{:g}".format, label="a", zero=True)
    assert "2 values above" in chart.note and chart.series[0].faint
    (run,) = chart.runs(chart.series[0])
    y = [float(place.split()[1]) for place in run]
    assert y[0] - y[50] > 20 and 226 - y[0] > 100  # the typical value is at about half the height


@every_row(("low", "high"), [(0, 1), (0.001, 0.0013), (1.7, 5.8), (-3, 1e6), (599, 600)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    ticks = round_ticks(low, high)
    assert 3 <= len(ticks) <= 8 and min(ticks) >= low - 1e-9 and max(ticks) <= high * (1 + 1e-9)
    step = ticks[1] - ticks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - m) for m in (1, 2, 5, 10)) < 1e-6
    np.testing.assert_allclose(np.diff(ticks), step)


def test_a_long_outcome_is_shortened_on_the_page_but_not_in_the_file(tmp_path: Path) -> None:
    reason = f"failed: model.hidden=32: {'f32[8,8] fusion(...) ' * 1000}; set model.hidden=64"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "summary.json").write_text(json.dumps({"exit_reason": reason}))
    run = read_run(tmp_path)
    outcome = run.outcome
    assert len(outcome) < 1000 and run.summary["exit_reason"] == reason
    assert outcome.startswith("failed: model.hidden=32: ") and outcome.endswith("; set model.hidden=64")
    assert "characters, which summary.json has" in outcome


def charts(folder: Path, **values: float) -> dict[str, tuple[list[float], Chart]]:
    """Returns the charts of a run of two steps, where values double: each curve's height at the second."""
    rows = [{"step": 1} | {key: value / 2 for key, value in values.items()}, {"step": 2} | values]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = {}
    for title, chart in charts_of(read_run(folder)).items():
        runs = [run for one in chart.series for run in chart.runs(one)]
        heights = [[chart.bottom - float(place.split()[1]) for place in run] for run in runs]  # above zero
        for first, second in heights:
            assert second == pytest.approx(2 * first, abs=0.2) and second > 20
        if heights:
            found[title] = [second for _, second in heights], chart
    return found


def test_the_bytes_the_learning_rate_and_the_norm_have_curves(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    sent = {"collective_inter_bytes": 4e6, "collective_intra_bytes": 2e6, "wire_tx_bytes": 3e6, "wire_rx_bytes": 1e6}
    found = charts(run, learning_rate=3e-4, grad_norm=1.5, dropped_share=0.25, **sent)
    assert list(found) == ["Dropped choices of experts", "Learning rate", "Gradient norm", "Bytes per step"]
    heights, chart = found["Bytes per step"]
    np.testing.assert_allclose(np.array(heights) / heights[0], [1, 0.5, 0.75, 0.25], atol=0.01)
    assert chart.series[0].label == "a device sends between nodes" and "4.00 MB" in [text for _, text in chart.y.ticks]
    assert list(charts(run, update_norm=1.5)) == ["Update norm"]


MINUTE = 60.0


def line(minute: float, event: Event, by: str = "process 0 on a", **fields: Any) -> str:
    whole, seconds = divmod(minute * 60, 60)
    return json.dumps(
        {"time": f"2026-11-22T10:{int(whole):02d}:{seconds:06.3f}+00:00", "event": event, "by": by, **fields}
    )


def first(minute: float, nodes: int, step: int, again: int = 0, **fields: Any) -> list[str]:
    """An attempt of two processes on each node begins."""
    source = "memory" if step else "nothing"
    return [
        line(minute, Event.STARTED, nodes=nodes, processes=2 * nodes, devices=4 * nodes, coordinator="a:1", **fields),
        line(minute, Event.RESTORED, step=step, source=source, steps_again=again, **fields),
    ]


# 4 nodes for ten minutes, a loss; an attempt that dies before its first step; 3 nodes to the end, 5 steps again
EVENTS = [
    line(0, Event.ATTEMPT_STARTED, "engine on h", attempt=1, attempt_id="x", hosts=["a", "b", "c", "d"], idle=[]),
    *first(1, 4, 0, attempt_id="x"),
    line(2, Event.FIRST_STEP, step=1, attempt_id="x"),
    line(12, Event.LOST_PEER, peers=["process 3 on d"], why="process 3 on d died", attempt_id="x"),
    line(12.1, Event.EXITED, code=75, why="something later", attempt_id="x"),
    line(12.5, Event.ATTEMPT_ENDED, "engine on h", attempt=1, step=60, ends={}, attempt_id="x"),
    *first(13, 2, 55, again=5),
    line(14, Event.SNAPSHOT_BEGUN, step=55),
    *first(16, 3, 55, again=5),
    line(18, Event.FIRST_STEP, step=56),
    line(28, Event.STOPPED, step=120, why="finished"),
    line(28.2, Event.EXITED, code=0, why="finished"),
]


@pytest.fixture
def elastic(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "run")
    (folder / "events.jsonl").write_text("\n".join(EVENTS) + "\n")
    return folder


def test_attempts_nodes_and_pauses(elastic: Path) -> None:
    found = attempts_of(read_run(elastic).events)
    assert [attempt.nodes for attempt in found] == [4, 2, 3]
    assert [attempt.end for attempt in found] == ["process 3 on d died", "", "finished"]
    assert [attempt.start_step for attempt in found] == [0, 55, 55]
    seconds = [None if pause is None else pytest.approx(pause) for pause in pauses(found)]
    assert seconds == [1 * MINUTE, None, 6 * MINUTE]  # from minute 12 to 18: the second attempt made no step
    assert span_s(found) == pytest.approx(27 * MINUTE)


def test_goodput_counts_each_step_once(elastic: Path) -> None:
    """Of 27 minutes, 120 steps of 10 s: 20 minutes. Every second step is logged; two rows have no step time."""
    found = attempts_of(read_run(elastic).events)
    rows = [{"step": step, "step_time_s": 10.0} for step in range(2, 121, 2)]
    del rows[0]["step_time_s"], rows[28]["step_time_s"]
    assert goodput(found, rows) == pytest.approx(20 / 27)
    assert goodput(found, []) is None and goodput([], rows) is None


@every_row(("step", "again"), [(56, 5), (58, 3), (203, 0)])
def test_a_replica_that_takes_the_state_of_others_does_fewer_steps_again(step: int, again: int) -> None:
    """It had done 60 steps, and restored the checkpoint of step 55."""
    lines = (*first(1, 1, 55, again=5), line(2, Event.FIRST_STEP, step=step + 9, after=step - 1))  # a round of ten
    events = [json.loads(each) | {"time_s": 0.0} for each in lines]
    assert [attempt.steps_again for attempt in attempts_of(events)] == [again]


def test_the_goodput_of_a_replica_is_not_known(elastic: Path) -> None:
    """What the others did while it was away is between its rows."""
    file = elastic / "config.json"
    for replicas, there in (("one_world", True), ("independent", False)):
        file.write_text(json.dumps({"sharding": {"replicas": replicas}}))
        assert nodes_over_time(elastic, EVENTS)
        assert ("Goodput" in (elastic / "report.html").read_text()) == there


def nodes_over_time(folder: Path, events: list[str]) -> list[list[str]]:
    """Returns the rows of the table of attempts on the page of a run with these events."""
    (folder / "events.jsonl").write_text("\n".join(events) + "\n")
    section = write_report(read_run(folder)).read_text().partition("Nodes over time")[2].partition("</section>")[0]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>((?:<td.*?</td>)+)</tr>", section)]


def test_only_a_run_of_several_attempts_shows_them(elastic: Path) -> None:
    assert nodes_over_time(elastic, EVENTS)[2] == ["15m 00s", "3", "55", "6m 00s", "5", "memory", "finished"]
    page = (elastic / "report.html").read_text()
    assert "minutes since the start" in page and "Goodput" in page
    assert nodes_over_time(elastic, EVENTS[:5]) == [] and "Goodput" not in (elastic / "report.html").read_text()


def test_the_report_of_an_attempt_that_has_not_recorded_its_end_has_its_outcome(elastic: Path) -> None:
    """It writes the page before that. One that was killed has no summary, or before it restores that of another."""
    assert nodes_over_time(elastic, EVENTS[:-2])[-1][-1] == "finished"
    started = next(i for i, event in enumerate(EVENTS) if '"started"' in event and '"nodes": 3' in event)
    assert nodes_over_time(elastic, EVENTS[: started + 1])[-1][-1] == "no sign of its end"
    (elastic / "summary.json").unlink()
    assert nodes_over_time(elastic, EVENTS[:-2])[-1][-1] == "no sign of its end"
