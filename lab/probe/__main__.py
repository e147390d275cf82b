"""Measures the cluster that it runs on: rates of its devices, and its links inside and between nodes.

    python -m lab.probe [--out=runs/probe] [--sizes=1k,64k,1m,16m]

Start it as train.py is started: once per process, by SLURM, Open MPI, Kubernetes, `launch.emulate`, or with
`--coordinator`, `--num_processes` and `--process_id`. Process 0 prints tables and writes `probe.json`, whose
keys lab/probe/report.py lists and which `python -m planner --probe` takes, and `probe.png` of the links.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from lab.probe import report
from lab.probe.device import Sizes, Timed, figures, measure_copies, measure_device, memory_bytes, sizes_of, works
from lab.probe.measure import LONGEST_S, RING_PASSES, Level, Measurement, find_levels, find_mesh, measure
from runtime import launchers
from runtime.command_line import OneLineParser, complain, make_folder, named_path, prepare_output
from runtime.exit_codes import ExitCode, ResumableError
from runtime.rendezvous import meet
from training.metrics.environment import environment
from training.metrics.units import format_bytes

SIZES = "1k,4k,16k,64k,256k,1m,4m,16m,64m"
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def main(argv: Sequence[str], device_sizes: Sizes | None = None) -> int:
    """Runs the probe with the platform's or these sizes; returns the exit code; a user's mistake is one line."""
    prepare_output()
    try:
        options = parse(argv)
        sizes = parse_sizes(options.sizes)
        make_folder(options.out, "--out")  # before other processes wait for this one
        if devices := launchers.virtual_devices():
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", devices)
        join(options)
        mesh = find_mesh(options.devices_per_node)
    except (ValueError, OSError) as error:
        complain(error)
        return ExitCode.BAD_INPUT
    except ResumableError as error:
        complain(OSError(str(error)))
        return ExitCode.RESUMABLE
    device = jax.devices()[0]
    say(f"{mesh.size} device{'s' * (mesh.size > 1)} ({device.device_kind})")
    of_device = measure_devices(device_sizes or sizes_of(device), mesh)
    levels = find_levels(mesh)
    say(f"\nbandwidth is payload on the link over time\n{report.HEADS}" if levels else "\none device: there is no link")
    measured = [m for level in levels for collective in RING_PASSES for m in measure_aloud(level, collective, sizes)]
    if jax.process_index() == 0:
        here = {"device_kind": device.device_kind, "platform": device.platform}
        here |= {"devices": jax.device_count(), "processes": jax.process_count()}
        report.finish(of_device, measured, environment(here), options.out)
    return 0


def join(options: argparse.Namespace) -> None:
    """Joins the other processes of the probe, if any, which have the same --out."""
    place = launchers.find_place(
        launchers.Address(
            coordinator=options.coordinator, num_processes=options.num_processes, process_id=options.process_id
        )
    )
    if place:
        run = f"probe {options.out.absolute()}"
        meeting = meet(place, run, lambda: run)
        meeting.start_jax(place)
        for peer in meeting.peers:
            peer.connection.close()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the options of the command line. ValueError for a mistake in them."""
    parser = OneLineParser(prog="python -m lab.probe", description="Measures devices and links.")
    parser.add_argument(
        "--out", type=named_path, default=Path("runs/probe"), help="directory for probe.json and probe.png"
    )
    parser.add_argument("--sizes", default=SIZES, help="bytes of the whole tensor of a device, such as 64k,1m,16m")
    parser.add_argument("--devices_per_node", type=int, default=0, help="0: processes on the same host form a node")
    parser.add_argument("--coordinator", help="HOST:PORT of process 0")
    parser.add_argument("--num_processes", type=int, help="number of processes")
    parser.add_argument("--process_id", type=int, help="number of this process")
    options = parser.parse_args(argv)
    if options.devices_per_node < 0:
        raise ValueError(f"--devices_per_node={options.devices_per_node} must be 0 or more")
    return options


def parse_sizes(text: str) -> list[int]:
    """Returns sizes in bytes, ascending. ValueError for fewer than two, such as `64k`, or without a large size."""
    matches = [re.fullmatch(r"(\d+)([kmg]?)b?", word.strip().lower()) for word in text.split(",")]
    sizes = {int(m[1]) * UNITS[m[2]] for m in matches if m}
    if not all(matches) or len(sizes) < 2 or min(sizes) < 1 or max(sizes) < 2**16:
        raise ValueError(f"--sizes={text}: give two sizes or more, one of 64k at least, such as 1k,64k,16m")
    return sorted(sizes)


def measure_devices(sizes: Sizes, mesh: Mesh) -> dict[str, Any]:
    """Measures and prints the rates of the devices; each unsupported operation is one line."""
    say(f"matrix products and attention in {sizes.dtype}\n{report.DEVICE_HEADS}")
    measured: list[Timed] = []
    failed: dict[str, str] = {}
    for work in works(sizes):
        try:
            measured.append(measure_device(work, mesh))
            say(report.device_row(measured[-1]))
        except (ValueError, RuntimeError) as error:
            failed[f"{work.figure}, {work.of}"] = why = " ".join(str(error).split())[:200]
            say(f"{work.figure}, {work.of}: not measured ({why})")
    measured.append(measure_copies(sizes.array_bytes, mesh))
    say(report.device_row(measured[-1]))
    return figures(measured, sizes, mesh.size, failed) | {"memory_bytes": memory_bytes(mesh.local_devices[0])}


def measure_aloud(level: Level, collective: str, sizes: Sequence[int]) -> list[Measurement]:
    """Returns a measurement of each size, ascending, and prints it at once; after two, those up to LONGEST_S."""
    measured: list[Measurement] = []
    for size in sizes:
        if len(measured) > 1 and measured[-1].time_s * size / measured[-1].size_bytes > LONGEST_S:
            start = report.COLUMNS.format(level.name, collective, format_bytes(size), "", "", "").rstrip()
            say(f"{start}  and more left out: they would take too long")
            break
        measured.append(measure(level, collective, size))
        say(report.row(measured[-1]))
    return measured


def say(line: str) -> None:
    """Prints a line, in process 0 only."""
    if jax.process_index() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
