"""The small models and the oracle that the tests of the step share: a single device, written without any sharding."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import models
from compression.all_reduce import AllReduceMethod, Setup, unless_not_finite
from compression.exchange import exchange
from compression.methods import method_named
from compression.timings import Delayed, Overlapped
from configs import base
from configs.schema import MODELS, AblationConfig, CompressionConfig, ResNetConfig, ShardingConfig, ViTConfig, keys_of
from sharding.averages import part_averages
from sharding.coded import PLAIN, Codec, LevelCodecs
from sharding.frozen import joined, part_frozen, part_like
from sharding.gradients import accumulated
from sharding.mesh import find_nodes, make_mesh
from sharding.padding import padded
from sharding.pipeline import through_stages
from sharding.plan import ShardingPlan
from sharding.scopes import make_layout
from sharding.spec import ParamSpec, is_placement, place_all
from sharding.state import state_shardings
from sharding.step import AfterMicroSteps, Timing, TrainState, build_train_step
from sharding.step import first_state as begin
from training.optimizer_chain import of_all_replicas, watch
from training.optimizers import OptimizerConfig, beside_averages, guarded, move_averages

ROWS, SEQ_LEN, NUM_STEPS = 16, 8, 5
DROPOUT = " dropout"  # last suffix of a kind of model: it drops values, and its rows have noise
PACKED = " packed"  # suffix of a kind of model: its rows are several documents
BATCH_NORM = "resnet batch"  # a kind of model, with ghost batches of two rows: a device has so many in a micro-step
GEMMA = "decoder gemma"  # a kind of model: layers with and without a window, and the other options of a decoder
FLAGS: dict[str, Any] = {
    "head_dim": 8,
    "rotary_scaling": "llama3",
    "rotary_factor": 4.0,
    "rotary_original_len": 16,
    "window": 3,
    "global_every": 2,
    "rotary_local_base": 50.0,
    "qk_norm": True,
    "query_scalar": 12,
    "attention_cap": 1.0,
    "logit_cap": 3.0,
    "norm": "rms_1p",
    "post_norm": True,
    "activation": "geglu",
    "scale_embedding": True,
    "qkv_bias": True,
}
LORA = "lora "  # prefix of a kind of model, a decoder with adapters; the form in which its base is stored follows
ADAPTED = "lora experts"  # a kind of model: the dropless one with adapters of its experts and queries
MOE_DOTS = "moe dots"  # a kind of model, whose backward pass computes no product with weights again
GPT_OSS = "moe gpt-oss"  # a kind of model: dropless, with windows, sinks, biases, and a clamped activation
DROPLESS = "moe dropless"  # a kind of model, whose experts take all tokens that choose them, next to a shared one
SGD = dict(learning_rate=0.5, momentum=0.9, weight_decay=0.01)
# input of a replica all-reduce, without a model: matrices of two dims and more, stacked and not, a vector, and a
# tensor kept whole
TENSORS = {
    "table": ParamSpec(shape=(48, 16), dims=("vocab", "embed")),
    "layers": {
        "up": ParamSpec(shape=(2, 16, 32), dims=("layers", "embed", "mlp")),
        "kernel": ParamSpec(shape=(2, 16, 3, 8), dims=("layers", "embed", "width", "heads")),
        "scale": ParamSpec(shape=(2, 16), dims=("layers", "norm")),
    },
    "whole": ParamSpec(shape=(10,), dims=("norm",), replicate=True),
}


@cache
def model(kind: str, num_layers: int = 2) -> models.Model:
    """A model with every kind of parameter: stacked matrices and vectors, an embedding, a head."""
    drops, kind = kind.endswith(DROPOUT), kind.removesuffix(DROPOUT).removesuffix(PACKED)
    if kind == "resnet":
        return models.build(ResNetConfig(stage_blocks=(1, 1), width=8, norm_groups=2))
    if kind == BATCH_NORM:
        return models.build(ResNetConfig(stage_blocks=(1, 1), width=8, norm="batch", norm_rows=2))
    if kind == "vit":
        return models.build(ViTConfig(patch_size=4, num_layers=num_layers, hidden=16, intermediate=32))
    section: dict[str, Any] = dict(num_layers=num_layers, hidden=16, intermediate=32, num_heads=4, max_len=SEQ_LEN)
    section |= dict(vocab_size=40, vocab_multiple=16)
    section |= dict(dropout=0.2, attention_dropout=0.3) if drops else {}
    moe: dict[str, Any] = dict(num_experts=8, capacity_factor=1.0, balance_loss=0.1, z_loss=0.1)
    if kind == MOE_DOTS:
        kind, moe["remat"] = "moe", "dots"
    if kind in (DROPLESS, ADAPTED):
        moe |= dict(capacity_factor=0.0, experts_per_token=3, shared_intermediate=16)
        moe |= dict(lora_rank=4, lora_targets="query experts") if kind == ADAPTED else {}
        kind = "moe"
    if kind == GPT_OSS:
        kind, section = "moe", section | dict(window=3, global_every=2, attention_bias=True, attention_sinks=True)
        moe |= dict(capacity_factor=0.0, expert_bias=True, activation="swiglu_clamped")
    if kind in ("decoder", "moe", GEMMA):
        section |= dict(num_kv_heads=2)
    if kind == GEMMA:
        kind, section = "decoder", section | FLAGS
    if kind.startswith(LORA):  # blocks have 64 columns
        section |= dict(hidden=64, intermediate=128, lora_rank=4, lora_base=kind.removeprefix(LORA))
        kind = "decoder"
    if kind == "moe":  # a fifth of the choices finds no room; the router's losses are large, so that they show
        section |= moe
    return models.build(MODELS[kind](**section))


def specs(kind: str, num_layers: int = 2) -> Any:
    """The ParamSpecs of a model; `tensors` are TENSORS."""
    return TENSORS if kind == "tensors" else model(kind, num_layers).param_specs()


@cache
def params(kind: str, num_layers: int = 2) -> Any:
    if kind == "tensors":
        return jax.tree.map(lambda s: jnp.ones(s.shape), TENSORS, is_leaf=lambda x: isinstance(x, ParamSpec))
    found = jax.jit(model(kind, num_layers).init)(jax.random.key(0))
    return jax.tree.map(lambda x: x if x.any() else x + 0.05, found) if kind.startswith(LORA) else found


@cache
def batch(rows: int = ROWS, kind: str = "decoder") -> Mapping[str, np.ndarray]:
    """Rows of different weights; the weights differ so much that a mean of means would be another number."""
    rng = np.random.default_rng(0)
    if isinstance(model(kind), models.Classifier):
        images = rng.normal(size=(rows, 8, 8, 1)).astype(np.float32)
        weights = rng.random(rows, dtype=np.float32) * (np.arange(rows) % 5 > 0)
        return {"images": images, "labels": np.arange(rows, dtype=np.int32) % 10, "weights": weights.astype(np.float32)}
    tokens = rng.integers(0, 40, (rows, SEQ_LEN + 1)).astype(np.int32)
    weights = rng.random((rows, SEQ_LEN), dtype=np.float32) * (np.arange(rows)[:, None] % 5 > 0)
    found = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights.astype(np.float32)}
    segments = np.cumsum(rng.random((rows, SEQ_LEN)) < 0.4, axis=1).astype(np.int32)
    found |= {"segments": segments} if kind.removesuffix(DROPOUT).endswith(PACKED) else {}
    noise = rng.integers(0, [2**24, 2**16], (rows, SEQ_LEN, 2)).astype(np.float32)
    return found | ({"noise": noise} if kind.endswith(DROPOUT) else {})


def whole(name: str, tree: Any) -> Any:
    """The gather of a single device."""
    del name
    return tree


def trained_and_frozen(kind: str, num_layers: int = 2) -> tuple[Any, Any]:
    """The initial parameters of a model: the trained ones and the frozen ones."""
    return part_like(params(kind, num_layers), part_frozen(specs(kind, num_layers))[0])


def value_and_grad(kind: str, num_layers: int = 2) -> Callable[[Any, Any], tuple[jax.Array, Any]]:
    """Returns a function of trained parameters and rows of the batch: their share of its loss, and the gradients."""
    data = {name: jnp.asarray(x) for name, x in batch(kind=kind).items()}
    total, (_, frozen) = data["weights"].sum(), trained_and_frozen(kind, num_layers)

    def loss(params: Any, rows: jax.Array) -> jax.Array:
        chosen = {name: x[rows] for name, x in data.items()}
        return model(kind, num_layers).loss(joined(params, frozen), chosen, whole) / total

    return jax.jit(jax.value_and_grad(loss))


def sgd() -> optax.GradientTransformation:
    """Momentum SGD with decay: unlike Adam's, its update shows a gradient that is wrong by a factor."""
    decay = optax.add_decayed_weights(SGD["weight_decay"])
    return beside_averages(optax.chain(decay, optax.sgd(SGD["learning_rate"], SGD["momentum"])), move_averages)


