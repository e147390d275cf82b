"""Experts as a plain loop: every expert computes every token, and tokens beyond the capacity count nothing."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.experts import MoeBlock


@contextmanager
def dense_loop() -> Iterator[None]:
    """While it is open, layers with experts are traced as the loop."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MoeBlock, "finish", _finish)
        yield


def _finish(
    self: Any, x: jax.Array, mixed: jax.Array, weights: jax.Array, real: jax.Array, exchange: object = None
) -> Any:
    """A choice fits if fewer than `room` real choices of its expert are before it, all first choices before second."""
    c, (x, y) = self.moe, self.attend(x, mixed)
    length = y.shape[1]
    room = math.ceil(c.experts_per_token * length * c.capacity_factor / c.num_experts)
    bias = lambda x, *expert: 0 if x is None else x[(*expert, None, None)]
    logits = y @ self.router[...] + bias(self.router_bias)
    probs = jnp.exp(logits) / jnp.exp(logits).sum(axis=-1, keepdims=True)
    order = jnp.argsort(-probs, axis=-1)
    choices = [order[..., i] for i in range(c.experts_per_token)]
    gates = [jnp.take_along_axis(probs, e[..., None], axis=-1)[..., 0] for e in choices]
    if c.experts_per_token == 2:
        gates = [gate / (gates[0] + gates[1]) for gate in gates]
    chosen = jnp.concatenate(choices, axis=1)
    real = jnp.concatenate([real > 0] * c.experts_per_token, axis=1)
    same = (chosen[:, :, None] == chosen[:, None, :]) & real[:, None, :]
    before = (same & np.tri(chosen.shape[1], k=-1, dtype=bool)[None]).sum(axis=-1)
    fits = jnp.split(real & (before < room), c.experts_per_token, axis=1)
    balance, whole = jnp.zeros(x.shape[0]), jnp.maximum(weights.sum(axis=1), 1e-9)
    for e in range(c.num_experts):
        experts = self.experts
        up = y @ experts.up[e] + bias(experts.up_bias, e)
        if c.activation == "swiglu":
            hidden = jax.nn.silu(y @ experts.gate[e] + bias(experts.gate_bias, e)) * up
        else:
            hidden = jax.nn.gelu(up)
        part = sum(gate * fit * (i == e) for gate, fit, i in zip(gates, fits, choices, strict=True))
        x = x + part[..., None] * (hidden @ experts.down[e] + bias(experts.down_bias, e))
        first, likely = ((weights * w).sum(axis=1) for w in (choices[0] == e, probs[..., e]))
        balance = balance + c.num_experts * first * likely / whole
    aux = {
        "balance_loss": balance.sum(),
        "z_loss": jnp.sum(weights * jnp.log(jnp.exp(logits).sum(axis=-1)) ** 2),
        "dropped_share": sum(jnp.sum(weights * ~fit) for fit in fits) / c.experts_per_token,
    }
    return x, aux


def plain_slots(probs: np.ndarray, real: np.ndarray, per_token: int, room: int) -> list[list[list[int]]]:
    """Returns, for each row and expert, the tokens that it takes, in order: GShard's algorithm 1 in plain Python."""
    found = []
    for row, row_real in zip(probs.tolist(), real.tolist(), strict=True):
        experts: list[list[int]] = [[] for _ in row[0]]
        for choice in range(per_token):
            for token, p in enumerate(row):
                expert = sorted(range(len(p)), key=lambda e: -p[e])[choice]
                if row_real[token] and len(experts[expert]) < room:
                    experts[expert].append(token)
        found.append(experts)
    return found
