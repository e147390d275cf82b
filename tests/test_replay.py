"""The replay of schedules: small ones worked out by hand, and properties of all schedules."""

import random
from dataclasses import replace
from itertools import pairwise
from math import inf, isclose
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.schedules import DEVICE, INTER, INTRA, NETWORK, SHAPE, gather, kernel, loop, replayed
from support.tables import every_row

from planner.clusters import ALL, NOTHING
from planner.replay import REPEATED, Timeline, Use, replay
from sharding.hlo_program import parse_program
from sharding.mesh import MeshShape, find_nodes, make_mesh


def test_kernels_take_the_longer_of_operations_and_bytes() -> None:
    timeline = replayed(
        "%a = f32[4,4] parameter(1)",
        "%dot = f32[4,4] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}",  # 192 bytes, 2 * 64 FLOP
        "%neg = u8[5] negate(%p)",
    )
    assert (timeline.step_s, timeline.compute_s) == (192 + 10, 202)
    slow = replace(DEVICE, matmul_fraction=0.25, launch_s=3)
    product = "%dot = f32[4,4] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    assert replayed("%a = f32[4,4] parameter(1)", product, device=slow).step_s == 128 / 0.5 + 3


def test_a_pair_hides_what_lies_between() -> None:
    start, done = gather("g", INTRA, 20)  # 10 s
    assert replayed(start, done).step_s == 10
    timeline = replayed(start, kernel("k", 7), done)
    assert (timeline.step_s, timeline.compute_s) == (10, 7)
    use = timeline.uses["all-gather", "intra"]
    assert (use.times, use.busy_s, use.exposed_s) == (1, 10, 3)
    assert replayed(start, kernel("k", 17), done).step_s == 17


def test_collectives_of_a_level_queue_and_levels_do_not() -> None:
    a, a_done = gather("a", INTRA, 20)
    b, b_done = gather("b", INTRA, 40)
    far, far_done = gather("far", INTER, 10)  # 50 s
    assert replayed(a, b, a_done, b_done).step_s == 10 + 20
    timeline = replayed(a, b, far, b_done, far_done)
    assert timeline.step_s == 50
    assert (timeline.use(level="intra").exposed_s, timeline.use(level="inter").exposed_s) == (30, 20)


def on_stream(line: str, stream: int) -> str:
    return f'{line}, backend_config={{"operation_queue_id":"{stream}","collective_backend_config":{{"is_sync":false}}}}'


def test_collectives_of_a_stream_queue_whatever_their_level() -> None:
    near, near_done = gather("near", INTRA, 20)  # 10 s
    far, far_done = gather("far", INTER, 10)  # 50 s
    done = far_done, near_done
    assert replayed(far, near, *done).step_s == 50
    one = replayed(on_stream(far, 0), on_stream(near, 0), *done)
    assert (one.step_s, one.streams) == (60, 1)
    two = replayed(on_stream(far, 0), on_stream(near, 1), *done)
    assert (two.step_s, two.streams) == (50, 2)
    assert replayed(far, *done[:1]).streams == 0


def test_other_systems_hide_all_or_nothing() -> None:
    start, done = gather("g", INTRA, 20)  # 10 s
    between = start, kernel("k", 7), done, kernel("l", 6)
    assert replayed(*between).step_s == 10 + 6
    assert replayed(*between, hides=NOTHING).step_s == 10 + 7 + 6
    assert replayed(*between, hides=ALL).step_s == 7 + 6
    at_once = f"%r = u8[20] all-gather(%p), {INTRA}, dimensions={{0}}"
    assert replayed(at_once, kernel("k", 7), hides=ALL).step_s == 10


def test_what_waits_behind_another_collective_exposes_that_one() -> None:
    reduce = f"%r = u8[20] all-reduce-start(%p), {INTRA}, to_apply=%add"  # twice 10 bytes: 20 s
    a, a_done = gather("a", INTRA, 20)
    timeline = replayed(reduce, a, kernel("k", 6), a_done, "%r.done = u8[20] all-reduce-done(%r)")
    exposed = {name: use.exposed_s for (name, _), use in timeline.uses.items()}
    assert (timeline.step_s, exposed) == (30, {"all-reduce": 14, "all-gather": 10})


