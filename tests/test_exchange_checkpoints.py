"""Residuals of hop two in checkpoints: resumed runs are the same bit by bit; other numbers of replicas keep the sum."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import workload

from checkpointing import CheckpointConfig, Checkpointer
from compression.codecs import OneBit
from compression.dgc import DGCConfig, dgc
from compression.exchange import exchange
from compression.local_sgd import LocalSGDConfig, drift, local_sgd
from optimizers import guarded
from sharding.step import Sharded, TrainState

CODEC = OneBit(block=32)


def parts(sharded: Sharded) -> tuple[Any, TrainState, Any, TrainState]:
    """Returns the compiled step, its first state and its batch; and the shapes of the state, with their shardings."""
    step, state, data = workload.compiled_step("decoder", sharded, hop_two=exchange(sharded, CODEC))
    return step, state, data, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def save(directory: Path, state: TrainState, step: int) -> None:
    with Checkpointer(directory, CheckpointConfig(every=1, keep_last=9)) as checkpointer:
        checkpointer.save(step, state, data={}, config={})


def restore(directory: Path, placed: TrainState) -> TrainState:
    with Checkpointer(directory, CheckpointConfig(every=1, keep_last=9)) as checkpointer:
        restored = checkpointer.restore(placed)
    assert restored
    return restored.state


def test_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    sharded = workload.sharded("decoder", strategy="mics", partition_size=2)
    step, state, data, placed = parts(sharded)
    _, state, _ = workload.run_steps(step, state, data, 2)
    save(tmp_path, state, 2)
    again = restore(tmp_path, placed)
    assert any(np.asarray(x).any() for x in jax.tree.leaves(again.opt_state.exchange.residual))
    jax.tree.map(np.testing.assert_array_equal, step(again, data), step(state, data))


def test_residuals_of_another_hop_two_are_refused(tmp_path: Path) -> None:
    """By name: those of DGC are not an exchange's."""
    sharded = workload.sharded("decoder", strategy="mics", partition_size=2)
    _, state, _, _ = parts(sharded)
    save(tmp_path, state, 1)
    specs = workload.model("decoder").param_specs()
    other = dgc(sharded, specs, DGCConfig(sparsity=0.9, warmup_steps=0, momentum=0.9, clip_norm=0.0))
    _, wanted, _ = workload.compiled_step("decoder", sharded, hop_two=other)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), wanted)
    with pytest.raises(ValueError, match="opt_state.exchange.unsent.residual.* is absent in the checkpoint"):
        restore(tmp_path, shapes)


def test_local_sgd_on_another_number_of_replicas_keeps_the_mean(tmp_path: Path) -> None:
    """Drifts, moments and the counters of schedules."""
    states = []
    for nodes in (4, 2):
        sharded = workload.sharded("decoder", nodes=nodes, strategy="mics", partition_size=2)
        settings = LocalSGDConfig(inner_steps=3, outer_learning_rate=0.7, outer_momentum=0.9)
        chain = local_sgd(exchange(sharded), guarded(optax.identity(), optax.adamw(lambda step: 0.1)), settings, nodes)
        states.append(workload.compiled_step("decoder", sharded, chain=chain, drift=drift))
    (step, state, data), (_, wanted, _) = states
    _, state, _ = workload.run_steps(step, state, data, 2)
    save(tmp_path, state, 2)
    found = restore(
        tmp_path, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), wanted)
    )

    def check(x: jax.Array, y: jax.Array) -> None:
        np.testing.assert_allclose(np.asarray(y).mean(0), np.asarray(x).mean(0), rtol=1e-5, atol=1e-7)

    assert any(np.asarray(x).any() for x in jax.tree.leaves(state.opt_state.drift))
    jax.tree.map(check, state.opt_state.drift, found.opt_state.drift)
    jax.tree.map(check, state.opt_state.inner, found.opt_state.inner)


@pytest.mark.parametrize(
    ("before", "after"), [(4, 2), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, 4), (3, 2)))]
)
def test_another_number_of_replicas_keeps_the_sum(before: int, after: int, tmp_path: Path) -> None:
    """And everything else, bit by bit."""
    old, new_one = (workload.sharded("decoder", nodes=n, strategy="mics", partition_size=2) for n in (before, after))
    step, state, data, _ = parts(old)
    _, state, _ = workload.run_steps(step, state, data, 1)
    save(tmp_path, state, 1)
    found = restore(tmp_path, parts(new_one)[3])

    def check(x: jax.Array, y: jax.Array) -> None:
        assert (x.shape[0], y.shape[0]) == (before, after) and np.asarray(x).any()
        np.testing.assert_allclose(np.asarray(y).sum(0), np.asarray(x).sum(0), rtol=1e-6, atol=1e-6)
        assert y.addressable_shards[0].data.shape[0] == 1

    jax.tree.map(check, state.opt_state.exchange.residual, found.opt_state.exchange.residual)
    jax.tree.map(np.testing.assert_array_equal, found.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, found.opt_state.inner, state.opt_state.inner)
