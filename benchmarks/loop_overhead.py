"""Measures the overhead of the training loop over the compiled step: data, transfers, metrics, log and progress.

    python -m benchmarks.loop_overhead [--config=FILE] [--steps=10] [--rounds=6] [--config.a.b=value ...]

A real run of train.py, which alternates with bare calls of the same compiled step, on a separate state and batch, in
blocks of `--steps` steps. Prints medians and ratios; the target is under 1.03.
"""

import argparse
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

import train
from configs.schema import Config
from metrics.environment import environment
from training.experiment import Experiment, make_experiment


class Alternating:
    """Wraps the compiled step: runs bare steps at the start of each block of steps, and times both."""

    def __init__(self, experiment: Experiment, step_fn: Any, steps: int) -> None:
        self.bare: list[list[float]] = []  # seconds per step on each of the clocks
        self.loop: list[list[float]] = []
        self._experiment, self._step_fn, self._steps, self._calls = experiment, step_fn, steps, 0
        self._state = experiment.init_state()
        self.as_text = step_fn.as_text
        self._started = clocks()

    def __call__(self, state: Any, batch: Any) -> Any:
        if self._calls % self._steps == 0:
            jax.block_until_ready(state)
            if self._calls:
                self.loop.append(self._per_step())
            self._started = clocks()
            for _ in range(self._steps):
                self._state, _ = self._experiment.block(self._step_fn(self._state, batch))
            jax.block_until_ready(self._state)
            self.bare.append(self._per_step())
            self._started = clocks()
        self._calls += 1
        return self._step_fn(state, batch)

    def _per_step(self) -> list[float]:
        return [(now - before) / self._steps for now, before in zip(clocks(), self._started, strict=True)]


def clocks() -> tuple[float, float, float]:
    """Returns wall-clock seconds, and CPU seconds of process and thread; contention affects the thread's least."""
    return time.perf_counter(), time.process_time(), time.thread_time()


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Measures the overhead of the training loop.", allow_abbrev=False)
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each kind; the first is a warm-up")
    options, overrides = parser.parse_known_args()
    measured: list[Alternating] = []

    def make(config: Config) -> Experiment:
        experiment = make_experiment(config)
        measured.append(Alternating(experiment, experiment.compile_train_step(), options.steps))
        vars(experiment)["compile_train_step"] = lambda: measured[0]
        return experiment

    changes = {"num_steps": options.steps * options.rounds + 1, "eval.every": 0, "checkpoint.every": 0}
    changes |= {"eval.num_batches": 1, "sample.length": 0}
    with tempfile.TemporaryDirectory() as workdir:
        flags = [f"--config.{key}={value}" for key, value in changes.items()]
        argv = ["train.py", f"--config={options.config}", f"--workdir={workdir}/run", *flags, *overrides]
        code = train.main(argv, make=make)
    if code:
        return code
    bare, loop = np.array(measured[0].bare[1 : options.rounds]), np.array(measured[0].loop[1:])
    for name, a, b in zip(("wall-clock", "CPU", "main thread's CPU"), bare.T, loop.T, strict=True):
        print(f"{name}: bare step {np.median(a) * 1e3:.2f} ms, with the loop {np.median(b) * 1e3:.2f} ms", end="; ")
        print(f"ratio: median {np.median(b / a):.4f}, rounds {', '.join(f'{ratio:.3f}' for ratio in b / a)}")
    extra_s = np.median(loop[:, 2]) - np.median(bare[:, 2])
    print(f"the loop's own work in the main thread: {extra_s / np.median(bare[:, 0]):.2%} of the step time")
    about = environment({})
    print(f"command: {about['command']}")
    print(f"commit {about['git_commit']}, {about['platform']}, {about['cpu_count']} cores, {about['date']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
