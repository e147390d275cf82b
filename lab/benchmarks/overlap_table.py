"""What overlaps in the steps compiled for H100s, for a list of strategies, gathers and compiler options.

    python -m lab.benchmarks.overlap_table [--only=mics] [--again]

Compiles the steps of lab/benchmarks/overlap.csv (BERT 10B of the MiCS paper, or a decoder of 1.3 B that every strategy
can hold, on 16 nodes of 8) with and without the options that let collectives overlap, and replays each program at three
link rates, with the planner's figures and with matrix products at 450 TFLOP/s (slow kernels hide more). A line a case
and rate is in results/derived/overlap.jsonl. The replay has a queue for each network level, jax 0.10.2 one stream for
all collectives: what is exposed is a lower bound. `--only` takes the cases whose name contains it, `--again` also those
that are recorded. A case takes a minute or two on 2 cores; no GPU is needed, but XLA for GPUs is (`make
.venv/h100/installed`). Exit codes: 0 done; 1 a case could not be compiled or read; 2 no case has such a name.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from files.pages import markdown
from lab.benchmarks.compiled import table as cells_of
from lab.benchmarks.runner import Key, options_of, program, run_missing
from lab.emulate.links import Links
from lab.records import DERIVED, Line
from planner.clusters import H100, find_cluster, with_rate
from planner.compile import CompiledStep, compile_step
from planner.replay import Timeline, replay
from sharding.hlo_program import Program, parse_program

RESULTS = DERIVED / "overlap.jsonl"
CLUSTER = "p5.48xlarge"  # whose devices and links inside the node they are
PRODUCTS_TFLOPS = (
    round(H100.matmul_rate("bf16") / 1e12),
    450,
)  # of products: ours, and half of the peak
NODES, DEVICES = 16, 8
RATES = ("100gbit", "400gbit", "3200gbit")
CASES = {row["case"]: row for row in cells_of("overlap.csv")}


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, replays and records the cases; returns the exit code."""
    options = options_of(
        __doc__,
        argv,
        only=("", "only cases whose name contains this; `=NAME` is that name"),
        again=(False, "compile what is recorded too"),
    )
    chosen = [case for case in CASES if (options.only in case) or options.only == f"={case}"]
    if not chosen:
        raise ValueError(f"--only={options.only} is in no name; there are {', '.join(CASES)}")
    keys = [{"case": case, "overlap": on, "rate": rate} for case in chosen for on in (False, True) for rate in RATES]
    return run_missing(RESULTS, keys, measured, again=options.again)


def flags(case: str, *, overlap: bool) -> tuple[str, ...]:
    """Returns the config of a case, as on a command line."""
    keys = {**CASES[case]["changes"], "sharding.overlap": "auto" if overlap else "off"}
    return (f"--config={CASES[case]['config']}", *(f"--config.{key}={value}" for key, value in keys.items()))


@lru_cache(maxsize=1)  # the rates of a case follow each other
def _compiled(words: tuple[str, ...]) -> tuple[CompiledStep, Program]:
    step = compile_step(words, nodes=NODES, devices_per_node=DEVICES)
    return step, parse_program(step.text)


def measured(key: Key) -> dict[str, Any]:
    """Returns what the line of a case and rate says. ValueError or RuntimeError: it cannot be compiled or read."""
    step, parsed = _compiled(flags(key["case"], overlap=key["overlap"]))
    rate_bits = Links(rate=key["rate"]).rate_bits()
    timeline, slow = (replayed(parsed, step, rate_bits, tflops) for tflops in PRODUCTS_TFLOPS)
    seconds = {"compute_s": timeline.compute_s, "step_s": timeline.step_s}
    seconds |= {"slow_compute_s": slow.compute_s, "slow_step_s": slow.step_s}
    for name, labels in (("hop_two", ["hop_two"]), ("gathers_hop_one", ["gather", "hop_one"])):
        use = timeline.use(*labels)
        seconds |= {f"{name}_s": use.busy_s, f"{name}_exposed_s": use.exposed_s}
    return {
        "config": CASES[key["case"]]["config"],
        "cluster": CLUSTER,
        "products_tflops": PRODUCTS_TFLOPS,
        "nodes": NODES,
        "devices_per_node": DEVICES,
        "argument_bytes": step.argument_bytes,
        "temporary_bytes": step.temporary_bytes,
        **{name: round(value, 3) for name, value in seconds.items()},
    }


def replayed(program: Program, step: CompiledStep, rate_bits: float, tflops: float) -> Timeline:
    """Returns the step's timeline on nodes with links of `rate_bits` per second and matrix products at `tflops`."""
    cluster = replace(with_rate(find_cluster(CLUSTER), rate_bits), devices_per_node=step.shape.devices_per_node)
    device = cluster.compute(step.shape.num_devices)
    device = replace(device, matmul_fraction=1e12 * tflops / device.peak_flops["bf16"])
    return replay(program, step.shape, device, cluster.network())


def table(lines: Sequence[Line]) -> str:
    """Returns the rows of the page: steps with overlap, and how long they are and what they hold without."""
    found = {(line["case"], line["overlap"], line["rate"]): line for line in lines}
    planner, slow = (f"exposed, {tflops} TFLOP/s" for tflops in PRODUCTS_TFLOPS)
    heads = ["step", "link, Gbit/s", "compute", "hop two", "gathers, hop one", "step (off)", planner, slow]
    shown = [(case, rate) for case, about in CASES.items() if (rate := about["on_page"])]
    return markdown(
        [*heads, "temporaries (off)"], [row(found[case, True, rate], found[case, False, rate]) for case, rate in shown]
    )


def row(on: Mapping[str, Any], off: Mapping[str, Any]) -> list[str]:
    """Returns the row of a step with overlap, and without."""
    hops = [f"{on[f'{name}_s']:.2f} ({on[f'{name}_exposed_s']:.2f})" for name in ("hop_two", "gathers_hop_one")]
    shares = [1 - on[f"{speed}compute_s"] / on[f"{speed}step_s"] for speed in ("", "slow_")]
    cells = [on["case"], on["rate"].removesuffix("gbit"), f"{on['compute_s']:.2f}", *hops]
    cells += [f"{on['step_s']:.2f} ({off['step_s']:.2f})", *(f"{100 * share:.1f} %" for share in shares)]
    return [*cells, f"{on['temporary_bytes'] / 1e9:.1f} ({off['temporary_bytes'] / 1e9:.1f}) GB"]


if __name__ == "__main__":
    sys.exit(main())
