"""Measures step time and bytes on the wire of every strategy, on emulated nodes with chosen link rates.

    python -m lab.benchmarks.strategies [--rates=1gbit,200mbit] [--repetitions=2] [--only="mics(2),zero3 flat"]
    python -m lab.benchmarks.strategies --scale_model
    python -m lab.benchmarks.strategies --pytorch=PYTHON

The standard workload (configs/standard.py) on 4 nodes of 2 devices. `--scale_model` takes links at which, by
calculation, gathering takes 2.85 times the forward pass under ZeRO-3, as BERT 10B's did on p3dn.24xlarge (MiCS
section 1). `--pytorch` adds PyTorch's (pytorch_peer.py, with a Python that has torch).
Adds lines to results/measured/strategies.jsonl; needs root (docs/emulation.md).
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from lab.benchmarks.names import Cluster, link_bytes, remat_of, sharding_of
from lab.benchmarks.runner import (
    WORKDIR,
    Key,
    alternating,
    checked_rates,
    emulated,
    options_of,
    program,
    pytorch_steps,
    run_missing,
    steps_of,
    train,
)
from lab.benchmarks.scores import COMPUTE, PEER, SCALE_MODEL
from lab.records import MEASURED

RESULTS = MEASURED / "strategies.jsonl"
CONFIG = "configs/standard.py"
CLUSTER = Cluster(nodes=4, devices_per_node=2)
STEPS = 6  # of a run; the first one is not timed
STANDARD = (COMPUTE, "ddp", "zero1", "zero2", "zero3 flat", "zero3", "hsdp", "mics(1)", "mics(2)", "mics(4)", "mics(8)")
STANDARD += ("mics(2) two-hop off", "mics(2) kept", "zero3 auto", "node/node/all", "none/node/all")
IN_SCALE_MODEL = ("mics(2)", "mics(4)", "mics(8)", "mics(4) flat", "mics(2) two-hop off", "zero3", "zero3 flat")
# 8 times the bytes of a flat gather, over 2.85 times a quarter of a micro-step of `compute only` (commit da13d7f)
SCALE_MODEL_RATE = "314mbit"
# `kept`: gathered once per micro-step, not again for the backward pass; `dots`: products with weights are stored
BESIDE_PYTORCH = ("ddp", "ddp dots", "mics(2)", "mics(2) kept dots", "zero3")
PYTORCH = ("ddp", "ddp dots", "hsdp", "hsdp kept dots", "zero3")


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Does and records the missing runs; returns 1 if a run failed, 2 for a bad rate."""
    options = parsed(argv)
    return run_missing(RESULTS, planned(options), partial(measured, python=options.pytorch))


def parsed(argv: Sequence[str] | None) -> Namespace:
    """Returns the options of the command line."""
    return options_of(
        __doc__,
        argv,
        rates=("1gbit,200mbit", "of the links, as for tc"),
        repetitions=(2, "of each run, in turn"),
        only=("", "names of strategies, with commas, PyTorch's included"),
        scale_model=(False, "the scale model of the paper's cluster, at one rate"),
        pytorch=("", "a Python that has torch, to compare with"),
    )


def planned(options: Namespace) -> list[Key]:
    """Returns the key of each run, in order. ValueError for a bad rate."""
    mode = SCALE_MODEL if options.scale_model else PEER if options.pytorch else "standard"
    default = {SCALE_MODEL: IN_SCALE_MODEL, PEER: BESIDE_PYTORCH}.get(mode, STANDARD)
    theirs = [f"{PEER} {name}" for name in PYTORCH] if options.pytorch else []
    names = [name for name in options.only.split(",") if name] or [*default, *theirs]
    if unknown := [name for name in names if name.startswith(PEER) and name not in theirs]:
        raise ValueError(f"--only={unknown[0]} is not one of {', '.join(theirs) or 'ours, without --pytorch'}")
    rates = [SCALE_MODEL_RATE] if options.scale_model else checked_rates(options.rates)
    return alternating(options.repetitions, mode=[mode], rate=rates, strategy=names)


def measured(key: Key, *, python: str) -> dict[str, Any]:
    """Runs a strategy at a rate; returns what its line says. FailedRunError if the run failed."""
    name, rate = key["strategy"], key["rate"]
    if name.startswith(PEER):
        options = [*name.split()[1:], f"steps={STEPS}"]
        return vars(CLUSTER) | pytorch_steps(python, options, rate, WORKDIR / name.replace(" ", "_"))
    record = train(f"strategies/{key['mode']}", CONFIG, overrides_of(name, rate, key["repetition"]))
    accum = record.files.config["batch"]["global_size"] // CLUSTER.degree("all")  # one row per device and micro-step
    model_bytes = 4 * record.files.environment["num_params"]
    formula = 0 if name == COMPUTE else link_bytes(name, CLUSTER, model_bytes=model_bytes, accum=accum)
    about = {"accum": accum, "model_bytes": model_bytes, "formula_inter_bytes": formula}
    return vars(CLUSTER) | about | steps_of(record)


def overrides_of(name: str, rate: str, repetition: int) -> dict[str, Any]:
    """Returns the overrides of one run."""
    if name == COMPUTE:
        devices = CLUSTER.degree("all")
        alone = {"mesh.num_cpu_devices": devices, "mesh.devices_per_node": devices, "sharding.strategy": "ddp"}
        return {**alone, "sharding.partition_size": 0, "num_steps": STEPS, "repetition": f"{rate}-{repetition}"}
    keys = {"num_steps": STEPS} | {f"sharding.{key}": value for key, value in sharding_of(name).items()}
    keys |= {"model.remat": remat_of(name)} if remat_of(name) != "full" else {}
    return {**keys, **emulated(CLUSTER.nodes, CLUSTER.devices_per_node, rate), "repetition": repetition}


if __name__ == "__main__":
    sys.exit(main())
