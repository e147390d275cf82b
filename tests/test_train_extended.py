"""train.py --extend: a run gets more steps; what its learning rate is then."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.running import arguments, check_same_end, rows, run_here

from configs.schema import OptimizerConfig
from training.optimizers import make_schedule


def error_of(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert run_here(*args) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


@pytest.mark.slow
def test_a_finished_run_is_extended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, long = (arguments(tmp_path, num_steps=steps) for steps in (10, 12))
    assert run_here(*short) == 0
    assert "num_steps was 10 and is 12; choose another --workdir, or train this run for longer by --extend" in error_of(
        capsys, *long
    )
    assert "seed was 0 and is 1" in error_of(capsys, *arguments(tmp_path, num_steps=12, seed=1), "--extend")
    assert run_here(*long, "--extend") == 0
    assert f"resumed at step 10 of 12 in {tmp_path}" in (out := capsys.readouterr().out)
    assert "extended from 10 steps" in out
    assert json.loads((tmp_path / "attempts.json").read_text())["extended"] == [{"step": 10, "before": 10, "after": 12}]
    logged = {row["step"]: row["learning_rate"] for row in rows(tmp_path)}
    config = OptimizerConfig(warmup_steps=2, learning_rate=0.01)
    wanted = [float(make_schedule(config, 10 if step < 10 else 12)(step)) for step in range(12)]
    np.testing.assert_allclose([logged[step] for step in range(1, 13)], wanted, rtol=1e-6)
    for args in (long, [*long, "--extend"]):
        assert run_here(*args) == 0
        assert f"{tmp_path} is finished: 12 steps are done" in capsys.readouterr().out
    assert "num_steps was 12 and is 10; choose another --workdir\n" in error_of(capsys, *short, "--extend")


@pytest.mark.slow
def test_an_extended_run_is_the_longer_one(tmp_path: Path) -> None:
    """Bit by bit where the learning rate is the same: the order of the examples does not depend on num_steps."""
    short, extended, long = (
        arguments(tmp_path / name, num_steps=steps, optimizer__schedule="constant")
        for name, steps in (("extended", 5), ("extended", 10), ("long", 10))
    )
    assert run_here(*short) == run_here(*extended, "--extend") == run_here(*long) == 0
    check_same_end(tmp_path / "extended", tmp_path / "long")


def test_the_learning_rate_after_an_extension() -> None:
    """It is that of a run that had the new number of steps from its start, as docs/training.md says."""
    wanted = {
        "constant": (1, 1),
        "linear": (0.1, 0.55),
        "cosine": (0.1, 0.55),
        "quadratic": (0.1, 0.32),
        "wsd": (0.1, 1),
    }
    for schedule, rates in wanted.items():
        config = OptimizerConfig(schedule=schedule, learning_rate=1.0, warmup_steps=0, final_fraction=0.1)
        last, next_rate = float(make_schedule(config, 100)(99)), float(make_schedule(config, 200)(100))
        np.testing.assert_allclose((last, next_rate), rates, atol=6e-3, err_msg=schedule)
