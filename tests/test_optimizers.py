"""Every optimizer against plain optax on unstacked layers and against numpy; schedules, clipping and the guard."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from optax import contrib

from configs.schema import OptimizerConfig
from configs.schema.optimizer import NAMES
from optimizers import GuardState, make_optimizer, make_schedule, watched
from sharding.spec import ParamSpec

LAYERS, STEPS = 3, 5
DIMS = {
    "embed": {"token": ("vocab", "embed"), "position": ("position", "embed")},
    "layers": {
        "norm": {"scale": ("layers", "norm")},
        "up": {"weight": ("layers", "embed", "mlp"), "bias": ("layers", "mlp")},
        "wide": {"weight": ("layers", "embed", "mlp")},
    },
    "head": {"weight": ("embed", "vocab"), "norm": {"scale": ("norm",)}, "transform": ("embed", "mlp")},
}
SIZES = {"layers": LAYERS, "vocab": 24, "position": 16, "embed": 8, "mlp": 16, "norm": 8}
MATRICES = ("embed/token", "layers/up/weight", "layers/wide/weight", "head/weight", "head/transform")
HIDDEN_MATRICES = ("layers/up/weight", "layers/wide/weight", "head/transform")


def make_spec(dims: tuple[str, ...]) -> ParamSpec:
    shape = tuple(SIZES[dim] for dim in dims)
    # `wide` is large enough for Adafactor to factor it
    return ParamSpec(shape=shape, dims=dims)


def is_spec(x: object) -> bool:
    return isinstance(x, ParamSpec)


SPECS = jax.tree.map(make_spec, DIMS, is_leaf=lambda x: isinstance(x, tuple))
SPECS["layers"]["wide"]["weight"] = ParamSpec(shape=(LAYERS, 128, 136), dims=("layers", "embed", "mlp"))


def optimizer_config(name: str, **changes: Any) -> OptimizerConfig:
    section: dict[str, Any] = dict(learning_rate=0.02, warmup_steps=2, weight_decay=0.3, b2=0.99, eps=1e-7) | changes
    return OptimizerConfig(**{"name": name} | section)


def random_tree(seed: int, scale: Callable[[int], float] = lambda layer: 1.0) -> Any:
    """Values for SPECS, layer `i` multiplied by `scale(i)`."""
    rng = np.random.default_rng(seed)

    def draw(spec: ParamSpec) -> np.ndarray:
        x = rng.normal(size=spec.shape).astype(np.float32)
        factors = np.array([scale(i) for i in range(LAYERS)], np.float32)
        return x * factors.reshape(-1, *(1,) * (x.ndim - 1)) if spec.dims[0] == "layers" else x

    return jax.tree.map(draw, SPECS, is_leaf=is_spec)


PARAMS = random_tree(0, lambda layer: 10.0**layer)  # layers as unlike as can be
GRADS = [random_tree(1 + i, lambda layer: 0.1**layer) for i in range(STEPS)]


def run(config: OptimizerConfig, grads: list[Any] = GRADS, num_steps: int = STEPS) -> tuple[Any, GuardState]:
    """Returns parameters and state after our chain has seen `grads`."""
    init, step = one_device(config, num_steps)
    params, state = PARAMS, init(PARAMS)
    for grad in grads:
        params, state = step(grad, state, params)
    return params, state


@functools.cache
def one_device(config: OptimizerConfig, num_steps: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns our chain's init and step on one device, compiled once for each config."""
    tx = make_optimizer(config, num_steps, SPECS)

    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(tx.init), jax.jit(step)


def flat(tree: Any) -> dict[str, np.ndarray]:
    """Returns the leaves by name; a stack of layers as one leaf for each: `0/up/weight`."""
    out = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        layers = name.startswith("layers/")
        out |= {f"{i}/{name}": np.asarray(x[i]) for i in range(LAYERS)} if layers else {name: np.asarray(x)}
    return out


def stack_name(name: str) -> str:
    return name.lstrip("0123456789/")


def decays(params: dict[str, Any]) -> dict[str, bool]:
    return {name: stack_name(name) in MATRICES for name in params}


