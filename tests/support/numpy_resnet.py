"""Small ResNets, and their layers in numpy."""

from typing import Any

import jax
import numpy as np

import models
from configs.schema import ResNetConfig
from models.model import Params


def build(**changes: Any) -> models.ResNet:
    model = models.build(ResNetConfig(**changes))
    assert isinstance(model, models.ResNet)
    return model


def random_params(model: models.Model) -> Params:
    """Parameters of which none is zero or one."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda spec: rng.normal(0.1, 0.4, spec.shape).astype(np.float32), model.param_specs())


def conv(x: np.ndarray, w: np.ndarray, stride: int) -> np.ndarray:
    """`x` is one image `[H, W, C]`, `w` is `[O, C, k, k]`: a sum over the places of the kernel."""
    k, (height, width) = w.shape[2], x.shape[:2]
    x = np.pad(x, ((k // 2, k // 2), (k // 2, k // 2), (0, 0)))
    shifted = [(x[i : i + height, j : j + width], w[:, :, i, j].T) for i in range(k) for j in range(k)]
    return sum(part @ taps for part, taps in shifted)[::stride, ::stride]


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)
