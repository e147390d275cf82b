"""Measures step time and bytes on the wire of every strategy, on emulated nodes with chosen link rates.

    python -m benchmarks.strategies [--rates=1gbit,200mbit] [--repetitions=2] [--only="mics(2),zero3 flat"]
    python -m benchmarks.strategies --scale_model
    python -m benchmarks.strategies --pytorch=PYTHON
    python -m benchmarks.strategies --report

The standard workload (configs/standard.py) on 4 nodes of 2 devices, swept over (repetition, rate, strategy) in that
order, so that repetitions are interleaved. Recorded runs are not repeated.
`--scale_model` chooses the rate so that, by calculation, gathering takes 2.85 times the forward pass under ZeRO-3, as
BERT 10B's did on p3dn.24xlarge (MiCS section 1). `--pytorch` runs ours and then PyTorch's at each rate
(benchmarks/pytorch_peer.py, with a Python that has torch); `--report` runs nothing. Adds lines to
results/measured/strategies.jsonl and writes docs/strategies.md with its pictures; needs root (docs/emulation.md).
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import sweep
from benchmarks import strategies_report
from benchmarks.names import Cluster, link_bytes, remat_of, sharding_of
from benchmarks.records import MEASURED, add, machine, recorded
from benchmarks.strategies_lines import COMPUTE, PEER, SCALE_MODEL
from cluster.links import Links
from runtime.command_line import prepare_output
from sweeps.records import Record, State

ROOT = Path(__file__).resolve().parent.parent
RESULTS = MEASURED / "strategies.jsonl"
WORKDIR = Path("runs/benchmarks/strategies")
CONFIG = "configs/standard.py"
CLUSTER = Cluster(nodes=4, devices_per_node=2)
STANDARD = (COMPUTE, "ddp", "zero1", "zero2", "zero3 flat", "zero3", "hsdp", "mics(1)", "mics(2)", "mics(4)", "mics(8)")
STANDARD += ("mics(2) two-hop off", "mics(2) kept", "zero3 auto", "node/node/all", "none/node/all")
IN_SCALE_MODEL = ("mics(2)", "mics(4)", "mics(8)", "mics(4) flat", "mics(2) two-hop off", "zero3", "zero3 flat")
KEY = ("mode", "strategy", "rate", "repetition")  # identifies a line
PYTORCH_S = 1800  # time-out; a run takes minutes
GATHER_TO_FORWARD = 2.85  # MiCS section 1, BERT 10B under ZeRO-3
FORWARDS = 4  # cost of a micro-step in forward passes: forward, recomputation, and a backward pass of twice that
# `kept`: gathered once per micro-step, not again for the backward pass; `dots`: products with weights are stored
OURS_BESIDE_PYTORCH = ("ddp", "ddp dots", "mics(2)", "mics(2) kept dots", "zero3")
PYTORCH = ("ddp", "ddp dots", "hsdp", "hsdp kept dots", "zero3")


def main() -> int:
    """Does and records the missing runs, and writes the page; returns 1 if a run failed."""
    options = options_of(sys.argv[1:])
    prepare_output()
    failed = 0
    for mode, name, rate, repetition in [] if options.report else planned(options):
        if name.startswith(PEER):
            failed += run_pytorch(options.pytorch, name.removeprefix(PEER).strip(), rate, repetition)
        else:
            failed += run_ours(mode, name, rate, repetition)
    if failed:
        print(f"{failed} runs failed; their output is in {WORKDIR}", file=sys.stderr)
        return 1
    strategies_report.write(recorded(RESULTS))
    return 0


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description="Times every strategy on emulated nodes.", allow_abbrev=False)
    parser.add_argument("--rates", default="1gbit,200mbit", help="of the links, as for tc")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--only", default="", help="names of strategies, with commas")
    parser.add_argument("--scale_model", action="store_true")
    parser.add_argument("--pytorch", default="", help="a Python that has torch, to run it beside ours")
    parser.add_argument("--report", action="store_true", help="only write the page, from the record")
    return parser.parse_args(words)


def planned(options: argparse.Namespace) -> list[tuple[str, str, str, int]]:
    """Returns mode, strategy, rate and repetition of each run, in order. ValueError for a bad rate."""
    mode = SCALE_MODEL if options.scale_model else PEER if options.pytorch else "standard"
    default = {SCALE_MODEL: IN_SCALE_MODEL, PEER: OURS_BESIDE_PYTORCH}.get(mode, STANDARD)
    names = [name for name in options.only.split(",") if name] or default
    rates = [scale_model_rate()] if options.scale_model else options.rates.split(",")
    for rate in rates:
        Links(rate=rate)  # raises ValueError for a bad rate
    theirs = [f"{PEER} {name}" for name in PYTORCH] if options.pytorch else []
    return [
        (mode, name, rate, repetition)
        for repetition in range(options.repetitions)
        for rate in rates
        for name in (*names, *theirs)
    ]


def scale_model_rate() -> str:
    """Returns the rate at which a flat gather takes 2.85 times the forward pass, from recorded compute times.

    If there are earlier runs, it is their rate, so that times are comparable.
    """
    used = [line["rate"] for line in recorded(RESULTS) if line["mode"] == SCALE_MODEL]
    if used:
        return used[0]
    steps = [line for line in recorded(RESULTS) if line["strategy"] == COMPUTE]
    if not steps:
        raise SystemExit(
            f"error: the scale model needs the recorded time of a forward pass; run --only='{COMPUTE}' first"
        )
    forward_s = median(line["step_time_s"] / line["accum"] for line in steps) / FORWARDS
    gathered = link_bytes("zero3 flat", CLUSTER, model_bytes=steps[0]["model_bytes"], accum=1) / 3  # of three passes
    return f"{gathered * 8 / (GATHER_TO_FORWARD * forward_s) / 1e6:.0f}mbit"


# ---------------------------------------------------------------------------------------------------- ours


def run_ours(mode: str, name: str, rate: str, repetition: int) -> bool:
    """Runs and records a strategy at a rate, unless recorded; returns whether it failed."""
    if any((mode, name, rate, repetition) == tuple(line[key] for key in KEY) for line in recorded(RESULTS)):
        return False
    (record,) = sweep.run(CONFIG, [overrides_of(name, rate, repetition)], workdir=WORKDIR / mode, metric="step_time_s")
    shutil.rmtree(record.run.run_dir / "checkpoints", ignore_errors=True)  # 300 MB
    if record.state != State.FINISHED:
        print(f"{name} at {rate}: {record.error}", file=sys.stderr)
        return True
    add(RESULTS, dict(zip(KEY, (mode, name, rate, repetition), strict=True)) | measured(name, record))
    return False


def overrides_of(name: str, rate: str, repetition: int) -> dict[str, Any]:
    """Returns the overrides of one run."""
    if name == COMPUTE:
        devices = CLUSTER.degree("all")
        alone = {"mesh.num_cpu_devices": devices, "mesh.devices_per_node": devices, "sharding.strategy": "ddp"}
        return {**alone, "sharding.partition_size": 0, "repetition": f"{rate}-{repetition}"}
    keys = {f"sharding.{key}": value for key, value in sharding_of(name).items()}
    cluster = {"emulate.nodes": CLUSTER.nodes, "emulate.devices_per_node": CLUSTER.devices_per_node}
    model = {"model.remat": remat_of(name)} if remat_of(name) != "full" else {}
    return {**keys, **model, **cluster, "emulate.rate": rate, "repetition": repetition}


def measured(name: str, record: Record) -> dict[str, Any]:
    """Returns the numbers of a finished run; bytes on the wire are node 0's, as logged by train.py."""
    rows = [row for row in record.files.rows if "loss" in row]
    times = [row["step_time_s"] for row in rows if row.get("step_time_s") is not None]
    accum = record.files.config["batch"]["global_size"] // CLUSTER.degree("all")  # one row per device and micro-step
    model_bytes = 4 * record.files.environment["num_params"]
    alone = name == COMPUTE
    compiled = record.files.collectives
    return {
        "nodes": CLUSTER.nodes,
        "devices_per_node": CLUSTER.devices_per_node,
        "accum": accum,
        "model_bytes": model_bytes,
        "step_time_s": median(times),
        "step_times_s": times,
        "wire_tx_bytes": None if alone else median(row["wire_tx_bytes"] for row in rows[1:]),
        "wire_rx_bytes": None if alone else median(row["wire_rx_bytes"] for row in rows[1:]),
        "formula_inter_bytes": 0 if alone else link_bytes(name, CLUSTER, model_bytes=model_bytes, accum=accum),
        "compiled_inter_bytes": 0 if alone else CLUSTER.devices_per_node * compiled["inter_bytes"],
        "compiled_intra_bytes": 0 if alone else CLUSTER.devices_per_node * compiled["intra_bytes"],
        "losses": [row["loss"] for row in rows],
        "command": shlex.join("python" if word == sys.executable else word for word in record.run.command),
        **machine(),
    }


