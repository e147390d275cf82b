"""Local SGD that synchronises a part of each tensor in every step, against its rule written out with numpy."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import workload
from checkpointing import abstract
from test_exchange_checkpoints import restore, save
from test_local_sgd import LAYOUTS, LEARNING_RATE, inner, rows_of_replicas
from test_overlapped_step import crossing, tiny_config

from compression.local_sgd import drift, local_sgd, streamed
from compression.methods import method_named
from configs.schema import LocalSGDConfig
from optimizers import guarded
from sharding.hlo import read_collectives
from sharding.plan import ShardingPlan
from sharding.step import Chain
from training.experiment import make_experiment
from training.optimizer_chain import watch

PARTS = 3  # divides neither matrices nor vectors
STEPS = 7
DILOCO = LocalSGDConfig(inner_steps=PARTS, outer_learning_rate=0.7, outer_momentum=0.9, streaming=True)
MEAN = LocalSGDConfig(inner_steps=PARTS, outer_learning_rate=1.0, outer_momentum=0.0, streaming=True)


def make_plan(layout: str, *, overlap: bool, nodes: int = 4, num_layers: int = 2) -> ShardingPlan:
    how: dict[str, Any] = {"nodes": nodes} | LAYOUTS[layout]
    return workload.plan("decoder", overlap=overlap, num_layers=num_layers, **how)


def compiled(
    plan: ShardingPlan,
    settings: LocalSGDConfig,
    tx: optax.GradientTransformation,
    method: str = "none",
    num_layers: int = 2,
    **codec: Any,
) -> tuple[Any, Any, Any]:
    """Returns the compiled step, its first state and its batch."""
    setup = workload.setup(plan, method, kind="decoder", **codec)
    each = guarded(tx)
    local = local_sgd(method_named(method).build(setup), each, settings, plan.layout.num_replicas)
    beside = streamed(method_named(method), setup, settings) if settings.streaming else None
    chain = Chain(local, early=beside, drift=drift, watch=watch)
    return workload.compiled_step("decoder", plan, chain=chain, num_layers=num_layers)


def parts_of(x: jax.Array, *, stacked: bool, parts: int = PARTS) -> np.ndarray:
    """Returns the part that each element of a parameter is in: equal stretches of each device's shard of each layer."""
    found = np.full(x.shape, -1)
    for shard in x.addressable_shards:
        layers = shard.data.shape[0] if stacked else 1
        size = shard.data.size // layers
        numbers = np.arange(size) // -(-size // parts)
        found[shard.index] = np.tile(numbers, layers).reshape(shard.data.shape)
    assert found.min() == 0 and found.max() <= parts - 1
    return found


def all_parts(params: Any) -> Any:
    return {name: jax.tree.map(partial(parts_of, stacked=name == "layers"), group) for name, group in params.items()}


def replicas_written_out(rows: list[np.ndarray], parts: Any, settings: LocalSGDConfig) -> tuple[list[float], Any]:
    """Returns the losses and the shared parameters of the rule; `rows` are those of each replica."""
    value_and_grad = workload.value_and_grad("decoder")
    tree = jax.tree.structure(parts)
    shared = [np.asarray(x) for x in jax.tree.leaves(workload.params("decoder"))]
    number = jax.tree.leaves(parts)
    velocity = [np.zeros_like(x) for x in shared]  # the outer one
    momenta, drifts = ([[np.zeros_like(x) for x in shared] for _ in rows] for _ in range(2))
    losses, mu, rate = [], settings.outer_momentum, settings.outer_learning_rate
    for step in range(STEPS):
        value, sent = 0.0, [sum(-d for d in column) / len(rows) for column in zip(*drifts, strict=True)]
        here = [n == step % PARTS for n in number]
        for r in range(len(rows)):
            own = tree.unflatten([p + d for p, d in zip(shared, drifts[r], strict=True)])
            loss, grads = value_and_grad(own, rows[r])
            value += float(loss)
            grads = [len(rows) * np.asarray(g) for g in jax.tree.leaves(grads)]
            clip = min(1, 0.8 / np.sqrt(sum(np.square(g).sum() for g in grads)))
            momenta[r] = [0.9 * m + clip * g for m, g in zip(momenta[r], grads, strict=True)]
            moves = [-LEARNING_RATE * m for m in momenta[r]]
            drifts[r] = [np.where(h, m, d + m) for h, m, d in zip(here, moves, drifts[r], strict=True)]
        losses.append(value)
        velocity = [np.where(h, mu * v + g, v) for h, v, g in zip(here, velocity, sent, strict=True)]
        ahead = [g + mu * v for g, v in zip(sent, velocity, strict=True)]  # Nesterov
        shared = [p - np.where(h, rate * a, 0) for p, h, a in zip(shared, here, ahead, strict=True)]
    return losses, tree.unflatten(shared)


