"""Replicas that sync every few steps, against replicas written out on one device; also one boundary late."""

import re
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import workload
from support.exchanging import CODECS, gradients, jitted_update
from support.local_replicas import LAYOUTS, inner, replicas_written_out, rows_of_replicas
from support.suite import SLOW
from support.workload import LORA

from compression.exchange import exchange
from compression.local_sgd import LocalSGD
from compression.methods import method_named
from compression.timings import delayed
from configs import base
from configs.schema import LocalSGDConfig, OptimizerConfig, ShardingConfig
from sharding import hlo
from sharding.mesh import find_nodes, make_mesh
from sharding.plan import ShardingPlan, gradient_specs
from sharding.redistribute import on_whole_tensors
from sharding.scopes import make_layout
from sharding.spec import ParamSpec, is_spec, place_all
from sharding.state import state_shardings
from sharding.step import first_state as begin
from training.experiment import make_experiment
from training.metrics_apart import of_all_at_once
from training.optimizer_chain import of_all_replicas, watch
from training.optimizers import guarded, make_optimizer

STEPS = 20
OUTER = {
    "diloco": dict(outer_learning_rate=0.7, outer_momentum=0.9),
    "mean": dict(outer_learning_rate=1.0, outer_momentum=0.0),
}


def config(inner_steps: int, outer: str) -> LocalSGDConfig:
    return LocalSGDConfig(inner_steps=inner_steps, **OUTER[outer])


def timing(plan: ShardingPlan, settings: LocalSGDConfig) -> LocalSGD:
    watching = partial(watch, each=True)
    return LocalSGD(exchange(plan), guarded(inner()), settings, plan.layout.num_replicas, watching)


@cache
def train(layout: str, settings: LocalSGDConfig, kind: str = "decoder") -> tuple[ShardingPlan, np.ndarray, Any, Any]:
    """Returns the losses of all steps, the last state and the compiled step."""
    plan = workload.plan(kind, **LAYOUTS[layout])
    step, state, data = workload.compiled_step(kind, plan, timing=timing(plan, settings))
    losses, state, _ = workload.run_steps(step, state, data, STEPS)
    return plan, losses, state, step


@pytest.mark.parametrize(
    ("layout", "outer", "kind"),
    [
        pytest.param("mics(2)", "diloco", "decoder", marks=SLOW),
        pytest.param("mics(2)", "diloco", f"{LORA}nf4", marks=SLOW),
        pytest.param("ddp", "mean", "decoder", marks=pytest.mark.slow),
    ],
)
def test_local_sgd_matches_separate_replicas(layout: str, outer: str, kind: str) -> None:
    settings = config(3, outer)
    plan, losses, state, _ = train(layout, settings, kind)
    wanted, shared = replicas_written_out(rows_of_replicas(plan), settings, STEPS, kind=kind)
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), state.params, shared)


def test_nothing_crosses_nodes_between_meetings() -> None:
    """One branch has all of the replica all-reduce and is taken at the third step; nothing else is sent."""
    plan, _, state, step = train("mics(2)", config(3, "diloco"))
    program = step.as_text()
    found = hlo.read_collectives(program, plan.layout.shape)
    assert {c.label for c in found if c.inter_bytes} == {"replica_all_reduce"}
    computations = {text.split(" ", 1)[0]: text for text in program.split("\n\n")}
    holders = {name for name, text in computations.items() if re.search(r"all-reduce.*all_reduce", text)}
    branches = set(re.findall(r"branch_computations=\{([^}]*)\}", program)[0].split(", "))
    assert holders and holders <= branches
    kept = jax.tree.leaves(state.opt_state.drift)
    assert all(x.addressable_shards[0].data.shape[0] == 1 for x in kept)  # a replica's own


