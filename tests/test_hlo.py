"""The parser of compiled programs: every spelling of replica groups, loops, asynchronous pairs, bytes by network."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sharding.hlo import as_report, behind_warm_up, bytes_per_step, program_collectives, read_collectives
from sharding.hlo_program import ArrayType, Site, parse_program, trip_count
from sharding.mesh import MeshShape, find_nodes, make_mesh

SHAPE = MeshShape(replica_inter=2, shard_inter=2, replica_intra=1, shard_intra=2, tensor=1)


def module(*instructions: str, more: str = "") -> str:
    body = "\n".join(f"  {line}" for line in instructions)
    return f"HloModule jit_step\n\n{more}\nENTRY %main.1 (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def all_reduce(groups: str) -> str:
    return f"%all-reduce.1 = f32[100]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add"


def test_what_xla_has_combined_is_named_by_the_parts_of_its_result(subtests: pytest.Subtests) -> None:
    """Its compiler for GPUs packs several tensors into one, and leaves the name to the slices of the result."""
    for done in ["%whole = f32[30]{0} all-reduce-done(%start)", ""]:
        with subtests.test(done=done):
            opcode, whole = ("all-reduce-start", "whole") if done else ("all-reduce", "start")
            metadata = 'metadata={op_name="jit(step)/%s/psum"}'
            more = (
                "%%cut (x: f32[30]) -> f32[10] {\n  %%x = f32[30]{0} parameter(0)\n"
                f"  ROOT %%s = f32[10]{{0}} slice(%%x), slice={{[20:30]}}, {metadata % 'replica_all_reduce'}\n}}\n"
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
            lines.append(
                f"%last = f32[10]{{0}} fusion(%{whole}), kind=kLoop, calls=%cut, {metadata % 'replica_all_reduce'}"
            )
            (named,) = read_collectives(module(*lines, more=more), SHAPE)
            assert named.label == "replica_all_reduce"


def test_replica_groups_in_every_spelling(subtests: pytest.Subtests) -> None:
    for groups, axes in [
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
    ]:
        with subtests.test(groups=groups, axes=axes):
            (c,) = read_collectives(module(all_reduce(groups)), SHAPE)
            assert (c.kind, c.axes, c.dtype, c.num_elements, c.payload_bytes) == ("all-reduce", axes, "f32", 100, 400)


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


def test_what_gpus_start_counts_by_its_results(subtests: pytest.Subtests) -> None:
    """XLA:GPU writes operands and results of a started collective in one tuple."""
    for line, dtype, elements in [
        ("((u8[4,9]{1,0}), u8[4,9]{1,0}) all-to-all-start(%p), replica_groups=%s, dimensions={0}", "u8", 36),
        ("((f32[2,8]{1,0}), f32[1,8]{1,0}) reduce-scatter-start(%p), replica_groups=%s, to_apply=%add", "f32", 16),
        (
            "((f32[1,6], f32[1,4]), (f32[2,6], f32[2,4])) all-gather-start(%p, %q), replica_groups=%s, dimensions={0}",
            "f32",
            20,
        ),
        ("(f32[3], f32[2,2]) all-reduce-start(%x, %y), replica_groups=%s", "f32", 7),
        ("((f32[7]), f32[7]) all-reduce-start(%x), replica_groups=%s", "f32", 7),
        ("((f32[3], f32[4]), (f32[3], f32[4])) all-reduce-start(%x, %y), replica_groups=%s", "f32", 7),
        ("(f32[3], f32[2,2], /*index=2*/f32[]) all-reduce(%x, %y, %z), replica_groups=%s", "f32", 8),
        ("(f32[8], f32[8], u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}", "f32", 8),
    ]:
        with subtests.test(line=line, dtype=dtype, elements=elements):
            groups = "{{0,1},{2,3},{4,5},{6,7}}"
            (c,) = read_collectives(module("%s = " + line.replace("%s", groups)), SHAPE)
            assert (c.dtype, c.num_elements) == (dtype, elements)


def test_what_runs_on_another_stream_counts(subtests: pytest.Subtests) -> None:
    for line in ["call-start(%p), to_apply=%wrapped", "async-start(%p), calls=%wrapped"]:
        with subtests.test(line=line):
            more = f"%wrapped (x: f32[8]) -> f32[8] {{\n  {all_reduce('{}')}\n}}\n"
            assert len(read_collectives(module("%c = ((f32[8]), f32[8]) " + line, more=more), SHAPE)) == 1


def test_what_cannot_be_read_is_an_error(subtests: pytest.Subtests) -> None:
    for text, said in [
        (module(all_reduce("V2{4,2}")), r"%all-reduce.1 = all-reduce\(p\) has replica groups that cannot be read"),
        (module("%x = f32[8] add(%p"), r"cannot be read: %x = f32\[8\] add\(%p"),
        ("module @jit_step {}", "a line of the compiled program cannot be read: module @jit_step"),
        ("HloModule jit_step", "no ENTRY"),
        (module("%p = (f32[8]) parameter(0)", "%x = f32[8] copy(%p#1)"), r"%x = copy\(p#1\) reads %p#1, which"),
        (module("%p = f32[8] parameter(0)", "%x = f32[8] copy(%p#0)"), "reads %p#0, which"),
        (module("%x = f32[8] copy(%q#0)"), "reads %q#0, which"),
    ]:
        with subtests.test(text=text, said=said), pytest.raises(ValueError, match=said):
            read_collectives(text, SHAPE)


def test_the_branch_of_a_conditional_that_sends_most_counts(subtests: pytest.Subtests) -> None:
    for branches in ["branch_computations={%first, %second}", "true_computation=%first, false_computation=%second"]:
        with subtests.test(branches=branches):
            larger = all_reduce("{}").replace("[100]", "[200]")
            bodies = {"first": all_reduce("{}"), "second": f"{larger}\n  {all_reduce('{}')}"}
            more = "\n".join(f"%{name} (x: f32[8]) -> f32[8] {{\n  {body}\n}}\n" for name, body in bodies.items())
            line = f"%c = f32[8] conditional(%i, %p, %p), {branches}"
            assert [c.num_elements for c in read_collectives(module(line, more=more), SHAPE)] == [200, 100]


def test_behind_a_warm_up_its_branch_does_not_count() -> None:
    """Though it sends more: its operations say whose they are."""
    named = ', metadata={op_name="jit(step)/cond/branch_1_fun/warm_up/all_reduce/psum"}'
    larger = all_reduce("{}").replace("[100]", "[200]")
    bodies = {"first": all_reduce("{}"), "second": larger + named}
    more = "\n".join(f"%{name} (x: f32[8]) -> f32[8] {{\n  {body}\n}}\n" for name, body in bodies.items())
    text = module("%c = f32[8] conditional(%i, %p, %p), branch_computations={%first, %second}", larger, more=more)
    for program, sizes in ((parse_program(text), [200, 200]), (behind_warm_up(parse_program(text)), [100, 200])):
        assert [c.num_elements for c in program_collectives(program, SHAPE)] == sizes


def run(function, spec_in: P, spec_out: P, shape: tuple[int, ...], dtype=jnp.float32):
    mesh = make_mesh(SHAPE, find_nodes(jax.devices(), 2))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec_in, out_specs=spec_out)
    return read_collectives(jax.jit(mapped).lower(jax.ShapeDtypeStruct(shape, dtype)).compile().as_text(), SHAPE)


BOTH = ("shard_inter", "shard_intra")
M = 64 * 4  # bytes


def test_bytes_by_network(subtests: pytest.Subtests) -> None:
    for function, axes, inter, intra in [
        (lambda x: lax.all_gather(x, "shard_intra"), ("shard_intra",), 0, M / 2),
        (lambda x: lax.all_gather(x, BOTH), BOTH, M * 3 / 4 / 2, M * 3 / 4 / 2),  # one edge of the ring in two crosses
        (lambda x: lax.all_to_all(x, BOTH, 0, 0, tiled=True), BOTH, 2 * M / 16, M / 16),
        (lambda x: lax.ppermute(x, "shard_inter", [(0, 1), (1, 0)]), ("shard_inter",), M / 2, 0),
    ]:
        with subtests.test(function=function, axes=axes, inter=inter, intra=intra):
            (c,) = run(function, P(axes), P(axes), (64,))
            assert (c.axes, c.inter_bytes, c.intra_bytes) == (axes, inter, intra)


def test_the_report_multiplies_and_merges() -> None:
    def five_times(x):
        return lax.fori_loop(
            0, 5, lambda i, x: lax.pcast(lax.psum(x, "replica_inter"), "replica_inter", to="varying"), x
        )

    found = run(five_times, P("replica_inter"), P("replica_inter"), (20,))
    assert [(c.times, c.axes) for c in found] == [(5, ("replica_inter",))]
    assert bytes_per_step(found * 2) == {"collective_inter_bytes": 400, "collective_intra_bytes": 0}
    (entry,) = as_report(found * 2)["collectives"]
    assert (entry["times"], entry["inter_bytes"], entry["kind"]) == (10, 400, "all-reduce")


# -------------------------------------------------------------------------------------------- trip counts

KNOWN = 'backend_config={"known_trip_count":{"n":"%s"},"known_init_step":{"init":"1","step":"2"}}'


def count(text: str, loop: str = "w") -> int:
    program = parse_program(text)
    entry = program.entry
    return trip_count(entry.by_name[loop], Site(computation=entry), program)


STEP = "%one = s32[] constant(1)\n  %next = s32[] add(%i, %one)"


def program(
    *,
    start: str = "%start = s32[] constant(0)",
    step: str = STEP,
    limit: str = "%limit = s32[] constant(7)",
    test: str = "ROOT %go = pred[] compare(%j, %limit), direction=LT",
    kept: str = "%n",
    more: str = "",
    attributes: str = "",
) -> str:
    """Returns a module with a loop %w whose tuple is (an array, the counter, a number %n that the loop may read)."""
    return f"""HloModule jit_step, is_scheduled=true, entry_computation_layout={{(f32[8]{{0}})->f32[8]{{0}}}}

