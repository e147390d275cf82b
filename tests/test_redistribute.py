"""Muon on 8 devices: whole tensors, and bytes and products of the compiled update by their formulas."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from optax import contrib
from support import workload

from compression.exchange import exchange
from configs.schema import OptimizerConfig
from planner.kernels import products
from sharding.hlo import Collective, read_collectives
from sharding.hlo_program import parse_program
from sharding.mesh import find_nodes, make_mesh
from sharding.plan import ShardingPlan, gradient_specs
from sharding.redistribute import on_whole_tensors
from sharding.scopes import make_layout
from sharding.spec import ParamSpec, place_all
from sharding.state import state_shardings
from sharding.step import first_state
from training.optimizers import make_optimizer, make_schedule, per_layer

pytestmark = pytest.mark.usefixtures("muon_in_float32")

STEPS, LAYERS = 2, 3
CONV = ("channels_out", "channels_in", "height", "width")
# stacks of a number that no scope divides, matrices of one shape that are cut on other dims, convolutions, a matrix
# that is on every device whole, and what is none of Muon's
SPECS: Any = {
    "layers": {
        "query": ParamSpec(shape=(LAYERS, 16, 24), dims=("layers", "embed", "heads")),
        "key": ParamSpec(shape=(LAYERS, 16, 24), dims=("layers", "embed", "kv_heads")),
        "out": ParamSpec(shape=(LAYERS, 24, 16), dims=("layers", "heads", "embed")),
        "norm": ParamSpec(shape=(LAYERS, 16), dims=("layers", "norm")),
    },
    "odd": ParamSpec(shape=(6, 24), dims=("width", "pooled")),
    "pool": ParamSpec(shape=(16, 40), dims=("embed", "pooled")),
    "kernel": ParamSpec(shape=(8, 4, 3, 3), dims=CONV),
    "kept": ParamSpec(shape=(5, 7), dims=("embed", "pooled"), replicate=True),
    "head": ParamSpec(shape=(16, 32), dims=("embed", "vocab")),
}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "zero3 flat": {"strategy": "zero3", "hierarchical": False},
    "hsdp": {"strategy": "hsdp", "per_node": 4},
    "mics(2)": {"partition_size": 2},
    "mics(2) in nodes of 4": {"partition_size": 2, "per_node": 4},
    "mics(4) over two nodes": {"partition_size": 4},
    "node, node, all": {"strategy": "custom", "parameters": "node", "gradients": "node", "optimizer": "all"},
    "none, node, 4": {"strategy": "custom", "parameters": "none", "gradients": "node", "optimizer": 4},
    "tensor": {"partition_size": 4, "per_node": 4, "tensor": 2},
    "tensor over nodes": {"strategy": "zero3", "per_node": 4, "tensor": 2},
    "auto": {"partition_size": 4, "partitioner": "auto"},
}


QUICK = ("mics(4) over two nodes", "tensor over nodes")


def cases(all_of_them: dict[str, Any], quick: tuple[str, ...]) -> Any:
    return [pytest.param(case, marks=() if case in quick else pytest.mark.slow) for case in all_of_them]


def make_plan(specs: Any, *, per_node: int = 2, tensor: int = 1, **sharding: Any) -> ShardingPlan:
    layout = make_layout(
        *workload.strategy(**sharding), num_nodes=8 // per_node, devices_per_node=per_node, tensor=tensor
    )
    mesh = make_mesh(layout.shape, find_nodes(jax.devices(), per_node))
    return ShardingPlan(mesh=mesh, layout=layout, placements=place_all(specs, layout))


def muon_config() -> OptimizerConfig:
    return OptimizerConfig(
        name="muon",
        learning_rate=0.02,
        warmup_steps=0,
        schedule="constant",
        weight_decay=0.0,
        clip_norm=0.0,
        b2=0.99,
        eps=1e-7,
    )


def values(seed: int, specs: Any = SPECS, *lead: int) -> Any:
    """Multiples of 1/64: their means over 2, 4 or 8 replicas are exact, in any order."""
    rng = np.random.default_rng(seed)
    draw = lambda spec: jnp.asarray(rng.integers(-255, 256, (*lead, *spec.shape)) / 64)
    return jax.tree.map(draw, specs, is_leaf=lambda x: isinstance(x, ParamSpec))


def compiled_update(plan: ShardingPlan, specs: Any) -> tuple[jax.stages.Compiled, Any, Any, Any]:
    """Returns `update(grads_R, state, params)`, the first state, the parameters, and where the gradients lie."""
    tx = optax.chain(exchange(plan), make_optimizer(muon_config(), STEPS, specs, partial(on_whole_tensors, plan)))
    params = values(0, specs)
    places = state_shardings(plan, jax.eval_shape(partial(first_state, tx), params)).chain
    state = jax.jit(tx.init, out_shardings=places)(params)
    params = jax.device_put(params, plan.shardings(plan.layout.optimizer))
    grad_places = jax.tree.map(lambda spec: NamedSharding(plan.mesh, spec), gradient_specs(plan))
    grads = jax.device_put(values(1, specs, plan.layout.num_replicas), grad_places)
    update = jax.jit(tx.update, out_shardings=(plan.shardings(plan.layout.optimizer), places))
    return update.lower(grads, state, params).compile(), state, params, grad_places


@pytest.mark.parametrize("case", cases(CASES, QUICK))
def test_the_function_sees_tensors_whole(case: str) -> None:
    """Newton-Schulz does not mind rows out of order; this one weighs each value by its place, and by its kind."""
    plan = make_plan(SPECS, **CASES[case])
    specs = jax.tree.leaves(SPECS, is_leaf=lambda x: isinstance(x, ParamSpec))
    stacked = ["layers" in spec.dims for spec in specs]
    placed = jax.device_put(values(0), plan.shardings(plan.layout.optimizer))
    stacks = [x if s else x[None] for x, s in zip(jax.tree.leaves(placed), stacked, strict=True)]

    def by_place(kind: Any, x: Any) -> Any:
        return x * (kind + np.arange(x[0].size, dtype=np.float32).reshape(1, *x.shape[1:]))

    kinds = [i % 2 for i in range(len(stacks))]
    found = jax.jit(lambda xs: on_whole_tensors(plan, by_place, specs, kinds, xs))(stacks)
    for kind, x, y in zip(kinds, stacks, found, strict=True):
        np.testing.assert_array_equal(y, by_place(kind, np.asarray(x)))


# ---------------------------------------------------------------------------------------------- bytes and work

MATRICES = [(8, 16, 24), (4, 16, 48), (4, 48, 16)]  # stacks: number of matrices, rows, columns
EVEN: Any = {
    "layers": {
        "query": ParamSpec(shape=(4, 16, 24), dims=("layers", "embed", "heads")),
        "key": ParamSpec(shape=(4, 16, 24), dims=("layers", "embed", "heads")),
        "up": ParamSpec(shape=(4, 16, 48), dims=("layers", "embed", "mlp")),
        "down": ParamSpec(shape=(4, 48, 16), dims=("layers", "mlp", "embed")),
        "norm": ParamSpec(shape=(4, 16), dims=("layers", "norm")),
    }
}
# devices of the optimizer's scope inside a node, nodes of it, copies inside a node, and whether both levels in one
SHARED: dict[str, tuple[int, int, int, bool]] = {
    "ddp": (1, 1, 2, False),
    "zero1": (2, 4, 1, False),
    "zero3": (2, 4, 1, False),
    "zero3 flat": (2, 4, 1, True),
    "hsdp": (4, 1, 1, False),
    "mics(2)": (2, 1, 1, False),
    "mics(2) in nodes of 4": (2, 1, 2, False),
    "mics(4) over two nodes": (2, 2, 1, False),
    "auto": (2, 2, 1, False),
}
QUICK_BYTES = ("mics(2) in nodes of 4",)


def sent(sharing: tuple[int, int, int, bool], matrices: Sequence[tuple[int, int, int]]) -> tuple[float, float]:
    """Returns the bytes that a device sends between nodes and inside its node, both ways; padded with zero matrices."""
    k, nodes, copies, flat = sharing
    p = k * nodes
    num_bytes = 4 * sum((n + -n % (p * copies)) * rows * columns for n, rows, columns in matrices)
    shards = num_bytes / p
    there_and_back = 2 * shards / copies
    inside = there_and_back * ((k - 1) / p if flat else (k - 1) / k)
    return there_and_back * (nodes - 1) / nodes, inside + shards * (copies - 1) / copies


def newton_schulz_flops(devices: int, matrices: Sequence[tuple[int, int, int]]) -> int:
    """Five steps of X X^T, its square, and their product with X, of the smaller dim squared, on each device."""
    flops = 0
    for n, rows, columns in matrices:
        a, b = min(rows, columns), max(rows, columns)
        flops += -(-n // devices) * 5 * (2 * a * a * b + 2 * a**3 + 2 * a * a * b)
    return flops


def product_flops(text: str) -> float:
    """Returns the floating-point operations of a program's matrix products, all in loops of five steps."""
    assert set(re.findall(r"known_trip_count.*?(\d+)", text)) == {"5"}
    program = parse_program(text)
    return 5 * sum(
        product.flops
        for computation in program.computations.values()
        for instruction in computation.instructions
        if instruction.opcode != "fusion"  # what is fused is a computation too
        for product in products(instruction, computation, program)
    )


