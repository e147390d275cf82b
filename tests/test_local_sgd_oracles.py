"""Local SGD and what it sends against numpy: twenty steps of four replicas, which meet after every fourth."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from support import workload
from support.checkpointing import owed, replicas, restore, save
from support.exchanging import gradients, matrices, two_bits
from support.local_replicas import LEARNING_RATE, inner
from support.numpy_oracles import (
    CODED,
    REPLICAS,
    SEED,
    STEPS,
    exchanged,
    flat,
    noise,
    program,
    replicas_on,
    statistical,
    unflat,
)
from support.suite import SLOW
from support.tables import every_row

from compression.codecs import Statistical
from compression.exchange import by_groups, exchange
from compression.local_sgd import LocalSGD
from configs import base
from configs.schema import LocalSGDConfig, OptimizerConfig
from examples.methods.sparse_loco import sparse
from sharding.plan import ShardingPlan
from sharding.redistribute import on_whole_tensors
from training.optimizers import guarded, make_optimizer

INNER_STEPS = 4
METHODS = {  # learning rate and momentum of the outer step
    "DiLoCo": (0.7, 0.9),
    "sparse_loco": (1.0, 0.0),
}
BLOCK = 48  # does not divide the four pieces
DENSITY, DECAY = 0.1, 0.9  # of sparse_loco


def largest(values_R: np.ndarray, kept_R: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sum `[N]` of the largest shares of each matrix, and what the replicas keep; vectors are averaged."""
    waiting = values_R / REPLICAS + DECAY * kept_R
    sent, sizes = waiting.copy(), [x.size for x in matrices(workload.params("tensors"))]
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        sent[:, end - size : end] = [two_bits(x, DENSITY) for x in waiting[:, end - size : end]]
    return sent.sum(0), waiting - sent


@every_row("method", METHODS)
def test_twenty_steps_of_local_sgd_match_numpy(method: str) -> None:
    """Each replica clips and has a momentum of its own; at a meeting Nesterov's step, and drifts are zero again."""
    plan, (rate, momentum), rng = replicas_on(REPLICAS), METHODS[method], np.random.default_rng(SEED)
    settings = LocalSGDConfig(inner_steps=INNER_STEPS, outer_learning_rate=rate, outer_momentum=momentum)
    is_sparse = method == "sparse_loco"
    hop = by_groups(plan, sparse(plan, density=DENSITY, decay=DECAY)) if is_sparse else exchange(plan)
    states, update = program(plan, LocalSGD(hop, guarded(inner()), settings, REPLICAS))
    params = workload.params("tensors")
    shared, clipped = flat(params)[0], set()
    drifts = momenta = velocity = kept = np.float32(0)
    for step in range(1, STEPS + 1):
        grads = noise(rng)
        moves, states = update(grads, states, params)
        params = optax.apply_updates(params, moves)
        g_R = flat(grads, REPLICAS)
        norms = np.linalg.norm(g_R, axis=1, keepdims=True)
        momenta = 0.9 * momenta + g_R * np.minimum(1, 0.8 / norms)
        drifts = drifts - LEARNING_RATE * momenta
        if step % INNER_STEPS == 0:
            mean, kept = largest(-drifts, kept) if is_sparse else (-drifts.mean(0), kept)
            velocity = momentum * velocity + mean
            shared = shared - rate * (mean + momentum * velocity)
            drifts = np.zeros_like(drifts)
        np.testing.assert_allclose(flat(params)[0], shared, rtol=0, atol=2e-6, err_msg=str(step))
        np.testing.assert_allclose(flat(states[1].drift.tree, REPLICAS), drifts, rtol=0, atol=2e-6, err_msg=str(step))
        clipped |= {*(norms > 0.8).ravel().tolist()}
    assert clipped == {True, False}
    if is_sparse:
        np.testing.assert_allclose(flat(states[0].residual.tree, REPLICAS), kept, rtol=0, atol=2e-6)


# ----------------------------------------------------------------------------------------- MuLoCo with `statistical`

OUTER = LocalSGDConfig(inner_steps=INNER_STEPS, outer_learning_rate=0.7, outer_momentum=0.6)


def muon(plan: ShardingPlan | None = None) -> optax.GradientTransformation:
    """Returns Muon with clipping and decay, on one device or under a plan."""
    changes = {"name": "muon", "learning_rate": 2e-2, "schedule": "constant", "warmup_steps": 0}
    config = OptimizerConfig(**base.get_config().optimizer.to_dict() | changes)
    how = {"on_whole": partial(on_whole_tensors, plan)} if plan else {}
    return make_optimizer(config, STEPS, workload.TENSORS, **how)


