"""Measures steps on emulated nodes: strategies, codecs, independent replicas and PyTorch, at chosen link rates.

    python -m lab.benchmarks.steps [--only=strategies,standard,1gbit] [--pytorch=PYTHON]

The runs are in lab/benchmarks/steps.csv: the standard workload (configs/standard.py) on 4 nodes of 2 devices. Runs of
one record, mode and rate alternate. `--only` takes the runs that have all its words; `--pytorch`, a Python that has
torch, adds PyTorch's runs (pytorch_peer.py). Adds lines to strategies.jsonl, compression.jsonl and replicas.jsonl in
results/measured; needs root (docs/emulation.md).

The links of the scale model make a flat gather 2.85 times as long as the forward pass under ZeRO-3, by calculation, as
BERT 10B's was on p3dn.24xlarge (MiCS section 1). `two-hop off`: an all-reduce in each micro-step; `kept`: layers are
gathered once per micro-step; `dots`: products with weights are stored for the backward pass. Independent replicas:
`one_share`: one share per replica, not per micro-step; `alone`: each node trains by itself.
"""

import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from compression.methods import method_named
from examples.methods import demo, power_sgd
from lab.benchmarks.names import Cluster, link_bytes, remat_of, strategy_keys
from lab.benchmarks.runner import (
    WORKDIR,
    FailedRunError,
    Key,
    emulator,
    options_of,
    program,
    result_of,
    rows_of,
    run_missing,
    shown,
    started,
    trainer,
)
from lab.records import MEASURED
from training.independent import FOLDER
from training.metrics.run_files import read_run

