"""Rotary positions: the angles of queries and keys, and their rotation (Su et al. 2021, arXiv 2104.09864).

Shapes: B batch, T positions, N heads, H size of a head.
"""

import math

import jax.numpy as jnp
from jax import Array

from configs.schema import DecoderConfig


def rotary_frequencies(head_size: int, base: float) -> Array:
    """Returns the rotation per position for each pair of dims, float32 `[H/2]`, in radians (Su et al. 2021)."""
    return base ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)


def scaled_frequencies(c: DecoderConfig) -> Array:
    """Returns the frequencies `[H/2]` of a decoder's rotary positions, with its scaling.

    `linear` divides them by the factor (Chen et al. 2023, arXiv 2306.15595). `llama3` divides frequencies with fewer
    than `low` turns within the original length and keeps frequencies with more than `high` turns. Between these two it
    interpolates linearly in the number of turns (Llama 3.1, arXiv 2407.21783; its reference code's `apply_scaling`).
    `yarn` interpolates linearly in the dim's index, between the dims of `high` and `low` turns, rounded outwards with
    `rotary_truncate` (Peng et al. 2023, arXiv 2309.00071, section 3.2 and its reference code).
    """
    whole = rotary_frequencies(c.head_size, c.rotary_base)
    if c.rotary_scaling == "none":
        return whole
    if c.rotary_scaling == "linear":
        return whole / c.rotary_factor
    if c.rotary_scaling == "yarn":
        high, low = (_dim_of_turns(c, turns) for turns in (c.rotary_high, c.rotary_low))
        if c.rotary_truncate:
            high, low = math.floor(high), math.ceil(low)
        first, last = max(high, 0), min(low, c.head_size - 1)
        kept = 1 - jnp.clip((jnp.arange(len(whole)) - first) / max(last - first, 0.001), 0, 1)
    else:
        turns = c.rotary_original_len * whole / (2 * math.pi)
        kept = jnp.clip((turns - c.rotary_low) / (c.rotary_high - c.rotary_low), 0, 1)
    return (1 - kept) * whole / c.rotary_factor + kept * whole


def _dim_of_turns(c: DecoderConfig, turns: float) -> float:
    """Returns the index in `[H/2]` of the frequency that makes `turns` turns within the original length."""
    return c.head_size * math.log(c.rotary_original_len / (turns * 2 * math.pi)) / (2 * math.log(c.rotary_base))


def rotary_angles(positions_BT: Array, frequencies: Array) -> Array:
    """Returns the angle of each position and each pair of dims, float32 `[B, T, H/2]`."""
    return positions_BT.astype(jnp.float32)[:, :, None] * frequencies[None, None]


def rotate(x_BTNH: Array, angles_BTH: Array | None) -> Array:
    """Returns `x` with dims `i` and `i + H/2` of each head rotated by the position's angle (Llama's pairing)."""
    if angles_BTH is None:
        return x_BTNH
    sin, cos = (f(angles_BTH)[:, :, None, :].astype(x_BTNH.dtype) for f in (jnp.sin, jnp.cos))
    a, b = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
