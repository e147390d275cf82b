"""Measures the bubble of a pipeline: the time of a step by its number of micro-batches, with and without stages.

    python -m benchmarks.pipelines [--stages=4] [--steps=3] [--rounds=3] [--config.a.b=value ...]

Eight virtual devices in four nodes, mics(2) in each; A = S, 2S and 4S micro-batches for S stages. The programs take
turns, in blocks of `--steps` steps; a round is a block of each, and the first is a warm-up. Prints the medians of a
step's time; the CPU time of the process divided by A, relative to the largest A, beside (A+S-1)/A; and the step without
a pipeline on the same rows. The devices share the cores of the machine, and stages without a micro-batch compute a copy
of one: the CPU time tells the ticks, whatever else the machine does.
"""

import argparse
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from configs import base, quickstart
from input_pipeline import Batches, load
from metrics.environment import environment
from training.experiment import Experiment, make_experiment

DEVICES, DEVICES_PER_NODE, GROUP = 8, 2, 2


@dataclass(kw_only=True)
class Program:
    """A compiled step with its state and batch, and its seconds a step in each round, on the clock and of the CPUs."""

    stages: int
    accum: int
    experiment: Experiment
    step: Any
    state: Any
    batch: Any
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def run(self, steps: int) -> None:
        """Runs a block of steps."""
        before, cpu_before = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.state, _ = jax.block_until_ready(self.step(self.state, self.batch))
        self.seconds.append((time.perf_counter() - before) / steps)
        self.cpu_seconds.append((time.process_time() - cpu_before) / steps)


def prepared(stages: int, micro_batches: int, most_stages: int, changes: dict[str, str]) -> Program:
    """Returns the program of `stages` for the rows of `micro_batches` micro-batches of `most_stages` stages."""
    config = quickstart.get_config()
    rows = micro_batches * DEVICES // most_stages
    config.update_from_flattened_dict(
        {
            "model.num_layers": 8,
            "data.source": "synthetic",
            "data.seq_len": 64,
            "batch.global_size": rows,
            "batch.micro_size": 1,
            "mesh.num_cpu_devices": DEVICES,
            "mesh.devices_per_node": DEVICES_PER_NODE,
            "mesh.stages": stages,
            "sharding.strategy": "mics",
            "sharding.partition_size": GROUP,
            "sample.length": 0,
        }
    )
    config.update_from_flattened_dict({key: type(_at(config, key))(value) for key, value in changes.items()})
    experiment = make_experiment(base.typed(config))
    data = load(experiment.config.data, "train", 0)
    with Batches(data, global_size=rows, rows=experiment.batches.local_rows, start_step=0, prefetch=1) as batches:
        batch = experiment.batches.to_devices(next(batches))
    return Program(
        stages=stages,
        accum=experiment.batches.accumulation,
        experiment=experiment,
        step=experiment.compile_train_step(),
        state=experiment.init_state(),
        batch=batch,
    )


def _at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[name]
    return config


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Measures the bubble of a pipeline.", allow_abbrev=False)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each program, after a warm-up")
    options, overrides = parser.parse_known_args()
    changes = dict(word.removeprefix("--config.").split("=", 1) for word in overrides)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    stages = options.stages
    programs = [prepared(s, times * stages, stages, changes) for times in (1, 2, 4) for s in (stages, 1)]
    for number in range(options.rounds + 1):
        for program in programs:
            program.run(options.steps)
        print(f"round {number} of {options.rounds}", file=sys.stderr)
    piped, plain = ([p for p in programs if (p.stages > 1) is wanted] for wanted in (True, False))
    medians = [float(np.median(p.seconds[1:])) for p in piped]
    per_micro = [float(np.median(p.cpu_seconds[1:])) / p.accum for p in piped]
    factor = [(p.accum + stages - 1) / p.accum for p in piped]
    print("| A | bubble | step | CPU time a micro-batch, relative | (A+S-1)/A, relative | no pipeline, same rows |")
    print("|---|---|---|---|---|---|")
    for p, other, seconds, each, ticks in zip(piped, plain, medians, per_micro, factor, strict=True):
        low, high = min(p.seconds[1:]), max(p.seconds[1:])
        print(
            f"| {p.accum} | {(stages - 1) / (p.accum + stages - 1):.1%} | {seconds:.3f} s ({low:.3f} to {high:.3f}) | "
            f"{each / per_micro[-1]:.3f} | {ticks / factor[-1]:.3f} | {np.median(other.seconds[1:]):.3f} s, CPU time "
            f"{np.median(other.cpu_seconds[1:]) / np.median(p.cpu_seconds[1:]):.2f} times |"
        )
    about = environment({})
    print(f"command: {about['command']}")
    print(f"commit {about['git_commit']}, {about['platform']}, {about['cpu_count']} cores, {about['date']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
