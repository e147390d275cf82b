"""Validation sets of the user's own: what they measure, what the first one decides, and when a run stops early."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.running import arguments, manifest, rows, run_here, stop_after
from support.tables import check_rows, raised

from configs import base
from configs.schema import Config, EvalConfig
from input_pipeline import load
from training import datasets
from training.datasets import validation_sets
from training.validation import EarlyStopping, past_losses

BAD = [
    ("wiki", "eval.data has the set 'wiki': write NAME SOURCE[:PATH] with different names, or split"),
    ("a folder:/x, a folder:/y", "eval.data has the set 'a folder:/y'"),
    ("split folder:/x", "eval.data has the set 'split folder:/x'"),
    ("a folder:/x,", "eval.data has the set ''"),
    ("a/b folder:/x", "eval.data has the set 'a/b folder:/x'"),
    ("a https://host/x?s3cret", "eval.data: the path of a set is a URL with a query"),
]


def config_of(**changes: Any) -> Config:
    values = base.get_config()
    values.sharding.strategy, values.eval.data = "zero3", changes.get("data", "")
    return Config.from_dict(values.to_dict())


def test_bad_sets_are_one_line() -> None:
    check_rows(BAD, lambda data, message: raised(lambda: EvalConfig(data=data)).index(message))
    message = raised(lambda: config_of(data="a folder"))
    assert message.startswith("eval.data, set a: data.path is empty: data.source='folder' needs the folder of the text")
    for absent in ("split, a folder:/absent", "a folder:/absent"):
        message = raised(lambda absent=absent: validation_sets(config_of(data=absent), (), None))
        assert message.startswith("eval.data, set a: data.path /absent does not exist")
    assert raised(lambda: config_of(data="d digits")).startswith(
        "eval.data, set d: data.objective='causal' does not fit"
    )


def test_a_set_is_read_completely_and_the_split_as_before(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.txt").write_text("validation " * 100)
    assert [*validation_sets(config_of(), (), None)] == [""]
    sets = validation_sets(config_of(data=f"own folder:{tmp_path / 'own'}, split"), (), None)
    config = config_of().data
    assert [*sets] == ["own", "split"] and len(sets["own"]) == 1100 // config.seq_len
    assert sets["split"].fingerprint == load(config, "validation", 0).fingerprint


def test_a_set_that_differs_between_processes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.txt").write_text("validation " * 100)
    experiment: Any = SimpleNamespace(config=config_of(data=f"split, own folder:{tmp_path / 'own'}"))
    by_others = itertools.chain([None, None], itertools.repeat("another"))  # of the training data, the split, the set
    differs = lambda key, value: [value, next(by_others) or value if key.topic == "fingerprint" else value]
    monkeypatch.setattr(datasets, "all_gather", differs)
    message = raised(lambda: datasets.load_datasets(experiment, tmp_path, lambda resource: None))
    assert message == "eval.data, set own, differs between processes; give all the same data"


def losses(values: list[float]) -> list[tuple[int, float]]:
    return [(5 * number, value) for number, value in enumerate(values, start=1)]


STOPS = [  # patience, losses, whether the run ends
    (0, [1.0, 2.0, 3.0], False),
    (2, [], False),
    (2, [3.0, 2.0, 2.5], False),
    (2, [3.0, 2.0, 2.0, 2.5], True),
    (2, [3.0, 2.0, 2.5, 1.9], False),
    (2, [float("nan"), 2.0, float("nan")], False),
    (1, [2.0, float("nan")], True),
]


def test_a_run_stops_early_wherever_it_resumed() -> None:
    def check(patience: int, values: list[float], ends: bool) -> None:
        for before in range(len(values) + 1):
            early = EarlyStopping(patience, losses(values)[:before])
            for step, value in losses(values)[before:]:
                early(step, None, {"validation_loss": value})
                early(step + 1, None, {"loss": 0.0})
            assert bool(early.message) == ends

    check_rows(STOPS, check)
    early = EarlyStopping(2, losses([3.0, 2.0, 2.5, 2.25]))
    assert early.message == "stopped early: 2 validations without a lower loss than 2.0000 of step 10 (eval.patience)"


def test_losses_of_other_main_sets_do_not_count(tmp_path: Path) -> None:
    logged = [
        {"step": 1, "validation_loss": 3.0},
        {"step": 2, "validation_loss": 0.5, "validation_loss/own": 0.5, "validation_loss/split": 2.5},
        {"step": 3, "validation_loss": 2.0, "validation_loss/own": 0.4, "validation_loss/split": 2.0},
        {"step": 4, "loss": 1.0},
        {"step": 5, "validation_loss": 1.5, "validation_loss/split": 1.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    for data, step, wanted in (
        ("split, own folder:/own", 4, [(1, 3.0), (3, 2.0)]),
        ("own folder:/own, split", 5, [(1, 3.0), (2, 0.5)]),
        ("", 5, [(1, 3.0)]),
    ):
        config = config_of(data=data)
        assert past_losses(config, tmp_path, step) == []
        config = replace(config, eval=replace(config.eval, patience=2))
        assert past_losses(config, tmp_path, step) == wanted
        assert past_losses(config, tmp_path / "absent", step) == []


@pytest.mark.slow
def test_the_first_set_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which checkpoints are the best, and when the run ends; the run is finished, and ends so when it resumes."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.txt").write_bytes(b"\x01\x02\x03\x04" * 400)
    changes: dict[str, Any] = {"eval__data": f"own folder:{tmp_path / 'own'}, split", "eval__patience": 2}
    changes |= {"eval__every": 1, "checkpoint__every": 1, "checkpoint__keep_best": 1, "checkpoint__keep_last": 1}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run_here(*arguments(whole, data__source="stdlib_text", **changes)) == 0
    said = capsys.readouterr().out
    measured = {row["step"]: row for row in rows(whole) if "validation_loss" in row}
    assert all(row["validation_loss"] == row["validation_loss/own"] for row in measured.values())
    best = min(measured, key=lambda step: measured[step]["validation_loss"])
    last = max(measured)
    assert last == best + 2 and f"lower loss than {measured[best]['validation_loss']:.4f} of step {best}" in said
    assert {int(path.name) for path in (whole / "checkpoints").iterdir() if path.name.isdigit()} == {best, last}
    assert manifest(whole, best)
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["exit_reason"] == "finished" and summary["validation_loss/split"] > 0
    assert "Validation losses" in (whole / "report.html").read_text()
    again = arguments(stopped, data__source="stdlib_text", **changes)
    for hooks, code in (([stop_after(last - 1)], 75), ([], 0)):
        assert run_here(*again, hooks=hooks) == code
    capsys.readouterr()
    assert run_here(*again, make=lambda config: pytest.fail("a finished run is not built again")) == 0
    early = f"stopped early: 2 validations without a lower loss than {measured[best]['validation_loss']:.4f}"
    assert capsys.readouterr().out.startswith(f"{stopped} is finished: {early} of step {best}")
    assert [row["validation_loss"] for row in rows(stopped)] == [row["validation_loss"] for row in rows(whole)]
