"""The clock: collectives of gloo against formulas, steps with local SGD, and simulated rounds of replicas."""

from dataclasses import replace
from math import inf

import pytest
from support.planning import small

from lab.clock.fleet import Fleet, run_rounds
from lab.clock.gloo import ALL_TO_ALL, SEGMENT_BYTES, SYNC, WIRE, GlooNetwork, network_of
from lab.clock.steps import step_time
from launch.emulate.links import BURST_BYTES, Links
from planner.compile import CompiledStep
from sharding.collectives import ALONE_BYTES
from sharding.hlo import Collective
from sharding.mesh import MeshShape

LATENCY_S, NODES = 0.02, 4


def network(rate_bytes: float = inf, latency_s: float = 0.0, burst_bytes: float = 0.0) -> GlooNetwork:
    links = network_of(Links(), 1)
    return replace(links, node_bandwidth=rate_bytes, inter_latency_s=latency_s, burst_bytes=burst_bytes)


def collective(kind: str, *sizes: int, nodes: int = NODES, label: str = "other") -> Collective:
    """Returns a collective of all nodes over arrays of some bytes."""
    payload = sum(sizes)
    sent = payload * (nodes - 1) / nodes * (2 if kind == "all-reduce" else 1)
    return Collective(
        kind=kind,
        label=label,
        axes=("replica_inter",),
        dtype="u8",
        num_elements=payload,
        payload_bytes=payload,
        array_bytes=sizes,
        inter_bytes=sent,
        intra_bytes=0.0,
        group=tuple(range(nodes)),
        group_nodes=nodes,
        times=1,
        loop_depth=0,
    )


def seconds(links: GlooNetwork, kind: str, *sizes: int, nodes: int = NODES) -> float:
    return links.level_seconds(collective(kind, *sizes, nodes=nodes))["inter"]


def test_without_latency_a_collective_takes_its_bytes_over_the_rate() -> None:
    links = network(rate_bytes=1e6)
    assert seconds(links, "all-reduce", 8_000_000) == pytest.approx(2 * 6.0)
    assert seconds(links, "all-reduce", 6_000_000, 2_000_000) == pytest.approx(2 * 6.0)
    assert seconds(links, "all-gather", 8_000_000) == pytest.approx(6.0)
    assert seconds(links, "all-to-all", 8_000_000) == pytest.approx(6.0 / ALL_TO_ALL)
    assert seconds(replace(links, burst_bytes=80_000), "all-to-all", 80_000) == pytest.approx(0.06)


@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_small_messages_take_a_round_trip_each(nodes: int) -> None:
    links = network(latency_s=LATENCY_S)
    trips = nodes - 1
    assert seconds(links, "all-gather", 4096, nodes=nodes) == pytest.approx(trips * 2 * LATENCY_S)
    assert seconds(links, "all-reduce", 4096, nodes=nodes) == pytest.approx(2 * trips * 2 * LATENCY_S)
    assert seconds(links, "all-reduce", 4096, 4096, nodes=nodes) == pytest.approx(4 * trips * 2 * LATENCY_S)
    assert seconds(links, "all-reduce", 4, nodes=nodes) == pytest.approx((2 * trips + 1) * LATENCY_S)
    assert seconds(links, "all-to-all", 4096, nodes=nodes) == pytest.approx(2 * LATENCY_S)
    assert seconds(links, "collective-permute", 4096, nodes=nodes) == pytest.approx(2 * LATENCY_S)


def test_the_small_arrays_of_a_replica_all_reduce_share_a_ring() -> None:
    """As training packs them over gloo; an array of ALONE_BYTES has a ring of its own."""
    links = network(rate_bytes=1e6, latency_s=LATENCY_S)
    apart = [seconds(links, "all-reduce", size) for size in (ALONE_BYTES, 8192)]
    packed = collective("all-reduce", 4096, ALONE_BYTES, 4096, label=SYNC)
    assert links.level_seconds(packed)["inter"] == pytest.approx(sum(apart))


def test_long_messages_hide_all_round_trips_but_one_in_each_ring() -> None:
    """Two are in flight, and each is on the link for longer than a round trip."""
    links = network(rate_bytes=1e6, latency_s=LATENCY_S)
    assert seconds(links, "all-reduce", 8_000_000) == pytest.approx(2 * (6.0 + 2 * LATENCY_S))


def test_a_ring_of_short_messages_takes_a_round_trip_and_a_message_for_each_pair() -> None:
    """The link needs 0.01 s per message, a round trip takes 0.04 s: three pairs, and the last message of the last."""
    links = network(rate_bytes=1e6, latency_s=LATENCY_S)
    assert seconds(links, "all-gather", 80_000) == pytest.approx(3 * (2 * LATENCY_S + 0.01) + 0.01)


def test_long_arrays_are_reduced_in_more_messages() -> None:
    """Without a limit on a message three pairs of messages would take three round trips."""
    size = 4 * NODES * SEGMENT_BYTES
    assert seconds(network(latency_s=LATENCY_S), "all-reduce", size) == pytest.approx(2 * 6 * 2 * LATENCY_S)