@cache
def diloco(layout: str, overlap: bool) -> tuple[ShardingPlan, Any, Any, Any]:
    """Returns the plan, the compiled step, a copy of its first state on the host, with its shardings, and its batch."""
    plan = make_plan(layout, overlap=overlap)
    step, state, data = compiled(plan, DILOCO, inner())
    return plan, step, (jax.tree.map(np.array, state), abstract(state)), data


def begin(first: tuple[Any, Any]) -> Any:
    """Returns the first state again: a step donates its own."""
    return jax.tree.map(lambda x, placed: jax.device_put(x, placed.sharding, may_alias=False), *first)


@pytest.mark.parametrize(
    ("layout", "overlap"),
    [
        ("mics(2)", True),
        pytest.param("mics(2)", False, marks=pytest.mark.slow),
        ("ddp", False),
        pytest.param("ddp", True, marks=pytest.mark.slow),
    ],
)
def test_it_is_the_rule_written_out(layout: str, overlap: bool) -> None:
    """Beside the micro-steps and after them, in pieces that do not divide the parts."""
    plan, step, first, data = diloco(layout, overlap)
    losses, state, _ = workload.run_steps(step, begin(first), data, STEPS)
    wanted, shared = replicas_written_out(rows_of_replicas(plan), all_parts(state.params), DILOCO)
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), state.params, shared)
    assert abs(losses[0] - losses[-1]) > 1e-2


def test_of_a_replica_that_moves_alone_the_others_take_their_share() -> None:
    """Only its rows weigh anything: the others never drift, and a part moves by a quarter of what it had drifted."""
    plan = make_plan("mics(2)", overlap=True)
    step, state, data = compiled(plan, MEAN, optax.sgd(LEARNING_RATE))
    own = rows_of_replicas(plan)[2]
    weights = np.zeros(data["weights"].shape, np.float32).reshape(workload.ROWS, -1)
    weights[own] = 1
    data["weights"] = jax.device_put(weights.reshape(data["weights"].shape), data["weights"].sharding)
    parts = all_parts(state.params)
    for t in range(2 * PARTS):
        before = jax.tree.map(np.array, (state.params, state.opt_state.drift.tree))
        state, _ = step(state, data)

        def check(number: np.ndarray, p: np.ndarray, d_R: np.ndarray, now: jax.Array, left_R: jax.Array, t=t) -> None:
            np.testing.assert_allclose(now, p + np.where(number == t % PARTS, d_R[2] / 4, 0), atol=1e-6)
            assert not np.asarray(left_R)[[0, 1, 3]].any()

        jax.tree.map(check, parts, *before, state.params, state.opt_state.drift.tree)
    assert all(np.asarray(x)[2].any() for x in jax.tree.leaves(state.opt_state.drift.tree))


def test_a_step_sends_a_share_of_hop_two_beside_its_micro_steps() -> None:
    """`2 (M/p) (R-1)/R` bytes in as many steps as there are parts, but for what fills them up."""
    plan, layers = make_plan("mics(2)", overlap=True, num_layers=3), 3
    step, state, _ = compiled(plan, DILOCO, inner(), num_layers=layers)
    found = crossing(read_collectives(step.as_text() or "", plan.layout.shape))
    whole = sum(4 * x.size for x in jax.tree.leaves(state.params))
    sent = sum(c.times * c.inter_bytes for c in found)
    assert 1 <= PARTS * sent / (2 * (whole / 2) * 3 / 4) < 1.03
    assert max(c.times for c in found) == 2 * (layers - 1)  # micro-steps, and layers in their loop


def test_resumed_in_the_middle_it_is_the_same_run(tmp_path: Path) -> None:
    _, step, first, data = diloco("mics(2)", True)
    _, state, _ = workload.run_steps(step, begin(first), data, PARTS + 1)
    save(tmp_path, state, PARTS + 1)
    again = restore(tmp_path, first[1])
    assert any(np.asarray(x).any() for x in jax.tree.leaves(again.opt_state.drift))
    for _ in range(2):
        (again, _), (state, _) = step(again, data), step(state, data)
    jax.tree.map(np.testing.assert_array_equal, again, state)


def drifted(state: Any) -> Any:
    """Returns a state whose replicas are somewhere else each."""
    rng = np.random.default_rng(0)

    def fill(x: jax.Array) -> jax.Array:
        return jax.device_put(rng.normal(size=x.shape).astype(np.float32), x.sharding)

    opt_state = state.opt_state._replace(
        drift=jax.tree.map(fill, state.opt_state.drift), step=jax.device_put(np.int32(1), state.opt_state.step.sharding)
    )
    return replace(state, opt_state=opt_state)