{more}
%body (b: (f32[8], s32[], s32[])) -> (f32[8], s32[], s32[]) {{
  %b = (f32[8]{{0}}, s32[], s32[]) parameter(0)
  %x = f32[8]{{0}} get-tuple-element(%b), index=0
  %i = s32[] get-tuple-element(%b), index=1
  %n = s32[] get-tuple-element(%b), index=2
  {step}
  ROOT %r = (f32[8]{{0}}, s32[], s32[]) tuple(%x, %next, {kept})
}}

%cond (c: (f32[8], s32[], s32[])) -> pred[] {{
  %c = (f32[8]{{0}}, s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%c), index=1, metadata={{op_name="jit(step)/while/cond, x=(1{{"}}
  {limit}
  {test}
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  {start}
  %thirty = s32[] constant(30)
  %t = (f32[8]{{0}}, s32[], /*index=2*/s32[]) tuple(%p, %start, %thirty)
  %w = (f32[8]{{0}}, s32[], s32[]) while(%t), condition=%cond, body=%body{attributes}
  ROOT %out = f32[8]{{0}} get-tuple-element(%w), index=0
}}
"""


PASSED = "%limit = s32[] get-tuple-element(%c), index=2"
FUSED_TEST = """%fused_compare (a: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %constant_576_1 = s32[] constant(7)
  ROOT %compare.6.1 = pred[] compare(%a, %constant_576_1), direction=LT
}
"""
FUSED_STEP = """%fused_add (a: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %two = s32[] constant(2)
  ROOT %sum = s32[] add(%a, %two)
}
"""
FUSED = "ROOT %f = pred[] fusion(%j), kind=kLoop, calls=%fused_compare"
BY_TWO = "%next = s32[] fusion(%i), kind=kLoop, calls=%fused_add"


def with_named_elements(text: str) -> str:
    """Returns a module as XLA of jax 0.12 writes it: `%b#1` in place of an instruction that reads an element of %b."""
    computations = text.split("\n}")
    for n, computation in enumerate(computations):
        for name, whole, index in re.findall(
            r"\n  %([\w.]+) = \S+ get-tuple-element\(%(\w+)\), index=(\d)", computation
        ):
            line = rf"\n  %{name} = \S+ get-tuple-element.*"
            computations[n] = re.sub(rf"%{name}\b", f"%{whole}#{index}", re.sub(line, "", computations[n]))
    return "\n}".join(computations)


def test_an_element_of_a_tuple_may_be_named_by_its_number() -> None:
    text = with_named_elements(program(limit=PASSED))
    assert "compare(%c#1, %c#2)" in text and "get-tuple-element(%b)" not in text
    body = parse_program(text).computations["body"]
    assert [(i.name, i.opcode, i.operands) for i in body.instructions] == [
        ("b", "parameter", ()),
        ("one", "constant", ()),
        ("b#1", "get-tuple-element", ("b",)),
        ("next", "add", ("b#1", "one")),
        ("b#0", "get-tuple-element", ("b",)),
        ("b#2", "get-tuple-element", ("b",)),
        ("r", "tuple", ("b#0", "next", "b#2")),
    ]
    assert body.by_name["b#0"].result == ArrayType("f32", (8,)) and body.by_name["b#2"].index == 2


def test_an_element_of_a_tuple_in_a_tuple_may_be_named() -> None:
    text = """HloModule m

