"""Records what the papers' tables need of compiled steps: parameters, bytes of state, collectives, replays.

    python -m lab.benchmarks.compiled [--kinds=model,state,largest,step,prediction]

Adds the missing cells of lab/benchmarks/cells.csv (whose keys stand in keys.toml) to results/derived/compiled.jsonl, in
one process per number of virtual devices. `step` compiles for them, but runs nothing; `prediction` compiles for GPUs
and needs XLA for them (`make .venv/h100/installed`); half a minute of CPU a program, all the rest together a few
minutes.
"""

import csv
import os
import subprocess
import sys
import tomllib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from configs import command_line
from configs.schema import Config
from lab.benchmarks.names import config_file, sharding_of
from lab.benchmarks.runner import ROOT, Key, config_words, options_of, program, run_missing, words
from lab.records import DERIVED, is_recorded
from planner.candidates import of_config
from planner.clusters import GBIT, Cluster, find_cluster, with_rate
from planner.predict import Machine, Step, compiled_step
from sharding import hlo
from training.experiment import make_experiment
from training.memory import state_bytes

HERE = Path(__file__).parent
RESULTS = DERIVED / "compiled.jsonl"
KINDS = ("model", "state", "largest", "step", "prediction")
XLA_FLAGS = "--xla_backend_optimization_level=0"  # LLVM's optimisation takes most of the compile time
# XLA's Triton kernels fail to compile for 2048 tokens ("Couldn't find output tile sizes"), without a GPU to tune them
GPU_XLA_FLAGS = "--xla_gpu_enable_triton_gemm=false"
MEMORY_BYTES = 32e9  # of a GPU in ZeRO's table 2
MOST_LAYERS = 1 << 14  # of a model that is made larger until it no longer fits
RATES_GBIT = (100, 200, 400, 800)  # of a node's link in ZeRO++'s figures


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one line of the record says: a kind of measurement, of a config on a cluster."""

    kind: str
    name: str  # that tables find it by
    config: str
    nodes: int
    devices_per_node: int
    accum: int
    strategy: str
    changes: Mapping[str, Any]  # of the config

    @property
    def devices(self) -> int:
        """Devices that the measuring process needs."""
        return self.nodes * self.devices_per_node

    @property
    def key(self) -> Key:
        """The part of the line that tells it from others."""
        return {**asdict(self), "devices": self.devices}


def rows_of(name: str) -> list[dict[str, Any]]:
    """Returns the rows of a CSV file of this folder, with their whole numbers."""
    with (HERE / name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: int(word) if word.isdecimal() else word for key, word in row.items()} for row in rows]


def table(name: str) -> list[dict[str, Any]]:
    """Returns the rows of a table of cells, and the keys of the config that a row names."""
    sets = tomllib.loads((HERE / "keys.toml").read_text())
    found = []
    for row in rows_of(name):
        keys = {key: value for of in filter(None, row.pop("keys").split("+")) for key, value in sets[of].items()}
        found.append(row | {"changes": keys})
    return found


def cells() -> list[Cell]:
    """Returns all cells."""
    return [Cell(**row) for row in table("cells.csv")]


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Records the missing cells; returns 1 if one failed, 2 for an unknown kind."""
    options = options_of(
        __doc__,
        argv,
        kinds=(",".join(KINDS), "kinds of cells"),
        devices=(0, "only the cells of so many devices, in this process; 0: of all, in processes of their own"),
    )
    kinds = words(options.kinds, "kinds", KINDS)
    missing = [cell for cell in cells() if cell.kind in kinds and not is_recorded(RESULTS, cell.key)]
    if not options.devices:
        flags = {**os.environ, "XLA_FLAGS": XLA_FLAGS}
        command = [sys.executable, "-m", "lab.benchmarks.compiled", f"--kinds={options.kinds}"]
        counts = sorted({cell.devices for cell in missing})
        return max((subprocess.call([*command, f"--devices={n}"], cwd=ROOT, env=flags) for n in counts), default=0)
    start_devices(options.devices)
    of_key = lambda key: Cell(**{name: value for name, value in key.items() if name != "devices"})
    keys = [cell.key for cell in missing if cell.devices == options.devices]
    return run_missing(RESULTS, keys, lambda key: measured(of_key(key)))


