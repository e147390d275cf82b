"""Every optimizer behind the replica all-reduce on 8 devices: the updates of one device, and where its state lies."""

from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from support import workload
from support.optimizing import GRADS, PARAMS, SPECS, STEPS, close, flat, optimizer_config, run
from support.suite import SLOW
from support.tables import every_row

from compression.exchange import exchange
from configs import base
from configs.schema import ShardingConfig
from configs.schema.sections import OPTIMIZERS as NAMES
from sharding import hlo
from sharding.mesh import find_nodes, make_mesh
from sharding.padding import padded, unpadded
from sharding.plan import ShardingPlan, gradient_specs
from sharding.redistribute import on_whole_tensors
from sharding.scopes import make_layout
from sharding.spec import Placement, is_placement, place_all
from sharding.state import OnTrueShapes, owner, state_shardings
from sharding.step import TrainState, first_state
from training.experiment import make_experiment
from training.optimizers import make_optimizer

pytestmark = pytest.mark.usefixtures("muon_in_float32")

LAYOUTS: dict[str, dict[str, Any]] = {
    "mics2": {"strategy": "mics", "partition_size": 2},
    "zero1": {"strategy": "zero1"},
    "node, node, all": {"strategy": "custom", "parameters": "node", "gradients": "node", "optimizer": "all"},
}
NODES = {"zero1 with padding": 3}  # six devices, which divide no dim but the vocabulary; four nodes for the others
LAYOUTS |= {"zero1 with padding": {"strategy": "zero1"}}


def make_sharded(layout_name: str) -> ShardingPlan:
    nodes = NODES.get(layout_name, 4)
    layout = make_layout(ShardingConfig(**LAYOUTS[layout_name]), num_nodes=nodes, devices_per_node=2)
    mesh = make_mesh(layout.shape, find_nodes(jax.devices()[: 2 * nodes], 2))
    return ShardingPlan(mesh=mesh, layout=layout, placements=place_all(SPECS, layout))


QUICK = {("adamw", "node, node, all"), ("muon", "mics2"), ("adafactor", "zero1 with padding")}
OFTEN = {*((name, "node, node, all") for name in NAMES), ("adamw", "mics2")}  # in test-all
OFTEN |= {("muon", "zero1 with padding"), ("adamw", "zero1 with padding"), ("adafactor", "zero1")}


def marks_of(name: str, layout: str) -> Any:
    if (name, layout) in QUICK:
        return ()
    return SLOW if (name, layout) in OFTEN else pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "layout_name"),
    [pytest.param(name, layout, marks=marks_of(name, layout)) for name in NAMES for layout in LAYOUTS],
)
def test_sharded_updates_equal_one_device(name: str, layout_name: str) -> None:
    """Gradients `[R, ...]` of differing replicas go through the all-reduce and the optimizer, three steps."""
    plan = make_sharded(layout_name)
    config, replicas = optimizer_config(name), plan.layout.num_replicas
    on_true_shapes = OnTrueShapes(plan, make_optimizer(config, STEPS, SPECS, partial(on_whole_tensors, plan)))
    optimizer = optax.GradientTransformation(on_true_shapes.init, on_true_shapes.update)
    tx, stored = optax.chain(exchange(plan), optimizer), plan.map(padded, PARAMS)
    shapes = jax.eval_shape(partial(first_state, tx), stored)
    places = state_shardings(plan, shapes)
    scope = plan.shardings(plan.layout.optimizer)
    state = jax.jit(tx.init, out_shardings=places.chain)(stored)
    params = jax.device_put(stored, scope)
    grad_places = jax.tree.map(lambda spec: NamedSharding(plan.mesh, spec), gradient_specs(plan))

    def step(grads_R: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads_R, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(step, out_shardings=(scope, places.chain))
    rng = np.random.default_rng(7)
    for grads in GRADS[:3]:
        noise_R = jax.tree.map(lambda g: rng.normal(size=(replicas, *g.shape)).astype(np.float32), grads)
        grads_R = jax.tree.map(lambda g, n: g[None] + n - n.mean(axis=0, keepdims=True), grads, noise_R)
        params, state = jitted(jax.device_put(plan.map(with_ones, grads_R), grad_places), state, params)
    expected, one_device = run(config, GRADS[:3])
    close(plan.map(unpadded, params), flat(expected), rtol=2e-3 if name == "muon" else 2e-4)
    assert float(state[1].grad_norm) == pytest.approx(float(one_device.grad_norm), rel=1e-5)
    check_places(plan, shapes, state[1])


def with_ones(p: Placement, grads_R: np.ndarray) -> np.ndarray:
    """Gradients `[R, ...]` with ones in the padding, where a sign codec leaves no zero."""
    return np.where(padded(p, np.ones_like(grads_R)), padded(p, grads_R), 1)


def check_places(plan: ShardingPlan, shapes: TrainState, opt_state: Any) -> None:
    """Moments lie as their parameter does over the optimizer's scope; counters and factors on every device."""
    degree = plan.layout.shape.size(plan.layout.optimizer)
    params = {
        jax.tree_util.keystr(path): (x.shape, p.dim)
        for (path, x), p in zip(
            jax.tree_util.tree_leaves_with_path(shapes.params),
            jax.tree.leaves(plan.placements, is_leaf=is_placement),
            strict=True,
        )
    }
    moments = 0
    for path, x in jax.tree_util.tree_leaves_with_path(opt_state):
        local = x.addressable_shards[0].data.shape
        name = jax.tree_util.keystr(path)
        owner = [value for key, value in params.items() if name.endswith(key.replace("['layers']", ""))]
        if owner and any(shape == x.shape for shape, _ in owner):
            dim = next(dim for shape, dim in owner if shape == x.shape)
            assert local == tuple(n // degree if i == dim else n for i, n in enumerate(x.shape)), name
            moments += 1
        else:
            assert local == x.shape, name
            assert x.size <= 3 or x.ndim <= 2, name
    assert moments >= len(params) - 2  # adafactor keeps no moment of what it factors


@pytest.mark.slow
def test_the_step_of_a_run_sends_nothing_but_all_reduce_between_nodes() -> None:
    """Whole matrices of Muon are put together inside a node: the scope of mics(2)."""
    config = workload.run_config(**LAYOUTS["mics2"])
    config.optimizer.name = "muon"
    experiment = make_experiment(base.typed(config))
    layout, text = experiment.plan.layout, experiment.compile_train_step().as_text()
    sent = hlo.bytes_per_step(hlo.read_collectives(text, layout.shape))["collective_inter_bytes"]
    shard_bytes, replicas = 4 * experiment.model.num_params / layout.partition_size, layout.num_replicas
    assert sent == pytest.approx(2 * shard_bytes * (replicas - 1) / replicas, rel=1e-3)


@every_row("stack", ["layers", "blocks"])
def test_a_stack_of_any_name_has_its_state_where_it_is(stack: str) -> None:
    """Muon's momentum of it lies under keys of optax, which stand between the name of the stack and the parameter's."""
    shape = jax.ShapeDtypeStruct((2, 4, 4), np.float32)
    path = tuple(map(jax.tree_util.DictKey, (stack, "muon", "muon", "up", "weight")))
    assert owner(path, shape, {f"{stack}/up/weight": shape, "up/weight": shape}) == "up/weight"
    assert owner(path, shape, {f"{stack}/up/weight": shape}) == f"{stack}/up/weight"
    assert owner(path, shape, {f"{stack}/up/weight": jax.ShapeDtypeStruct((4, 4), np.float32)}) == ""
