"""Hop two inside the last micro-step's backward pass: the same numbers and bytes as after it, a layer at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workload

from compression.methods import method_named
from configs import base, tiny
from configs.schema import Config
from sharding.accumulation import Accumulating, Rule, scan_layers
from sharding.gradients import accumulated, batch_gradients
from sharding.hlo import Collective, read_collectives
from sharding.hop_two import Early
from sharding.mesh import INTER_AXES
from training.experiment import make_experiment

STRATEGIES = {
    "ddp": dict(strategy="ddp"),
    "hsdp": dict(strategy="hsdp"),
    # hop two reduce-scatters over all devices, over the nodes, or inside the node and all-reduces between nodes
    "zero1": dict(strategy="zero1"),
    "node/node/all": dict(strategy="custom", parameters="node", gradients="node", optimizer="all"),
    "none/none/node": dict(strategy="custom", parameters="none", gradients="none", optimizer="node"),
    # the gradients of each micro-step are cut further than the parameters before hop two
    "none/node/node": dict(strategy="custom", parameters="none", gradients="node", optimizer="node"),
    "none/node/all": dict(strategy="custom", parameters="none", gradients="node", optimizer="all"),
    "2/4/8": dict(strategy="custom", parameters="2", gradients="4", optimizer="8"),
    **{f"mics({p})": dict(strategy="mics", partition_size=p) for p in (1, 2, 4)},
}
LAYERS = 3
HOPS = ("gather", "hop_one")
CODEC = dict(block=16)  # small rows would mostly be filled up


def losses(kind: str, strategy: str, accumulation: int) -> np.ndarray:
    plan = workload.plan(kind, overlap=True, **STRATEGIES[strategy])
    early = workload.early(plan, "none")
    return workload.losses(kind, plan, accumulation=accumulation, early=early)


@pytest.mark.parametrize(
    ("kind", "strategy", "accumulation"),
    [
        ("decoder", "mics(2)", 1),
        ("decoder", "mics(4)", 2),
        ("decoder", "ddp", 2),
        ("encoder", "hsdp", 3),
        ("encoder", "mics(1)", 2),
        ("resnet", "mics(2)", 2),
        ("decoder", "zero1", 2),
        ("resnet", "node/node/all", 1),
        ("encoder", "none/none/node", 2),
        ("decoder", "none/node/node", 2),
        ("resnet", "none/node/all", 2),
        ("encoder", "none/node/all", 1),
        ("decoder", "2/4/8", 3),
    ],
)
def test_losses_equal_a_single_device(kind: str, strategy: str, accumulation: int) -> None:
    np.testing.assert_allclose(losses(kind, strategy, accumulation), workload.single_device_losses(kind), rtol=1e-5)


def crossing(collectives: list[Collective]) -> list[Collective]:
    return [c for c in collectives if c.label == "hop_two" and set(c.axes) & set(INTER_AXES)]


@pytest.mark.parametrize(
    ("method", "strategy", "late"),
    [
        pytest.param("none", "mics(2)", False, marks=pytest.mark.slow),
        ("int8", "mics(2)", False),
        ("none", "zero1", False),
        pytest.param("none", "none/none/node", False, marks=pytest.mark.slow),
        ("int8", "node/node/all", False),
        ("none", "none/node/node", False),
        ("none", "none/node/all", False),
        ("int8", "none/node/node", False),
        pytest.param("none", "mics(2)", True, marks=pytest.mark.slow),
        ("int8", "mics(2)", True),
    ],
)
def test_hop_two_runs_once_per_layer_and_sends_no_more(method: str, strategy: str, late: bool) -> None:
    """All but the first layer's exchanges are in the loop of the last backward pass; delayed, pieces in all of them."""
    plan = workload.plan("decoder", overlap=True, num_layers=LAYERS, **STRATEGIES[strategy])
    codec: dict[str, Any] = {"delayed": late} | (CODEC if method == "int8" else {})
    tx = method_named(method).transform(workload.setup(plan, method, **codec))
    counted = []
    for early in (None, workload.early(plan, method, **codec)):
        step, *_ = workload.compiled_step("decoder", plan, num_layers=LAYERS, hop_two=tx, early=early, accumulation=2)
        counted.append(crossing(read_collectives(step.as_text() or "", plan.layout.shape)))
    after, inside = (sum(c.times * c.inter_bytes for c in found) for found in counted)
    times = {c.times for c in counted[1] if c.loop_depth}
    if late:
        assert max(times) == 2 * (LAYERS - 1)
        assert inside == pytest.approx(after, rel=0.01 if method == "none" else 0.15)  # filled up to equal pieces
    else:
        assert times == {LAYERS - 1}
        assert after <= inside <= after * (1.0 if method == "none" else 1.1)  # a layer's rows are filled up


