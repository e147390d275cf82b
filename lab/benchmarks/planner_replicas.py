"""Compares what the planner says of independent replicas with the steps of them that were timed.

    python -m lab.benchmarks.planner_replicas

The runs are ours of results/measured/replicas.jsonl, with those in one world beside them. Compute is the planner's: of
the rates in planner/clusters.py, which were measured on the machine of these runs, and fitted to no step. Replaces
results/derived/planner_replicas.jsonl. A program takes ten seconds to compile.
"""

import sys
from collections.abc import Iterator, Sequence
from statistics import median

from lab.benchmarks import replicas
from lab.benchmarks.compiled import on_cluster, start_devices
from lab.benchmarks.planner_validation import DEVICES, error
from lab.benchmarks.replicas import ALONE, MICRO_STEPS, NODES
from lab.benchmarks.runner import options_of, program
from lab.benchmarks.scores import PEER
from lab.records import DERIVED, Line, machine, recorded, replace
from launch.emulate.links import Links
from planner import clusters
from planner.independent import independent
from runtime.files.pages import markdown

RESULTS = DERIVED / "planner_replicas.jsonl"
KEY = ("mode", "rate", "run")
MACHINE = "2 CPU cores"  # the planner's rates were measured there


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Predicts and records; returns the exit code."""
    options_of(__doc__, argv)
    start_devices(NODES * DEVICES)
    replace(RESULTS, [run | predicted(run) | machine() for run in timed_runs()])
    return 0


def timed_runs() -> Iterator[Line]:
    """Yields each kind of run that was timed where all nodes share 2 cores, with the medians of its repetitions."""
    lines = [line for line in recorded(replicas.RESULTS) if not line["run"].startswith((PEER, ALONE))]
    lines = [line for line in lines if line["machine"] == MACHINE]
    for found in dict.fromkeys(tuple(line[name] for name in KEY) for line in lines):
        of = [line for line in lines if tuple(line[name] for name in KEY) == found]
        seconds, sent = (median(line[key] for line in of) for key in ("step_time_s", "sent_bytes"))
        yield dict(zip(KEY, found, strict=True)) | {"runs": len(of), "measured_s": seconds, "measured_bytes": sent}


def predicted(run: Line) -> dict[str, float]:
    """Returns the seconds of a step by the planner, what a node sends, how long that takes, and what is exposed."""
    cluster = clusters.with_rate(clusters.EMULATED, Links(rate=run["rate"]).rate_bits())
    one_world = {"sharding.replicas": "one_world", "sharding.shares": 0, "mesh.devices_per_node": DEVICES}
    keys = replicas.keys_of(run)
    shares = keys.get("sharding.shares") or MICRO_STEPS[run["mode"]] * NODES
    step = on_cluster(cluster, NODES, "standard", keys | one_world)
    if "independent" in run["run"]:
        found = independent(step, shares // NODES)
        assert found
        return {
            "predicted_s": found.step_s,
            "predicted_bytes": found.sent_bytes,
            "sending_s": found.sending_s,
            "exposed_s": found.sending_s - found.hidden_s,
        }
    all_reduce, said = step.timeline().use("replica_all_reduce"), step.prediction()
    return {
        "predicted_s": said.step_s,
        "predicted_bytes": said.inter_bytes * DEVICES,
        "sending_s": all_reduce.busy_s,
        "exposed_s": all_reduce.exposed_s,
    }


def table(lines: Sequence[Line]) -> str:
    """Returns bytes, seconds, and what of the sending is exposed: planned, and beyond the planned compute."""
    rows = []
    for line in lines:
        exposed = line["exposed_s"], line["exposed_s"] + line["measured_s"] - line["predicted_s"]
        cells = [str(MICRO_STEPS[line["mode"]]), line["rate"], f"`{line['run']}`", str(line["runs"])]
        cells += [f"{line[key] / 1e6:.0f}" for key in ("predicted_bytes", "measured_bytes")]
        cells += [f"{line['predicted_s']:.1f}", f"{line['measured_s']:.1f}", f"{error(line):+.0%}"]
        rows.append([*cells, *(f"{each / line['sending_s']:.0%}" for each in exposed)])
    head = [
        "micro-steps",
        "link",
        "run",
        "runs",
        "sent by a node, MB: planned",
        "measured",
        "step, s: planned",
        "measured",
        "error",
    ]
    return markdown([*head, "of the sending exposed: planned", "if all of the error is"], rows)


if __name__ == "__main__":
    sys.exit(main())
