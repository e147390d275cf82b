"""Batch norm: its statistics against numpy and torch, the same on every mesh, and running averages in the optimizer."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import workload
from support.examples import example_methods  # noqa: F401 (fixture)
from support.numpy_resnet import build, conv, random_params, relu
from support.tables import every_row
from support.workload import BATCH_NORM, whole

from configs import digits
from configs.base import typed
from configs.schema import Config
from models.norms import Norms, ghost_batches, running_averages
from sharding.averages import AVERAGES, part_averages
from sharding.plan import ShardingPlan
from sharding.replicas import PerReplica
from sharding.spec import ParamSpec, place_all
from training.optimizer_chain import make_chain, watch
from training.optimizers import make_optimizer

EPS, RATE = 1e-5, 0.1
WEIGHTS = np.array([1, 2, 0, 0.5, 0, 0, 0, 3, 1, 0, 0, 0], np.float32)  # in ghost batches of 4: two rows; two; one


def images(rows: int, channels: int = 5, size: int = 3) -> np.ndarray:
    scale = np.linspace(0.5, 3, channels)
    return (np.random.default_rng(0).normal(1, scale, (rows, size, size, channels))).astype(np.float32)


def numpy_ghosts(y: np.ndarray, weights: np.ndarray, rows: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the normalised values, and the weighted sums of each ghost batch's mean and unbiased variance."""
    out = np.zeros(y.shape)
    sums = {"mean": np.zeros(y.shape[-1]), "variance": np.zeros(y.shape[-1])}
    for start in range(0, len(y), rows):
        there = [i for i in range(start, start + rows) if weights[i] > 0]
        if not there:
            continue
        seen = y[there].astype(np.float64).reshape(-1, y.shape[-1])
        out[there] = (y[there] - seen.mean(0)) / np.sqrt(seen.var(0) + EPS)
        sums["mean"] += weights[there].sum() * seen.mean(0)
        sums["variance"] += weights[there].sum() * seen.var(0, ddof=1)
    return out, sums


def check_close(one: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), one, other)


@every_row("rows", [4, 6, 12])
def test_ghost_batches_match_numpy_without_rows_of_weight_zero(rows: int) -> None:
    y = images(len(WEIGHTS))
    y[2] = 1e6  # a row that is not there must not be seen

    @jax.jit
    def run(y: jax.Array) -> Any:
        norms = Norms(ghost_batches(jnp.asarray(WEIGHTS), rows))
        return norms("a", y), norms.seen

    found, seen = run(y)
    expected, sums = numpy_ghosts(y, WEIGHTS, rows)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    check_close(seen, {"a": sums})
    assert not np.asarray(found)[WEIGHTS == 0].any()


def test_running_averages_match_numpy() -> None:
    y, mean, variance = images(4), np.arange(5.0), np.arange(1.0, 6.0)
    averages = {"a": {"mean": jnp.asarray(mean), "variance": jnp.asarray(variance)}}
    found, _ = running_averages(averages)("a", jnp.asarray(y))
    np.testing.assert_allclose(found, (y - mean) / np.sqrt(variance + EPS), rtol=1e-5, atol=1e-5)


def numpy_network(params: Any, x: np.ndarray, norm: Any) -> np.ndarray:
    """Returns the logits of images by a network with a small stem and basic blocks; `norm(name, y)` is its norm."""

    def conv_norm(name: str, x: np.ndarray, p: Any, stride: int = 1) -> np.ndarray:
        y = np.stack([conv(image, p["weight"].astype(float), stride) for image in x])
        return norm(name, y) * p["scale"] + p["bias"]

    x = relu(conv_norm("stem_conv", x.astype(float), params["stem"]["conv"]))
    for stage in (1, 2):
        block, stride = f"stage{stage}_block0", stage
        p = params[block]
        y = relu(conv_norm(f"{block}_conv0", x, p["conv0"], stride))
        y = conv_norm(f"{block}_conv1", y, p["conv1"])
        x = relu(y + (conv_norm(f"{block}_shortcut", x, p["shortcut"], stride) if "shortcut" in p else x))
    return (x.mean((1, 2)) @ params["head"]["weight"] + params["head"]["bias"])[:, :10]


