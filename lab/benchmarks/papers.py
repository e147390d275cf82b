"""Records what the tables of the papers beyond MiCS need: compiled and predicted steps, bytes of state and on a wire.

    python -m lab.benchmarks.papers [--kinds=state,largest,step,wire,prediction]

Adds the missing lines to papers.jsonl in lab/benchmarks/results for `python -m lab.paper`, one a cell of
lab/benchmarks/papers_cells.py, in one process per number of virtual devices. Only `wire` trains, three steps on
emulated nodes, and needs root (docs/emulation.md). `prediction` compiles for GPUs and needs XLA for them (`make
.venv/h100/installed`); a program takes about half a minute of CPU, all the rest together a few minutes.
"""

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from configs import command_line
from lab.benchmarks import compiled
from lab.benchmarks.names import config_file, sharding_of
from lab.benchmarks.papers_cells import KINDS, MEMORY_BYTES, RATES_GBIT, Cell, cells
from lab.benchmarks.records import DERIVED, MEASURED, add, is_recorded, machine
from lab.benchmarks.runner import ROOT, steps_of, train
from planner.candidates import of_config
from planner.clusters import GBIT, find_cluster, with_rate
from planner.predict import Machine, Step, compiled_step
from runtime.command_line import complain, prepare_output
from training.experiment import Experiment, make_experiment
from training.memory import state_bytes

COMPILED, WIRE = DERIVED / "papers.jsonl", MEASURED / "papers.jsonl"
# XLA's Triton kernels fail to compile for 2048 tokens ("Couldn't find output tile sizes"), without a GPU to tune them
XLA_FLAGS = "--xla_gpu_enable_triton_gemm=false"
WIRE_RATE = "1gbit"
MOST_LAYERS = 1 << 14  # of a model that is made larger until it no longer fits


def main() -> int:
    """Records the missing cells; returns 1 if one failed, 2 for an unknown kind."""
    parser = argparse.ArgumentParser(description="Records what the papers' tables need.", allow_abbrev=False)
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of cells (default: %(default)s)")
    parser.add_argument("--devices", type=int, help="only the cells of so many devices, in this process")
    options = parser.parse_args()
    prepare_output()
    kinds = options.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        return complain(ValueError(f"--kinds={unknown[0]} is not one of {', '.join(KINDS)}"))
    missing = [cell for cell in cells() if cell.kind in kinds and not is_recorded(record_of(cell), cell.key)]
    if options.devices:
        compiled.start_devices(options.devices)
        for cell in missing:
            if cell.num_devices == options.devices:
                add(record_of(cell), cell.key | measured(cell) | machine())
                print(f"{cell.kind}: {cell.name}", flush=True)
        return 0
    failed = 0
    for devices in sorted({cell.num_devices for cell in missing}):
        command = [sys.executable, "-m", "lab.benchmarks.papers", f"--devices={devices}", f"--kinds={options.kinds}"]
        failed += subprocess.run(command, cwd=ROOT, check=False).returncode != 0
    return 1 if failed else 0


def record_of(cell: Cell) -> Path:
    """Returns the record of a cell: what was on the wire is measured."""
    return WIRE if cell.kind == "wire" else COMPILED


def measured(cell: Cell) -> dict[str, Any]:
    """Returns what the line of a cell says besides its key; uses this process' devices."""
    match cell.kind:
        case "step":
            found = compiled.step_record(cell.case, cell.changes)
            return {name: found[name] for name in ("num_params", "state_bytes", "collectives")}
        case "state":
            return state(make_experiment(compiled.config_of(cell.case, cell.changes)))
        case "largest":
            return largest(cell)
        case "wire":
            return on_wire(cell)
        case "prediction":
            return predicted(cell)
    raise AssertionError(cell.kind)


def state(experiment: Experiment) -> dict[str, Any]:
    """Returns the parameters of a model, and the bytes of its state on each device, from shapes and shardings."""
    parameters, gradients, optimizer = state_bytes(experiment)
    held = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}
    return {"num_params": experiment.model.num_params, "state_bytes": held}


def largest(cell: Cell) -> dict[str, Any]:
    """Returns the deepest model whose state fits MEMORY_BYTES on each device, found by bisection over its layers."""

    def of(layers: int) -> dict[str, Any]:
        changes = {**cell.changes, "model.num_layers": layers}
        return {"layers": layers} | state(make_experiment(compiled.config_of(cell.case, changes)))

    low, high, best = 1, MOST_LAYERS, of(1)
    while high - low > 1:
        middle = (low + high) // 2
        tried = of(middle)
        if sum(tried["state_bytes"].values()) <= MEMORY_BYTES:
            low, best = middle, tried
        else:
            high = middle
    return best | {"memory_bytes": MEMORY_BYTES}


def on_wire(cell: Cell) -> dict[str, Any]:
    """Trains three steps on emulated nodes; returns the bytes that node 0 sent in a step, the median without the first.

    FailedRunError if the run failed.
    """
    case = cell.case
    overrides: dict[str, Any] = {f"sharding.{key}": value for key, value in sharding_of(case.strategy).items()}
    overrides |= {**cell.changes, "batch.global_size": cell.num_devices * case.accum, "emulate.rate": WIRE_RATE}
    overrides |= {"emulate.nodes": case.nodes, "emulate.devices_per_node": case.devices_per_node}
    run = train("papers", f"configs/{case.config}.py", overrides)
    sent = steps_of(run)["wire_tx_bytes"]
    return {"rate": WIRE_RATE, "num_params": run.files.environment["num_params"], "wire_tx_bytes": sent}


def predicted(cell: Cell) -> dict[str, Any]:
    """Returns the planner's step at each of RATES_GBIT: seconds, TFLOP/s of a GPU, and the share that is exposed."""
    words = tuple(f"--config.{key}={value}" for key, value in cell.changes.items())
    words = (f"--config={config_file(cell.case.config)}", *words)
    argv = ["lab.benchmarks.papers", *words]
    config = command_line.parse(argv)
    cluster = replace(find_cluster("p3dn.24xlarge"), devices_per_node=cell.case.devices_per_node)
    target = cluster.device.target
    machine_of = Machine(cluster=cluster, nodes=cell.case.nodes, config_words=words, target=target, xla_flags=XLA_FLAGS)
    candidate = of_config(config)
    experiment = make_experiment(candidate.applied(config), jax.devices()[: machine_of.num_devices])
    step = compiled_step(candidate, experiment, machine_of)
    lines = {f"{rate}": at_rate(step, rate) for rate in RATES_GBIT}
    return {
        "num_params": experiment.model.num_params,
        "peak_bytes": step.compiled.peak_bytes,
        "xla_flags": XLA_FLAGS,
        "rates": lines,
    }


def at_rate(step: Step, gbit: int) -> dict[str, float]:
    """Returns the replay of a step on nodes with a link of `gbit`."""
    there = with_rate(step.machine.cluster, 8 * GBIT * gbit)
    found = replace(step, machine=replace(step.machine, cluster=there)).prediction()
    exposed_s = found.step_s - found.compute_s
    return {
        "step_s": found.step_s,
        "tflops": found.flops_per_device / 1e12,
        "exposed": exposed_s / found.step_s,
        "inter_bytes": found.inter_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
