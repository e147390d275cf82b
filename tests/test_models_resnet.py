"""The ResNet against a plain numpy one, published sizes, and the step's strategies."""

import math
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from support import workload
from support.numpy_resnet import build, conv, random_params, relu
from support.tables import every_row

import models
from configs import base, resnet50, resnet110, wide_resnet_3b
from configs.base import typed
from configs.schema import ResNetConfig
from configs.schema.combinations import refuse
from models.model import Params
from models.resnet import norm_channels
from sharding.averages import part_averages
from sharding.hlo import read_collectives
from sharding.scopes import make_layout
from sharding.spec import place_all
from training.batches import accumulation


def conv_norm(x: np.ndarray, p: Params, groups: int, stride: int = 1) -> np.ndarray:
    y = np.stack(np.split(conv(x, p["weight"].astype(float), stride), groups, axis=2))
    y = (y - y.mean((1, 2, 3), keepdims=True)) / np.sqrt(y.var((1, 2, 3), keepdims=True) + 1e-5)
    return np.concatenate(y, axis=2) * p["scale"] + p["bias"]


def pool(x: np.ndarray) -> np.ndarray:
    x = np.pad(x, ((1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    size = (x.shape[0] - 1) // 2
    return np.stack([[x[2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max((0, 1)) for j in range(size)] for i in range(size)])


def reference(params: Params, x: np.ndarray, c: ResNetConfig) -> np.ndarray:
    """Returns the logits of one image."""
    large = c.stem == "conv7_pool"
    x = relu(conv_norm(x.astype(float), params["stem"]["conv"], c.norm_groups, 2 if large else 1))
    x = pool(x) if large else x
    for stage, count in enumerate(c.stage_blocks):
        for i in range(count):
            p, stride = params[f"stage{stage + 1}_block{i}"], 2 if stage and not i else 1
            late = stride if c.version == "1.5" and c.block == "bottleneck" else 1
            y = relu(conv_norm(x, p["conv0"], c.norm_groups, stride // late))
            if c.block == "bottleneck":
                y = relu(conv_norm(y, p["conv1"], c.norm_groups, late))
            y = conv_norm(y, p["conv2" if c.block == "bottleneck" else "conv1"], c.norm_groups)
            x = relu(y + (conv_norm(x, p["shortcut"], c.norm_groups, stride) if "shortcut" in p else x))
    return (x.mean((0, 1)) @ params["head"]["weight"] + params["head"]["bias"])[: c.num_classes]


@every_row(
    "changes",
    [
        dict(stage_blocks=(1, 1), width=4, norm_groups=2, remat="none"),
        dict(block="bottleneck", stage_blocks=(1, 1), width=4, norm_groups=2, channels=3),
        dict(block="bottleneck", stage_blocks=(1, 1), width=4, norm_groups=2, version="1.5", widening=2),
        dict(stem="conv7_pool", stage_blocks=(1,), width=4, norm_groups=4, remat="dots"),
    ],
)
def test_logits_loss_and_correct_match_numpy(changes: dict[str, Any]) -> None:
    model = build(**changes)
    c, params, rng = model.config, random_params(model), np.random.default_rng(1)
    images = rng.normal(size=(5, 15, 15, c.channels)).astype(np.float32)  # an odd side: padding must be alike
    expected = np.stack([reference(params, image, c) for image in images])
    batch: Any = {"images": images, "labels": np.arange(5, dtype=np.int32), "weights": rng.random(5, dtype=np.float32)}
    batch["labels"][:2] = expected[:2].argmax(-1)

    logits = jax.jit(lambda p: model.logits(p, images, workload.whole))(params)
    np.testing.assert_allclose(logits[:, :10], expected, rtol=2e-4, atol=2e-4)
    assert logits.shape == (5, 16) and np.all(logits[:, 10:] < -1e20)

    sums = jax.jit(lambda p: model.evaluate(p, batch, workload.whole))(params)
    losses = np.log(np.exp(expected).sum(-1)) - expected[np.arange(5), batch["labels"]]
    np.testing.assert_allclose(sums["loss"], np.sum(batch["weights"] * losses), rtol=1e-4)
    hits = expected.argmax(-1) == batch["labels"]
    assert 2 <= hits.sum() < 5
    np.testing.assert_allclose(sums["correct"], np.sum(batch["weights"] * hits), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda p: model.loss(p, batch, workload.whole))(params), sums["loss"], rtol=1e-6)


def test_new_block_equals_its_shortcut() -> None:
    """Goyal et al. 2017, 5.1: the branches add nothing yet, and learn from the second step on."""
    model = build(stage_blocks=(2,), width=8)
    params = jax.jit(model.init)(jax.random.key(0))
    logits = jax.jit(lambda p: model.logits(p, images, workload.whole))
    images = workload.batch(3, "resnet")["images"]
    without = {name: jax.tree.map(np.zeros_like, p) if "block" in name else p for name, p in params.items()}
    np.testing.assert_array_equal(logits(params), logits(without))
    assert {float(p["conv1"]["scale"].max()) for name, p in params.items() if "block" in name} == {0.0}
    weights = [x for p in params.values() for x in jax.tree.leaves(p) if x.ndim == 4]
    for w in weights:  # He et al. 2015: variance 2 / fan-in, within four standard errors
        np.testing.assert_allclose(np.var(w) * w[0].size, 2.0, rtol=4 * (2 / w.size) ** 0.5)


def products(model: models.ResNet, size: int) -> int:
    """Multiplications of the convolutions and of the head, from the traced program instead of from the config."""
    shape = jax.ShapeDtypeStruct((1, size, size, model.config.channels), "float32")
    params = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    jaxpr = jax.make_jaxpr(lambda p, x: model.logits(p, x, workload.whole))(params, shape)

    def equations(jaxpr: Any) -> Any:
        for equation in jaxpr.eqns:
            yield equation
            for inner in jaxprs_in_params(equation.params):
                yield from equations(inner)

    total = 0
    for equation in equations(jaxpr.jaxpr):
        if equation.primitive.name in ("conv_general_dilated", "dot_general"):
            right, out = equation.invars[1].aval.shape, equation.outvars[0].aval.shape
            total += math.prod(out) * (math.prod(right[1:]) if len(right) == 4 else right[0])
    return total


@every_row(
    ("depth", "version", "parameters", "billions"),
    [  # gluoncv's and torchvision's parameters; He et al. 2015, table 1, and of version 1.5 torchvision's
        (18, "1", 11_689_512, 1.8),
        (50, "1", 25_557_032, 3.8),
        (152, "1", 60_192_808, 11.3),
        (50, "1.5", 25_557_032, 4.09),
        (101, "1.5", 44_549_160, 7.80),
    ],
)
def test_parameters_and_flops_match_published_networks(
    depth: int, version: str, parameters: int, billions: float
) -> None:
    model = build(**base.resnet(depth).to_dict() | dict(version=version, class_multiple=1))
    assert model.num_params == parameters
    forward = model.flops_per_row((224, 224, 3)) / 3  # backward takes twice as much
    if depth < 101:
        assert forward == 2 * products(model, 224)
    assert math.isclose(forward / 2e9, billions, rel_tol=0.04 if version == "1" else 0.003)


def test_what_is_no_published_network_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^base.resnet\(20\) is none of the published ones: 18, 34, 50, 101, 152, 110$"
    ):
        base.resnet(20)


def test_the_wide_network_of_mics_has_three_billion_parameters_in_200_layers() -> None:
    """Zhang et al. 2022, figure 11: blocks [6, 8, 46, 6], eight times as wide."""
    section = wide_resnet_3b.get_config()
    model = build(**section.model.to_dict())
    assert (model.config.stage_blocks, model.config.widening) == ((6, 8, 46, 6), 8)
    layers = [name for name in norm_channels(model.config) if "shortcut" not in name]
    assert len(layers) + 1 == 200  # the last one is the classifier
    assert math.isclose(model.num_params, 3e9, rel_tol=0.02)
    assert (section.model.remat, section.model.compute_dtype, section.batch.micro_size) == ("dots", "float32", 8)
    # the same rule, of a network whose size torchvision states: wide_resnet50_2
    twice = base.resnet(50).to_dict() | dict(widening=2, class_multiple=1)
    assert build(**twice).num_params == 68_883_240


@every_row(
    ("config", "nodes", "per_node"),
    [
        (wide_resnet_3b.get_config(), 2, 8),
        (resnet50.get_config(), 2, 8),
        (resnet50.get_config("lars"), 16, 8),
        (resnet110.get_config(), 4, 1),
    ],
)
def test_large_configs_fit_their_hardware(config: Any, nodes: int, per_node: int) -> None:
    """The scopes cut every parameter, the gathers allow what is kept, and no micro-step has rows of padding."""
    settings = typed(config)
    layout = make_layout(settings.sharding, num_nodes=nodes, devices_per_node=per_node)
    refuse(settings.values | {"parameters_are_cut": bool(layout.parameters)})
    place_all(models.build(settings.model).param_specs(), layout)
    rows = nodes * per_node * settings.batch.micro_size
    assert rows * accumulation(settings.batch, nodes * per_node) == settings.batch.global_size


def test_resnet_110_is_that_of_cifar() -> None:
    """He et al. 2015, table 6: 110 layers, 1.7 M parameters; ours has two convolutions more, in its shortcuts."""
    model = build(**resnet110.get_config().model.to_dict() | dict(class_multiple=1))
    shortcuts = (16 * 32 + 2 * 32) + (32 * 64 + 2 * 64)
    assert len(norm_channels(model.config)) + 1 == 110 + 2
    assert model.num_params == 1_727_962 + shortcuts


def test_running_averages_are_no_parameters() -> None:
    batch, group = (build(norm=norm) for norm in ("batch", "group"))
    trained, averages = part_averages(batch.param_specs())
    assert batch.num_params == group.num_params and trained == group.param_specs()
    shapes = {
        name: (average["mean"].shape, average["variance"].shape) for name, average in averages["averages"].items()
    }
    assert shapes == {name: ((count,), (count,)) for name, count in norm_channels(batch.config).items()}


@pytest.mark.slow
def test_zero3_gathers_each_block() -> None:
    """In the forward and in the backward pass; XLA:CPU of jax 0.10 merges the two (on GPUs both are there)."""
    gathers = 2 if jax.__version_info__ < (0, 11) else 4  # in two micro-steps
    sh = workload.plan("resnet", strategy="zero3", hierarchical=False)
    step, *_ = workload.compiled_step("resnet", sh, accumulation=2)
    got: Counter = Counter()
    for c in read_collectives(step.as_text(), sh.layout.shape):
        if c.label in ("gather", "group_reduce_scatter"):
            got[c.label, c.num_elements] += c.times
    expected: Counter = Counter()
    specs = workload.model("resnet").param_specs()
    assert list(specs) == ["stem", "stage1_block0", "stage2_block0", "head"]
    for tree in specs.values():
        elements = sum(math.prod(s.shape) for s in jax.tree.leaves(tree, is_leaf=lambda x: hasattr(x, "dims")))
        expected += Counter({("gather", elements): gathers, ("group_reduce_scatter", elements): 2})
    assert got == expected
