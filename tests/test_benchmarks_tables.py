"""The tables and charts of the measured pages: what is compared with what, and that pages say what the records say."""

import re
from typing import Any

import numpy as np
import pytest

from lab import pages
from lab.benchmarks import accuracy, planner_validation, scores, tables, utilisation
from lab.benchmarks.runner import ROOT
from lab.records import MEASURED, Range, recorded, same_until


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
    assert scores.above_compute_s(lines, "ddp", "1gbit") == Range(value=2.0, low=2.0, high=2.0)
    assert scores.above_compute_s(lines, "ddp dots", "1gbit") is None
    assert "| ddp dots | 1 | a | 4.0 (4.0 to 4.0) | - | - | 0.1 |" in tables.step_times(lines, "1gbit")


def test_ratios_and_differences_are_of_runs_at_the_same_commits_and_have_the_range_of_their_steps() -> None:
    """Of another day the machine may have been slower."""
    lines = [step("compute only", "1gbit", [3.0, 5.0]), step("zero3 flat", "1gbit", [8.0, 12.0])]
    lines += [step("ddp", "1gbit", times, commit="b") for times in ([5.0, 8.0], [4.0, 4.0])]
    lines.insert(2, step("ddp", "1gbit", [4.0, 6.0]))
    table = tables.step_times([*lines, step("zero1", "1gbit", [2.0], commit="b")], "1gbit")
    assert "| ddp | 3 | a, b | 5.0 (4.0 to 8.0) | 2.00 (1.33 to 3.00) | 1.0 (-1.0 to 3.0) | 0.1 |" in table
    assert "| zero1 | 1 | b | 2.0 (2.0 to 2.0) | - | - | 0.1 |" in table
    lines += [step("pytorch ddp", "1gbit", times, commit) for times, commit in (([5.0], "a"), ([1.0], "c"))]
    assert scores.best_ratio(lines, "1gbit") == Range(value=1.0, low=5 / 6, high=1.25)


# -------------------------------------------------------------------------------------------------------- codecs


def test_a_chosen_interval_is_beside_fixed_ones_of_its_seed() -> None:
    """By hand: what steps took that hardly met, 10 s a part, over what these took, part by part."""

    def run(inner_steps: int, target: float, seed: int, loss: float, *seconds: float) -> dict[str, Any]:
        parts = [{"rate": rate, "steps": steps, "seconds": s} for (rate, steps), s in zip(utilisation.PARTS, seconds)]
        about = {"inner_steps": inner_steps, "target": target, "seed": seed, "validation_loss": loss, "parts": parts}
        return about | {"met": [50, 100, 150, 300, 310, 400]}

    lines = [run(100, 0.0, 0, 2.0, 10, 10, 10), run(10, 0.0, 0, 1.1, 12.5, 20, 10), run(10, 0.0, 1, 1.2, 1, 1, 1)]
    found = utilisation.table(lines)
    assert "| 2 | - | - | - | - | - |  |" in found
    assert "| 10 | 80.0% (80.0% to 80.0%) | 50.0% (50.0% to 50.0%) | 100.0% (100.0% to 100.0%) | 23 (3 to 42)" in found
    found = utilisation.table([*lines, run(100, 0.95, 0, 1.0, 10, 20, 20)])
    shares = "100.0% (100.0% to 100.0%), every 50 (50 to 50) | 50.0% (50.0% to 50.0%), every 100 (50 to 150)"
    assert f"| chosen, 100 at most | {shares} | 50.0% (50.0% to 50.0%), every 50 (10 to 90) | 50 (50" in found
    assert "1.150 (1.100 to 1.200) | +10.0% (+10.0% to +10.0%) |" in found


