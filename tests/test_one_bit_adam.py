"""1-bit Adam: Adam itself in the warm-up; then Adam in numpy with a frozen variance, fed by the exchange of momenta."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import workload
from support.exchanging import gradients, jitted_update

from compression.codecs import OneBit
from compression.exchange import exchange
from compression.one_bit_adam import one_bit_adam
from sharding.plan import ShardingPlan

CODEC = OneBit(block=32)
B1, B2, EPS, WARMUP, STEPS = 0.9, 0.95, 1e-8, 3, 20


@cache
def program() -> tuple[ShardingPlan, Any, Callable[..., Any]]:
    """Returns the first state of 1-bit Adam under mics(2), and its jitted update."""
    plan = workload.plan("tensors", strategy="mics", partition_size=2)
    hop = one_bit_adam(plan, CODEC, warmup_steps=WARMUP, b1=B1, b2=B2, eps=EPS)
    return plan, hop.init(workload.params("tensors")), jax.jit(hop.update)


@pytest.mark.slow
def test_a_warmup_of_adam_then_momenta_are_exchanged_with_frozen_variance() -> None:
    plan, state, update = program()
    coded = exchange(plan, CODEC)
    kept, send = coded.init(workload.params("tensors")), jax.jit(coded.update)
    mu: Any = jax.tree.map(lambda p: np.zeros(p.shape, np.float32), workload.params("tensors"))
    nu = mu
    for step in range(STEPS):
        placed, grads = gradients(plan, step)
        got, state = update(placed, state)
        if step < WARMUP:
            mean = jax.tree.map(lambda g: g.mean(0), grads)
            mu = jax.tree.map(lambda m, g: B1 * m + (1 - B1) * g, mu, mean)
            nu = jax.tree.map(lambda v, g: B2 * v + (1 - B2) * g * g, nu, mean)
        else:
            own = jax.tree.map(
                lambda m, g, x: jax.device_put(B1 * m[None] + (1 - B1) * g, x.sharding), mu, grads, placed
            )
            sent, kept = send(own, kept)
            mu = jax.tree.map(np.asarray, sent)
        first, second = 1 - B1 ** (step + 1), 1 - B2 ** min(step + 1, WARMUP)
        wanted = jax.tree.map(lambda m, v, a=first, b=second: m / a / (np.sqrt(v / b) + EPS), mu, nu)
        if step >= WARMUP:
            assert max(abs(x).max() for x in jax.tree.leaves(wanted)) > 1  # more than Adam can move
            wanted = jax.tree.map(lambda x: np.clip(x, -1, 1), wanted)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), got, wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.nu, nu)


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


@pytest.mark.parametrize("steps", [1, WARMUP + 1])
def test_non_finite_gradients_without_variance_are_skipped(steps: int) -> None:
    """In the warm-up a square that is out of range, after it a value that never had a gradient, of a vector."""
    plan, _, _ = program()
    hop = one_bit_adam(plan, CODEC, warmup_steps=WARMUP, b1=B1, b2=B2, eps=EPS)
    params, tx = workload.params("tensors"), workload.chained(hop, optax.sgd(1.0))
    update, state = jitted_update(tx), tx.init(workload.params("tensors"))
    good = gradients(plan, 0)[0]
    good = good | {"whole": good["whole"].at[:, 0].set(0.0)}
    for _ in range(steps):
        _, state = update(good, state, params)
    bad = good | {"whole": good["whole"].at[1, 0].set(1e24 if steps < WARMUP else jnp.inf)}
    moves, after = update(bad, state, params)
    assert int(after[1].skipped) == 1 and not any(np.asarray(x).any() for x in jax.tree.leaves(moves))
    jax.tree.map(np.testing.assert_array_equal, after[0], state[0])
