"""Times the collectives of each network level, each many times in one program, and fits latency and bandwidth to them.

Steps and bytes of a collective follow a ring algorithm. Where a library needs more, the fitted bandwidth is
lower.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.collectives import all_gather_chunks, reduce_scatter_chunks, vary
from sharding.mesh import ROW_AXES, MeshShape, find_nodes, make_mesh
from training.metrics.wire import WireCounter

ITEM_BYTES = 4  # float32
REPETITION_S = 0.1  # executions of a fast collective that are timed together
BUDGET_S = 3.0  # for the repetitions of one collective at one size
REPETITIONS = 5  # at most
LONGEST_S = 6.0  # sizes that are expected to take longer are not measured

Collective = Callable[[jax.Array], jax.Array]  # a device's tensor to its result, inside a shard_map
Loop = Callable[[jax.Array, int], jax.Array]
Clock = Callable[[], float]  # seconds since some moment
RING_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}  # of n - 1 steps each


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One collective at one size. `size_bytes` is the whole tensor of a device: gathered, or to be reduced."""

    level: str  # intra: inside a node; inter: between nodes, every device of a node at once
    collective: str
    group_size: int
    devices_per_link: int  # groups that send over the same link at once
    size_bytes: int
    time_s: float  # time of the slowest process, in the fastest repetition, because noise only adds
    times_s: tuple[float, ...]
    executions: int  # in one repetition, one after the other
    wire_tx_bytes: float | None  # sent for one execution by the node that sends most; None where it cannot be read

    @property
    def steps(self) -> int:
        return RING_PASSES[self.collective] * (self.group_size - 1)

    @property
    def link_bytes(self) -> float:
        """Payload of one link in each direction, of all `devices_per_link` groups together."""
        return self.devices_per_link * self.steps * self.size_bytes / self.group_size

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Payload of the link over time, latency included: the bus bandwidth of nccl-tests, here of a whole link."""
        return self.link_bytes / self.time_s


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """time_s = alpha_s * steps + link_bytes / bandwidth_bytes_per_s, and the largest relative error of that."""

    alpha_s: float
    beta_s_per_byte: float
    worst_error: float

    def time_s(self, m: Measurement) -> float:
        """Returns the fitted time of a measurement."""
        return self.alpha_s * m.steps + self.beta_s_per_byte * m.link_bytes

    @property
    def bandwidth_bytes_per_s(self) -> float:
        return 1 / self.beta_s_per_byte


def fit(measurements: Sequence[Measurement]) -> LinkFit:
    """Returns the least squares fit with weights 1 / time: the variance of a time is taken as proportional to it.

    So the small sizes determine the latency, and the large sizes the bandwidth. If noise makes either negative,
    the latency is 0, and the large sizes alone give the bandwidth.
    """
    steps, sent, times = np.array([(m.steps, m.link_bytes, m.time_s) for m in measurements]).T
    root = np.sqrt(times)
    scale = np.array([steps.max(), sent.max()])  # one is in the ones, the other in the millions
    (alpha, beta), *_ = np.linalg.lstsq(np.stack([steps, sent], axis=1) / scale / root[:, None], root)
    alpha, beta = alpha / scale[0], beta / scale[1]
    if min(alpha, beta) < 0:
        alpha, beta = 0.0, sent.sum() / (sent**2 / times).sum()
    errors = abs(alpha * steps + beta * sent - times) / times
    return LinkFit(alpha_s=float(alpha), beta_s_per_byte=float(beta), worst_error=float(errors.max()))


@dataclass(frozen=True, kw_only=True)
class Level:
    """A network level: the mesh, the size of the groups, and how many of them share a link."""

    name: str
    mesh: Mesh
    group_size: int
    devices_per_link: int

    @property
    def axis(self) -> str:
        return f"shard_{self.name}"


def find_mesh(devices_per_node: int) -> Mesh:
    """Returns the mesh of all devices of this cluster: nodes times devices of a node."""
    nodes = find_nodes(jax.devices(), devices_per_node)
    shape = MeshShape(replica_inter=1, shard_inter=len(nodes), replica_intra=1, shard_intra=len(nodes[0]), tensor=1)
    return make_mesh(shape, nodes)


def find_levels(mesh: Mesh) -> list[Level]:
    """Returns the network levels of a mesh; none of one device."""
    num_nodes, local = mesh.shape["shard_inter"], mesh.shape["shard_intra"]
    levels = [
        Level(name="intra", mesh=mesh, group_size=local, devices_per_link=1),
        Level(name="inter", mesh=mesh, group_size=num_nodes, devices_per_link=local),
    ]
    return [level for level in levels if level.group_size > 1]


def measure(level: Level, collective: str, size_bytes: int, clock: Clock = time.perf_counter) -> Measurement:
    """Returns the best time of a collective on tensors of about `size_bytes`, and the bytes that it sent."""
    chunk = max(1, size_bytes // (ITEM_BYTES * level.group_size))
    x = zeros(chunk if collective == "all_gather" else chunk * level.group_size, level.mesh)
    run = compile_loop(collective_of(collective, level), level.mesh)
    repetitions, executions = repeated(run, x, clock)
    times, sent = zip(*repetitions, strict=True)
    over_interfaces = level.name == "inter" and jax.process_count() > 1  # nodes that one process emulates have none
    return Measurement(
        level=level.name,
        collective=collective,
        group_size=level.group_size,
        devices_per_link=level.devices_per_link,
        size_bytes=chunk * level.group_size * ITEM_BYTES,
        time_s=min(times),
        times_s=times,
        executions=executions,
        wire_tx_bytes=min(sent) if over_interfaces and np.isfinite(sent).all() else None,
    )


def collective_of(name: str, level: Level) -> Collective:
    """Returns the collective of this name over the groups of a level: training's own version, if it has one."""
    scope, n = (level.axis,), level.group_size
    over_gloo = jax.default_backend() == "cpu" and jax.process_count() > 1  # training uses its own ring there
    reduce_scatter = partial(reduce_scatter_chunks, scope=scope, hierarchical=True, by_ring=over_gloo)
    return {
        "all_gather": partial(all_gather_chunks, scope=scope, hierarchical=True),
        "reduce_scatter": lambda x: reduce_scatter(x.reshape(n, -1)),
        "all_reduce": lambda x: lax.psum(x, level.axis),
        "all_to_all": lambda x: lax.all_to_all(x.reshape(n, -1), level.axis, 0, 0),
    }[name]


