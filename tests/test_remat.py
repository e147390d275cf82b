"""What each value of `model.remat` saves of a layer, on the device and on the host, and that it changes no step."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support.suite import SLOW
from support.three_steps import assert_equal_steps, three_steps

from models.block import Block, BlockConfig
from models.remat import INPUT, named, rematerialise
from sharding.accumulation import LayerVjp

B, T, D, F, N, K, H = 2, 8, 32, 96, 4, 2, 8
X, HEADS, KEYS, WIDE = (B, T, D), (B, T, N, H), (B, T, K, H), (B * T, F)
PRODUCTS = [(B * T, D), (B * T, K * H), (B * T, K * H), (B * T, D), WIDE, WIDE]  # q, k, v, out, up, gate
SAVED = {  # shapes on the device, and on the host
    "full": ([X], []),
    "attention": ([X, HEADS, X], []),
    "dots": ([X, HEADS, *PRODUCTS], []),
    "offload": ([], [X, HEADS, KEYS, KEYS, HEADS]),
}


@pytest.mark.parametrize("policy", SAVED)
def test_a_layer_saves_what_its_policy_names(policy: str) -> None:
    """Parameters are not saved, because the backward pass gathers them again."""
    sizes = dict(num_layers=1, hidden=D, intermediate=F, num_heads=N, num_kv_heads=K, head_size=H)
    config = BlockConfig(**sizes, norm="rms", norm_eps=1e-5, activation="swiglu", use_bias=False, causal=True)
    graph, state = nnx.split(Block(config, jax.random.key(0)))
    found = []

    def run(x: jax.Array, weights: Any) -> None:
        def body(x: jax.Array, weights: Any) -> jax.Array:
            return nnx.merge(graph, weights)(named(x, INPUT))

        saved = LayerVjp(rematerialise(body, policy, in_scan=True)).forward(x, weights)[1]
        found.append([sorted(value.shape for value in values) for values in saved])

    jax.eval_shape(run, jnp.ones(X), state)
    assert found[0] == [sorted(shapes) for shapes in SAVED[policy]]


@pytest.mark.parametrize(
    ("remat", "overlap"),
    [("offload", "auto"), *(pytest.param(*case, marks=SLOW) for case in (("offload", "off"), ("attention", "auto")))],
)
def test_steps_are_those_of_layers_that_are_computed_again(remat: str, overlap: str) -> None:
    more = {"model.num_layers": 3, "sharding.overlap": overlap}
    wanted, found = (three_steps(more | {"model.remat": choice}) for choice in ("full", remat))
    assert_equal_steps(found, wanted, 1e-5)
