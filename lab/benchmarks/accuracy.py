"""Measures the accuracy of codecs: a decoder on text and classifiers of images, 4 devices, several seeds.

    python -m lab.benchmarks.accuracy [--tasks=text,digits,fashion] [--seeds=3]

Trains the runs of lab/benchmarks/accuracy.toml that are not recorded yet (each of 4 virtual devices is a node); adds
one line per run to results/measured/accuracy.jsonl.
"""

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from configs.schema.codecs import TABLE
from lab.benchmarks.names import in_times, on_pages
from lab.benchmarks.runner import WORKDIR, Key, options_of, program, run_missing, train, words
from lab.benchmarks.steps import GONE
from lab.records import MEASURED, Line, spread
from runtime.files.pages import markdown

RESULTS = MEASURED / "accuracy.jsonl"
RUNS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
TASKS: dict[str, Any] = RUNS["tasks"]
REPLICAS = RUNS["replicas"]["mesh.num_cpu_devices"]
WARM_UP = "compression.warmup_steps"
EXAMPLES = ("power_sgd", "sparse_loco", "demo")  # recorded when keys had their settings; examples/methods has them now
KEPT = {"loss", "skipped_steps", "all_reduce_ratio", "all_reduce_fraction_sent", "residual_norm"}
KEPT |= {f"validation_{name}" for name in ("loss", "accuracy", "bits_per_byte")}


@dataclass(frozen=True, kw_only=True)
class Method:
    """The overrides of a method that sends fewer bytes, and the dense run to compare it with."""

    config: str
    overrides: dict[str, Any]
    against: str
    steps: int  # length of the run

    def times_smaller(self, ratio: float) -> float:
        """Returns f32 bytes over the bytes sent, from the `ratio` of a step; over the run, without DGC's warm-up."""
        for collective in ("all_gather", "weight_differences", "reduce_scatter"):  # between nodes
            if codec := self.overrides.get(f"compression.{collective}_inter"):
                return 4 / TABLE[codec.removesuffix("_rotated")].bytes_per_value(self.overrides["compression.block"])
        match self.overrides.get("compression.all_reduce", "none"):
            case "one_bit_adam" | "power_sgd":  # the warm-up sends f32
                warm_up = self.overrides.get(WARM_UP, 0) / self.steps
                smaller = 1 / (warm_up + (1 - warm_up) / ratio)
            # each replica receives the payloads of all others; an all-reduce sends every value twice
            case "dgc" | "sparse_loco" | "demo":
                smaller = ratio * 2 / REPLICAS
            case _:
                smaller = ratio
        return smaller * self.overrides.get("local_sgd.inner_steps", 1)


@cache
def methods(task: str) -> dict[str, Method]:
    """Returns the rows of a task's table; each optimizer has a dense row."""
    steps, rows = TASKS[task]["keys"]["num_steps"], {}
    for name, chosen in TASKS[task]["ways"].items():
        for way in ("dense", *chosen):
            overrides = RUNS["optimizers"][name] | RUNS["ways"][way]
            config = overrides.pop("config", TASKS[task]["config"])
            if WARM_UP in overrides:
                overrides[WARM_UP] = round(overrides[WARM_UP] * steps)
            rows[f"{way}, {name}"] = Method(config=config, overrides=overrides, against=f"dense, {name}", steps=steps)
    return rows


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Trains the missing runs; returns 1 if one failed."""
    options = options_of(
        __doc__,
        argv,
        tasks=(",".join(TASKS), "the tasks to run"),
        seeds=(3, "number of runs of each method, with seeds from 0"),
    )
    runs = [(task, name, one) for task in words(options.tasks, "tasks", TASKS) for name, one in methods(task).items()]
    recorded = (*GONE, *EXAMPLES)
    names = [(task, name) for task, name, one in runs if one.overrides.get("compression.all_reduce") not in recorded]
    keys = [{"task": task, "method": name, "seed": seed} for seed in range(options.seeds) for task, name in names]
    return run_missing(RESULTS, keys, measured)


def measured(key: Key) -> dict[str, Any]:
    """Trains a run to its end; returns the last validation and the metrics of the replica all-reduce."""
    method = methods(key["task"])[key["method"]]
    keys = RUNS["replicas"] | TASKS[key["task"]]["keys"] | {"seed": key["seed"]} | method.overrides
    run, _ = train(WORKDIR / "accuracy", method.config, keys)
    return {name: run.rows[-1][name] for name in run.rows[-1] if name in KEPT} | {"overrides": method.overrides}


def table(task: str, lines: Sequence[Line]) -> str:
    """Returns a row per method of a task, with differences from the dense runs of the same seed."""
    classifies, rows = task != "text", []
    ways = methods(task)
    runs = {name: [line for line in lines if (line["task"], line["method"]) == (task, name)] for name in ways}
    for name, method in ways.items():
        if not runs[name] or not runs[method.against]:
            continue
        smaller = method.times_smaller(runs[name][-1].get("all_reduce_ratio", 1.0))
        cells = [on_pages(name), in_times(smaller), spread([line["validation_loss"] for line in runs[name]], ".3f")]
        cells += [spread([line["validation_accuracy"] for line in runs[name]], ".1%")] if classifies else []
        pairs = paired(runs[name], runs[method.against])
        rows.append([*cells, "" if name == method.against else spread(pairs, "+z.3f")])
    heads = [task, "times smaller", "validation loss", *(["accuracy"] if classifies else []), "minus dense, by seed"]
    return markdown(heads, rows)


def paired(runs: Sequence[Line], dense: Sequence[Line]) -> list[float]:
    """Returns the losses of a method minus the dense runs' losses with the same seed and batches."""
    of_dense = {line["seed"]: line["validation_loss"] for line in dense}
    return [line["validation_loss"] - of_dense[line["seed"]] for line in runs if line["seed"] in of_dense]


if __name__ == "__main__":
    sys.exit(main())
