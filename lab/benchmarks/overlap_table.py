"""What overlaps in the steps compiled for H100s, for a list of strategies, gathers and compiler options.

    python -m lab.benchmarks.overlap_table [--only=mics]

Compiles the cases below (BERT 10B of the MiCS paper, or a decoder of 1.3 B that every strategy can hold, on 16 nodes of
8), replays each program at three link rates, with the planner's figures and with matrix products at 450 TFLOP/s (slow
kernels hide more), and writes a line a case and rate into results/derived/overlap.jsonl. The replay has a queue for
each network level, jax 0.10.2 one stream for all collectives: what is exposed is a lower bound. `--only` takes the
cases whose name contains it. A case takes a minute or two on 2 cores; no GPU is needed, but XLA for GPUs is (`make
.venv/h100/installed`). Exit codes: 0 done; 2 a case could not be compiled or read.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from files.pages import markdown
from lab.benchmarks.names import sharding_of
from lab.benchmarks.records import DERIVED, machine, put
from lab.emulate.links import Links
from planner.clusters import PRODUCTS, find_cluster, with_rate
from planner.compile import CompiledStep, compile_step
from planner.replay import Timeline, replay
from runtime.exit_codes import ExitCode
from sharding.hlo_program import Program, parse_program

RESULTS = DERIVED / "overlap.jsonl"
KEY = ("case", "overlap", "rate")  # of a line
CLUSTER = "p5.48xlarge"  # whose devices and links inside the node they are
PRODUCTS_TFLOPS = (PRODUCTS["H100"], 450)  # of matrix products: the planner's, and slow ones, half of the peak
ON_PAGE = (  # the rows of docs/gpu.md; the record has the rest
    ("mics(8)", "400gbit"),
    ("mics(8), micro-batch 16", "400gbit"),
    ("mics(8), micro-batch 32", "400gbit"),
    ("mics(8), hop two int8, micro-batch 32", "100gbit"),
    ("mics(8), hop two delayed", "100gbit"),
    ("mics(8), hop two delayed, int8", "100gbit"),
    ("mics(8), local SGD, a step that meets", "100gbit"),
    ("mics(8), local SGD, streaming", "100gbit"),
    ("mics(8), gathered once a micro-step", "400gbit"),
    ("mics(16)", "400gbit"),
    ("node/node/all, micro-batch 16", "400gbit"),
    ("zero3", "3200gbit"),
)
CONFIG, NODES, DEVICES = "configs/bert_10b.py", 16, 8
RATES = ("100gbit", "400gbit", "3200gbit")
DECODER = "configs/gpu_decoder.py:1.3b"
MICS: Mapping[str, Any] = {"sharding.partition_size": 8}
LOCAL: Mapping[str, Any] = {"local_sgd.inner_steps": 10}
ZERO3: Mapping[str, Any] = {"sharding.strategy": "zero3", "sharding.partition_size": 0}
NODE_NODE_ALL = {f"sharding.{key}": value for key, value in sharding_of("node/node/all").items()}
SMALL: Mapping[str, Any] = {  # 4 micro-steps
    "model.remat": "full",
    "batch.global_size": 4096,
    "batch.micro_size": 8,
    "mesh.devices_per_node": DEVICES,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step to compile: the keys that it changes, and whether the options that let collectives overlap are given."""

    name: str
    keys: Mapping[str, Any]
    overlap: bool
    config: str = CONFIG

    @property
    def flags(self) -> list[str]:
        """The config, as on a command line."""
        keys = {**self.keys, "sharding.overlap": "auto" if self.overlap else "off"}
        return [f"--config={self.config}", *(f"--config.{key}={value}" for key, value in keys.items())]


STEPS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("mics(8)", MICS),
    ("mics(8), micro-batch 16", {**MICS, "batch.micro_size": 16}),
    ("mics(8), micro-batch 32", {**MICS, "batch.micro_size": 32}),
    ("mics(8), hop two int8", {**MICS, "compression.hop_two": "int8"}),
    ("mics(8), hop two int8, micro-batch 16", {**MICS, "compression.hop_two": "int8", "batch.micro_size": 16}),
    ("mics(8), hop two int8, micro-batch 32", {**MICS, "compression.hop_two": "int8", "batch.micro_size": 32}),
    ("mics(16)", {"sharding.partition_size": 16}),
    ("mics(8), hop two delayed", {**MICS, "compression.delayed": True}),
    ("mics(8), hop two delayed, int8", {**MICS, "compression.delayed": True, "compression.hop_two": "int8"}),
    ("mics(8), local SGD, a step that meets", {**MICS, **LOCAL}),
    ("mics(8), local SGD, streaming", {**MICS, **LOCAL, "local_sgd.streaming": True}),
    ("mics(8), hop one in float32", {**MICS, "sharding.reduce_dtype": "float32"}),
    ("mics(8), gathered once a micro-step", {**MICS, "sharding.gather": "micro_step", "model.remat": "full"}),
    ("node/node/all, micro-batch 16", {**NODE_NODE_ALL, "batch.micro_size": 16}),
    ("zero3", ZERO3),
    ("zero3, gathered between nodes once a micro-step", {**ZERO3, "sharding.gather": "node"}),
)
OF_DECODER = {
    "ddp": {"sharding.strategy": "ddp"},
    "zero1": {"sharding.strategy": "zero1"},
    "zero2": {"sharding.strategy": "zero2"},
    "zero3": ZERO3,
    "hsdp": {"sharding.strategy": "hsdp"},
    "mics(8), gathered once a step": {"sharding.strategy": "mics", **MICS, "sharding.gather": "step"},
}
CASES = tuple(Case(name=name, keys=keys, overlap=overlap) for name, keys in STEPS for overlap in (False, True))
CASES += tuple(
    Case(name=f"1.3 B, {name}", keys={**SMALL, **keys}, overlap=overlap, config=DECODER)
    for name, keys in OF_DECODER.items()
    for overlap in (False, True)
)