@pytest.mark.parametrize(
    ("method", "late", "strategy"),
    [
        ("int8", False, "mics(2)"),
        pytest.param("two_bit", False, "mics(2)", marks=pytest.mark.slow),
        ("int8", False, "node/node/all"),
        ("int8", False, "none/node/node"),
        pytest.param("int8", False, "none/node/all", marks=pytest.mark.slow),
        pytest.param("int8", False, "zero1", marks=pytest.mark.slow),
        ("int8", True, "mics(2)"),
        *(pytest.param(method, True, "mics(2)", marks=pytest.mark.slow) for method in ("int4", "two_bit", "one_bit")),
    ],
)
def test_what_was_handed_on_and_what_is_kept_is_the_whole_gradient(method: str, late: bool, strategy: str) -> None:
    """With gradient descent at a rate of 1, the parameters first move by what hop two hands on; delayed, a step later.

    Delayed, both runs have the same gradients to hand on: those at the start.
    """
    plan = workload.plan("decoder", overlap=True, num_layers=LAYERS, **STRATEGIES[strategy])
    start = jax.tree.map(np.asarray, workload.params("decoder", LAYERS))

    def steps(hop_two: str, early: Any) -> Any:
        setup = workload.setup(plan, hop_two, delayed=late, **CODEC)
        chain = dict(hop_two=method_named(hop_two).transform(setup), tx=workload.optax.sgd(1.0))
        compiled, state, data = workload.compiled_step(
            "decoder", plan, num_layers=LAYERS, accumulation=2, early=early, **chain
        )
        return workload.run_steps(compiled, state, data, 2 if late else 1)[1:]

    plain, _ = steps("none", None)
    state, metrics = steps(method, workload.early(plan, method, delayed=late, **CODEC))
    exchange = state.hop_two.exchange if late else state.hop_two
    residual = exchange.residual.tree

    def check(p: np.ndarray, whole: jax.Array, handed_on: jax.Array, kept_R: jax.Array) -> None:
        moved, kept = p - np.asarray(handed_on), np.asarray(kept_R).sum(0)
        np.testing.assert_allclose(moved + kept, p - np.asarray(whole), atol=1e-6)

    jax.tree.map(check, start, plain.params, state.params, residual)
    assert sum(np.abs(np.asarray(x)).sum() for x in jax.tree.leaves(residual)) > 0
    assert int(exchange.step) == 1 + late and float(metrics["hop_two_ratio"]) > 2


def test_counts_equal_the_exchange_after_the_backward_pass_but_for_filling_up() -> None:
    plan = workload.plan("decoder", overlap=True, num_layers=LAYERS, **STRATEGIES["mics(2)"])
    tx = method_named("int8").build(workload.setup(plan, "int8", **CODEC))
    found = []
    for early in (None, workload.early(plan, "int8", **CODEC)):
        step = workload.compiled_step("decoder", plan, num_layers=LAYERS, hop_two=tx, early=early)
        found.append(workload.run_steps(*step, 1)[2])
    after, inside = found
    assert float(inside["hop_two_fraction_sent"]) == float(after["hop_two_fraction_sent"]) == 1
    payload = [float(metrics["hop_two_payload_bytes"]) for metrics in found]
    assert payload[0] <= payload[1] < 1.1 * payload[0]