@pytest.mark.slow
def test_on_another_number_of_replicas_the_outer_steps_are_the_same(tmp_path: Path) -> None:
    """Of replicas that do not move any more: two take the mean of what four had drifted."""
    standing = optax.sgd(0.0)
    step, state, data = compiled(make_plan("mics(2)", overlap=True), DILOCO, standing)
    state = drifted(state)
    save(tmp_path, state, 1)
    fewer, other, rows = compiled(make_plan("mics(2)", overlap=True, nodes=2), DILOCO, standing)
    other = restore(tmp_path, abstract(other))
    assert jax.tree.leaves(other.opt_state.drift)[0].shape[0] == 2
    start = jax.tree.map(np.array, state.params)
    for _ in range(PARTS):
        (state, _), (other, _) = step(state, data), fewer(other, rows)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), other.params, state.params)
    moved = jax.tree.map(lambda x, y: np.abs(np.asarray(x) - y).mean(), state.params, start)
    assert min(jax.tree.leaves(moved)) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("settings", [MEAN, replace(MEAN, streaming=False)], ids=["streaming", "meetings"])
def test_on_another_number_of_replicas_what_had_drifted_and_was_owed_arrives(
    settings: LocalSGDConfig, tmp_path: Path
) -> None:
    """Of replicas that do not move any more: parameters, mean drift and residuals together stay what they are."""

    def on_nodes(nodes: int, rate: float) -> tuple[Any, Any, Any]:
        plan = make_plan("mics(2)", overlap=settings.streaming, nodes=nodes)
        return compiled(plan, settings, optax.sgd(rate), "int8", block=16)

    def together(state: Any) -> Any:
        drift_R, residual_R = state.opt_state.drift.tree, state.hop_two.residual.tree
        return jax.tree.map(
            lambda p, d_R, owed_R: np.asarray(p) + np.asarray(d_R).mean(0) - np.asarray(owed_R).sum(0),
            state.params,
            drift_R,
            residual_R,
        )

    step, state, data = on_nodes(4, LEARNING_RATE)
    _, state, _ = workload.run_steps(step, state, data, PARTS + 1)  # one step past a meeting
    for kept_R in (state.opt_state.drift, state.hop_two.residual):
        assert any(np.asarray(x).any() for x in jax.tree.leaves(kept_R))
    save(tmp_path, state, PARTS + 1)
    expected = together(state)
    fewer, first, rows = on_nodes(2, 0.0)
    found = restore(tmp_path, abstract(first))
    for _ in range(PARTS):
        found, _ = fewer(found, rows)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), together(found), expected)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(found.opt_state.drift))


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_with_a_codec_what_is_not_sent_is_kept(overlap: bool) -> None:
    """A part moves by what was decoded of the outer gradient, minus the drift; the residuals have the rest of it."""
    plan = make_plan("mics(2)", overlap=overlap)
    step, state, data = compiled(plan, MEAN, optax.sgd(0.0), "int8", block=16)
    state, _ = step(drifted(state), data)  # part 1
    parts = all_parts(state.params)
    before = jax.tree.map(np.array, (state.params, state.opt_state.drift.tree, state.hop_two.residual.tree))
    state, metrics = step(state, data)

    def check(number: Any, p: Any, d_R: Any, owed_R: Any, now: jax.Array, residual_R: jax.Array) -> None:
        here, kept_R = number == 2, np.asarray(residual_R)
        wanted = np.where(here, d_R.mean(0), 0) - owed_R.sum(0)
        np.testing.assert_allclose(now - p - kept_R.sum(0), wanted, atol=1e-5)
        np.testing.assert_array_equal(kept_R[:, ~here], owed_R[:, ~here])

    jax.tree.map(check, parts, *before, state.params, state.hop_two.residual.tree)
    assert any(x.any() for x in jax.tree.leaves(before[2]))
    kept = jax.tree.leaves(state.hop_two.residual)
    assert sum(np.abs(np.asarray(x)).sum() for x in kept) > 0
    assert float(metrics["hop_two_ratio"]) > 2


def test_the_config_builds_it_with_and_without_overlap() -> None:
    for overlap in ("on", "off"):
        changes = {"sharding.overlap": overlap, "local_sgd.inner_steps": 4, "local_sgd.streaming": True}
        experiment = make_experiment(tiny_config(changes))
        assert experiment.chain.early is not None
        assert experiment.chain.early(experiment.init_state().chain).parts == 4
        jax.eval_shape(experiment.train_step, experiment.state_shapes, experiment.batches.shapes)
