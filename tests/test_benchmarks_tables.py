"""The tables and charts of the measured pages: their comparisons, and that pages agree with the records."""

import re
from typing import Any

import numpy as np
import pytest
from support.losses import same_until

from lab import pages
from lab.benchmarks import accuracy, planner_errors, step_tables
from lab.benchmarks.runner import ROOT
from lab.records import MEASURED, Range, recorded


def step(strategy: str, rate: str, times: list[float], commit: str = "a") -> dict[str, Any]:
    """A line of strategies.jsonl, as far as tables and charts read it; 8 MB on the wire."""
    sizes = dict.fromkeys(("formula_inter_bytes", "compiled_inter_bytes", "compiled_intra_bytes", "wire_tx_bytes"), 8e6)
    seconds = {"step_time_s": float(np.median(times)), "step_times_s": times}
    return {"mode": "standard", "strategy": strategy, "rate": rate, "commit": commit, **seconds, **sizes}


def coded(codec: str, times: list[float], command: str = "", loss: float = 4.0, commit: str = "a") -> dict[str, Any]:
    """A line of compression.jsonl at 1 Gbit/s; it sends 10 bytes, without a codec 40."""
    seconds = {"step_time_s": sum(times) / len(times), "step_times_s": times}
    about = {"kind": "step", "codec": codec, "rate": "1gbit", "command": command, "commit": commit}
    return {**about, **seconds, "wire_tx_bytes": 40.0 if codec == "none" else 10.0, "losses": [5.0, loss]}


def trained(method: str, seed: int, loss: float) -> dict[str, Any]:
    return {"task": "text", "method": method, "seed": seed, "validation_loss": loss, "all_reduce_ratio": 4.0}


# ---------------------------------------------------------------------------------------------------- strategies


def test_nothing_is_taken_from_a_step_that_computes_something_else() -> None:
    lines = [step("compute only", "1gbit", [3.0]), step("ddp", "1gbit", [5.0]), step("ddp dots", "1gbit", [4.0])]
    assert step_tables.above_compute_s(lines, "ddp", "1gbit") == Range(value=2.0, low=2.0, high=2.0)
    assert step_tables.above_compute_s(lines, "ddp dots", "1gbit") is None
    assert "| ddp dots | 1 | a | 4.0 (4.0 to 4.0) | - | - | 0.1 |" in step_tables.step_times(lines, "1gbit")


def test_ratios_and_differences_are_of_runs_at_the_same_commits_and_have_the_range_of_their_steps() -> None:
    """Of another day the machine may have been slower."""
    lines = [step("compute only", "1gbit", [3.0, 5.0]), step("zero3 flat", "1gbit", [8.0, 12.0])]
    lines += [step("ddp", "1gbit", times, commit="b") for times in ([5.0, 8.0], [4.0, 4.0])]
    lines.insert(2, step("ddp", "1gbit", [4.0, 6.0]))
    table = step_tables.step_times([*lines, step("zero1", "1gbit", [2.0], commit="b")], "1gbit")
    assert "| ddp | 3 | a, b | 5.0 (4.0 to 8.0) | 2.00 (1.33 to 3.00) | 1.0 (-1.0 to 3.0) | 0.1 |" in table
    assert "| zero1 | 1 | b | 2.0 (2.0 to 2.0) | - | - | 0.1 |" in table
    lines += [step("pytorch ddp", "1gbit", times, commit) for times, commit in (([5.0], "a"), ([1.0], "c"))]
    assert step_tables.best_ratio(lines, "1gbit") == Range(value=1.0, low=5 / 6, high=1.25)


# -------------------------------------------------------------------------------------------------------- codecs


def test_times_of_codecs_are_compared_at_the_same_commits_with_the_same_optimizer() -> None:
    """Of another day the machine may have been slower; bytes do not depend on that."""
    lines = [coded("none", [4.0]), coded("none", [8.0], commit="b"), coded("int8", [2.0, 6.0], commit="b")]
    lines += [coded("int4", [1.0], commit="c"), coded("dgc", [1.0], "train.py --config.optimizer.name=sgd", 6.0)]
    text = step_tables.codec_steps(lines)
    assert "| int8 | 1 | b | adamw | 0.00 | 4.00 | 4.00 (2.00 to 6.00) | 2.00 (1.33 to 4.00) | 5.000, 4.000 |" in text
    assert "| int4 | 1 | c | adamw | 0.00 | 4.00 | 1.00 (1.00 to 1.00) | - | 5.000, 4.000 |" in text
    assert "| dgc | 1 | a | sgd | 0.00 | 4.00 | 1.00 (1.00 to 1.00) | - | 5.000, 6.000 |" in text


