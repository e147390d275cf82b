"""The replica all-reduce in the last backward pass: numbers and bytes as after it, a layer at a time."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import workload
from support.overlapping import STRATEGIES, crossing
from support.suite import SLOW
from support.tables import every_row
from support.workload import LORA

from compression.local_sgd import LocalSGD, StreamingLocalSGD
from compression.methods import method_named
from compression.timings import Delayed, Overlapped
from configs import base, tiny
from configs.schema import Config
from models.remat import rematerialise
from sharding.accumulation import Accumulating, AccumulationRule, scan_layers
from sharding.gradients import accumulated, replica_gradients
from sharding.hlo import Collective, read_collectives
from sharding.in_step_exchange import (
    ExchangeInEachMicroStep,
    ExchangeInLastMicroStep,
    exchanged_gradients,
    gradients_and_exchange,
)
from sharding.mesh import INTER_AXES
from sharding.plan import ShardingPlan, gradient_specs
from sharding.step import AfterMicroSteps
from training.experiment import make_experiment

LAYERS = 4
HOPS = ("gather", "group_reduce_scatter")
CODEC = dict(block=16)  # small rows would mostly be filled up


def bytes_between_nodes(collectives: list[Collective]) -> float:
    return sum(c.times * c.inter_bytes for c in crossing(collectives))


def bytes_of_all_at_once(kind: str, plan: ShardingPlan, method: str) -> float:
    """The bytes that a device sends to other nodes if the replica all-reduce takes all gradients at once."""
    tx = method_named(method).build(workload.setup(plan, method, kind=kind, **CODEC))
    state = workload.first_state(kind, plan, optax.chain(tx, optax.identity()), LAYERS).all_reduce
    replicas = plan.layout.num_replicas
    grads_R = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(
            (replicas, *x.shape), jnp.float32, sharding=jax.NamedSharding(plan.mesh, spec)
        ),
        workload.trained_and_frozen(kind, LAYERS)[0],
        gradient_specs(plan),
    )
    text = jax.jit(tx.update).lower(grads_R, state).compile().as_text()
    return bytes_between_nodes(read_collectives(text or "", plan.layout.shape))


@pytest.mark.parametrize(
    ("kind", "strategy", "accumulation"),
    [
        pytest.param("decoder", "2/4/8", 3, marks=SLOW),
        pytest.param("decoder", "mics(4)", 2, marks=pytest.mark.slow),
        pytest.param("encoder", "mics(1)", 3, marks=SLOW),
        pytest.param("resnet", "mics(2)", 1, marks=SLOW),
        pytest.param("encoder", "none/none/node", 2, marks=pytest.mark.slow),
        pytest.param("resnet", "none/node/all", 2, marks=pytest.mark.slow),
        *(pytest.param("decoder", name, 2, marks=pytest.mark.slow) for name in ("ddp", "zero1", "none/node/node")),
    ],
)
def test_all_reduce_in_the_last_backward_pass(kind: str, strategy: str, accumulation: int) -> None:
    """The losses of a single device; each layer but the first is exchanged in the loop, and no byte more is sent."""
    plan = workload.plan(kind, overlap=True, num_layers=LAYERS, **STRATEGIES[strategy])
    timing = workload.in_micro_steps(plan, "none")
    step = workload.compiled_step(kind, plan, accumulation=accumulation, num_layers=LAYERS, timing=timing)
    found = workload.run_steps(*step, workload.NUM_STEPS)[0]
    np.testing.assert_allclose(found, workload.single_device_losses(kind, num_layers=LAYERS), rtol=1e-5)
    collectives = read_collectives(step[0].as_text() or "", plan.layout.shape)
    assert bytes_between_nodes(collectives) == pytest.approx(bytes_of_all_at_once(kind, plan, "none"), abs=16)
    in_loops = {c.times for c in crossing(collectives) if c.loop_depth}
    assert in_loops == (set() if kind == "resnet" else {LAYERS - 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method", "late", "strategy"),
    [
        pytest.param("decoder", "int8", False, "mics(2)", marks=pytest.mark.slow),
        ("decoder", "int8", False, "node/node/all"),
        ("decoder", "int8", True, "mics(2)"),
        pytest.param("decoder", "int4", False, "none/node/node", marks=pytest.mark.slow),
        pytest.param("decoder", "statistical", True, "mics(2)", marks=pytest.mark.slow),
        (f"{LORA}nf4", "int8", False, "mics(2)"),
    ],
)
def test_what_was_handed_on_and_what_is_kept_is_the_whole_gradient(
    kind: str, method: str, late: bool, strategy: str
) -> None:
    """With gradient descent at a rate of 1, parameters first move by the all-reduce's result; delayed, a step later.

    Each layer, delayed each piece of it, is exchanged separately, for no more bytes than its padding.
    """
    plan = workload.plan(kind, overlap=True, num_layers=LAYERS, **STRATEGIES[strategy])
    start = jax.tree.map(np.asarray, workload.trained_and_frozen(kind, LAYERS)[0])
    timing = workload.in_micro_steps(plan, method, optax.sgd(1.0), delayed=late, **CODEC)
    step = workload.compiled_step(kind, plan, num_layers=LAYERS, timing=timing)
    _, state, metrics = workload.run_steps(*step, 2 if late else 1)
    exchange = state.all_reduce.exchange if late else state.all_reduce
    residual = exchange.residual.tree

    def check(p: np.ndarray, gradient: jax.Array, handed_on: jax.Array, kept_R: jax.Array) -> None:
        moved, kept = p - np.asarray(handed_on), np.asarray(kept_R).sum(0)
        np.testing.assert_allclose(moved + kept, gradient, atol=1e-6)

    _, gradient = workload.value_and_grad(kind, LAYERS)(start, jnp.arange(workload.ROWS))
    jax.tree.map(check, start, gradient, state.params, residual)
    assert sum(np.abs(np.asarray(x)).sum() for x in jax.tree.leaves(residual)) > 0
    assert int(exchange.step) == 1 + late and float(metrics["all_reduce_ratio"]) > 2

    found = read_collectives(step[0].as_text() or "", plan.layout.shape)
    assert max(c.times for c in crossing(found) if c.loop_depth) == (2 if late else 1) * (LAYERS - 2)
    at_once = bytes_of_all_at_once(kind, plan, method)
    assert at_once <= bytes_between_nodes(found) <= (1.15 if late else 1.1) * at_once
    sent = [c.times * c.payload_bytes / (c.group_size if c.kind == "all-gather" else 1) for c in crossing(found)]
    # besides the payload: counts, and whether all is finite
    assert 0 <= sum(sent) - float(metrics["all_reduce_payload_bytes"]) <= 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy", "accumulation"),
    [
        pytest.param("encoder", "mics(4)", 3, marks=pytest.mark.slow),
        pytest.param("decoder", "none/node/node", 2, marks=pytest.mark.slow),
        pytest.param("decoder", "ddp", 1, marks=pytest.mark.slow),
        pytest.param("resnet", "mics(2)", 2, marks=pytest.mark.slow),
        (f"{LORA}nf4", "mics(2)", 2),
    ],
)
def test_delayed_beside_the_micro_steps(kind: str, strategy: str, accumulation: int) -> None:
    """Each update is of the gradients before, in pieces that do not divide the shards, and no more is sent."""
    plan = workload.plan(kind, overlap=True, num_layers=LAYERS, **STRATEGIES[strategy])
    timing = workload.in_micro_steps(plan, "none", optax.sgd(0.5), kind=kind, delayed=True)
    step = workload.compiled_step(kind, plan, accumulation=accumulation, num_layers=LAYERS, timing=timing)
    p, wanted, gradient = workload.trained_and_frozen(kind, LAYERS)[0], [], None
    for _ in range(4):
        loss, following = workload.value_and_grad(kind, LAYERS)(p, jnp.arange(workload.ROWS))
        wanted.append(float(loss))
        p = p if gradient is None else jax.tree.map(lambda x, g: x - 0.5 * g, p, gradient)
        gradient = following
    assert abs(wanted[0] - wanted[-1]) > 1e-3
    np.testing.assert_allclose(workload.run_steps(*step, 4)[0], wanted, rtol=1e-5)
    found = read_collectives(step[0].as_text() or "", plan.layout.shape)
    tensors = sum(len(x) if name == "layers" else 1 for name, group in p.items() for x in jax.tree.leaves(group))
    filling = 2 * 4 * tensors * (accumulation - 1)  # padding of each tensor of each layer to equal pieces
    more = bytes_between_nodes(found) - bytes_of_all_at_once(kind, plan, "none")
    assert -16 <= more <= filling + 64  # XLA combines a few scalars with it


@pytest.mark.slow
@pytest.mark.parametrize(("late", "pieces"), [(False, 1), (True, 2)])
def test_every_exchange_draws_its_own_random_numbers(late: bool, pieces: int) -> None:
    """Each group, layer and step has a separate key, and delayed each piece: rounding errors must not add up."""
    plan = workload.plan("decoder", overlap=True, num_layers=LAYERS, **STRATEGIES["mics(2)"])
    params, data = workload.params("decoder", LAYERS), workload.put_batch(plan, 2)

    def draw(places: Any, shares: list[jax.Array], kept: None, key: jax.Array) -> Any:
        return [jnp.full_like(x, jax.random.uniform(key)) for x in shares], None, []

    @jax.jit
    def drawn(done: jax.Array) -> Any:
        fields: dict[str, Any] = dict(exchange=draw, num_counts=0, done=done, kept=None)
        micro_steps = accumulated(workload.model("decoder", LAYERS).objective)
        if not late:
            loop = ExchangeInLastMicroStep(**fields)
            return exchanged_gradients(micro_steps, plan, params, data, loop)[0].mean
        pending = jax.tree.map(lambda p: jnp.zeros((4, *p.shape)), params)
        loop = ExchangeInEachMicroStep(pending=pending, **fields)
        return gradients_and_exchange(micro_steps, plan, params, data, loop)[0][1].mean

    found = [drawn(jnp.int32(done)) for done in range(2)]
    groups = LAYERS + len(params) - 1
    assert np.unique(np.concatenate([x.ravel() for x in jax.tree.leaves(found)])).size == 2 * groups * pieces


OVERFLOW = 1000.0  # a row's weight that makes `overflowing` overflow


def overflowing(params: Any, batch: Any, gather: Any) -> Any:
    """The decoder's loss, whose gradients are large in the head and infinite in the embedding if a weight says so."""
    overflows = batch["weights"].max() >= OVERFLOW
    factors = {"head": jnp.where(overflows, 1e6, 1.0), "embed": jnp.where(overflows, jnp.inf, 1.0)}

    def scaling_gather(name: str, group: Any) -> Any:
        values = gather(name, group)
        return jax.tree.map(lambda x: scaled_backwards(x, factors[name]), values) if name in factors else values

    return workload.model("decoder").objective(params, batch, scaling_gather)


