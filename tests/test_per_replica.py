"""What each replica keeps by itself is told by its type, not by a name: a model may call its modules as it likes."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import workload

from compression.codecs import OneBit
from compression.exchange import exchange
from compression.statistics import State, nothing_sent, statistics
from sharding.plan import ShardingPlan
from sharding.replicas import PerReplica
from sharding.scopes import make_layout
from sharding.spec import ParamSpec, place_all
from sharding.state import state_shardings
from sharding.step import TrainState


def plan_of(module: str) -> tuple[ShardingPlan, Any]:
    """Returns 4 nodes of 2, each node a replica, and the parameters of a module: a matrix and a bias."""
    layout = make_layout(*workload.strategy(strategy="hsdp"), num_nodes=4, devices_per_node=2)
    specs = {
        module: {
            "weight": ParamSpec(shape=(16, 32), dims=("embed", "mlp")),
            "bias": ParamSpec(shape=(32,), dims=("mlp",)),
        }
    }
    plan = workload.plan("tensors", strategy="hsdp")
    plan = ShardingPlan(mesh=plan.mesh, layout=layout, placements=place_all(specs, layout))
    return plan, jax.tree.map(lambda spec: jnp.ones(spec.shape), specs, is_leaf=lambda x: isinstance(x, ParamSpec))


@pytest.mark.parametrize("module", ["local", "residual"])
def test_factored_moments_are_replicated_for_any_module_name(module: str) -> None:
    plan, params = plan_of(module)
    tx = optax.adafactor(0.1, min_dim_size_to_factor=8)
    state = TrainState(step=jnp.zeros((), jnp.int32), params=params, all_reduce=(), opt_state=tx.init(params))
    factored = state.opt_state[0]
    placed = state_shardings(plan, state).opt_state[0]
    for moments, shardings in ((factored.v_row, placed.v_row), (factored.v_col, placed.v_col)):
        assert moments[module]["weight"].ndim == 1 and moments[module]["weight"].size > 1
        assert shardings[module]["weight"].is_fully_replicated


@pytest.mark.parametrize("module", ["plain", "residual", "velocity"])
def test_residual_norm_ignores_module_names(module: str) -> None:
    """Adam's moments of a module called `residual` are none, and a residual of one called `velocity` is one."""
    plan, params = plan_of(module)
    tx = workload.chained(exchange(plan, OneBit(block=32)), optax.adam(0.1))
    state = jax.tree.map(lambda x: jnp.full_like(x, 2), tx.init(params))
    sizes = 4 * (16 * 32 + 32)  # of four replicas
    np.testing.assert_allclose(statistics(state)["residual_norm"], 2 * sizes**0.5, rtol=1e-6)


def test_the_residual_norm_is_one_sum_over_the_replicas_of_all_tensors_together() -> None:
    """Gloo sums one scalar after the other: one for each tensor would be as many round trips a step."""
    mesh = jax.make_mesh((8,), ("replica",))
    by_replica = jax.NamedSharding(mesh, jax.P("replica"))
    values = [
        np.random.default_rng(i).normal(size=(8, *shape)).astype("f") for i, shape in enumerate([(), (3,), (4, 5)])
    ]
    residual = PerReplica([jax.device_put(x, by_replica) for x in values], combine="sum", label="")
    norm = jax.jit(lambda residual: statistics(State(residual=residual, sent=nothing_sent()))["residual_norm"])
    compiled = norm.lower(residual).compile()
    sums = re.findall(r"= (\S+|\(.*?\)) all-reduce\(", compiled.as_text() or "")
    assert [x.partition("{")[0] for x in sums] == ["f32[]"]
    whole = np.concatenate([x.ravel() for x in values]).astype(np.float64)
    np.testing.assert_allclose(compiled(residual), np.linalg.norm(whole), rtol=1e-6)
