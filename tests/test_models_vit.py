"""The vision transformer against a plain numpy one, and its published size."""

from typing import Any

import jax
import numpy as np
from support.numpy_models import layer, norm
from support.numpy_resnet import random_params
from support.workload import whole

import models
from configs.schema import ViTConfig
from models.model import Params


def build(**changes: Any) -> models.ViT:
    small = dict(image_size=12, patch_size=4, channels=3, num_layers=2, hidden=16, intermediate=40, num_heads=4)
    model = models.build(ViTConfig(**small | changes))
    assert isinstance(model, models.ViT)
    return model


def images(model: models.ViT, rows: int = 3) -> np.ndarray:
    side = model.config.image_size
    return np.random.default_rng(1).normal(size=(rows, side, side, model.config.channels)).astype(np.float32)


def reference(params: Params, image: np.ndarray, c: ViTConfig) -> np.ndarray:
    """Returns the logits of one image, patch by patch."""
    p, side = params["embed"], c.patch_size
    places = [(top, left) for top in range(0, c.image_size, side) for left in range(0, c.image_size, side)]
    tokens = [image[top : top + side, left : left + side].reshape(-1).astype(float) for top, left in places]
    x = np.stack([p["class_token"], *(token @ p["patch"]["weight"] + p["patch"]["bias"] for token in tokens)])
    x = x + p["position"]
    for i in range(c.num_layers):
        values = jax.tree.map(lambda x, i=i: x[i], params["layers"])
        x = layer(x, values, c.num_heads, c.num_heads, "layer", False, False)
    head = params["head"]
    return (norm(x[0], head["norm"], "layer") @ head["linear"]["weight"] + head["linear"]["bias"])[: c.num_classes]


def test_logits_match_numpy() -> None:
    model = build(norm_eps=1e-5)
    params, x = random_params(model), images(model)
    expected = np.stack([reference(params, image, model.config) for image in x])
    logits = jax.jit(lambda p: model.logits(p, x, whole))(params)
    np.testing.assert_allclose(logits[:, :10], expected, rtol=1e-4, atol=1e-4)
    assert logits.shape == (3, 16) and np.all(logits[:, 10:] < -1e20)
    exact = jax.jit(lambda p: build(norm_eps=1e-5, activation="gelu_exact").logits(p, x, whole))(params)
    assert 1e-5 < np.abs(exact - logits)[:, :10].max() < 1e-1  # the other gelu is near


def test_size_and_flops_of_vit_base_are_the_published_ones() -> None:
    """ViT-B/16: 86 M parameters (Dosovitskiy et al. 2021, table 1), 86,567,656 in torchvision, 17.6 G FLOPs there."""
    base = dict(image_size=224, patch_size=16, num_layers=12, hidden=768, intermediate=3072, num_heads=12)
    model = build(**base, num_classes=1000, class_multiple=1)
    assert model.num_params == 86_567_656
    assert abs(model.flops_per_row((224, 224, 3)) / 6e9 - 17.56) < 0.05
