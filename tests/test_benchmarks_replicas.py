"""The numbers of docs/results/replicas_measured.md by hand: steps and events."""

from typing import Any

import pytest

from configs.schema.own import OWN
from lab.benchmarks import replica_events, step_tables, steps
from lab.benchmarks.replica_events import COSTS, RANDOM
from lab.benchmarks.runner import FailedRunError


def cells(table: str) -> list[list[str]]:
    """The cells of each row, without the heads."""
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]


# --------------------------------------------------------------------------------------------------------- steps


def line(run: str, repetition: int, *times: float, commit: str = "a", cores: int = 2) -> dict[str, Any]:
    """A line of replicas.jsonl with the steps that it timed; 90 MB are sent."""
    about = {"mode": "four micro-steps", "rate": "200mbit", "run": run, "repetition": repetition, "commit": commit}
    found = {"step_time_s": -1.0, "step_times_s": list(times), "sent_bytes": 9e7}
    return {**about, **found, "machine": f"{cores} CPU cores"}


def test_steps_are_the_last_five_and_compared_within_a_repetition_at_one_commit() -> None:
    """PyTorch's first one, which is longer, counts nowhere; neither does one world's step of another day."""
    lines = [line("one_world none", i, *5 * [seconds]) for i, seconds in enumerate((10.0, 20.0, 40.0))]
    lines += [line("pytorch ddp", i, 99.0, 1.0, 1.0, s, 99.0, 99.0) for i, s in enumerate((8.0, 10.0, 16.0))]
    lines += [line("independent int8", 0, *5 * [5.0], commit="b"), line("independent int8", 1, *5 * [5.0])]
    lines += [line("independent int4", 0, *5 * [4.0], commit="b"), line("independent int8", 0, *5 * [0.96], cores=16)]
    assert cells(step_tables.replicas(lines)) == [
        ["2", "4", "200mbit", "`one_world none`", "3", "20.0 (10.0 to 40.0)", "1.00 (1.00 to 1.00)", "90 MB"],
        ["2", "4", "200mbit", "`pytorch ddp`", "3", "10.0 (8.0 to 16.0)", "0.50 (0.40 to 0.80)", "90 MB"],
        ["2", "4", "200mbit", "`independent int8`", "2", "5.0 (5.0 to 5.0)", "0.25 (0.25 to 0.25)", "90 MB"],
        ["2", "4", "200mbit", "`independent int4`", "1", "4.0", "-", "90 MB"],
        ["16", "4", "200mbit", "`independent int8`", "1", "0.96", "-", "90 MB"],
    ]


def row(seconds: float, count: int, sent: float) -> dict[str, Any]:
    return {"step_time_s": seconds, "replicas": count, "wire_tx_bytes": sent}


def test_time_and_bytes_are_those_of_steps_that_all_replicas_took_part_in() -> None:
    rows = [row(9.0, 2, 1.0), row(9.0, 4, 1.0), *(row(i, 4, 10.0 * i) for i in (3.0, 1.0, 2.0, 5.0, 4.0))]
    wire = {"wire_tx_bytes": 30.0, "wire_rx_bytes": None}
    assert steps.timed(rows) == {"step_time_s": 3.0, "step_times_s": [3.0, 1.0, 2.0, 5.0, 4.0], **wire}
    rows[2]["replicas"] = 3
    with pytest.raises(FailedRunError, match="had 3 of 4 replicas"):
        steps.timed(rows)
    alone = [{name: value for name, value in one.items() if name != "replicas"} for one in rows]  # of one world
    assert steps.timed(alone)["step_time_s"] == 3.0


def test_pytorch_skips_as_many_steps_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(command: list[str]) -> dict[str, Any]:
        asked.extend(command)
        return {"wire_tx_bytes": 7}

    monkeypatch.setattr(steps, "result_of", answer)
    key = {"mode": "one micro-step", "rate": "200mbit", "run": "pytorch ddp fp16"}
    assert steps.measured("replicas", key, python="torch/python")["sent_bytes"] == 7
    assert asked[-5:] == ["ddp", "fp16", "accum=1", "steps=7", "skipped=2"] and "torch/python" in asked


def test_keys_of_the_examples_need_no_registered_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """The config file of the runs registers them: else other programs and tests would know them after an import."""
    monkeypatch.setitem(OWN, "all_reduce", {})
    keys = {"compression.all_reduce": "demo", "batch.global_size": 8, "optimizer.name": "sgd"}
    assert steps.codec_keys("demo") == keys
    assert "optimizer.name" not in steps.codec_keys("power_sgd")


# -------------------------------------------------------------------------------------------------------- events


def test_an_event_costs_its_longest_step_beyond_a_calm_one_of_its_run() -> None:
    runs = [{"none": [1.0, 1.0, 3.0], "kill": [1.0, 2.0, 4.0]}, {"none": [2.0, 2.0, 2.0], "kill": [2.0, 3.0, 9.0]}]
    lines = [{"mode": COSTS, "step_times_s": times} for times in runs] + [{"mode": RANDOM}]
    assert cells(replica_events.table(lines)) == [
        ["none", "2", "1.5 (1.0 to 2.0)", "2.5 (2.0 to 3.0)", "1.0 (0.0 to 2.0)"],
        ["kill", "2", "2.5 (2.0 to 3.0)", "6.5 (4.0 to 9.0)", "5.0 (3.0 to 7.0)"],
    ]
