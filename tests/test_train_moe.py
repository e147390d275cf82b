"""Runs of train.py with experts: what is logged and said, going on with another scope, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.running import arguments, losses, rows, run_here, stop_after
from support.tables import check_rows

from configs import base, tiny
from configs.schema import Config
from planner.bounds import SLACK, traffic, traffic_by_use
from runtime.exit_codes import ExitCode
from training.experiment import Experiment, make_experiment

MOE = dict(config="tiny:moe", model__num_layers=2, model__num_experts=4, num_steps=4, checkpoint__every=4)


@pytest.mark.slow
def test_a_run_tells_what_it_drops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Room for a quarter of the choices: three quarters are dropped, say the first step and the end."""
    changes = MOE | {"model__capacity_factor": 0.25, "model__max_dropped": 0.5, "log_every": 2, "eval__every": 4}
    assert run_here(*arguments(tmp_path / "run", **changes)) == 0
    logged = rows(tmp_path / "run")
    assert [row["step"] for row in logged] == [1, 2, 4]
    for row in logged:
        assert 0.7 < row["dropped_share"] < 0.8 and row["balance_loss"] > 0.99 and row["z_loss"] > 0
        of_routers = 0.01 * row["balance_loss"] + 0.001 * row["z_loss"]
        assert row["loss"] == pytest.approx(row["cross_entropy"] + of_routers, rel=1e-5)
    assert 0.7 < logged[-1]["validation_dropped_share"] < 0.8
    assert logged[-1]["validation_loss"] == pytest.approx(logged[-1]["cross_entropy"], rel=0.1)
    out = capsys.readouterr().out
    assert re.findall(r"step (\d): warning: 7\d\.\d% of the tokens' choices found no room", out) == ["1"]
    assert out.count("found no room") == out.count("the warning above applied to 4 of 4 steps") == 1


