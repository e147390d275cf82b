"""The bytes of a run's state on each device, and whether they fit: known before anything is made or compiled."""

import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Sharding

from metrics.units import format_bytes, format_count
from runtime.consensus import all_gather, new_key
from sharding.scopes import WorldTooSmallError
from sharding.spec import nbytes
from sharding.state import by_name, owner
from training.experiment import Experiment, make_experiment

REST = "(counters and the like)"  # of the optimizer's state: what belongs to no parameter
MEMINFO, BOOT_ID = Path("/proc/meminfo"), Path("/proc/sys/kernel/random/boot_id")


def bytes_by_name(experiment: Experiment) -> dict[str, tuple[int, int, int]]:
    """Returns the bytes of parameter, gradient and optimizer state on a device, by parameter, and those of REST."""
    plan, shapes = experiment.plan, experiment.state_shapes
    params: dict[str, jax.ShapeDtypeStruct] = by_name(shapes.params)
    gradients: dict[str, Sharding] = by_name(plan.shardings(plan.layout.gradients))
    optimizer = dict.fromkeys([*params, REST], 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes.chain):
        optimizer[owner(path, leaf, params) or REST] += nbytes(leaf, leaf.sharding)
    held = {name: (nbytes(x, x.sharding), nbytes(x, gradients[name]), optimizer[name]) for name, x in params.items()}
    return held | {REST: (0, 0, optimizer[REST])}


def state_bytes(experiment: Experiment) -> tuple[int, int, int]:
    """Returns the bytes of parameters, gradients and optimizer state that a device holds."""
    parameters, gradients, optimizer = map(sum, zip(*bytes_by_name(experiment).values(), strict=True))
    return parameters, gradients, optimizer


def check_fits(experiment: Experiment, words: Sequence[str] = ()) -> None:
    """Raises WorldTooSmallError if the state does not fit the devices; every process must call it.

    `words` are those of the command line that describe the config, for the planner's command in the message.
    """
    state, memory = state_bytes(experiment), memory_per_device()
    if memory is None or sum(state) <= memory:
        return
    shape, on_cpus = experiment.plan.layout.shape, experiment.plan.mesh.devices.flat[0].platform == "cpu"
    command = [*words, f"--devices={shape.num_devices}", f"--devices_per_node={shape.devices_per_node}"]
    parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in zip(("parameters", "gradients", "optimizer"), state))
    raise WorldTooSmallError(
        f"the state takes {format_bytes(sum(state))} on each device ({parts}), which has {format_bytes(memory)}"
        f"{' of free host memory' if on_cpus else ''}; {_what_fits(experiment, memory)}; "
        f"`python -m planner.table {shlex.join(command)}` shows what a device holds, here or on other devices"
    )


def _what_fits(experiment: Experiment, memory: float) -> str:
    """Returns the smallest partition group whose state fits, else how many parameters would fit the largest."""
    config, shape = experiment.config, experiment.plan.layout.shape
    devices, least = shape.num_devices // shape.stage, sum(state_bytes(experiment))
    for size in (p for p in range(1, devices + 1) if devices % p == 0):
        by_hand = {"parameters": "", "gradients": "", "optimizer": ""}
        sharding = replace(config.sharding, strategy="mics", partition_size=size, **by_hand)
        try:
            found = sum(state_bytes(make_experiment(replace(config, sharding=sharding))))
        except ValueError:  # the size does not go with the nodes, or with other keys
            continue
        if found <= memory:
            return f"sharding.strategy=mics and sharding.partition_size={size} take {format_bytes(found)}, which fit"
        least = min(least, found)
    num_params = experiment.model.num_params
    return (
        f"no strategy on these devices holds its {format_count(num_params)} parameters, but about "
        f"{format_count(memory / least * num_params)} would fit"
    )


def memory_per_device() -> float | None:
    """Returns the bytes of the device that has least; None where that is not known. Every process must call it.

    CPU devices share what their host has free, those of other processes on the same host too.
    """
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        host = BOOT_ID.read_text() if BOOT_ID.exists() else socket.gethostname()  # a sandbox may lack it
        own = [host, len(devices), _free_bytes()]
    else:  # 0: not known
        least = min((device.memory_stats() or {}).get("bytes_limit", 0) for device in devices)
        own = [f"process {jax.process_index()}", 1, least]
    given = all_gather(new_key("memory"), own)
    sharing: dict[str, int] = {}
    for host, count, _ in given:
        sharing[host] = sharing.get(host, 0) + count
    return min(memory / sharing[host] for host, _, memory in given) or None


def _free_bytes() -> int:
    """Returns the memory that programs on this host can still get; 0 where no Linux says it."""
    found = re.search(r"^MemAvailable: +(\d+) kB$", MEMINFO.read_text() if MEMINFO.exists() else "", re.MULTILINE)
    return 1024 * int(found[1]) if found else 0
