"""Every optimizer against plain optax on unstacked layers; schedules, clipping and the guard."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from support.optimizing import GRADS, LAYERS, PARAMS, SPECS, STEPS, close, flat, optimizer_config, run, stack_name
from support.tables import every_row

from configs.schema import OptimizerConfig
from configs.schema.sections import OPTIMIZERS as NAMES
from sharding.spec import ParamSpec
from training.optimizers import PRODUCTS, make_schedule, newton_schulz

pytestmark = pytest.mark.usefixtures("muon_in_float32")

MATRICES = ("embed/token", "layers/up/weight", "layers/wide/weight", "head/weight", "head/transform")
HIDDEN_MATRICES = ("layers/up/weight", "layers/wide/weight", "head/transform")


SPECS["layers"]["wide"]["weight"] = ParamSpec(shape=(LAYERS, 128, 136), dims=("layers", "embed", "mlp"))


# ---------------------------------------------------------------------------------- against optax, layer by layer


def plain_optax(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The optimizer as a user of optax writes it for a flat dict of unstacked tensors."""
    c, decay = config, config.weight_decay
    decays = lambda params: {name: stack_name(name) in MATRICES for name in params}
    decoupled = optax.add_decayed_weights(lambda step: -decay * schedule(step), decays)
    match c.name:
        case "adamw":
            return optax.adamw(schedule, b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=decay, mask=decays)
        case "sgd":
            return optax.chain(optax.add_decayed_weights(decay, decays), optax.sgd(schedule, momentum=c.momentum))
        case "lamb":
            return optax.lamb(schedule, b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=decay, mask=decays)
        case "lars":
            return optax.lars(schedule, decay, decays, trust_ratio_mask=decays, momentum=c.momentum)
        case "adafactor":
            return optax.chain(optax.adafactor(schedule), decoupled)
    muon = contrib.muon(schedule, beta=c.momentum, eps=c.eps)
    adam = optax.nadam(schedule, b1=c.b1, b2=c.b2, eps=c.eps)  # optax's muon uses Nesterov for both
    labels = lambda params: {name: "muon" if stack_name(name) in HIDDEN_MATRICES else "adam" for name in params}
    return optax.chain(optax.partition({"muon": muon, "adam": adam}, labels), decoupled)


@pytest.mark.slow
@every_row("name", NAMES)
def test_optimizers_equal_optax_on_unstacked_layers(name: str) -> None:
    config = optimizer_config(name, clip_norm=0.0)
    tx = plain_optax(config, make_schedule(config, STEPS))
    params: Any = flat(PARAMS)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for grads in GRADS:
        updates, state = update(flat(grads), state, params)
        params = optax.apply_updates(params, updates)
    close(run(config)[0], params, rtol=1e-4 if name == "muon" else 2e-5)


def rounded_newton_schulz(x: np.ndarray) -> np.ndarray:
    """Five steps of Newton-Schulz on `[..., inputs, outputs]` with products of bfloat16, scaled by the shape."""

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.matmul(*(y.astype(jnp.bfloat16).astype(np.float64) for y in (a, b)))

    is_tall = x.shape[-2] > x.shape[-1]
    wide = x.swapaxes(-2, -1) if is_tall else x
    wide = wide / np.linalg.norm(wide, axis=(-2, -1), keepdims=True)
    for _ in range(5):
        square = product(wide, wide.swapaxes(-2, -1))
        wide = 3.4445 * wide + product(-4.7750 * square + 2.0315 * product(square, square), wide)
    return np.sqrt(max(1.0, x.shape[-1] / x.shape[-2])) * (wide.swapaxes(-2, -1) if is_tall else wide)


