"""Independent replicas beside one world and PyTorch's DDP: step times on slow links.

    python -m lab.benchmarks.replicas [--rates=200mbit] [--repetitions=3] [--micro_steps=4] [--only="one_world none"]
    python -m lab.benchmarks.replicas --pytorch=PYTHON

The standard workload (configs/standard.py) with one or four micro-steps on 4 nodes of 2 devices, a node a replica.
`--pytorch` adds DDP, plain and with its hooks, and FSDP2 hybrid (pytorch_peer.py, a Python with torch). Adds lines to
results/measured/replicas.jsonl; needs root (docs/emulation.md).
"""

import itertools
import os
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from lab.benchmarks.names import remat_of
from lab.benchmarks.runner import (
    WORKDIR,
    FailedRunError,
    Key,
    alternating,
    checked_rates,
    emulator,
    options_of,
    program,
    pytorch_steps,
    run_missing,
    shown,
    started,
    trainer,
    words,
)
from lab.benchmarks.scores import PEER, rates_of, turn_of
from lab.records import MEASURED, Line, Range, middle
from runtime.files import json_lines
from runtime.files.pages import markdown
from training.independent import FOLDER

RESULTS = MEASURED / "replicas.jsonl"
MICRO_STEPS = {"one micro-step": 1, "four micro-steps": 4}  # by mode
NODES = 4
GROUPS = {"sharding.strategy": "hsdp", "sharding.partition_size": 0}  # a node each
OURS = tuple(f"{kind} {codec}" for codec in ("none", "bf16", "int8") for kind in ("one_world", "independent"))
# products with weights are stored, as PyTorch's `dots` does
OURS += tuple(f"independent {codec} dots" for codec in ("none", "bf16", "int8", "int4"))
OURS += tuple(f"independent {codec} dots delayed" for codec in ("bf16", "int8"))
ALONE = "independent none dots alone"  # compute without all-reduce: each node a run that knows of no other
OURS += (ALONE,)
# as many shares as replicas: with four micro-steps a codec's bytes are fewer than the sum's of four shares
OURS += tuple(f"independent {codec} dots one_share" for codec in ("bf16", "int8"))
PYTORCH = ("ddp", "ddp dots", "ddp dots fp16", "ddp dots fp8", "ddp dots power_sgd", "hsdp")
STEPS, SKIPPED = 7, 2  # the first steps connect
JOINING = 4  # more steps of replicas, which come one after the other


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Does and records the missing runs; returns 1 if a run failed, 2 for a bad option."""
    options = options_of(
        __doc__,
        argv,
        rates=("200mbit", "of the links, as for tc"),
        repetitions=(3, "of each run, in turn"),
        micro_steps=(1, "of a step: 1 or 4"),
        only=("", "names of runs, with commas"),
        pytorch=("", "a Python that has torch, to compare with"),
    )
    return run_missing(RESULTS, planned(options), partial(measured, python=options.pytorch))


def planned(options: Namespace) -> list[Key]:
    """Returns the key of each run, in order. ValueError for a bad option."""
    names = [*OURS, *(f"{PEER} {name}" for name in PYTORCH if options.pytorch)]
    chosen = words(options.only, "only", names) or names
    modes = [mode for mode, count in MICRO_STEPS.items() if count == options.micro_steps]
    if not modes:
        raise ValueError(f"--micro_steps={options.micro_steps} is not one of 1, 4")
    return alternating(options.repetitions, mode=modes, rate=checked_rates(options.rates), run=chosen)


def measured(key: Key, *, python: str) -> dict[str, Any]:
    """Does a run; returns what its line says. FailedRunError if it failed."""
    load = {"load": os.getloadavg()[0]}
    if key["run"].startswith(PEER):
        options = [*key["run"].split()[1:], f"accum={MICRO_STEPS[key['mode']]}", f"steps={STEPS}", f"skipped={SKIPPED}"]
        found = pytorch_steps(python, options, key["rate"], WORKDIR / "replicas" / "pytorch")
        return load | {"nodes": NODES} | found | {"sent_bytes": found["wire_tx_bytes"]}
    return load | steps_of(key)


def steps_of(key: Key) -> dict[str, Any]:
    """Runs ours, in one world or as replicas; returns the step times and the bytes that node 0 sends in a step."""
    kind = key["run"].split()[0]
    workdir = WORKDIR / "replicas" / key["run"].replace(" ", "-")
    shutil.rmtree(workdir, ignore_errors=True)
    alone = key["run"] == ALONE
    steps = STEPS + JOINING if kind == "independent" else STEPS
    overrides = GROUPS | {"num_steps": steps, "elastic.snapshot_every": 0, **keys_of(key)}
    program = trainer("configs/standard.py", workdir, overrides)
    if alone:
        program = ["sh", "-c", f"exec {shlex.join(program)} --workdir={workdir}/$SLURM_ARRAY_TASK_ID"]
    command = emulator(key["rate"], workdir / "emulate", *(["--independent"] if kind == "independent" else []))
    command += ["--", *program]
    started(command)
    folder = workdir / "0" if alone else workdir
    rows = losses_of(folder / FOLDER / "0" if kind == "independent" else folder)
    found = timed(rows, 1 if alone else NODES)
    return found | {"nodes": NODES, "losses": [row["loss"] for row in rows], "command": shown(command)}


def timed(rows: Sequence[dict[str, Any]], replicas: int = NODES) -> dict[str, Any]:
    """Returns times and bytes of the steps that count, the last ones. FailedRunError if not so many were there."""
    rows = rows[SKIPPED - STEPS :]
    if (count := min(row.get("replicas", replicas) for row in rows)) != replicas:
        raise FailedRunError(f"a step that is timed had {count} of {replicas} replicas; JOINING must be more steps")
    times = [row["step_time_s"] for row in rows]
    sent_bytes = median(row["wire_tx_bytes"] for row in rows)
    return {"step_time_s": median(times), "step_times_s": times, "sent_bytes": sent_bytes}


def keys_of(key: Key) -> dict[str, Any]:
    """Returns the config's keys that mode and name of a run of ours mean."""
    kind, codec = (run := key["run"]).split()[:2]
    return {
        "batch.global_size": 2 * MICRO_STEPS[key["mode"]] * (1 if run == ALONE else NODES),
        "compression.all_reduce": codec,
        "model.remat": remat_of(run),
        "compression.error_feedback": False,
        "compression.delayed": "delayed" in run,
        "sharding.replicas": kind,
        "sharding.shares": NODES if "one_share" in run else 0,
    }


