"""Holds the planner to training steps that others published: MPT, 125 M to 70 B parameters, on A100 and H100.

    python -m lab.benchmarks.published_steps [--only=mpt-7b] [--again]
    python -m lab.benchmarks.published_steps --choose

Rows of lab/benchmarks/published_steps.csv are MosaicML's (github.com/mosaicml/llm-foundry, its
scripts/train/benchmarking/README.md, bf16, PyTorch's FSDP with full sharding): configs/mpt.py on nodes of 8 GPUs. The
last three are IBM's (github.com/foundation-model-stack/fms-fsdp, its README of 2024: Llama 2, hybrid sharding). Each is
compiled and replayed with FSDP's schedule and with ours. Every third row (CHOSEN) chose the rates of products
and attention in planner/rates.csv, by `--choose`; the error bar that plans print is from the other rows only. Without
rematerialisation FSDP keeps the same values as our `remat=dots`. A program takes 10 to 60 s on 2 cores;
results/derived/published_steps.jsonl has a line a row. Exit codes: 0 done; 1 a step could not be compiled; 2 no row has
such a name.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from lab.benchmarks.compiled import on_cluster, replaying, start_devices
from lab.benchmarks.planner_errors import error, quantile
from lab.benchmarks.runner import Key, program, rows_of
from lab.records import DERIVED, Line
from planner.clusters import CLUSTERS, Cluster, with_rate, with_system
from planner.predict import ReplayableStep
from runtime.files.pages import markdown

RESULTS = DERIVED / "published_steps.jsonl"
CHOSEN = slice(0, None, 3)  # the rows that chose rates
NODES = {  # the nodes that have these GPUs, and the bits per second of a node's link
    "a100_40gb": ("p4d.24xlarge", 1600e9),
    "a100_80gb": ("p4de.24xlarge", 1600e9),
    "h100_80gb": ("p5.48xlarge", 3200e9),  # not stated; typical of nodes of its time
}
CONFIGS = {"mpt": "mpt", "llama": "decoder"}  # by the family of a model
PER_NODE = 8
SYSTEM = "fsdp"


def cells() -> list[Key]:
    """Returns the keys of all lines: the published rows, and whether each chose rates."""
    rows = rows_of("published_steps.csv")
    chose = [row for row in rows if row["model"].startswith("mpt")][CHOSEN]
    return [{**row, "chose_rates": row in chose} for row in rows]


def name(cell: Key) -> str:
    """Returns the name of a row for `--only`."""
    return f"{cell['gpu']}, {cell['model']}, rows of {cell['seq']}, {cell['gpus']} GPUs"


def cluster_of(cell: Key, system: str = SYSTEM) -> Cluster:
    """Returns the nodes of a row."""
    node, rate_bits = NODES[cell["gpu"]]
    stated = cell["node_link_gbit"]
    rate_bits = rate_bits if stated == "not stated" else 1e9 * float(stated)
    return with_system(with_rate(CLUSTERS[node], rate_bits), system)


def published_s(cell: Key) -> float:
    """Returns the seconds per step of a row."""
    return cell["global_batch"] * cell["seq"] / cell["gpus"] / float(cell["tokens_per_s_per_gpu"])


def compiled(cell: Key) -> ReplayableStep:
    """Returns the step of a row, compiled for its GPUs."""
    keys = {
        "model.max_len": cell["seq"],
        "model.remat": "full" if cell["activation_checkpointing"] == "full" else "dots",
        "data.seq_len": cell["seq"],
        "batch.micro_size": cell["micro_batch"],
        "batch.global_size": cell["global_batch"],
        "sharding.strategy": cell["sharding"],
    }
    if cell["sharding"] == "hsdp":
        keys["compression.all_reduce"] = "bf16"  # fms_fsdp/policies/mixed_precision.py: reduce_dtype
    family, _, size = cell["model"].partition("-")
    return on_cluster(cluster_of(cell), cell["gpus"] // PER_NODE, f"{CONFIGS[family]}:{size}", keys)


def replayed(cell: Key) -> dict[str, Any]:
    """Returns the line of a row: published and replayed seconds per step, and memory per device."""
    return compared(compiled(cell), published_s(cell), cluster_of(cell, "ours"))


def compared(step: ReplayableStep, published: float, ours: Cluster) -> dict[str, Any]:
    """Returns the published and replayed seconds of a step, with our overlap too, and the memory per device."""
    memory = step.memory()
    return {
        "published_s": published,
        "predicted_s": step.timeline().step_s,
        "ours_s": replace(step, machine=replace(step.machine, cluster=ours)).timeline().step_s,
        "memory_bytes": memory.total,
        "capacity_bytes": memory.capacity,
        "num_params": step.experiment.model.num_params,
    }


@program
def choose() -> int:
    """Prints the rates that come nearest to the rows that choose, and records nothing."""
    chosen = [cell for cell in cells() if cell["chose_rates"]]
    start_devices(max(cell["gpus"] for cell in chosen))
    for gpu in ("a100", "h100"):
        cells_of = [cell for cell in chosen if cell["gpu"].startswith(gpu)]
        print(nearest(gpu, [(compiled(cell), published_s(cell)) for cell in cells_of], (0.6, 0.3)))
    return 0


def nearest(name: str, steps: Sequence[tuple[ReplayableStep, float]], start: Sequence[float]) -> str:
    """Returns the fractions of the peak rate for which some steps come nearest to their published seconds.

    They are of products and of attention; with either in `start`, attention keeps its own. Errors are relative;
    errors beyond 3 % count less than their square (soft L1).
    """

    def errors(logs: np.ndarray) -> list[float]:
        products, *attention = np.exp(logs)
        found = []
        for step, published in steps:
            device = step.machine.device(step.experiment.config)
            rates = {part: attention[0] for part in ("forward", "backward") if attention} or device.attention
            timeline = step.timeline(replace(device, matmul_fraction=products, attention=rates))
            found.append(timeline.step_s / published - 1)
        return found

    best = least_squares(errors, np.log(start), loss="soft_l1", f_scale=0.03, diff_step=0.02)
    shares = ", ".join(f"{what} {share:.3f}" for what, share in zip(("products", "attention"), np.exp(best.x)))
    mean = fmean(map(abs, errors(best.x)))
    return f"{name}: {shares} of the peak; mean error of {len(steps)}: {mean:.1%}"


# ----------------------------------------------------------------------------------------- the content of pages


def groups(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Returns the held-back rows, in all and by GPU, size, length and so on; and the rows that chose the rates."""
    held = [line for line in lines if not line["chose_rates"] and line["sharding"] == "zero3"]
    found = {"held back, all": held}
    for gpu in dict.fromkeys(line["gpu"] for line in held):
        found[gpu.upper().replace("_", "-")] = [line for line in held if line["gpu"] == gpu]
    found["up to 1 B parameters"] = [line for line in held if line["num_params"] < 1.5e9]
    found["more"] = [line for line in held if line["num_params"] >= 1.5e9]
    found["rows up to 4096"] = [line for line in held if line["seq"] <= 4096]
    found["longer rows"] = [line for line in held if line["seq"] > 4096]
    found["rematerialised"] = [line for line in held if line["activation_checkpointing"] == "full"]
    found["not rematerialised"] = [line for line in held if line["activation_checkpointing"] != "full"]
    found["hybrid, Llama"] = [line for line in lines if line["sharding"] == "hsdp"]
    found["several nodes"] = [line for line in held if line["gpus"] > PER_NODE]
    return found | {"chose the rates": [line for line in lines if line["chose_rates"]]}


def summary(groups: Mapping[str, Sequence[Line]]) -> str:
    """Returns how near the predictions of each group are."""
    rows = []
    for label, group in groups.items():
        errors = [error(line, "published_s") for line in group]
        if errors:
            sizes = [fmean(map(abs, errors)), median(map(abs, errors)), quantile(errors, 0.9)]
            cells = [label, str(len(group)), *(f"{size:.1%}" for size in sizes), f"{fmean(errors):+.1%}"]
            fits = sum(line["memory_bytes"] <= line["capacity_bytes"] for line in group)
            rows.append([*cells, f"{min(errors):+.0%} to {max(errors):+.0%}", str(fits)])
    return markdown(["rows", "steps", "mean", "median", "nine of ten within", "bias", "range", "fit"], rows)


main = replaying(__doc__, RESULTS, cells, name, replayed, lambda cell: cell["gpus"])

if __name__ == "__main__":
    sys.exit(choose() if sys.argv[1:] == ["--choose"] else main())