@cache
def network() -> tuple[Any, Any, Mapping[str, np.ndarray]]:
    """A network with ghost batches of 4, parameters of which none is zero or one, and a batch of 12 rows."""
    model = build(stage_blocks=(1, 1), width=4, norm="batch", norm_rows=4)
    params = random_params(model)
    params[AVERAGES] = jax.tree.map(np.abs, params[AVERAGES])
    return model, params, workload.batch(12, "resnet")


def test_training_normalises_by_ghost_batches_and_evaluation_by_averages() -> None:
    model, params, batch = network()
    labels, weights = batch["labels"], batch["weights"]

    def losses(logits: np.ndarray) -> np.ndarray:
        return np.log(np.exp(logits).sum(-1)) - logits[np.arange(12), labels]

    sums: dict[str, Any] = {}

    def ghosts(name: str, y: np.ndarray) -> np.ndarray:
        y, sums[name] = numpy_ghosts(y, weights, 4)
        return y

    def averaged(name: str, y: np.ndarray) -> np.ndarray:
        p = params[AVERAGES][name]
        return (y - p["mean"]) / np.sqrt(p["variance"] + EPS)

    training = losses(numpy_network(params, batch["images"], ghosts))
    total = weights.sum()
    loss, grads = jax.jit(jax.value_and_grad(lambda p: model.loss(p, batch, whole) / total))(params)
    np.testing.assert_allclose(loss, np.average(training, weights=weights), rtol=1e-4)
    assert grads[AVERAGES].keys() == sums.keys() == params[AVERAGES].keys()
    check_close(grads[AVERAGES], jax.tree.map(lambda x: -x / total, sums), rtol=1e-4, atol=1e-4)

    logits = numpy_network(params, batch["images"], averaged)
    found = jax.jit(lambda p: model.evaluate(p, batch, whole))(params)
    np.testing.assert_allclose(found["loss"], np.sum(weights * losses(logits)), rtol=1e-4)
    np.testing.assert_allclose(found["correct"], np.sum(weights * (logits.argmax(-1) == labels)), rtol=1e-6)
    assert abs(np.sum(weights * (training - losses(logits)))) > 0.1


def check_run(plan: ShardingPlan, *, rows: int, accumulation: int, **how: Any) -> None:
    """Checks the losses of five steps, and the parameters and running averages after them."""
    expected, params = workload.single_device(BATCH_NORM, rows)
    step = workload.compiled_step(BATCH_NORM, plan, rows=rows, accumulation=accumulation, **how)
    losses, state, _ = workload.run_steps(*step, workload.NUM_STEPS)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert losses[-1] < losses[0] - 0.1
    check_close(state.params[AVERAGES], params[AVERAGES], rtol=1e-4, atol=1e-5)
    moved = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), state.params, workload.params(BATCH_NORM))
    assert min(jax.tree.leaves(moved[AVERAGES])) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "per_node", "accumulation", "rows"),
    [
        (4, 2, 2, 59),  # the last rows are padding: half a ghost batch, and two whole ones
        pytest.param(1, 1, 4, 64, marks=pytest.mark.slow),
        pytest.param(2, 2, 1, 64, marks=pytest.mark.slow),
    ],
)
def test_losses_and_averages_do_not_depend_on_devices_or_micro_steps(
    nodes: int, per_node: int, accumulation: int, rows: int
) -> None:
    plan = workload.plan(BATCH_NORM, nodes=nodes, per_node=per_node, strategy="hsdp")
    check_run(plan, rows=rows, accumulation=accumulation)