@pytest.mark.parametrize("case", cases(SHARED, QUICK_BYTES))
def test_bytes_and_work_of_each_device_are_those_of_the_formulas(case: str) -> None:
    """Between nodes none unless the optimizer's scope spans them; and a share of the products."""
    plan = make_plan(EVEN, **CASES[case])
    text = compiled_update(plan, EVEN)[0].as_text() or ""
    found = [c for c in read_collectives(text, plan.layout.shape) if c.label == "orthogonalise"]
    k, nodes, copies, _ = SHARED[case]
    by_level = [sum(getattr(c, f"{level}_bytes") * c.times for c in found) for level in ("inter", "intra")]
    assert by_level == pytest.approx(sent(SHARED[case], MATRICES))
    if nodes == 1:
        assert by_level[0] == 0
    assert others(text, plan) == []
    assert product_flops(text) == newton_schulz_flops(k * nodes * copies, MATRICES)


def others(text: str, plan: ShardingPlan) -> list[Collective]:
    """Returns the collectives except the replica all-reduce, the matrices, norms and flags."""
    found = read_collectives(text, plan.layout.shape)
    return [c for c in found if c.label not in ("replica_all_reduce", "orthogonalise") and c.num_elements > 10]


# ---------------------------------------------------------------------------------------------- the state of optax


