"""Prints the numbers of the table of strategies in docs/concepts.md, read from the compiled programs.

    python -m benchmarks.strategy_bytes

The quickstart's model on 8 virtual devices, 4 nodes of 2, two micro-steps per step. Steps are compiled but not run.
"""

import math
from typing import Any

import jax

from benchmarks.names import sharding_of
from configs import base, quickstart
from runtime.command_line import prepare_output
from sharding import hlo
from training.experiment import make_experiment

STRATEGIES = (
    "ddp",
    "zero1",
    "zero2",
    "zero3 flat",
    "zero3",
    "mics(4)",
    "mics(2)",
    "mics(2) two-hop off",
    "node/node/all",
)


def main() -> None:
    """Compiles the step under each strategy and prints a markdown table."""
    prepare_output()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    print("| strategy | holds | sends between nodes | sends inside the node |")
    print("|---|---|---|---|")
    for name in STRATEGIES:
        config: Any = quickstart.get_config()
        config.batch.micro_size = 2
        config.sharding.update(sharding_of(name))
        experiment = make_experiment(base.typed(config))
        state = jax.tree.leaves(experiment.state_shapes)
        held = sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in state)
        text = experiment.compile_train_step().as_text() or ""
        sent = hlo.bytes_per_step(hlo.read_collectives(text, experiment.plan.layout.shape))
        cells = [held, sent["collective_inter_bytes"], sent["collective_intra_bytes"]]
        print(f"| {name} | " + " | ".join(f"{cell / 1e6:.2f} MB" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
