"""Optax's optimizers and schedules by name, downstream of hop two and a guard against non-finite gradients.

What an optimizer derives from a whole tensor (trust ratios, factors, orthogonalisation) it derives layer by layer, as
if the layers were not stacked. Muon orthogonalises the matrices between hidden dims, and convolutions as matrices of
outputs by all else; embeddings, heads, positions, norms and biases get Adam, as its authors advise. Weight decay is
decoupled, `learning_rate * weight_decay * p`, except where the method itself puts it into the gradient (sgd, lars) or
under the trust ratio (lamb).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from configs.schema import OptimizerConfig
from configs.schema.own import OWN
from sharding.gradients import Delayed, Exchanged
from sharding.spec import ParamSpec

PyTree = Any
Transform = optax.GradientTransformation
OnEachDevice = Callable[[Callable[..., Any]], Callable[..., Any]]


class GuardState(NamedTuple):
    """State of `guarded`; the counters are int32 scalars."""

    exchange: PyTree
    inner: PyTree
    grad_norm: jax.Array  # global norm of what hop two hands on, before clipping
    skipped_in_a_row: jax.Array
    skipped: jax.Array


def watched(state: GuardState, *, hands_on: str = "grad") -> dict[str, jax.Array]:
    """Returns the scalars of the guard that a run reports; hop two hands on gradients, `grad`, or an `update`."""
    counters = {"skipped_in_a_row": state.skipped_in_a_row, "skipped_steps": state.skipped}
    return {f"{hands_on}_norm": state.grad_norm} | counters


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns the learning rate by step, from 0: linear warm-up to the peak, then down to the last step.

    Step i of the warm-up has `(i + 1) / warmup_steps` of the peak; the step after it has the peak, the last one
    `final_fraction` of it (but `constant` stays).
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    if config.warmup_steps > num_steps:
        raise ValueError(f"optimizer.warmup_steps={config.warmup_steps} is more than num_steps={num_steps}")
    remaining = max(num_steps - 1 - config.warmup_steps, 1)  # the last step is num_steps - 1
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, final, remaining),
        "cosine": optax.cosine_decay_schedule(peak, remaining, alpha=config.final_fraction),
    }[config.schedule]
    # step 0 already moves: the warm-up counts from 1
    warmup = optax.linear_schedule(peak / max(config.warmup_steps, 1), peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, after], [config.warmup_steps]) if config.warmup_steps else after


def make_optimizer(
    config: OptimizerConfig,
    num_steps: int,
    specs: PyTree,
    exchange: Transform,
    on_each_device: OnEachDevice = lambda function: function,
) -> Transform:
    """Returns the whole chain on `[R, ...]` gradients: exchange, guard, clipping, the optimizer.

    `specs` is the tree of ParamSpecs; it decides which parameters decay and which are matrices. `on_each_device`
    wraps a function so that every device runs it on whole arrays; on one device there is nothing to wrap.
    """
    schedule = make_schedule(config, num_steps)
    if config.name in ("adamw", "sgd"):  # element by element: a stack of layers is as good as the layers
        tx = _optimizer(config, schedule, specs, on_each_device)
    else:
        tx = per_layer(lambda specs: _optimizer(config, schedule, specs, on_each_device), specs)
    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    return guarded(exchange, optax.chain(*clip, tx))


def _optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, specs: PyTree, on_each_device: OnEachDevice
) -> Transform:
    """Returns the optimizer of the tensors that `specs` describes, which may be a part of the parameters."""
    c, decay = config, config.weight_decay
    mask = _map_specs(lambda spec: c.decay_mask == "all" or is_matrix(spec), specs)
    # optax's adafactor would decay by weight_decay itself a step, its muon the matrices that it orthogonalises alone
    decoupled = optax.add_decayed_weights(lambda step: -decay * schedule(step), mask)
    match c.name:
        case "adamw":
            return optax.adamw(schedule, c.b1, c.b2, c.eps, weight_decay=decay, mask=mask)
        case "sgd":
            coupled = optax.add_decayed_weights(decay, mask)
            momentum = [optax.trace(c.momentum)] if c.momentum else []
            return optax.chain(coupled, *momentum, optax.scale_by_learning_rate(schedule))
        case "lamb":
            return optax.lamb(schedule, c.b1, c.b2, c.eps, weight_decay=decay, mask=mask)
        case "lars":
            return optax.lars(schedule, decay, mask, trust_ratio_mask=mask, momentum=c.momentum)
        case "adafactor":
            return optax.chain(optax.adafactor(schedule), decoupled)
    if c.name != "muon":
        return OWN["optimizer"][c.name](c, schedule, mask)
    labels = _map_specs(lambda spec: "muon" if is_hidden_matrix(spec) else "adam", specs)
    # a tensor without them would get optax's own Adam there
    dims = _map_specs(lambda spec: _matrix_dims(spec) if is_hidden_matrix(spec) else None, specs)
    muon = contrib.muon(schedule, beta=c.momentum, eps=c.eps, muon_weight_dimension_numbers=dims)
    adam = optax.nadam(schedule, c.b1, c.b2, c.eps)  # Nesterov's form for both, as in optax's muon
    return optax.chain(optax.partition({"muon": everywhere(muon, on_each_device), "adam": adam}, labels), decoupled)


def everywhere(inner: Transform, on_each_device: OnEachDevice) -> Transform:
    """Runs `inner` on whole arrays, on every device alike.

    Left to itself XLA spreads Newton-Schulz's products over all devices, over the replicas too, which takes ten times
    the bytes of hop two between nodes.
    """

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        return on_each_device(inner.update)(updates, state, params)

    return optax.GradientTransformation(inner.init, update)


def is_matrix(spec: ParamSpec) -> bool:
    """Whether a parameter is a matrix of one layer; biases, norms, tables of positions and token types are not."""
    return sum(dim != "layers" for dim in spec.dims) > 1 and {"position", "token_type"}.isdisjoint(spec.dims)


def is_hidden_matrix(spec: ParamSpec) -> bool:
    """Whether a parameter is a matrix from hidden to hidden; embeddings and heads know the vocabulary or classes."""
    return is_matrix(spec) and not {"vocab", "classes"} & set(spec.dims)


def _matrix_dims(spec: ParamSpec) -> contrib.MuonDimensionNumbers:
    """Returns which dims of a layer's tensor are summed over in a product: a kernel has its outputs first."""
    dims = [dim for dim in spec.dims if dim != "layers"]
    out = dims.index("channels_out") if "channels_out" in dims else len(dims) - 1
    return contrib.MuonDimensionNumbers(
        reduction_axis=tuple(i for i in range(len(dims)) if i != out), output_axis=(out,)
    )


