"""The parser of compiled programs: every spelling of replica groups, loops, asynchronous pairs, bytes by network."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sharding.hlo import as_report, bytes_per_step, merged, read_collectives
from sharding.mesh import MeshShape, find_nodes, make_mesh

SHAPE = MeshShape(replica_inter=2, shard_inter=2, replica_intra=1, shard_intra=2, tensor=1)


def module(*instructions: str, more: str = "") -> str:
    body = "\n".join(f"  {line}" for line in instructions)
    return f"HloModule jit_step\n\n{more}\nENTRY %main.1 (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def all_reduce(groups: str) -> str:
    return f"%all-reduce.1 = f32[100]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add"


@pytest.mark.parametrize("done", ["%whole = f32[30]{0} all-reduce-done(%start)", ""])
def test_what_xla_has_combined_is_named_by_the_parts_of_its_result(done: str) -> None:
    """Its compiler for GPUs packs several tensors into one, and leaves the name to the slices of the result."""
    opcode, whole = ("all-reduce-start", "whole") if done else ("all-reduce", "start")
    metadata = 'metadata={op_name="jit(step)/%s/psum"}'
    more = (
        "%%cut (x: f32[30]) -> f32[10] {\n  %%x = f32[30]{0} parameter(0)\n"
        f"  ROOT %%s = f32[10]{{0}} slice(%%x), slice={{[20:30]}}, {metadata % 'hop_two'}\n}}\n"
        "%%twice (y: f32[30]) -> f32[30] {\n  %%y = f32[30]{0} parameter(0)\n"
        f"  ROOT %%t = f32[30]{{0}} add(%%y, %%y), {metadata % 'gather'}\n}}\n"
    ).replace("%%", "%")
    lines = [
        f"%start = f32[30]{{0}} {opcode}(%packed), replica_groups={{}}, to_apply=%add",
        done,
        f"%user = f32[30]{{0}} fusion(%{whole}), kind=kLoop, calls=%twice, {metadata % 'gather'}",
        f"%first = f32[20]{{0}} slice(%{whole}), slice={{[0:20]}}",
    ]
    (unknown,) = read_collectives(module(*lines, more=more), SHAPE)
    assert unknown.label == ""
    lines.append(f"%last = f32[10]{{0}} fusion(%{whole}), kind=kLoop, calls=%cut, {metadata % 'hop_two'}")
    (named,) = read_collectives(module(*lines, more=more), SHAPE)
    assert named.label == "hop_two"


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("shard_intra",)),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("shard_inter",)),
        ("[4,2]<=[8]", ("shard_intra",)),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("shard_inter",)),
        ("[4,2]<=[2,4]T(1,0)", ("replica_inter",)),
        ("[1,8]<=[8]", ("replica_inter", "shard_inter", "shard_intra")),
        ("{}", ("replica_inter", "shard_inter", "shard_intra")),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ("shard_intra",)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", ("replica_inter", "shard_inter")),
        ("mesh['axis_0'=1,'axis_1'=8,'axis_2'=1] {'axis_1'}", ("replica_inter", "shard_inter", "shard_intra")),
        (
            "mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], device_ids=([2,2,2]T(2,1,0)) {'axis_1'}",
            ("shard_inter", "shard_intra"),
        ),
        ("mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_0'}", ("shard_intra",)),
        ("mesh['axis_0'=8] {'axis_0':(1)2}", ("replica_inter",)),
        ("mesh['axis_0'=8] {'axis_0':(2)2}", ("shard_inter",)),
        ("mesh['axis_0'=8] {'axis_0':(4)2}", ("shard_intra",)),
    ],
)
def test_replica_groups_in_every_spelling(groups: str, axes: tuple[str, ...]) -> None:
    (c,) = read_collectives(module(all_reduce(groups)), SHAPE)
    assert (c.kind, c.axes, c.dtype, c.num_elements, c.payload_bytes) == ("all-reduce", axes, "f32", 100, 400)


def test_a_tuple_of_tensors_is_one_collective() -> None:
    line = (
        "%a = (f32[3]{0}, bf16[2,2]{1,0}, /*index=2*/f32[]) all-reduce(%x, %y, %z), replica_groups={{0,1,2,3,4,5,6,7}}"
    )
    (c,) = read_collectives(module(line.replace("bf16", "f32")), SHAPE)
    assert c.num_elements == 8


def test_asynchronous_pairs_count_once_and_by_their_result() -> None:
    lines = (
        "%s = (f32[10]{0}, f32[20]{0}) all-gather-start(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}",
        "%d = f32[20]{0} all-gather-done(%s)",
        "%r = f32[10]{0} all-reduce-start(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add",
        "%e = f32[10]{0} all-reduce-done(%r)",
        "%t = ((f32[20]{0}), f32[10]{0}) async-start(%p), calls=%wrapped",
        "%u = f32[10]{0} async-done(%t)",
    )
    more = (
        "%wrapped (x: f32[20]) -> f32[10] {\n"
        "  ROOT %rs = f32[10]{0} reduce-scatter(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}\n}\n"
    )
    found = read_collectives(module(*lines, more=more), SHAPE)
    assert [(c.kind, c.num_elements) for c in found] == [("all-gather", 20), ("all-reduce", 10), ("reduce-scatter", 20)]


@pytest.mark.parametrize(
    ("line", "dtype", "elements"),
    [
        ("((u8[4,9]{1,0}), u8[4,9]{1,0}) all-to-all-start(%p), replica_groups=%s, dimensions={0}", "u8", 36),
        ("((f32[2,8]{1,0}), f32[1,8]{1,0}) reduce-scatter-start(%p), replica_groups=%s, to_apply=%add", "f32", 16),
        (
            "((f32[1,6], f32[1,4]), (f32[2,6], f32[2,4])) all-gather-start(%p, %q), replica_groups=%s, dimensions={0}",
            "f32",
            20,
        ),
        ("(f32[8], f32[8], u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}", "f32", 8),
    ],
)
def test_what_gpus_start_counts_by_its_results(line: str, dtype: str, elements: int) -> None:
    """XLA:GPU writes operands and results of a started collective in one tuple."""
    groups = "{{0,1},{2,3},{4,5},{6,7}}"
    (c,) = read_collectives(module("%s = " + line.replace("%s", groups)), SHAPE)
    assert (c.dtype, c.num_elements) == (dtype, elements)


LOOP = """%body.1 (x: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %x = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%x), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %v = f32[8]{{0}} get-tuple-element(%x), index=1
  %ag = f32[8]{{0}} all-gather(%v), replica_groups=[4,2]<=[8], dimensions={{0}}
  ROOT %r = (s32[], f32[8]{{0}}) tuple(%next, %ag)
}}

