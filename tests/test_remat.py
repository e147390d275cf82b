"""What each value of `model.remat` saves of a layer, on the device and on the host, and that it changes no step."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support.suite import SLOW
from support.three_steps import SMALL, assert_equal_steps, three_steps

from configs import base, quickstart
from models.block import Block, BlockConfig
from models.remat import INPUT, named, rematerialise
from sharding.accumulation import LayerVjp
from training.experiment import make_experiment

B, T, D, F, N, K, H = 2, 8, 32, 96, 4, 2, 8
X, HEADS, KEYS, WIDE = (B, T, D), (B, T, N, H), (B, T, K, H), (B * T, F)
PRODUCTS = [(B * T, D), (B * T, K * H), (B * T, K * H), (B * T, D), WIDE, WIDE]  # q, k, v, out, up, gate
SAVED = {  # shapes on the device, and on the host
    "full": ([X], []),
    "attention": ([X, HEADS, X], []),
    "dots": ([X, HEADS, *PRODUCTS], []),
    "offload": ([], [X, HEADS, KEYS, KEYS, HEADS]),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("policy", SAVED)
def test_a_layer_saves_what_its_policy_names(policy: str, *, frozen: bool) -> None:
    """No parameters, which the backward pass gathers again, and nothing that only gradients of frozen ones read."""
    sizes = dict(num_layers=1, hidden=D, intermediate=F, num_heads=N, num_kv_heads=K, head_size=H)
    config = BlockConfig(**sizes, norm="rms", norm_eps=1e-5, activation="swiglu", use_bias=False, causal=True)
    graph, state = nnx.split(Block(config, jax.random.key(0)))
    found = []

    def run(x: jax.Array, weights: Any) -> None:
        body = rematerialise(lambda x, weights: nnx.merge(graph, weights)(named(x, INPUT)), policy, in_scan=True)
        layer = LayerVjp(lambda x, given, constants: body(x, constants if frozen else given))
        saved = layer.forward(x, *((None, weights) if frozen else (weights, None)))[1]
        found.append([sorted(value.shape for value in values) for values in saved])

    jax.eval_shape(run, jnp.ones(X), state)
    on_device, on_host = SAVED[policy]
    needed = [shape for shape in on_device if not (frozen and shape == HEADS)]  # the output product's factor
    assert found[0] == [sorted(needed), sorted(on_host)]


@pytest.mark.parametrize(
    ("remat", "overlap"),
    [
        *(pytest.param(name, "auto", marks=SLOW) for name in ("offload", "attention")),
        pytest.param("offload", "off", marks=pytest.mark.release),
    ],
)
def test_steps_are_those_of_layers_that_are_computed_again(remat: str, overlap: str) -> None:
    more = {"model.num_layers": 3, "sharding.overlap": overlap}
    wanted, found = (three_steps(more | {"model.remat": choice}) for choice in ("full", remat))
    assert_equal_steps(found, wanted, 1e-5)


def test_layers_with_adapters_keep_no_frozen_parameters() -> None:
    """The pipelined loops gather the base's layers twice, and keep no stack of gathered ones."""
    config = quickstart.get_config()
    adapters = {"model.lora_rank": 2, "model.num_layers": 3, "model.intermediate": 48, "sharding.overlap": "on"}
    config.update_from_flattened_dict(SMALL | adapters)
    text = make_experiment(base.typed(config)).lower_train_step().as_text()
    assert "tensor<64x48xf32>" in text  # a layer's
    assert "tensor<2x64x48xf32>" not in text  # the first two layers'