@jax.custom_vjp
def scaled_backwards(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns `x`; its gradient is multiplied by the factor."""
    del factor
    return x


scaled_backwards.defvjp(lambda x, factor: (x, factor), lambda factor, g: (g * factor, jnp.zeros_like(factor)))


@pytest.mark.parametrize(
    ("method", "strategy"),
    [pytest.param("int8", "node/node/all", marks=SLOW), pytest.param("statistical", "mics(2)", marks=pytest.mark.slow)],
)
def test_a_gradient_that_overflows_in_some_layers_skips_the_step_and_empties_the_residuals(
    method: str, strategy: str
) -> None:
    """The run continues as from the parameters before, with nothing left to send."""
    plan = workload.plan("decoder", overlap=True, **STRATEGIES[strategy])
    timing = workload.in_micro_steps(plan, method, **CODEC)
    step, state, data = workload.compiled_step("decoder", plan, timing=timing, loss=overflowing, accumulation=2)
    state, first = step(state, data)
    params, residual = jax.tree.map(np.array, (state.params, state.all_reduce.residual.tree))
    assert any(x.any() for x in jax.tree.leaves(residual))
    state, skipped = step(state, {**data, "weights": data["weights"].at[-1, 0].set(OVERFLOW)})
    assert not np.isfinite(skipped["grad_norm"]) and int(state.opt_state.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, params, state.params)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.all_reduce.residual.tree))
    for _ in range(2):
        state, metrics = step(state, data)
        assert 0.2 < float(metrics["grad_norm"]) / float(first["grad_norm"]) < 5


@pytest.mark.slow
def test_values_that_are_not_finite_skip_the_step_and_lose_nothing_that_was_delayed() -> None:
    """The mean of the pending gradients plus the codec's residual does not change."""
    plan = workload.plan("decoder", overlap=True, **STRATEGIES["mics(2)"])
    timing = workload.in_micro_steps(plan, "int8", delayed=True, **CODEC)
    step, state, data = workload.compiled_step("decoder", plan, timing=timing)
    state, _ = step(state, data)

    def to_come(state: Any) -> Any:
        waiting_R, kept_R = state.all_reduce.waiting.tree, state.all_reduce.exchange.residual.tree
        return jax.tree.map(lambda x, kept: np.asarray(x).mean(0) + np.asarray(kept).sum(0), waiting_R, kept_R)

    params, expected = jax.tree.map(np.array, state.params), to_come(state)
    assert min(np.abs(x).max() for x in jax.tree.leaves(expected)) > 1e-4
    data["weights"] = data["weights"].at[0, 0].set(np.inf)
    for _ in range(2):
        state, _ = step(state, data)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), to_come(state), expected)
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    assert int(state.opt_state.skipped) == 2


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("decoder", dict(strategy="zero3", hierarchical=False)),
        pytest.param("resnet", dict(strategy="mics", partition_size=4, gather="node"), marks=SLOW),
        pytest.param("encoder", dict(strategy="zero2"), marks=pytest.mark.slow),
        pytest.param("decoder", dict(strategy="mics", partition_size=2, two_hop=False), marks=pytest.mark.slow),
        pytest.param("decoder", dict(strategy="hsdp", tensor=2), marks=SLOW),
    ],
)
def test_losses_with_all_reduce_after_the_pipelined_loops_equal_a_single_device(kind: str, how: dict[str, Any]) -> None:
    plan = workload.plan(kind, overlap=True, **how)
    np.testing.assert_allclose(workload.losses(kind, plan), workload.single_device_losses(kind), rtol=1e-5)


