"""The memory that a run needs on devices and hosts, and checks that it fits.

The state is checked before anything is compiled, the compiled step and the snapshots before anything is allocated.
"""

import re
import shlex
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Sharding

from elastic.snapshots import Needs
from runtime.consensus import all_gather, new_key
from sharding.scopes import WorldTooSmallError
from sharding.spec import nbytes
from sharding.state import by_name, owner
from training.experiment import Experiment, make_experiment
from training.metrics.units import format_bytes, format_count

REST = "(counters and the like)"  # the part of the optimizer's state that belongs to no parameter
MEMINFO, BOOT_ID = Path("/proc/meminfo"), Path("/proc/sys/kernel/random/boot_id")
OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device; the compiler adds `batch` and `temporaries` to the state."""

    parameters: float
    gradients: float
    optimizer: float
    temporaries: float
    batch: float
    capacity: float  # the most that a program can have

    @property
    def parts(self) -> dict[str, float]:
        """The bytes of each part, by its name."""
        return {name: size for name, size in vars(self).items() if name != "capacity"}

    @property
    def total(self) -> float:
        """The peak, as the compiler says."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether a device has this much memory."""
        return self.total <= self.capacity


def memory_of(experiment: Experiment, argument_bytes: int, temporary_bytes: int, capacity: float) -> Memory:
    """Returns the memory of a device by part; the compiler counts the gradients as temporaries."""
    parameters, gradients, optimizer = state_bytes(experiment)
    gradients = min(gradients, temporary_bytes)
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        temporaries=temporary_bytes - gradients,
        batch=argument_bytes - parameters - optimizer,
        capacity=capacity,
    )


def bytes_by_name(experiment: Experiment) -> dict[str, tuple[int, int, int]]:
    """Returns the bytes of parameter, gradient and optimizer state on a device, by parameter and for REST."""
    plan, shapes = experiment.plan, experiment.state_shapes
    params: dict[str, jax.ShapeDtypeStruct] = by_name(shapes.params)
    gradients: dict[str, Sharding] = by_name(plan.shardings(plan.layout.gradients))
    optimizer = dict.fromkeys([*params, REST], 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes.chain):
        optimizer[owner(path, leaf, params) or REST] += nbytes(leaf, leaf.sharding)
    held = {name: (nbytes(x, x.sharding), nbytes(x, gradients[name]), optimizer[name]) for name, x in params.items()}
    frozen = {name: (nbytes(x, x.sharding), 0, 0) for name, x in by_name(shapes.frozen).items()}
    return held | frozen | {REST: (0, 0, optimizer[REST])}


def state_bytes(experiment: Experiment) -> tuple[int, int, int]:
    """Returns the bytes of parameters, gradients and optimizer state that a device holds."""
    parameters, gradients, optimizer = map(sum, zip(*bytes_by_name(experiment).values(), strict=True))
    return parameters, gradients, optimizer


def check_fits(experiment: Experiment, words: Sequence[str] = ()) -> None:
    """Raises WorldTooSmallError if the state does not fit the devices; every process must call it.

    `words` of the command line describe the config, for the planner's command in the message.
    """
    state, memory = state_bytes(experiment), memory_per_device()
    if memory is None or sum(state) <= memory:
        return
    shape = experiment.plan.layout.shape
    command = [*words, f"--devices={shape.num_devices}", f"--devices_per_node={shape.devices_per_node}"]
    parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in zip(("parameters", "gradients", "optimizer"), state))
    raise WorldTooSmallError(
        f"the state takes {format_bytes(sum(state))} on each device ({parts}), which has {format_bytes(memory)}"
        f"{' of free host memory' if _on_cpus(experiment) else ''}; {_advise_groups(experiment, memory)}; "
        f"`python -m planner.table {shlex.join(command)}` shows what a device holds, here or on other devices"
    )


def _advise_groups(experiment: Experiment, memory: float) -> str:
    """Returns the smallest partition group whose state fits, else how many parameters would fit the largest."""
    least = sum(state_bytes(experiment))
    for size, found in _groups(experiment):
        if found <= memory:
            return f"sharding.strategy=mics and sharding.partition_size={size} take {format_bytes(found)}, which fit"
        least = min(least, found)
    num_params = experiment.model.num_params
    return (
        f"no strategy on these devices holds its {format_count(num_params)} parameters, but about "
        f"{format_count(memory / least * num_params)} would fit"
    )


def _groups(experiment: Experiment) -> Iterator[tuple[int, int]]:
    """Yields each size of partition groups that the run can have, and the state's bytes on a device with that size."""
    config, shape = experiment.config, experiment.plan.layout.shape
    devices = shape.num_devices // shape.stage
    for size in (p for p in range(1, devices + 1) if devices % p == 0):
        by_hand = {"parameters": "", "gradients": "", "optimizer": ""}
        sharding = replace(config.sharding, strategy="mics", partition_size=size, **by_hand)
        try:
            found = sum(state_bytes(make_experiment(replace(config, sharding=sharding))))
        except ValueError:  # the size does not fit the nodes, or other keys
            continue
        yield size, found


