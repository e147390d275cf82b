"""Optax's optimizers and schedules by name, after the replica all-reduce and a guard against non-finite gradients.

Statistics of whole tensors (trust ratios, factors, orthogonalisation) are computed layer by layer, as if layers were
not stacked. Muon orthogonalises the matrices between hidden dims, and convolutions as matrices of outputs by all other
dims. Embeddings, heads, positions, norms and biases use Adam, as its authors advise. Weight decay is decoupled,
`learning_rate * weight_decay * p`, except where the method itself adds it to the gradient (sgd, lars) or applies it
under the trust ratio (lamb).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from configs.schema import OptimizerConfig
from configs.schema.own import OWN
from sharding.averages import part_averages
from sharding.redistribute import Stacks
from sharding.spec import ParamSpec, is_spec, is_stack
from sharding.step import AllReduce
from sharding.trees import PyTree

Transform = optax.GradientTransformation
# a layer's tensor as matrices: the number of leading batch dims, such as the experts', and the dim of the outputs
MatrixDims = tuple[int, int]
OfStack = Callable[[MatrixDims, jax.Array], jax.Array]  # (kind, a stack `[n, *shape]` of tensors of that kind) -> stack
# (function, specs, kinds, stacks `[n, ...]`, each=False) -> stacks. With `each` the stacks are `[R, n, ...]`, with
# separate entries for each replica.
OnWhole = Callable[..., Stacks]
COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of Muon's x, x^3, x^5
ELEMENTWISE = "adamw", "sgd"  # the optimizers without statistics of whole tensors
PRODUCTS = jnp.bfloat16  # operands of Muon's products, which are float32
AVERAGE_RATE = 0.1  # weight of the step's value in a running average (torch's `momentum`)


class GuardState(NamedTuple):
    """State of `guarded`. The counters are int32 scalars."""

    inner: PyTree
    grad_norm: jax.Array  # global norm of the averaged gradient before clipping, without running averages
    skipped_in_a_row: jax.Array
    skipped: jax.Array


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns the learning rate by step, from 0: linear warm-up to the peak, then decay until the last step.

    Step i of the warm-up has `(i + 1) / warmup_steps` of the peak. The following step has the peak, and the last step
    has `final_fraction` of it. `constant` keeps the peak, and a registered schedule takes over after the warm-up.
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    if config.warmup_steps > num_steps:
        raise ValueError(f"optimizer.warmup_steps={config.warmup_steps} is more than num_steps={num_steps}")
    remaining = max(num_steps - 1 - config.warmup_steps, 1)  # the last step is num_steps - 1
    decay = min(max(round(config.decay_fraction * num_steps), 1), remaining)
    if config.schedule in OWN["schedule"]:
        after = OWN["schedule"][config.schedule](config, num_steps - config.warmup_steps)
    else:
        after = {
            "constant": optax.constant_schedule(peak),
            "linear": optax.linear_schedule(peak, final, remaining),
            "cosine": optax.cosine_decay_schedule(peak, remaining, alpha=config.final_fraction),
            "quadratic": optax.polynomial_schedule(peak, final, 2, remaining),
            "wsd": optax.linear_schedule(peak, final, decay, transition_begin=remaining - decay),
        }[config.schedule]
    # step 0 already moves: the warm-up counts from 1
    warmup = optax.linear_schedule(peak / max(config.warmup_steps, 1), peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, after], [config.warmup_steps]) if config.warmup_steps else after


def on_one_device(
    function: OfStack, specs: Sequence[ParamSpec], kinds: Sequence[MatrixDims], stacks: Stacks, *, each: bool = False
) -> Stacks:
    """Returns the function of each stack, where tensors are not sharded."""
    del specs
    of = [partial(function, kind) for kind in kinds]
    return [(jax.vmap(run) if each else run)(x) for run, x in zip(of, stacks, strict=True)]


def make_optimizer(
    config: OptimizerConfig,
    num_steps: int,
    specs: PyTree,
    on_whole: OnWhole = on_one_device,
) -> Transform:
    """Returns the chain after the replica all-reduce, on plain gradients: guard, clipping, optimizer.

    `specs`, the tree of ParamSpecs, determines which parameters decay and which are matrices. `on_whole` runs a
    function on whole tensors, wherever their shards are.
    """
    specs, _ = part_averages(specs)
    schedule = make_schedule(config, num_steps)
    if config.name in ELEMENTWISE:  # a stack of layers behaves like its layers
        tx = _optimizer(config, schedule, specs, on_whole)
    else:
        tx = per_layer(lambda specs: _optimizer(config, schedule, specs, on_whole), specs)
    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    return guarded(beside_averages(optax.chain(*clip, tx), move_averages))


def follows_schedule(config: OptimizerConfig, specs: PyTree) -> bool:
    """Whether the optimizer's updates take their learning rate from the schedule. A registered optimizer may not."""
    if config.name not in OWN["optimizer"]:
        return True
    asked: list[jax.typing.ArrayLike] = []

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        asked.append(step)
        return config.learning_rate + 0.0 * jnp.asarray(step)

    specs, _ = part_averages(specs)
    tx = per_layer(lambda specs: _optimizer(config, schedule, specs, on_one_device), specs)
    params = _map_specs(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), specs)
    state = jax.eval_shape(tx.init, params)
    asked.clear()  # whole tensors read before the first update are constants
    jax.eval_shape(tx.update, params, state, params)
    return bool(asked)


