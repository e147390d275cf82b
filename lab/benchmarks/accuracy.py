"""Measures the accuracy of codecs: a decoder on text and a classifier of images, 4 devices, several seeds.

    python -m lab.benchmarks.accuracy [--tasks=text,digits] [--seeds=3]

Trains the runs that are not recorded yet, in this process (with the parts of train.py; each of 4 virtual devices is a
node), and adds one line per run to results/measured/accuracy.jsonl.
"""

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import jax
from ml_collections import ConfigDict

from configs import base
from configs import digits as digits_config
from configs.schema import Config
from input_pipeline import Batches, load
from lab.benchmarks.records import MEASURED
from lab.benchmarks.runner import Key, run_missing
from runtime.command_line import prepare_output
from training.experiment import make_experiment
from training.validation import Validator

RESULTS = MEASURED / "accuracy.jsonl"
REPLICAS = 4
WARM_UP = 0.2  # of one_bit_adam, as a share of the steps
TASKS = ("text", "digits")
THRESHOLD = 5e-3  # of two_bit: about the magnitude of the larger gradients
SGD = {"optimizer.name": "sgd", "optimizer.learning_rate": 0.1, "optimizer.weight_decay": 5e-4}
ADAMW = {"optimizer.name": "adamw", "optimizer.learning_rate": 4e-3}
MEANS = {"local_sgd.inner_steps": 10, "local_sgd.outer_learning_rate": 1.0, "local_sgd.outer_momentum": 0.0}
INT4_GATHERS = {  # 2 nodes of 2 devices: the same model with zero3
    "mesh.devices_per_node": 2,
    "sharding.strategy": "zero3",
    "model.remat": "full",
    "compression.gather_inter": "int4",
    "compression.gather_intra": "int4",
    "compression.block": 1024,
}
# the rows of each table, by optimizer: the usual one of the task, and the other one for methods that need it
BY_ADAMW = {
    "text": ("bf16", "int8", "int4", "int4, no feedback", "one_bit", "one_bit, no feedback", "one_bit_adam")
    + ("power_sgd, rank 4", "delayed", "DiLoCo, 10 steps", "DiLoCo, 10 steps, streaming")
    + ("averages, 10 steps", "averages, 10 steps, streaming", "int4 gathers, zero3"),
    "digits": ("one_bit_adam",),
}
BY_SGD = {
    "text": ("two_bit", "one_bit", "power_sgd, rank 4", "dgc, 99 %", "dgc, 99.9 %"),
    "digits": ("int8", "int4", "two_bit", "one_bit", "one_bit, no feedback", "power_sgd, rank 4")
    + ("dgc, 99 %", "dgc, 99.9 %"),
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """The overrides of a method that sends fewer bytes, and the dense run to compare it with."""

    overrides: dict[str, Any]
    against: str

    def times_smaller(self, ratio: float) -> float:
        """Returns f32 bytes over the bytes sent, from the `ratio` of a step; over the run, without dgc's warm-up."""
        if "compression.gather_inter" in self.overrides:
            return 4 / (1 / 2 + 4 / self.overrides["compression.block"])
        match self.overrides.get("compression.hop_two", "none"):
            case "one_bit_adam":  # the warm-up sends f32
                smaller = 1 / (WARM_UP + (1 - WARM_UP) / ratio)
            case "dgc":  # each replica receives the payloads of all others; an all-reduce sends every value twice
                smaller = ratio * 2 / REPLICAS
            case _:
                smaller = ratio
        return smaller * self.overrides.get("local_sgd.inner_steps", 1)


def hop_two(name: str, **more: Any) -> dict[str, Any]:
    """Returns the overrides of a codec."""
    return {"compression.hop_two": name} | {f"compression.{key}": value for key, value in more.items()}


def methods(task: str) -> dict[str, Method]:
    """Returns the rows of a task's table; each optimizer has a dense row."""
    config: Any = base_config(task)
    steps: int = config.num_steps
    ways = {
        "bf16": hop_two("bf16"),
        "int8": hop_two("int8"),
        "int4": hop_two("int4"),
        "int4, no feedback": hop_two("int4", error_feedback=False),
        "two_bit": hop_two("two_bit", threshold=THRESHOLD),
        "one_bit": hop_two("one_bit"),
        "one_bit, no feedback": hop_two("one_bit", error_feedback=False),
        "power_sgd, rank 4": hop_two("power_sgd", rank=4),
        "delayed": {"compression.delayed": True},
        "DiLoCo, 10 steps": {"local_sgd.inner_steps": 10},
        "DiLoCo, 10 steps, streaming": {"local_sgd.inner_steps": 10, "local_sgd.streaming": True},
        "averages, 10 steps": MEANS,
        "averages, 10 steps, streaming": MEANS | {"local_sgd.streaming": True},
        "one_bit_adam": hop_two("one_bit_adam", warmup_steps=round(steps * WARM_UP)),
        "int4 gathers, zero3": INT4_GATHERS,
        "dgc, 99 %": hop_two("dgc", sparsity=0.99, warmup_steps=steps // 10),
        "dgc, 99.9 %": hop_two("dgc", sparsity=0.999, warmup_steps=steps // 10),
    }
    rows = {}
    for name, optimizer, chosen in (("AdamW", ADAMW, BY_ADAMW[task]), ("SGD", SGD, BY_SGD[task])):
        rows[f"dense, {name}"] = Method(overrides=optimizer, against=f"dense, {name}")
        for way in chosen:
            rows[f"{way}, {name}"] = Method(overrides=optimizer | ways[way], against=f"dense, {name}")
    return rows


def text_config() -> ConfigDict:
    """A decoder of 0.1 M parameters on the standard library's sources: 1000 steps of 16 rows of 64 bytes."""
    config: Any = base.get_config()
    config.num_steps = 1000
    config.data.seq_len = config.model.max_len = 64
    config.model.update({"num_layers": 2, "hidden": 64, "intermediate": 192, "remat": "none"})
    config.batch.update({"global_size": 16, "micro_size": 4})
    config.optimizer.warmup_steps = 50
    config.eval.num_batches = 32
    return config


def base_config(task: str) -> ConfigDict:
    """Returns the config of a task, before overrides."""
    return text_config() if task == "text" else digits_config.get_config()


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


def main() -> int:
    """Trains the missing runs; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description="Measures what codecs cost in accuracy.", allow_abbrev=False)
    parser.add_argument("--tasks", default=",".join(TASKS), help="the tasks to run (default: %(default)s)")
    parser.add_argument(
        "--seeds", type=int, default=3, help="number of runs of each method, with seeds from 0 (default: %(default)s)"
    )
    options = parser.parse_args()
    prepare_output()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    tasks = options.tasks.split(",")
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
