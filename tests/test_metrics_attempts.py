"""The attempts of an elastic run in its report: nodes, pauses and goodput of events and metrics written by hand."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.metrics_runs import make_run
from support.tables import every_row

from runtime.events import Event
from training.metrics.attempts import attempts_of, goodput, pauses, span_s
from training.metrics.report import write_report
from training.metrics.run_files import read_run

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
