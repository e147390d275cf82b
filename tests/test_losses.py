"""The cost in loss of sending less: the rows of configs/losses.csv by hand, and their lines for a config."""

import csv
import io
from dataclasses import replace
from typing import Any

import pytest
from support.planning import one_row, small
from support.running import ROOT

from configs import losses
from configs.losses import RecordedLoss
from configs.schema import defaults
from lab.benchmarks import accuracy, time_to_loss
from lab.benchmarks import losses as written
from lab.records import Records

INT8 = {"compression.all_reduce": "int8"}


def described(**changes: Any) -> list[str]:
    return losses.described(small(**changes).to_dict(), defaults())


def test_rows_are_those_by_hand() -> None:
    """Every method is above its dense run with the same seed, whichever comes first in the record."""
    runs = [("dense, AdamW", 0, 2.0), ("int8, AdamW", 1, 3.014), ("int8, AdamW", 0, 1.9), ("dense, AdamW", 1, 3.0)]
    runs += [("averages, 10 steps, Muon", 0, 2.2), ("dense, Muon", 0, 2.1), ("one_bit, AdamW", 2, 2.2)]  # without dense
    lines = [{"task": "text", "method": name, "seed": seed, "validation_loss": loss} for name, seed, loss in runs]
    local = {"inner_steps": 50, "momentum": 0.6, "rate": 0.7, "optimizer": "muon", "codec": "int4", "dense": False}
    dense = local | {"dense": True, "optimizer": "adamw", "validation_losses": [2.0, 2.2]}
    worse = dense | {"validation_losses": [2.1, 2.3]}
    longer = [line | {"num_steps": 2400, "validation_losses": [1.0, 1.0]} for line in (dense, local)]
    steps = [worse, dense, local | {"validation_losses": [2.0, 2.4]}, local | {"state": "mean"}, *longer]
    found = csv.DictReader(
        io.StringIO(written.text(Records({"accuracy": lines, "local_steps": steps, "time_to_loss": []})))
    )
    cells = [(*map(row.get, ("setting", "optimizer", "seeds", "mean", "least", "most", "steps")),) for row in found]
    averages = "local_sgd.inner_steps=10 local_sgd.outer_learning_rate=1.0 local_sgd.outer_momentum=0.0"
    tuned = "compression.all_reduce=int4 local_sgd.inner_steps=50 local_sgd.outer_learning_rate=0.7"
    assert cells == [
        ("compression.all_reduce=int8", "adamw", "2", "-0.0430", "-0.1000", "0.0140", "1"),  # at most 0.47 % above
        (averages, "muon", "1", "0.1000", "0.1000", "0.1000", ""),
        (f"{tuned} local_sgd.outer_momentum=0.6 optimizer.name=muon", "adamw", "2", "0.1000", "0.0000", "0.2000", ""),
    ]


def test_steps_to_the_loss_are_over_the_dense_runs_and_of_the_best_length() -> None:
    """Dense runs reach 1.005 times their last loss of 2.0 and 4.0 between steps 60 and 80; a longer run counts, too."""
    name = "averages, 10 steps, int4"
    at = [20, 40, 60, 80]
    lines = [loss_line("dense", 0, at, [8.0, 4.0, 2.02, 2.0]), loss_line("dense", 1, at, [9.0, 5.0, 4.5, 4.0])]
    lines += [loss_line(name, seed, at, [9.0, 8.0, 7.0, loss]) for seed, loss in ((0, 2.5), (1, 4.5))]
    longer = [20, 40, 60, 80, 100, 120]
    lines += [loss_line(f"{name}, half longer", 0, longer, [9.0, 8.0, 7.0, 3.0, 2.01, 1.9])]
    (row,) = written.of_time_to_loss(Records({"time_to_loss": lines}))
    dense = 60 + 20 * (2.02 - 2.01) / (2.02 - 2.0)  # seed 0, the only seed of the longer run
    assert row["steps"] == f"{100 / dense:.3f}"
    assert (row["seeds"], row["mean"], row["least"], row["most"]) == (2, "0.5000", "0.5000", "0.5000")
    assert "steps" in row and row["parameters"] == 1_058_176
    alone = [line for line in lines if "longer" not in line["method"]]
    (row,) = written.of_time_to_loss(Records({"time_to_loss": alone}))
    assert row["steps"] == ""  # neither seed gets there


def loss_line(method: str, seed: int, at: list[int], found: list[float]) -> dict[str, Any]:
    """A line of time_to_loss.jsonl, of a run as long as its method's."""
    about = {"part": "losses", "method": method, "seed": seed, "learning_rate": 4e-3, "at": at}
    return {**about, "steps": time_to_loss.METHODS[method].steps, "validation_losses": found}


def test_a_method_is_free_if_its_differences_reach_zero_on_both_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    method = "compression.all_reduce=int8"
    good = [one_row(setting=INT8, task=task, mean=0.1, least=-0.1) for task in losses.TASKS]
    muon = one_row(setting=INT8 | {"optimizer.name": "muon"})  # compared with dense AdamW: does not measure int8
    dropped = one_row(setting=INT8 | {"compression.error_feedback": "False"})
    cases: list[tuple[list[RecordedLoss], bool | None]] = [
        ([*good, muon, dropped], True),
        ([], None),
        (good[:1], None),
        ([good[0], replace(good[1], seeds=2)], None),
        ([*good, one_row(setting=INT8, seeds=1)], None),
        ([*good, one_row(setting=INT8, least=0.01)], False),
        ([one_row(setting=INT8)], False),
    ]
    for rows, is_free in cases:
        monkeypatch.setattr(losses, "rows", lambda rows=rows: rows)
        assert losses.is_free(losses.by_method(rows).get(method, [])) is is_free
        said = described(compression__all_reduce="int8")
        about = {True: [], False: [f"{method} is not free"], None: [f"{method} is not known to be free"]}
        assert [line.partition(":")[0] for line in said] == about[is_free]
    monkeypatch.setattr(losses, "rows", lambda: good)
    (line,) = described(compression__all_reduce="int8", compression__error_feedback=False)
    assert line.startswith(f"{method} compression.error_feedback=False is not known to be free: ")