def test_times_of_codecs_are_compared_at_the_same_commits_with_the_same_optimizer() -> None:
    """Of another day the machine may have been slower; bytes do not depend on that."""
    lines = [coded("none", [4.0]), coded("none", [8.0], commit="b"), coded("int8", [2.0, 6.0], commit="b")]
    lines += [coded("int4", [1.0], commit="c"), coded("dgc", [1.0], "train.py --config.optimizer.name=sgd", 6.0)]
    text = tables.codec_steps(lines)
    assert "| int8 | 1 | b | adamw | 0.00 | 4.00 | 4.00 (2.00 to 6.00) | 2.00 (1.33 to 4.00) | 5.000, 4.000 |" in text
    assert "| int4 | 1 | c | adamw | 0.00 | 4.00 | 1.00 (1.00 to 1.00) | - | 5.000, 4.000 |" in text
    assert "| dgc | 1 | a | sgd | 0.00 | 4.00 | 1.00 (1.00 to 1.00) | - | 5.000, 6.000 |" in text


def test_differences_of_losses_are_those_of_the_same_seed() -> None:
    """Dense runs from 1.4 to 1.9, in another order: int8 is 0.01 to 0.03 above the one of its own seed."""
    dense = [trained("dense, AdamW", seed, loss) for seed, loss in ((2, 1.9), (0, 1.4), (1, 1.5))]
    lines = [trained("int8, AdamW", seed, loss) for seed, loss in ((0, 1.41), (1, 1.52), (2, 1.93))]
    header, _, of_dense, of_int8 = tables.codec_accuracy("text", dense + lines).splitlines()
    assert header == "| text | times smaller | validation loss | minus dense, by seed |"
    assert of_dense == "| dense, AdamW | 4 | 1.600 (1.400 to 1.900) |  |"
    assert of_int8 == "| int8, AdamW | 4 | 1.620 (1.410 to 1.930) | +0.020 (+0.010 to +0.030) |"
    alone = [trained("dense, AdamW", 0, 1.4), trained("int8, AdamW", 0, 1.3), trained("int8, AdamW", 1, 9.0)]
    assert tables.codec_accuracy("text", alone).endswith("| -0.100 (-0.100 to -0.100) |")


def test_local_sgd_is_beside_the_lowest_dense_runs_of_its_length_and_seeds() -> None:
    local = {"optimizer": "muon", "learning_rate": 0.02, "dense": False, "inner_steps": 50, "momentum": 0.6}
    local |= {"rate": 0.7, "codec": "int4", "times_smaller": 384.4}
    dense = local | {"optimizer": "adamw", "dense": True, "times_smaller": 1.0}
    of_task = [dense | {"validation_losses": [2.0, 2.0, x]} for x in (8.0, 2.0)]
    longer = {"num_steps": 2400, "seeds": [3], "state": None}
    lines = [dense | longer | {"validation_losses": [1.0]}, local | longer | {"validation_losses": [1.1]}, *of_task]
    lines.append(local | longer | {"num_steps": 4800, "beside": 2400, "validation_losses": [0.9]})
    rows = tables.local_steps([*lines, local | {"validation_losses": [2.0, 2.2, 2.1], "state": "mean"}]).splitlines()
    assert rows[4:] == [
        "| 1000 | 0, 1, 2 | muon, mean state | 0.02 | 50 | 0.6 | 0.7 | int4 | 384 | 2.100 (2.000 to 2.200) "
        "| +5.0% (+0.0% to +10.0%) |",
        "| 2400 | 3 | adamw | 0.02 | dense |  |  |  | 1 | 1.000 (1.000 to 1.000) | +0.0% (+0.0% to +0.0%) |",
        "| 2400 | 3 | muon | 0.02 | 50 | 0.6 | 0.7 | int4 | 384 | 1.100 (1.100 to 1.100) | +10.0% (+10.0% to +10.0%) |",
        "| 4800, beside 2400 | 3 | muon | 0.02 | 50 | 0.6 | 0.7 | int4 | 384 | 0.900 (0.900 to 0.900) "
        "| -10.0% (-10.0% to -10.0%) |",
    ]


def test_how_many_times_fewer_bytes_a_run_sends() -> None:
    """Of 4 replicas, by hand: a fifth of 1-bit Adam's steps is dense; DGC's payload is gathered, not reduced."""
    claimed = {name: method.times_smaller(30.0) for name, method in accuracy.methods("text").items()}
    assert claimed["int8, AdamW"] == 30 and claimed["dense, SGD"] == 30
    assert claimed["one_bit_adam, AdamW"] == pytest.approx(1 / (0.2 + 0.8 / 30))
    assert claimed["dgc, 99 %, SGD"] == 15 and claimed["DiLoCo, 10 steps, AdamW"] == 300
    assert claimed["DiLoCo, 10 steps, streaming, AdamW"] == 300


