"""The replica all-reduce with a codec, and 1-bit Adam, against numpy: twenty steps of four replicas."""

from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from support import workload
from support.numpy_oracles import (
    BLOCK,
    CODED,
    REPLICAS,
    SEED,
    STEPS,
    exchanged,
    flat,
    integers,
    noise,
    one_bit,
    program,
    replicas_on,
    statistical,
)
from support.tables import every_row

from compression.all_reduce import delayed
from compression.codecs import Blockwise, OneBit, Statistical
from compression.exchange import exchange
from compression.one_bit_adam import one_bit_adam

CODECS: dict[str, tuple[Any, Any]] = {
    "int8": (Blockwise(bits=8, block=BLOCK), partial(integers, most=127)),
    "int4": (Blockwise(bits=4, block=BLOCK), partial(integers, most=7)),
    "statistical": (Statistical(block=BLOCK), statistical),
}
MOST = {"int8": 127, "int4": 7}


def on_a_grid(rng: np.random.Generator, most: int) -> Any:
    """Returns gradients `[R, ...]` whose sums, scales and residuals no rounding changes, with ties between integers.

    The first value of each block is its largest, in all replicas and steps: `most` times a power of two.
    """

    def draw(p: jax.Array) -> np.ndarray:
        quarters = rng.integers(-2 * most, 2 * most + 1, (REPLICAS, p.size)) / 4
        quarters[:, ::BLOCK] = most
        scales = 2.0 ** -(10 + np.arange(p.size) // BLOCK % 3)
        return (REPLICAS * quarters * scales).astype(np.float32).reshape(REPLICAS, *p.shape)

    return jax.tree.map(draw, workload.params("tensors"))


@every_row(
    ("name", "feedback", "late"),
    [("int4", True, False), ("statistical", True, False), ("int4", False, False), ("int8", True, True)],
)
def test_twenty_exchanges_with_a_codec_match_numpy(name: str, feedback: bool, late: bool) -> None:
    """What is handed on and what is kept, bit by bit but for means; delayed, it is of the gradients before."""
    codec, code = CODECS[name]
    tx = exchange(plan := replicas_on(REPLICAS), codec, error_feedback=feedback)
    states, update = program(plan, optax.chain(delayed(tx, REPLICAS) if late else tx, optax.identity()))
    rng = np.random.default_rng(SEED)
    equal = partial(np.testing.assert_allclose, rtol=0, atol=1e-7 if name == "statistical" else 0)
    before = kept = np.zeros((REPLICAS, flat(workload.params("tensors")).size), np.float32)
    for _ in range(STEPS):
        grads = noise(rng) if name == "statistical" else on_a_grid(rng, MOST[name])
        handed_on, states = update(grads, states, workload.params("tensors"))
        now = flat(grads, REPLICAS)
        wanted, after = exchanged(before if late else now, kept, code)
        equal(flat(handed_on)[0], wanted)
        if feedback:
            kept = after
            equal(flat((states[0].exchange if late else states[0]).residual.tree, REPLICAS), kept)
        before = now
    assert np.abs(after[:, :CODED]).max() > 1e-5


def test_twenty_steps_of_one_bit_adam_match_numpy() -> None:
    """Four of Adam; then the variance is frozen, and momenta travel in one bit and a scale a block, with feedback."""
    b1, b2, eps, warmup = 0.9, 0.95, 1e-8, 4
    plan, rng = replicas_on(REPLICAS), np.random.default_rng(SEED)
    hop = one_bit_adam(plan, OneBit(block=BLOCK), warmup_steps=warmup, b1=b1, b2=b2, eps=eps)
    states, update = program(plan, optax.chain(hop, optax.identity()))
    kept = mu = nu = np.float32(0)
    for step in range(1, STEPS + 1):
        grads = noise(rng)
        direction, states = update(grads, states, workload.params("tensors"))
        g_R = flat(grads, REPLICAS)
        if step <= warmup:
            mean = g_R.mean(0)
            mu, nu = b1 * mu + (1 - b1) * mean, b2 * nu + (1 - b2) * mean**2
        else:
            mu, kept = exchanged(b1 * mu + (1 - b1) * g_R, kept, one_bit)
        wanted = mu / (1 - b1**step) / (np.sqrt(nu / (1 - b2 ** min(step, warmup))) + eps)
        if step > warmup:
            assert np.abs(wanted).max() > 1, "the limit must act"
            wanted = np.clip(wanted, -1, 1)
        np.testing.assert_allclose(flat(direction)[0], wanted, rtol=2e-5, atol=1e-6, err_msg=str(step))
    np.testing.assert_allclose(flat(states[0].exchange.residual.tree, REPLICAS), kept, atol=1e-7)
    np.testing.assert_allclose(flat(states[0].nu)[0], nu, rtol=1e-5)
