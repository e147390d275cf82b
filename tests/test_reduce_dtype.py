"""The dtype of hop one: what the key makes of the plan."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from sharding.step import ShardingPlan


def plan_on(platform: str, reduce_dtype: object) -> ShardingPlan:
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
    return ShardingPlan(
        mesh=mesh,  # pyright: ignore[reportArgumentType]
        layout=None,  # pyright: ignore[reportArgumentType]
        placements=(),
        compute_dtype=jnp.bfloat16,
        reduce_dtype=reduce_dtype,
    )


def test_gpus_sum_in_the_dtype_that_was_chosen_and_cpus_in_float32() -> None:
    assert plan_on("gpu", None).sum_dtype == jnp.bfloat16
    assert plan_on("gpu", jnp.float32).sum_dtype == jnp.float32
    assert plan_on("cpu", None).sum_dtype == plan_on("cpu", jnp.float32).sum_dtype == jnp.float32