def single_device_losses(kind: str, rows: int = ROWS, num_layers: int = 2) -> np.ndarray:
    """The losses of five steps: the whole batch at once on one device, momentum SGD written out."""
    return single_device(kind, rows, num_layers)[0]


@cache
def single_device(
    kind: str, rows: int = ROWS, num_layers: int = 2, num_steps: int = NUM_STEPS
) -> tuple[np.ndarray, Any]:
    """The losses of the steps, and the parameters after them; running averages take a tenth of each step's values."""
    p, frozen = trained_and_frozen(kind, num_layers)
    velocity = jax.tree.map(jnp.zeros_like, p)
    fill = rows % 2 if kind == BATCH_NORM else 0  # up to a whole ghost batch
    data = {name: jnp.pad(x, [(0, fill)] + [(0, 0)] * (x.ndim - 1)) for name, x in batch(rows, kind).items()}

    @jax.jit
    def step(p: Any, velocity: Any) -> Any:
        def mean_loss(p: Any) -> jax.Array:
            every = joined(p, frozen)
            return model(kind, num_layers).objective(every, data, whole)[0] / data["weights"].sum()

        loss, pure = jax.value_and_grad(mean_loss)(p)
        grads = jax.tree.map(lambda g, w: g + SGD["weight_decay"] * w, pure, p)
        velocity = jax.tree.map(lambda v, g: SGD["momentum"] * v + g, velocity, grads)
        moved = jax.tree.map(lambda w, v: w - SGD["learning_rate"] * v, p, velocity)
        averages = jax.tree.map(lambda w, g: 0.9 * w - 0.1 * g, part_averages(p)[1], part_averages(pure)[1])
        return {**moved, **averages}, velocity, loss

    losses = []
    for _ in range(num_steps):
        p, velocity, loss = step(p, velocity)
        losses.append(float(loss))
    return np.array(losses), p


