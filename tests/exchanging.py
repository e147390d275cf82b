"""Gradients, states and checkpoints for the tests of exchanges between replicas."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import workload
from checkpointing import KEEP_ALL, abstract
from jax.sharding import NamedSharding, PartitionSpec

from sharding.plan import ShardingPlan, gradient_specs
from sharding.spec import ParamSpec
from sharding.step import TrainState
from state.checkpointer import Checkpointer


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


def is_vector(spec: ParamSpec) -> bool:
    """Whether a parameter has one dim per layer, and is not encoded."""
    return set(spec.dims) <= {"layers", "norm"}


def matrices(tree: Any) -> list[Any]:
    """Returns the encoded leaves of a tree like the parameters `workload.TENSORS`."""
    leaves, specs = jax.tree.leaves(tree), jax.tree.leaves(workload.TENSORS)
    return [x for x, spec in zip(leaves, specs, strict=True) if not is_vector(spec)]


def over_replicas(tree: Any, combine: Callable[[np.ndarray], np.ndarray]) -> Any:
    """Returns `combine` of each array `[R, ...]`, in float64."""
    return jax.tree.map(lambda x_R: combine(np.asarray(x_R, np.float64)), tree)


def owed(tree: Any) -> Any:
    """Returns the sums over the replicas of residuals `[R, ...]`."""
    return over_replicas(tree, lambda x_R: x_R.sum(0))


def save(directory: Path, state: TrainState, step: int) -> None:
    """Saves a checkpoint."""
    with Checkpointer(directory, KEEP_ALL) as checkpointer:
        checkpointer.save(step, state, data={}, config={})


def restore(directory: Path, like: TrainState) -> TrainState:
    """Returns the newest checkpoint, as a state like another one."""
    with Checkpointer(directory, KEEP_ALL) as checkpointer:
        restored = checkpointer.restore(abstract(like))
    assert restored
    return restored.state