def test_a_method_that_is_not_free_is_named_with_what_it_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = [one_row(setting={"compression.all_reduce": "statistical", "a": str(i)}, mean=i / 10) for i in (3, 1, 2)]
    local = {"local_sgd.outer_momentum": "0.6", "local_sgd.inner_steps": "5", "compression.all_reduce": "statistical"}
    rows = [*bits, one_row(setting=local, task="digits", mean=0.4), one_row(setting=local | {"optimizer.name": "muon"})]
    monkeypatch.setattr(losses, "rows", lambda: rows)
    about, runs = "its loss, over the dense run's", "in recorded runs of small models"
    page = "docs/results/compression_accuracy.md"
    none = "not recorded on digits"
    cost = f"{about} (adamw) {runs}: +0.100 to +0.300 on text, {none}; {page}"
    assert described(compression__all_reduce="statistical", compression__all_gather_intra="int8") == [
        f"compression.all_reduce=statistical is not free: {cost}",
        f"compression.all_gather_intra=int8 is not known to be free: {about} {runs}: not recorded on text, {none}; "
        f"{page}",
    ]
    muon = {"optimizer__name": "muon", "compression__all_reduce": "statistical", "local_sgd__inner_steps": 5}
    cost = f"{about} (adamw) {runs}: not recorded on text, +0.400 on digits; {page}"
    assert described(**muon) == [f"local_sgd.inner_steps is not free: {cost}"]  # the momentum is another one
    cost = f"{about} (adamw) {runs} with the same keys: +0.200 on text, {none}; {page}"
    assert described(**muon, local_sgd__outer_momentum=0.6) == [f"local_sgd.inner_steps is not free: {cost}"]
    assert described() == []
    feedback, local = described(**muon, compression__error_feedback=False)
    assert local.startswith("local_sgd.inner_steps is not free: ")
    dropped = "compression.all_reduce=statistical compression.error_feedback=False"
    assert feedback == f"{dropped} is not known to be free: {about} {runs}: not recorded on text, {none}; {page}"


def test_which_runs_are_as_the_dense_runs_of_the_records(subtests: pytest.Subtests) -> None:
    """Those send all in every step, and train from scratch."""
    for keys, optimizer in [
        ({}, "adamw"),
        ({"optimizer__name": "muon"}, "muon"),
        ({"compression__all_reduce": "int8"}, ""),
        ({"local_sgd__inner_steps": 5}, ""),
        ({"model__weights": "llama"}, ""),
    ]:
        with subtests.test(keys=keys, optimizer=optimizer):
            assert losses.dense_optimizer(small(**keys).to_dict()) == optimizer


def test_records_hold_for_runs_like_the_recorded_ones_only(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have 0.12 to 1.06 M parameters, 4 replicas, and 0.38 to 8.4 tokens per parameter."""
    monkeypatch.setattr(
        losses, "rows", lambda: [one_row(setting=INT8, parameters=size) for size in (123_200, 1_059_000)]
    )
    about = {"parameters": 200_000, "nodes": 4, "num_steps": 1000}
    for change, optimizer in [
        ({}, "adamw"),
        ({"nodes": 8}, ""),
        ({"parameters": 1_200_000}, ""),
        ({"parameters": 120_000}, ""),
        ({"num_steps": 60}, ""),  # 0.31
        ({"num_steps": 1700}, ""),  # 8.7
    ]:
        case = about | change
        config = small(num_steps=case.pop("num_steps"), batch__global_size=16, data__seq_len=64).to_dict()
        with subtests.test(**change):
            assert losses.checked_optimizer(config, **case) == optimizer


def test_the_settings_of_a_way_to_the_loss_reach_it_in_every_record(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"compression.delayed": "True"}
    rows = [one_row(setting=INT8, steps=1.0), one_row(setting=other, steps=0.5), one_row(setting=INT8, steps=1.5)]
    monkeypatch.setattr(losses, "rows", lambda: [*rows, one_row(setting=other), one_row(setting=INT8, optimizer="sgd")])
    assert losses.settings_to_loss("adamw") == [INT8] and losses.settings_to_loss("sgd") == []
    assert losses.steps_to_loss(losses.rows_of(INT8, "adamw")) == 1.5
    assert losses.rows_of({}, "adamw") == []


def test_the_file_can_be_read_and_its_records_are_there() -> None:
    assert {row.task for row in losses.rows()} == {*losses.TASKS} <= {*accuracy.TASKS}
    assert all(row.least <= row.mean <= row.most for row in losses.rows())
    choice = {"optimizer__name": "muon", "local_sgd__outer_momentum": 0.6, "compression__all_reduce": "statistical"}
    (row,) = losses.recorded(small(**choice, local_sgd__inner_steps=10).to_dict(), defaults())  # docs/compression.md's
    assert row.mean < 0 and row.optimizer == "adamw"
    assert [record for record in {row.record for row in losses.rows()} if not (ROOT / record).is_file()] == []
