"""The numbers that a sweep refuses are those that the parts of a run refuse, and the defaults are none of them."""

import math
from typing import Any

import pytest

from compression.by_config import CompressionConfig
from compression.local_sgd import LocalSGDConfig
from configs import base, door
from configs.ranges import check_ranges
from input_pipeline import DataConfig
from models.decoder import DecoderConfig
from models.encoder import EncoderConfig
from models.resnet import ResNetConfig
from optimizers import OptimizerConfig
from runtime.heartbeat import ElasticConfig
from state import CheckpointConfig
from training.batches import BatchConfig
from training.experiment import MeshConfig
from training.sampling import SampleConfig
from training.validation import EvalConfig

SECTIONS: dict[str, Any] = {
    "data": DataConfig,
    "batch": BatchConfig,
    "mesh": MeshConfig,
    "compression": CompressionConfig,
    "local_sgd": LocalSGDConfig,
    "optimizer": OptimizerConfig,
    "checkpoint": CheckpointConfig,
    "elastic": ElasticConfig,
    "eval": EvalConfig,
    "sample": SampleConfig,
}
MODELS: dict[str, Any] = {"decoder": DecoderConfig, "encoder": EncoderConfig, "resnet": ResNetConfig}
# What the devices or other keys decide too
NOT_ALONE = ("mesh.tensor", "model.hidden", "model.num_heads", "model.num_kv_heads", "model.width", "model.norm_groups")
NUMBERS = (-math.inf, -2, -1, -1e-9, 0, 1e-9, 0.5, 1, 1.5, 2, 60, 61, math.inf, math.nan)
WHOLE = (-2, -1, 0, 1, 2, 3, 60, 61)


def refuses(section: str, key: str, value: float, config: Any) -> bool:
    """Says whether the part of a run that reads a section refuses a number that it accepts otherwise."""
    changed = config.copy_and_resolve_references().unlock()
    changed[key] = value
    cls = MODELS[config.kind] if section == "model" else SECTIONS[section]
    try:
        door.settings(cls, changed, section)
    except ValueError:
        return True
    return False


def refused_early(name: str, value: float) -> bool:
    """Says whether a sweep refuses a number."""
    try:
        check_ranges({name: value})
    except ValueError as error:
        assert str(error).startswith(f"{name}={value} must be ")
        return True
    return False


@pytest.mark.parametrize("kind", ["decoder", "encoder", "resnet"])
def test_a_sweep_refuses_what_runs_refuse(kind: str) -> None:
    config = base.get_config()
    config.model = base.MODELS[kind]()
    values = door.flat(config.to_dict())
    check_ranges(values)
    differ = []
    for name, default in values.items():
        section, _, key = name.rpartition(".")
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        if not is_number or section in ("", "sharding") or name in NOT_ALONE:
            continue
        for number in NUMBERS if isinstance(default, float) else WHOLE:
            if refused_early(name, number) != refuses(section, key, number, config[section]):
                differ.append((name, number))
    assert differ == []


@pytest.mark.parametrize("name", [*NOT_ALONE, "num_steps", "log_every", "sharding.partition_size", "seed"])
def test_what_no_run_takes_is_refused_where_others_decide_too(name: str) -> None:
    """Their own parts need devices to say so: tests/test_train_bad_input.py."""
    assert refused_early(name, -1) and not refused_early(name, 1)
