"""Records compiled steps for the papers' tables: parameters, bytes of state, collectives, replays.

    python -m lab.benchmarks.compiled [--only=state] [--again]

Adds the missing cells of lab/benchmarks/cells.csv (whose keys are in keys.toml) to results/derived/compiled.jsonl.
`step` compiles for virtual devices, but runs nothing; `prediction` compiles for GPUs and needs XLA for them (`make
.venv/h100/installed`), half a minute of CPU a program. All the rest together takes a few minutes.
"""

import os
import sys
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from configs import command_line
from configs.register import register
from configs.schema import Config
from examples.methods import power_sgd
from lab.benchmarks.names import config_file, strategy_keys
from lab.benchmarks.runner import Key, Main, config_words, options_of, program, rows_of, run_missing
from lab.records import DERIVED, Line
from planner.candidates import of_config
from planner.clusters import GBIT, Cluster, find_cluster, with_rate
from planner.predict import Machine, ReplayableStep, compiled_step
from runtime.files.pages import markdown
from sharding import hlo
from training.experiment import Experiment, make_experiment
from training.memory import state_bytes

RESULTS = DERIVED / "compiled.jsonl"
XLA_FLAGS = "--xla_backend_optimization_level=0"  # LLVM's optimisation takes most of the compile time
# XLA's Triton kernels fail to compile for 2048 tokens ("Couldn't find output tile sizes"), without a GPU to tune them
GPU_XLA_FLAGS = "--xla_gpu_enable_triton_gemm=false"
MEMORY_BYTES = 32e9  # per GPU in ZeRO's table 2
MOST_LAYERS = 1 << 14  # bound of the search for the largest model that fits
RATES_GBIT = (100, 200, 400, 800)  # a node's link in ZeRO++'s figures


# ---------------------------------------------------------------------------------------- programs of derived records


def table(name: str) -> list[dict[str, Any]]:
    """Returns the rows of a table of cells, and the keys of the config that a row names."""
    sets = tomllib.loads((Path(__file__).parent / "keys.toml").read_text())
    found = []
    for row in rows_of(name):
        keys = {key: value for of in filter(None, row.pop("keys").split("+")) for key, value in sets[of].items()}
        found.append(row | {"changes": keys})
    return found


def replaying(
    about: str | None,
    record: Path,
    cells: Callable[[], Sequence[Key]],
    name: Callable[[Key], str],
    replayed: Callable[[Key], Mapping[str, Any]],
    devices: Callable[[Key], int],
) -> Main:
    """Returns the program that compiles the cells that a record lacks; a cell needs that number of devices."""

    @program
    def main(argv: Sequence[str] | None = None) -> int:
        options = options_of(
            about, argv, only=("", "only cells whose name contains this"), again=(False, "replay what is recorded too")
        )
        chosen = [cell for cell in cells() if options.only in name(cell)]
        if not chosen:
            raise ValueError(f"--only={options.only} is in no name, such as {name(cells()[0])}")
        start_devices(max(map(devices, chosen)))
        return run_missing(record, chosen, replayed, again=options.again)

    return main


def start_devices(devices: int) -> None:
    """Gives this process `devices` virtual CPU devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def on_cluster(
    cluster: Cluster, nodes: int, config: str, keys: Mapping[str, Any], xla_flags: str = ""
) -> ReplayableStep:
    """Returns the step of a config on a cluster, compiled for its GPUs. ValueError or RuntimeError: it cannot be."""
    flags = tuple(config_words(config_file(config), keys))
    machine = Machine(
        cluster=cluster, nodes=nodes, config_words=flags, target=cluster.device.target, xla_flags=xla_flags
    )
    parsed = command_line.parse(["lab.benchmarks", *flags])
    return compiled_step(of_config(parsed), make_experiment(parsed, jax.devices()[: machine.num_devices]), machine)


# ------------------------------------------------------------------------------------------------- the papers' cells


def cells() -> list[Key]:
    """Returns the keys of all cells."""
    return [{**row, "devices": row["nodes"] * row["devices_per_node"]} for row in table("cells.csv")]


def measured(cell: Key) -> dict[str, Any]:
    """Returns the results of a cell, on the first of this process's devices."""
    match cell["kind"]:
        case "model":
            return {"num_params": experiment(cell).model.num_params}
        case "state":
            return state(experiment(cell))
        case "largest":
            return largest(cell)
        case "step":
            compiled = experiment(cell)
            text = compiled.compile_train_step().as_text() or ""
            report = hlo.as_report(hlo.read_collectives(text, compiled.plan.layout.shape))
            return state(compiled) | {"collectives": report["collectives"]}
        case _:
            return predicted(cell)


