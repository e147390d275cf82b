"""Small schedules for tests of the replay: times are seconds a byte, so that they can be worked out by hand."""

from math import isclose

from planner.clusters import SCHEDULE, DeviceSpec
from planner.links import Network
from planner.replay import Timeline, replay
from sharding.hlo_program import parse_program
from sharding.mesh import MeshShape

SHAPE = MeshShape(replica_inter=2, shard_inter=1, replica_intra=1, shard_intra=2, tensor=1)
# a product of 4 x 4 takes 128 s, other kernels one second for each byte, nothing else
DEVICE = DeviceSpec(
    peak_flops={"f32": 2}, matmul_fraction=0.5, memory_bandwidth=1, functions_per_s=float("inf"), launch_s=0
)
# one byte of each device takes 1 s inside the node and 10 s between nodes
NETWORK = Network(
    devices_per_node=2,
    intra_bandwidth=1,
    intra_latency_s=0,
    node_bandwidth=0.2,
    inter_latency_s=0,
    all_to_all_fraction=0.5,
    tree_fractions=(),
)
INTRA, INTER = "replica_groups={{0,1},{2,3}}", "replica_groups={{0,2},{1,3}}"


def replayed(
    *lines: str, more: str = "", network: Network = NETWORK, device: DeviceSpec = DEVICE, hides: str = SCHEDULE
) -> Timeline:
    """Returns the timeline of an entry computation with a parameter %p of 5 bytes."""
    body = "\n".join(f"  {line}" for line in ("%p = u8[5] parameter(0)", *lines))
    text = f"HloModule jit_step, is_scheduled=true\n\n{more}\nENTRY %main (p: u8[5]) -> u8[5] {{\n{body}\n}}\n"
    timeline = replay(parse_program(text), SHAPE, device, network, hides)
    exposed = sum(use.exposed_s for use in timeline.uses.values())
    assert isclose(timeline.step_s, timeline.compute_s + exposed)
    assert all(use.exposed_s <= use.busy_s * (1 + 1e-9) for use in timeline.uses.values())
    return timeline


def gather(name: str, groups: str, size: int = 10) -> tuple[str, str]:
    """Returns a start and a done of half of `size` bytes: size / 2 seconds inside the node, 5 times size between."""
    start = f"%{name} = (u8[{size // 2}], u8[{size}]) all-gather-start(%p), {groups}, dimensions={{0}}"
    return start, f"%{name}.done = u8[{size}] all-gather-done(%{name})"


def kernel(name: str, seconds: int) -> str:
    return f"%{name} = u8[{seconds - 5}] negate(%p)"


def loop(trips: int, carried: str, value: str, lines: tuple[str, ...], result: str, inside: str = "") -> str:
    """Returns the computations of a loop whose tuple is (counter, a `carried`), `%v` in the body."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"""{inside}
%cond (x: (s32[], {carried})) -> pred[] {{
  %x = (s32[], {carried}) parameter(0)
  %j = s32[] get-tuple-element(%x), index=0
  %limit = s32[] constant({trips})
  ROOT %less = pred[] compare(%j, %limit), direction=LT
}}

%body (y: (s32[], {carried})) -> (s32[], {carried}) {{
  %y = (s32[], {carried}) parameter(0)
  %i = s32[] get-tuple-element(%y), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %{value} = {carried} get-tuple-element(%y), index=1
  %p = u8[5] constant(0)
{body}
  ROOT %t = (s32[], {carried}) tuple(%next, %{result})
}}
"""
