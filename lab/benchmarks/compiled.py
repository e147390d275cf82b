"""Records sent bytes and state bytes of compiled steps under each strategy, on clusters of 8 and 64 virtual devices.

    python -m lab.benchmarks.compiled

Steps are compiled but not run, in one process per number of devices. Writes results/derived/compiled.jsonl for
`python -m lab.paper`: one line per step, and one for the size of each model of the MiCS paper.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax

import models
from configs import base, mics_paper
from configs.schema import Config
from lab.benchmarks.names import sharding_of
from lab.benchmarks.records import DERIVED, replace
from lab.benchmarks.runner import ROOT
from metrics.environment import environment
from runtime.command_line import prepare_output
from sharding import hlo
from training.experiment import make_experiment
from training.memory import state_bytes

RESULTS = DERIVED / "compiled.jsonl"
PAPER_MODELS = ("bert_10b", "bert_15b", "bert_20b", "bert_50b", "roberta_20b", "gpt2_20b")
XLA_FLAGS = "--xla_backend_optimization_level=0"  # LLVM's optimisation takes most of the compile time
STRATEGIES = ("ddp", "zero1", "zero2", "zero3 flat", "zero3", "hsdp", *(f"mics({p})" for p in (1, 2, 4, 8)))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step to compile: a strategy, by its name in the records, on a cluster."""

    config: str
    nodes: int
    devices_per_node: int
    accum: int
    strategy: str


def cases() -> list[Case]:
    """Returns all steps: strategies on 4 nodes of 2, with and without accumulation; MiCS groups on 8 nodes of 8."""
    small = [
        Case(config="standard", nodes=4, devices_per_node=2, accum=accum, strategy=strategy)
        for accum, strategies in ((1, STRATEGIES[:6]), (4, STRATEGIES))
        for strategy in strategies
    ]
    large = ("mics(8)", "mics(16)", "mics(32)", "mics(64)", "mics(16) flat", "mics(32) flat", "mics(64) flat")
    large += tuple(f"mics({p}) two-hop off" for p in (8, 16, 32))
    return small + [
        Case(config="quickstart", nodes=8, devices_per_node=8, accum=4, strategy=strategy) for strategy in large
    ]


def main() -> int:
    """Compiles all cases and writes the record; returns the exit code of a process that failed."""
    parser = argparse.ArgumentParser(
        description="Records sent bytes and state bytes of compiled steps.", allow_abbrev=False
    )
    parser.add_argument("--devices", type=int, help="only print the records of clusters of this size")
    options = parser.parse_args()
    prepare_output()
    if options.devices:
        start_devices(options.devices)
        for case in cases():
            if case.nodes * case.devices_per_node == options.devices:
                print(json.dumps(step_record(case)), flush=True)
        return 0
    lines = [about_record(), *model_records()]
    for devices in sorted({case.nodes * case.devices_per_node for case in cases()}):
        command = [sys.executable, "-m", "lab.benchmarks.compiled", f"--devices={devices}"]
        variables = {**os.environ, "XLA_FLAGS": XLA_FLAGS}
        done = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return done.returncode
        lines += map(json.loads, done.stdout.splitlines())
    replace(RESULTS, lines)
    return 0


def start_devices(devices: int) -> None:
    """Gives this process `devices` virtual CPU devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def about_record() -> dict[str, Any]:
    """Returns the command and versions that made the record."""
    about = environment({})
    return {
        "kind": "about",
        "command": "python -m lab.benchmarks.compiled",
        "commit": about["git_commit"],
        "jax": about["versions"]["jax"],
    }


def model_records() -> Iterator[dict[str, Any]]:
    """Yields the number of parameters of each model of the paper, from the shapes of our model."""
    for name in PAPER_MODELS:
        config = base.typed(mics_paper.get_config(name))
        yield {"kind": "model", "config": name, "num_params": models.build(config.model).num_params}


def step_record(case: Case, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Compiles a step on this process' devices; returns its collectives, and the state bytes per device.

    `changes` are further keys of the config. Bytes of the collectives are those that a device sends per step, averaged
    over the devices.
    """
    experiment = make_experiment(config_of(case, changes))
    text = experiment.compile_train_step().as_text() or ""
    collectives = hlo.read_collectives(text, experiment.plan.layout.shape)
    parameters, gradients, optimizer = state_bytes(experiment)
    return {
        "kind": "step",
        **asdict(case),
        "num_params": experiment.model.num_params,
        "state_bytes": {"parameters": parameters, "gradients": gradients, "optimizer": optimizer},
        "collectives": hlo.as_report(collectives)["collectives"],
    }


def config_of(case: Case, changes: Mapping[str, Any] | None = None) -> Config:
    """Returns the config of a case, with `changes` of its keys: one row per device and micro-step."""
    config = importlib.import_module(f"configs.{case.config}").get_config()
    devices = case.nodes * case.devices_per_node
    config.batch.update({"global_size": devices * case.accum, "micro_size": 1})
    config.mesh.update({"num_cpu_devices": devices, "devices_per_node": case.devices_per_node})
    config.sharding.update(sharding_of(case.strategy))
    config.update_from_flattened_dict(dict(changes or {}))
    return base.typed(config)


if __name__ == "__main__":
    sys.exit(main())
