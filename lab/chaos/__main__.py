"""Injects random faults into a real run, and checks that it learns the same as an undisturbed run.

    python -m lab.chaos [--config=configs/elastic.py:tiny] [--events=30] [--seed=0] [-- --config.num_steps=...]

The run is `train.py` under `python -m launch.ray` on emulated nodes (docs/emulation.md). The seed determines
the events (lab/chaos/faults.py). Each comes a few steps after the run has recovered from the previous event. At the
end, the loss of every step and the parameters must equal an undisturbed run on all nodes, up to rounding, and
no process of the cluster may remain. Sums over other numbers of devices round differently, and training amplifies
that. The allowed difference is therefore measured: MARGIN times the difference between two undisturbed runs, on all
nodes and on the fewest that the events leave. Exit codes: 0 they are equal; 1 they are not; 2 a user's mistake.

Writes into the work directory: `log` (the output of the run), `outcomes.jsonl` (a line per event), `run`, `reference`
and `smaller` (the disturbed run, and the undisturbed ones).
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lab.chaos.faults import Outcome, inject, make_plan
from lab.chaos.run import ROOT, ElasticRun, RunError
from launch.emulate.links import Links
from runtime.command_line import OneLineParser, complain, named_path, prepare_output, split
from runtime.files import json_lines
from training.metrics.run_files import read_run

if TYPE_CHECKING:
    from lab.chaos.same import Largest

MARGIN = 4.0  # a run that changes its size many times differs by more than two runs that never do
LEAST, MOST = 1e-6, 1e-3  # allowed differences: rounding itself, and where a fault would look like rounding
MIN_NODES = 2  # an event that removes one leaves one
END_S = 1800.0  # for the steps after the last event


def main(argv: Sequence[str]) -> int:
    """Runs the program and returns its exit code; a user's mistake is one line."""
    prepare_output()
    try:
        options, changes = parse(argv[1:])
        arguments = [f"--config={options.config}", *changes]
        reference = options.reference or train_undisturbed(options, arguments, "reference", options.nodes)
        fewest = MIN_NODES if options.nodes > MIN_NODES else 1
        smaller = options.smaller or train_undisturbed(options, arguments, "smaller", fewest)
        limits = measured_limits(reference, smaller)
        sizes = {key: getattr(options, key) for key in ("nodes", "devices_per_node", "rate")}
        run = ElasticRun(options.workdir, arguments, **sizes)
        command = shlex.join(["python", "-m", "lab.chaos", *argv[1:]])
        is_clean = disturb(run, options, command)  # compare the runs in any case
        is_good = is_same(run.workdir, reference, limits) and is_clean
        print("the same as the undisturbed run, and nothing is left" if is_good else "NOT as it must be", flush=True)
        return 0 if is_good else 1
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        return complain(error)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options and, after `--`, changes of the config; ValueError says what is wrong."""
    ours, changes = split(argv)
    parser = OneLineParser(prog="python -m lab.chaos", description=__doc__)
    parser.add_argument("--config", default="configs/elastic.py:tiny", help="of the run (default: %(default)s)")
    parser.add_argument("--events", type=int, default=30, help="how many are drawn (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn events (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=4, help="that train, at most (default: %(default)s)")
    parser.add_argument("--devices_per_node", type=int, default=2, help="virtual devices (default: %(default)s)")
    parser.add_argument("--rate", default="1gbit", help="of the links (default: %(default)s)")
    workdir = {"type": named_path, "default": Path("runs/chaos")}
    parser.add_argument("--workdir", **workdir, help="logs and all runs (default: %(default)s)")
    before = "undisturbed run on %s (default: it is run first)"
    parser.add_argument("--reference", type=named_path, help=before % "all nodes")
    parser.add_argument("--smaller", type=named_path, help=before % "the fewest nodes that the events leave")
    options = parser.parse_args(ours)
    Links(rate=options.rate)  # ValueError says what is wrong with it
    for name, least in (("nodes", MIN_NODES), ("events", 1), ("devices_per_node", 1)):
        if (value := getattr(options, name)) < least:
            raise ValueError(f"--{name}={value} must be {least} or more")
    if (options.workdir / "run").exists():
        raise ValueError(f"--workdir={options.workdir} has a run in it; give another one, or delete it")
    for name in ("reference", "smaller"):
        given = getattr(options, name)
        if given and read_run(given).summary.get("exit_reason") != "finished":
            raise ValueError(f"--{name}={given} is not a run that has finished")
    return options, changes


def train_undisturbed(options: argparse.Namespace, arguments: Sequence[str], name: str, nodes: int) -> Path:
    """Trains in one process, with the devices of `nodes` nodes, and returns the work directory."""
    workdir = options.workdir / name
    devices = nodes * options.devices_per_node
    flags = [f"--config.mesh.num_cpu_devices={devices}", f"--config.mesh.devices_per_node={options.devices_per_node}"]
    command = [sys.executable, "train.py", f"--workdir={workdir}", *arguments, *flags]
    command += ["--config.elastic.snapshot_every=0"]
    print(f"an undisturbed run on {nodes} nodes: {workdir}", flush=True)
    workdir.mkdir(parents=True, exist_ok=True)
    with (options.workdir / f"{name}.log").open("wb") as log:
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        said = Path(log.name).read_text(errors="backslashreplace").strip() or "nothing"
        last = said.splitlines()[-1].removeprefix("error: ")
        raise ValueError(f"the undisturbed run ended with exit code {code}: {last} (all that it said is in {log.name})")
    return workdir


def disturb(run: ElasticRun, options: argparse.Namespace, command: str) -> bool:
    """Injects the events and waits for the end of the run; True if it finished and no process is left."""
    plan = make_plan(options.seed, options.events, nodes=options.nodes, min_nodes=MIN_NODES)
    with run:
        for number, event in enumerate(plan, 1):
            outcome = inject(run, event)
            print(f"{number:2} {described(outcome)}", flush=True)
            about = {"load": os.getloadavg()[0], "seed": options.seed, "command": command}
            json_lines.append(run.folder / "outcomes.jsonl", asdict(outcome) | about)
        code = run.finish(END_S)
    left = run.left()
    print(f"the run ended with exit code {code} after {run.attempt} attempts; left: {'; '.join(left) or 'nothing'}")
    return code == 0 and not left


def described(outcome: Outcome) -> str:
    """Returns an event as a line."""
    noticed = outcome.phases["noticed"]
    return (
        f"{time.strftime('%H:%M:%S')} {outcome.kind} at step {outcome.at_step}, process {outcome.process} of "
        f"{outcome.nodes_before} (node{outcome.node}): next step after {outcome.next_step_s:.1f} s on "
        f"{outcome.nodes_after} nodes (noticed after {'-' if noticed is None else f'{noticed:.1f} s'}), "
        f"{outcome.lost_steps} steps lost, from {outcome.source}"
    )


def measured_limits(reference: Path, smaller: Path) -> dict[str, float]:
    """Returns the differences from the reference that a disturbed run may have, of losses and parameters.

    ValueError if the two undisturbed runs differ by too much to tell rounding from a fault.
    """
    found = {name: largest.difference for name, largest in differences(smaller, reference).items()}
    for name, difference in found.items():
        if not MARGIN * difference <= MOST:
            raise ValueError(
                f"the {name} of undisturbed runs on two sizes differ by {difference:.2g}: more than "
                f"{MOST / MARGIN:.2g} is not rounding; train fewer steps, or with a smaller learning rate"
            )
    return {name: max(MARGIN * difference, LEAST) for name, difference in found.items()}


def is_same(run: Path, reference: Path, limits: Mapping[str, float]) -> bool:
    """Prints the largest differences between two runs, and returns whether they are within the limits."""
    try:
        found = differences(run, reference)
    except ValueError as error:
        print(error, flush=True)
        return False
    for name, (difference, where) in found.items():
        print(
            f"largest relative difference of {name}: {difference:.2g} ({where}); allowed: {limits[name]:.2g}",
            flush=True,
        )
    return all(largest.difference <= limits[name] for name, largest in found.items())


def differences(run: Path, reference: Path) -> "dict[str, Largest]":
    """Returns the largest relative differences between two runs, of losses and parameters."""
    from lab.chaos.same import compare_losses, compare_parameters  # jax: a mistake is reported before it is imported

    return {"losses": compare_losses(run, reference), "parameters": compare_parameters(run, reference)}


if __name__ == "__main__":
    sys.exit(main(sys.argv))
