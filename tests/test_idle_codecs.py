"""A run with a codec continues on one node, where the codec idles, and on several nodes again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict
from support import examples, workload
from support.checkpointing import owed, replicas, restore, save
from support.exchanging import gradients
from support.running import IGNORED, arguments, finish, start
from support.suite import SLOW

from compression.methods import method_named
from configs.base import typed
from configs.schema import Config
from sharding.plan import ShardingPlan
from training import idle
from training.experiment import make_experiment

METHODS = examples.METHODS | {name: method_named(name) for name in ("int8", "one_bit_adam")}
WARM_UP = {name: {"warmup_steps": 1} for name in ("power_sgd", "one_bit_adam")}


def chain_of(plan: ShardingPlan, name: str, *, late: bool) -> optax.GradientTransformation:
    setup = workload.setup(plan, METHODS[name], block=32, delayed=late, **WARM_UP.get(name, {}))
    return workload.chained(METHODS[name].transform(setup), optax.sgd(1.0))


def stepper(plan: ShardingPlan, chain: optax.GradientTransformation) -> Any:
    """Returns a function of states, parameters and a seed: a step's moves, and the states where they were before."""
    update = jax.jit(chain.update)

    def step(states: Any, params: Any, seed: int) -> Any:
        moves, after = update(gradients(plan, seed)[0], states, params)
        return moves, jax.device_put(after, jax.tree.map(lambda x: x.sharding, states))

    return step


@pytest.mark.parametrize(
    ("method", "late", "per_node"),
    [
        pytest.param("int8", True, 4, marks=SLOW),  # two replicas in the one node
        pytest.param("int8", False, 2, marks=SLOW),  # one replica
        pytest.param("power_sgd", False, 2, marks=SLOW),
        pytest.param("power_sgd", True, 4, marks=SLOW),
    ],
)
def test_an_idle_codec_keeps_its_state_from_four_nodes_over_one_to_two(
    method: str, late: bool, per_node: int, tmp_path: Path
) -> None:
    """On one node the exact mean comes out, and the residuals wait for a link between nodes."""
    worlds = [(4, 2), (1, per_node), (2, 2)]
    plans = [workload.plan("tensors", nodes=n, per_node=m, strategy="mics", partition_size=2) for n, m in worlds]
    chains = [chain_of(plan, method, late=late) for plan in plans]
    firsts = [workload.first_state("tensors", *given) for given in zip(plans, chains, strict=True)]
    in_four, in_one, in_two = map(stepper, plans, chains)
    states = firsts[0].chain
    for step in range(3):
        _, states = in_four(states, firsts[0].params, step)
    residual = lambda states: owed((states[0].exchange if late else states[0]).residual.tree)
    before = residual(states)
    assert max(np.abs(x).max() for x in jax.tree.leaves(before)) > 1e-5

    save(tmp_path, replace(firsts[0], all_reduce=states[0], opt_state=states[1]), 3)
    found = restore(tmp_path, firsts[1])
    waiting = found.all_reduce.waiting.tree if late else gradients(plans[1], 3)[1]
    moves, states = in_one(found.chain, found.params, 3)
    mean = replicas(waiting, lambda x_R: x_R.mean(0))
    jax.tree.map(lambda x, g: np.testing.assert_allclose(-x, g, atol=1e-6), moves, mean)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), residual(states), before)

    save(tmp_path, replace(found, all_reduce=states[0], opt_state=states[1]), 4)
    found = restore(tmp_path, firsts[2])
    waiting = found.all_reduce.waiting.tree if late else gradients(plans[2], 4)[1]
    moves, states = in_two(found.chain, found.params, 4)
    came = replicas(waiting, lambda x_R: x_R.mean(0))
    jax.tree.map(
        lambda x, left, came, old: np.testing.assert_allclose(left - x, came + old, atol=1e-6),
        moves,
        residual(states),
        came,
        before,
    )
    assert any(np.abs(x - y).max() > 1e-6 for x, y in zip(*map(jax.tree.leaves, (residual(states), before))))


