"""What XLA writes for TPUs: excerpts of programs of jax 0.12 with libtpu 0.0.52, and of jax 0.10.2 with 0.0.42.1."""

from dataclasses import replace

import pytest
from support.schedules import DEVICE, NETWORK, SHAPE, kernel, replayed

from planner.clusters import INSIDE, SCHEDULE
from planner.links import TorusNetwork
from sharding.hlo import Collective, read_collectives
from sharding.hlo_program import parse_program
from sharding.mesh import MeshShape

# an attention kernel, of both versions: line breaks in its attributes and in those of the elements of its result
MOSAIC = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(bf16[4,8]{1,0})->bf16[4,8]{1,0}}

FileNames
1 "a.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}

ENTRY %main (q: bf16[4,8]) -> bf16[4,8] {
  %q = bf16[4,8]{1,0:T(4,128)(2,1)} parameter(0)
  %splash_mha_fwd.1 = (bf16[4,8]{1,0:T(4,128)(2,1)S(1)}, f32[4,128]{1,0:T(4,128)S(1)}) custom-call(%q), \
custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 128, \\"q_layout\\": 1}"
}}, metadata={op_name="jit(f)/pallas_call" stack_frame_id=18}, backend_config={"custom_call_config":{"body":"TUzv"}}
  %out = bf16[4,8]{1,0} get-tuple-element(%splash_mha_fwd.1), index=0, frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}
  ROOT %last = bf16[4,8]{1,0} negate(%out)
}
"""


def test_line_breaks_inside_of_attributes_lose_no_text() -> None:
    program = parse_program(MOSAIC)
    names = [instruction.name for instruction in program.entry.instructions]
    assert names == ["q", "splash_mha_fwd.1", "out", "last"]
    assert program.entry.by_name["splash_mha_fwd.1"].op_name == "jit(f)/pallas_call"
    assert program.entry.by_name["out"].index == 0


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (MOSAIC.replace("(2,1)} parameter(0)\n", '(2,1)} parameter(0)\n"lost":1\n'), 'cannot be read: "lost":1'),
        (MOSAIC.replace("HloModule", "Module"), "cannot be read: Module"),
        (MOSAIC.removesuffix("}\n"), "ends inside the computation main"),
        (MOSAIC[: MOSAIC.index("}}, metadata")], "cannot be read: %splash|ends inside"),
    ],
)
def test_text_that_is_not_understood_is_refused(broken: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_program(broken)


# ------------------------------------------------------------------------------- collectives in fusions

ASYNCHRONOUS = """
%fused_computation.1 (a: u8[5]) -> (u8[5], u8[10], u32[]) {
  %a = u8[5]{0} parameter(0)
  %all-gather.1 = u8[10]{0} all-gather(%a), replica_groups={{0,1},{2,3}}, dimensions={0}, \
metadata={op_name="jit(step)/gather/all_gather"}, backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}
  ROOT %custom-call.1 = (u8[5]{0:S(1)}, u8[10]{0:S(1)}, u32[]{:S(2)}) custom-call(%all-gather.1), \
custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.2 (b: u8[5], c: u8[10], d: u32[], p.1: u8[5]) -> (u8[5], u8[5], u8[10], u32[]) {
  %b = u8[5]{0} parameter(0)
  %c = u8[10]{0} parameter(1)
  %d = u32[] parameter(2)
  %p.1 = u8[5]{0} parameter(3)
  %half = u8[5]{0} negate(%p.1)
  %all-gather.2 = u8[10]{0} all-gather(%b), replica_groups={{0,1},{2,3}}, dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
  ROOT %tuple.2 = (u8[5], u8[5], u8[10], u32[]) tuple(%half, %b, %all-gather.2, %d)
}