def _optimizer(config: OptimizerConfig, schedule: optax.Schedule, specs: PyTree, on_whole: OnWhole) -> Transform:
    """Returns the optimizer of the tensors in `specs`, which may be a part of the parameters."""
    c, decay = config, config.weight_decay
    mask = _map_specs(is_matrix, specs)
    # optax's adafactor would decay by weight_decay itself in each step, and its muon only the orthogonalised matrices
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
    adam = optax.nadam(schedule, c.b1, c.b2, c.eps)  # Nesterov's form for both, as in optax's muon
    return optax.chain(optax.partition({"muon": muon(c, schedule, specs, on_whole), "adam": adam}, labels), decoupled)


def muon(config: OptimizerConfig, schedule: optax.Schedule, specs: PyTree, on_whole: OnWhole) -> Transform:
    """Returns optax's Muon for the hidden matrices of `specs`, with the same state.

    optax's state has a place for the Adam of other tensors. It is empty here, but checkpoints contain its counters.
    """
    chain = optax.chain(
        scale_by_muon(config, specs, on_whole),
        optax.identity(),  # optax scales by the shape here
        optax.identity(),  # and decays
        optax.scale_by_learning_rate(schedule),
    )
    return optax.partition(
        {"muon": chain, "adam": optax.adamw(schedule)}, lambda tree: jax.tree.map(lambda _: "muon", tree)
    )


def scale_by_muon(config: OptimizerConfig, specs: PyTree, on_whole: OnWhole) -> Transform:
    """Returns Nesterov's momentum of the hidden matrices of `specs`, orthogonalised and scaled by their shape.

    The momentum is elementwise and works on shards. Only Newton-Schulz needs whole matrices. Without intervention XLA
    spreads its products over all devices, including replicas, and sends ten times the bytes of the replica all-reduce
    between nodes.
    """
    beta = config.momentum
    matrices = [spec for spec in jax.tree.leaves(specs, is_leaf=is_spec) if is_hidden_matrix(spec)]
    kinds = [_kind(spec) for spec in matrices]

    function = partial(on_whole, partial(newton_schulz, eps=config.eps), matrices, kinds)

    @jax.custom_batching.custom_vmap
    @jax.named_scope("orthogonalise")
    def of_stacks(stacks: Stacks) -> Stacks:
        return function(stacks) if stacks else []

    @of_stacks.def_vmap
    @jax.named_scope("orthogonalise")
    def of_replicas(size: int, is_cut: list[list[bool]], stacks_R: Stacks) -> tuple[Stacks, list[bool]]:
        del size
        assert all(is_cut[0])
        return function(stacks_R, each=True), is_cut[0]

    # the innermost vmap is over layers, if the model has any, and the next one over the replicas of local SGD
    orthogonalise = (_in_stacks if any("layers" in spec.dims for spec in matrices) else _alone)(of_stacks)

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, contrib.MuonState]:
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
        here = optax.tree.bias_correction(updates, beta, count)
        momentum, tree = jax.tree.flatten(jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, here))
        return tree.unflatten(orthogonalise(momentum)), contrib.MuonState(count, mu, state.ns_coeffs)

    return optax.GradientTransformation(contrib.scale_by_muon().init, update)


