"""Runs a program on an emulated cluster: nodes with separate networks, and rate-limited links between them.

    python -m launch.emulate --nodes=4 --devices_per_node=2 --rate=1gbit -- python train.py --config=...
    python -m launch.emulate ctl status | cut N | heal N | slow N RATE | kill N | stop N | cont N | add [-- PROGRAM]

docs/emulation.md describes the nodes and the environment of the program.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from launch.emulate import namespaces
from launch.emulate.control import Control, ask, check_name
from launch.emulate.job import ClusterJob
from launch.emulate.links import Links
from launch.emulate.nodes import MAX_NODES, EmulatedCluster
from launch.emulate.table import Monitor, shown
from runtime.command_line import OneLineParser, complain, make_folder, named_path, prepare_output, split
from runtime.files.paths import user_path

ROOT = Path(__file__).resolve().parents[2]  # the repository
POLL_S = 0.05
NODE_VERBS = {
    "cut": "drop all packets from and to a node: peers see silence",
    "heal": "undo cut",
    "kill": "SIGKILL to all processes of a node",
    "stop": "SIGSTOP to all processes of a node",
    "cont": "undo stop",
}


def main(argv: Sequence[str]) -> int:
    """Runs the program and returns the exit code of the job. A user's mistake is reported in one line."""
    prepare_output()
    try:
        if argv[1:2] == ["ctl"]:
            print(control(argv[2:]))
            return 0
        options, links, command = parse(argv[1:])
        if options.check:
            print("the options are right")
            return 0
        program = check_program(command)
        make_folder(options.workdir, "--workdir")
        if missing := namespaces.missing_tool():
            raise ValueError(missing)
        namespaces.become_privileged([sys.executable, "-m", "launch.emulate", *argv[1:]])
        return run(options, links, [program, *command[1:]])
    except (ValueError, OSError) as error:
        return complain(error)
    except KeyboardInterrupt:  # before the program ran
        return 128 + signal.SIGINT


# ------------------------------------------------------------------------------------------------ command line


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Links, list[str]]:
    """Returns the options, the links, and the program after `--`. ValueError describes a mistake."""
    ours, command = split(argv)
    parser = OneLineParser(prog="python -m launch.emulate", description=__doc__)
    parser.add_argument("--nodes", type=int, required=True, help="how many there are at the start; `ctl add` adds one")
    parser.add_argument("--devices_per_node", type=int, required=True, help="JAX's virtual devices of each node")
    parser.add_argument("--processes_per_node", type=int, default=1, help="they share the node's devices")
    parser.add_argument("--independent", action="store_true", help="each node is a world of its own (docs/replicas.md)")
    parser.add_argument("--rate", default="none", help="of each node's link, as for tc: 1gbit, 200mbit, none")
    parser.add_argument("--latency", default="0ms", help="one way between two nodes: 1ms, 50us")
    parser.add_argument("--jitter", default="0ms", help="the latency varies by so much")
    parser.add_argument("--loss", default="0%", help="of packets: 0.1%%")
    parser.add_argument("--workdir", type=named_path, help="logs and traffic.json (default: runs/emulated/NAME)")
    parser.add_argument("--name", default=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", help="for ctl")
    parser.add_argument("--grace_s", type=float, default=60.0, help="for the others to end when a process failed")
    parser.add_argument("--check", action="store_true", help="only say what is wrong with the options")
    options = parser.parse_args(ours)
    check_name(options.name)
    options.workdir = options.workdir or Path("runs", "emulated", options.name)
    if not command and not options.check:
        raise ValueError("no program; give it after --, such as `-- python train.py --config=...`")
    if not 1 <= options.nodes <= MAX_NODES:
        raise ValueError(f"--nodes={options.nodes}: from 1 to {MAX_NODES} have an address")
    if options.devices_per_node < 1 or options.processes_per_node < 1:
        raise ValueError("--devices_per_node and --processes_per_node must be 1 or more")
    if options.devices_per_node % options.processes_per_node:
        raise ValueError(
            f"--devices_per_node={options.devices_per_node} must be a multiple of "
            f"--processes_per_node={options.processes_per_node}"
        )
    links = Links(rate=options.rate, latency=options.latency, jitter=options.jitter, loss=options.loss)
    return options, links, command


def check_program(command: Sequence[str]) -> str:
    """Returns the path of the program. ValueError if it does not exist."""
    found = shutil.which(command[0])
    if not found:
        raise ValueError(f"there is no program {command[0]}; give its path, or put it on the PATH")
    return os.path.abspath(found)


def control(argv: Sequence[str]) -> str:
    """Sends a request to a running emulation and returns its answer."""
    ours, command = split(argv)
    parser = OneLineParser(prog="python -m launch.emulate ctl")
    parser.add_argument("--name", help="which cluster; not needed if one is running")
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=OneLineParser)
    verbs.add_parser("status", help="a table of the nodes")
    verbs.add_parser("add", help="bring up one more node, and start a program there: add -- PROGRAM ...")
    for verb, text in NODE_VERBS.items():
        verbs.add_parser(verb, help=text).add_argument("node", type=int)
    slow = verbs.add_parser("slow", help="give a node's link another rate, or none")
    slow.add_argument("node", type=int)
    slow.add_argument("rate")
    options = parser.parse_args(ours)
    if command and options.verb != "add":
        raise ValueError(f"{options.verb} takes no program")
    request = vars(options)
    return ask(request.pop("name"), request | {"command": [check_program(command), *command[1:]] if command else []})