@pytest.mark.parametrize(
    ("kind", "strategy", "accumulation", "method"),
    [
        pytest.param("decoder", "mics(2)", 2, "none", marks=pytest.mark.slow),
        pytest.param("decoder", "mics(2)", 2, "bf16", marks=pytest.mark.slow),
        pytest.param("decoder", "ddp", 1, "none", marks=pytest.mark.slow),
        ("encoder", "mics(4)", 3, "none"),
        pytest.param("resnet", "mics(2)", 2, "none", marks=pytest.mark.slow),
        ("decoder", "none/node/node", 2, "none"),
    ],
)
def test_delayed_beside_the_micro_steps_equals_delayed_after_them(
    kind: str, strategy: str, accumulation: int, method: str
) -> None:
    """In pieces that do not divide the shards, too."""
    found = []
    for overlap in (False, True):
        plan = workload.plan(kind, overlap=overlap, **STRATEGIES[strategy])
        hop_two = method_named(method).transform(workload.setup(plan, method, kind=kind, delayed=True))
        beside = workload.early(plan, method, delayed=True) if overlap else None
        step = workload.compiled_step(
            kind, plan, accumulation=accumulation, hop_two=hop_two, early=beside, tx=workload.optax.sgd(0.5)
        )
        found.append(workload.run_steps(*step, 4)[0])
    assert abs(found[0][0] - found[0][-1]) > 1e-3
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.parametrize(("late", "pieces"), [(False, 1), (True, 2)])
def test_every_exchange_draws_its_own_random_numbers(late: bool, pieces: int) -> None:
    """Each group, layer and step has a key of its own, and delayed each piece: rounding errors must not add up."""
    plan = workload.plan("decoder", overlap=True, num_layers=LAYERS, **STRATEGIES["mics(2)"])
    params, data = workload.params("decoder", LAYERS), workload.put_batch(plan, 2)

    def draw(places: Any, shares: list[jax.Array], kept: None, key: jax.Array) -> Any:
        return [jnp.full_like(x, jax.random.uniform(key)) for x in shares], None, []

    @jax.jit
    def drawn(done: jax.Array) -> Any:
        waiting = jax.tree.map(lambda p: jnp.zeros((4, *p.shape)), params) if late else None
        early = Early(exchange=draw, done=done, waiting=waiting)
        loss = accumulated(workload.model("decoder", LAYERS).objective)
        return batch_gradients(loss, plan, params, data, early=early)[1].mean_R

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
    [
        ("int8", "mics(2)"),
        ("int8", "node/node/all"),
        pytest.param("two_bit", "mics(2)", marks=pytest.mark.slow),
        pytest.param("one_bit", "zero1", marks=pytest.mark.slow),
    ],
)
def test_a_gradient_that_overflows_in_some_layers_skips_the_step_and_empties_the_residuals(
    method: str, strategy: str
) -> None:
    """What follows is what would follow from the parameters before, with nothing left to send."""
    plan = workload.plan("decoder", overlap=True, **STRATEGIES[strategy])
    tx = method_named(method).build(workload.setup(plan, method, **CODEC))
    early = workload.early(plan, method, **CODEC)
    step, state, data = workload.compiled_step(
        "decoder", plan, hop_two=tx, early=early, loss=overflowing, accumulation=2
    )
    state, first = step(state, data)
    params, residual = jax.tree.map(np.array, (state.params, state.hop_two.residual.tree))
    assert any(x.any() for x in jax.tree.leaves(residual))
    state, skipped = step(state, {**data, "weights": data["weights"].at[-1, 0].set(OVERFLOW)})
    assert not np.isfinite(skipped["grad_norm"]) and int(state.opt_state.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, params, state.params)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.hop_two.residual.tree))
    for _ in range(2):
        state, metrics = step(state, data)
        assert 0.2 < float(metrics["grad_norm"]) / float(first["grad_norm"]) < 5


@pytest.mark.parametrize("method", [pytest.param("none", marks=pytest.mark.slow), "int8"])
def test_values_that_are_not_finite_skip_the_step_and_lose_nothing_that_was_delayed(method: str) -> None:
    """The mean of what waits, and what the codec keeps, are together what they were."""
    plan = workload.plan("decoder", overlap=True, **STRATEGIES["mics(2)"])
    hop_two = method_named(method).transform(workload.setup(plan, method, delayed=True, **CODEC))
    beside = workload.early(plan, method, delayed=True, **CODEC)
    step, state, data = workload.compiled_step("decoder", plan, hop_two=hop_two, early=beside)
    state, _ = step(state, data)

    def to_come(state: Any) -> Any:
        found = jax.tree.map(lambda x: np.asarray(x).mean(0), state.hop_two.waiting.tree)
        if method == "none":
            return found
        kept_R = state.hop_two.exchange.residual.tree
        return jax.tree.map(lambda x, kept: x + np.asarray(kept).sum(0), found, kept_R)

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
        ("decoder", dict(strategy="zero3")),
        ("decoder", dict(strategy="zero3", hierarchical=False)),
        ("decoder", dict(strategy="zero3", gather="node")),
        ("resnet", dict(strategy="mics", partition_size=4, gather="node")),
        ("encoder", dict(strategy="zero2")),
        ("decoder", dict(strategy="zero1")),
        ("decoder", dict(strategy="mics", partition_size=2, two_hop=False)),
        ("decoder", dict(strategy="hsdp", tensor=2)),
    ],
)
def test_losses_with_hop_two_after_the_pipelined_loops_equal_a_single_device(kind: str, how: dict[str, Any]) -> None:
    plan = workload.plan(kind, overlap=True, **how)
    np.testing.assert_allclose(workload.losses(kind, plan), workload.single_device_losses(kind), rtol=1e-5)