def test_states_are_those_of_optax_and_go_on_from_them() -> None:
    """A checkpoint of a run whose chain was optax's muon is read, and the next update equals optax's."""
    config = replace(muon_config(), weight_decay=0.3)
    schedule = make_schedule(config, STEPS)
    hidden = lambda spec: len(spec.dims) - ("layers" in spec.dims) > 1 and "vocab" not in spec.dims

    def dims(spec: ParamSpec) -> contrib.MuonDimensionNumbers | None:
        if not hidden(spec):
            return None
        return contrib.MuonDimensionNumbers((1, 2, 3), (0,)) if spec.dims == CONV else contrib.MuonDimensionNumbers()

    def plain(specs: Any) -> optax.GradientTransformation:
        of_specs = lambda function: jax.tree.map(function, specs, is_leaf=lambda x: isinstance(x, ParamSpec))
        muon = contrib.muon(
            schedule, beta=config.momentum, eps=config.eps, muon_weight_dimension_numbers=of_specs(dims)
        )
        adam = optax.nadam(schedule, config.b1, config.b2, config.eps)
        labels = of_specs(lambda spec: "muon" if hidden(spec) else "adam")
        matrices = of_specs(lambda spec: len(spec.dims) - ("layers" in spec.dims) > 1)
        decay = optax.add_decayed_weights(lambda step: -config.weight_decay * schedule(step), matrices)
        return optax.chain(optax.partition({"muon": muon, "adam": adam}, labels), decay)

    theirs, ours, params = per_layer(plain, SPECS), make_optimizer(config, STEPS, SPECS), values(0)
    state = jax.jit(theirs.update)(values(1), theirs.init(params), params)[1]
    outer = ours.init(params)
    (own,) = outer.inner
    assert jax.tree.structure(own) == jax.tree.structure(state)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(own)] == [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
    grads = values(2)
    expected, after = jax.jit(theirs.update)(grads, state, params)
    got, last = jax.jit(ours.update)(grads, outer._replace(inner=(state,)), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), last.inner, (after,))
