"""Prints the numbers of the table of strategies in docs/concepts.md, read from the compiled programs.

    python -m lab.benchmarks.strategy_bytes

The quickstart's model on 8 virtual devices, 4 nodes of 2, two micro-steps per step. Steps are compiled but not run.
"""

from lab.benchmarks.compiled import Case, start_devices, step_record
from runtime.command_line import prepare_output

STRATEGIES = ("ddp", "zero1", "zero2", "zero3 flat", "zero3", "mics(4)", "mics(2)", "mics(2) two-hop off")


def main() -> None:
    """Compiles the step under each strategy and prints a Markdown table."""
    prepare_output()
    start_devices(8)
    print("| strategy | holds | sends between nodes | sends inside the node |\n|---|---|---|---|")
    for name in (*STRATEGIES, "node/node/all"):
        found = step_record(Case(config="quickstart", nodes=4, devices_per_node=2, accum=2, strategy=name))
        held = found["state_bytes"]["parameters"] + found["state_bytes"]["optimizer"]
        sent = [sum(one[f"{level}_bytes"] for one in found["collectives"]) for level in ("inter", "intra")]
        print(f"| {name} | " + " | ".join(f"{cell / 1e6:.2f} MB" for cell in (held, *sent)) + " |", flush=True)


if __name__ == "__main__":
    main()