def run_config(**sharding: Any) -> Any:
    """The config of a run of a small decoder on nodes of 2 devices, one row a device in a step of 8."""
    config = base.get_config()
    config.model.update(num_layers=2, hidden=32, intermediate=64, vocab_multiple=64, max_len=16)
    config.data.seq_len = 16
    config.batch.update(global_size=8, micro_size=1)
    config.mesh.devices_per_node = 2
    config.sharding.update(sharding)
    return config


def strategy(**keys: Any) -> tuple[ShardingConfig, AblationConfig]:
    """Returns the sections that choose a layout, of keys of both."""
    ablation = {key: keys.pop(key) for key in keys_of(AblationConfig) if key in keys}
    custom = {"strategy": "custom"} if "parameters" in keys else {}
    return ShardingConfig(**custom | keys), AblationConfig(**ablation)


def plan(
    kind: str,
    *,
    nodes: int = 4,
    per_node: int = 2,
    context: int = 1,
    tensor: int = 1,
    stages: int = 1,
    num_layers: int = 2,
    dtype: Any = jnp.float32,
    gather_codecs: LevelCodecs = PLAIN,
    reduce_scatter_codecs: LevelCodecs = PLAIN,
    expert_codecs: LevelCodecs = PLAIN,
    difference_codecs: LevelCodecs = PLAIN,
    overlap: bool = False,
    **how,
) -> ShardingPlan:
    layout = make_layout(
        *strategy(**how),
        num_nodes=nodes,
        devices_per_node=per_node,
        context=context,
        tensor=tensor,
        stages=stages,
    )
    mesh = make_mesh(layout.shape, find_nodes(jax.devices()[: nodes * per_node], per_node))
    trained, frozen = part_frozen(specs(kind, num_layers))
    return ShardingPlan(
        mesh=mesh,
        layout=layout,
        placements=place_all(trained, layout),
        frozen=place_all(frozen, layout),
        compute_dtype=dtype,
        gather_codecs=gather_codecs,
        reduce_scatter_codecs=reduce_scatter_codecs,
        expert_codecs=expert_codecs,
        difference_codecs=difference_codecs,
        overlap=overlap,
    )


def payload_bytes(codec: Codec, size: int) -> int:
    """The bytes that a codec makes of a row of `size` values."""
    return jax.eval_shape(codec.encode, jax.ShapeDtypeStruct((size,), jnp.float32), jax.random.key(0)).size


def setup(plan: ShardingPlan, method: str | AllReduceMethod, *, kind: str = "tensors", **compression: Any) -> Setup:
    """The arguments with which a method of the replica all-reduce (or the method of this name) is built."""
    config, method = base.get_config(), method_named(method) if isinstance(method, str) else method
    config.compression.update(compression)
    config.optimizer.update({"name": method.takes_over or "adamw", "clip_norm": 0.0})
    return Setup(
        compression=CompressionConfig(**config.compression),
        optimizer=OptimizerConfig(**config.optimizer),
        plan=plan,
        specs=part_frozen(specs(kind))[0],
    )


