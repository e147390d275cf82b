"""1-bit Adam where gradients are zero or not finite; tests/test_exchange_oracles.py writes its rule out in numpy."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support import workload
from support.exchanging import gradients, jitted_update

from compression.codecs import OneBit
from compression.one_bit_adam import one_bit_adam
from sharding.plan import ShardingPlan

CODEC = OneBit(block=32)
WARMUP = 3


def make(plan: ShardingPlan) -> optax.GradientTransformation:
    return one_bit_adam(plan, CODEC, warmup_steps=WARMUP, b1=0.9, b2=0.95, eps=1e-8)


@cache
def program() -> tuple[ShardingPlan, Any, Callable[..., Any]]:
    """Returns the first state of 1-bit Adam under mics(2), and its jitted update."""
    plan = workload.plan("tensors", strategy="mics", partition_size=2)
    hop = make(plan)
    return plan, hop.init(workload.params("tensors")), jax.jit(hop.update)


def test_parameters_without_gradients_do_not_move() -> None:
    """One bit has no zero: over the root of a variance that is zero it would be a leap."""
    plan, state, update = program()
    placed, _ = gradients(plan, 0)
    grads = jax.tree.map(
        lambda g: jax.device_put(np.ones(g.shape, np.float32) * (np.arange(g.shape[-1]) > 0), g.sharding), placed
    )
    for _ in range(WARMUP + 2):
        moves, state = update(grads, state)
        assert all(np.isfinite(x).all() and not np.asarray(x)[..., 0].any() for x in jax.tree.leaves(moves))


def test_non_finite_gradients_without_variance_are_skipped() -> None:
    """In the warm-up a square that is out of range, after it a value that never had a gradient, of a vector."""
    plan, _, _ = program()
    params, tx = workload.params("tensors"), workload.chained(make(plan), optax.sgd(1.0))
    update, state = jitted_update(tx), tx.init(workload.params("tensors"))
    good = gradients(plan, 0)[0]
    good = good | {"whole": good["whole"].at[:, 0].set(0.0)}
    for steps, value in ((1, 1e24), (WARMUP, jnp.inf)):
        for _ in range(steps):
            _, state = update(good, state, params)
        moves, after = update(good | {"whole": good["whole"].at[1, 0].set(value)}, state, params)
        assert int(after[1].skipped) == 1 and not any(np.asarray(x).any() for x in jax.tree.leaves(moves))
        jax.tree.map(np.testing.assert_array_equal, after[0], state[0])
