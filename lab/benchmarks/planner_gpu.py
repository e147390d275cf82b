"""Compares what the planner says of our steps on a GPU with those that were timed on one.

    python -m lab.benchmarks.planner_gpu

The runs are ours of results/measured/gpu.jsonl on one H100. The planner's rates are those of planner/rates.csv, which
none of these steps chose. Replaces results/derived/planner_gpu.jsonl. A program takes up to a minute to compile.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace as changed
from statistics import median

from lab.benchmarks import gpu
from lab.benchmarks.compiled import on_cluster, start_devices
from lab.benchmarks.planner_validation import error
from lab.benchmarks.runner import options_of, program
from lab.records import DERIVED, Line, machine, recorded, replace
from planner.clusters import CLUSTERS
from runtime.files.pages import markdown

RESULTS = DERIVED / "planner_gpu.jsonl"
NODE = changed(CLUSTERS["p5.48xlarge"], devices_per_node=1)
DEVICE = "NVIDIA H100 80GB HBM3"


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Predicts and records; returns the exit code."""
    options_of(__doc__, argv)
    start_devices(1)
    replace(RESULTS, [run | predicted(run) | machine() for run in timed_runs()])
    return 0


def timed_runs() -> Iterator[Line]:
    """Yields each program of ours that was timed, with the median of its repetitions."""
    of_one = [line for line in recorded(gpu.RESULTS) if (line["devices"], line["device"]) == (1, DEVICE)]
    lines = [line for line in of_one if line["side"] != gpu.PEER]
    for size, side in dict.fromkeys((line["size"], line["side"]) for line in lines):
        of = [line for line in lines if (line["size"], line["side"]) == (size, side)]
        step_s = gpu.tokens_of(size) / median(line["tokens_per_s"] for line in of)
        yield {"size": size, "side": side, "runs": len(of), "measured_s": step_s}


def predicted(run: Line) -> dict[str, float]:
    """Returns the seconds of a step by the planner, and the bytes of its device."""
    step = on_cluster(NODE, 1, f"gpu_decoder:{run['size']}", gpu.keys_of(run["size"], run["side"], 1))
    said = step.prediction()
    return {"predicted_s": said.step_s, "memory_bytes": step.memory().total}


def table(lines: Sequence[Line]) -> str:
    """Returns a row a program: seconds, planned and measured, and the planned memory."""
    rows = []
    for line in lines:
        seconds = (f"{1e3 * line[key]:.1f}" for key in ("predicted_s", "measured_s"))
        cells = [line["size"], line["side"], str(line["runs"]), *seconds, f"{error(line):+.1%}"]
        rows.append([*cells, f"{line['memory_bytes'] / 1e9:.1f}"])
    head = ["parameters", "program", "runs", "step, ms: planned", "measured", "error", "memory, GB: planned"]
    return markdown(head, rows)


if __name__ == "__main__":
    sys.exit(main())