def _map_specs(function: Callable[[ParamSpec], Any], specs: PyTree) -> PyTree:
    return jax.tree.map(function, specs, is_leaf=lambda x: isinstance(x, ParamSpec))


def per_layer(make: Callable[[PyTree], Transform], specs: PyTree) -> Transform:
    """Applies an optimizer to each layer of the stack `layers` by itself, as if the layers were not stacked.

    `make` builds the optimizer of a part of the parameters from its specs. LAMB's and LARS's trust ratios, Adafactor's
    factors and Muon's orthogonalisation belong to one layer's tensor.
    """

    def split(tree: PyTree) -> tuple[PyTree, PyTree]:
        return tree["layers"], {name: sub for name, sub in tree.items() if name != "layers"}

    if "layers" not in specs:
        return make(specs)
    stacked, unstacked = (make(part) for part in split(specs))

    def init(params: PyTree) -> PyTree:
        layers, others = split(params)
        return {"layers": jax.vmap(stacked.init)(layers), "rest": unstacked.init(others)}

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        (g_layers, g_others), (p_layers, p_others) = split(updates), split(params)
        u_layers, s_layers = jax.vmap(stacked.update)(g_layers, state["layers"], p_layers)
        u_others: Any
        u_others, s_others = unstacked.update(g_others, state["rest"], p_others)
        return {**u_others, "layers": u_layers}, {"layers": s_layers, "rest": s_others}

    return optax.GradientTransformation(init, update)


def guarded(exchange: Transform, inner: Transform) -> Transform:
    """Runs exchange then `inner`; a step whose gradient is not finite only counts as skipped.

    The gradient alone decides: to look at the update too, new moments would be kept beside the old ones until all
    updates are there, for half as much temporary memory again (docs/performance.md).
    """

    def init(params: PyTree) -> GuardState:
        zero = jnp.zeros((), jnp.int32)
        return GuardState(exchange.init(params), inner.init(params), jnp.zeros(()), zero, zero)

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, GuardState]:
        grads, exchange_state = exchange.update(updates, state.exchange, params)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm)
        steps, inner_state = inner.update(grads, state.inner, params)
        # hop two inside the backward passes leaves a state that is good for a skipped step too: to restore the one
        # before would take a second copy of it from there to here
        in_place = isinstance(updates, Exchanged | Delayed)

        def keep(new: PyTree, old: PyTree) -> PyTree:
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        return jax.tree.map(lambda u: jnp.where(finite, u, 0), steps), GuardState(
            exchange=exchange_state if in_place else keep(exchange_state, state.exchange),
            inner=keep(inner_state, state.inner),
            grad_norm=norm,
            skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
            skipped=state.skipped + jnp.where(finite, 0, 1),
        )

    return optax.GradientTransformation(init, update)