@pytest.mark.slow
def test_overlapped_all_reduce_averages_too() -> None:
    plan = workload.plan(BATCH_NORM, overlap=True, strategy="mics", partition_size=2)
    check_run(plan, rows=32, accumulation=2, timing=workload.in_micro_steps(plan, "none"))


R = 4
AVERAGE = ParamSpec(shape=(16,), dims=("norm",))
SPECS: Any = {  # of a convolution with a batch norm
    "conv": {
        "weight": ParamSpec(shape=(16, 8, 3, 3), dims=("channels_out", "channels_in", "height", "width")),
        "bias": ParamSpec(shape=(16,), dims=("norm",)),
    },
    AVERAGES: {"conv": {"mean": AVERAGE, "variance": AVERAGE}},
}
FIRST = jax.tree.map(lambda s: np.full(s.shape, 0.5, np.float32), SPECS, is_leaf=lambda x: isinstance(x, ParamSpec))


def four_replicas() -> ShardingPlan:
    plan = workload.plan("tensors", strategy="mics", partition_size=2)
    return replace(plan, placements=place_all(SPECS, plan.layout))


@cache
def gradients(step: int) -> Any:
    """Gradients `[R, ...]`, every replica's its own; those of the averages are large."""
    rng = np.random.default_rng(step)
    grads = jax.tree.map(lambda x: rng.normal(size=(R, *x.shape)).astype(np.float32), FIRST)
    grads[AVERAGES] = jax.tree.map(lambda g: 100 * g, grads[AVERAGES])
    return grads


def config(**changes: Any) -> Config:
    section = digits.get_config()
    section.num_steps = 8
    section.optimizer.update({"warmup_steps": 0, "clip_norm": 1.0})
    for key, value in changes.items():
        part, name = key.split("__")
        section[part][name] = value
    return typed(section)


def jitted(tx: Any) -> optax.GradientTransformation:
    return optax.GradientTransformation(jax.jit(tx.init), jax.jit(tx.update))


def run_chain(tx: Any, steps: int, factor: float = 1.0) -> tuple[list[Any], Any]:
    """Returns the updates of some steps, and the state; the averages' gradients are multiplied by `factor`."""
    params = FIRST
    state, out = tx.init(params), []
    for step in range(steps):
        grads = dict(gradients(step))
        grads[AVERAGES] = jax.tree.map(lambda g: factor * g, grads[AVERAGES])
        updates, state = jax.device_get(tx.update(grads, state, params))
        params = optax.apply_updates(params, updates)
        out.append(updates)
    return out, state


def expected_averages(steps: int) -> Any:
    averages = FIRST[AVERAGES]
    for step in range(steps):
        averages = jax.tree.map(lambda a, g: 0.9 * a - 0.1 * g.mean(0), averages, gradients(step)[AVERAGES])
    return averages


def averages_after(updates: list[Any]) -> Any:
    averages = FIRST[AVERAGES]
    for update in updates:
        averages = jax.tree.map(np.add, averages, update[AVERAGES])
    return averages


@every_row("name", ["adamw", "lamb", "adafactor", "muon"])
def test_no_optimizer_moves_the_averages(name: str) -> None:
    """They take a tenth of each step's values; norm, clipping, decay and trust ratios of all else do not see them."""
    c = replace(config().optimizer, name=name, weight_decay=0.1)
    mean = optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None: (jax.tree.map(lambda g: g.mean(0), updates), state),
    )
    tx = jitted(optax.chain(mean, make_optimizer(c, 8, SPECS)))
    updates, state = run_chain(tx, 3)
    check_close(averages_after(updates), expected_averages(3), atol=1e-4)
    others, _ = run_chain(tx, 3, factor=0.0)
    check_close([part_averages(x)[0] for x in updates], [part_averages(x)[0] for x in others])
    trained = jax.tree.map(lambda g: g.mean(0), part_averages(gradients(2))[0])
    np.testing.assert_allclose(state[1].grad_norm, optax.tree.norm(trained), rtol=1e-5)


