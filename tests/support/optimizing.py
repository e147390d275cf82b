"""Parameters, gradients and optimizers of a small stack of layers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from configs.schema import OptimizerConfig
from sharding.spec import ParamSpec
from training.optimizers import GuardState, make_optimizer

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


def make_spec(dims: tuple[str, ...]) -> ParamSpec:
    shape = tuple(SIZES[dim] for dim in dims)
    # `wide` is large enough for Adafactor to factor it
    return ParamSpec(shape=shape, dims=dims)


def is_spec(x: object) -> bool:
    return isinstance(x, ParamSpec)


SPECS = jax.tree.map(make_spec, DIMS, is_leaf=lambda x: isinstance(x, tuple))


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


def close(ours: Any, theirs: dict[str, np.ndarray], rtol: float = 2e-5) -> None:
    ours = flat(ours)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        scale = np.abs(theirs[name]).max()
        np.testing.assert_allclose(x, theirs[name], rtol=rtol, atol=rtol * scale, err_msg=name)
