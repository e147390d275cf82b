"""Optimizers and schedules by name, all of them optax's, behind the exchange and a guard against non-finite gradients."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from sharding.spec import ParamSpec

PyTree = Any
Transform = optax.GradientTransformation
NAMES = ("adamw", "sgd", "lamb", "lars", "adafactor", "muon")
SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The `optimizer` section of a config (meanings: configs/base.py). Raises ValueError for an impossible value."""

    name: str
    learning_rate: float
    schedule: str
    warmup_steps: int
    final_fraction: float
    momentum: float
    b1: float
    b2: float
    eps: float
    weight_decay: float
    decay_mask: str
    clip_norm: float
    max_skipped: int

    def __post_init__(self) -> None:
        for key, allowed in (("name", NAMES), ("schedule", SCHEDULES), ("decay_mask", ("all", "matrices"))):
            if getattr(self, key) not in allowed:
                raise ValueError(f"optimizer.{key}={getattr(self, key)} is not known; one of {', '.join(allowed)}")
        for key in ("learning_rate", "eps"):
            if not 0 < getattr(self, key) < math.inf:
                raise ValueError(f"optimizer.{key}={getattr(self, key)} must be above 0")
        for key in ("momentum", "b1", "b2"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"optimizer.{key}={getattr(self, key)} must be at least 0 and below 1")
        for key in ("warmup_steps", "final_fraction", "weight_decay", "clip_norm"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"optimizer.{key}={getattr(self, key)} must be at least 0")
        if self.max_skipped < 1:
            raise ValueError(f"optimizer.max_skipped={self.max_skipped} must be at least 1")


class GuardState(NamedTuple):
    """State of `guarded`; the counters are int32 scalars."""

    exchange: PyTree
    inner: PyTree
    grad_norm: jax.Array  # global norm after hop two, before clipping
    skipped_in_a_row: jax.Array
    skipped: jax.Array


def watched(state: GuardState) -> dict[str, jax.Array]:
    """Returns the scalars of the guard that a run reports."""
    return {"grad_norm": state.grad_norm, "skipped_in_a_row": state.skipped_in_a_row, "skipped_steps": state.skipped}


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns the learning rate by step: linear warm-up from 0 to the peak, then the schedule down to its last step."""
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    if config.warmup_steps > num_steps:
        raise ValueError(f"optimizer.warmup_steps={config.warmup_steps} is more than num_steps={num_steps}")
    rest = max(num_steps - config.warmup_steps, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, final, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction),
    }[config.schedule]
    # step 0 already moves: the warm-up counts from 1
    warmup = optax.linear_schedule(peak / max(config.warmup_steps, 1), peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, after], [config.warmup_steps]) if config.warmup_steps else after


def make_optimizer(config: OptimizerConfig, num_steps: int, specs: PyTree, exchange: Transform) -> Transform:
    """Returns the whole chain on `[R, ...]` gradients: exchange, guard, clipping, the optimizer.

    `specs` is the tree of ParamSpecs; it decides which parameters decay and which are matrices.
    """
    mask = jax.tree.map(
        lambda spec: config.decay_mask == "all" or is_matrix(spec), specs, is_leaf=lambda x: isinstance(x, ParamSpec)
    )
    schedule = make_schedule(config, num_steps)
    decay = config.weight_decay
    if config.name == "adamw":
        tx = optax.adamw(schedule, config.b1, config.b2, config.eps, weight_decay=decay, mask=mask)
    elif config.name == "sgd":
        tx = optax.chain(
            optax.add_decayed_weights(decay, mask), optax.trace(config.momentum), optax.scale_by_learning_rate(schedule)
        )
    else:
        tx = per_layer(lambda mask: _layerwise(config, schedule, mask), mask)
    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    return guarded(exchange, optax.chain(*clip, tx))


def _layerwise(config: OptimizerConfig, schedule: optax.Schedule, mask: PyTree) -> Transform:
    """Returns an optimizer whose update of a tensor depends on the tensor as a whole."""
    decay = config.weight_decay
    if config.name == "lamb":
        return optax.lamb(schedule, config.b1, config.b2, config.eps, weight_decay=decay, mask=mask)
    if config.name == "lars":
        return optax.lars(schedule, decay, mask, trust_ratio_mask=mask, momentum=config.momentum)
    if config.name == "adafactor":
        return optax.adafactor(schedule, weight_decay_rate=decay or None, weight_decay_mask=mask)
    assert config.name == "muon"
    return contrib.muon(
        schedule, beta=config.momentum, weight_decay=decay, weight_decay_mask=mask, adam_b1=config.b1, adam_b2=config.b2
    )


def is_matrix(spec: ParamSpec) -> bool:
    """Whether a parameter is a matrix of one layer; biases, norms and position tables are not."""
    return sum(dim != "layers" for dim in spec.dims) > 1 and "position" not in spec.dims


def per_layer(make: Callable[[PyTree], Transform], mask: PyTree) -> Transform:
    """Applies an optimizer to each layer of the stack `layers` by itself, as if the layers were not stacked.

    LAMB's and LARS's trust ratios, Adafactor's factors and Muon's orthogonalisation belong to one layer's tensor.
    """
    rest_mask = {name: tree for name, tree in mask.items() if name != "layers"}
    stacked, rest = make(mask["layers"]), make(rest_mask)

    def split(tree: PyTree) -> tuple[PyTree, PyTree]:
        return tree["layers"], {name: sub for name, sub in tree.items() if name != "layers"}

    def init(params: PyTree) -> PyTree:
        layers, others = split(params)
        return {"layers": jax.vmap(stacked.init)(layers), "rest": rest.init(others)}

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        assert params is not None
        (g_layers, g_rest), (p_layers, p_rest) = split(grads), split(params)
        u_layers, s_layers = jax.vmap(stacked.update)(g_layers, state["layers"], p_layers)
        u_rest, s_rest = rest.update(g_rest, state["rest"], p_rest)
        return {**u_rest, "layers": u_layers}, {"layers": s_layers, "rest": s_rest}

    return optax.GradientTransformation(init, update)


def guarded(exchange: Transform, inner: Transform) -> Transform:
    """Runs exchange then `inner`; a step whose gradient is not finite changes nothing but the count of skipped steps."""

    def init(params: PyTree) -> GuardState:
        zero = jnp.zeros((), jnp.int32)
        return GuardState(exchange.init(params), inner.init(params), jnp.zeros(()), zero, zero)

    def update(grads_R: PyTree, state: GuardState, params: PyTree | None = None) -> tuple[PyTree, GuardState]:
        grads, exchange_state = exchange.update(grads_R, state.exchange, params)
        norm = optax.global_norm(grads)
        finite = jnp.isfinite(norm)
        updates, inner_state = inner.update(grads, state.inner, params)

        def keep(new: PyTree, old: PyTree) -> PyTree:
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        return jax.tree.map(lambda u: jnp.where(finite, u, 0), updates), GuardState(
            exchange=keep(exchange_state, state.exchange),
            inner=keep(inner_state, state.inner),
            grad_norm=norm,
            skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
            skipped=state.skipped + jnp.where(finite, 0, 1),
        )

    return optax.GradientTransformation(init, update)