def test_latency_is_paid_for_each_message_of_a_ring() -> None:
    network = replace(NETWORK, intra_latency_s=0.5, inter_latency_s=100)
    assert replayed(*gather("g", INTRA, 20), network=network).step_s == 10.5
    assert replayed(*gather("g", INTER, 20), network=network).step_s == 100 + 100
    four = "replica_groups={{0,1,2,3}}"  # two of 3 messages cross, and of four edges: 7.5 bytes on each level
    timeline = replayed(*gather("g", four, 20), network=network)
    assert (timeline.step_s, [*timeline.uses]) == (2 * 100 + 0.5 + 75, [("all-gather", "inter")])
    slow_inside = replace(NETWORK, intra_bandwidth=0.01, intra_latency_s=0.5, inter_latency_s=100)
    timeline = replayed(*gather("g", four, 20), network=slow_inside)  # the path has either level's latency
    assert (timeline.step_s, [*timeline.uses]) == (2 * 100 + 0.5 + 750, [("all-gather", "intra")])


@every_row(
    ("fractions", "latency_s", "seconds", "why"),
    [
        ((), 100, 3 * 100 + 150, "there are only rings"),
        ((1.0,), 100, 2 * 100 + 200, "up and down between two nodes, which each send 20 bytes twice"),
        ((0.8, 0.1), 100, 2 * 100 + 250, "at less bandwidth, as small an array gets it"),
        ((1.0,), 0, 150, "without latencies the ring is faster, as it sends less"),
        ((0.25,), 1, 3 + 150, "a slow tree is not taken"),
    ],
)
def test_an_all_reduce_between_nodes_takes_the_faster_of_ring_and_trees(
    fractions: Any, latency_s: int, seconds: Any, why: str
) -> None:
    """20 bytes on four devices: a ring sends 30 of each in 6 messages, and half of them cross."""
    network = replace(NETWORK, tree_fractions=fractions, inter_latency_s=latency_s)
    said = "to_apply=%add, replica_groups="
    line = f"%r = u8[20] all-reduce(%x), {said}"
    for groups in ("{{0,1,2,3}}", "[1,4]<=[4]"):
        timeline = replayed("%x = u8[20] broadcast(%p)", line + groups, network=network)
        assert timeline.use("all-reduce", "inter").busy_s == pytest.approx(seconds), why


def test_a_tree_of_eight_nodes_has_three_messages_each_way() -> None:
    """8 nodes of 2: of 20 bytes a node sends 40 each way at 0.2 bytes a second; a ring would have 16 messages."""
    network = replace(NETWORK, tree_fractions=(1.0,), inter_latency_s=100)
    shape = MeshShape(replica_inter=8, shard_inter=1, replica_intra=1, shard_intra=2, tensor=1)
    groups = "{{" + ",".join(str(i) for i in range(16)) + "}}"
    collective = f"%r = u8[20] all-reduce(%p), to_apply=%add, replica_groups={groups}"
    text = "HloModule jit_step, is_scheduled=true\n\nENTRY %main (p: u8[20]) -> u8[20] {\n  %p = u8[20] parameter(0)\n"
    program = parse_program(f"{text}  {collective}\n}}\n")
    assert replay(program, shape, DEVICE, network).step_s == pytest.approx(2 * 3 * 100 + 2 * 20 * 2 / 0.2 / 2)


@every_row(
    ("groups", "seconds", "why"),
    [
        ("{{0,1,2,3}}", 2 * 1000 + 2 * 1001 + 200, "two messages up and down a chain of two, before the nodes'"),
        ("{{0,2,1,3}}", 2 * 1000 + 2 * 1001 + 200, "the same in any order; a ring in that order crosses always"),
        ("{{0,2},{1,3}}", 2 * 1001 + 200, "one device a node has no chain"),
        ("{{0,1},{2,3}}", 2 * 1000 + 20, "there is no tree inside a node"),
    ],
)
def test_a_tree_has_a_chain_in_each_node(groups: str, seconds: Any, why: str) -> None:
    network = replace(NETWORK, tree_fractions=(1.0,), intra_latency_s=1000, inter_latency_s=1001)
    line = f"%r = u8[20] all-reduce(%x), to_apply=%add, replica_groups={groups}"
    timeline = replayed("%x = u8[20] broadcast(%p)", line, network=network)
    assert timeline.step_s == pytest.approx(25 + seconds), why


def test_an_all_to_all_reaches_a_part_of_a_node_link() -> None:
    """10 of 20 bytes cross, of two devices, at 0.2 bytes a second, of which it reaches half."""
    said = "replica_groups={{0,2},{1,3}}, dimensions={0}"
    timeline = replayed("%x = u8[20] broadcast(%p)", f"%a = u8[20] all-to-all(%x), {said}")
    assert timeline.use("all-to-all").busy_s == 2 * 10 / 0.2 / 0.5


