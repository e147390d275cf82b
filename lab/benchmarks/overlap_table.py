"""The overlap in the steps compiled for H100s, for a list of strategies, gathers and compiler options.

    python -m lab.benchmarks.overlap_table [--only=mics] [--again]

Compiles the steps of lab/benchmarks/overlap.csv (BERT 10B of the MiCS paper, or a decoder of 1.3 B that every strategy
can hold, on 16 nodes of 8) with and without the options that let collectives overlap, and replays each program at three
link rates, with the planner's figures and with matrix products at 450 TFLOP/s (slow kernels hide more). A line per case
and rate is in results/derived/overlap.jsonl. A case takes half a minute on 2 cores; no GPU is needed, but XLA for GPUs
is (`make .venv/h100/installed`).
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from lab.benchmarks.compiled import on_cluster, replaying
from lab.benchmarks.compiled import table as cells_of
from lab.benchmarks.runner import Key
from lab.records import DERIVED, Line
from launch.emulate.links import Links
from planner.clusters import find_cluster, with_rate
from planner.predict import ReplayableStep
from planner.replay import Timeline
from runtime.files.pages import markdown

RESULTS = DERIVED / "overlap.jsonl"
CLUSTER = "p5.48xlarge"  # the cluster whose devices and links inside a node are used
# of products: the planner's rate, and half of the peak
PRODUCTS_TFLOPS = (round(find_cluster(CLUSTER).device.matmul_rate("bf16") / 1e12), 450)
NODES, DEVICES = 16, 8
RATES = ("100gbit", "400gbit", "3200gbit")
CASES = {row["case"]: row for row in cells_of("overlap.csv")}


def cells() -> list[Key]:
    """Returns the keys of all lines: each case with and without overlap, at each rate."""
    return [{"case": case, "overlap": on, "rate": rate} for case in CASES for on in (False, True) for rate in RATES]


def keys_of(case: str, *, overlap: bool) -> dict[str, Any]:
    """Returns the config keys that a case changes."""
    return {**CASES[case]["changes"], "sharding.overlap": "auto" if overlap else "off"}


@lru_cache(maxsize=1)  # the rates of a case follow each other
def _compiled(case: str, overlap: bool) -> ReplayableStep:
    return on_cluster(find_cluster(CLUSTER), NODES, CASES[case]["config"], keys_of(case, overlap=overlap))


def measured(key: Key) -> dict[str, Any]:
    """Returns the line of a case and rate. ValueError or RuntimeError if the step cannot be compiled or read."""
    step = _compiled(key["case"], key["overlap"])
    rate_bits = Links(rate=key["rate"]).rate_bits()
    timeline, slow = (replayed(step, rate_bits, tflops) for tflops in PRODUCTS_TFLOPS)
    seconds = {"compute_s": timeline.compute_s, "step_s": timeline.step_s}
    seconds |= {"slow_compute_s": slow.compute_s, "slow_step_s": slow.step_s}
    for name, labels in (
        ("all_reduce", ["replica_all_reduce"]),
        ("gathers_reduce_scatter", ["gather", "group_reduce_scatter"]),
    ):
        use = timeline.use(*labels)
        seconds |= {f"{name}_s": use.busy_s, f"{name}_exposed_s": use.exposed_s}
    return {
        "config": CASES[key["case"]]["config"],
        "cluster": CLUSTER,
        "products_tflops": PRODUCTS_TFLOPS,
        "nodes": NODES,
        "devices_per_node": DEVICES,
        "argument_bytes": step.compiled.argument_bytes,
        "temporary_bytes": step.compiled.temporary_bytes,
        **{name: round(value, 3) for name, value in seconds.items()},
    }


def replayed(step: ReplayableStep, rate_bits: float, tflops: float) -> Timeline:
    """Returns the step's timeline on nodes with links of `rate_bits` per second and matrix products at `tflops`."""
    device = step.machine.device(step.experiment.config)
    device = replace(device, matmul_fraction=1e12 * tflops / device.peak_flops["bf16"])
    return step.timeline(device, with_rate(step.machine.cluster, rate_bits).network())


def table(lines: Sequence[Line]) -> str:
    """Returns the rows of the page: steps with overlap, and their time and memory without overlap."""
    found = {(line["case"], line["overlap"], line["rate"]): line for line in lines}
    planner, slow = (f"exposed, {tflops} TFLOP/s" for tflops in PRODUCTS_TFLOPS)
    heads = ["step", "link, Gbit/s", "compute", "all-reduce", "gathers, reduce-scatter", "step (off)", planner, slow]
    shown = [(case, rate) for case, about in CASES.items() if (rate := about["on_page"])]
    return markdown(
        [*heads, "temporaries (off)"], [row(found[case, True, rate], found[case, False, rate]) for case, rate in shown]
    )


def row(on: Mapping[str, Any], off: Mapping[str, Any]) -> list[str]:
    """Returns the row of a step with overlap, and without."""
    hops = [
        f"{on[f'{name}_s']:.2f} ({on[f'{name}_exposed_s']:.2f})" for name in ("all_reduce", "gathers_reduce_scatter")
    ]
    shares = [1 - on[f"{speed}compute_s"] / on[f"{speed}step_s"] for speed in ("", "slow_")]
    cells = [on["case"], on["rate"].removesuffix("gbit"), f"{on['compute_s']:.2f}", *hops]
    cells += [f"{on['step_s']:.2f} ({off['step_s']:.2f})", *(f"{100 * share:.1f} %" for share in shares)]
    return [*cells, f"{on['temporary_bytes'] / 1e9:.1f} ({off['temporary_bytes'] / 1e9:.1f}) GB"]


main = replaying(__doc__, RESULTS, cells, lambda key: key["case"], measured, lambda _: NODES * DEVICES)

if __name__ == "__main__":
    sys.exit(main())
