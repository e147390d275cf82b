"""Shared by the tests of the planner: a small config, its step on 4 emulated nodes of 2, and a separate cache."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs import base, quickstart
from configs.losses import RecordedLoss
from configs.schema import Config
from lab.benchmarks.planner_records import RECORDS
from planner import clusters, targets
from planner import compile as compiling
from planner.candidates import Candidate, of_config
from planner.predict import Machine, ReplayableStep, compiled_step
from planner.report import Plan, from_json
from support.running import ROOT
from support.running import SMALL as TWO_LAYERS
from training.experiment import Experiment, make_experiment

# with two layers no loop over them is left, and XLA merges the gathers of all micro-steps
SMALL = TWO_LAYERS | {"model.num_layers": 4}
FILE = f"--config={ROOT}/configs/quickstart.py"
WORDS = (FILE, *(f"--config.{key}={value}" for key, value in SMALL.items()))


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs are compiled once for all tests of this file, and kept nowhere else."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MICS_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        patched.setattr(compiling, "compile_step", functools.cache(compiling.compile_step))  # nor lowered again
        yield


def small(**changes: Any) -> Config:
    config = quickstart.get_config()
    config.update_from_flattened_dict(SMALL | {key.replace("__", "."): value for key, value in changes.items()})
    return base.typed(config)


def machine(cluster: clusters.Cluster = clusters.EMULATED, nodes: int = 4) -> Machine:
    return Machine(cluster=cluster, nodes=nodes, config_words=WORDS, target=targets.CPU)


def experiment(candidate: Candidate) -> Experiment:
    return make_experiment(candidate.applied(small()))


def tiny_config(
    *, per_node: int = 2, tensor: int = 1, optimizer_name: str = "adamw", hidden: int = 32, **sharding: Any
) -> ConfigDict:
    """A decoder with learned positions and biases on eight devices."""
    config = base.get_config()
    config.model.update(num_layers=2, hidden=hidden, intermediate=2 * hidden, positions="learned", use_bias=True)
    config.model.update(activation="gelu", vocab_multiple=64, max_len=16)
    config.data.seq_len = 16
    config.batch.update(global_size=8, micro_size=1)
    config.mesh.update(devices_per_node=per_node, tensor=tensor)
    config.sharding.update(sharding)
    config.optimizer.name = optimizer_name
    return config


def recorded_plan() -> Plan:
    """The plan of the page's example."""
    (plan,) = from_json(RECORDS["example"].read_text())
    return plan


def one_row(**columns: Any) -> RecordedLoss:
    """A row of configs/losses.csv: on text, 0.2 above dense AdamW with each of 3 seeds."""
    about = {"optimizer": "adamw", "task": "text", "parameters": 2_000_000, "seeds": 3, "record": "a.jsonl"}
    return RecordedLoss(**{**about, "mean": 0.2, "least": 0.2, "most": 0.2, "steps": None, **columns})


@pytest.fixture(scope="module", name="step")
def a_step() -> ReplayableStep:
    """The step of mics(2) on 4 emulated nodes of 2."""
    candidate = of_config(small())
    return compiled_step(candidate, experiment(candidate), machine())
