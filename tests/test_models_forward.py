"""Decoder and encoder against a plain numpy transformer, float64, one token matrix `[T, D]` at a time."""

import re
from typing import Any

import jax
import numpy as np
import pytest
from support.numpy_models import STYLES, gelu, layer, linear, norm, small
from support.tables import every_row

import models
from configs.schema import DecoderConfig
from models.model import Params


def random_params(model: models.Model) -> Params:
    """Parameters of which none is zero or one, in float64."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda spec: rng.normal(0.1, 0.4, spec.shape).astype(np.float32).astype(np.float64), model.param_specs()
    )


def reference(params: Params, tokens: np.ndarray, config: Any) -> np.ndarray:
    """Returns the logits `[T, vocab_size]` of one row."""
    decoder = isinstance(config, DecoderConfig)
    embed, head, kind = params["embed"], params["head"], config.norm if decoder else "layer"
    x = embed["token"][tokens] + (embed["position"][: len(tokens)] if "position" in embed else 0)
    for index in range(config.num_layers):
        p = jax.tree.map(lambda a, index=index: a[index], params["layers"])
        kv_heads = config.num_kv_heads if decoder else config.num_heads
        x = layer(x, p, config.num_heads, kv_heads, kind, decoder and config.positions == "rotary", decoder)
    x = norm(x, head["norm"], kind)
    if not decoder:
        x = norm(gelu(linear(x, head["transform"])), head["transform_norm"], "layer")
    logits = x @ head.get("weight", embed["token"].T) + head.get("bias", 0)
    return logits[:, : config.vocab_size]


CASES = [("decoder", STYLES[name]) for name in STYLES] + [("encoder", {})]


@every_row(("kind", "style"), CASES)
def test_logits_and_loss_equal_numpy(kind: str, style: dict[str, Any]) -> None:
    model = small(kind, **style)
    assert isinstance(model, models.Decoder | models.Encoder)
    params = random_params(model)
    rng = np.random.default_rng(1)
    tokens, targets = rng.integers(0, 11, (2, 3, 8), dtype=np.int32)
    weights = rng.uniform(0, 2, (3, 8)).astype(np.float32)
    expected = np.stack([reference(params, row, model.config) for row in tokens])
    values = jax.tree.map(np.float32, params)

    batch: Any = {"tokens": tokens, "targets": targets, "weights": weights}
    whole = lambda _, tree: tree
    logits, loss = jax.jit(lambda p: (model.logits(p, tokens, whole), model.loss(p, batch, whole)))(values)
    np.testing.assert_allclose(logits[..., :11], expected, rtol=2e-4, atol=2e-4)
    assert logits.shape == (3, 8, 16) and np.all(logits[..., 11:] < -1e20)

    log_total = np.log(np.exp(expected).sum(-1))
    picked = np.take_along_axis(expected, targets[..., None], -1)[..., 0]
    assert loss.shape == () and loss.dtype == np.float32
    np.testing.assert_allclose(loss, np.sum(weights * (log_total - picked)), rtol=1e-4)


def test_loss_in_half_precision_is_close_to_float32() -> None:
    params = jax.tree.map(np.float32, random_params(small("decoder")))
    tokens = np.arange(8, dtype=np.int32)[None]
    batch: Any = {"tokens": tokens, "targets": tokens, "weights": np.ones((1, 8), np.float32)}
    losses = {}
    for dtype, products_in in (("float32", "f32"), ("bfloat16", "bf16"), ("float16", "f16")):
        model = small("decoder", compute_dtype=dtype)
        step = jax.jit(jax.value_and_grad(lambda p, m=model: m.loss(p, batch, lambda _, tree: tree)))
        loss, gradient = step(params)
        assert loss.dtype == np.float32
        assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(gradient))
        products = re.findall(r":(\w+)\[\d+,\d+\] = dot_general", str(jax.make_jaxpr(step)(params)))
        assert set(products) == {products_in}
        losses[dtype] = float(loss)
    for dtype, tolerance in (("bfloat16", 0.05), ("float16", 0.05 / 8)):
        assert losses[dtype] != losses["float32"]
        assert losses[dtype] == pytest.approx(losses["float32"], rel=tolerance)
