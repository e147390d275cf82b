"""Strategies against models: the bytes that each strategy sends between nodes per step, and equal losses.

    python sweep.py --config=configs/sweeps/strategies_by_model.py [--sweep=model,strategy]

Hardware: any machine with 2 CPU cores (8 virtual devices as 4 nodes of 2).
Expected: 5 to 10 minutes. For every model zero3 sends the most between nodes, about 4 MB per device and step; hsdp
(here mics with groups of 2) sends 1.4 to 1.5 MB, as little as zero1. All strategies give a model the same losses up to
rounding (results.csv).
"""

from collections.abc import Iterable

from ml_collections import ConfigDict

from configs import base, tiny
from configs.overrides import Overrides, over

METRIC = "inter_bytes"
MODELS = ("bert", "gpt2", "llama")


def get_config(arg: str = "gpt2") -> ConfigDict:
    """Returns the config of the model that `arg` names, cut to a few small steps."""
    if arg not in MODELS:
        raise ValueError(f"{arg!r} is not a model; one of {', '.join(MODELS)}")
    config = tiny.get_config(arg)
    config.num_steps = 5
    config.sharding.partition_size = 0
    config.model.num_layers = 2
    config.data.seq_len = 64
    config.batch.update({"global_size": 16, "micro_size": 1})
    config.optimizer.warmup_steps = 0
    base.for_timing(config)
    return config


def sweep_model() -> Iterable[Overrides]:
    """The argument of get_config."""
    return over("config", MODELS)


def sweep_strategy() -> Iterable[Overrides]:
    """The strategies without parameters; with nodes of 2 devices, hsdp is mics with groups of 2."""
    return over("sharding.strategy", ("ddp", "zero1", "zero2", "zero3", "hsdp"))
