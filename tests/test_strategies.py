"""Every strategy gives the losses of a single device that knows no sharding, to 1e-5 relative in f32."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from support import workload
from support.running import ROOT
from support.suite import SLOW
from support.workload import STRATEGIES

import models
from sharding.hlo import read_collectives

OPTIONS = {
    "hierarchical": (True, False),
    "two_hop": (True, False),
    "gather": ("layer", "node", "micro_step", "step"),
    "tensor": (1, 2),
    "partitioner": ("manual", "auto"),
    "kind": ("decoder", "encoder"),
}


def is_wanted(case: dict) -> bool:
    """Whether the case is valid and not redundant: `node` needs two hops; XLA's partitioner has only the defaults.

    Among the strategies that gather nothing, only zero2 is tested with other values of `gather`.
    """
    if case["gather"] == "node" and not case["two_hop"]:
        return False
    if case["gather"] != "layer" and case["strategy"] in ("ddp", "zero1", "none-node-4"):
        return False
    defaults = case["hierarchical"], case["two_hop"], case["gather"]
    return case["partitioner"] == "manual" or defaults == (True, True, "layer")


def all_cases() -> list[dict]:
    names = ("strategy", *OPTIONS)
    combinations = itertools.product(STRATEGIES, *OPTIONS.values())
    return [case for values in combinations if is_wanted(case := dict(zip(names, values, strict=True)))]


def covering(cases: list[dict], values: int) -> list[dict]:
    """Returns a few cases in which all combinations of `values` values occur that occur in any case."""
    tuples = [
        set(itertools.combinations(sorted((key, str(value)) for key, value in case.items()), values)) for case in cases
    ]
    missing, chosen = set().union(*tuples), []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(tuples[i] & missing))
        chosen.append(cases[best])
        missing -= tuples[best]
    return chosen


def name(case: dict) -> str:
    return "-".join(str(value) for value in case.values())


ALL = all_cases()
PAIRS, TRIPLES = covering(ALL, 2), covering(ALL, 3)
# tests/test_collectives_of_strategies.py trains with the other strategies
QUICK = covering([case for case in ALL if case["strategy"] in ("ddp", "zero3", "hsdp", "none-node-4")], 1)
REST = [pytest.param(case, marks=SLOW) for case in PAIRS if case not in QUICK]
REST += [pytest.param(case, marks=pytest.mark.slow) for case in TRIPLES if case not in PAIRS + QUICK]


@pytest.mark.parametrize("case", [*QUICK, *REST], ids=name)
def test_losses_equal_a_single_device(case: dict) -> None:
    """With every value; in test-all in every combination of two, before a release of three."""
    case = dict(case)
    strategy, kind, tensor = STRATEGIES[case.pop("strategy")], case.pop("kind"), case.pop("tensor")
    got = workload.losses(kind, workload.plan(kind, tensor=tensor, **strategy, **case))
    np.testing.assert_allclose(got, workload.single_device_losses(kind), rtol=1e-5)


def test_the_oracle_learns_and_its_batch_tells_rows_apart() -> None:
    losses = workload.single_device_losses("decoder")
    assert losses[-1] < losses[0] - 0.1
    weights = workload.batch()["weights"]
    assert np.ptp(weights.sum(axis=1)) > 1


@pytest.mark.parametrize(("rows", "accumulation"), [pytest.param(13, 2, marks=SLOW), pytest.param(3, 1, marks=SLOW)])
def test_a_batch_that_the_devices_do_not_divide_gives_the_same_losses(rows: int, accumulation: int) -> None:
    sh = workload.plan("decoder", strategy="mics", partition_size=4)
    got = workload.losses("decoder", sh, rows=rows, accumulation=accumulation)
    np.testing.assert_allclose(got, workload.single_device_losses("decoder", rows), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "per_node"), [pytest.param(*shape, marks=SLOW) for shape in ((8, 1), (1, 1), (1, 8))]
)
def test_losses_do_not_depend_on_the_shape_of_the_cluster(nodes: int, per_node: int) -> None:
    sh = workload.plan("decoder", nodes=nodes, per_node=per_node, strategy="hsdp")
    np.testing.assert_allclose(workload.losses("decoder", sh), workload.single_device_losses("decoder"), rtol=1e-5)


@pytest.mark.parametrize(
    "how",
    [dict(strategy="zero2", nodes=8, per_node=1), pytest.param(dict(strategy="mics", partition_size=4), marks=SLOW)],
)
def test_parameters_that_are_kept_whole(how: dict) -> None:
    """ParamSpec(replicate=True), here of all vectors."""
    sh = workload.plan("decoder", **how)
    sh = replace(sh, placements=sh.map(lambda p: p if p.ndim == 3 else replace(p, dim=None)))
    np.testing.assert_allclose(workload.losses("decoder", sh), workload.single_device_losses("decoder"), rtol=1e-5)


def test_bfloat16_compute_keeps_float32_parameters_and_stays_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all else that steps hand on. Gathers send two bytes per value, and the model computes with them."""
    narrow = models.build(replace(workload.model("decoder").config, compute_dtype="bfloat16"))
    monkeypatch.setattr(workload, "model", lambda kind, num_layers=2: narrow)
    sh = workload.plan("decoder", dtype=jax.numpy.bfloat16, strategy="mics", partition_size=4)
    step, state, data = workload.compiled_step("decoder", sh)
    state, metrics = step(state, data)
    assert {x.dtype.name for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim} == {"float32"}
    collectives = [c for c in read_collectives(step.as_text(), sh.layout.shape) if c.num_elements > 100]
    assert {c.dtype for c in collectives if c.label == "gather"} == {"u16"}
    assert {c.dtype for c in collectives if c.label == "replica_all_reduce"} == {"f32"}
    assert all(c.payload_bytes == 2 * c.num_elements for c in collectives if c.label == "gather")
    monkeypatch.undo()
    np.testing.assert_allclose(float(metrics["loss"]), workload.single_device_losses("decoder")[0], rtol=1e-2)


PROGRAM = """
import json, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
from support import workload
print(json.dumps(workload.losses("decoder", workload.plan("decoder", strategy="hsdp")).tolist()))
"""


@pytest.mark.slow
def test_losses_with_default_xla_flags() -> None:
    """All other tests use the flags of fast_compile.py."""
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    np.testing.assert_allclose(json.loads(found.stdout), workload.single_device_losses("decoder"), rtol=1e-5)
