"""Runs train.py on all available nodes of a Ray cluster, and continues when nodes join or leave.

With `sharding.replicas=independent` each node has a separate group, which starts and ends independently.

    python -m launch.ray --min_nodes=1 --max_nodes=4 [--nodes_per_group=1] -- python train.py --workdir=... ...

Exit codes: 0 finished; 75 stopped but resumable (SIGTERM, Ctrl-C); 2 a mistake; 1 or the program's exit code: an error.
docs/elasticity.md describes the parts.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from configs import command_line
from launch.ray_engine import ReplicaGroups, RestartingEngine
from launch.ray_plan import Limits
from runtime.command_line import OneLineParser, check_installed, complain, prepare_output, split
from runtime.events import EventLog
from runtime.progress import workdir_of


def main(argv: Sequence[str]) -> int:
    """Runs the program and returns the exit code. A user's mistake is reported in one line."""
    prepare_output()
    try:
        options, command, workdir = parse(argv[1:])
        limits = Limits(
            min_nodes=options.min_nodes, max_nodes=options.max_nodes, nodes_per_group=options.nodes_per_group
        )
        check_installed("ray", "launch.ray")
        return run(options, limits, command, workdir)
    except (ValueError, OSError) as error:
        return complain(error)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str], Path]:
    """Returns the options, the program with its arguments after `--`, and its directory.

    ValueError describes a mistake.
    """
    ours, command = split(argv)
    parser = OneLineParser(prog="python -m launch.ray", description=__doc__)
    parser.add_argument("--address", default="auto", help="of the Ray cluster, HOST:PORT (default: the one here)")
    parser.add_argument("--min_nodes", type=int, required=True, help="with fewer it waits")
    parser.add_argument("--max_nodes", type=int, required=True, help="with more the others stay idle")
    parser.add_argument("--nodes_per_group", type=int, default=1, help="that a partition group spans")
    parser.add_argument("--devices_per_node", type=int, default=0, help="JAX's virtual CPU devices (0: as configured)")
    parser.add_argument("--max_failures", type=int, default=5, help="in a row in which a program does not get on")
    options = parser.parse_args(ours)
    if len(command) < 2 or not command[1].endswith(".py"):
        raise ValueError("no program; give it after --, such as `-- python train.py --config=...`")
    for path, found in ((command[0], shutil.which(command[0])), (command[1], os.path.exists(command[1]))):
        if not found:
            raise ValueError(f"there is no {path}; give the path of a Python and of its program")
    if options.devices_per_node < 0 or options.max_failures < 0:
        raise ValueError("--devices_per_node and --max_failures must be 0 or more")
    workdir = workdir_of(command)
    if not workdir:
        raise ValueError("the program has no --workdir=DIR; give one, for its metrics there tell what it has finished")
    words = command_line.words_of_config(command[1:])
    options.independent = words and command_line.parse([command[1], *words]).sharding.replicas == "independent"
    return options, command, workdir


def run(options: argparse.Namespace, limits: Limits, command: Sequence[str], workdir: Path) -> int:
    """Runs the program until it finishes or is asked to stop. Returns the exit code."""
    from launch.ray_members import Members  # this import needs Ray

    devices = {"JAX_NUM_CPU_DEVICES": str(options.devices_per_node)} if options.devices_per_node else {}
    with Members(options.address, limits.max_nodes, command, devices, EventLog(workdir, "engine")) as members:
        engine = ReplicaGroups if options.independent else RestartingEngine
        return engine(members, limits, workdir, max_failures=options.max_failures).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
