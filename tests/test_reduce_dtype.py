"""The dtype of hop one: what the key makes of the plan, and that the emulated ring rounds what it hands on."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from benchmarks.reduce_dtype import RINGS, table
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


@pytest.mark.parametrize("name", RINGS)
def test_the_ring_sums_and_rounds(name: str) -> None:
    size = 4
    rows = np.asarray(jax.random.normal(jax.random.key(0), (size, size, 64)), np.float32)  # of each device, for each
    mesh = jax.make_mesh((size,), ("a",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:size])
    spec = PartitionSpec("a")
    summed = jax.shard_map(lambda x: RINGS[name](x[0], ("a",))[None], mesh=mesh, in_specs=spec, out_specs=spec)(rows)
    wanted = rows.sum(0)
    error = np.max(np.abs(summed - wanted))
    assert error < 1e-5 if name == "float32" else 1e-3 < error < 0.1
    if name == "compute":
        assert np.array_equal(summed, np.asarray(summed).astype(jnp.bfloat16).astype(np.float32))


def test_the_table_compares_seed_by_seed() -> None:
    lines = [
        {"devices": 8, "steps": 2, "seed": seed, "reduce_dtype": dtype, "validation_loss": 2.0 + seed + more}
        for seed in (0, 1)
        for dtype, more in (("float32", 0.0), ("compute", 0.01 * (seed + 1)))
    ]
    assert table(lines[:3]).splitlines()[2:] == [
        "| 8 | 2 | 0 | 2.0000 | 2.0100 | +0.0100 |",
        "| 8 | 2 | mean | | | +0.0100 (+0.0100 to +0.0100) |",
    ]
    assert table(lines).splitlines()[-1] == "| 8 | 2 | mean | | | +0.0150 (+0.0100 to +0.0200) |"
