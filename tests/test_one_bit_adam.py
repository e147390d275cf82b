"""1-bit Adam: Adam itself in the warm-up; then Adam in numpy with a frozen variance, fed by the exchange of momenta."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import workload
from test_exchange_codecs import gradients

from compression.codecs import OneBit
from compression.exchange import exchange
from compression.one_bit_adam import one_bit_adam

CODEC = OneBit(block=32)
B1, B2, EPS, WARMUP, STEPS = 0.9, 0.95, 1e-8, 3, 7


def run(tx: Any, sharded: Any, steps: int) -> tuple[list[Any], Any]:
    state, update, out = tx.init(workload.params("decoder")), jax.jit(tx.update), []
    for step in range(steps):
        handed_on, state = update(gradients(sharded, step)[0], state)
        out.append(jax.tree.map(np.asarray, handed_on))
    return out, state


def test_the_warm_up_is_adam() -> None:
    sharded = workload.sharded("decoder", strategy="mics", partition_size=2)
    hop = one_bit_adam(sharded, CODEC, warmup_steps=WARMUP, b1=B1, b2=B2, eps=EPS)
    plain = optax.chain(exchange(sharded), optax.scale_by_adam(B1, B2, EPS))
    for got, wanted in zip(run(hop, sharded, WARMUP)[0], run(plain, sharded, WARMUP)[0], strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, wanted)


def test_after_it_momenta_are_exchanged_and_the_variance_stays() -> None:
    sharded = workload.sharded("decoder", strategy="mics", partition_size=2)
    hop = one_bit_adam(sharded, CODEC, warmup_steps=WARMUP, b1=B1, b2=B2, eps=EPS)
    out, state = run(hop, sharded, STEPS)
    coded = exchange(sharded, CODEC)
    kept, send = coded.init(workload.params("decoder")), jax.jit(coded.update)
    mu: Any = jax.tree.map(lambda p: np.zeros(p.shape, np.float32), workload.params("decoder"))
    nu = mu
    for step in range(STEPS):
        placed, grads = gradients(sharded, step)
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
        scale = np.sqrt(1 - B2 ** min(step + 1, WARMUP)) / (1 - B1 ** (step + 1))

        def check(got: np.ndarray, m: np.ndarray, v: np.ndarray, scale: float = scale) -> None:
            np.testing.assert_allclose(got, scale * m / np.sqrt(v), rtol=1e-3, atol=1e-3)

        jax.tree.map(check, out[step], mu, nu)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.nu, nu)


def test_what_never_had_a_gradient_stays() -> None:
    """One bit has no zero: over the root of a variance that is zero it would be a leap."""
    sharded = workload.sharded("decoder", nodes=2, per_node=1, strategy="ddp")
    params = workload.params("decoder")
    hop = one_bit_adam(sharded, CODEC, warmup_steps=1, b1=B1, b2=B2, eps=EPS)
    grads = jax.tree.map(lambda p: jnp.ones((2, *p.shape)).at[..., 0].set(0.0), params)
    state, update = hop.init(params), jax.jit(hop.update)
    for _ in range(3):
        moves, state = update(grads, state)
        assert all(np.isfinite(x).all() and not np.asarray(x)[..., 0].any() for x in jax.tree.leaves(moves))


@pytest.mark.parametrize(
    ("layout", "warmup_steps", "message"),
    [
        (dict(strategy="zero1"), 3, "needs the optimizer state where the gradients are"),
        (dict(strategy="mics", partition_size=2), 0, "needs its variances from a warm-up"),
        (dict(strategy="zero3"), 3, "nothing to encode"),
    ],
)
def test_what_cannot_be(layout: dict[str, Any], warmup_steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_bit_adam(workload.sharded("decoder", **layout), CODEC, warmup_steps=warmup_steps, b1=B1, b2=B2, eps=EPS)