def test_a_collective_on_both_levels_occupies_both() -> None:
    both, both_done = gather("g", "replica_groups={{0,1,2,3}}", 20)  # 75 s
    near, near_done = gather("n", INTRA, 20)
    far, far_done = gather("f", INTER, 10)
    assert replayed(near, both, both_done, near_done).step_s == 10 + 75
    assert replayed(both, near, far, near_done, far_done, both_done).step_s == 75 + 50


def test_a_started_computation_is_its_collective() -> None:
    more = f"%wrapped (x: u8[5]) -> u8[20] {{\n  ROOT %g = u8[20] all-gather(%x), {INTRA}, dimensions={{0}}\n}}\n"
    timeline = replayed(
        "%s = ((u8[5]), u8[20], u32[]) async-start(%p), calls=%wrapped",
        kernel("k", 6),
        "%d = u8[20] async-done(%s)",
        more=more,
    )
    assert (timeline.step_s, timeline.compute_s) == (10, 6)


STREAM = f"""%beside (q: u8[5]) -> u8[20] {{
  %q = u8[5] parameter(0)
  %k = u8[2] negate(%q)
  %s = (u8[5], u8[20]) all-gather-start(%k), {INTRA}, dimensions={{0}}
  %d = u8[20] all-gather-done(%s)
  ROOT %l = u8[3] negate(%q)
}}
"""


@every_row("prefetches", [False, True])
def test_copies_to_the_host_run_beside_kernels_at_their_own_rate(prefetches: bool) -> None:
    """A row of 5 bytes at 0.5 bytes/s, and back: each takes 10 s, after the other on the same link."""
    host, more = "u8[3,5]{1,0:S(5)}", "%put (x: u8[5]) -> u8[3,5] {\n  ROOT %x = u8[5] parameter(0)\n}\n"
    lines = [
        f'%h = {host} custom-call(), custom_call_target="AllocateBuffer"',
        f"%a = (({host}, u8[1,5]), {host}, u32[]) async-start(%h, %p), calls=%put",
        f"%b = {host} async-done(%a)",
        f"%c = (({host}), u8[1,5], u32[]) async-start(%b), calls=%put",
        kernel("k", 6),
        "%d = u8[1,5] async-done(%c)",
    ]
    device = replace(DEVICE, copy_bandwidth=0.5, prefetches=prefetches)
    timeline = replayed(*lines, more=more, device=device)
    assert timeline.uses["offload", "host"] == Use(times=2, busy_s=20, exposed_s=14)
    assert timeline.compute_s == 6


@every_row("opcode", ["call", "async"])
def test_another_stream_runs_beside(opcode: str) -> None:
    """On it 7 s of kernels, 10 s of network, 8 s of kernels; what is waited for at the end are the last."""
    key = "to_apply" if opcode == "call" else "calls"
    start = f"%c = ((u8[5]), u8[20], u32[]) {opcode}-start(%p), {key}=%beside"
    done = f"%e = u8[20] {opcode}-done(%c)"
    timeline = replayed(start, kernel("k", 12), done, more=STREAM)
    assert (timeline.step_s, timeline.compute_s) == (25, 12)
    assert timeline.uses["all-gather", "intra"].exposed_s == 5
    assert (timeline.uses["kernels", "stream"].busy_s, timeline.uses["kernels", "stream"].exposed_s) == (15, 8)
    assert replayed(start, kernel("k", 40), done, more=STREAM).step_s == 40
    gather_too, gather_done = gather("g", INTRA, 20)
    assert replayed(start, gather_too, done, gather_done, more=STREAM).step_s == 17 + 10  # a link was asked for first


def test_a_loop_on_another_stream_takes_its_time() -> None:
    """50 iterations of 12 (the counter) and 8 s there, the network here meanwhile."""
    more = (
        loop(50, "u8[5]", "v", (kernel("k", 8),), "v")
        + """
%beside (q: u8[5]) -> u8[5] {
  %q = u8[5] parameter(0)
  %zero = s32[] constant(0)
  %t = (s32[], u8[5]) tuple(%zero, %q)
  %w = (s32[], u8[5]) while(%t), condition=%cond, body=%body
  ROOT %r = u8[5] get-tuple-element(%w), index=1
}
"""
    )
    start, done = "%c = ((u8[5]), u8[5]) call-start(%p), to_apply=%beside", "%e = u8[5] call-done(%c)"
    timeline = replayed(start, *gather("g", INTER, 10), kernel("k", 7), done, more=more)
    assert isclose(timeline.step_s, 1000) and timeline.compute_s == 7
    assert timeline.uses["all-gather", "inter"].exposed_s == 50