CONFIG = "examples/methods/config.py:standard"
CLUSTER = Cluster(nodes=4, devices_per_node=2)
NAMES = {"strategies": ("mode", "strategy"), "compression": ("kind", "codec"), "replicas": ("mode", "run")}
COMPUTE = "compute only"  # the same rows on the same devices in one process: no network, no sharding
PEER = "pytorch"  # a mode of strategies.jsonl, and the first word of PyTorch's runs
ALONE = "independent none dots alone"
MICRO_STEPS = {"one micro-step": 1, "four micro-steps": 4}  # by mode of replicas.jsonl
GROUPS = {"sharding.strategy": "hsdp", "sharding.partition_size": 0}  # a replica per node
GONE = ("two_bit", "one_bit", "dgc")  # recorded, and examples now: docs/extending.md, examples/methods/dgc.py
EXAMPLES = {method.name: method for method in (power_sgd.method(), demo.method())}  # registered by CONFIG
STEPS, SKIPPED = 7, 2  # the first steps connect
JOINING = 4  # more steps of replicas, which join one after the other


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Does and records the missing runs; returns 1 if a run failed."""
    options = options_of(
        __doc__,
        argv,
        only=("", "words that a run has: record, mode, rate or name, with commas"),
        pytorch=("", "a Python that has torch"),
    )
    given = {word for word in options.only.split(",") if word}
    failed = 0
    for record in NAMES:
        keys = [key for key in keys_of(record) if given <= {record, *map(str, key.values())}]
        keys = [key for key in keys if options.pytorch or not name_of(record, key).startswith(PEER)]
        measure = partial(measured, record, python=options.pytorch)
        failed = max(failed, run_missing(MEASURED / f"{record}.jsonl", keys, measure))
    return failed


def keys_of(record: str) -> list[Key]:
    """Returns the keys of all lines of a record, in the order of the runs."""
    runs = [row for row in rows_of("steps.csv") if row["record"] == record]
    mode, name = NAMES[record]
    keys = []
    for _, group in itertools.groupby(runs, lambda row: (row["mode"], row["rate"])):
        rows = [*group]
        turns = [(i, row) for i in range(max(row["repetitions"] for row in rows)) for row in rows]
        for i, row in turns:
            if i < row["repetitions"]:
                keys.append({mode: row["mode"], "rate": row["rate"], name: row["run"], "repetition": i})
    return keys


def name_of(record: str, key: Key) -> str:
    """Returns the name of a run, such as `mics(2)`, `int8` or `independent int8 dots`."""
    return key[NAMES[record][1]]


def measured(record: str, key: Key, *, python: str) -> dict[str, Any]:
    """Does a run; returns the measurements of its line. FailedRunError if it failed."""
    load, name = os.getloadavg()[0], name_of(record, key)
    workdir = WORKDIR / record / name.replace(" ", "-").replace("/", "-")
    accum = MICRO_STEPS.get(key.get("mode", ""), 1 if record == "compression" else 4)
    if name.startswith(PEER):
        counts = [f"accum={accum}", f"steps={STEPS}", f"skipped={SKIPPED}"]
        peer = [python, "lab/benchmarks/pytorch_peer.py", *name.split()[1:], *counts]
        command = [*emulator(key["rate"], workdir, "--processes_per_node=2"), *peer]
        found = result_of(command) | {"command": shown(command)}
    else:
        found = run_ours(record, key, workdir)
        found |= {"accum": accum}
        if record == "strategies":
            size = found["model_bytes"]
            formula = link_bytes(name, CLUSTER, model_bytes=size, accum=accum) if name != COMPUTE else 0
            found |= {"formula_inter_bytes": formula}
    return {"load": load, **vars(CLUSTER), **found, "sent_bytes": found["wire_tx_bytes"]}


def run_ours(record: str, key: Key, workdir: Path) -> dict[str, Any]:
    """Runs train.py; returns times, losses, and the bytes that node 0 and the compiled program send in a step."""
    name = name_of(record, key)
    independent, alone = name.startswith("independent"), name == ALONE
    steps = {"num_steps": STEPS + JOINING if independent else STEPS, "elastic.snapshot_every": 0}
    command = trainer(CONFIG, workdir, overrides_of(record, key) | steps)
    if alone:
        command = ["sh", "-c", f"exec {shlex.join(command)} --workdir={workdir}/$SLURM_ARRAY_TASK_ID"]
    if name != COMPUTE:
        options = ["--independent"] if independent else []
        command = [*emulator(key["rate"], workdir / "emulate", *options), *command]
    shutil.rmtree(workdir, ignore_errors=True)
    started(command)
    folder = workdir / "0" if alone else workdir
    run = read_run(folder / FOLDER / "0" if independent else folder)
    rows = [row for row in run.rows if "loss" in row]
    found = timed(rows, 1 if alone else CLUSTER.nodes) | {"losses": [row["loss"] for row in rows]}
    compiled = {name: run.collectives.get(name, 0) for name in ("inter_bytes", "intra_bytes")}
    found |= {f"compiled_{name}": CLUSTER.devices_per_node * size for name, size in compiled.items()}
    return found | {"model_bytes": 4 * run.environment.get("num_params", 0), "command": shown(command)}


def timed(rows: Sequence[Mapping[str, Any]], replicas: int = CLUSTER.nodes) -> dict[str, Any]:
    """Returns times and bytes of the steps that count, the last ones. FailedRunError if replicas were missing."""
    rows = rows[SKIPPED - STEPS :]
    if (count := min(row.get("replicas", replicas) for row in rows)) != replicas:
        raise FailedRunError(f"a step that is timed had {count} of {replicas} replicas; JOINING must be more steps")
    times = [row["step_time_s"] for row in rows]
    wire = {name: [row[name] for row in rows if name in row] for name in ("wire_tx_bytes", "wire_rx_bytes")}
    sent = {name: median(sizes) if sizes else None for name, sizes in wire.items()}
    return {"step_time_s": median(times), "step_times_s": times, **sent}


# ------------------------------------------------------------------------------------------- the keys of a run


def overrides_of(record: str, key: Key) -> dict[str, Any]:
    """Returns the keys of the config that a run of ours changes, but for the number of steps."""
    name = name_of(record, key)
    if record == "strategies":
        return timed_keys(name)
    return codec_keys(name) if record == "compression" else replica_keys(key["mode"], name)


def timed_keys(name: str) -> dict[str, Any]:
    """Returns the keys of a strategy, such as `mics(2) kept dots`."""
    if name == COMPUTE:
        devices = CLUSTER.degree("all")
        alone = {"mesh.num_cpu_devices": devices, "mesh.devices_per_node": devices}
        return alone | {"sharding.strategy": "ddp", "sharding.partition_size": 0}
    keys = strategy_keys(name)
    return keys | ({"model.remat": remat_of(name)} if remat_of(name) != "full" else {})


def codec_keys(name: str) -> dict[str, Any]:
    """Returns the keys of a step of one micro-step with a codec, and with the optimizer that the codec needs."""
    keys = {"compression.all_reduce": name, "batch.global_size": CLUSTER.degree("all")}
    method = EXAMPLES.get(name) or method_named(name)
    optimizer = method.takes_over  # otherwise AdamW
    return keys | ({"optimizer.name": optimizer} if optimizer else {})


def replica_keys(mode: str, name: str) -> dict[str, Any]:
    """Returns the keys of a run of replicas, independent or in one world, such as `independent int8 dots`."""
    kind, codec = name.split()[:2]
    return GROUPS | {
        "batch.global_size": 2 * MICRO_STEPS[mode] * (1 if name == ALONE else CLUSTER.nodes),
        "compression.all_reduce": codec,
        "model.remat": remat_of(name),
        "compression.error_feedback": False,
        "compression.delayed": "delayed" in name,
        "sharding.replicas": kind,
        "sharding.shares": CLUSTER.nodes if "one_share" in name else 0,
    }


if __name__ == "__main__":
    sys.exit(main())