@pytest.mark.slow
def test_a_run_with_a_residual_and_muon_sends_nothing_between_meetings() -> None:
    """Clipping, the guard, their counters and the residual's norm stay with the replica too."""
    config = workload.run_config(**LAYOUTS["mics(2)"])
    config.optimizer.name, config.compression.all_reduce, config.local_sgd.inner_steps = "muon", "int8", 2
    ex = make_experiment(base.typed(config))
    step = ex.compile_train_step()
    found = hlo.read_collectives(step.as_text() or "", ex.plan.layout.shape)
    assert {c.label for c in found if c.inter_bytes} == {"replica_all_reduce"}
    _, metrics = step(ex.init_state(), jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), ex.batches.shapes))
    for name in ("loss", "weight", "grad_norm", "residual_norm"):
        assert {x.data.shape for x in metrics[name].addressable_shards} == {(1,)}, name
    together = jax.jit(partial(of_all_at_once, whole=ex.replicated))
    gathers = hlo.read_collectives(together.lower(metrics).compile().as_text() or "", ex.plan.layout.shape)
    assert [c.kind for c in gathers] == ["all-gather"] * len({x.dtype for x in metrics.values() if x.ndim})
    assert {k: v.item() for k, v in together(metrics).items()} == pytest.approx(of_all_replicas(metrics))


@pytest.mark.slow
def test_a_replica_without_rows_counts_for_nothing() -> None:
    """Rows of weight zero pad a step: a replica with only these rows does not move parameters or change the loss."""
    plan = workload.plan("decoder", **LAYOUTS["mics(2)"])
    step, state, data = workload.compiled_step("decoder", plan, timing=timing(plan, config(1, "mean")))
    rows = rows_of_replicas(plan)
    weights = np.array(data["weights"])
    weights.reshape(-1, weights.shape[-1])[rows[1]] = 0
    data |= {"weights": jax.device_put(weights, data["weights"].sharding)}
    _, metrics = step(state, data)
    shares = [float(workload.value_and_grad("decoder")(workload.params("decoder"), r)[0]) for r in rows]
    counted = [workload.batch()["weights"][r].sum() / workload.batch()["weights"].sum() for r in rows]
    expected = sum(shares[r] for r in (0, 2, 3)) / sum(counted[r] for r in (0, 2, 3))
    found = of_all_replicas(metrics)
    assert float(found["loss"]) == pytest.approx(expected, rel=1e-5)
    assert int(found["skipped_steps"]) == 0 and list(np.asarray(metrics["grad_norm"]) == 0) == [
        False,
        True,
        False,
        False,
    ]


def test_replicas_that_never_have_rows_are_refused() -> None:
    """A sync weighs all replicas equally: a replica that does not move would hold the others back."""
    config = workload.run_config(**LAYOUTS["mics(2)"])
    config.local_sgd.inner_steps, config.batch.global_size = 2, 6  # of 8 devices with a row each
    with pytest.raises(ValueError, match=r"^batch\.global_size=6 leaves 1 of 4 replicas without rows, .*=8$"):
        make_experiment(base.typed(config))
    config.batch.global_size = 7
    make_experiment(base.typed(config))


def test_factored_moments_are_per_replica() -> None:
    """Those of Adafactor have no parameter's shape; between meetings nothing crosses nodes, as with Adam."""
    plan, params = workload.plan("tensors", **LAYOUTS["mics(2)"]), workload.params("tensors")
    factored = optax.adafactor(0.1, min_dim_size_to_factor=8)
    tx = LocalSGD(exchange(plan), guarded(factored), config(3, "diloco"), 4)
    states = workload.first_state("tensors", plan, tx).chain
    state = states[1]
    for x in jax.tree.leaves((state.inner, state.drift)):
        assert (x.shape[0], x.addressable_shards[0].data.shape[0]) == (4, 1)
    placed, _ = gradients(plan, 0)
    step = jax.jit(tx.update, out_shardings=(None, jax.tree.map(lambda x: x.sharding, states)))
    found = hlo.read_collectives(step.lower(placed, states, params).compile().as_text(), plan.layout.shape)
    assert {c.label for c in found if c.inter_bytes} == {"replica_all_reduce"}


