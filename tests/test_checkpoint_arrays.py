"""Names, shapes and dtypes of the arrays in a checkpoint: a change of them makes old checkpoints unreadable.

`data/checkpoint_arrays.json` has those of several optimizers, strategies and compression methods, of tiny models on 8
devices. After a change on purpose, write it anew, and say in the commit what becomes of checkpoints that exist:

    PYTHONPATH=. python tests/test_checkpoint_arrays.py
"""

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from support.examples import METHODS, example_methods  # noqa: F401 (fixture)

from configs import base, elastic
from configs.base import typed
from configs.schema.own import OWN
from elastic import tree
from training.experiment import make_experiment

FILE = Path(__file__).parent / "data" / "checkpoint_arrays.json"
SMALL_ENCODER = dict(base.model("encoder")) | {"num_layers": 2, "hidden": 32, "intermediate": 64, "num_heads": 2}
CASES: dict[str, dict[str, Any]] = {
    "adamw, mics": {},
    "adamw, ddp": {"sharding.strategy": "ddp", "sharding.partition_size": 0},
    "adamw without clipping, zero3": {
        "sharding.strategy": "zero3",
        "sharding.partition_size": 0,
        "optimizer.clip_norm": 0.0,
    },
    "adamw of an encoder, mics": {"model": SMALL_ENCODER, "data.objective": "masked"},
    **{f"{name}, mics": {"optimizer.name": name} for name in ("sgd", "lamb", "lars", "adafactor", "muon")},
    "int8 with error feedback": {"compression.all_reduce": "int8"},
    "one_bit_adam": {
        "compression.all_reduce": "one_bit_adam",
        "compression.warmup_steps": 300,
        "optimizer.clip_norm": 0.0,
    },
    "demo": {"compression.all_reduce": "demo", "optimizer.name": "sgd"},
    "statistical": {"compression.all_reduce": "statistical"},
    "power_sgd": {"compression.all_reduce": "power_sgd"},
    "power_sgd with a warm-up": {"compression.all_reduce": "power_sgd", "compression.warmup_steps": 10},
    "delayed": {"compression.delayed": True},
    "local SGD": {"local_sgd.inner_steps": 4},
    "streaming local SGD": {"local_sgd.inner_steps": 4, "local_sgd.streaming": True},
    "local SGD with a target of utilisation": {"local_sgd.inner_steps": 4, "local_sgd.interval": "utilisation"},
    "sparse_loco": {
        "compression.all_reduce": "sparse_loco",
        "local_sgd.inner_steps": 4,
        "local_sgd.outer_momentum": 0.0,
    },
}


def arrays_of(changes: dict[str, Any]) -> dict[str, str]:
    """Returns the arrays of a config's state, such as `{"params.embed.table": "float32[256,32]"}`."""
    config = elastic.get_config("tiny")
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        if section:
            config[section][name] = value
        else:
            config[name] = value
    shapes = make_experiment(typed(config)).state_shapes
    return {path: str(wanted.leaf) for path, wanted in tree.flatten_abstract(shapes).items()}


@pytest.mark.usefixtures("example_methods")
def test_the_arrays_of_a_checkpoint_are_those_of_the_record() -> None:
    record = json.loads(FILE.read_text())
    assert list(record) == list(CASES)
    found = {case: arrays_of(changes) for case, changes in CASES.items()}
    assert [case for case in CASES if found[case] != record[case]] == []


if __name__ == "__main__":
    OWN["all_reduce"].update(METHODS)
    OWN["interval"]["utilisation"] = None
    jax.config.update("jax_num_cpu_devices", 8)
    FILE.write_text(json.dumps({case: arrays_of(changes) for case, changes in CASES.items()}, indent=1) + "\n")