%condition.1 (x: (s32[], f32[8])) -> pred[] {{
  %x.1 = (s32[], f32[8]{{0}}) parameter(0)
  %j = s32[] get-tuple-element(%x.1), index=0
  %limit = s32[] constant(6)
  ROOT %less = pred[] compare(%j, %limit), direction={direction}
}}

%outer.1 (x: f32[8]) -> f32[8] {{
  %y = f32[8]{{0}} parameter(0)
  %zero = s32[] constant(0)
  %t = (s32[], f32[8]{{0}}) tuple(%zero, %y)
  %while.1 = (s32[], f32[8]{{0}}) while(%t), condition=%condition.1, body=%body.1{known}
  ROOT %out = f32[8]{{0}} get-tuple-element(%while.1), index=1
}}
"""


@pytest.mark.parametrize("line", ["call-start(%p), to_apply=%wrapped", "async-start(%p), calls=%wrapped"])
def test_what_runs_on_another_stream_counts(line: str) -> None:
    more = f"%wrapped (x: f32[8]) -> f32[8] {{\n  {all_reduce('{}')}\n}}\n"
    assert len(read_collectives(module("%c = ((f32[8]), f32[8]) " + line, more=more), SHAPE)) == 1


def test_replica_groups_that_cannot_be_read_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"%all-reduce.1 = all-reduce\(p\) has replica groups that cannot be read"):
        read_collectives(module(all_reduce("V2{4,2}")), SHAPE)


def test_a_line_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"cannot be read: %x = f32\[8\] add\(%p"):
        read_collectives(module("%x = f32[8] add(%p"), SHAPE)


@pytest.mark.parametrize("known", [', backend_config={"known_trip_count":{"n":"6"}}', ""])
def test_loops_multiply_by_their_trip_count(known: str) -> None:
    outer = '%while.2 = (s32[]) while(%t), condition=%c, body=%outer.1, backend_config={"known_trip_count":{"n":"5"}}'
    (c,) = read_collectives(module(outer, more=LOOP.format(direction="LT", known=known)), SHAPE)
    assert (c.times, c.loop_depth) == (30, 2)


@pytest.mark.parametrize(
    "branches", ["branch_computations={%first, %second}", "true_computation=%first, false_computation=%second"]
)
def test_the_branch_of_a_conditional_that_sends_most_counts(branches: str) -> None:
    larger = all_reduce("{}").replace("[100]", "[200]")
    bodies = {"first": all_reduce("{}"), "second": f"{larger}\n  {all_reduce('{}')}"}
    more = "\n".join(f"%{name} (x: f32[8]) -> f32[8] {{\n  {body}\n}}\n" for name, body in bodies.items())
    line = f"%c = f32[8] conditional(%i, %p, %p), {branches}"
    assert [c.num_elements for c in read_collectives(module(line, more=more), SHAPE)] == [200, 100]


def test_a_loop_that_nobody_can_count_is_an_error() -> None:
    outer = "%call.1 = f32[8] call(%p), to_apply=%outer.1"
    with pytest.raises(ValueError, match="no trip count"):
        read_collectives(module(outer, more=LOOP.format(direction="NE", known="")), SHAPE)


def test_text_that_is_no_program_is_an_error() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        read_collectives("module @jit_step {}", SHAPE)


def run(function, spec_in: P, spec_out: P, shape: tuple[int, ...], dtype=jnp.float32):
    mesh = make_mesh(SHAPE, find_nodes(jax.devices(), 2))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec_in, out_specs=spec_out)
    return read_collectives(jax.jit(mapped).lower(jax.ShapeDtypeStruct(shape, dtype)).compile().as_text(), SHAPE)


def test_a_ring_inside_a_node_sends_nothing_between_nodes() -> None:
    (c,) = run(lambda x: lax.all_gather(x, "shard_intra"), P("shard_intra"), P("shard_intra"), (64,))
    assert (c.inter_bytes, c.intra_bytes) == (0, 64 * 4 / 2)


def test_a_ring_over_nodes_has_one_edge_out_of_each_node() -> None:
    both = ("shard_inter", "shard_intra")
    (c,) = run(lambda x: lax.all_gather(x, both), P(both), P(both), (64,))
    sent = 64 * 4 * 3 / 4
    assert (c.inter_bytes, c.intra_bytes) == (sent / 2, sent / 2)


def test_an_all_to_all_crosses_nodes_by_its_pairs() -> None:
    both = ("shard_inter", "shard_intra")
    (c,) = run(lambda x: lax.all_to_all(x, both, 0, 0, tiled=True), P(both), P(both), (64,))
    quarter = 64 / 4 * 4 / 4
    assert (c.inter_bytes, c.intra_bytes) == (2 * quarter, quarter)


def test_a_permutation_sends_its_payload() -> None:
    pairs = [(0, 1), (1, 0)]
    (c,) = run(lambda x: lax.ppermute(x, "shard_inter", pairs), P("shard_inter"), P("shard_inter"), (64,))
    assert (c.kind, c.axes, c.inter_bytes, c.intra_bytes) == ("collective-permute", ("shard_inter",), 128, 0)


def test_the_report_multiplies_and_merges() -> None:
    def five_times(x):
        return lax.fori_loop(
            0, 5, lambda i, x: lax.pcast(lax.psum(x, "replica_inter"), "replica_inter", to="varying"), x
        )

    found = run(five_times, P("replica_inter"), P("replica_inter"), (20,))
    assert [(c.times, c.axes) for c in found] == [(5, ("replica_inter",))]
    assert bytes_per_step(found * 2) == {"collective_inter_bytes": 400, "collective_intra_bytes": 0}
    assert [c.times for c in merged(found * 2)] == [10]
    entry = as_report(found * 2)["collectives"][0]
    assert (entry["times"], entry["inter_bytes"], entry["kind"]) == (10, 400, "all-reduce")