def newton_schulz(kind: MatrixDims, stack: jax.Array, *, eps: float) -> jax.Array:
    """Orthogonalises each tensor of `[n, *shape]` as a matrix and scales it by `sqrt(max(1, outputs / inputs))`.

    The dim of the outputs is one side of the matrix, and all other dims, except batch dims, are the other side. These
    are the five steps of Muon's authors (kellerjordan.github.io/posts/muon), whose result is close to an orthogonal
    matrix. Operands of a product are rounded to bfloat16. In contrast to the authors' code, products and iterates stay
    in float32.
    """
    batch_dims, output_dim = kind
    outputs = 1 + output_dim - batch_dims
    batch = jnp.moveaxis(stack.reshape(-1, *stack.shape[1 + batch_dims :]), outputs, -1)
    fan_in, fan_out = math.prod(batch.shape[1:-1]), batch.shape[-1]
    matrices = batch.reshape(-1, fan_in, fan_out)
    wide = matrices.mT if fan_in > fan_out else matrices  # squared on its shorter side
    wide = wide / (jnp.linalg.norm(wide, axis=(-2, -1), keepdims=True) + eps)
    linear, cubic, quintic = COEFFICIENTS

    def iterate(_: int, x: jax.Array) -> jax.Array:
        square = _product("nik,njk->nij", x, x)
        quartic = _product("nij,njk->nik", square, square)
        return linear * x + _product("nij,njk->nik", cubic * square + quintic * quartic, x)

    wide = jax.lax.fori_loop(0, 5, iterate, wide)  # unrolled, XLA:CPU was slower
    orthogonal = (wide.mT if fan_in > fan_out else wide).reshape(batch.shape)
    return math.sqrt(max(1.0, fan_out / fan_in)) * jnp.moveaxis(orthogonal, -1, outputs).reshape(stack.shape)


