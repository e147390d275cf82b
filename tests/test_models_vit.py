"""The vision transformer against a plain numpy one and transformers', its published size, and its settings."""

import importlib.util
from typing import Any

import jax
import numpy as np
import pytest
from test_models_forward import layer, norm
from test_models_resnet import random_params
from workload import whole

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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="make .venv/hugging-face-installed")
@pytest.mark.parametrize("activation", ["gelu_exact", "gelu"])
def test_logits_equal_those_of_transformers(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    model = build(activation=activation)
    c, x = model.config, images(model)
    config = transformers.ViTConfig(
        hidden_size=c.hidden,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        intermediate_size=c.intermediate,
        hidden_act="gelu" if activation == "gelu_exact" else "gelu_new",
        layer_norm_eps=c.norm_eps,
        image_size=c.image_size,
        patch_size=c.patch_size,
        num_channels=c.channels,
        num_labels=c.num_classes,
    )
    torch.manual_seed(0)
    theirs = transformers.ViTForImageClassification(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.ndim == 1 and name.endswith("weight")))
        expected = theirs(torch.from_numpy(x).movedim(3, 1)).logits.numpy()
    found = {name: value.numpy() for name, value in theirs.state_dict().items()}
    params = from_transformers(found, c)
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda s: s.shape, model.param_specs())
    logits = jax.jit(lambda p: model.logits(p, x, whole))(params)
    np.testing.assert_allclose(logits[:, : c.num_classes], expected, atol=1e-4)
    assert np.abs(expected).max() > 1


LAYER = {
    "attention_norm": "layernorm_before",
    "query": "attention.q_proj",
    "key": "attention.k_proj",
    "value": "attention.v_proj",
    "out": "attention.o_proj",
    "mlp_norm": "layernorm_after",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}


def from_transformers(found: dict[str, np.ndarray], c: ViTConfig) -> Params:
    """Returns the values by our names; the head is filled up with zeros."""

    def linear(name: str) -> Params:
        return {"weight": found[f"{name}.weight"].T, "bias": found[f"{name}.bias"]}

    def norm(name: str) -> Params:
        return {"scale": found[f"{name}.weight"], "bias": found[f"{name}.bias"]}

    def block(i: int) -> Params:
        return {ours: (norm if "norm" in ours else linear)(f"vit.layers.{i}.{name}") for ours, name in LAYER.items()}

    kernel = found["vit.embeddings.patch_embeddings.projection.weight"]  # [D, C, P, P]
    padding = c.padded_classes - c.num_classes
    head = {key: np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]) for key, x in linear("classifier").items()}
    return {
        "embed": {
            "patch": {
                "weight": kernel.transpose(2, 3, 1, 0).reshape(-1, c.hidden),
                "bias": found["vit.embeddings.patch_embeddings.projection.bias"],
            },
            "class_token": found["vit.embeddings.cls_token"][0, 0],
            "position": found["vit.embeddings.position_embeddings"][0],
        },
        "layers": jax.tree.map(lambda *xs: np.stack(xs), *map(block, range(c.num_layers))),
        "head": {"norm": norm("vit.layernorm"), "linear": head},
    }


def test_size_and_flops_of_vit_base_are_the_published_ones() -> None:
    """ViT-B/16: 86 M parameters (Dosovitskiy et al. 2021, table 1), 86,567,656 in torchvision, 17.6 G FLOPs there."""
    base = dict(image_size=224, patch_size=16, num_layers=12, hidden=768, intermediate=3072, num_heads=12)
    model = build(**base, num_classes=1000, class_multiple=1)
    assert model.num_params == 86_567_656
    assert abs(model.flops_per_row((224, 224, 3)) / 6e9 - 17.56) < 0.05
