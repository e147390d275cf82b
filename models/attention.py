"""Attention in plain jax, with a mask; optionally with capped scores, sinks, and dropout of weights.

Shapes: B batch, T positions of the queries, S positions of the keys, N heads, K key-value heads, G = N / K queries of a
key, H size of a head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from models.dropout import NoDropout

WHOLE = NoDropout()  # all values are kept


def seen_from(queries_T: Array, keys_S: Array, window: Array | None) -> Array:
    """Returns whether each query sees each key, `[1, 1, T, S]`: the same and earlier positions, within the window."""
    distance_TS = queries_T[:, None] - keys_S[None]
    seen_TS = distance_TS >= 0 if window is None else (distance_TS >= 0) & (distance_TS < window)
    return seen_TS[None, None]


def attention(
    q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, seen_B1TS: Array, cap: float, sinks_N: Array | None,
    dropout: NoDropout = WHOLE,
) -> Array:  # fmt: skip
    """Returns `softmax(scores) v`, `[B, T, N, H]`, over the visible scores `q k' / sqrt(H)`, capped unless cap = 0.

    A capped score is `cap tanh(score / cap)` (Gemma 2, arXiv 2408.00118). Scores are float32. Each head has one more
    score without a value, its sink, if `sinks` are given (gpt-oss, arXiv 2508.10925).
    """
    if not cap and sinks_N is None and not dropout.drops_weights:
        return plain_attention(q_BTNH, k_BSKH, v_BSKH, mask=seen_B1TS, implementation="xla")

    def attend(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array) -> Array:
        B, T, _, H = q_BTNH.shape
        q_BTKGH = q_BTNH.reshape(B, T, k_BSKH.shape[2], -1, H)
        scores = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * H**-0.5
        scores = jnp.where(seen_B1TS[:, :, None], soft_cap(scores, cap) if cap else scores, -jnp.inf)
        weights = jax.nn.softmax(scores)
        if sinks_N is not None:
            sinks_1KG11 = sinks_N.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
            weights = weights * jax.nn.sigmoid(jax.nn.logsumexp(scores, axis=-1, keepdims=True) - sinks_1KG11)
        weights = dropout.weights(weights.astype(v_BSKH.dtype))
        return jnp.einsum("bkgts,bskh->btkgh", weights, v_BSKH).reshape(q_BTNH.shape)

    return _widened_on_cpus(attend, q_BTNH, k_BSKH, v_BSKH)


def plain_attention(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, **how: Any) -> Array:
    """Returns jax's attention, `[B, T, N, H]`."""
    return _widened_on_cpus(partial(jax.nn.dot_product_attention, **how), q_BTNH, k_BSKH, v_BSKH)


def _widened_on_cpus(attend: Callable[..., Array], *qkv: Array) -> Array:
    """Returns `attend(q, k, v)`.

    CPUs compute float16 inputs in float32, because they cannot sum float16 products in float32.
    """
    if qkv[0].dtype != jnp.float16:
        return attend(*qkv)
    wide = lambda *qkv: attend(*(x.astype(jnp.float32) for x in qkv)).astype(jnp.float16)
    return jax.lax.platform_dependent(*qkv, cpu=wide, default=attend)


def soft_cap(x: Array, cap: float) -> Array:
    """Returns `cap tanh(x / cap)`."""
    return cap * jnp.tanh(x / cap)