def test_saved_bytes_pass_at_once_while_the_link_waits() -> None:
    """Each pair waits for 0.03 s, in which the link saves the bytes of one message; the first pair has saved none."""
    links = network(rate_bytes=1e6, latency_s=LATENCY_S, burst_bytes=10_000)
    without = replace(links, burst_bytes=0.0)
    saved = seconds(without, "all-gather", 80_000) - seconds(links, "all-gather", 80_000)
    assert saved == pytest.approx(3 * 0.01)
    assert seconds(replace(links, inter_latency_s=0.0), "all-gather", 80_000) == pytest.approx(0.06)


def test_the_network_has_the_links_of_the_emulator() -> None:
    links = network_of(Links(rate="10mbit", latency="20ms"), 2)
    assert (links.node_bandwidth, links.burst_bytes) == (WIRE * 1.25e6, BURST_BYTES)
    assert (links.inter_latency_s, links.devices_per_node) == (0.02, 2)
    assert network_of(Links(rate="1gbit"), 1).burst_bytes == pytest.approx(WIRE * 250_000)


PROGRAM = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (p: f32[1000000]) -> f32[1000000] {
  %p = f32[1000000] parameter(0)
  ROOT %r = f32[1000000] all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add, METADATA
}
""".replace("METADATA", 'metadata={op_name="jit(step)/replica_all_reduce/psum"}')


def test_groups_that_span_nodes_are_refused() -> None:
    shape = MeshShape(replica_inter=2, shard_inter=2, replica_intra=1, shard_intra=1, tensor=1)
    step = CompiledStep(text=PROGRAM, shape=shape, argument_bytes=0, temporary_bytes=0)
    with pytest.raises(
        ValueError, match=r"^the clock times exchanges between replicas, .* at most --devices_per_node$"
    ):
        step_time(step, small(), Links(rate="10mbit"), 0.1)


@pytest.mark.parametrize("inner_steps", [0, 10])
def test_a_step_is_its_compute_and_its_part_of_an_exchange(inner_steps: int) -> None:
    shape = MeshShape(replica_inter=NODES, shard_inter=1, replica_intra=1, shard_intra=1, tensor=1)
    step = CompiledStep(text=PROGRAM, shape=shape, argument_bytes=0, temporary_bytes=0)
    config, interval = small(local_sgd__inner_steps=inner_steps), inner_steps or 1
    found = step_time(step, config, Links(rate="10mbit"), 0.1)
    wire_s = 6_000_000 / (WIRE * 1.25e6)
    saved_s = min(0.1 * interval, BURST_BYTES / (WIRE * 1.25e6))  # while the nodes compute
    assert found.sent_bytes == 6_000_000 / interval and found.trips_s == 0
    assert found.bytes_s == pytest.approx((wire_s - saved_s) / interval)
    assert found.step_s == pytest.approx(0.1 + found.bytes_s)
    assert found.waiting == pytest.approx(found.bytes_s / found.step_s)
    far = step_time(step, config, Links(rate="10mbit", latency="20ms"), 0.1)
    assert far.trips_s == pytest.approx(2 * 3 * 2 * LATENCY_S / interval) and far.step_s > found.step_s


def test_one_slow_replica_slows_all_down_as_much_with_and_without_local_steps() -> None:
    fleet = Fleet(replicas=16, slow=3.0)
    every = run_rounds(fleet, compute_s=1.0, exchange_s=0.5, interval=1, rounds=10)
    tenth = run_rounds(fleet, compute_s=1.0, exchange_s=0.5, interval=10, rounds=10)
    assert every.step_s == pytest.approx(3.5) and tenth.step_s == pytest.approx(3.05)
    assert every.useful == pytest.approx(1 / 3.5)


def test_local_steps_average_the_spread_of_steps() -> None:
    fleet = Fleet(replicas=64, spread=0.3)
    every, tenth = (run_rounds(fleet, compute_s=1.0, exchange_s=0.0, interval=n, rounds=200).step_s for n in (1, 10))
    assert 1.8 < every < 2.2 and 1.2 < tenth < 1.3  # the largest of 64 draws is 2.4 standard deviations above the mean


def test_replicas_that_leave_lose_their_round_and_their_absence() -> None:
    fleet = Fleet(replicas=8, leaves_per_hour=36.0, away_s=100.0)  # a leave per 100 s
    found = run_rounds(fleet, compute_s=1.0, exchange_s=0.0, interval=1, rounds=5000)
    assert found.step_s == pytest.approx(1.0) and found.useful == pytest.approx(0.5, abs=0.05)
    paused = run_rounds(replace(fleet, pause_s=5.0), compute_s=1.0, exchange_s=0.0, interval=1, rounds=5000)
    assert paused.step_s > 1.1
    again = run_rounds(fleet, compute_s=1.0, exchange_s=0.0, interval=1, rounds=5000)
    assert found == again  # seeded