# ---------------------------------------------------------------------------------------------------- elasticity


def test_losses_are_the_same_until_a_step() -> None:
    assert same_until([2.0, 4.0, 8.0, 1.0], [2.0, 4.00002, 8.8, 1.0]) == (3, pytest.approx(5e-6))
    assert same_until([2.0, 4.0], [2.0, 4.0]) == (None, 0.0)
    assert same_until([2.0], [3.0]) == (1, 0.0)


# -------------------------------------------------------------------------------- pipelines, overlap, the planner


def test_a_ratio_of_pipelines_compares_what_was_measured_in_the_same_round() -> None:
    """Of two stages: (2 + 1)/2 ticks a micro-batch against (8 + 1)/8."""

    def clocks(*cpu_seconds: float) -> dict[str, list[float]]:
        return {"seconds": [value / 2 for value in cpu_seconds], "cpu_seconds": list(cpu_seconds)}

    found = {"2": {"stages": clocks(0.3, 0.5), "none": clocks(0.1, 0.25)}}
    found |= {"8": {"stages": clocks(0.8, 2.0), "none": clocks(0.8, 1.0)}}
    line = {"stages": 2, "keys": [], "by_micro_batches": found}
    assert tables.bubble(line).splitlines()[2:] == [
        "| 2 | 33.3% | 0.15 to 0.25 s | 1.25 (1.00 to 1.50) | 1.33 | 2.50 (2.00 to 3.00) |",
        "| 8 | 11.1% | 0.40 to 1.00 s | 1 | 1.00 | 1.50 (1.00 to 2.00) |",
    ]


def predicted(name: str, rate: str, measured_s: float, predicted_s: float) -> dict[str, Any]:
    about = {"name": name, "rate": rate, "runs": 1, "timed": "now"}
    return {**about, "measured_s": measured_s, "predicted_s": predicted_s}


def test_errors_are_those_of_the_predictions() -> None:
    lines = [predicted("ddp", "1gbit", 10.0, 9.0), predicted("zero3", "1gbit", 20.0, 23.0)]
    lines += [predicted("ddp", "200mbit", 10.0, 9.9), predicted("mics(2)", "200mbit", 9.8, 10.0)]
    lines += [predicted("zero3", "100mbit", 30.0, 10.0), predicted("mics(2)", "100mbit", 12.0, 12.0)]
    assert planner_validation.summary({"now": lines}).endswith("| now | 6 | 4 | 67% | -10.1% | -67% to +15% |")
    assert planner_validation.bests({"now": lines}).splitlines()[2:] == [
        "| now | 1gbit | 2 | ddp | ddp | 0.0% |",
        "| now | 200mbit | 2 | ddp | mics(2) | 2.0% |",
        "| now | 100mbit | 2 | zero3 | mics(2) | 150.0% |",
    ]
    errors = [(-1) ** n * n / 100 for n in range(1, 11)]
    assert planner_validation.quantile(errors, 0.9) == pytest.approx(0.09)
    assert planner_validation.quantile(errors, 1.0) == pytest.approx(0.10)


@pytest.mark.document
def test_concepts_say_when_losses_on_changing_nodes_leave_each_other() -> None:
    losses = {(line["kind"], line["seed"]): line["losses"] for line in recorded(MEASURED / "dynamic_training.jsonl")}
    first = [same_until(losses["fixed", seed], losses["fluctuating", seed])[0] for seed in range(3)]
    text = " ".join((ROOT / "docs" / "concepts.md").read_text().split())
    assert "on changing nodes from step {}, {} and {} on".format(*first) in text


def test_pages_say_what_the_records_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert pages.main(["--check"]) == 0, capsys.readouterr().err
    assert re.fullmatch(r"the tables of \d+ pages are those of the records\n", capsys.readouterr().out)
