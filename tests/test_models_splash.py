"""Attention on TPUs (models/splash.py) against the plain formula, interpreted on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from support.suite import SLOW

from models.attention import attention, seen_from
from models.splash import splash_attention

B, T, N, K, H = 2, 256, 4, 2, 32  # grouped heads


def seen(segments_BT: Array | None, window: int, *, causal: bool) -> Array:
    places_T = jnp.arange(T)
    all_seen = jnp.ones((1, 1, T, T), bool)
    seen_B1TS = seen_from(places_T, places_T, jnp.float32(window or T)) if causal else all_seen
    return (
        seen_B1TS if segments_BT is None else seen_B1TS & (segments_BT[:, None, :, None] == segments_BT[:, None, None])
    )


@pytest.mark.parametrize(
    ("causal", "window", "cap", "has_segments"),
    [
        (True, 0, 0.0, False),
        (True, 40, 5.0, True),
        pytest.param(False, 0, 0.0, True, marks=SLOW),
        pytest.param(False, 0, 0.0, False, marks=SLOW),
    ],
)
def test_results_and_gradients_are_the_formulas(causal: bool, window: int, cap: float, has_segments: bool) -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, out = (jax.random.normal(key, (B, T, n, H)) for key, n in zip(keys, (N, K, K, N)))
    segments = jnp.sort(jax.random.randint(keys[4], (B, T), 0, 3), axis=1) if has_segments else None

    def ours(q: Array, k: Array, v: Array) -> Array:
        return splash_attention(q, k, v, segments, window=window, causal=causal, cap=cap, interpret=True)

    def formula(q: Array, k: Array, v: Array) -> Array:
        return attention(q, k, v, seen(segments, window, causal=causal), cap, None)

    def results(attend: object) -> list[Array]:
        results, backward = jax.vjp(attend, q, k, v)
        return [results, *backward(out)]

    for got, wanted in zip(jax.jit(lambda: results(ours))(), jax.jit(lambda: results(formula))(), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_a_length_without_whole_blocks_gets_one_line() -> None:
    x = jnp.zeros((1, 100, 1, 16))
    with pytest.raises(ValueError, match="^splash attention cannot cut 100 positions into blocks of 128"):
        splash_attention(x, x, x, interpret=True)
