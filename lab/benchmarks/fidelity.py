"""Records the loss curves of MiCS and ZeRO-3 on the same text and seed: figure 16 of the MiCS paper on a small scale.

    python -m lab.benchmarks.fidelity [--steps=300]

Runs train.py under both (configs/fidelity.py), unless recorded, and adds lines to results/measured/fidelity.jsonl.
"""

import sys
from collections.abc import Sequence
from typing import Any

from lab.benchmarks.runner import Key, options_of, program, run_missing, steps_of, train
from lab.records import MEASURED

RESULTS = MEASURED / "fidelity.jsonl"
STRATEGIES = {"mics(2)": "mics", "zero3": "zero3"}  # name in the record to the argument of the config


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Trains under each strategy; returns 1 if a run failed."""
    steps = options_of(__doc__, argv, steps=(300, "of each run")).steps

    def measured(key: Key) -> dict[str, Any]:
        found = steps_of(train("fidelity", f"configs/fidelity.py:{STRATEGIES[key['strategy']]}", {"num_steps": steps}))
        return {name: found[name] for name in ("losses", "command")}

    return run_missing(RESULTS, [{"strategy": name} for name in STRATEGIES], measured)


if __name__ == "__main__":
    sys.exit(main())
