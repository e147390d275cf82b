"""Dynamic Training: compares a classifier trained on a changing number of nodes with fixed nodes.

    python -m lab.benchmarks.dynamic_training [--seeds=3] [--steps=300]

Per seed it trains configs/digits.py three times: on 4 nodes of 2 devices; in phases on 1 to 4 nodes; and on 4 nodes
with smaller micro-batches, a control that differs from the first run only by rounding. At the end of a phase the run
gets a SIGTERM, stops after a step with exit code 75, and is restarted in the same directory with another number of
devices. One process simulates all nodes. Adds one line per run to results/measured/dynamic_training.jsonl; recorded
runs are not repeated. lab/benchmarks/dynamic_training_cost.py has the prices.
"""

import itertools
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from files import json_lines
from lab.benchmarks.dynamic_training_cost import NODES
from lab.benchmarks.runner import ROOT, FailedRunError, Key, options_of, program, run_missing
from lab.records import MEASURED
from runtime.events import Event, EventReader
from runtime.exit_codes import ExitCode

RESULTS = MEASURED / "dynamic_training.jsonl"
KINDS = ("fixed", "fluctuating", "control")
DEVICES_PER_NODE = 2
PHASES = 8
EXTRA = {"control": ["--config.batch.micro_size=4"]}  # 2 micro-steps per step instead of 1
PHASE_S = 1800  # time-out; a phase takes a minute, more on a busy machine
Phase = tuple[int, int]  # training on a number of nodes up to a step


def fluctuating(seed: int, steps: int) -> list[Phase]:
    """Returns phases of equal length: every number of nodes twice, but not consecutively."""
    chance, nodes = random.Random(seed), list[int]()
    while len(nodes) < PHASES:
        turn = chance.sample(range(1, NODES + 1), NODES)
        if not nodes or turn[0] != nodes[-1]:
            nodes += turn
    return [(n, steps * (i + 1) // PHASES) for i, n in enumerate(nodes)]


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Trains the missing runs; returns 1 if one failed."""
    options = options_of(__doc__, argv, seeds=(3, "number of runs of each kind"), steps=(300, "of each run"))
    keys = [{"kind": kind, "seed": seed, "steps": options.steps} for seed in range(options.seeds) for kind in KINDS]
    return run_missing(RESULTS, keys, measured)


def measured(key: Key) -> dict[str, Any]:
    """Trains a run through its phases; returns what its line says."""
    seed, steps = key["seed"], key["steps"]
    phases = fluctuating(seed, steps) if key["kind"] == "fluctuating" else [(NODES, steps)]
    flags = ["--config=configs/digits.py", f"--config.seed={seed}", f"--config.num_steps={steps}"]
    flags += [*EXTRA.get(key["kind"], ()), "--config.checkpoint.every=0"]  # phases end with one
    with tempfile.TemporaryDirectory() as folder:
        return train(Path(folder) / "run", flags, phases)


def train(workdir: Path, flags: Sequence[str], phases: Sequence[Phase]) -> dict[str, Any]:
    """Trains through all phases; returns phases and losses. FailedRunError if a phase ends unexpectedly."""
    attempts: list[dict[str, Any]] = []
    for nodes, until in phases:
        print(f"{nodes} nodes until step {until}", flush=True)
        run_phase(workdir, [*flags, *mesh_flags(nodes)], until, last=until == phases[-1][1])
        *_, restored = (event for event in EventReader(workdir).new() if event["event"] == Event.RESTORED)
        attempt = {"nodes": nodes, "begun": restored["step"], "ended": len(rows(workdir))}
        attempts.append(attempt | {"source": restored["source"]})
    found = rows(workdir)
    kept = ("step", "validation_loss", "validation_accuracy")
    return {
        "starts": attempts,
        "steps_again": sum(a["ended"] - b["begun"] for a, b in itertools.pairwise(attempts)),
        "losses": [row["loss"] for row in found],
        "validations": [{key: row[key] for key in kept} for row in found if "validation_loss" in row],
        "command": " ".join(("python train.py", *flags)),
    }


def mesh_flags(nodes: int) -> list[str]:
    """Returns the flags of a run on a number of nodes, each of them a partition group."""
    keys = {"mesh.num_cpu_devices": nodes * DEVICES_PER_NODE, "mesh.devices_per_node": DEVICES_PER_NODE}
    keys |= {"sharding.strategy": "mics", "sharding.partition_size": DEVICES_PER_NODE}
    return [f"--config.{key}={value}" for key, value in keys.items()]


def run_phase(workdir: Path, flags: Sequence[str], until: int, *, last: bool) -> None:
    """Runs train.py up to the end of a phase."""
    command = [sys.executable, "train.py", *flags, f"--workdir={workdir}"]
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT) as process:
            try:
                if not last:
                    wait_for_rows(workdir, until - 2, process)  # a row is written after the next step
                    process.send_signal(signal.SIGTERM)  # while the last step of the phase runs
                code = process.wait(timeout=PHASE_S)
            except subprocess.TimeoutExpired as error:
                raise FailedRunError(str(error)) from error
            finally:
                process.kill()
        output.seek(0)
        text = output.read()
    if code != (0 if last else ExitCode.RESUMABLE):
        raise FailedRunError(f"exit code {code}: {text[-1000:]}")


def wait_for_rows(workdir: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until `count` steps are logged or the process has ended. FailedRunError after half an hour."""
    file, deadline = workdir / "metrics.jsonl", time.monotonic() + PHASE_S
    while process.poll() is None and (not file.exists() or file.read_bytes().count(b"\n") < count):
        if time.monotonic() > deadline:
            raise FailedRunError(f"step {count} was not reached in {PHASE_S} s")
        time.sleep(0.02)


def rows(workdir: Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl, one per step. FailedRunError if a step is missing or duplicated."""
    found = json_lines.read(workdir / "metrics.jsonl")
    if [row["step"] for row in found] != list(range(1, len(found) + 1)):
        raise FailedRunError(f"{workdir / 'metrics.jsonl'} does not have every step exactly once")
    return found


if __name__ == "__main__":
    sys.exit(main())
