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
from optimizers import guarded, watched
from sharding.step import Sharded, TrainState, build_train_step, state_shardings

CODEC = OneBit(block=32)


def parts(sharded: Sharded) -> tuple[Any, TrainState, Any]:
    """Returns the compiled step, the shapes of its state with their shardings, and a batch."""
    tx = guarded(exchange(sharded, CODEC), workload.sgd())
    shapes = jax.eval_shape(lambda: workload.new_state("decoder", tx, 2))
    shardings = state_shardings(sharded, shapes)
    placed = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    data = workload.put_batch(sharded, 2)
    step = jax.jit(
        build_train_step(workload.model("decoder").loss, sharded, tx, watched), out_shardings=(shardings, None)
    )
    return step.lower(placed, data).compile(), placed, data


def new(sharded: Sharded, placed: TrainState) -> TrainState:
    tx = guarded(exchange(sharded, CODEC), workload.sgd())
    shardings = jax.tree.map(lambda x: x.sharding, placed)
    return jax.jit(lambda: workload.new_state("decoder", tx, 2), out_shardings=shardings)()


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
    step, placed, data = parts(sharded)
    state, _ = step(*step(new(sharded, placed), data)[:1], data)
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
    step, placed, data = parts(old)
    state, _ = step(new(old, placed), data)
    save(tmp_path, state, 1)
    _, wanted, _ = parts(new_one)
    found = restore(tmp_path, wanted)

    def check(x: jax.Array, y: jax.Array) -> None:
        assert (x.shape[0], y.shape[0]) == (before, after) and np.asarray(x).any()
        np.testing.assert_allclose(np.asarray(y).sum(0), np.asarray(x).sum(0), rtol=1e-6, atol=1e-6)
        assert y.addressable_shards[0].data.shape[0] == 1

    jax.tree.map(check, state.opt_state.exchange.residual, found.opt_state.exchange.residual)
    jax.tree.map(np.testing.assert_array_equal, found.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, found.opt_state.inner, state.opt_state.inner)
