"""Type checker: which trees may be handed over as which others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PROGRAM = """
from collections.abc import Mapping

import jax
import optax

from compression.exchange import exact, exchange, transform
from sharding.gradients import per_replica
from sharding.gathers import to_gradient_scope
from sharding.plan import ShardingPlan
from sharding.step import AfterMicroSteps, applied
from sharding.trees import Grads, GradsR, Params, Placements, Shards


def right(plan: ShardingPlan, params: Params, grads: Grads, grads_R: GradsR, shards: Shards) -> Grads:
    mean, _ = exact(plan).update(grads_R, (), params)
    AfterMicroSteps(exchange(plan), optax.adamw(1e-3)).update(per_replica(plan, grads), ((), ()), params)
    to_gradient_scope(plan, plan.placements, jax.tree.map(lambda x: x, grads_R))
    return mean


def wrong(plan: ShardingPlan, params: Params, grads: Grads, grads_R: GradsR, shards: Shards) -> Params:
    exact(plan).update(grads, (), params)  # wrong
    per_replica(plan, grads_R)  # wrong
    applied(grads, grads)  # wrong
    to_gradient_scope(plan, params, grads)  # wrong
    to_gradient_scope(plan, plan.placements, shards)  # wrong
    AfterMicroSteps(exchange(plan), optax.adamw(1e-3)).update(grads, ((), ()), params)  # wrong
    AfterMicroSteps(exchange(plan), optax.adamw(1e-3)).optimizer.update(grads_R, ())  # wrong
    transform(lambda params: (), lambda updates, state, params=None: (updates, state))  # wrong
    return {"layers": grads}  # wrong
"""


@pytest.mark.slow
def test_checker_tells_trees_apart(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = {"include": ["program.py"], "extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["-m", "basedpyright", "--outputjson", f"--pythonpath={sys.executable}", f"--project={tmp_path}"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    errors = [entry["range"]["start"]["line"] for entry in json.loads(done.stdout)["generalDiagnostics"]]
    wrong = [i for i, line in enumerate(PROGRAM.splitlines()) if line.endswith("# wrong")]
    assert sorted(set(errors)) == wrong