%fused_computation.3 (e: u8[5], f: u8[10], g: u32[]) -> u8[10] {
  %e = u8[5]{0} parameter(0)
  %f = u8[10]{0} parameter(1)
  %g = u32[] parameter(2)
  %all-gather.3 = u8[10]{0} all-gather(%e), replica_groups={{0,1},{2,3}}, dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
  ROOT %custom-call.3 = u8[10]{0} custom-call(%e, %f, %all-gather.3, %g), custom_call_target="AsyncCollectiveDone"
}
"""
STARTED = "%async-collective-start = (u8[5], u8[10], u32[]) fusion(%p), kind=kCustom, calls=%fused_computation.1"
# libtpu 0.0.52 reads the elements by name, 0.0.42.1 by instructions
BY_NAME = (
    "%fusion.2 = (u8[5], u8[5], u8[10], u32[]) fusion(%async-collective-start#0, %async-collective-start#1, "
    "%async-collective-start#2, %p), kind=kOutput, calls=%async_collective_fusion.2",
    "%async-collective-done = u8[10] fusion(%fusion.2#1, %fusion.2#2, %fusion.2#3), kind=kCustom, "
    "calls=%fused_computation.3",
)
BY_INSTRUCTIONS = (
    *(f"%g.{i} = u8[5] get-tuple-element(%async-collective-start), index={i}" for i in range(3)),
    "%fusion.2 = (u8[5], u8[5], u8[10], u32[]) fusion(%g.0, %g.1, %g.2, %p), calls=%async_collective_fusion.2",
    *(f"%h.{i} = u8[5] get-tuple-element(%fusion.2), index={i}" for i in range(1, 4)),
    "%async-collective-done = u8[10] fusion(%h.1, %h.2, %h.3), kind=kCustom, calls=%fused_computation.3",
)


def read(*lines: str, more: str = "", shape: MeshShape = SHAPE) -> list[Collective]:
    body = "\n".join(f"  {line}" for line in ("%p = u8[5] parameter(0)", *lines))
    return read_collectives(f"HloModule jit_step\n\n{more}\nENTRY %main (p: u8[5]) -> u8[5] {{\n{body}\n}}\n", shape)


@pytest.mark.parametrize("lines", [BY_NAME, BY_INSTRUCTIONS])
def test_a_collective_that_fusions_carry_counts_once_and_hides_their_time(lines: tuple[str, ...]) -> None:
    (gather,) = read(STARTED, *lines, more=ASYNCHRONOUS)
    assert (gather.kind, gather.label, gather.payload_bytes, gather.intra_bytes) == ("all-gather", "gather", 10, 5)
    timeline = replayed(STARTED, *lines, more=ASYNCHRONOUS)
    # 5 s on the links; the kernel beside it reads and writes 5 bytes, and not what is in flight
    assert (timeline.step_s, timeline.compute_s, timeline.use("gather").exposed_s) == (10, 10, 0)
    slow = replayed(STARTED, *lines, more=ASYNCHRONOUS, network=replace(NETWORK, intra_bandwidth=0.25))
    assert (slow.step_s, slow.use("gather").busy_s, slow.use("gather").exposed_s) == (20, 20, 10)


def test_a_fused_reduce_and_slice_is_a_reduce_scatter() -> None:
    more = """