NEXT_S = 12  # the counter's addition: three numbers of 4 bytes


@every_row("trips", [0, 1, 2, 3, 1000])
def test_loops_repeat(trips: int) -> None:
    start, done = gather("g", INTRA, 40)  # 20 s
    more = loop(trips, "u8[5]", "v", (start, kernel("k", 6), done), "v")
    whiles = (
        "%zero = s32[] constant(0)",
        "%t = (s32[], u8[5]) tuple(%zero, %p)",
        "%w = (s32[], u8[5]) while(%t), condition=%cond, body=%body",
    )
    timeline = replayed(*whiles, more=more)
    assert isclose(timeline.step_s, trips * (NEXT_S + 20))
    assert isclose(timeline.compute_s, trips * (NEXT_S + 6))
    use = timeline.use()
    assert use.times == trips and isclose(use.busy_s, 20 * trips) and isclose(use.exposed_s, 14 * trips)


@every_row("trips", [1, 2, 50])
def test_a_handle_goes_round_the_loop(trips: int) -> None:
    """Each iteration waits for the op that the iteration before started; the last op is waited for after the loop."""
    handle = "(u8[20], u8[40])"
    start, _ = gather("g", INTRA, 40)  # 20 s
    lines = ("%d = u8[40] all-gather-done(%v)", start, kernel("k", 6))
    more = loop(trips, handle, "v", lines, "g")
    whiles = (
        start.replace("%g", "%first"),
        "%zero = s32[] constant(0)",
        f"%t = (s32[], {handle}) tuple(%zero, %first)",
        f"%w = (s32[], {handle}) while(%t), condition=%cond, body=%body",
        f"%last = {handle} get-tuple-element(%w), index=1",
        "%z = u8[40] all-gather-done(%last)",
    )
    timeline = replayed(*whiles, more=more)
    # iteration: addition (12, hides), wait until the gather's 20 are over, start, kernel of 6
    first, rest = 20 + 6, (trips - 1) * (12 + 2 + 6)
    assert isclose(timeline.step_s, first + rest + 14)
    assert timeline.use().times == trips + 1


def test_a_pair_may_span_a_loop() -> None:
    start, done = gather("far", INTER, 100)  # 500 s
    more = loop(100, "u8[5]", "v", (kernel("k", 8),), "v")
    whiles = (
        start,
        "%zero = s32[] constant(0)",
        "%t = (s32[], u8[5]) tuple(%zero, %p)",
        "%w = (s32[], u8[5]) while(%t), condition=%cond, body=%body",
        done,
    )
    assert isclose(replayed(*whiles, more=more).step_s, 100 * (NEXT_S + 8))
    slow = replace(NETWORK, node_bandwidth=0.02)  # 5000 s
    timeline = replayed(*whiles, more=more, network=slow)
    assert isclose(timeline.step_s, 5000) and isclose(timeline.use().exposed_s, 5000 - 2000)


def test_of_a_conditional_the_longest_branch_counts() -> None:
    more = (
        "%short (x: u8[5]) -> u8[5] {\n  %p = u8[5] parameter(0)\n  ROOT %k = u8[5] negate(%p)\n}\n\n"
        "%long (x: u8[5]) -> u8[5] {\n  %p = u8[5] parameter(0)\n"
        f"  %g = u8[40] all-gather(%p), {INTRA}, dimensions={{0}}\n  ROOT %k = u8[5] negate(%p)\n}}\n"
    )
    line = "%c = u8[5] conditional(%i, %p, %p), branch_computations={%short, %long}"
    assert replayed(line, more=more).step_s == 30
    assert replayed(line.replace("%short, %long", "%long, %short"), more=more).step_s == 30


def test_a_done_without_a_start_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"%d = all-gather-done\(p\) waits"):
        replayed("%d = u8[40] all-gather-done(%p)")


def test_a_network_of_other_nodes_is_an_error() -> None:
    with pytest.raises(ValueError, match="nodes of 2 on a network with 8"):
        replayed(kernel("k", 7), network=replace(NETWORK, devices_per_node=8))


GROUPS = (INTRA, INTER, "replica_groups={{0,1,2,3}}")


