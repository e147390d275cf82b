"""Replicas' residuals in checkpoints: resumed runs are equal bit by bit; other numbers of replicas keep sum or mean."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from support import workload
from support.checkpointing import owed, replicas, restore, save
from support.exchanging import gradients

from compression.codecs import OneBit
from compression.exchange import exchange
from compression.local_sgd import LocalSGD
from compression.methods import METHODS as METHODS_OF_THE_CORE
from configs.schema import LocalSGDConfig
from examples.methods import demo, power_sgd, sparse_loco
from sharding.plan import ShardingPlan
from sharding.step import TrainState
from training.optimizer_chain import watch
from training.optimizers import guarded

CODEC = OneBit(block=32)


def first_state(nodes: int, make_chain: Callable[[ShardingPlan], Any]) -> TrainState:
    """Returns the first state of tensors under mics(2)."""
    plan = workload.plan("tensors", nodes=nodes, strategy="mics", partition_size=2)
    return workload.first_state("tensors", plan, make_chain(plan))


def with_codec(plan: ShardingPlan) -> optax.GradientTransformation:
    return workload.chained(exchange(plan, CODEC), workload.sgd())


def filled(state: TrainState) -> TrainState:
    """Returns a state of random numbers, as after some steps; counters are 2."""
    rng = np.random.default_rng(0)

    def fill(x: jax.Array) -> jax.Array:
        counts = np.issubdtype(x.dtype, np.integer)
        values = np.full(x.shape, 2) if counts else rng.normal(size=x.shape)
        return jax.device_put(values.astype(x.dtype), x.sharding)

    return jax.tree.map(fill, state)


def test_a_checkpoint_without_what_a_all_reduce_keeps_is_rejected(tmp_path: Path) -> None:
    """By name: PowerSGD has factors and residuals."""

    def with_power_sgd(plan: ShardingPlan) -> optax.GradientTransformation:
        return workload.chained(power_sgd.power_sgd(plan, workload.TENSORS, 2), workload.sgd())

    save(tmp_path, first_state(4, with_codec), 1)
    with pytest.raises(ValueError, match="opt_state.exchange.factors.* is absent in the checkpoint"):
        restore(tmp_path, first_state(4, with_power_sgd))


def test_local_sgd_on_another_number_of_replicas_keeps_the_mean(tmp_path: Path) -> None:
    """Of drifts and moments; counters become the largest one, as in the metrics: a skipped step is not forgotten."""
    settings = LocalSGDConfig(inner_steps=3, outer_learning_rate=0.7, outer_momentum=0.9)

    def with_local_sgd(plan: ShardingPlan) -> optax.GradientTransformation:
        each = guarded(optax.adamw(lambda step: 0.1))
        return LocalSGD(exchange(plan), each, settings, plan.layout.num_replicas)

    state = filled(first_state(4, with_local_sgd))
    inner = state.opt_state.inner
    skipped = jax.device_put(np.int32([0, 0, 1, 0]), inner.tree.skipped.sharding)
    inner = replace(inner, tree=inner.tree._replace(skipped=skipped))
    state = replace(state, opt_state=state.opt_state._replace(inner=inner))
    save(tmp_path, state, 2)
    found = restore(tmp_path, first_state(2, with_local_sgd))
    assert [int(np.max(watch(x.chain)["skipped_steps"])) for x in (state, found)] == [1, 1]

    def check(x: jax.Array, y: jax.Array) -> None:
        assert (x.shape[0], y.shape[0]) == (4, 2)
        kept = np.max if np.issubdtype(x.dtype, np.integer) else np.mean
        np.testing.assert_allclose(y, np.broadcast_to(kept(x, axis=0), y.shape), rtol=1e-5, atol=1e-6)

    jax.tree.map(check, state.opt_state.drift, found.opt_state.drift)
    jax.tree.map(check, state.opt_state.inner, found.opt_state.inner)
    jax.tree.map(np.testing.assert_array_equal, found.opt_state.outer, state.opt_state.outer)


# ------------------------------------------------------------------- every method continues with the residuals

EXAMPLES = (power_sgd.method(), sparse_loco.method(sparsity=0.9, decay=1.0), demo.method(sparsity=0.9))
METHODS = {method.name: method for method in (*METHODS_OF_THE_CORE, *EXAMPLES) if method.name != "none"}
KEYS: dict[str, dict[str, Any]] = {
    "one_bit_adam": dict(warmup_steps=2),
    "power_sgd": dict(warmup_steps=3),
}
QUICK = ("one_bit_adam",)  # it keeps residuals, as all others do, and moments
CHANGES = {  # the layouts before and after; the number of replicas
    "4 to 2": (dict(nodes=4, strategy="mics", partition_size=2), dict(nodes=2, strategy="mics", partition_size=2)),
    "8 to 3": (dict(nodes=4, strategy="ddp"), dict(nodes=3, per_node=1, strategy="ddp")),
    "2 to 4": (dict(nodes=4, strategy="mics", partition_size=4), dict(nodes=4, strategy="mics", partition_size=2)),
}
DONE = 4  # steps: past both warm-ups


@pytest.mark.parametrize(
    ("change", "late"),
    [
        ("4 to 2", False),
        pytest.param("8 to 3", False, marks=pytest.mark.slow),
        pytest.param("2 to 4", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in METHODS]
)
def test_every_method_goes_on_with_what_all_replicas_owed(method: str, change: str, late: bool, tmp_path: Path) -> None:
    """The first step on another number of replicas returns the gradients and the old residuals minus the new ones.

    DeMo returns signs: the sum of its momenta does not change.
    """
    plans = [workload.plan("tensors", **how) for how in CHANGES[change]]

    def chain(plan: ShardingPlan) -> optax.GradientTransformation:
        setup = workload.setup(plan, METHODS[method], block=32, delayed=late, **KEYS.get(method, {}))
        return workload.chained(METHODS[method].transform(setup), optax.sgd(1.0))

    state = workload.first_state("tensors", plans[0], chain(plans[0]))
    states, update = state.chain, jax.jit(chain(plans[0]).update)
    for step in range(DONE):
        _, states = update(gradients(plans[0], step)[0], states, state.params)
    all_reduce, opt_state = jax.device_put(states, jax.tree.map(lambda x: x.sharding, state.chain))
    save(tmp_path, replace(state, all_reduce=all_reduce, opt_state=opt_state), DONE)
    found = restore(tmp_path, workload.first_state("tensors", plans[1], chain(plans[1])))
    came, whole = gradients(plans[1], DONE)
    moves, (following, _) = jax.jit(chain(plans[1]).update)(came, found.chain, found.params)
    old, new = (x.exchange if late else x for x in (all_reduce, found.all_reduce if method == "demo" else following))
    mean = replicas(all_reduce.waiting.tree if late else whole, lambda x_R: x_R.mean(0))
    handed_on = jax.tree.map(np.negative, moves)
    if method == "demo":
        handed_on = mean = jax.tree.map(np.zeros_like, mean)
    if method == "one_bit_adam":  # it exchanges momenta
        mean = jax.tree.map(lambda m, g: 0.9 * np.asarray(m) + 0.1 * g, old.mu, mean)
        handed_on, old, new = new.mu, old.exchange, new.exchange

    def check(handed_on: Any, left: np.ndarray, came: np.ndarray, owed: np.ndarray) -> None:
        np.testing.assert_allclose(np.asarray(handed_on) + left, came + owed, atol=1e-6)

    left, before = (owed(state.residual.tree) for state in (new, old))
    jax.tree.map(check, handed_on, left, mean, before)
    assert max(np.abs(x).max() for x in jax.tree.leaves(before)) > 1e-5