def check_step_fits(
    experiment: Experiment, step: jax.stages.Compiled, snapshots: Needs | None, *, restored: bool
) -> list[str]:
    """Returns lines about the memory of the compiled step on a device and of snapshots on a host, none of it allocated.

    WorldTooSmallError if a device or a host has too little, ValueError if the requested snapshots have no room. Every
    process must call it, and all get the same. `restored`: the state is allocated already.
    """
    analysis = step.memory_analysis()
    if analysis is None:
        return []
    on_cpus = _on_cpus(experiment)
    temporaries = temporary_bytes(analysis, experiment.plan.mesh.devices.flat[0].platform)
    capacity = inf if on_cpus else memory_per_device() or inf
    arguments = analysis.argument_size_in_bytes
    if experiment.config.sharding.replicas == "independent":  # a share's program does not take the optimizer state
        arguments += state_bytes(experiment)[2]
    held = memory_of(experiment, arguments, temporaries, capacity)
    parts = " + ".join(f"{name} {format_bytes(size)}" for name, size in held.parts.items())
    if not held.fits:
        raise WorldTooSmallError(
            f"the step takes {format_bytes(held.total)} on each device ({parts}), which has {format_bytes(capacity)}; "
            f"try {_less(experiment, held)}"
        )
    there = sum(nbytes(x, x.sharding) for x in jax.tree.leaves(experiment.state_shapes.checkpoint_state))
    new = held.total - restored * there
    hosts = _hosts(jax.local_device_count() * new if on_cpus else 0, snapshots)
    for host in hosts:
        _check_host(experiment, held, host, parts if on_cpus else "")
    of_device = "" if on_cpus or capacity == inf else f" of {format_bytes(capacity)}"
    lines = [f"a device takes {format_bytes(held.total)}{of_device}: {parts}"]
    if snapshots:
        most = max(host.snapshots for host in hosts)
        two = f", two in {snapshots.folder}" if snapshots.is_in_memory else ""
        lines.append(f"snapshots take {format_bytes(most)} of a host's memory: one as a page-locked copy{two}")
        lines += _of_room(experiment, snapshots, is_new=not restored)
    return lines


def temporary_bytes(analysis: Any, platform: str) -> int:
    """Returns the bytes of a device's memory that a program takes besides its arguments, by jax's memory analysis.

    XLA for TPUs counts more than HBM as temporaries; the peak is of HBM alone.
    """
    if platform == "tpu":
        return max(0, analysis.peak_memory_in_bytes - analysis.argument_size_in_bytes)
    return analysis.temp_size_in_bytes


@contextmanager
def one_line_if_too_large(experiment: Experiment, compares: Callable[[], object]) -> Iterator[None]:
    """Raises WorldTooSmallError if the compiler refuses a step that needs more memory than a device has, as on TPUs.

    `compares` is called before, for the phase of the process.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        if "RESOURCE_EXHAUSTED" not in reason:
            raise
        compares()
        parameters, gradients, optimizer = state_bytes(experiment)
        state = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}
        advice = _less(experiment, Memory(**state, temporaries=0, batch=0, capacity=inf))
        raise WorldTooSmallError(f"the step cannot be compiled: {reason}; try {advice}") from error


@dataclass(frozen=True, kw_only=True)
class Host:
    """The bytes that the processes of a host need of its memory."""

    name: str
    devices: float  # of CPUs; GPUs have separate memory
    snapshots: float
    free: float  # inf: unknown


def _hosts(devices: float, snapshots: Needs | None) -> list[Host]:
    """Returns the memory that each host's processes need, summed over the processes."""
    s = snapshots
    in_folder, there = (s.kept, s.there) if s and s.is_in_memory else (0, 0)
    free = _free_bytes()
    own = [_host(), devices, (s.pinned if s else 0) + in_folder, free and free + there, socket.gethostname()]
    found: dict[str, Host] = {}
    for host, of_devices, of_snapshots, free, name in all_gather(new_key("hosts"), own):
        before = found.get(host, Host(name=name, devices=0, snapshots=0, free=inf))
        found[host] = Host(
            name=before.name,
            devices=before.devices + of_devices,
            snapshots=before.snapshots + of_snapshots,
            free=min(before.free, free or inf),
        )
    return [*found.values()]