# ------------------------------------------------------------------------------------------------- PyTorch's


def run_pytorch(python: str, name: str, rate: str, repetition: int) -> bool:
    """Runs PyTorch's DDP, hybrid or full sharding on the same cluster and records it; returns whether it failed."""
    if any((PEER, f"{PEER} {name}", rate, repetition) == tuple(line[key] for key in KEY) for line in recorded(RESULTS)):
        return False
    options = [f"--{key}={value}" for key, value in vars(CLUSTER).items()]
    options += [f"--processes_per_node={CLUSTER.devices_per_node}", f"--rate={rate}"]
    options += [f"--workdir={WORKDIR}/pytorch_{name.replace(' ', '_')}"]
    command = [sys.executable, "-m", "cluster.emulate", *options, "--"]
    command += [python, "benchmarks/pytorch_peer.py", *name.split()]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PYTORCH_S)
    except subprocess.TimeoutExpired as error:
        print(f"pytorch {name} at {rate}: {error}", file=sys.stderr)
        return True
    result = re.search(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    if not result:
        print(f"pytorch {name} at {rate}: {(done.stderr or done.stdout).strip()[-500:]}", file=sys.stderr)
        return True
    line = dict(zip(KEY, (PEER, f"{PEER} {name}", rate, repetition), strict=True))
    line |= (
        vars(CLUSTER) | json.loads(result[1]) | {"command": f"{Path(python).name} benchmarks/pytorch_peer.py {name}"}
    )
    add(RESULTS, line | machine())
    print(f"pytorch {name} at {rate}: {line['step_time_s']:.2f} s a step", flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main())
