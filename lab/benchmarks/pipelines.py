"""Measures the bubble of a pipeline: the time of a step by its number of micro-batches, with and without stages.

    python -m lab.benchmarks.pipelines [--stages=4] [--steps=3] [--rounds=3] [--config.a.b=value ...]

Eight virtual devices in four nodes, mics(2) in each; A = S, 2S and 4S micro-batches for S stages. The programs take
turns, in blocks of `--steps` steps; a round is a block of each, and the first is a warm-up. The devices share the cores
of the machine, and a stage without a micro-batch computes all the same: the CPU time of the process tells the ticks,
whatever else the machine does. A line is added to results/measured/pipelines.jsonl; docs/pipelines.md has the newest
one without changed keys. Exit codes: 0 done; 2 bad configuration.
"""

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from configs import command_line
from files.pages import markdown
from input_pipeline import Batches, load
from lab.benchmarks.runner import ROOT, options_of, program
from lab.records import MEASURED, add, machine, spread
from training.experiment import make_experiment

RESULTS = MEASURED / "pipelines.jsonl"
DEVICES, DEVICES_PER_NODE, GROUP = 8, 2, 2
KEYS = {
    "model.num_layers": 8,
    "data.source": "synthetic",
    "data.seq_len": 64,
    "batch.micro_size": 1,
    "mesh.num_cpu_devices": DEVICES,
    "mesh.devices_per_node": DEVICES_PER_NODE,
    "sharding.strategy": "mics",
    "sharding.partition_size": GROUP,
    "sample.length": 0,
}

OURS = ("--config.mesh.stages", "--config.batch.global_size")  # of each program another one


@dataclass(kw_only=True)
class Program:
    """A compiled step with its state and batch, and its seconds a step in each round, on the clock and of the CPUs."""

    accum: int
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
        self.seconds.append(round((time.perf_counter() - before) / steps, 5))
        self.cpu_seconds.append(round((time.process_time() - cpu_before) / steps, 5))


def prepared(stages: int, rows: int, overrides: Sequence[str]) -> Program:
    """Returns the program of `stages` for a batch of `rows` rows. ValueError for a configuration that cannot be."""
    keys = {**KEYS, "mesh.stages": stages, "batch.global_size": rows}
    words = [f"--config={ROOT}/configs/quickstart.py", *(f"--config.{key}={value}" for key, value in keys.items())]
    experiment = make_experiment(command_line.parse(["pipelines", *words, *overrides]))
    data = load(experiment.config.data, "train", 0)
    with Batches(data, global_size=rows, rows=experiment.batches.local_rows, start_step=0, prefetch=1) as batches:
        batch = experiment.batches.to_devices(next(batches))
    step, state = experiment.compile_train_step(), experiment.init_state()
    return Program(accum=experiment.batches.accumulation, step=step, state=state, batch=batch)


def measured(stages: int, steps: int, rounds: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns a line: seconds a step in each round, by the number of micro-batches."""
    rows = [many * DEVICES for many in (1, 2, 4)]  # of a stage's devices: A = S, 2S and 4S
    pairs = [[prepared(count, of, overrides) for count in (stages, 1)] for of in rows]
    for number in range(rounds + 1):
        for each in itertools.chain(*pairs):
            each.run(steps)
        print(f"round {number} of {rounds}", file=sys.stderr)
    found = {
        str(pair[0].accum): {
            name: {"seconds": each.seconds[1:], "cpu_seconds": each.cpu_seconds[1:]}
            for name, each in zip(("stages", "none"), pair, strict=True)
        }
        for pair in pairs
    }
    return {"stages": stages, "steps": steps, "keys": list(overrides), "by_micro_batches": found}


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Measures, records and prints the table; returns the exit code."""
    given = sys.argv[1:] if argv is None else argv
    overrides = [word for word in given if word.startswith("--config.")]
    options = options_of(
        __doc__,
        [word for word in given if word not in overrides],
        stages=(4, "of the pipeline, 2 or 4"),
        steps=(3, "of a block"),
        rounds=(3, "blocks of each program, after a warm-up"),
    )
    if ours := [word for word in overrides if word.partition("=")[0] in OURS]:
        raise ValueError(f"{ours[0]} is what this benchmark varies; use --stages")
    if options.stages not in (2, 4) or min(options.steps, options.rounds) < 1:
        raise ValueError("--stages is 2 or 4, --steps and --rounds are 1 at least")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    line = measured(options.stages, options.steps, options.rounds, overrides)
    print(table(line))
    add(RESULTS, line | machine())
    return 0


def standard(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the newest line with 4 stages and without changed keys."""
    return [line for line in lines if line["stages"] == 4 and not line["keys"]][-1]


def table(line: Mapping[str, Any]) -> str:
    """Returns a row for each number of micro-batches; a ratio is the mean of the rounds', with their range."""
    stages, found = line["stages"], {int(a): runs for a, runs in line["by_micro_batches"].items()}
    most = max(found)
    each = {a: [seconds / a for seconds in runs["stages"]["cpu_seconds"]] for a, runs in found.items()}
    ticks = {a: (a + stages - 1) / a for a in found}
    rows = []
    for a, runs in found.items():
        seconds = runs["stages"]["seconds"]
        slower = [one / other for one, other in zip(each[a], each[most], strict=True)]
        over = [one * a / other for one, other in zip(each[a], runs["none"]["cpu_seconds"], strict=True)]
        cells = [f"{a}", f"{(stages - 1) / (a + stages - 1):.1%}", f"{min(seconds):.2f} to {max(seconds):.2f} s"]
        cells += [spread(slower) if a < most else "1", f"{ticks[a] / ticks[most]:.2f}", spread(over)]
        rows.append(cells)
    over_most = f"over that of A = {most}"
    heads = ["A", "bubble (S-1)/(A+S-1)", f"step, {len(each[most])} rounds", f"CPU time a micro-batch, {over_most}"]
    return markdown([*heads, f"(A+S-1)/A, {over_most}", "CPU time, over no pipeline"], rows)


if __name__ == "__main__":
    sys.exit(main())