def losses_of(folder: Path) -> list[dict[str, Any]]:
    """Returns a run's rows of training steps so far."""
    file = folder / "metrics.jsonl"
    return [row for row in json_lines.read(file) if "loss" in row] if file.exists() else []


def step_s(line: Line) -> float:
    """Returns the median of the steps that are timed: PyTorch's older lines have those before too."""
    return median(line["step_times_s"][SKIPPED - STEPS :])


def table(lines: Sequence[Line]) -> str:
    """Returns the step times of each run by machine, mode and rate, and their ratios to one world without codec."""
    rows = []
    cores = sorted({line["machine"] for line in lines}, key=lambda name: int(name.split()[0]))
    for machine, mode, rate in itertools.product(cores, MICRO_STEPS, rates_of(lines)):
        there = [line for line in lines if (line["machine"], line["mode"], line["rate"]) == (machine, mode, rate)]
        one_world = {turn_of(line): step_s(line) for line in there if line["run"] == OURS[0]}
        for name in dict.fromkeys(line["run"] for line in there):
            these = [line for line in there if line["run"] == name]
            ratios = [step_s(line) / one_world[turn_of(line)] for line in these if turn_of(line) in one_world]
            sent = f"{median(line['sent_bytes'] for line in these) / 1e6:.0f} MB"
            seconds = [*map(step_s, these)]
            time = middle(seconds, 1 if max(seconds) > 2 else 2)
            cells = [machine.split()[0], str(MICRO_STEPS[mode]), rate, f"`{name}`", str(len(these)), time]
            of_it = Range(value=median(ratios), low=min(ratios), high=max(ratios)).text(2) if ratios else "-"
            rows.append([*cells, of_it, sent])
    times = "seconds a step", "of one world's without a codec"
    return markdown(["cores", "micro-steps", "link", "run", "runs", *times, "sent by a node"], rows)


if __name__ == "__main__":
    sys.exit(main())
