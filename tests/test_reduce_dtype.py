"""The dtype of hop one: what the key makes of the plan."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from configs.schema import ShardingConfig
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


def test_the_automatic_partitioner_does_not_take_the_key() -> None:
    with pytest.raises(ValueError, match=r"sharding.reduce_dtype=float32 has no effect with sharding.partitioner=auto"):
        ShardingConfig(strategy="zero3", partitioner="auto", reduce_dtype="float32")