%all-reduce-scatter (a: u8[20]) -> u8[10] {
  %a = u8[20] parameter(0)
  %all-reduce.1 = u8[20] all-reduce(%a), replica_groups={{0,1},{2,3}}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %slice = u8[10] dynamic-slice(%all-reduce.1, %zero), dynamic_slice_sizes={10}
}
"""
    lines = ("%wide = u8[20] parameter(1)", "%fused = u8[10] fusion(%wide), kind=kCustom, calls=%all-reduce-scatter")
    (found,) = read(*lines, more=more)
    assert (found.kind, found.payload_bytes, found.intra_bytes) == ("reduce-scatter", 20, 10)
    assert replayed(*lines, more=more).use("reduce-scatter").busy_s == 10
    whole = more.partition("  %zero")[0].replace("  %all-reduce.1", "  ROOT %all-reduce.1") + "}\n"
    (found,) = read(lines[0], lines[1].replace("u8[10]", "u8[20]"), more=whole)
    assert (found.kind, found.intra_bytes) == ("all-reduce", 20)


def test_an_all_reduce_of_which_each_device_keeps_a_part_is_named() -> None:
    cut = "%cut (a: u8[20], n: s32[]) -> u8[10] {\n  %a = u8[20] parameter(0)\n  %n = s32[] parameter(1)\n"
    cut += "  ROOT %s = u8[10] dynamic-slice(%a, %n), dynamic_slice_sizes={10}METADATA\n}\n"
    lines = ("%r = u8[20] all-reduce(%p), replica_groups={{0,1},{2,3}}", "%k = u8[10] fusion(%r, %p), calls=%cut")
    for metadata, label in [("", "group_reduce_scatter"), (', metadata={op_name="jit(step)/own"}', "")]:
        (found,) = read(*lines, more=cut.replace("METADATA", metadata))
        assert (found.kind, found.label, found.intra_bytes) == ("all-reduce", label, 20)


def test_a_program_for_several_slices_lists_the_groups_of_its_own() -> None:
    shape = MeshShape(replica_inter=4, shard_inter=1, replica_intra=1, shard_intra=2, tensor=1)
    (found,) = read("%g = u8[10] all-gather(%p), replica_groups={{0,1}}, dimensions={0}", shape=shape)
    assert (found.inter_bytes, found.intra_bytes) == (0, 5)


# ------------------------------------------------------------------------------- between slices


def pair(kind: str, sent: str, received: str, target: str, name: str = "x_0") -> tuple[str, str, str]:
    """Returns the send, the recv, and the end that is awaited."""
    attributes = f'_xla_host_transfer_rendezvous="{name}",_xla_megascale_target={target}'
    attributes = f'frontend_attributes={{{attributes},_xla_megascale_transfer_type="{kind}"}}'
    return (
        f"%send = ({sent}{{0:T(1024)}}, u32[]{{:S(2)}}, token[]) send(%p, %p), is_host_transfer=true, {attributes}",
        f"%recv = ({received}{{0:T(1024)}}, u32[]{{:S(2)}}, token[]) recv(%p), is_host_transfer=true, {attributes}",
        f"%recv-done = ({received}, token[]) recv-done(%recv), is_host_transfer=true",
    )


SLICES = '"{1,2}x{0:1}"'
DEVICES = "{{100000,200000},{100001,200001}}"


@pytest.mark.parametrize(
    ("kind", "received", "target", "bytes_sent"),
    [
        ("ALL_REDUCE", "f32[25]", SLICES, 100),
        ("ALL_REDUCE", "f32[25]", '"{1:2}x{0:1}"', 100),
        ("ALL_TO_ALL", "u8[2,1,50]", DEVICES, 50),
        ("ALL_GATHER", "u8[2,50]", DEVICES, 50),
    ],
)
def test_transfers_of_the_megascale_runtime_are_collectives_between_slices(
    kind: str, received: str, target: str, bytes_sent: int
) -> None:
    (found,) = read(*pair(kind, "u8[50]", received, target))
    assert found.kind == kind.lower().replace("_", "-") and found.label == "replica_all_reduce"
    assert (found.inter_bytes, found.intra_bytes, found.axes) == (bytes_sent, 0, ("replica_inter",))


def test_four_slices_in_two_groups() -> None:
    shape = MeshShape(replica_inter=2, shard_inter=2, replica_intra=1, shard_intra=2, tensor=1)
    (found,) = read(*pair("ALL_REDUCE", "f32[25]", "f32[25]", '"{1,2}x{0:1},{3,4}x{0:1}"'), shape=shape)
    assert (found.axes, found.label, found.group, found.inter_bytes) == (("shard_inter",), "", (0, 2), 100)


def test_what_lies_between_a_send_and_the_end_of_its_recv_hides_it() -> None:
    send, recv, done = pair("ALL_REDUCE", "u8[10]", "u8[10]", SLICES)  # 100 s
    assert replayed(send, recv, done).step_s == 100
    timeline = replayed(send, kernel("k", 30), recv, kernel("l", 20), done)
    assert (timeline.step_s, timeline.use("replica_all_reduce", level="inter").exposed_s) == (100, 50)


def test_an_unknown_transfer_is_an_error() -> None:
    with pytest.raises(ValueError, match="%send = send.* of an unknown kind"):
        read(*pair("GUESS", "u8[10]", "u8[10]", SLICES))
    with pytest.raises(ValueError, match="a target that cannot be read: all"):
        read(*pair("ALL_REDUCE", "u8[10]", "u8[10]", '"all"'))


# ------------------------------------------------------------------------------- links of a torus


def torus(sides: tuple[int, ...], is_ring: tuple[bool, ...], devices_per_chip: int = 1) -> TorusNetwork:
    """Returns slices whose devices send a byte a second over all links of a chip, in the order x, y, z."""
    z = range(sides[2]) if len(sides) == 3 else range(1)
    places = [
        (x, y, k, c) for k in z for y in range(sides[1]) for x in range(sides[0]) for c in range(devices_per_chip)
    ]
    return TorusNetwork(
        devices_per_node=len(places),
        intra_bandwidth=1 / devices_per_chip,
        intra_latency_s=0.0,
        node_bandwidth=1.0,
        inter_latency_s=0.0,
        sides=sides,
        is_ring=is_ring,
        devices_per_chip=devices_per_chip,
    ).placed(places)


def test_a_group_uses_the_links_of_the_axes_that_it_spans() -> None:
    ring, line = torus((4, 4), (True, True)), torus((4, 4), (False, False))
    assert ring.reach(range(16)) == (1.0, 4) and line.reach(range(16)) == (0.5, 6)
    assert ring.reach(range(4)) == (0.5, 2)  # one axis
    assert ring.reach(range(2)) == (0.25, 1)  # a part of an axis is a line
    assert ring.reach((0, 2)) == (0.125, 2)  # two groups share the links between
    assert torus((4, 4, 4), (True,) * 3).reach(range(64)) == (1.0, 6)


def test_the_devices_of_a_chip_share_what_they_receive() -> None:
    two = torus((4, 4, 4), (True,) * 3, devices_per_chip=2)
    assert two.reach(range(128)) == (2.0, 6)  # all links, of which each device has half
    assert two.reach((0, 1)) == (2.0, 1) and two.reach(range(0, 128, 2)) == (1.0, 6)


def test_copies_beside_kernels_cost_nothing_on_tpus() -> None:
    lines = (
        "%copy-start = (u8[5], u8[5]{0:S(1)}, u32[]) copy-start(%p)",
        kernel("k", 7),
        "%copy-done = u8[5] copy-done(%copy-start)",
    )
    assert replayed(*lines).compute_s == 17 and replayed(*lines, device=replace(DEVICE, prefetches=True)).compute_s == 7


def test_maxtext_hides_what_stays_inside_a_slice() -> None:
    inside = "%g = u8[20] all-gather(%p), replica_groups={{0,1},{2,3}}, dimensions={0}"  # 10 s
    between = pair("ALL_REDUCE", "u8[10]", "u8[10]", SLICES)  # 100 s
    lines = (inside, *between[:2], kernel("k", 40), between[2])
    hidden, ours = (replayed(*lines, hides=hides) for hides in (INSIDE, SCHEDULE))
    assert (hidden.step_s, hidden.use(level="intra").exposed_s, hidden.use(level="inter").exposed_s) == (140, 0, 100)
    assert (ours.use(level="intra").exposed_s, ours.use(level="inter").exposed_s) == (10, 60)
