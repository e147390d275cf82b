"""Gathers of updated parameters that send encoded differences: the rule in numpy, bytes, losses, checkpoints."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import workload
from support.checkpointing import restore, save
from support.suite import SLOW

from compression.codecs import Blockwise
from compression.weight_differences import DifferencesState, WeightDifferences
from configs.base import typed
from sharding import hlo
from sharding.coded import LevelCodecs
from sharding.plan import ShardingPlan
from sharding.spec import Placement
from sharding.step import TrainState
from training.experiment import Experiment, make_experiment

BLOCK, RATE = 32, 0.5
INT4, INT8 = (Blockwise(bits=bits, block=BLOCK) for bits in (4, 8))
INT4_BYTES = 1 / 2 + 4 / BLOCK  # per value
WIDER: dict[str, dict[str, Any]] = {  # strategies whose devices keep gathered parameters
    "zero1": dict(strategy="zero1"),
    "zero2": dict(strategy="zero2"),
    "zero2, flat": dict(strategy="zero2", hierarchical=False),
    "node/node/all": dict(parameters="node", gradients="node", optimizer="all"),
    "node/all/all": dict(parameters="node", gradients="all", optimizer="all"),
    "none/node/4": dict(parameters="none", gradients="node", optimizer=4),
}


def plan_of(kind: str, codecs: LevelCodecs, **how: Any) -> ShardingPlan:
    return workload.plan(kind, difference_codecs=codecs, **how)


def rounded(shard: np.ndarray) -> np.ndarray:
    """A shard as its receivers decode it: each block to the nearest of 15 values."""
    filled = np.pad(shard.reshape(-1), (0, -shard.size % BLOCK)).reshape(-1, BLOCK)
    scales = np.abs(filled).max(-1, keepdims=True) * np.float32(1 / 7)
    values = np.round(filled / np.where(scales > 0, scales, 1)) * scales
    return values.reshape(-1)[: shard.size].reshape(shard.shape)


def sent(plan: ShardingPlan, p: Placement, difference: np.ndarray) -> np.ndarray:
    """A difference `[...]` as all devices decode it; vectors travel unencoded."""
    if p.dim is None or p.is_vector:
        return difference
    shards = np.split(difference, plan.layout.shape.size(plan.layout.optimizer), axis=p.dim)
    return np.concatenate([rounded(shard) for shard in shards], axis=p.dim)


def test_kept_parameters_follow_the_main_ones_as_in_numpy() -> None:
    """Algorithm 4 of SDP4Bit with momentum SGD: main parameters are exact, kept ones add decoded differences."""
    plan = plan_of("tensors", LevelCodecs(inter=INT4), strategy="zero2")
    optimizer = WeightDifferences(plan, optax.sgd(RATE, momentum=0.9))
    kept = plan.map(lambda p, x: np.asarray(x), workload.params("tensors"))
    main, velocity, state = kept, jax.tree.map(np.zeros_like, kept), optimizer.init(kept)
    update, rng = jax.jit(optimizer.update), np.random.default_rng(0)
    found, in_scope = kept, plan.shardings(plan.layout.optimizer)
    for _ in range(3):
        grads = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), kept)
        moves, state = update(grads, state, jax.device_put(found, in_scope))
        found = jax.tree.map(lambda x, y: x + np.asarray(y), found, moves)
        velocity = jax.tree.map(lambda v, g: np.float32(0.9) * v + g, velocity, grads)
        main = jax.tree.map(lambda x, v: x - np.float32(RATE) * v, main, velocity)
        kept = plan.map(lambda p, x, y: y + sent(plan, p, x - y), main, kept)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), found, kept)
    jax.tree.map(lambda e, x, y: np.testing.assert_allclose(e, x - y, atol=2e-5), state.errors, main, kept)
    assert max(np.abs(e).max() for e in jax.tree.leaves(state.errors)) > 0.01


def experiment(nodes: int, devices: int = 2) -> Experiment:
    """A run with zero2 and differences in int4 on nodes of some devices."""
    config = workload.run_config(strategy="zero2", partition_size=0)
    config.mesh.devices_per_node = devices
    config.compression.update(weight_differences_inter="int4", weight_differences_intra="int4", block=BLOCK)
    return make_experiment(typed(config), jax.devices()[: devices * nodes])


def test_the_program_sends_four_bits_of_each_matrix_once_a_step() -> None:
    """Each level gathers payloads in whole blocks of a device's part, and norms in float32."""
    ex = experiment(4)
    found = hlo.read_collectives(ex.compile_train_step().as_text(), ex.plan.layout.shape)
    gathers = [c for c in found if c.label == "parameter_scope" and c.kind == "all-gather"]
    placements = jax.tree.leaves(ex.plan.placements, is_leaf=lambda x: isinstance(x, Placement))
    sizes = [(p.is_vector, x.size) for p, x in zip(placements, jax.tree.leaves(ex.state_shapes.params), strict=True)]
    for num_parts, axis in ((8, "replica_inter"), (2, "replica_intra")):
        parts = [size // num_parts for is_vector, size in sizes if not is_vector]
        coded = sum(part + -part % BLOCK for part in parts) * INT4_BYTES
        exact = sum(4 * size // num_parts for is_vector, size in sizes if is_vector)
        by_dtype = Counter[str]()
        for c in gathers:
            by_dtype[c.dtype] += c.payload_bytes // c.group_size * c.times if axis in c.axes else 0
        assert by_dtype == {"u8": coded, "f32": exact}, axis


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "node/all/all" else SLOW) for n in WIDER])
def test_losses_are_those_of_one_device(name: str) -> None:
    plan = plan_of("decoder", LevelCodecs(inter=INT8, intra=INT8), **WIDER[name])
    timing = workload.after_micro_steps(plan)
    timing = replace(timing, optimizer=WeightDifferences(plan, timing.optimizer))
    losses = workload.losses("decoder", plan, timing=timing)
    np.testing.assert_allclose(losses, workload.single_device_losses("decoder"), rtol=2e-3)


def test_the_state_goes_to_other_numbers_of_nodes(tmp_path: Path) -> None:
    """Main and kept parameters stay as they are, even on one device, which gathers nothing."""

    def first_state(nodes: int, per_node: int) -> TrainState:
        plan = plan_of("tensors", LevelCodecs(inter=INT4), strategy="zero2", nodes=nodes, per_node=per_node)
        timing = workload.after_micro_steps(plan)
        return workload.first_state(
            "tensors", plan, replace(timing, optimizer=WeightDifferences(plan, timing.optimizer))
        )

    state, rng = first_state(4, 2), np.random.default_rng(0)
    state = jax.tree.map(lambda x: jax.device_put(rng.normal(size=x.shape).astype(x.dtype), x.sharding), state)
    save(tmp_path, state, 1)
    for nodes, per_node in ((4, 2), (2, 2), (1, 1)):
        found = restore(tmp_path, first_state(nodes, per_node))
        jax.tree.map(np.testing.assert_array_equal, found, state)


def test_a_device_without_others_adds_the_errors_that_wait() -> None:
    ex = experiment(1, devices=1)
    assert isinstance(ex.state_shapes.opt_state, DifferencesState)
    optimizer, params = WeightDifferences(ex.plan, optax.sgd(RATE)), ex.init_state().params
    ones = jax.tree.map(jnp.ones_like, params)
    state = DifferencesState(optimizer.init(params).inner, jax.tree.map(lambda x: 3 * x, ones))
    moves, state = jax.jit(optimizer.update)(ones, state, params)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 3 - RATE), moves)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), state.errors)