IN_ONE_NODE = dict(nodes=1, per_node=8, partition_size=2)
ONE_REPLICA = dict(nodes=1, per_node=2, partition_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "where"),
    [
        ("one_bit_adam", IN_ONE_NODE),
        pytest.param("demo", ONE_REPLICA, marks=SLOW),
        pytest.param("one_bit_adam", ONE_REPLICA, marks=SLOW),
        pytest.param("demo", IN_ONE_NODE, marks=SLOW),
    ],
)
def test_a_method_that_replaces_the_optimizer_updates_on_one_node_as_it_does_on_several(
    method: str, where: dict[str, int]
) -> None:
    """The moves are bounded as its own are; a mean of gradients would be 50 times as small."""
    plan = workload.plan("tensors", strategy="mics", **where)
    chain = chain_of(plan, method, late=False)
    state, step = workload.first_state("tensors", plan, chain), stepper(plan, chain)
    states = state.chain
    for seed in range(3):
        moves, states = step(states, state.params, seed)
    largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(moves))
    assert largest == 1 if method == "demo" else 0.2 < largest < 5
    all_reduce = states[0].exchange if method == "one_bit_adam" else states[0]
    assert float(all_reduce.sent.payload_bytes) == 0


def config_of(changes: dict[str, Any]) -> Config:
    made = ConfigDict(workload.run_config(strategy="mics", partition_size=2))
    made.update_from_flattened_dict({"mesh.num_cpu_devices": 0} | changes)
    return typed(made)


ZERO1 = {"sharding.strategy": "zero1", "sharding.partition_size": 0}
LINES: list[tuple[dict[str, Any], int, list[str]]] = [  # keys, devices of nodes of 2, lines
    ({"compression.all_reduce": "int8"}, 4, []),
    ({"compression.all_reduce": "int8"}, 2, ["compression.all_reduce=int8 idles: there is one replica"]),
    (
        {"compression.all_reduce": "statistical", "mesh.devices_per_node": 8},
        8,
        ["compression.all_reduce=statistical idles: all replicas are on one node"],
    ),
    ({"compression.delayed": True}, 2, ["compression.delayed=True: there is one replica"]),
    ({"local_sgd.inner_steps": 2}, 2, ["local_sgd.inner_steps=2: there is one replica"]),
    ({"local_sgd.inner_steps": 2, "compression.all_reduce": "bf16"}, 4, []),
    ({"compression.all_gather_inter": "int8"}, 4, ["compression.all_gather_inter=int8 idles"]),
    (ZERO1 | {"compression.weight_differences_inter": "int8"}, 4, []),
    (
        ZERO1 | {"compression.weight_differences_inter": "int8"},
        2,
        ["compression.weight_differences_inter=int8 idles: these devices have no gathers of updated parameters"],
    ),
    ({"compression.all_gather_intra": "int8", "compression.reduce_scatter_intra": "int8"}, 4, []),
    (
        {"compression.reduce_scatter_inter": "int8", "sharding.strategy": "zero3", "sharding.partition_size": 0},
        2,
        ["compression.reduce_scatter_inter=int8 idles: these devices have no group reduce-scatter between nodes"],
    ),
]


def test_a_run_says_which_codecs_idle_on_its_devices() -> None:
    wrong = []
    for changes, devices, lines in LINES:
        config = config_of({"mesh.devices_per_node": 2} | changes)
        experiment = make_experiment(config, jax.devices()[:devices])
        found = idle.described(config, experiment.plan.layout)
        if len(found) != len(lines) or not all(x.startswith(y) for x, y in zip(found, lines, strict=True)):
            wrong.append((changes, devices, found))
    assert not wrong


@IGNORED
@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        dict(compression__all_reduce="int8"),
        pytest.param(dict(compression__all_reduce="int8", local_sgd__inner_steps=2), marks=pytest.mark.release),
    ],
    ids=["int8", "local_sgd"],
)
def test_a_run_goes_from_four_nodes_over_one_to_two(keys: dict[str, Any], tmp_path: Path) -> None:
    """The same command, on other devices: each time it continues, and its loss falls."""
    says = []
    for devices, stop_after in ((8, 4), (2, 8), (4, 0)):
        args = arguments(tmp_path, num_steps=12, mesh__num_cpu_devices=devices, mesh__devices_per_node=2, **keys)
        (code, out, err) = finish(start(args, stop_after=stop_after))[0]
        assert code == (75 if stop_after else 0), err
        says.append(out)
    assert ["idles" in out for out in says] == [False, True, False]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) >= 6 and losses[-1] < losses[0]
