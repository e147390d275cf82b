"""Prints the numbers of the table of strategies in docs/concepts.md, read from the compiled programs.

    python -m lab.benchmarks.strategy_bytes

The quickstart's model on 8 virtual devices, 4 nodes of 2, two micro-steps per step. Steps are compiled but not run.
"""

import sys

from lab.benchmarks.compiled import Cell, collectives, start_devices, state
from lab.benchmarks.runner import program

STRATEGIES = ("ddp", "zero1", "zero2", "zero3 flat", "zero3", "mics(4)", "mics(2)", "mics(2) two-hop off")
QUICKSTART = {"kind": "step", "config": "quickstart", "nodes": 4, "devices_per_node": 2, "accum": 2, "changes": {}}


@program
def main() -> int:
    """Compiles the step under each strategy and prints a Markdown table."""
    start_devices(8)
    print("| strategy | holds | sends between nodes | sends inside the node |\n|---|---|---|---|")
    for name in (*STRATEGIES, "node/node/all"):
        cell = Cell(name=name, strategy=name, **QUICKSTART)
        held, found = state(cell)["state_bytes"], collectives(cell)
        sent = [sum(one[f"{level}_bytes"] for one in found) for level in ("inter", "intra")]
        sizes = (held["parameters"] + held["optimizer"], *sent)
        print(f"| {name} | " + " | ".join(f"{size / 1e6:.2f} MB" for size in sizes) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