# ------------------------------------------------------------------------------------------------ running


def run(options: argparse.Namespace, links: Links, command: Sequence[str]) -> int:
    """Runs a program on a new emulated cluster until all its processes have ended. Returns the exit code."""
    with (
        Control(options.name) as requests,
        EmulatedCluster(options.nodes, links, options.workdir, named_paths(command)) as cluster,
    ):
        sizes = {"devices": options.devices_per_node, "processes_per_node": options.processes_per_node}
        job = ClusterJob(cluster, command, **sizes, grace_s=options.grace_s, independent=options.independent)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: job.interrupt(number))
        monitor = Monitor(job, command)
        with shown(monitor) as show:
            while job.is_running():
                job.watch()
                requests.answer(lambda request: perform(request, job, monitor))
                show()
                time.sleep(POLL_S)
        traffic = {"links": asdict(links), "nodes": [asdict(node) for node in cluster.traffic()]}
        (options.workdir / "traffic.json").write_text(json.dumps(traffic, indent=2) + "\n")
    return job.exit_code()


def named_paths(command: Sequence[str]) -> list[Path]:
    """Returns the files and folders that a command or its config names, which the nodes must share.

    They include its `--workdir`, and the whole virtual environment of a Python interpreter.
    """
    paths = [Path(sys.prefix)]
    for argument in (*command, *texts_in_config(command)):
        if argument.startswith("--workdir="):
            make_folder(user_path(argument.split("=", 1)[1]), "--workdir")
        value = argument.split("=", 1)[-1]
        texts = (argument, value, value.partition(":")[2], *re.split("[:,]", value))  # in FILE:DIR, in a data.mixture
        named = [path for path in map(user_path, dict.fromkeys(texts)) if os.path.exists(path)]
        environments = [path.absolute().parent.parent for path in named]  # for each `bin/python`
        paths += [*named, *(folder for folder in environments if (folder / "pyvenv.cfg").exists())]
    return paths


def texts_in_config(command: Sequence[str]) -> list[str]:
    """Returns the texts in the config of a command, [] without a config.

    The RAM disk is excluded, because each node has a separate one. A child process reads the config, because the
    modules that a config file imports may start threads.
    """
    words = [word for word in command if re.match("--?(no)?config[.=]", word)]
    if not any(re.match("--?config=", word) for word in words):
        return []
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    show = [sys.executable, "-m", "configs.show", *words]
    shown = subprocess.run(show, check=False, capture_output=True, env={**os.environ, "PYTHONPATH": search})
    if shown.returncode:  # the program will report the mistake
        return []
    config = json.loads(shown.stdout)
    del config["elastic"]["memory_dir"]
    parts = (part.values() for part in config.values() if isinstance(part, dict))
    return [value for values in parts for value in values if isinstance(value, str) and value]


def perform(request: object, job: ClusterJob, monitor: Monitor) -> str:
    """Executes a request and returns the answer. ValueError if it is malformed, or cannot be executed."""
    match request:
        case {"verb": "status"}:
            return monitor.text()
        case {"verb": "inits"}:  # process 1 of each node, for lab.chaos
            return json.dumps([node.init.pid for node in job.cluster.nodes])
        case {"verb": "add", "command": [*command]} if all(isinstance(word, str) for word in command):
            return f"node{job.add(command)} is up"
        case {"verb": "slow", "node": int(node), "rate": str(rate)}:
            job.cluster.slow(_existing(node, job.cluster), rate)
            return f"node{node} has a link of {rate}"
        case {"verb": str(verb), "node": int(node)} if verb in NODE_VERBS:
            getattr(job.cluster, verb)(_existing(node, job.cluster))
            return f"node{node}: {verb}"
    raise ValueError("the request is none that this emulation knows; is it of another version?")


def _existing(node: int, cluster: EmulatedCluster) -> int:
    """Returns the number of a node. ValueError if the node does not exist."""
    if not 0 <= node < len(cluster.nodes):
        raise ValueError(f"there is no node {node}; they are 0 to {len(cluster.nodes) - 1}")
    return node


if __name__ == "__main__":
    sys.exit(main(sys.argv))