@pytest.mark.release
def test_a_run_with_room_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And its file of collectives has the tokens' all-to-alls, of the formula's bytes."""
    changes = MOE | {"model__capacity_factor": 4.0, "model__moe_every": 1, "model__num_layers": 4, "sample__length": 4}
    assert run_here(*arguments(tmp_path / "run", **changes)) == 0
    assert "warning" not in capsys.readouterr().out
    assert all(row["dropped_share"] == 0 for row in rows(tmp_path / "run"))
    report = json.loads((tmp_path / "run" / "collectives.json").read_text())
    sent = [c for c in report["collectives"] if c["name"] == "experts"]
    # 4 layers, 6 exchanges each but the last's 4, 2 micro-steps of a row; 4 experts with room for all 32 tokens of 32
    # values, half are here
    assert sum(c["intra_bytes"] for c in sent) == (6 * 3 + 4) * 2 * 4 * (4 * 32 * 32) // 2
    assert sum(c["inter_bytes"] for c in sent) == 0
    planned = traffic(make_experiment(Config.from_dict(json.loads((tmp_path / "run" / "config.json").read_text()))))
    for level in ("inter", "intra"):
        assert 0.6 * report[f"{level}_bytes"] <= planned[level] <= SLACK * report[f"{level}_bytes"], level


def on_two_nodes(changes: dict[str, Any], *, hierarchical: bool) -> Experiment:
    """Two layers of four experts, each on its own device, with these keys of the model."""
    config = tiny.get_config("moe")
    config.mesh.devices_per_node = 2
    config.sharding.update({"strategy": "mics", "partition_size": 4, "experts": "4"})
    config.ablation.hierarchical = hierarchical
    config.model.update({"num_experts": 4, "num_layers": 2, "moe_every": 1} | changes)
    return make_experiment(base.typed(config))


def tokens_of(experiment: Experiment) -> int:
    """The tokens of a device and step."""
    config = experiment.config
    return experiment.batches.accumulation * config.batch.micro_size * config.data.seq_len


def test_the_planner_counts_tokens_between_nodes_too() -> None:
    """Four devices on two nodes hold an expert each; half of all tokens go to the other node, on either way."""

    def check(hierarchical: bool, inside: float, remat: str, times: int) -> None:
        changes = {"capacity_factor": 1.0, "experts_per_token": 1, "compute_dtype": "float32", "remat": remat}
        experiment = on_two_nodes(changes, hierarchical=hierarchical)
        whole = times * 4 * tokens_of(experiment) * experiment.config.model.hidden  # of all-to-alls
        assert traffic_by_use(experiment)["experts"] == {"inter": whole / 2, "intra": whole * inside}

    check_rows([(False, 1 / 4, "full", 6 + 4), (True, 1 / 2, "dots", 4 + 4)], check)


def test_the_planner_counts_tokens_of_experts_without_a_capacity() -> None:
    """Two nodes of two devices hold an expert each: the formula of sharding/experts.py, of two layers."""

    def check(hierarchical: bool, remat: str, of_tokens: tuple[float, float], of_routing: tuple[float, float]) -> None:
        changes = {"capacity_factor": 0.0, "experts_per_token": 2, "compute_dtype": "bfloat16", "remat": remat}
        experiment = on_two_nodes(changes, hierarchical=hierarchical)
        tokens = tokens_of(experiment)
        x_bytes, r_bytes = 2 * tokens * experiment.config.model.hidden, 4 * tokens * 2 * 2
        wanted = (x * x_bytes + r * r_bytes for x, r in zip(of_tokens, of_routing, strict=True))
        assert traffic_by_use(experiment)["experts"] == dict(zip(("inter", "intra"), wanted, strict=True))

    # gathers send 1 and 2 of a device's tokens, or in a ring of four 3 / 2 on each level; sums 1 and 2, or 2 and 1
    rows = [
        (True, "full", (5 + 4, 2 * (5 + 4)), (3 + 2, 2 * (3 + 2))),
        (False, "dots", (4 * 1.5 + 4 * 2, 4 * 1.5 + 4 * 1), (2 * 1.5 + 2 * 2, 2 * 1.5 + 2 * 1)),
    ]
    check_rows(rows, check)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_nodes(tmp_path: Path) -> None:
    """Without a capacity: three steps on four nodes of two devices, three on two of four, which divide the experts."""
    changes = MOE | {"num_steps": 6, "checkpoint__every": 3, "model__capacity_factor": 0.0}
    assert run_here(*arguments(tmp_path / "whole", **changes)) == 0
    assert run_here(*arguments(tmp_path / "part", **changes), hooks=[stop_after(3)]) == ExitCode.RESUMABLE
    other = {"sharding__strategy": "zero3", "sharding__partition_size": 0, "sharding__experts": 4}
    other |= {"mesh__devices_per_node": 4}
    assert run_here(*arguments(tmp_path / "part", **changes | other)) == 0
    np.testing.assert_allclose(losses(tmp_path / "part"), losses(tmp_path / "whole"), rtol=1e-5)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts that do not divide": (
        {"model__num_experts": 3},
        "3 experts cannot be divided among the 2 shards of sharding.experts; choose another sharding.experts",
    ),
    "wider than the parameters": (
        {"sharding__experts": 4},
        r"sharding.experts=4 \(4 devices\) must lie within the scope of the parameters \(2 devices\); choose none or a "
        "number that divides 2",
    ),
    "a number that does not fit": (
        {"sharding__experts": 3},
        "sharding.experts=3: a scope of 3 devices .* sizes that divide: 1, 2, 4, 8",
    ),
}


def test_what_cannot_be_divided_is_one_line(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(changes: dict[str, Any], said: str) -> None:
        tmp_path = tmp_path_factory.mktemp("row")
        assert run_here(*arguments(tmp_path / "run", **MOE | changes)) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and re.search(said, err), err

    check_rows(REFUSED.values(), check)
