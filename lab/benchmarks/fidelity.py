"""Records the loss curves of MiCS and ZeRO-3 on the same text and seed: figure 16 of the MiCS paper on a small scale.

    python -m lab.benchmarks.fidelity [--steps=300]

Runs train.py under both (configs/fidelity.py), unless recorded, and adds lines to results/measured/fidelity.jsonl for
`python -m lab.paper`.
"""

import argparse
import sys
from functools import partial
from typing import Any

from lab.benchmarks.records import MEASURED
from lab.benchmarks.runner import Key, run_missing, steps_of, train
from runtime.command_line import prepare_output

RESULTS = MEASURED / "fidelity.jsonl"
STRATEGIES = {"mics(2)": "mics", "zero3": "zero3"}  # name in the record to the argument of the config


def main() -> int:
    """Trains under each strategy; returns 1 if a run failed."""
    parser = argparse.ArgumentParser(description="Records the loss curves of MiCS and ZeRO-3.", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    prepare_output()
    return run_missing(RESULTS, [{"strategy": name} for name in STRATEGIES], partial(measured, steps=options.steps))


def measured(key: Key, *, steps: int) -> dict[str, Any]:
    """Returns the loss of each step, and the command."""
    found = steps_of(train("fidelity", f"configs/fidelity.py:{STRATEGIES[key['strategy']]}", {"num_steps": steps}))
    return {name: found[name] for name in ("losses", "command")}


if __name__ == "__main__":
    sys.exit(main())
