"""Measures the accuracy of codecs: a decoder on text and a classifier of images, 4 devices, several seeds.

    python -m lab.benchmarks.accuracy [--tasks=text,digits] [--seeds=3]

Trains the runs of lab/benchmarks/accuracy.toml that are not recorded yet, in this process (with the parts of train.py;
each of 4 virtual devices is a node), and adds one line per run to results/measured/accuracy.jsonl.
"""

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from configs import base
from configs import digits as digits_config
from configs.schema import Config
from input_pipeline import Batches, load
from lab.benchmarks.compiled import start_devices
from lab.benchmarks.runner import Key, options_of, program, run_missing, words
from lab.records import MEASURED
from training.experiment import make_experiment
from training.validation import Validator

RESULTS = MEASURED / "accuracy.jsonl"
RUNS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
TASKS = tuple(RUNS["rows"])
REPLICAS = 4
WARM_UP = "compression.warmup_steps"


@dataclass(frozen=True, kw_only=True)
class Method:
    """The overrides of a method that sends fewer bytes, and the dense run to compare it with."""

    overrides: dict[str, Any]
    against: str
    steps: int  # of the run

    def times_smaller(self, ratio: float) -> float:
        """Returns f32 bytes over the bytes sent, from the `ratio` of a step; over the run, without dgc's warm-up."""
        if "compression.gather_inter" in self.overrides:
            return 4 / (1 / 2 + 4 / self.overrides["compression.block"])
        match self.overrides.get("compression.hop_two", "none"):
            case "one_bit_adam":  # the warm-up sends f32
                warm_up = self.overrides[WARM_UP] / self.steps
                smaller = 1 / (warm_up + (1 - warm_up) / ratio)
            case "dgc":  # each replica receives the payloads of all others; an all-reduce sends every value twice
                smaller = ratio * 2 / REPLICAS
            case _:
                smaller = ratio
        return smaller * self.overrides.get("local_sgd.inner_steps", 1)


@cache
def methods(task: str) -> dict[str, Method]:
    """Returns the rows of a task's table; each optimizer has a dense row."""
    config: Any = base_config(task)
    rows = {}
    for name, chosen in RUNS["rows"][task].items():
        for way in ("dense", *chosen):
            overrides = RUNS["optimizers"][name] | RUNS["ways"][way]
            if WARM_UP in overrides:
                overrides[WARM_UP] = round(overrides[WARM_UP] * config.num_steps)
            rows[f"{way}, {name}"] = Method(overrides=overrides, against=f"dense, {name}", steps=config.num_steps)
    return rows


def base_config(task: str) -> ConfigDict:
    """Returns the config of a task, before overrides.

    Of the text: 1000 steps of 16 rows of 64 bytes of the standard library's sources, with 0.1 M parameters.
    """
    if task == "digits":
        return digits_config.get_config()
    config: Any = base.get_config()
    config.num_steps = 1000
    config.data.seq_len = config.model.max_len = 64
    config.model.update({"num_layers": 2, "hidden": 64, "intermediate": 192, "remat": "none"})
    config.batch.update({"global_size": 16, "micro_size": 4})
    config.optimizer.warmup_steps = 50
    config.eval.num_batches = 32
    return config


def config_of(task: str, overrides: dict[str, Any], seed: int) -> Config:
    """Returns the config of a run: data parallel, with 4 nodes of one device."""
    config: Any = base_config(task)
    config.mesh.update({"num_cpu_devices": REPLICAS, "devices_per_node": 1})
    config.sharding.update({"strategy": "ddp", "partition_size": 0})
    config.optimizer.update({"clip_norm": 0.0})
    config.seed = seed
    config.update_from_flattened_dict(overrides)
    return base.typed(config)


def train(config: Config) -> dict[str, float]:
    """Trains to the end; returns the final validation and hop two's metrics."""
    experiment = make_experiment(config)
    data, validation_data = (load(experiment.config.data, split, config.seed) for split in ("train", "validation"))
    step_fn, state, metrics = experiment.compile_train_step(), experiment.init_state(), {}
    size = experiment.batches.global_size
    with Batches(data, global_size=size, rows=experiment.batches.local_rows, start_step=0, prefetch=4) as batches:
        for _ in range(config.num_steps):
            state, metrics = experiment.block(step_fn(state, experiment.batches.to_devices(next(batches))))
    validation = Validator(experiment, validation_data, config.eval.num_batches)(state.params).scalars()
    kept = ("loss", "skipped_steps", "hop_two_ratio", "hop_two_fraction_sent", "residual_norm")
    return validation | {key: float(metrics[key]) for key in kept if key in metrics}


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Trains the missing runs; returns 1 if one failed."""
    options = options_of(
        __doc__,
        argv,
        tasks=(",".join(TASKS), "the tasks to run"),
        seeds=(3, "number of runs of each method, with seeds from 0"),
    )
    start_devices(REPLICAS)
    tasks = words(options.tasks, "tasks", TASKS)
    keys = [
        {"task": task, "method": name, "seed": seed}
        for seed in range(options.seeds)
        for task in tasks
        for name in methods(task)
    ]
    return run_missing(RESULTS, keys, measured)


def measured(key: Key) -> dict[str, Any]:
    """Returns what the line of a run says."""
    overrides = methods(key["task"])[key["method"]].overrides
    jax.clear_caches()
    return train(config_of(key["task"], overrides, key["seed"])) | {"overrides": overrides}


if __name__ == "__main__":
    sys.exit(main())
