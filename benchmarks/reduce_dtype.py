"""What hop one costs in loss when it sums in bfloat16 instead of float32, emulated on CPUs.

    python -m benchmarks.reduce_dtype [--devices=8] [--seeds=3] [--steps=120]

XLA:CPU sums in float32 whatever it is told, so that the sum is emulated: hop one goes around a ring of all devices, as
NCCL's does, and for `compute` every partial sum is rounded to bfloat16 before it is handed on. The quickstart's model
in bfloat16 under ZeRO-3, without hierarchy: one ring, the longest these devices give. Seeds and dtypes alternate.
Adds a line a run to results/measured/reduce_dtype.jsonl (finished runs are not done again) and prints a table.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import jax
from jax import lax

import train
from benchmarks.records import MEASURED, add, machine, recorded
from files import json_lines
from sharding import collectives

RESULTS = MEASURED / "reduce_dtype.jsonl"
DTYPES = ("float32", "compute")
KEY = ("devices", "steps", "seed", "reduce_dtype")


def main() -> int:
    """Runs what is missing and prints the table; returns the exit code of a run that failed."""
    parser = argparse.ArgumentParser(description="Losses by the dtype of hop one's sums.", allow_abbrev=False)
    parser.add_argument("--devices", type=int, default=8, help="virtual devices: the length of the ring")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    for seed in range(options.seeds):
        for dtype in DTYPES:
            about = dict(zip(KEY, (options.devices, options.steps, seed, dtype), strict=True))
            if any(all(line[key] == about[key] for key in KEY) for line in recorded(RESULTS)):
                continue
            losses = losses_of(dtype, arguments(options.devices, options.steps, seed))
            if losses is None:
                return 1
            add(RESULTS, about | losses | machine())
    print(table(recorded(RESULTS)))
    return 0


def arguments(devices: int, steps: int, seed: int) -> list[str]:
    """Returns the flags of a run."""
    keys = {
        "seed": seed,
        "num_steps": steps,
        "model.compute_dtype": "bfloat16",
        "mesh.num_cpu_devices": devices,
        "mesh.devices_per_node": devices,
        "batch.micro_size": 1,
        "sharding.strategy": "zero3",
        "sharding.partition_size": 0,
        "sharding.hierarchical": False,
        "checkpoint.every": 0,
        "elastic.snapshot_every": 0,
        "eval.every": steps,
        "sample.length": 0,
    }
    return ["--config=configs/quickstart.py", *(f"--config.{key}={value}" for key, value in keys.items())]


def losses_of(dtype: str, flags: Sequence[str]) -> dict[str, float] | None:
    """Trains with sums in `dtype`; returns the last loss of training and of validation, None if the run failed."""
    with (
        tempfile.TemporaryDirectory() as workdir,
        mock.patch.object(collectives, "reduce_scatter_chunks", by_ring(collectives.reduce_scatter_chunks)),
        mock.patch.object(collectives, "ring_reduce_scatter", RINGS[dtype]),
    ):
        if train.main(["train.py", *flags, f"--workdir={workdir}"]):
            return None
        rows = json_lines.read(Path(workdir) / "metrics.jsonl")
    values = {name: [row[name] for row in rows if name in row] for name in ("loss", "validation_loss")}
    return {"loss": mean(values["loss"][-10:]), "validation_loss": values["validation_loss"][-1]}


def by_ring(original: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns `reduce_scatter_chunks` that takes our ring for each sum, as between processes."""
    return lambda x, scope, **options: original(x, scope, **options | {"by_ring": True})


def rounded_ring(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Does what `ring_reduce_scatter` does, and rounds each partial sum to bfloat16."""
    size, index = lax.axis_size(axes), lax.axis_index(axes)
    ring = [(i, (i + 1) % size) for i in range(size)]
    total = x[(index - 1) % size]
    for hop in range(2, size + 1):
        total = lax.reduce_precision(lax.ppermute(total, axes, ring) + x[(index - hop) % size], 8, 7)
    return total


RINGS = {"float32": collectives.ring_reduce_scatter, "compute": rounded_ring}


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Returns the losses by ring and seed, and what summing in bfloat16 adds to them."""
    rows = ["| devices of the ring | steps | seed | float32 | bfloat16 | difference |", "|---|---|---|---|---|---|"]
    for devices, steps in sorted({(line["devices"], line["steps"]) for line in lines}):
        of = {
            (line["seed"], line["reduce_dtype"]): line["validation_loss"]
            for line in lines
            if (line["devices"], line["steps"]) == (devices, steps)
        }
        seeds = sorted(seed for seed, dtype in of if dtype == DTYPES[0] and (seed, DTYPES[1]) in of)
        differences = []
        for seed in seeds:
            wide, narrow = (of[seed, dtype] for dtype in DTYPES)
            differences.append(narrow - wide)
            rows.append(f"| {devices} | {steps} | {seed} | {wide:.4f} | {narrow:.4f} | {narrow - wide:+.4f} |")
        if seeds:
            low, high = min(differences), max(differences)
            rows.append(f"| {devices} | {steps} | mean | | | {mean(differences):+.4f} ({low:+.4f} to {high:+.4f}) |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