def muloco(plan: ShardingPlan) -> LocalSGD:
    all_reduce = exchange(plan, Statistical(block=BLOCK))
    return LocalSGD(all_reduce, muon(plan), OUTER, plan.layout.num_replicas)


@cache
def muloco_program(number: int) -> tuple[Any, Any]:
    """Returns the first states of so many replicas, and the jitted update."""
    return program(replicas_on(number), muloco(replicas_on(number)))


@pytest.mark.slow
@pytest.mark.usefixtures("muon_in_float32")
def test_twenty_steps_of_muloco_in_two_bits_match_numpy() -> None:
    """Drifts, the codec, its feedback and the outer step; Muon itself is written out in test_local_sgd.py."""
    rng = np.random.default_rng(SEED)
    states, update = muloco_program(REPLICAS)
    step_alone, code = jax.jit(muon().update), partial(statistical, least=1e-5)
    params = workload.params("tensors")
    shared, own = flat(params)[0], [muon().init(params)] * REPLICAS
    drifts = np.zeros((REPLICAS, shared.size), np.float32)
    velocity = kept = np.float32(0)
    for step in range(1, STEPS + 1):
        grads = noise(rng)
        moves, states = update(grads, states, params)
        params = optax.apply_updates(params, moves)
        for r, g in enumerate(flat(grads, REPLICAS)):
            move, own[r] = step_alone(unflat(g), own[r], unflat(shared + drifts[r]))
            drifts[r] += flat(move)[0]
        if step % INNER_STEPS == 0:
            mean, kept = exchanged(-drifts, kept, code, BLOCK)
            velocity = OUTER.outer_momentum * velocity + mean
            shared = shared - OUTER.outer_learning_rate * (mean + OUTER.outer_momentum * velocity)
            drifts = np.zeros_like(drifts)
            np.testing.assert_allclose(flat(states[0].residual.tree, REPLICAS), kept, rtol=0, atol=2e-6)
        np.testing.assert_allclose(flat(params)[0], shared, rtol=0, atol=2e-6, err_msg=str(step))
        np.testing.assert_allclose(flat(states[1].drift.tree, REPLICAS), drifts, rtol=0, atol=2e-6, err_msg=str(step))
    assert np.abs(kept[:, :CODED]).max() > 1e-3 and CODED % (REPLICAS * BLOCK)


@pytest.mark.usefixtures("muon_in_float32")
@pytest.mark.parametrize(
    ("before", "after"), [pytest.param(4, 2, marks=SLOW), pytest.param(2, 4, marks=pytest.mark.slow)]
)
def test_muloco_in_two_bits_goes_on_with_other_replicas(before: int, after: int, tmp_path: Path) -> None:
    """Together they still owe the same, and are at the mean of where they were; the next meeting hands both on."""
    plan, parts = replicas_on(before), muloco(replicas_on(after))
    states, update = muloco_program(before)
    state = workload.first_state("tensors", plan, muloco(plan))
    for step in range(2 * INNER_STEPS - 1):
        _, states = update(gradients(plan, step)[0], states, state.params)
    save(tmp_path, replace(state, all_reduce=states[0], opt_state=states[1]), 2 * INNER_STEPS - 1)
    found = restore(tmp_path, workload.first_state("tensors", replicas_on(after), parts))

    def same(wanted: Any, got: Any, atol: float = 1e-6) -> None:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x, rtol=1e-5, atol=atol), wanted, got)

    owed_before, means = owed(states[0].residual.tree), partial(replicas, combine=lambda x_R: x_R.mean(0))
    shares = jax.tree.map(lambda x: np.broadcast_to(x / after, (after, *x.shape)), owed_before)
    same(shares, found.all_reduce.residual.tree, atol=1e-7)
    assert all(np.abs(x).max() > 1e-3 for x in matrices(owed_before))
    same(*(means((local.inner, local.drift)) for local in (states[1], found.opt_state)))
    moves, (all_reduce, local) = jax.jit(parts.meet)(found.chain, found.params)
    old, new = (optax.tree.get(x.outer, "trace") for x in (states[1], local))
    handed_on = jax.tree.map(lambda x, y: np.asarray(y) - OUTER.outer_momentum * np.asarray(x), old, new)
    came = jax.tree.map(np.subtract, owed_before, means(states[1].drift.tree))
    same(came, jax.tree.map(np.add, handed_on, owed(all_reduce.residual.tree)))
    ahead = jax.tree.map(lambda x, v: -OUTER.outer_learning_rate * (x + OUTER.outer_momentum * v), handed_on, new)
    same(ahead, moves)