def orthogonal(x: np.ndarray) -> np.ndarray:
    """Five steps of Newton-Schulz on `[..., inputs, outputs]`, as Muon's authors take them, scaled by the shape."""
    x = x / (np.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)
    for _ in range(5):
        square = x @ x.swapaxes(-2, -1)
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return np.sqrt(max(1.0, x.shape[-1] / x.shape[-2])) * x


@pytest.mark.usefixtures("muon_in_float32")
@pytest.mark.parametrize("how", [pytest.param(how, marks=() if how == "mics(2)" else SLOW) for how in LAYOUTS])
def test_muon_inside_is_its_rule_written_out_and_stays_in_the_replicas(how: str) -> None:
    """MuLoCo (arXiv 2505.23725), twenty steps of hidden matrices, stacked and not; a replica's lie on its devices."""
    specs = workload.TENSORS | {"kernel": ParamSpec(shape=(16, 32), dims=("embed", "mlp"))}
    chosen = {name: value for name, value in LAYOUTS[how].items() if name != "nodes"}
    layout = make_layout(ShardingConfig(**chosen), num_nodes=4 if how == "mics(2)" else 2, devices_per_node=2)
    mesh = make_mesh(layout.shape, find_nodes(jax.devices()[: layout.shape.num_devices], 2))
    plan = ShardingPlan(mesh=mesh, layout=layout, placements=place_all(specs, layout))
    values = base.get_config().optimizer.to_dict() | {"name": "muon", "weight_decay": 0.0, "schedule": "constant"}
    muon = OptimizerConfig(**values | {"warmup_steps": 0, "clip_norm": 0.0, "learning_rate": 0.1})
    settings = config(3, "diloco")
    inner = make_optimizer(muon, 20, specs, partial(on_whole_tensors, plan))
    tx = LocalSGD(exchange(plan), inner, settings, 4)
    params: Any = jax.tree.map(lambda s: jnp.ones(s.shape), specs, is_leaf=is_spec)
    places = state_shardings(plan, jax.eval_shape(partial(begin, tx), params)).chain
    states, params = jax.device_put(tx.init(params), places), jax.device_put(params, plan.shardings(layout.optimizer))
    where = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), gradient_specs(plan))
    update = jax.jit(tx.update, out_shardings=(plan.shardings(layout.optimizer), places))
    matrices = lambda tree: {"up": np.asarray(tree["layers"]["up"]), "kernel": np.asarray(tree["kernel"])}
    shared, rng = matrices(params), np.random.default_rng(0)
    momenta, drifts, velocity = (dict.fromkeys(shared, 0.0) for _ in range(3))
    for step in range(1, 21):
        grads_R = jax.tree.map(lambda p: rng.normal(size=(4, *p.shape)).astype(np.float32), params)
        moves, states = update(jax.device_put(grads_R, where), states, params)
        params = optax.apply_updates(params, moves)
        for name, g in matrices(grads_R).items():
            momenta[name] = m = 0.9 * momenta[name] + 0.1 * g
            ahead = 0.9 * m / (1 - 0.9 ** (step + 1)) + 0.1 * g / (1 - 0.9**step)
            drifts[name] = drifts[name] - 0.1 * orthogonal(ahead)
            if step % 3 == 0:
                outer = -drifts[name].mean(0)
                velocity[name] = 0.9 * velocity[name] + outer
                shared[name] = shared[name] - 0.7 * (outer + 0.9 * velocity[name])
                drifts[name] = 0.0
            np.testing.assert_allclose(matrices(params)[name], shared[name], atol=2e-4)
    for x in jax.tree.leaves((states[1].inner, states[1].drift)):
        assert (x.shape[0], x.addressable_shards[0].data.shape[0]) == (4, 1)
    text = update.lower(jax.device_put(grads_R, where), states, params).compile().as_text()
    found = hlo.read_collectives(text or "", layout.shape)
    assert {c.label for c in found if c.inter_bytes} == {"replica_all_reduce"}