def test_differences_of_losses_are_those_of_the_same_seed() -> None:
    """Dense runs from 1.4 to 1.9, in another order: int8 is 0.01 to 0.03 above the dense run of its seed."""
    dense = [trained("dense, AdamW", seed, loss) for seed, loss in ((2, 1.9), (0, 1.4), (1, 1.5))]
    lines = [trained("int8, AdamW", seed, loss) for seed, loss in ((0, 1.41), (1, 1.52), (2, 1.93))]
    header, _, of_dense, of_int8 = accuracy.table("text", dense + lines).splitlines()
    assert header == "| text | times smaller | validation loss | minus dense, by seed |"
    assert of_dense == "| dense, AdamW | 4 | 1.600 (1.400 to 1.900) |  |"
    assert of_int8 == "| int8, AdamW | 4 | 1.620 (1.410 to 1.930) | +0.020 (+0.010 to +0.030) |"
    alone = [trained("dense, AdamW", 0, 1.4), trained("int8, AdamW", 0, 1.3), trained("int8, AdamW", 1, 9.0)]
    assert accuracy.table("text", alone).endswith("| -0.100 (-0.100 to -0.100) |")


def test_how_many_times_fewer_bytes_a_run_sends() -> None:
    """Of 4 replicas, by hand: a fifth of 1-bit Adam's steps is dense; DGC's payload is gathered, not reduced."""
    claimed = {name: method.times_smaller(30.0) for name, method in accuracy.methods("text").items()}
    assert claimed["int8, AdamW"] == 30 and claimed["dense, SGD"] == 30
    assert claimed["one_bit_adam, AdamW"] == pytest.approx(1 / (0.2 + 0.8 / 30))
    assert claimed["dgc, 99 %, SGD"] == 15 and claimed["DiLoCo, 10 steps, AdamW"] == 300
    assert claimed["DiLoCo, 10 steps, streaming, AdamW"] == 300


# ----------------------------------------------------------------------------------------------------- the planner


def predicted(name: str, rate: str, measured_s: float, predicted_s: float) -> dict[str, Any]:
    about = {"name": name, "rate": rate, "runs": 1, "timed": "now"}
    return {**about, "measured_s": measured_s, "predicted_s": predicted_s}


def test_errors_are_those_of_the_predictions() -> None:
    lines = [predicted("ddp", "1gbit", 10.0, 9.0), predicted("zero3", "1gbit", 20.0, 23.0)]
    lines += [predicted("ddp", "200mbit", 10.0, 9.9), predicted("mics(2)", "200mbit", 9.8, 10.0)]
    lines += [predicted("zero3", "100mbit", 30.0, 10.0), predicted("mics(2)", "100mbit", 12.0, 12.0)]
    assert planner_errors.summary({"now": lines}).endswith("| now | 6 | 4 | 67% | -10.1% | -67% to +15% |")
    assert planner_errors.bests({"now": lines}).splitlines()[2:] == [
        "| now | 1gbit | 2 | ddp | ddp | 0.0% |",
        "| now | 200mbit | 2 | ddp | mics(2) | 2.0% |",
        "| now | 100mbit | 2 | zero3 | mics(2) | 150.0% |",
    ]
    errors = [(-1) ** n * n / 100 for n in range(1, 11)]
    assert planner_errors.quantile(errors, 0.9) == pytest.approx(0.09)
    assert planner_errors.quantile(errors, 1.0) == pytest.approx(0.10)


@pytest.mark.document
def test_concepts_say_when_losses_on_changing_nodes_leave_each_other() -> None:
    losses = {(line["kind"], line["seed"]): line["losses"] for line in recorded(MEASURED / "dynamic_training.jsonl")}
    first = [same_until(losses["fixed", seed], losses["fluctuating", seed])[0] for seed in range(3)]
    text = " ".join((ROOT / "docs" / "concepts.md").read_text().split())
    assert "on changing nodes from step {}, {} and {} on".format(*first) in text


def test_pages_say_what_the_records_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert pages.main(["--check"]) == 0, capsys.readouterr().err
    assert re.fullmatch(r"the tables of \d+ pages are those of the records\n", capsys.readouterr().out)
