"""`StepTime`: the seconds of a mean step, from a compiled program, links and the stated seconds of its compute.

The planner's replay gives the time in which the program waits for its collectives, on the links of gloo.py. The stated
seconds replace the planner's rates of kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from configs.schema import Config
from lab.clock.gloo import SYNC, network_of
from launch.emulate.links import Links
from planner.clusters import EMULATED
from planner.compile import CompiledStep, compile_step
from planner.replay import Timeline, replay
from planner.targets import CPU
from sharding.hlo import behind_warm_up, program_collectives
from sharding.hlo_program import parse_program


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A mean step: compute, and waiting for bytes and for round trips. With local SGD the mean of H steps."""

    compute_s: float
    bytes_s: float
    trips_s: float
    sent_bytes: float  # that a node sends

    @property
    def step_s(self) -> float:
        """Returns the seconds of the step."""
        return self.compute_s + self.bytes_s + self.trips_s

    @property
    def waiting(self) -> float:
        """Returns the share of the step that is spent waiting for the network."""
        return 1 - self.compute_s / self.step_s


def compiled(words: Sequence[str], nodes: int, devices_per_node: int = 1) -> CompiledStep:
    """Returns the step of a config, given as `--config=FILE` and its overrides, as CPU nodes compile it."""
    mesh = [f"--config.mesh.devices_per_node={devices_per_node}", "--config.mesh.num_cpu_devices=0"]
    return compile_step([*words, *mesh], nodes=nodes, devices_per_node=devices_per_node, target=CPU)


def step_time(step: CompiledStep, config: Config, links: Links, compute_s: float) -> StepTime:
    """Returns the time of a mean step on links, with a step's stated seconds of compute.

    ValueError if partition groups span nodes: over gloo training packs their gathers, which the program does not show.
    """
    if step.shape.shard_inter > 1:
        raise ValueError(
            "the clock times exchanges between replicas, but partition groups span nodes; set sharding.strategy=ddp "
            "and sharding.partition_size=0, or a partition_size of at most --devices_per_node"
        )
    program, interval = behind_warm_up(parse_program(step.text)), interval_of(config)
    network = network_of(links, step.shape.devices_per_node)
    timelines = [
        replay(program, step.shape, EMULATED.compute(step.shape.num_devices), one)
        for one in (network, replace(network, node_bandwidth=inf, burst_bytes=0.0))
    ]
    waiting_s, trips_s = (_mean_s(timeline, interval) for timeline in timelines)
    saved_s = min(network.burst_s, interval * compute_s) / interval
    sent = [
        c.inter_bytes * c.times / (interval if c.label == SYNC else 1) for c in program_collectives(program, step.shape)
    ]
    return StepTime(
        compute_s=compute_s,
        bytes_s=max(0.0, waiting_s - trips_s - saved_s),
        trips_s=trips_s,
        sent_bytes=step.shape.devices_per_node * sum(sent),
    )


def interval_of(config: Config) -> int:
    """Returns the steps from one exchange between replicas to the next."""
    return 1 if config.local_sgd.streaming else max(1, config.local_sgd.inner_steps)


def _mean_s(timeline: Timeline, interval: int) -> float:
    """Returns the seconds of a mean step in which the program waits for the links."""
    sync_s, all_s = timeline.use(SYNC).exposed_s, timeline.use().exposed_s
    return all_s - sync_s + sync_s / interval
