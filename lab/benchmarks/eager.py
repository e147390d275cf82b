"""Compares eager updates with the other ways to exchange outer gradients while computing: the last validation loss.

    python -m lab.benchmarks.eager [--seeds=0,1,2]

Trains the runs that results/measured/eager.jsonl lacks: the text task of lab/benchmarks/accuracy.toml, which 4 virtual
nodes train for 390 steps. A row of the table is a way to exchange, with an interval and an outer step.
"""

import shutil
import sys
from collections.abc import Sequence
from typing import Any

from lab.benchmarks.accuracy import RUNS, TASKS, paired
from lab.benchmarks.runner import WORKDIR, Key, config_words, options_of, program, run_missing, started, words
from lab.records import MEASURED, Line, spread
from runtime.files.pages import markdown
from training.metrics.run_files import read_run

RESULTS = MEASURED / "eager.jsonl"
STEPS = 390  # a multiple of both intervals
INTERVALS = 10, 30
# learning rate and momentum: averaging, DiLoCo as tuned before, and the momentum of its paper with a lower rate
OUTER_STEPS = {"averages": (1.0, 0.0), "DiLoCo": (0.7, 0.6), "DiLoCo, outer momentum 0.9, outer rate 0.4": (0.4, 0.9)}
TIMINGS = {"": {}, ", streaming": {"local_sgd.streaming": True}, ", eager": {}}
DENSE, DELAYED = "dense", "delayed, half the rate"
WAYS: dict[str, dict[str, Any]] = {
    DENSE: {},
    DELAYED: RUNS["ways"][DELAYED],
    **{
        f"{outer}({interval}){timing}": {
            "local_sgd.inner_steps": interval,
            "local_sgd.outer_learning_rate": rate,
            "local_sgd.outer_momentum": momentum,
            **more,
        }
        for outer, (rate, momentum) in OUTER_STEPS.items()
        for interval in INTERVALS
        for timing, more in TIMINGS.items()
    },
}


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Trains the missing runs; returns 1 if one failed."""
    options = options_of(__doc__, argv, seeds=("0,1,2", "the seed of each run of a way"))
    seeds = [int(seed) for seed in words(options.seeds, "seeds", map(str, range(10)))]
    return run_missing(RESULTS, [{"way": way, "seed": seed} for seed in seeds for way in WAYS], measured)


def measured(key: Key) -> dict[str, Any]:
    """Trains a run to its end; returns the last validation loss."""
    workdir, way = WORKDIR / "eager", key["way"]
    shutil.rmtree(workdir, ignore_errors=True)
    task, adamw = TASKS["text"], RUNS["optimizers"]["AdamW"]
    keys = RUNS["replicas"] | task["keys"] | adamw | {"num_steps": STEPS, "seed": key["seed"]} | WAYS[way]
    trainer = ["-m", "lab.benchmarks.eager_updates"] if way.endswith("eager") else ["train.py"]
    started([sys.executable, *trainer, f"--workdir={workdir}", *config_words(task["config"], keys)])
    shutil.rmtree(workdir / "checkpoints", ignore_errors=True)
    return {"validation_loss": read_run(workdir).rows[-1]["validation_loss"]}


def table(lines: Sequence[Line]) -> str:
    """Returns a row per way, with differences from the dense runs of the same seed."""
    runs = {way: [line for line in lines if line["way"] == way] for way in WAYS}
    rows = [
        [
            way,
            str(len(runs[way])),
            spread([line["validation_loss"] for line in runs[way]], ".3f"),
            "" if way == DENSE else spread(paired(runs[way], runs[DENSE]), "+z.3f"),
        ]
        for way in WAYS
        if runs[way]
    ]
    return markdown(["way", "seeds", "validation loss", "minus dense, by seed"], rows)


if __name__ == "__main__":
    sys.exit(main())
