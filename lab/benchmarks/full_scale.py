"""Replays the MiCS paper's throughput figures at their full size: its models, its clusters, its batches.

    python -m lab.benchmarks.full_scale [--only=bert_10b] [--again]

Each step is compiled for an A100 of the cluster's memory and replayed with a V100's or an A100's figures, on two
networks: that of planner/clusters.py, and that of the paper's own measurements (its figure 2, B_part of section 3).
A program with many equal partition groups is compiled for two of them (lab/benchmarks/resized.py).
results/derived/full_scale.jsonl has a line a step and network. Programs are taken from the planner's cache, but with
`--again`; `--only` takes the steps whose name contains it. There are 77 steps of 50 programs, of which each takes about
a minute on 2 cores; no GPU is needed, but XLA for GPUs is (`make .venv/h100/installed`). Exit codes: 0 done; 2 a step
could not be compiled or read.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import jax

from configs import command_line
from lab.benchmarks.full_scale_cells import PER_NODE, Cell, cells
from lab.benchmarks.records import DERIVED, machine, put
from lab.benchmarks.resized import resized
from lab.paper.network import b_part, fitted
from lab.paper.replays import BUCKET
from planner.candidates import Candidate, of_config
from planner.clusters import CLUSTERS, Network
from planner.predict import Machine, Step, compiled_step
from planner.replay import level_seconds
from runtime.exit_codes import ExitCode
from sharding.hlo import Collective
from training.experiment import Experiment, make_experiment

RESULTS = DERIVED / "full_scale.jsonl"
PLANNER, PAPER = "planner", "figure 2"  # networks
KEY = ("model", "config", "keys", "cluster", "gpus", "strategy", "micro_size", "global_size", "network")  # of a line
P3DN = "p3dn.24xlarge"


def main(argv: Sequence[str]) -> int:
    """Compiles, replays and records the steps; returns the exit code."""
    parser = argparse.ArgumentParser(description="Replays the MiCS paper's figures at full size.", allow_abbrev=False)
    parser.add_argument("--only", default="", help="only steps whose name contains this")
    parser.add_argument("--again", action="store_true", help="take no cached program")
    options = parser.parse_args(argv[1:])
    chosen = [cell for cell in cells() if options.only in cell.name]
    if not chosen:
        print(f"error: --only={options.only} is in no name, such as {cells()[0].name}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max((cell.gpus for cell in chosen), default=1))
    with tempfile.TemporaryDirectory() as empty:
        if options.again:
            os.environ["MICS_JAX_CACHE"] = empty
        return record(chosen)


def record(chosen: Sequence[Cell]) -> int:
    """Compiles, replays and records the steps; returns the exit code."""
    failed = 0
    for cell in chosen:
        try:
            step = compiled(cell)
            for name, network in networks(cell).items():
                put(RESULTS, line(cell, step, name, network) | machine(), KEY)
        except (ValueError, RuntimeError, OSError) as error:
            print(f"error: {cell.name}: {' '.join(str(error).split())}", file=sys.stderr)
            failed += 1
            continue
        print(f"{cell.name}: done", flush=True)
    return ExitCode.BAD_INPUT if failed else 0


def networks(cell: Cell) -> dict[str, Network]:
    """Returns the networks that a cell is replayed on: the paper measured p3dn's alone."""
    own = replace(CLUSTERS[cell.cluster].network(), devices_per_node=min(PER_NODE, cell.gpus))
    if cell.cluster != P3DN:
        return {PLANNER: own}
    fit = fitted()
    paper = Network(
        devices_per_node=own.devices_per_node,
        intra_bandwidth=b_part(),
        intra_latency_s=own.intra_latency_s,
        node_bandwidth=fit.bandwidth,
        inter_latency_s=fit.latency_s,
        all_to_all_fraction=own.all_to_all_fraction,
        tree_fractions=own.tree_fractions,
    )
    return {PLANNER: own, PAPER: paper}


def compiled(cell: Cell) -> Step:
    """Returns the step of a cell, compiled or rewritten. ValueError or RuntimeError: it cannot be."""
    first = cell.compiled
    step = compiled_step(*_request(first))
    if first == cell:
        return step
    candidate, experiment, of_cluster = _request(cell)
    text = resized(
        step.compiled,
        replicas=step.compiled.shape.replica_inter * cell.gpus // first.gpus,
        accumulation=(step.experiment.batches.accumulation, experiment.batches.accumulation),
        batch_bytes=step.memory().batch,
    )
    return Step(candidate=candidate, experiment=experiment, machine=of_cluster, compiled=text)


def _request(cell: Cell) -> tuple[Candidate, Experiment, Machine]:
    words = ["full_scale", *cell.words]
    config = command_line.parse(words)
    cluster = replace(CLUSTERS[cell.cluster], devices_per_node=min(PER_NODE, cell.gpus))
    nodes = cell.gpus // cluster.devices_per_node
    of_cluster = Machine(cluster=cluster, nodes=nodes, config_words=tuple(cell.words), target=cluster.device.target)
    return of_config(config), make_experiment(config, jax.devices()[: cell.gpus]), of_cluster


def line(cell: Cell, step: Step, name: str, network: Network) -> dict[str, Any]:
    """Returns the line of a cell on a network: bytes, seconds a step, sequences a second."""
    timeline, memory = step.timeline(network=network), step.memory()
    item = step.experiment.plan.compute_dtype.itemsize
    uses = {
        f"{label}, {level}": {"times": use.times, "busy_s": _round(use.busy_s), "exposed_s": _round(use.exposed_s)}
        for (label, level), use in timeline.uses.items()
    }
    return {
        "model": cell.model,
        "config": cell.config,
        "keys": dict(cell.keys),
        "cluster": cell.cluster,
        "gpus": cell.gpus,
        "compiled_gpus": cell.compiled.gpus,
        "strategy": cell.strategy,
        "micro_size": cell.micro_size,
        "global_size": cell.global_size,
        "accumulation": step.experiment.batches.accumulation,
        "num_params": step.experiment.model.num_params,
        "network": name,
        "network_figures": asdict(network),
        "bucket_s": {
            kind: _round(bucket_s(kind, item, cell.gpus, network)) for kind in ("all-reduce", "reduce-scatter")
        },
        "memory": {key: round(value) for key, value in asdict(memory).items()},
        "compute_s": _round(timeline.compute_s),
        "uses": uses,
        "step_s": _round(timeline.step_s),
        "sequences_per_s": _round(cell.global_size / timeline.step_s),
    }


def bucket_s(kind: str, item_bytes: int, gpus: int, network: Network) -> float:
    """Returns how long `BUCKET` values of so many bytes take on all GPUs, in whole nodes."""
    size = round(item_bytes * BUCKET)
    sent = (2 if kind == "all-reduce" else 1) * size * (gpus - 1) / gpus
    nodes = gpus // network.devices_per_node
    crossing = nodes / gpus if nodes > 1 else 0.0
    bucket = Collective(
        kind=kind, label="", axes=(), dtype="", num_elements=round(BUCKET), payload_bytes=size, group_size=gpus,
        group_nodes=nodes, inter_bytes=crossing * sent, intra_bytes=(1 - crossing) * sent, times=1, loop_depth=0,
    )  # fmt: skip
    return max(level_seconds(bucket, network).values())


def _round(value: float) -> float:
    """Returns six significant digits."""
    return float(f"{value:.6g}")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