@pytest.mark.slow
def test_what_is_gathered_between_nodes_for_a_micro_step_is_gathered_a_layer_at_a_time() -> None:
    """As many bytes cross as without overlap, once a micro-step and not twice, and the losses are the same."""
    found, sent = [], []
    for overlap in (False, True):
        plan = workload.plan("decoder", overlap=overlap, num_layers=LAYERS, gather="node", strategy="zero3")
        step = workload.compiled_step("decoder", plan, num_layers=LAYERS)
        collectives = read_collectives(step[0].as_text() or "", plan.layout.shape)
        sent.append({label: sum(c.times * c.inter_bytes for c in collectives if c.label == label) for label in HOPS})
        found.append(workload.run_steps(*step, 3)[0])
        gathers = [c for c in collectives if c.label == "gather" and set(c.axes) & set(INTER_AXES)]
    assert {c.times for c in gathers if c.loop_depth == 2} == {2 * (LAYERS - 1)}  # the program with overlap
    np.testing.assert_allclose(*found, rtol=1e-5)
    assert sent[1] == pytest.approx(sent[0], rel=1e-6) and min(sent[1].values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("gather", [pytest.param(name, marks=SLOW) for name in ("layer", "node")])
def test_a_stack_of_one_layer_is_pipelined_too(gather: str) -> None:
    plan = workload.plan("decoder", num_layers=1, overlap=True, gather=gather, **STRATEGIES["mics(4)"])
    step = workload.compiled_step("decoder", plan, num_layers=1, accumulation=1)
    wanted = workload.single_device_losses("decoder", num_layers=1)
    np.testing.assert_allclose(workload.run_steps(*step, workload.NUM_STEPS)[0], wanted, rtol=1e-5)


def test_a_group_that_is_gathered_twice_is_refused() -> None:
    """Its sums would count twice."""
    plan = workload.plan("decoder", **STRATEGIES["mics(2)"])
    model, batch = workload.model("decoder"), workload.put_batch(plan, 2)

    def loss(params: Any, batch: Any, gather: Any) -> jax.Array:
        gather("embed", params["embed"])
        return model.loss(params, batch, gather)

    with pytest.raises(ValueError, match="gathers embed twice"):
        jax.eval_shape(lambda p: replica_gradients(accumulated(loss), plan, p, batch), workload.params("decoder"))


@pytest.mark.parametrize(("policy", "products"), [("full", 2 + 3 * 3 - 1), ("dots", 2 + 3 * 2), ("none", 2 + 3 * 2)])
def test_pipelined_layers_have_the_gradients_of_a_plain_loop(policy: str, products: int) -> None:
    """Also for values that are passed to every layer. Only `full` computes a product again in the backward pass.

    The program has two layers forward and three backward: a loop's, and the layers outside it. XLA merges the last
    layer's two computations.
    """
    stack, x, scale = jnp.sin(jnp.arange(36.0)).reshape(4, 3, 3), jnp.ones((2, 3)), jnp.array([0.5, 2.0, 1.0])
    rule = AccumulationRule(name="layers", add=lambda sums, grads, layer: sums + grads, overlap=True)

    def loss(scale: jax.Array, layers: Any) -> jax.Array:
        def body(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
            return x + jnp.tanh(x @ w) * scale[None]

        how = partial(rematerialise, policy=policy, in_scan=True)
        return scan_layers(body, x, layers, scale, gather=lambda w: w, rematerialise=how).sum()

    def pipelined(scale: jax.Array, sums: jax.Array) -> jax.Array:
        return loss(scale, Accumulating(values=stack, sums=sums, rule=replace(rule, uses=[])))

    found = jax.grad(pipelined, argnums=(0, 1))(scale, 0 * stack)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), found, jax.grad(loss, argnums=(0, 1))(scale, stack))
    text = jax.jit(jax.grad(pipelined, argnums=(0, 1))).lower(scale, 0 * stack).compile().as_text()
    assert (text or "").count(" dot(") == products


