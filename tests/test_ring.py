"""The ring reduce-scatter that replaces gloo's: the sums of numpy, and the bytes of the formula on the ring's edges."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from support import workload
from support.tables import every_row

from compression.primitives import sums
from sharding import hlo
from sharding.collectives import ALONE_BYTES, TensorGroup, reduce_scatter_chunks
from sharding.mesh import MeshShape, find_nodes, make_mesh
from sharding.plan import ShardingPlan
from sharding.spec import Placement

N = 6
SHAPE = MeshShape(replica_inter=1, shard_inter=4, replica_intra=1, shard_intra=2, tensor=1)
SCOPE = ("shard_intra", "shard_inter")  # CHUNK_ORDER


def scatter(hierarchical: bool) -> tuple[jax.stages.Compiled, np.ndarray]:
    """Returns the compiled reduce-scatter of `[8, N]` on each of 8 devices, and its operands `[8, 8, N]`."""
    mesh = make_mesh(SHAPE, find_nodes(jax.devices(), 2))
    x = np.random.default_rng(0).normal(size=(8, 8, N)).astype(np.float32)
    everywhere = PartitionSpec(("shard_inter", "shard_intra"))  # devices in the mesh's order

    def local(x: jax.Array) -> jax.Array:
        return reduce_scatter_chunks(x[0], SCOPE, hierarchical=hierarchical, by_ring=True)[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=everywhere, out_specs=everywhere)
    return jax.jit(mapped).lower(jnp.asarray(x)).compile(), x


@every_row(("hierarchical", "inter", "intra"), [(True, 3 / 8, 4 / 8), (False, 7 / 16, 7 / 16)])
def test_ring_reduce_scatter(hierarchical: bool, inter: float, intra: float) -> None:
    """Of M = 8 N floats a device sends (p-k)M/p and (p-1)M/p a node, half of that a device (docs/concepts.md)."""
    compiled, x = scatter(hierarchical)
    sums = x.sum(axis=0)
    # device (node, local) holds the chunk that its place in CHUNK_ORDER says: local first
    wanted = np.stack([sums[local * 4 + node] for node in range(4) for local in range(2)])
    np.testing.assert_allclose(np.asarray(compiled(jnp.asarray(x))), wanted, rtol=1e-5, atol=1e-6)
    collectives = hlo.read_collectives(compiled.as_text() or "", SHAPE)
    assert {c.kind for c in collectives} == {"collective-permute"}
    sent, model_bytes = hlo.bytes_per_step(collectives), 8 * N * 4
    assert list(sent.values()) == [round(inter * model_bytes), round(intra * model_bytes)]


def test_two_axes_of_a_node_in_the_order_of_chunks() -> None:
    axes = "shard_intra", "replica_intra"  # the mesh has them the other way round
    mesh = jax.make_mesh((4, 2), axes[::-1], axis_types=(AxisType.Auto,) * 2)
    x = np.random.default_rng(0).normal(size=(8, 8, N)).astype(np.float32)
    local = lambda x: reduce_scatter_chunks(x[0], axes, hierarchical=True, by_ring=True)[None]
    mapped = jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec(axes), out_specs=PartitionSpec(axes))
    np.testing.assert_allclose(np.asarray(jax.jit(mapped)(x)), x.sum(axis=0), rtol=1e-5, atol=1e-6)


def plan_on(platform: str, processes: int, reduce_dtype: Any = None) -> ShardingPlan:
    """A plan of a bfloat16 model on one device of each process; nothing but its devices is asked."""
    devices = [SimpleNamespace(platform=platform, process_index=i) for i in range(processes)]
    given: Any = dict(mesh=SimpleNamespace(devices=np.array(devices)), layout=None, placements=())
    return ShardingPlan(**given, compute_dtype=jnp.bfloat16, reduce_dtype=reduce_dtype)


def test_cpus_of_several_processes_alone_use_it_and_all_cpus_sum_in_float32() -> None:
    assert [plan_on(*where).over_gloo for where in (("cpu", 2), ("cpu", 1), ("gpu", 2))] == [True, False, False]
    assert plan_on("gpu", 1).sum_dtype == jnp.bfloat16 and plan_on("gpu", 1, jnp.float32).sum_dtype == jnp.float32
    assert plan_on("cpu", 1).sum_dtype == plan_on("cpu", 1, jnp.float32).sum_dtype == jnp.float32


@pytest.mark.slow
def test_large_tensors_travel_unpacked() -> None:
    """Over gloo: two small tensors in one gather, one of ALONE_BYTES in another; all come back whole."""
    mesh = make_mesh(SHAPE, find_nodes(jax.devices(), 2))
    rows = ALONE_BYTES // 4 // 16
    tensors = [jnp.arange(8 * rows * 16.0).reshape(8 * rows, 16), jnp.arange(16.0), jnp.arange(24.0) * 2]
    placements = tuple(Placement(dim=0, tensor_dim=None, ndim=x.ndim) for x in tensors)
    group = TensorGroup(placements=placements, scope=SCOPE, hierarchical=True, over_gloo=True)
    shards = [PartitionSpec(SCOPE)] * 3

    def gather_and_back(shards: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        whole = group.gather(shards)
        return group.reduce_scatter(whole), [x[None] for x in whole]

    everywhere = [PartitionSpec(SCOPE)] * 3
    mapped = jax.jit(jax.shard_map(gather_and_back, mesh=mesh, in_specs=(shards,), out_specs=(shards, everywhere)))
    compiled = mapped.lower(tensors).compile()
    summed, copies = compiled(tensors)
    for x, total, copy in zip(tensors, summed, copies, strict=True):
        np.testing.assert_array_equal(total, 8 * x)
        np.testing.assert_array_equal(copy, np.broadcast_to(x, (8, *x.shape)))
    kinds = [c.kind for c in hlo.read_collectives(compiled.as_text() or "", SHAPE)]
    assert kinds.count("all-gather") == 2 * 2  # two levels


def test_small_tensors_share_an_all_reduce_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring takes its round trips once for all of them; a tensor of ALONE_BYTES has an all-reduce of its own."""
    plan = workload.plan("decoder", strategy="mics", partition_size=2)
    xs = [jnp.full((ALONE_BYTES // 4,), 2.0), jnp.arange(6.0).reshape(2, 3), jnp.ones(())]
    placements = [Placement(dim=None, tensor_dim=None, ndim=x.ndim) for x in xs]

    def found() -> tuple[list[jax.Array], int]:
        everywhere = [PartitionSpec()] * len(xs)
        run = lambda *xs: sums(plan, placements, xs)
        mapped = jax.shard_map(run, mesh=plan.mesh, in_specs=tuple(everywhere), out_specs=everywhere)
        lowered = jax.jit(mapped).lower(*xs)
        return lowered.compile()(*xs), lowered.as_text().count("stablehlo.all_reduce")

    wanted, apart = found()
    monkeypatch.setattr(ShardingPlan, "over_gloo", True)
    totals, together = found()
    assert (apart, together) == (3, 2)
    jax.tree.map(np.testing.assert_array_equal, totals, wanted)