def close(ours: Any, theirs: dict[str, np.ndarray], rtol: float = 2e-5) -> None:
    ours = flat(ours)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        scale = np.abs(theirs[name]).max()
        np.testing.assert_allclose(x, theirs[name], rtol=rtol, atol=rtol * scale, err_msg=name)


# ---------------------------------------------------------------------------------- against optax, layer by layer


def plain_optax(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The optimizer as a user of optax writes it for a flat dict of unstacked tensors."""
    c, decay = config, config.weight_decay
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


@pytest.mark.parametrize("name", NAMES)
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


# ------------------------------------------------------------------------------------------------ against numpy


def numpy_adam(p: np.ndarray, grads: list[np.ndarray], c: OptimizerConfig, rates: list[float], wd: float, trust: bool):
    m = v = np.zeros_like(p)
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        m, v = c.b1 * m + (1 - c.b1) * g, c.b2 * v + (1 - c.b2) * g**2
        u = m / (1 - c.b1**t) / (np.sqrt(v / (1 - c.b2**t)) + c.eps) + wd * p
        p = p - rate * u * (np.linalg.norm(p) / np.linalg.norm(u) if trust else 1.0)
    return p


def numpy_sgd(p: np.ndarray, grads: list[np.ndarray], c: OptimizerConfig, rates: list[float], wd: float):
    m = np.zeros_like(p)
    for g, rate in zip(grads, rates, strict=True):
        m = c.momentum * m + g + wd * p
        p = p - rate * m
    return p


def numpy_adafactor(p: np.ndarray, grads: list[np.ndarray], rates: list[float], wd: float) -> np.ndarray:
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


def by_numpy(
    config: OptimizerConfig, p: np.ndarray, grads: list[np.ndarray], rates: list[float], wd: float
) -> np.ndarray:
    """Returns one layer's tensor after steps with `grads`."""
    if config.name == "adafactor":
        return numpy_adafactor(p, grads, rates, wd)
    if config.name == "sgd":
        return numpy_sgd(p, grads, config, rates, wd)
    return numpy_adam(p, grads, config, rates, wd, config.name == "lamb")


def formula_rates(peak: float, final: float, warmup: int, num_steps: int, schedule: str) -> list[float]:
    """The learning rate of each step from the definitions."""
    rates = []
    for step in range(num_steps):
        done = (step - warmup) / (num_steps - 1 - warmup) if step > warmup else 0.0
        falling = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
        steps_left = num_steps - 1 - step  # of wsd the last tenth of all steps falls
        falling |= {"quadratic": (1 - done) ** 2, "wsd": min(1.0, steps_left / max(round(num_steps / 10), 1))}
        falling = falling[schedule]
        after = peak * falling if schedule == "constant" else final + (peak - final) * falling
        rates.append(peak * (step + 1) / warmup if step < warmup else after)
    return rates


@pytest.mark.parametrize("mask", ["matrices", "all"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "adafactor"])
def test_optimizers_match_numpy(name: str, mask: str) -> None:
    config = optimizer_config(name, clip_norm=0.0, decay_mask=mask)
    rates = formula_rates(0.02, 0.002, 2, STEPS, "cosine")
    expected = {}
    for leaf, p in flat(PARAMS).items():
        grads = [flat(g)[leaf].astype(np.float64) for g in GRADS]
        wd = 0.3 if mask == "all" or stack_name(leaf) in MATRICES else 0.0
        expected[leaf] = by_numpy(config, p.astype(np.float64), grads, rates, wd)
    close(run(config)[0], expected)


def test_muon_orthogonalises_only_hidden_matrices_of_layers() -> None:
    """Newton-Schulz leaves singular values near 1 (Jordan 2024: about 0.7 to 1.2), times sqrt(max(1, out / in))."""
    config = optimizer_config("muon", clip_norm=0.0, weight_decay=0.0, warmup_steps=0, schedule="constant")
    moved = run(config, GRADS[:1])[0]
    for name, x in flat(moved).items():
        u = (x - flat(PARAMS)[name]) / 0.02
        if stack_name(name) in HIDDEN_MATRICES:
            values = np.linalg.svd(u, compute_uv=False) / math.sqrt(max(1, u.shape[1] / u.shape[0]))
            tolerance = 0.05 * np.abs(flat(PARAMS)[name]).max()  # what float32 loses in p + u
            assert values.min() + tolerance > 0.3 and values.max() < 1.3 + tolerance, (name, values)
        else:  # Adam's first step is the gradient's sign (with Nesterov: nearly)
            np.testing.assert_array_equal(np.sign(u), -np.sign(flat(GRADS[0])[name]), err_msg=name)
            assert np.ptp(np.abs(u)) < 0.05, name


def numpy_nesterov(grads: list[np.ndarray], beta: float) -> np.ndarray:
    """The last direction of Nesterov's momentum as Dozat (2016) corrects its bias."""
    m = np.zeros_like(grads[0])
    for g in grads:
        m = beta * m + (1 - beta) * g
    return beta * m / (1 - beta ** (len(grads) + 1)) + (1 - beta) * grads[-1] / (1 - beta ** len(grads))


def numpy_newton_schulz(x: np.ndarray) -> np.ndarray:
    """Five quintic steps (Jordan 2024) of a matrix `[inputs, outputs]`, scaled by the root of its shape."""
    scale = math.sqrt(max(1, x.shape[1] / x.shape[0]))
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return scale * x


def test_muon_of_a_resnet_orthogonalises_its_convolutions() -> None:
    """As matrices of outputs by inputs, height and width, against numpy; all else is Adam of the section's settings."""
    conv = ("channels_out", "channels_in", "height", "width")
    specs = {
        "square": ParamSpec(shape=(8, 4, 3, 3), dims=conv),
        "shortcut": ParamSpec(shape=(16, 8, 1, 1), dims=conv),
        "norm": ParamSpec(shape=(8,), dims=("norm",)),
        "head": ParamSpec(shape=(16, 10), dims=("channels_in", "classes")),
    }
    rng = np.random.default_rng(0)
    params, *grads = [
        {name: rng.normal(size=s.shape).astype(np.float32) for name, s in specs.items()} for _ in range(4)
    ]
    c = optimizer_config("muon", clip_norm=0.0, weight_decay=0.0, warmup_steps=0, schedule="constant")
    tx = make_optimizer(c, len(grads), specs)
    state, updates = tx.init(params), {}
    for g in grads:
        updates, state = jax.jit(tx.update)(g, state, params)
    for name, spec in specs.items():
        seen = [g[name].astype(np.float64) for g in grads]
        if spec.dims == conv:
            matrix = numpy_nesterov(seen, c.momentum).reshape(spec.shape[0], -1).T
            expected = numpy_newton_schulz(matrix).T.reshape(spec.shape)
        else:
            v = sum((1 - c.b2) * c.b2 ** (2 - i) * g**2 for i, g in enumerate(seen)) / (1 - c.b2**3)
            expected = numpy_nesterov(seen, c.b1) / (np.sqrt(v) + c.eps)
        np.testing.assert_allclose(updates[name], -c.learning_rate * expected, rtol=1e-4, atol=1e-6, err_msg=name)


def test_weight_decay_is_learning_rate_times_decay_times_parameter() -> None:
    """With no gradient, decoupled decay leaves `1 - learning_rate * weight_decay`; masked parameters stay."""
    zero = jax.tree.map(np.zeros_like, GRADS[0])
    for name in ("adafactor", "muon"):  # adamw: see against numpy
        for mask in ("matrices", "all"):
            config = optimizer_config(name, warmup_steps=0, schedule="constant", decay_mask=mask)
            for leaf, x in flat(run(config, [zero])[0]).items():
                share = 1 - 0.02 * 0.3 if mask == "all" or stack_name(leaf) in MATRICES else 1.0
                np.testing.assert_allclose(x, share * flat(PARAMS)[leaf], rtol=1e-5, err_msg=f"{name} {leaf}")


# -------------------------------------------------------------------------------- schedules, clipping, the guard


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "quadratic", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_schedules_match_their_formulas(schedule: str, warmup: int) -> None:
    config = optimizer_config("adamw", schedule=schedule, warmup_steps=warmup, learning_rate=0.5, final_fraction=0.2)
    rates = [float(make_schedule(config, 40)(step)) for step in range(40)]
    np.testing.assert_allclose(rates, formula_rates(0.5, 0.1, warmup, 40, schedule), rtol=1e-5)
    assert rates[0] == pytest.approx(0.5 / max(warmup, 1))
    assert rates[warmup] == pytest.approx(0.5)
    assert rates[-1] == pytest.approx(0.5 if schedule == "constant" else 0.1)


@pytest.mark.parametrize(("fraction", "falling"), [(0.5, 20), (1.0, 29), (0.001, 1)])
def test_wsd_falls_in_a_share_of_all_steps_but_not_before_the_warmup_ends(fraction: float, falling: int) -> None:
    config = optimizer_config(
        "adamw", schedule="wsd", warmup_steps=10, learning_rate=0.5, final_fraction=0.2, decay_fraction=fraction
    )
    rates = np.array([make_schedule(config, 40)(step) for step in range(10, 40)])
    np.testing.assert_allclose(rates[: 30 - falling], 0.5, rtol=1e-5)
    np.testing.assert_allclose(rates[29 - falling :], np.linspace(0.5, 0.1, falling + 1), rtol=1e-5)


def test_warmup_longer_than_the_run_is_rejected() -> None:
    assert float(make_schedule(optimizer_config("adamw", warmup_steps=5), 5)(4)) == pytest.approx(0.02)
    with pytest.raises(ValueError, match=r"optimizer\.warmup_steps=6 is more than num_steps=5"):
        make_schedule(optimizer_config("adamw", warmup_steps=6), 5)


@pytest.mark.parametrize("limit", [0.5, 1e6, 0.0])
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradient_leaves_the_state_unchanged(name: str, bad: float) -> None:
    config = optimizer_config(name)
    poisoned = jax.tree.map(np.copy, GRADS[1])
    poisoned["layers"]["up"]["bias"][1, 3] = bad
    before_params, before = run(config, GRADS[:1])
    params, state = run(config, [GRADS[0], poisoned])
    jax.tree.map(np.testing.assert_array_equal, params, before_params)
    jax.tree.map(np.testing.assert_array_equal, state.inner, before.inner)
    assert {k: float(v) for k, v in watched(state).items() if "skipped" in k} == {
        "skipped_in_a_row": 1, "skipped_steps": 1,
    }  # fmt: skip
    after, state = run(config, [GRADS[0], poisoned, GRADS[2]])
    jax.tree.map(np.testing.assert_array_equal, after, run(config, [GRADS[0], GRADS[2]])[0])  # as if never seen


def test_skipped_in_a_row_is_reset_by_a_finite_step() -> None:
    bad = jax.tree.map(lambda g: np.full_like(g, math.nan), GRADS[0])
    seen = []
    for count in range(1, 7):
        _, state = run(optimizer_config("sgd"), [GRADS[0], bad, bad, GRADS[1], bad, GRADS[2]][:count], num_steps=6)
        seen.append((int(state.skipped_in_a_row), int(state.skipped)))
    assert seen == [(0, 0), (1, 1), (2, 2), (0, 2), (1, 3), (0, 3)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "adam"}, "optimizer.name=adam is not known; one of adamw"),
        ({"schedule": "step"}, "optimizer.schedule=step is not known"),
        ({"decay_mask": "none"}, "optimizer.decay_mask=none is not known"),
        ({"learning_rate": 0.0}, "optimizer.learning_rate=0.0 must be above 0"),
        ({"learning_rate": math.nan}, "optimizer.learning_rate=nan must be above 0"),
        ({"b2": 1.0}, "optimizer.b2=1.0 must be at least 0 and below 1"),
        ({"momentum": -0.1}, "optimizer.momentum=-0.1"),
        ({"weight_decay": -1.0}, "optimizer.weight_decay=-1.0 must be at least 0"),
        ({"clip_norm": math.nan}, "optimizer.clip_norm=nan"),
        ({"max_skipped": 0}, "optimizer.max_skipped=0 must be at least 1"),
    ],
)
def test_bad_optimizer_settings_are_rejected(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        optimizer_config(**{"name": "adamw"} | changes)
    assert said in str(error.value) and "\n" not in str(error.value)