@every_row("shape", [(2, 8, 24), (2, 24, 8), (2, 3, 8, 16)])
def test_operands_of_muons_products_are_bfloat16_and_products_float32(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to the last bit: where a sum lies between two of bfloat16, another order of adding may round otherwise."""
    stack = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    kind = (len(shape) - 3, len(shape) - 2)  # the last dims are a matrix, those before them a batch
    in_float32 = np.asarray(jax.jit(lambda x: newton_schulz(kind, x, eps=1e-8))(stack))
    with monkeypatch.context() as as_in_runs:
        as_in_runs.setattr("training.optimizers.PRODUCTS", PRODUCTS)
        lowered = jax.jit(lambda x: newton_schulz(kind, x, eps=1e-8)).lower(stack)
    products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert len(products) == 3
    assert all(re.search(r": \(tensor<[\dx]+bf16>, tensor<[\dx]+bf16>\) -> tensor<[\dx]+f32>", x) for x in products)
    expected = rounded_newton_schulz(stack)
    error = np.linalg.norm(np.asarray(lowered.compile()(stack)) - expected)
    assert error < np.linalg.norm(in_float32 - expected) / 2 < 0.05 * np.linalg.norm(expected)


# -------------------------------------------------------------------------------- schedules, clipping, the guard


def formula_rates(schedule: str, warmup: int, fraction: float, num_steps: int) -> list[float]:
    """The learning rate of each step from the definitions, from 0.5 at the peak to 0.1 at the end."""
    rates, decaying = [], num_steps - 1 - warmup
    fall = min(max(round(fraction * num_steps), 1), decaying)  # wsd falls in a share of all steps, after the warm-up
    for step in range(num_steps):
        done = (step - warmup) / decaying if step > warmup else 0.0
        left = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done)), "quadratic": (1 - done) ** 2}
        left |= {"constant": 1.0, "wsd": min(1.0, (num_steps - 1 - step) / fall)}
        rates.append(0.5 * (step + 1) / warmup if step < warmup else 0.1 + 0.4 * left[schedule])
    return rates


@every_row(
    ("schedule", "fraction"),
    [("constant", 0.1), ("linear", 0.1), ("cosine", 0.1), ("quadratic", 0.1)]
    + [("wsd", fraction) for fraction in (0.1, 0.5, 1.0, 0.001)],
)
def test_schedules_match_their_formulas(schedule: str, fraction: float) -> None:
    changes: dict[str, Any] = {"learning_rate": 0.5, "final_fraction": 0.2, "decay_fraction": fraction}
    for warmup in (0, 1, 10):
        config = optimizer_config("adamw", schedule=schedule, warmup_steps=warmup, **changes)
        rates = jax.vmap(make_schedule(config, 40))(jnp.arange(40))
        np.testing.assert_allclose(rates, formula_rates(schedule, warmup, fraction, 40), rtol=1e-5)


def test_warmup_longer_than_the_run_is_rejected() -> None:
    assert float(make_schedule(optimizer_config("adamw", warmup_steps=5), 5)(4)) == pytest.approx(0.02)
    with pytest.raises(ValueError, match=r"optimizer\.warmup_steps=6 is more than num_steps=5"):
        make_schedule(optimizer_config("adamw", warmup_steps=6), 5)


@every_row("limit", [0.5, 1e6, 0.0])
def test_clipping_uses_the_global_norm(limit: float) -> None:
    config = optimizer_config(
        "sgd", clip_norm=limit, momentum=0.0, weight_decay=0.0, warmup_steps=0, schedule="constant"
    )
    params, state = run(config, GRADS[:1])
    norm = math.sqrt(sum(float((x.astype(np.float64) ** 2).sum()) for x in jax.tree.leaves(GRADS[0])))
    assert float(state.grad_norm) == pytest.approx(norm, rel=1e-5)  # before clipping
    factor = limit / norm if limit == 0.5 else 1.0
    expected = {name: x - 0.02 * factor * flat(GRADS[0])[name] for name, x in flat(PARAMS).items()}
    close(params, expected)


@every_row(("name", "bad"), [("adamw", math.inf), ("adafactor", math.nan), ("muon", math.nan)])
def test_non_finite_gradient_leaves_the_state_unchanged(name: str, bad: float) -> None:
    config = optimizer_config(name)
    poisoned = jax.tree.map(np.copy, GRADS[1])
    poisoned["layers"]["up"]["bias"][1, 3] = bad
    before_params, before = run(config, GRADS[:1])
    params, state = run(config, [GRADS[0], poisoned])
    jax.tree.map(np.testing.assert_array_equal, params, before_params)
    jax.tree.map(np.testing.assert_array_equal, state.inner, before.inner)
    assert (int(state.skipped_in_a_row), int(state.skipped)) == (1, 1)
    after, state = run(config, [GRADS[0], poisoned, GRADS[2]])
    jax.tree.map(np.testing.assert_array_equal, after, run(config, [GRADS[0], GRADS[2]])[0])  # as if never seen


def test_skipped_in_a_row_is_reset_by_a_finite_step() -> None:
    bad = jax.tree.map(lambda g: np.full_like(g, math.nan), GRADS[0])
    seen = []
    for count in range(1, 7):
        _, state = run(optimizer_config("sgd"), [GRADS[0], bad, bad, GRADS[1], bad, GRADS[2]][:count], num_steps=6)
        seen.append((int(state.skipped_in_a_row), int(state.skipped)))
    assert seen == [(0, 0), (1, 1), (2, 2), (0, 2), (1, 3), (0, 3)]
