"""Gradients, states and checkpoints for the tests of exchanges between replicas."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from compression.codecs import BFloat16, Blockwise, OneBit, Statistical
from sharding.coded import Codec
from sharding.plan import ShardingPlan, gradient_specs
from sharding.spec import ParamSpec
from support import workload


def gradients(plan: ShardingPlan, seed: int, kind: str = "tensors") -> tuple[Any, Any]:
    """Returns random gradients `[R, ...]`, where they belong and as numpy."""
    rng = np.random.default_rng(seed)
    shapes = workload.params(kind)
    replicas = plan.layout.num_replicas
    whole = jax.tree.map(lambda p: rng.normal(size=(replicas, *p.shape)).astype(np.float32) * 0.02, shapes)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(plan.mesh, spec),
        gradient_specs(plan),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    return jax.tree.map(jax.device_put, whole, shardings), whole


def jitted_update(tx: Any) -> Any:
    """Returns the update of a transform, compiled once: also its first state comes from the host."""
    update = jax.jit(tx.update)
    return lambda grads, state, *params: update(grads, jax.device_get(state), *params)


def is_vector(spec: ParamSpec) -> bool:
    """Whether a parameter has one dim per layer, and is not encoded."""
    return set(spec.dims) <= {"layers", "norm"}


def matrices(tree: Any) -> list[Any]:
    """Returns the encoded leaves of a tree like the parameters `workload.TENSORS`."""
    leaves, specs = jax.tree.leaves(tree), jax.tree.leaves(workload.TENSORS)
    return [x for x, spec in zip(leaves, specs, strict=True) if not is_vector(spec)]


CODECS: dict[str, Codec] = {
    "bf16": BFloat16(),
    "int8": Blockwise(bits=8, block=32),
    "int4": Blockwise(bits=4, block=32),
    "int4 stochastic": Blockwise(bits=4, block=32, stochastic=True),
    "one_bit": OneBit(block=32),
    "statistical": Statistical(block=32),
}


# strategies whose replica all-reduce crosses nodes, by its kind between nodes: all-reduce, with replicas inside nodes
# too, reduce-scatter
LAYOUTS = {
    "mics(2)": dict(strategy="mics", partition_size=2),
    "mics(1)": dict(strategy="mics", partition_size=1),
    "mics(4)": dict(strategy="mics", partition_size=4),
    "zero1": dict(strategy="zero1"),
    "node/node/all": dict(parameters="node", gradients="node", optimizer="all"),
    "none/node/4": dict(parameters="none", gradients="node", optimizer=4),
    "tensor": dict(strategy="mics", partition_size=2, tensor=2),
}


# all-reduced, and cut by the replica all-reduce between nodes; the others are slow
LAYOUT_PARAMS = [
    pytest.param(name, marks=() if name in ("mics(2)", "none/node/4") else pytest.mark.slow) for name in LAYOUTS
]


def two_bits(x: np.ndarray, density: float) -> np.ndarray:
    """The largest of a chunk `[N]`, in two magnitudes; zeros for the others."""
    count = max(8, 8 * round(density * len(x) / 8))
    order, sent = np.argsort(-np.abs(x), kind="stable")[:count], np.zeros_like(x)
    for here in (order[: count // 4], order[count // 4 :]):
        sent[here] = np.sign(x[here]) * np.abs(x[here]).mean()
    return sent