@pytest.mark.parametrize(
    "how", [dict(strategy="zero3"), pytest.param(dict(strategy="mics", partition_size=4), marks=pytest.mark.slow)]
)
def test_what_is_gathered_between_nodes_for_a_micro_step_is_gathered_a_layer_at_a_time(how: dict[str, Any]) -> None:
    """As many bytes cross as without overlap, once a micro-step and not twice, and the losses are the same."""
    found, sent = [], []
    for overlap in (False, True):
        plan = workload.plan("decoder", overlap=overlap, num_layers=LAYERS, gather="node", **how)
        step = workload.compiled_step("decoder", plan, num_layers=LAYERS, accumulation=2)
        collectives = read_collectives(step[0].as_text() or "", plan.layout.shape)
        sent.append({label: sum(c.times * c.inter_bytes for c in collectives if c.label == label) for label in HOPS})
        found.append(workload.run_steps(*step, 3)[0])
        gathers = [c for c in collectives if c.label == "gather" and set(c.axes) & set(INTER_AXES)]
    assert {c.times for c in gathers if c.loop_depth == 2} == {2 * (LAYERS - 1)}  # of the program with overlap
    np.testing.assert_allclose(*found, rtol=1e-5)
    assert sent[1] == pytest.approx(sent[0], rel=1e-6) and min(sent[1].values()) > 0


@pytest.mark.parametrize("gather", ["layer", "node"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_stack_of_few_layers_is_pipelined_too(num_layers: int, gather: str) -> None:
    found = []
    for overlap in (False, True):
        plan = workload.plan("decoder", num_layers=num_layers, overlap=overlap, gather=gather, **STRATEGIES["mics(4)"])
        step = workload.compiled_step("decoder", plan, num_layers=num_layers, accumulation=1)
        found.append(workload.run_steps(*step, 3)[0])
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_a_group_that_is_gathered_twice_is_refused() -> None:
    """Its sums would count twice."""
    plan = workload.plan("decoder", **STRATEGIES["mics(2)"])
    model, batch = workload.model("decoder"), workload.put_batch(plan, 2)

    def loss(params: Any, batch: Any, gather: Any) -> jax.Array:
        gather("embed", params["embed"])
        return model.loss(params, batch, gather)

    with pytest.raises(ValueError, match="gathers embed twice"):
        jax.eval_shape(lambda p: batch_gradients(accumulated(loss), plan, p, batch), workload.params("decoder"))


def test_what_is_passed_to_every_layer_gets_its_gradient() -> None:
    """Of a loss through three pipelined layers, against the plain loop."""
    stack, x, scale = jnp.arange(6.0).reshape(3, 2), jnp.ones(2), jnp.array([0.5, 2.0])
    rule = Rule(name="layers", add=lambda sums, grads: sums + grads, overlap=True)

    def loss(scale: jax.Array, layers: Any) -> jax.Array:
        def body(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
            return x + w * scale * x

        return scan_layers(body, x, layers, scale, gather=lambda w: w, rematerialise=lambda f: f).sum()

    plain = jax.grad(loss)(scale, stack)
    pipelined = jax.grad(lambda scale: loss(scale, Accumulating(values=stack, sums=0 * stack, rule=rule)))(scale)
    np.testing.assert_allclose(pipelined, plain, rtol=1e-6)


def test_the_config_decides_where_hop_two_runs() -> None:
    inside = {"sharding.overlap": "on", "compression.hop_two": "int8"}
    late = {"compression.delayed": True}
    for changes, waits in (({}, False), (inside, False), (late, True), (inside | late, True)):
        experiment = make_experiment(tiny_config(changes))
        assert experiment.chain.early is not None
        early = jax.eval_shape(experiment.chain.early, experiment.state_shapes.chain)
        assert (early.waiting is not None) == waits
    for after in ({"sharding.overlap": "off"}, inside | {"local_sgd.inner_steps": 2}):
        assert make_experiment(tiny_config(after)).chain.early is None


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


@pytest.mark.parametrize(
    ("how", "compression", "method"),
    [
        (dict(strategy="zero3"), {}, "none"),
        (dict(strategy="zero1"), {"delayed": True}, "none"),
        (dict(strategy="custom", parameters="none", gradients="node", optimizer="all"), {"delayed": True}, "none"),
        (dict(strategy="hsdp", tensor=2), {}, "none"),
        (dict(strategy="hsdp"), {"delayed": True}, "power_sgd"),
        (dict(strategy="hsdp"), {}, "power_sgd"),
    ],
)
def test_hop_two_comes_after_the_backward_pass_unless_it_can_take_each_layer_by_itself(
    how: dict, compression: dict, method: str
) -> None:
    plan = workload.plan("decoder", overlap=True, **how)
    assert method_named(method).early(workload.setup(plan, method, kind="decoder", **compression)) is None