def in_micro_steps(
    plan: ShardingPlan, all_reduce: str, tx: Any = None, *, kind: str = "tensors", **compression: Any
) -> Timing:
    """The timing of a method that runs in the micro-steps."""
    method, given = method_named(all_reduce), setup(plan, all_reduce, kind=kind, **compression)
    assert method.runs_in_micro_steps(given)
    timing = Delayed if given.compression.delayed else Overlapped
    return timing(method.transform(given), guarded(tx or sgd()), watch, by_group=method.by_group(given))


def after_micro_steps(plan: ShardingPlan, all_reduce: Any = None, tx: Any = None) -> AfterMicroSteps:
    """A replica all-reduce after the micro-steps and an optimizer; neither state changes in a step that is skipped."""
    return AfterMicroSteps(unless_not_finite(all_reduce or exchange(plan)), guarded(tx or sgd()), watch)


def chained(all_reduce: optax.GradientTransformation, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The replica all-reduce and an optimizer as a run has them: neither state changes in a step that is skipped."""
    return optax.chain(unless_not_finite(all_reduce), guarded(tx))


def put_batch(sh: ShardingPlan, accumulation: int, rows: int = ROWS, kind: str = "decoder") -> Any:
    """The batch as `[accum, rows, ...]`, filled up with rows of weight zero."""
    per_micro = -(-rows // accumulation)
    per_micro += -per_micro % sh.layout.shape.num_data_devices

    def place(x: np.ndarray) -> jax.Array:
        padded = np.zeros((accumulation * per_micro, *x.shape[1:]), x.dtype)
        padded[: len(x)] = x
        return jax.device_put(
            padded.reshape(accumulation, per_micro, *x.shape[1:]), jax.NamedSharding(sh.mesh, sh.batch_spec)
        )

    return {name: place(x) for name, x in batch(rows, kind).items()}


def compiled_step(
    kind: str,
    sh: ShardingPlan,
    *,
    accumulation: int = 2,
    rows: int = ROWS,
    tx: Any = None,
    all_reduce: Any = None,
    timing: Timing | None = None,
    num_layers: int = 2,
    loss: Any = None,
):
    """Returns the compiled step, its first state and its batch; `loss` in the place of the model's objective."""
    timing = timing or after_micro_steps(sh, all_reduce, tx)
    state = first_state(kind, sh, timing, num_layers)
    data = put_batch(sh, accumulation, rows, kind)
    built = model(kind, num_layers)
    staged = built.staged_loss() if sh.layout.shape.stage > 1 else None
    micro_steps = partial(through_stages, staged) if staged else accumulated(loss or built.objective)
    step = jax.jit(
        build_train_step(micro_steps, sh, timing),
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda x: x.sharding, state), None),
    )
    return step.lower(state, data).compile(), state, data


def first_state(kind: str, sh: ShardingPlan, tx: Any, num_layers: int = 2) -> TrainState:
    """The state before the first step of a timing or a chain, where it belongs; copied: the step donates it."""
    stored = jax.tree.map(padded, sh.all_placements, params(kind, num_layers), is_leaf=is_placement)
    state = begin(tx, *part_like(stored, sh.placements))
    return jax.device_put(jax.tree.map(np.asarray, state), state_shardings(sh, state), may_alias=False)


def losses(kind: str, sh: ShardingPlan, **how: Any) -> np.ndarray:
    """The losses of five steps under a strategy."""
    return run_steps(*compiled_step(kind, sh, **how), NUM_STEPS)[0]


def run_steps(step: Any, state: Any, data: Any, count: int) -> tuple[np.ndarray, Any, Any]:
    """Returns the losses of some steps, and the last state and metrics."""
    out, metrics = [], {}
    for _ in range(count):
        state, metrics = jax.block_until_ready(step(state, data))
        out.append(float(of_all_replicas(metrics)["loss"]))  # replicas that drift apart have different losses
    return np.array(out), state, metrics


STRATEGIES = {
    "ddp": dict(strategy="ddp"),
    "zero1": dict(strategy="zero1"),
    "zero2": dict(strategy="zero2"),
    "zero3": dict(strategy="zero3"),
    "hsdp": dict(strategy="hsdp"),
    "mics4": dict(strategy="mics", partition_size=4),  # groups of 1, 2, 8 devices are ddp, hsdp, zero3
    "node-node-all": dict(parameters="node", gradients="node", optimizer="all"),
    "none-node-4": dict(parameters="none", gradients="node", optimizer=4),
}