def test_the_config_decides_where_all_reduce_runs() -> None:
    inside = {"sharding.overlap": "on", "compression.all_reduce": "int8"}
    late, streaming = {"compression.delayed": True}, {"local_sgd.inner_steps": 4, "local_sgd.streaming": True}
    off = {"sharding.overlap": "off"}
    timings = [
        ({}, Overlapped),
        (inside, Overlapped),
        (inside | late, Delayed),
        (streaming, StreamingLocalSGD),
        (off | streaming, StreamingLocalSGD),
        (off, AfterMicroSteps),
        (inside | off | late, AfterMicroSteps),
        (inside | {"local_sgd.inner_steps": 2}, LocalSGD),
    ]
    for changes, timing in timings:
        assert type(make_experiment(tiny_config(changes)).chain) is timing


def tiny_config(changes: dict[str, Any]) -> Config:
    """The config of configs/tiny.py:gpt2 on 4 nodes of 2, in groups of 2."""
    config = tiny.get_config("gpt2")
    config.update_from_flattened_dict(
        {
            "mesh.devices_per_node": 2,
            "sharding.strategy": "mics",
            "sharding.partition_size": 2,
            "model.remat": "full",
            "num_steps": 20,
            **changes,
        }
    )
    return base.typed(config)


@every_row(
    ("how", "compression", "method"),
    [
        (dict(strategy="zero3"), {}, "none"),
        (dict(strategy="zero1"), {"delayed": True}, "none"),
        (dict(strategy="hsdp", tensor=2), {}, "none"),
        (dict(strategy="hsdp"), {}, "one_bit_adam"),
    ],
)
def test_all_reduce_comes_after_the_backward_pass_unless_it_can_take_each_layer_by_itself(
    how: dict, compression: dict, method: str
) -> None:
    plan = workload.plan("decoder", overlap=True, **how)
    assert not method_named(method).runs_in_micro_steps(workload.setup(plan, method, kind="decoder", **compression))