def schedule(seed: int) -> tuple[tuple[str, ...], str]:
    """Returns a program with pairs that overlap at random, some of them in a loop or across it."""
    choose = random.Random(seed)

    def lines(prefix: str) -> tuple[str, ...]:
        found: list[str] = []
        open_dones: list[str] = []
        for n in range(choose.randint(2, 9)):
            start, done = gather(f"{prefix}{n}", choose.choice(GROUPS), 2 * choose.randint(1, 30))
            found += [start, kernel(f"{prefix}k{n}", choose.randint(6, 40))]
            open_dones.append(done)
            if choose.random() < 0.7:
                found.append(open_dones.pop(choose.randrange(len(open_dones))))
        return (*found, *open_dones)

    more = loop(choose.randint(1, 60), "u8[5]", "v", lines("b"), "v")
    around = list(lines("e"))
    starts = ("%zero = s32[] constant(0)", "%t = (s32[], u8[5]) tuple(%zero, %p)")
    around.insert(choose.randint(0, len(around)), "%w = (s32[], u8[5]) while(%t), condition=%cond, body=%body")
    return (*starts, *around), more


@every_row("seed", range(16))
def test_properties_of_every_schedule(seed: int) -> None:
    lines, more = schedule(seed)
    timeline = replayed(*lines, more=more)
    for lane in ("compute", "intra", "inter"):  # bars of a lane do not overlap
        bars = sorted((bar.start_s, bar.end_s) for bar in timeline.intervals if bar.lane == lane)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(bars))
    for key in ("intra_bandwidth", "node_bandwidth"):  # twice as fast is never slower
        faster = replayed(*lines, more=more, network=replace(NETWORK, **{key: 2 * getattr(NETWORK, key)}))
        assert faster.step_s <= timeline.step_s * (1 + 1e-9)
    faster = replayed(*lines, more=more, device=replace(DEVICE, memory_bandwidth=2))
    assert faster.step_s <= timeline.step_s * (1 + 1e-9) and isclose(2 * faster.compute_s, timeline.compute_s)
    free = replayed(*lines, more=more, network=replace(NETWORK, intra_bandwidth=inf, node_bandwidth=inf))
    without = [line for line in lines if "all-gather" not in line]
    inside = "\n".join(line for line in more.splitlines() if "all-gather" not in line)
    alone = replayed(*without, more=inside)  # what is left without a network is compute
    assert free.step_s == free.compute_s == alone.step_s == alone.compute_s


@every_row("seed", range(10))
def test_loops_are_as_if_written_out(seed: int) -> None:
    """A multiplied iteration has the times of a replay of every iteration."""
    lines, more = schedule(seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("planner.replay._same", lambda *_: False)
        exact = replayed(*lines, more=more)
    short = replayed(*lines, more=more)
    marks = [bar for bar in short.intervals if bar.lane == REPEATED]
    cut = sum((int(bar.name.removeprefix("x ")) - 1) * (bar.end_s - bar.start_s) for bar in marks)
    assert isclose(max(bar.end_s for bar in short.intervals) + cut, exact.step_s, rel_tol=1e-9)
    assert isclose(short.step_s, exact.step_s, rel_tol=1e-9) and isclose(short.compute_s, exact.compute_s)
    assert short.uses.keys() == exact.uses.keys()
    for key, use in exact.uses.items():
        assert use.times == short.uses[key].times and isclose(use.busy_s, short.uses[key].busy_s)
        assert isclose(use.exposed_s, short.uses[key].exposed_s, rel_tol=1e-6, abs_tol=1e-6)


def test_a_program_of_cpus_waits_for_every_collective() -> None:
    """Its collectives are in no pairs."""
    mesh = make_mesh(SHAPE, find_nodes(jax.devices()[:4], 2))

    def step(x):
        def micro(_, x):
            return jnp.sin(lax.pcast(lax.psum(x, "replica_inter"), "replica_inter", to="varying") @ x)

        return lax.fori_loop(0, 5, micro, x)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("replica_inter"), out_specs=P("replica_inter"))
    text = jax.jit(mapped).lower(jax.ShapeDtypeStruct((32, 16), jnp.float32)).compile().as_text()
    timeline: Timeline = replay(parse_program(text or ""), SHAPE, DEVICE, NETWORK)
    use = timeline.uses["all-reduce", "inter"]
    assert use.times == 5 and isclose(use.busy_s, use.exposed_s) and isclose(use.busy_s, 5 * 10 * 16 * 16 * 4)
    assert isclose(timeline.step_s, timeline.compute_s + use.busy_s) and timeline.compute_s > 5 * 2 * 16**3
