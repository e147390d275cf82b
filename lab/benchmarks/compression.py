"""Measures steps with each codec of all-reduce: their time and bytes on slow links.

    python -m lab.benchmarks.compression [--rates=100mbit,1gbit] [--repetitions=3]

The standard workload (configs/standard.py) under mics(2) with one micro-step, on 4 emulated nodes of 2 devices. Only
runs that are not recorded yet are done. Adds lines to results/measured/compression.jsonl; needs root
(docs/emulation.md).
"""

import sys
from collections.abc import Sequence
from typing import Any

from compression.methods import method_named
from configs.schema.sections import CODECS, USERS
from lab.benchmarks.runner import (
    Key,
    alternating,
    checked_rates,
    emulated,
    options_of,
    program,
    run_missing,
    steps_of,
    train,
)
from lab.records import MEASURED

RESULTS = MEASURED / "compression.jsonl"
NODES, DEVICES = 4, 2
STEPS = 6  # of a run; the first one is not timed
GONE = ("two_bit", "one_bit", "dgc")  # recorded, and examples of docs/extending.md now
NAMES = (*CODECS, "statistical", "power_sgd", "demo")
SPARSITY = 0.984  # of what sends the largest values


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Does the missing runs; returns 1 if a run failed, 2 for bad arguments."""
    options = options_of(
        __doc__, argv, rates=("100mbit", "of the links, as for tc"), repetitions=(3, "of each run, in turn")
    )
    rates = checked_rates(options.rates)
    return run_missing(RESULTS, alternating(options.repetitions, kind=["step"], rate=rates, codec=NAMES), measured)


def measured(key: Key) -> dict[str, Any]:
    """Returns what the line of a key says."""
    keys = keys_of(key["codec"]) | emulated(NODES, DEVICES, key["rate"])
    keys |= {"num_steps": STEPS, "repetition": key["repetition"]}
    keys |= {"elastic.snapshot_every": 0}  # snapshots cross the links too
    return steps_of(train("compression", "configs/standard.py", keys))


def keys_of(name: str) -> dict[str, Any]:
    """Returns the keys of the config of a step with a codec, with the optimizer that it needs."""
    keys = {"compression.all_reduce": name, "batch.global_size": NODES * DEVICES}
    keys |= {"compression.sparsity": SPARSITY} if name in USERS["sparsity"] else {}
    optimizer = method_named(name).takes_over  # otherwise AdamW
    return keys | ({"optimizer.name": optimizer} if optimizer else {})


if __name__ == "__main__":
    sys.exit(main())
