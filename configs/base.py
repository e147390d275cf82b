"""The base config of all experiments: the defaults of `configs/schema/`, where all keys are documented.

An experiment changes some keys (`config = base.get_config(); config.model.num_layers = 12`); the command line
can change it further (`--config.batch.global_size=64`); `typed` checks the result and makes it a `Config`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from ml_collections import ConfigDict

from configs.schema import Config, defaults

Option = TypeVar("Option")


def model(kind: str) -> ConfigDict:
    """The section of a kind of model, built in or registered, with its defaults."""
    return ConfigDict(defaults(kind)["model"])


# blocks of each stage by the number of layers (He et al. 2015): for ImageNet (table 1), and 110 for CIFAR-10 (table 6)
RESNETS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    110: (18, 18, 18),
}


def resnet(depth: int = 0) -> ConfigDict:
    """A ResNet that classifies images (`models/resnet.py`): small, or published with `depth` layers."""
    config = model("resnet")
    if not depth:
        return config
    if depth not in RESNETS:
        raise ValueError(f"base.resnet({depth}) is none of the published ones: {', '.join(map(str, RESNETS))}")
    config.update({"channels": 3, "stage_blocks": RESNETS[depth]})
    if depth == 110:
        return config
    config.update({"num_classes": 1000, "stem": "conv7_pool", "width": 64, "norm_groups": 32})
    config.block = "basic" if depth < 50 else "bottleneck"
    return config


def get_config() -> ConfigDict:
    """Returns the base config: a small decoder on the Python standard library's text."""
    return ConfigDict(defaults())


def chosen(arg: str, options: Mapping[str, Option], file: str) -> Option:
    """Returns the option that `--config=FILE:arg` names. ValueError for an unknown one."""
    if arg not in options:
        raise ValueError(f"{Path(file).name}:{arg} is not known; use :{', :'.join(options)}")
    return options[arg]


def open_model(sizes: Mapping[str, object], partition_size: int) -> ConfigDict:
    """Returns a run that trains a published decoder further: packed rows of 8192 tokens in bfloat16, nodes of 8.

    The learning rate is for fine-tuning; the text is the standard library's until `data` says otherwise.
    """
    config = get_config()
    config.num_steps = 1000
    config.model = model("moe" if "num_experts" in sizes else "decoder")
    config.model.update({"compute_dtype": "bfloat16", "tied_head": False, **sizes})
    config.data.update({"packing": "documents", "seq_len": 8192})
    config.batch.update({"global_size": 64, "micro_size": 1})
    config.mesh.devices_per_node = 8
    config.sharding.partition_size = partition_size
    config.optimizer.update({"learning_rate": 1e-5, "warmup_steps": 50})
    config.sample.length = 0  # which gathers every layer for every token
    return config


def on_virtual_nodes(config: ConfigDict) -> None:
    """Sets 8 virtual devices, as 4 nodes of 2, each of which is a partition group."""
    config.mesh.update({"num_cpu_devices": 8, "devices_per_node": 2})
    config.sharding.partition_size = 2


def for_timing(config: ConfigDict) -> None:
    """Leaves out all but the steps, as far as possible: one batch is validated at the end."""
    config.checkpoint.every = 0
    config.eval.update({"every": 0, "num_batches": 1})
    config.sample.length = 0


def typed(config: ConfigDict) -> Config:
    """Returns the typed config of an experiment. ValueError names a key or value that is not allowed."""
    return Config.from_dict(config.to_dict())