def make_tx(settings: Config) -> Any:
    return jitted(make_chain(settings, four_replicas(), SPECS))


ALL_REDUCE: dict[str, dict[str, Any]] = {
    "none": {},
    "int8": {},
    "power_sgd": {},
    "demo": {},
    "one_bit_adam": {"compression__warmup_steps": 1, "optimizer__name": "adamw", "optimizer__clip_norm": 0.0},
}


@cache
def tx_of(method: str) -> Any:
    return make_tx(config(compression__all_reduce=method, **ALL_REDUCE[method]))


@pytest.mark.usefixtures("example_methods")
@every_row("method", ALL_REDUCE)
def test_all_reduce_sends_averages_as_they_are(method: str) -> None:
    """No codec, no residual and no momentum: also where the method takes the optimizer's place."""
    updates, state = run_chain(tx_of(method), 3)
    check_close(averages_after(updates), expected_averages(3), atol=1e-4)
    assert float(watch(state)["skipped_steps"]) == 0
    trained = part_averages(updates[-1])[0]
    assert all(np.isfinite(x).all() and np.abs(x).max() > 0 for x in jax.tree.leaves(trained))


@pytest.mark.usefixtures("example_methods")
def test_delayed_averages_are_one_step_late() -> None:
    """And move towards zero in the first step, which has no values; but not where demo takes the optimizer's place."""
    updates, _ = run_chain(make_tx(config(compression__delayed=True)), 3)
    averages = jax.tree.map(lambda a: 0.9 * a, FIRST[AVERAGES])
    for step in range(2):
        averages = jax.tree.map(lambda a, g: 0.9 * a - 0.1 * g.mean(0), averages, gradients(step)[AVERAGES])
    check_close(averages_after(updates), averages, atol=1e-4)
    tx = make_tx(config(compression__delayed=True, compression__all_reduce="demo", **ALL_REDUCE["demo"]))
    check_close(averages_after(run_chain(tx, 3)[0]), expected_averages(3), atol=1e-4)


def test_averages_of_local_sgd_are_the_mean_of_the_replicas() -> None:
    """Each replica has its own until they meet; the outer momentum does not act on them."""
    settings = config(
        local_sgd__inner_steps=2, local_sgd__outer_momentum=0.9, compression__all_reduce="int8", optimizer__name="adamw"
    )
    updates, state = run_chain(make_tx(settings), 4)
    check_close(averages_after(updates), expected_averages(4), atol=1e-4)
    assert all(not x.any() for step in (0, 2) for x in jax.tree.leaves(updates[step]))
    assert isinstance(state[1].drift, PerReplica)


@pytest.mark.usefixtures("example_methods")
@every_row("method", ["int8", "demo", "one_bit_adam"])
def test_a_skipped_step_leaves_what_all_reduce_keeps_as_it_was(method: str) -> None:
    """As a run has it: also where only an average is not finite, which goes past DeMo and 1-bit Adam."""
    tx, good = tx_of(method), gradients(0)
    bad = good | {AVERAGES: jax.tree.map(lambda g: np.full_like(g, np.inf), good[AVERAGES])}
    _, before = jax.device_get(tx.update(good, tx.init(FIRST), FIRST))
    moves, after = jax.device_get(tx.update(bad, before, FIRST))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(moves)) and int(after[1].skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, after[0], before[0])
    assert any(np.asarray(x).any() for x in jax.tree.leaves(before[0]))


def test_ghost_batches_must_fit_into_a_micro_step() -> None:
    section = digits.get_config()
    section.model.update({"norm": "batch", "norm_rows": 16})
    with pytest.raises(ValueError, match=r"model.norm_rows=16 must divide batch.micro_size=8, .* multiple of 16$"):
        typed(section)
    section.batch.micro_size = 32
    typed(section)  # fits