def start_devices(devices: int) -> None:
    """Gives this process `devices` virtual CPU devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def measured(cell: Cell) -> dict[str, Any]:
    """Returns what the line of a cell says besides its key; uses this process' devices."""
    match cell.kind:
        case "model":
            return {"num_params": state(cell)["num_params"]}
        case "state":
            return state(cell)
        case "largest":
            return largest(cell)
        case "step":
            return state(cell) | {"collectives": collectives(cell)}
        case _:
            return predicted(cell)


def config_of(cell: Cell) -> Config:
    """Returns the config of a cell: one row per device and micro-step."""
    keys = {"batch.global_size": cell.devices * cell.accum, "batch.micro_size": 1}
    keys |= {"mesh.num_cpu_devices": cell.devices, "mesh.devices_per_node": cell.devices_per_node}
    strategy = {f"sharding.{key}": value for key, value in sharding_of(cell.strategy).items()}
    flags = config_words(config_file(cell.config), {**keys, **strategy, **cell.changes})
    return command_line.parse(["lab.benchmarks", *flags])


def state(cell: Cell) -> dict[str, Any]:
    """Returns the parameters of a model, and the bytes of its state on each device, from shapes and shardings."""
    experiment = make_experiment(config_of(cell))
    held = dict(zip(("parameters", "gradients", "optimizer"), state_bytes(experiment), strict=True))
    return {"num_params": experiment.model.num_params, "state_bytes": held}


def collectives(cell: Cell) -> Any:
    """Compiles a step; returns its collectives: the bytes that a device sends per step, averaged over the devices."""
    experiment = make_experiment(config_of(cell))
    text = experiment.compile_train_step().as_text() or ""
    return hlo.as_report(hlo.read_collectives(text, experiment.plan.layout.shape))["collectives"]


def largest(cell: Cell) -> dict[str, Any]:
    """Returns the deepest model whose state fits MEMORY_BYTES on each device, by bisection over its layers."""

    def of(layers: int) -> dict[str, Any]:
        return state(replace(cell, changes={**cell.changes, "model.num_layers": layers}))

    depths = range(1, MOST_LAYERS)
    layers = bisect_right(depths, MEMORY_BYTES, key=lambda layers: sum(of(layers)["state_bytes"].values()))
    return {"layers": layers, **of(layers), "memory_bytes": MEMORY_BYTES}


def on_cluster(cluster: Cluster, nodes: int, config: str, keys: Mapping[str, Any], xla_flags: str = "") -> Step:
    """Returns the step of a config on a cluster, compiled for its GPUs. ValueError or RuntimeError: it cannot be."""
    flags = tuple(config_words(config_file(config), keys))
    machine = Machine(
        cluster=cluster, nodes=nodes, config_words=flags, target=cluster.device.target, xla_flags=xla_flags
    )
    parsed = command_line.parse(["lab.benchmarks", *flags])
    return compiled_step(of_config(parsed), make_experiment(parsed, jax.devices()[: machine.num_devices]), machine)


def predicted(cell: Cell) -> dict[str, Any]:
    """Returns the planner's step at each of RATES_GBIT: seconds, TFLOP/s of a GPU, and the share that is exposed."""
    cluster = replace(find_cluster("p3dn.24xlarge"), devices_per_node=cell.devices_per_node)
    step = on_cluster(cluster, cell.nodes, cell.config, cell.changes, GPU_XLA_FLAGS)
    return {
        "num_params": step.experiment.model.num_params,
        "peak_bytes": step.compiled.peak_bytes,
        "xla_flags": GPU_XLA_FLAGS,
        "rates": {f"{rate}": at_rate(step, rate) for rate in RATES_GBIT},
    }


def at_rate(step: Step, gbit: int) -> dict[str, float]:
    """Returns the replay of a step on nodes with a link of `gbit`."""
    there = with_rate(step.machine.cluster, 8 * GBIT * gbit)
    found = replace(step, machine=replace(step.machine, cluster=there)).prediction()
    return {
        "step_s": found.step_s,
        "tflops": found.flops_per_device / 1e12,
        "exposed": (found.step_s - found.compute_s) / found.step_s,
        "inter_bytes": found.inter_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
