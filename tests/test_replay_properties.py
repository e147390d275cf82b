"""What holds of every replay: no network, no exposure; a faster link or device is never slower; sums agree."""

import random
from dataclasses import replace
from itertools import pairwise
from math import inf, isclose

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.schedules import DEVICE, INTER, INTRA, NETWORK, SHAPE, gather, kernel, loop, replayed
from support.tables import every_row

from planner.replay import REPEATED, Timeline, replay
from sharding.hlo_program import parse_program
from sharding.mesh import find_nodes, make_mesh

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


@every_row("seed", range(20))
def test_twice_as_fast_is_never_slower(seed: int) -> None:
    lines, more = schedule(seed)
    slow = replayed(*lines, more=more)
    networks = [
        replace(NETWORK, intra_bandwidth=2 * NETWORK.intra_bandwidth),
        replace(NETWORK, node_bandwidth=2 * NETWORK.node_bandwidth),
    ]
    for network in networks:
        assert replayed(*lines, more=more, network=network).step_s <= slow.step_s * (1 + 1e-9)
    faster = replayed(*lines, more=more, device=replace(DEVICE, memory_bandwidth=2))
    assert faster.step_s <= slow.step_s * (1 + 1e-9) and isclose(2 * faster.compute_s, slow.compute_s)


@every_row("seed", range(10))
def test_without_a_network_compute_is_left(seed: int) -> None:
    lines, more = schedule(seed)
    network = replace(NETWORK, intra_bandwidth=inf, node_bandwidth=inf)
    timeline = replayed(*lines, more=more, network=network)
    without = [line for line in lines if "all-gather" not in line]
    inside = "\n".join(line for line in more.splitlines() if "all-gather" not in line)
    alone = replayed(*without, more=inside)
    assert timeline.step_s == timeline.compute_s == alone.step_s == alone.compute_s


@every_row("seed", range(10))
def test_loops_are_as_if_written_out(seed: int) -> None:
    """What is multiplied is what a replay of every iteration finds."""
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


@every_row("seed", range(10))
def test_bars_of_a_lane_do_not_overlap(seed: int) -> None:
    lines, more = schedule(seed)
    timeline = replayed(*lines, more=more)
    for lane in ("compute", "intra", "inter"):
        bars = sorted((bar.start_s, bar.end_s) for bar in timeline.intervals if bar.lane == lane)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(bars))


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
