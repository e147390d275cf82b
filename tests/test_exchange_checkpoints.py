"""Residuals of hop two in checkpoints: resumed runs are the same bit by bit; other numbers of replicas keep the sum."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import workload

from checkpointing import CheckpointConfig, Checkpointer
from compression.codecs import OneBit
from compression.exchange import exchange
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
