"""Residuals of hop two in checkpoints: resumed runs are the same bit by bit; other numbers of replicas keep the sum."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import workload

from compression.codecs import OneBit
from compression.dgc import DGCConfig, dgc
from compression.exchange import exchange
from compression.local_sgd import local_sgd
from configs.schema import CheckpointConfig, LocalSGDConfig
from optimizers import guarded
from sharding.plan import ShardingPlan
from sharding.step import TrainState
from state import Checkpointer

CODEC = OneBit(block=32)


def first_state(nodes: int, make_chain: Callable[[ShardingPlan], Any]) -> TrainState:
    """Returns the first state of tensors under mics(2)."""
    plan = workload.plan("tensors", nodes=nodes, strategy="mics", partition_size=2)
    return workload.first_state("tensors", plan, make_chain(plan))


def with_codec(plan: ShardingPlan) -> optax.GradientTransformation:
    return guarded(exchange(plan, CODEC), workload.sgd())


def filled(state: TrainState) -> TrainState:
    """Returns a state of random numbers, as after some steps; counters are 2."""
    rng = np.random.default_rng(0)

    def fill(x: jax.Array) -> jax.Array:
        counts = np.issubdtype(x.dtype, np.integer)
        values = np.full(x.shape, 2) if counts else rng.normal(size=x.shape)
        return jax.device_put(values.astype(x.dtype), x.sharding)

    return jax.tree.map(fill, state)


def shapes(state: TrainState) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def save(directory: Path, state: TrainState, step: int) -> None:
    with Checkpointer(directory, CheckpointConfig(every=1, keep_last=9)) as checkpointer:
        checkpointer.save(step, state, data={}, config={})


def restore(directory: Path, placed: TrainState) -> TrainState:
    with Checkpointer(directory, CheckpointConfig(every=1, keep_last=9)) as checkpointer:
        restored = checkpointer.restore(placed)
    assert restored
    return restored.state


def test_resumed_run_equals_uninterrupted_run(tmp_path: Path) -> None:
    plan = workload.plan("decoder", strategy="mics", partition_size=2)
    step, state, data = workload.compiled_step("decoder", plan, hop_two=exchange(plan, CODEC))
    placed = shapes(state)
    _, state, _ = workload.run_steps(step, state, data, 2)
    save(tmp_path, state, 2)
    again = restore(tmp_path, placed)
    assert any(np.asarray(x).any() for x in jax.tree.leaves(again.opt_state.exchange.residual))
    jax.tree.map(np.testing.assert_array_equal, step(again, data), step(state, data))


def test_residuals_of_another_hop_two_are_rejected(tmp_path: Path) -> None:
    """By name: those of DGC are not an exchange's."""

    def with_dgc(plan: ShardingPlan) -> optax.GradientTransformation:
        config = DGCConfig(sparsity=0.9, warmup_steps=0, momentum=0.9, clip_norm=0.0)
        return guarded(dgc(plan, config), workload.sgd())

    save(tmp_path, first_state(4, with_codec), 1)
    with pytest.raises(ValueError, match="opt_state.exchange.unsent.residual.* is absent in the checkpoint"):
        restore(tmp_path, shapes(first_state(4, with_dgc)))


def test_local_sgd_on_another_number_of_replicas_keeps_the_mean(tmp_path: Path) -> None:
    """Drifts, moments and the counters of schedules."""
    settings = LocalSGDConfig(inner_steps=3, outer_learning_rate=0.7, outer_momentum=0.9)

    def with_local_sgd(plan: ShardingPlan) -> optax.GradientTransformation:
        each = guarded(optax.identity(), optax.adamw(lambda step: 0.1))
        return local_sgd(exchange(plan), each, settings, plan.layout.num_replicas)

    state = filled(first_state(4, with_local_sgd))
    save(tmp_path, state, 2)
    found = restore(tmp_path, shapes(first_state(2, with_local_sgd)))

    def check(x: jax.Array, y: jax.Array) -> None:
        assert (x.shape[0], y.shape[0]) == (4, 2)
        np.testing.assert_allclose(np.asarray(y).mean(0), np.asarray(x).mean(0), rtol=1e-5, atol=1e-6)

    jax.tree.map(check, state.opt_state.drift, found.opt_state.drift)
    jax.tree.map(check, state.opt_state.inner, found.opt_state.inner)
    jax.tree.map(np.testing.assert_array_equal, found.opt_state.outer, state.opt_state.outer)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 2)])
def test_another_number_of_replicas_keeps_the_sum(before: int, after: int, tmp_path: Path) -> None:
    """And everything else, bit by bit."""
    state = filled(first_state(before, with_codec))
    save(tmp_path, state, 1)
    found = restore(tmp_path, shapes(first_state(after, with_codec)))

    def check(x: jax.Array, y: jax.Array) -> None:
        assert (x.shape[0], y.shape[0]) == (before, after) and np.asarray(x).any()
        np.testing.assert_allclose(np.asarray(y).sum(0), np.asarray(x).sum(0), rtol=1e-6, atol=1e-6)
        assert y.addressable_shards[0].data.shape[0] == 1

    jax.tree.map(check, state.opt_state.exchange.residual, found.opt_state.exchange.residual)
    jax.tree.map(np.testing.assert_array_equal, found.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, found.opt_state.inner, state.opt_state.inner)