def main(argv: Sequence[str]) -> int:
    """Compiles, replays and records the cases; returns the exit code."""
    parser = argparse.ArgumentParser(description="What overlaps in steps compiled for H100s.", allow_abbrev=False)
    parser.add_argument("--only", default="", help="only cases whose name contains this; `=NAME` is that name")
    options = parser.parse_args(argv[1:])
    if not any(chosen(case, options.only) for case in CASES):
        print(
            f"error: --only={options.only} is in no name; there are {', '.join(c.name for c in CASES)}", file=sys.stderr
        )
        return ExitCode.BAD_INPUT
    failed = 0
    for case in [case for case in CASES if chosen(case, options.only)]:
        try:
            lines = measured(case)
        except (ValueError, RuntimeError, OSError) as error:
            print(f"error: {case.name}: {' '.join(str(error).split())}", file=sys.stderr)
            failed += 1
            continue
        for line in lines:
            put(RESULTS, line, KEY)
        print(f"{case.name}, overlap {'on' if case.overlap else 'off'}: done", flush=True)
    return ExitCode.BAD_INPUT if failed else 0


def chosen(case: Case, only: str) -> bool:
    """Whether `--only` takes a case."""
    return case.name == only[1:] if only.startswith("=") else only in case.name


def measured(case: Case) -> list[dict[str, Any]]:
    """Returns a line for each rate. ValueError or RuntimeError: it cannot be compiled or read."""
    step = compile_step(case.flags, nodes=NODES, devices_per_node=DEVICES)
    program = parse_program(step.text)
    lines = []
    for rate in RATES:
        timeline, slow = (replayed(program, step, Links(rate=rate).rate_bits(), tflops) for tflops in PRODUCTS_TFLOPS)
        uses = {"hop_two": timeline.use("hop_two"), "gathers_hop_one": timeline.use("gather", "hop_one")}
        seconds = {f"{name}_s": round(use.busy_s, 3) for name, use in uses.items()}
        seconds |= {f"{name}_exposed_s": round(use.exposed_s, 3) for name, use in uses.items()}
        line = {"case": case.name, "overlap": case.overlap, "rate": rate, "config": case.config}
        line |= {"cluster": CLUSTER, "products_tflops": PRODUCTS_TFLOPS, "nodes": NODES, "devices_per_node": DEVICES}
        line["argument_bytes"] = step.argument_bytes
        line |= {"temporary_bytes": step.temporary_bytes, "compute_s": round(timeline.compute_s, 3)}
        seconds |= {"slow_compute_s": round(slow.compute_s, 3), "slow_step_s": round(slow.step_s, 3)}
        lines.append(line | seconds | {"step_s": round(timeline.step_s, 3), **machine()})
    return lines


def replayed(program: Program, step: CompiledStep, rate_bits: float, tflops: float) -> Timeline:
    """Returns the step's timeline on nodes with links of `rate_bits` per second and matrix products at `tflops`."""
    cluster = replace(with_rate(find_cluster(CLUSTER), rate_bits), devices_per_node=step.shape.devices_per_node)
    device = cluster.compute(step.shape.num_devices)
    device = replace(device, matmul_fraction=1e12 * tflops / device.peak_flops["bf16"])
    return replay(program, step.shape, device, cluster.network())


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows of the page: steps with overlap, and how long they are and what they hold without."""
    found = {tuple(line[name] for name in KEY): line for line in lines}
    planner, slow = (f"exposed, {tflops} TFLOP/s" for tflops in PRODUCTS_TFLOPS)
    heads = ["step", "link, Gbit/s", "compute", "hop two", "gathers, hop one", "step (off)", planner, slow]
    return markdown(
        [*heads, "temporaries (off)"],
        [row(found[name, True, rate], found[name, False, rate]) for name, rate in ON_PAGE],
    )


def row(on: Mapping[str, Any], off: Mapping[str, Any]) -> list[str]:
    """Returns the row of a step with overlap, and without."""
    hops = [f"{on[f'{name}_s']:.2f} ({on[f'{name}_exposed_s']:.2f})" for name in ("hop_two", "gathers_hop_one")]
    shares = [1 - on[f"{speed}compute_s"] / on[f"{speed}step_s"] for speed in ("", "slow_")]
    cells = [on["case"], on["rate"].removesuffix("gbit"), f"{on['compute_s']:.2f}", *hops]
    cells += [f"{on['step_s']:.2f} ({off['step_s']:.2f})", *(f"{100 * share:.1f} %" for share in shares)]
    return [*cells, f"{on['temporary_bytes'] / 1e9:.1f} ({off['temporary_bytes'] / 1e9:.1f}) GB"]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
