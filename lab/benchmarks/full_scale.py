"""Replays the MiCS paper's throughput figures at their full size: its models, its clusters, its batches.

    python -m lab.benchmarks.full_scale [--only=bert_10b] [--again]

Each step of lab/benchmarks/full_scale.csv is compiled for an A100 with the cluster's memory and replayed with a V100's
or an A100's figures, on two networks: the network in planner/clusters.py, and the paper's measured network (its figure
2, B_part of section 3). results/derived/full_scale.jsonl has a line per step and network. Recorded steps are replayed
again only with `--again`, and compiled again only with another cache folder (MICS_JAX_CACHE). There are 73 steps; each
takes about a minute on 2 cores. No GPU is needed, but XLA for GPUs is (`make .venv/h100/installed`). Exit codes: 0
done; 1 a step could not be compiled or read; 2 no step has such a name.
"""

import sys
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

from lab.benchmarks.compiled import on_cluster, replaying, table
from lab.benchmarks.names import strategy_keys
from lab.benchmarks.runner import Key
from lab.paper.replays import BUCKET, INSIDE_BYTES_PER_S, LINK_BYTES_PER_S, LINK_LATENCY_S, P3DN, PAPER, PLANNER
from lab.records import DERIVED
from planner.clusters import CLUSTERS, with_system
from planner.links import Network
from planner.predict import ReplayableStep
from sharding.hlo import Collective

RESULTS = DERIVED / "full_scale.jsonl"
CELLS = "full_scale.csv"
PER_NODE = 8


def cells() -> list[Key]:
    """Returns the keys of all lines: each step on its networks."""
    rows = ({("keys" if key == "changes" else key): value for key, value in row.items()} for row in table(CELLS))
    return [{**row, "network": network} for row in rows for network in networks(row["cluster"], row["gpus"])]


def name(cell: Key) -> str:
    """Returns the name of a step for `--only`."""
    return f"{cell['model']}, {cell['strategy']}, {cell['gpus']} GPUs of {cell['cluster']}"


def networks(cluster: str, gpus: int) -> dict[str, Network]:
    """Returns the networks on which a step is replayed: the paper measured only p3dn's."""
    own = replace(CLUSTERS[cluster].network(), devices_per_node=min(PER_NODE, gpus))
    if cluster != P3DN:
        return {PLANNER: own}
    measured = {"node_bandwidth": LINK_BYTES_PER_S, "inter_latency_s": LINK_LATENCY_S}
    return {PLANNER: own, PAPER: replace(own, intra_bandwidth=INSIDE_BYTES_PER_S, **measured)}


def replayed(cell: Key) -> dict[str, Any]:
    """Returns the line of a step: its bytes and its seconds."""
    keys = strategy_keys(cell["strategy"])
    keys |= {"batch.micro_size": cell["micro_size"], "batch.global_size": cell["global_size"], **cell["keys"]}
    step = _compiled(cell["cluster"], cell["gpus"], cell["config"], tuple(keys.items()))
    network = networks(cell["cluster"], cell["gpus"])[cell["network"]]
    timeline = step.timeline(network=network)
    item = step.experiment.plan.compute_dtype.itemsize
    uses = {
        f"{label}, {level}": {"times": use.times, "busy_s": _round(use.busy_s), "exposed_s": _round(use.exposed_s)}
        for (label, level), use in timeline.uses.items()
    }
    cluster = with_system(step.machine.cluster, "deepspeed")
    theirs = replace(step, machine=replace(step.machine, cluster=cluster)).timeline(network=network)
    return {
        "accumulation": step.experiment.batches.accumulation,
        "num_params": step.experiment.model.num_params,
        "network_figures": asdict(network),
        "bucket_s": _round(ring_s("all-reduce", round(item * BUCKET), cell["gpus"], network)),
        "latency_s": _round(ring_s("all-gather", cell["gpus"], cell["gpus"], network)),
        "memory": {key: round(value) for key, value in asdict(step.memory()).items()},
        "compute_s": _round(timeline.compute_s),
        "uses": uses,
        "step_s": _round(timeline.step_s),
        "deepspeed_s": _round(theirs.step_s),
    }


@lru_cache(maxsize=1)  # the networks of a step follow each other
def _compiled(cluster: str, gpus: int, config: str, keys: tuple[tuple[str, Any], ...]) -> ReplayableStep:
    there = replace(CLUSTERS[cluster], devices_per_node=min(PER_NODE, gpus))
    return on_cluster(there, gpus // there.devices_per_node, config, dict(keys))


def ring_s(kind: str, size: int, gpus: int, network: Network) -> float:
    """Returns the time of a collective of this size on all GPUs, in whole nodes; 0 on a single GPU."""
    sent = (2 if kind == "all-reduce" else 1) * size * (gpus - 1) / gpus
    nodes = gpus // network.devices_per_node
    crossing = nodes / gpus if nodes > 1 else 0.0
    one = Collective(
        kind=kind, label="", axes=(), dtype="", num_elements=size, payload_bytes=size, array_bytes=(size,),
        group=tuple(range(gpus)), group_nodes=nodes, inter_bytes=crossing * sent, intra_bytes=(1 - crossing) * sent,
        times=1, loop_depth=0,
    )  # fmt: skip
    return max(network.level_seconds(one).values())


def _round(value: float) -> float:
    """Returns six significant digits."""
    return float(f"{value:.6g}")


main = replaying(__doc__, RESULTS, cells, name, replayed, lambda cell: cell["gpus"])

if __name__ == "__main__":
    sys.exit(main())
