"""A trace of some steps (`profile.start`), and the time of its collectives inside and between nodes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from sharding.hlo import CALLS, collective_of
from sharding.hlo_program import Instruction, Program, parse_program
from sharding.mesh import MeshShape

BETWEEN, INSIDE = "between nodes", "inside nodes"
COMPUTE = "compute"
Span = tuple[float, float, str]  # start and end in ns, and the kind of the operation: BETWEEN, INSIDE or COMPUTE


def start_trace(folder: Path) -> None:
    """Starts a trace of devices and phases, without Python's functions, which would make it large and steps slow."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(str(folder), profiler_options=options)


def collective_times(folder: Path, hlo_text: str, shape: MeshShape, steps: int) -> dict[str, dict[str, float]]:
    """Returns the seconds per step of the collectives in the newest trace in `folder`, by BETWEEN and INSIDE.

    `total_s` includes waiting for other devices. During `exposed_s` of it the device computes nothing. Both are means
    over the devices of this process. `hlo_text` is the compiled step, which ran `steps` times on devices that form a
    mesh of `shape`. A level without collectives in the trace is left out.
    """
    devices = device_spans(folder, hlo_text, shape)
    times: dict[str, dict[str, float]] = {}
    for level in (BETWEEN, INSIDE):
        found = [_collective_ns(spans, level) for spans in devices]
        if any(total for total, _ in found):
            means = (sum(ns) / len(devices) / steps / 1e9 for ns in zip(*found, strict=True))
            times[level] = dict(zip(("total_s", "exposed_s"), means))
    return times


def device_spans(folder: Path, hlo_text: str, shape: MeshShape) -> list[list[Span]]:
    """Returns the operations of a compiled step in the newest trace in `folder`, device by device.

    ValueError without a trace.
    """
    module = hlo_text.removeprefix("HloModule ").partition(",")[0]
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        raise ValueError(
            f"{folder} has no trace (*.xplane.pb); set profile.start to a step of the run, and run it again"
        )
    return _spans(files[-1], module, _kinds(parse_program(hlo_text), shape))


def _kinds(program: Program, shape: MeshShape) -> dict[str, str]:
    """Returns the kind of each operation of a program, by its name, without loops, calls and halves of pairs."""

    def holds_others(instruction: Instruction) -> bool:
        """Whether the trace also has the operations inside; a matrix product of a GPU's library is a custom-call."""
        return instruction.opcode == "while" or (instruction.opcode in CALLS and bool(instruction.calls))

    kinds: dict[str, str] = {}
    for computation in program.computations.values():
        for instruction in computation.instructions:
            collective = collective_of(instruction, computation, program, shape)
            if collective:
                kinds[instruction.name] = BETWEEN if collective.inter_bytes else INSIDE
            elif not (holds_others(instruction) or instruction.opcode.endswith(("-start", "-done"))):
                kinds[instruction.name] = COMPUTE
    return kinds


def _spans(file: Path, module: str, kinds: Mapping[str, str]) -> list[list[Span]]:
    """Returns the operations of a module, device by device."""
    devices: dict[tuple[str, Any], list[Span]] = defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for event in (event for line in plane.lines for event in line.events):
            stats = dict(event.stats)
            kind = kinds.get(str(stats.get("hlo_op")))
            if kind and stats.get("hlo_module") == module:
                device = plane.name, stats.get("device_ordinal")  # CPU devices share a plane
                devices[device].append((event.start_ns, event.start_ns + event.duration_ns, kind))
    return [devices[device] for device in sorted(devices, key=lambda device: (device[0], device[1] or 0))]


def _collective_ns(spans: Iterable[Span], level: str) -> tuple[float, float]:
    """Returns the time in which a device is in collectives of a level, and the part of it without compute."""
    edges = [(start, 1, kind) for start, _, kind in spans] + [(end, -1, kind) for _, end, kind in spans]
    total = exposed = before = 0.0
    active = {level: 0, COMPUTE: 0}
    for time, change, kind in sorted(edges):
        if active[level]:
            total += time - before
            exposed += 0 if active[COMPUTE] else time - before
        before = time
        if kind in active:
            active[kind] += change
    return total, exposed