def test_guard_skips_steps_of_single_replicas() -> None:
    """Its gradient is not finite; the others move, and all meet at the mean."""
    plan, settings = workload.plan("tensors", **LAYOUTS["mics(2)"]), config(1, "mean")
    params = workload.params("tensors")
    tx = LocalSGD(exchange(plan), guarded(optax.sgd(1.0)), settings, 4)
    good = jax.tree.map(lambda p: jnp.ones((4, *p.shape)), params)
    bad = jax.tree.map(lambda g: g.at[2].set(jnp.nan), good)
    moves, states = jax.jit(tx.update)(bad, tx.init(params), params)
    jax.tree.map(lambda x: np.testing.assert_allclose(x, -0.75, rtol=1e-5), moves)  # three of four
    assert list(states[1].inner.tree.skipped) == [0, 0, 1, 0]
    assert float(of_all_replicas(watch(states, each=True))["skipped_steps"]) == 1


def test_bytes_are_counted_in_the_steps_that_send_them() -> None:
    plan, params = workload.plan("tensors", **LAYOUTS["mics(2)"]), workload.params("tensors")
    tx = LocalSGD(exchange(plan, CODECS["int8"]), guarded(optax.sgd(1.0)), config(2, "mean"), 4)
    states, update, sent = tx.init(params), jitted_update(tx), []
    for step in range(4):
        _, states = update(gradients(plan, step)[0], states, params)
        sent.append(float(watch(states)["all_reduce_payload_bytes"]) > 0)
    assert sent == [False, True, False, True]


def test_delayed_updates_use_the_previous_gradients() -> None:
    """The result is the mean of the previous step's gradients; the first time, zeros."""
    plan = workload.plan("tensors", **LAYOUTS["mics(2)"])
    hop = delayed(exchange(plan), plan.layout.num_replicas)
    state, update = hop.init(workload.params("tensors")), jax.jit(hop.update)
    before: Any = jax.tree.map(np.zeros_like, workload.params("tensors"))
    for step in range(STEPS):
        placed, grads = gradients(plan, step)
        out, state = update(placed, state)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-8), out, before)
        before = jax.tree.map(lambda g: g.mean(0), grads)


@pytest.mark.slow
def test_waiting_gradients_that_are_not_finite_cost_one_step() -> None:
    """A checkpoint of an independent replica may have some: it learns of them a step later."""
    plan = workload.plan("tensors", **LAYOUTS["mics(2)"])
    params = workload.params("tensors")
    method = method_named("none").transform(workload.setup(plan, "none", delayed=True))
    tx = optax.chain(method, guarded(optax.sgd(1.0)))
    good = jax.tree.map(lambda p: jnp.ones((4, *p.shape)), params)
    state = tx.init(params)
    bad = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state[0].waiting.tree)
    state = (state[0]._replace(waiting=replace(state[0].waiting, tree=bad)), state[1])
    for moved in (0, -1):
        moves, state = tx.update(good, state, params)
        assert all((np.asarray(x) == moved).all() for x in jax.tree.leaves(moves)) and int(state[1].skipped) == 1


def test_waiting_gradients_survive_a_non_finite_step() -> None:
    plan = workload.plan("tensors", **LAYOUTS["mics(2)"])
    params = workload.params("tensors")
    tx = workload.chained(delayed(exchange(plan), 4), optax.sgd(1.0))
    good = jax.tree.map(lambda p: jnp.ones((4, *p.shape)), params)
    bad = good | {"table": good["table"].at[2, 2, 2].set(jnp.inf)}
    update = jitted_update(tx)
    _, state = update(good, tx.init(params), params)
    moves, state = update(bad, state, params)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(moves)) and int(state[1].skipped) == 1
    moves, state = update(good, state, params)
    assert all((np.asarray(x) == -1).all() for x in jax.tree.leaves(moves)) and int(state[1].skipped) == 1
