"""The time of collectives in a trace: of spans with known sums, and of a program whose collectives are known."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lab.benchmarks.profile_step import joined, picture
from sharding.hlo_program import parse_program
from sharding.mesh import MeshShape, find_nodes, make_mesh
from training.profiling import BETWEEN, COMPUTE, INSIDE, _collective_ns, _kinds, collective_times, start_trace


def test_exposed_is_the_part_of_the_collectives_without_compute() -> None:
    spans = [
        *((0, 10, COMPUTE), (2, 6, COMPUTE), (20, 30, COMPUTE)),
        *((5, 25, BETWEEN), (12, 15, BETWEEN)),  # 20 in all; 10 to 20 is exposed
        (30, 33, INSIDE),
    ]
    assert _collective_ns(spans, BETWEEN) == (20, 10)
    assert _collective_ns(spans, INSIDE) == (3, 3)
    assert _collective_ns(spans[:3], BETWEEN) == (0, 0)


def test_a_record_joins_near_spans_of_a_kind_and_the_picture_has_a_lane_per_device() -> None:
    ms = 10**6  # ns
    spans = [
        (5 * ms, 6 * ms, COMPUTE),
        (6.4 * ms, 8 * ms, COMPUTE),
        (9 * ms, 9.5 * ms, COMPUTE),
        (8 * ms, 9 * ms, INSIDE),
    ]
    lane = {kind: joined(spans, kind, 5 * ms) for kind in (COMPUTE, INSIDE, BETWEEN)}
    assert lane == {COMPUTE: [(0, 0.003), (0.004, 0.0045)], INSIDE: [(0.003, 0.004)], BETWEEN: []}
    (axes,) = picture({"devices": [lane] * 4, "step": 3}, is_dark=False).axes
    assert [label.get_text() for label in axes.get_yticklabels()][1::2] == ["node 0, device 1", "node 1, device 1"]
    bars = [collection.get_paths() for collection in axes.collections]
    assert [len(paths) for paths in bars] == 4 * [2, 1, 0]


def test_a_custom_call_is_compute_unless_it_calls_a_computation() -> None:
    """On GPUs most matrix products are calls of a library."""
    program = parse_program("""HloModule jit_step

%inside (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4]{0} parameter(0)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %gemm.1 = f32[4]{0} custom-call(%x), custom_call_target="__cublas$gemm"
  ROOT %call.1 = f32[4]{0} call(%gemm.1), to_apply=%inside
}
""")
    kinds = _kinds(program, MeshShape(replica_inter=1, shard_inter=1, replica_intra=1, shard_intra=1, tensor=1))
    assert kinds["gemm.1"] == COMPUTE and "call.1" not in kinds


@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")  # jax's, with Python 3.12
def test_a_trace_has_the_collectives_of_both_levels(tmp_path: Path) -> None:
    """Of 2 nodes of 2 devices: a sum between nodes and a sum inside them; other programs in the trace do not count."""
    shape = MeshShape(replica_inter=2, shard_inter=1, replica_intra=1, shard_intra=2, tensor=1)
    mesh = make_mesh(shape, find_nodes(jax.devices()[:4], 2))
    names = {"node": "replica_inter", "device": "shard_intra"}
    rows = PartitionSpec(("replica_inter", "shard_intra"))
    x = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, rows))

    def compiled(*levels: str) -> jax.stages.Compiled:
        def step(x: jax.Array) -> jax.Array:
            x = x @ x.T
            for level in levels:
                x = jax.lax.psum(x, names[level])
            return x

        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=rows, out_specs=rows)).lower(x).compile()

    both, inside = compiled("node", "device"), compiled("device")
    for folder, run in (("both", both), ("inside", inside)):
        start_trace(tmp_path / folder)
        jax.block_until_ready([run(x) for _ in range(3)])
        jax.profiler.stop_trace()
    times = partial(collective_times, shape=shape, steps=3)
    found = times(tmp_path / "both", both.as_text() or "")
    assert {*found} == {BETWEEN, INSIDE}
    assert all(0 < time["exposed_s"] <= time["total_s"] < 60 for time in found.values())
    assert {*times(tmp_path / "inside", inside.as_text() or "")} == {INSIDE}
    other = (both.as_text() or "").replace("HloModule jit_step", "HloModule jit_other")
    assert times(tmp_path / "both", other) == {}
    with pytest.raises(ValueError, match=r"none has no trace \(\*\.xplane\.pb\); set profile\.start"):
        times(tmp_path / "none", both.as_text() or "")