def experiment(cell: Key, **changes: Any) -> Experiment:
    """Returns the experiment of a cell, with one row per device and micro-step."""
    return make_experiment(config_of(cell, **changes), jax.devices()[: cell["devices"]])


def config_of(cell: Key, **changes: Any) -> Config:
    """Returns the config of a cell; `changes` are of its model."""
    keys = {"batch.global_size": cell["devices"] * cell["accum"], "batch.micro_size": 1}
    keys |= {"mesh.num_cpu_devices": cell["devices"], "mesh.devices_per_node": cell["devices_per_node"]}
    keys |= strategy_keys(cell["strategy"])
    keys |= cell["changes"] | {f"model.{key}": value for key, value in changes.items()}
    if rank := keys.pop("compression.rank", 0):  # a key when these cells were named
        register("all_reduce", "power_sgd", power_sgd.method(rank))
    return command_line.parse(["lab.benchmarks", *config_words(config_file(cell["config"]), keys)])


def state(experiment: Experiment) -> dict[str, Any]:
    """Returns the parameters of a model, and the bytes of its state on each device, from shapes and shardings."""
    held = dict(zip(("parameters", "gradients", "optimizer"), state_bytes(experiment), strict=True))
    return {"num_params": experiment.model.num_params, "state_bytes": held}


def largest(cell: Key) -> dict[str, Any]:
    """Returns the deepest model whose state fits MEMORY_BYTES on each device, by bisection over its layers."""
    of_depth = lambda layers: state(experiment(cell, num_layers=layers))
    depths = range(1, MOST_LAYERS)
    layers = bisect_right(depths, MEMORY_BYTES, key=lambda layers: sum(of_depth(layers)["state_bytes"].values()))
    return {"layers": layers, **of_depth(layers), "memory_bytes": MEMORY_BYTES}


def predicted(cell: Key) -> dict[str, Any]:
    """Returns the planner's step at each of RATES_GBIT: seconds, TFLOP/s of a GPU, and the share that is exposed."""
    cluster = replace(find_cluster("p3dn.24xlarge"), devices_per_node=cell["devices_per_node"])
    step = on_cluster(cluster, cell["nodes"], cell["config"], cell["changes"], GPU_XLA_FLAGS)
    rates = {}
    for gbit in RATES_GBIT:
        linked = replace(step.machine, cluster=with_rate(step.machine.cluster, 8 * GBIT * gbit))
        found = replace(step, machine=linked).prediction()
        exposed = (found.step_s - found.compute_s) / found.step_s
        rates[f"{gbit}"] = {"step_s": found.step_s, "tflops": found.flops_per_device / 1e12}
        rates[f"{gbit}"] |= {"exposed": exposed, "inter_bytes": found.inter_bytes}
    about = {"num_params": step.experiment.model.num_params, "peak_bytes": step.compiled.peak_bytes}
    return about | {"xla_flags": GPU_XLA_FLAGS, "rates": rates}


def held_and_sent(lines: Sequence[Line]) -> str:
    """Returns the bytes that a device holds between steps under each strategy, and the bytes sent in a step."""
    rows = []
    for line in lines:
        held = line["state_bytes"]
        sent = (sum(c[level] for c in line["collectives"]) for level in ("inter_bytes", "intra_bytes"))
        sizes = [held["parameters"] + held["optimizer"], *sent]
        rows.append([f"`{line['name']}`", *(f"{size / 1e6:.2f} MB" for size in sizes)])
    return markdown(["strategy", "stored", "sent between nodes", "sent inside the node"], rows)


main = replaying(
    __doc__, RESULTS, cells, lambda cell: f"{cell['kind']} {cell['name']}", measured, lambda cell: cell["devices"]
)

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = XLA_FLAGS  # read when jax starts its devices
    sys.exit(main())