def _product(dims: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the products of two stacks of matrices, in float32."""
    return jnp.einsum(dims, a.astype(PRODUCTS), b.astype(PRODUCTS), preferred_element_type=jnp.float32)


def _alone(function: Callable[[Stacks], Stacks]) -> Callable[[Stacks], Stacks]:
    """Returns a function of single tensors that calls `function` with stacks `[1, ...]`."""
    return lambda tensors: [x[0] for x in function([x[None] for x in tensors])]


def _in_stacks(function: Callable[[Stacks], Stacks]) -> Callable[[Stacks], Stacks]:
    """Returns a function of single tensors whose vmap calls `function` once, with whole stacks `[n, ...]`."""
    of_tensors = jax.custom_batching.custom_vmap(_alone(function))

    @of_tensors.def_vmap
    def of_stacks(size: int, is_stack: list[list[bool]], stacks: Stacks) -> tuple[Stacks, list[bool]]:
        del size
        assert all(is_stack[0])
        return function(stacks), is_stack[0]

    return of_tensors


def is_matrix(spec: ParamSpec) -> bool:
    """Whether a parameter is a matrix of one layer, or a matrix for each expert.

    Biases, norms, tables of positions and token types are not.
    """
    return not spec.is_vector and {"position", "token_type"}.isdisjoint(spec.dims)


def is_hidden_matrix(spec: ParamSpec) -> bool:
    """Whether a parameter is a matrix from hidden to hidden.

    Embeddings and heads are not: one dim is ids, patches or classes.
    """
    return is_matrix(spec) and not {"vocab", "patch", "classes"} & set(spec.dims)


def _kind(spec: ParamSpec) -> MatrixDims:
    """Returns how to view a layer's tensor as matrices: each expert is a matrix, and a kernel has its outputs first."""
    dims = [dim for dim in spec.dims if dim != "layers"]
    return dims.count("experts"), dims.index("channels_out") if "channels_out" in dims else len(dims) - 1


def _map_specs(function: Callable[[ParamSpec], PyTree], specs: PyTree) -> PyTree:
    return jax.tree.map(function, specs, is_leaf=is_spec)


def per_layer(make: Callable[[PyTree], Transform], specs: PyTree) -> Transform:
    """Applies an optimizer to each layer of a stack separately, as if the layers were not stacked.

    `make` builds the optimizer of a part of the parameters from its specs. LAMB's and LARS's trust ratios, Adafactor's
    factors and Muon's orthogonalisation belong to one layer's tensor.
    """
    stacks = {name: make(group) for name, group in specs.items() if is_stack(group) and name != "rest"}
    if not stacks:
        return make(specs)

    def rest(tree: PyTree) -> PyTree:
        return {name: group for name, group in tree.items() if name not in stacks}

    unstacked = make(rest(specs))

    def init(params: PyTree) -> PyTree:
        layers = {name: jax.vmap(tx.init)(params[name]) for name, tx in stacks.items()}
        return {**layers, "rest": unstacked.init(rest(params))}

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        assert params is not None
        moves: PyTree
        moves, after = unstacked.update(rest(updates), state["rest"], rest(params))
        layers = {name: jax.vmap(tx.update)(updates[name], state[name], params[name]) for name, tx in stacks.items()}
        moves = {**moves, **{name: move for name, (move, _) in layers.items()}}
        return moves, {**{name: later for name, (_, later) in layers.items()}, "rest": after}

    return optax.GradientTransformation(init, update)


def beside_averages(trained: AllReduce | Transform, averages: Callable[[PyTree, PyTree], PyTree]) -> Transform:
    """Runs `trained` on all parameters except running averages, whose updates are `averages(updates, params)`."""

    def init(params: PyTree) -> PyTree:
        return trained.init(part_averages(params)[0])

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        (updates, values), (params, before) = part_averages(updates), part_averages(params)
        updates, state = trained.update(updates, state, params)
        return {**updates, **averages(values, before)} if values else updates, state

    return optax.GradientTransformation(init, update)


def move_averages(grads: PyTree, averages: PyTree) -> PyTree:
    """Returns the updates of running averages, whose gradients are minus the values of the step."""
    return jax.tree.map(lambda g, average: -AVERAGE_RATE * (g + average), grads, averages)


def guarded(inner: Transform) -> Transform:
    """Runs `inner`. A step whose gradient is not finite only counts as skipped.

    Only the gradient is checked. A check of the update would have to hold old and new moments together until all
    updates exist, which takes half as much temporary memory again.
    """

    def init(params: PyTree) -> GuardState:
        zero = jnp.zeros((), jnp.int32)
        return GuardState(inner.init(params), jnp.zeros(()), zero, zero)

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, GuardState]:
        trained, averages = part_averages(updates)
        norm = optax.tree.norm(trained)
        finite = jnp.isfinite(norm + optax.tree.norm(averages)) if averages else jnp.isfinite(norm)
        with jax.named_scope("optimizer"):
            steps, inner_state = inner.update(updates, state.inner, params)
        return jax.tree.map(lambda u: jnp.where(finite, u, 0), steps), GuardState(
            inner=jax.tree.map(lambda new, old: jnp.where(finite, new, old), inner_state, state.inner),
            grad_norm=norm,
            skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
            skipped=state.skipped + jnp.where(finite, 0, 1),
        )

    return optax.GradientTransformation(init, update)
