"""The tables of benchmarks/accuracy.py: what a method costs is a mean of differences by seed."""

from typing import Any

import pytest

from benchmarks import accuracy
from benchmarks.records import recorded


def line(method: str, seed: int, loss: float, **more: Any) -> dict[str, Any]:
    return {"task": "text", "method": method, "seed": seed, "validation_loss": loss, "hop_two_ratio": 4.0} | more


def test_differences_are_those_of_the_same_seed() -> None:
    """Dense runs from 1.4 to 1.9, in another order: int8 is 0.01 to 0.03 above the one of its own seed."""
    dense = [line("dense, AdamW", seed, loss) for seed, loss in ((2, 1.9), (0, 1.4), (1, 1.5))]
    coded = [line("int8, AdamW", seed, loss) for seed, loss in ((0, 1.41), (1, 1.52), (2, 1.93))]
    header, _, of_dense, of_int8 = accuracy.table("text", dense + coded).splitlines()
    assert header == "| text | times smaller | validation loss | minus dense, by seed |"
    assert of_dense == "| dense, AdamW | 4 | 1.600 (1.400 to 1.900) |  |"
    assert of_int8 == "| int8, AdamW | 4 | 1.620 (1.410 to 1.930) | +0.020 (+0.010 to +0.030) |"


def test_how_many_times_fewer_bytes_a_run_sends() -> None:
    """Of 4 replicas, by hand: a fifth of 1-bit Adam's steps is dense; DGC's payload is gathered, not reduced."""
    claimed = {name: method.times_smaller(30.0) for name, method in accuracy.methods("text").items()}
    assert claimed["int8, AdamW"] == 30 and claimed["dense, SGD"] == 30
    assert claimed["one_bit_adam, AdamW"] == pytest.approx(1 / (0.2 + 0.8 / 30))
    assert claimed["dgc, 99 %, SGD"] == 15 and claimed["DiLoCo, 10 steps, AdamW"] == 300
    assert claimed["DiLoCo, 10 steps, streaming, AdamW"] == 300


def test_a_seed_without_a_dense_run_has_no_difference() -> None:
    lines = [line("dense, AdamW", 0, 1.4), line("int8, AdamW", 0, 1.3), line("int8, AdamW", 1, 9.0)]
    assert accuracy.table("text", lines).endswith("| -0.100 (-0.100 to -0.100) |")


@pytest.mark.document
def test_the_page_has_the_tables_of_the_record() -> None:
    page = accuracy.PAGE.read_text()
    for task in accuracy.TASKS:
        assert accuracy.table(task, [x for x in recorded(accuracy.RESULTS) if x["task"] == task]) in page