def compile_loop(collective: Collective, mesh: Mesh) -> Loop:
    """Returns a program that runs a collective repeatedly; each run depends on an element of the previous one."""

    def body(_: int, x: jax.Array) -> jax.Array:
        whole = lax.optimization_barrier(collective(x))  # so that XLA does not reduce it to that one element
        return x.at[0].set(vary(whole.ravel()[0], ROW_AXES))

    spec = PartitionSpec(ROW_AXES)
    loop = jax.shard_map(
        lambda x, times: lax.fori_loop(0, times, body, x), mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec
    )
    return jax.jit(loop, donate_argnums=0)


def zeros(items: int, mesh: Mesh) -> jax.Array:
    """Returns an array of `items` zeros per device."""
    sharding = NamedSharding(mesh, PartitionSpec(ROW_AXES))
    return jax.make_array_from_callback((items * mesh.size,), sharding, lambda _: np.zeros(items, np.float32))


def repeated(run: Loop, x: jax.Array, clock: Clock) -> tuple[list[tuple[float, float]], int]:
    """Returns the seconds and bytes of an execution in each repetition, and the executions of a repetition."""
    x, _, _ = timed(run, x, 1, clock)  # compiles, and opens connections
    x, trial_s, _ = timed(run, x, 1, clock)
    executions = max(1, min(1000, int(REPETITION_S / trial_s)))
    found = []
    for _ in range(max(1, min(REPETITIONS, int(BUDGET_S / (executions * trial_s))))):
        x, time_s, tx_bytes = timed(run, x, executions, clock)
        found.append((time_s, tx_bytes))
    return found, executions


def timed(run: Loop, x: jax.Array, executions: int, clock: Clock) -> tuple[jax.Array, float, float]:
    """Returns the result, and per execution the seconds of the slowest process and the most bytes that a node sent."""
    multihost_utils.sync_global_devices("probe")
    counter, start_s = WireCounter(), clock()
    x = jax.block_until_ready(run(x, executions))
    time_s, wire = clock() - start_s, counter.delta()
    mine = np.array([time_s, wire.tx_bytes if wire else np.nan]) / executions
    slowest_s, tx_bytes = np.max(np.reshape(multihost_utils.process_allgather(mine), (-1, 2)), axis=0)
    return x, float(slowest_s), float(tx_bytes)