ENTRY %main (p: (s32[], (f32[8], s32[2]))) -> f32[8] {
  %p = (s32[], (f32[8]{0}, s32[2]{0})) parameter(0)
  ROOT %c = f32[8]{0} copy(%p#1#0)
}
"""
    inner, outer = parse_program(text).entry.instructions[2], parse_program(text).entry.instructions[1]
    assert (outer.name, inner.operands, inner.result) == ("p#1", ("p#1",), ArrayType("f32", (8,)))


def test_trip_counts(subtests: pytest.Subtests) -> None:
    for changes, trips in [
        ({}, 7),
        ({"attributes": ", " + KNOWN % 63}, 63),
        ({"start": "%zero = s32[] constant(3)\n  %start = s32[] copy(%zero)"}, 4),
        ({"start": "%start = s32[] constant(-2)"}, 9),
        ({"start": "%start = s32[] constant(7)"}, 0),
        ({"limit": "", "test": FUSED, "more": FUSED_TEST}, 7),
        ({"limit": "", "test": FUSED, "more": FUSED_TEST + "\n" + FUSED_STEP, "step": BY_TWO}, 4),
        ({"step": BY_TWO, "more": FUSED_STEP, "start": "%start = s32[] constant(1)"}, 3),
        ({"limit": PASSED}, 30),
        ({"test": "ROOT %go = pred[] compare(%j, %limit), direction=LE"}, 8),
        ({"test": "ROOT %go = pred[] compare(%limit, %j), direction=GT"}, 7),
        (
            {
                "start": "%start = s32[] constant(10)",
                "step": "%minus = s32[] constant(-1)\n  %next = s32[] add(%i, %minus)",
                "test": "ROOT %go = pred[] compare(%j, %limit), direction=GE",
            },
            4,
        ),
        ({"limit": "%limit = s32[] constant(1000000)"}, 10**6),
    ]:
        with subtests.test(changes=changes, trips=trips):
            assert count(program(**changes)) == trips
            assert count(with_named_elements(program(**changes))) == trips


def test_a_loop_that_cannot_be_counted_is_named(subtests: pytest.Subtests) -> None:
    for changes in [
        {"test": "ROOT %go = pred[] compare(%j, %limit), direction=NE"},
        {"test": "ROOT %go = pred[] compare(%j, %limit), direction=NE", "start": "%start = s32[] constant(8)"},
        {"start": "%start = s32[] custom-call(%p)"},
        {"step": "%next = s32[] multiply(%i, %i)", "start": "%start = s32[] constant(2)"},
        {"step": "%next = s32[] add(%i, %n)", "limit": PASSED, "kept": "%i"},
        {"test": "%f = f32[] convert(%j)\n  ROOT %go = pred[] is-finite(%f)"},
    ]:
        no_count = pytest.raises(ValueError, match=r"^%w = while\(t\) has no trip count that can be read: ")
        with subtests.test(changes=changes), no_count:
            count(program(**changes))


OUTER = """%outer_body (b: (s32[], s32[])) -> (s32[], s32[]) {
  %b = (s32[], s32[]) parameter(0)
  %o = s32[] get-tuple-element(%b), index=0
  %n = s32[] get-tuple-element(%b), index=1
  %p = f32[8]{0} constant({...})
  %start = s32[] constant(5)
  %t = (f32[8]{0}, s32[], s32[]) tuple(%p, %start, %n)
  %w = (f32[8]{0}, s32[], s32[]) while(%t), condition=%cond, body=%body
  %one = s32[] constant(1)
  %next = s32[] add(%o, %one)
  ROOT %r = (s32[], s32[]) tuple(%next, %n)
}
"""


def test_a_limit_may_come_through_the_loop_around() -> None:
    outside = "%v = (s32[], s32[]) while(%u), condition=%cond, body=%outer_body, " + KNOWN % 3
    text = program(
        limit=PASSED, more=OUTER, start=f"%start = s32[] constant(0)\n  %u = (s32[], s32[]) tuple()\n  {outside}"
    )
    text = text.replace(
        "%u = (s32[], s32[]) tuple()", "%n = s32[] constant(12)\n  %u = (s32[], s32[]) tuple(%start, %n)"
    )
    parsed = parse_program(text)
    around = Site(computation=parsed.entry)
    body = parsed.computations["outer_body"]
    inside = Site(computation=body, caller=parsed.entry.by_name["v"], outer=around)
    assert trip_count(body.by_name["w"], inside, parsed) == 12 - 5
    with pytest.raises(ValueError, match="no trip count"):
        trip_count(body.by_name["w"], Site(computation=body), parsed)  # nobody says what %n is


def test_loops_multiply_by_their_trip_count(subtests: pytest.Subtests) -> None:
    """Two loops, one in the other: one tells its count, of the other it is found."""
    for known in [", " + KNOWN % 7, ""]:
        with subtests.test(known=known):
            sent = all_reduce("{}").replace("%p", "%x")
            inner = OUTER.replace("condition=%cond, body=%body", f"condition=%cond, body=%body{known}")
            outside = "%v = (s32[], s32[]) while(%t), condition=%cond, body=%outer_body, " + KNOWN % 5
            text = program(start=f"%start = s32[] constant(0)\n  {outside}", more=inner, step=f"{sent}\n  {STEP}")
            assert [(c.times, c.loop_depth) for c in read_collectives(text, SHAPE)] == [
                (5 * (7 if known else 2), 2),
                (7, 1),
            ]
