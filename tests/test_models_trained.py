"""Training on a mesh against independent programs: models written plainly, their gradients by jax, optimizers in numpy.

The models are those in numpy of `test_models_forward.py`, `test_models_vit.py` and `test_models_resnet.py`, one example
at a time, with jax.numpy in place of numpy.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_models_forward
import test_models_resnet
import test_models_vit
import workload
from test_optimizers import formula_rates

import models
from compression.exchange import exchange
from configs.schema import EncoderConfig, OptimizerConfig, ResNetConfig, ViTConfig
from optimizers import is_matrix, make_optimizer
from sharding.gradients import accumulated
from sharding.spec import ParamSpec, place_all
from sharding.state import state_shardings
from sharding.step import Chain, build_train_step, first_state

STEPS = 3
# wide enough for Adafactor to factor matrices and kernels
CONFIGS: dict[str, Any] = {
    "vit": ViTConfig(patch_size=4, num_layers=2, hidden=128, intermediate=136, num_heads=4, norm_eps=1e-5),
    "wide resnet": ResNetConfig(
        block="bottleneck", version="1.5", stage_blocks=(1,), width=32, widening=4, norm_groups=4
    ),
    "encoder": EncoderConfig(
        num_layers=2,
        hidden=128,
        intermediate=136,
        num_heads=4,
        vocab_size=40,
        vocab_multiple=16,
        max_len=workload.SEQ_LEN,
    ),
}
MODULES = {"vit": test_models_vit, "wide resnet": test_models_resnet, "encoder": test_models_forward}
BATCHES = {"vit": "vit", "wide resnet": "resnet", "encoder": "encoder"}


@cache
def first_params(kind: str) -> Any:
    """Returns initial parameters, none of them zero or one."""
    rng = np.random.default_rng(0)
    params = jax.jit(models.build(CONFIGS[kind]).init)(jax.random.key(0))
    return jax.tree.map(lambda x: np.asarray(x) + rng.normal(0, 0.05, x.shape).astype(np.float32), params)


def independent(kind: str) -> Callable[[Any], tuple[float, Any]]:
    """Returns a function of parameters: the loss of the whole batch, and the gradients."""
    config, data, reference = CONFIGS[kind], dict(workload.batch(kind=BATCHES[kind])), MODULES[kind].reference
    inputs, targets = (data["tokens"], data["targets"]) if kind == "encoder" else (data["images"], data["labels"])

    def loss(params: Any) -> jax.Array:
        logits = jax.vmap(lambda x: reference(params, x, config))(inputs)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return -jnp.sum(data["weights"] * picked) / data["weights"].sum()

    return jax.jit(jax.value_and_grad(loss))


def train_by_numpy(kind: str, optimizer: OptimizerConfig) -> list[float]:
    """Returns the losses of the independent program; layers are optimised one by one."""
    value_and_grad, start = independent(kind), first_params(kind)
    rates = formula_rates(optimizer.learning_rate, 0.1 * optimizer.learning_rate, 2, STEPS, "cosine")
    specs = models.build(CONFIGS[kind]).param_specs()
    params, losses, came = start, [], []

    def optimise(spec: ParamSpec, p: np.ndarray, *grads: np.ndarray) -> np.ndarray:
        def one(p: np.ndarray, *grads: np.ndarray) -> np.ndarray:
            decay = optimizer.weight_decay if is_matrix(spec) else 0.0
            return by_numpy(optimizer, p, list(grads), rates[: len(grads)], decay)

        return np.stack([one(*of_layer) for of_layer in zip(p, *grads)]) if spec.dims[0] == "layers" else one(p, *grads)

    for _ in range(STEPS):
        with jax.numpy_rank_promotion("allow"):  # as numpy does
            loss, grads = value_and_grad(jax.tree.map(np.float32, params))
        losses.append(float(loss))
        grads = jax.tree.map(np.float64, grads)
        norm = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(grads)))
        came.append(jax.tree.map(lambda g, norm=norm: g * min(1, optimizer.clip_norm / norm), grads))
        is_spec = lambda x: isinstance(x, ParamSpec)
        params = jax.tree.map(optimise, specs, jax.tree.map(np.float64, start), *came, is_leaf=is_spec)
    return losses


def train_on_mesh(kind: str, optimizer: OptimizerConfig, dtype: str, **how: Any) -> list[float]:
    """Returns the losses of the step of a strategy, on 4 nodes of 2 devices."""
    model = models.build(replace(CONFIGS[kind], compute_dtype=dtype))
    plan = workload.plan(BATCHES[kind], dtype=dtype, **how)
    plan = replace(plan, placements=place_all(model.param_specs(), plan.layout))
    tx = optax.chain(exchange(plan), make_optimizer(optimizer, STEPS, model.param_specs()))
    beside = workload.early(plan, "none") if plan.overlap and plan.layout.replica_axes else None
    chain = Chain(tx, early=beside)
    state = first_state(chain, first_params(kind))
    state = jax.device_put(jax.tree.map(np.asarray, state), state_shardings(plan, state), may_alias=False)
    step = jax.jit(build_train_step(accumulated(model.objective), plan, chain))
    return list(workload.run_steps(step, state, workload.put_batch(plan, 2, kind=BATCHES[kind]), STEPS)[0])


def by_numpy(c: OptimizerConfig, p: np.ndarray, grads: list[np.ndarray], rates: list[float], wd: float) -> np.ndarray:
    """Returns a tensor after steps of AdamW, LAMB or Adafactor with `grads`."""
    if c.name == "adafactor":
        return adafactor_by_numpy(p, grads, rates, wd)
    m = v = np.zeros_like(p)
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        m, v = c.b1 * m + (1 - c.b1) * g, c.b2 * v + (1 - c.b2) * g**2
        u = m / (1 - c.b1**t) / (np.sqrt(v / (1 - c.b2**t)) + c.eps) + wd * p
        p = p - rate * u * (np.linalg.norm(p) / np.linalg.norm(u) if c.name == "lamb" else 1.0)
    return p


def adafactor_by_numpy(p: np.ndarray, grads: list[np.ndarray], rates: list[float], wd: float) -> np.ndarray:
    """Algorithms 4 and 5 of arXiv 1804.04235, with relative steps; tensors are factored by their two largest dims."""
    rms = lambda x: np.sqrt(np.mean(np.square(x)))
    rows = columns = v = np.zeros(())
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        b2, squares = 1 - t**-0.8, g**2 + 1e-30
        if g.ndim > 1 and sorted(g.shape)[-2] >= 128:
            i, j = np.argsort(g.shape)[-2:]
            rows = b2 * rows + (1 - b2) * squares.mean(i, keepdims=True)
            columns = b2 * columns + (1 - b2) * squares.mean(j, keepdims=True)
            v = rows * columns / rows.mean(j, keepdims=True)
        else:
            v = b2 * v + (1 - b2) * squares
        u = g / np.sqrt(v)
        p = p - rate * (max(1e-3, rms(p)) * u / max(1.0, rms(u)) + wd * p)
    return p


MICS = dict(strategy="mics", partition_size=2, overlap=True)
CASES = [
    ("wide resnet", "adafactor", "float32", dict(strategy="zero3")),
    ("vit", "adamw", "float32", dict(strategy="zero3", gather="node", overlap=True)),
    ("encoder", "lamb", "float32", dict(strategy="zero1", overlap=True)),
    ("vit", "adafactor", "bfloat16", dict(strategy="zero3")),
    ("wide resnet", "adafactor", "bfloat16", MICS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "dtype", "how"), CASES)
def test_losses_are_those_of_an_independent_program(
    kind: str, name: str, dtype: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 32 bits to rounding; in 16 bits they fall as these do."""
    for module in MODULES.values():
        monkeypatch.setattr(module, "np", jnp)
    optimizer = OptimizerConfig(name=name, learning_rate=0.02, warmup_steps=2, weight_decay=0.1, clip_norm=0.5)
    wanted = train_by_numpy(kind, optimizer)
    got = train_on_mesh(kind, optimizer, dtype, **how)
    assert wanted[0] - wanted[-1] > 0.1
    if dtype == "float32":
        np.testing.assert_allclose(got, wanted, rtol=2e-5)
    else:
        assert got != pytest.approx(wanted, abs=1e-5)
        np.testing.assert_allclose(got, wanted, atol=0.02)