def _check_host(experiment: Experiment, held: Memory, host: Host, parts: str) -> None:
    """Raises WorldTooSmallError if a host has too little memory; `parts` of a device, if it uses the host's memory."""
    if host.devices + host.snapshots <= host.free:
        return
    each = f"its devices {format_bytes(host.devices)}, each {parts}; " if parts else ""
    if host.devices <= host.free:
        fix = f"without snapshots, by elastic.snapshot_every=0, it takes {format_bytes(host.devices)}, which fits"
    else:
        share = (host.free - host.snapshots) * held.total / host.devices
        fix = f"try {_less(experiment, replace(held, capacity=share))}"
    raise WorldTooSmallError(
        f"the run takes {format_bytes(host.devices + host.snapshots)} of the memory of {host.name} "
        f"({each}snapshots {format_bytes(host.snapshots)}), which has {format_bytes(host.free)} left; {fix}"
    )


def _less(experiment: Experiment, held: Memory) -> str:
    """Returns settings to try that need less of a device; only the state's bytes are known before compiling them."""
    config, now = experiment.config, held.parameters + held.gradients + held.optimizer
    micro_size = experiment.batches.config.micro_size
    tried = [f"a batch.micro_size below {micro_size}"] if micro_size > 1 else []
    tried += ["model.remat=full"] if config.model.remat not in ("full", "offload") else []
    room = held.capacity - held.temporaries - held.batch
    if group := next(((p, size) for p, size in _groups(experiment) if size < now and size <= room), None):
        tried.append(
            f"sharding.strategy=mics and sharding.partition_size={group[0]}, with which the state takes "
            f"{format_bytes(group[1])} of a device and not {format_bytes(now)}"
        )
    return "; or ".join(tried) or "more devices, or a smaller model"


def _of_room(experiment: Experiment, snapshots: Needs, *, is_new: bool) -> list[str]:
    """Returns a warning if the folder of the snapshots is too small for them.

    ValueError for a new run that requests snapshots. A run that has begun continues without them.
    """
    told = all_gather(new_key("room"), [_host(), snapshots.folder, snapshots.kept, snapshots.there + snapshots.free])
    kept: dict[tuple[str, str], int] = {}
    for host, folder, size, _ in told:
        kept[host, folder] = kept.get((host, folder), 0) + size
    lacking = [(folder, kept[host, folder], room) for host, folder, _, room in told if kept[host, folder] > room]
    if not lacking:
        return []
    folder, size, room = lacking[0]
    said = f"two snapshots take {format_bytes(size)} of {folder}, which has room for {format_bytes(room)}"
    fix = "set elastic.memory_dir to a larger RAM disk (of a container: --shm-size), or elastic.snapshot_every=0"
    if is_new and experiment.config.elastic.snapshot_every > 0:
        raise ValueError(f"{said}; {fix}")
    return [f"warning: {said}: a node's loss will cost the steps since the newest checkpoint; {fix}"]


def memory_per_device() -> float | None:
    """Returns the bytes of the smallest device; None where they are unknown. Every process must call it.

    CPU devices share the free memory of their host with the devices of its other processes.
    """
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        own = [_host(), len(devices), _free_bytes()]
    else:  # 0: unknown
        least = min((device.memory_stats() or {}).get("bytes_limit", 0) for device in devices)
        own = [f"process {jax.process_index()}", 1, least]
    given = all_gather(new_key("memory"), own)
    sharing: dict[str, int] = {}
    for host, count, _ in given:
        sharing[host] = sharing.get(host, 0) + count
    return min(memory / sharing[host] for host, _, memory in given) or None


def _on_cpus(experiment: Experiment) -> bool:
    """Whether the devices use the memory of the host."""
    return experiment.plan.mesh.devices.flat[0].platform == "cpu"


def _host() -> str:
    """Returns an identifier of this host."""
    return BOOT_ID.read_text() if BOOT_ID.exists() else socket.gethostname()  # a sandbox may lack it


def _free_bytes() -> int:
    """Returns the memory that programs on this host, in this container, can still get; 0 if not on Linux."""
    found = re.search(r"^MemAvailable: +(\d+) kB$", MEMINFO.read_text() if MEMINFO.exists() else "", re.MULTILINE)
    return max(1, min([1024 * int(found[1]), *_left_by_groups()])) if found else 0


def _left_by_groups() -> Iterator[int]:
    """Yields the memory left by the limits of this process' control groups (v1, v2); cached files count as free."""
    for line in OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = GROUPS / "memory" if controllers else GROUPS
        limit, used, cached = _V1 if controllers else _V2
        group = root / path.lstrip("/")
        for folder in (folder for folder in (group, *group.parents) if folder.is_relative_to(root)):
            # a container may see its own group as the root, and not the path
            if (folder / limit).exists() and (most := (folder / limit).read_text().strip()) != "max":
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield int(most) - int((folder / used).read_text()) + int(statistics.get(cached, 0))
