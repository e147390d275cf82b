"""Codecs of the replica all-reduce against the link rate: the slower the network, the more a codec saves.

    python sweep.py --config=configs/sweeps/codecs_by_rate.py

Hardware: any machine with 2 CPU cores, and root or user namespaces for the emulated cluster (docs/emulation.md).
Expected: 12 minutes. The replica all-reduce sends 4 times fewer bytes with int8 and 8 times fewer with int4 than with
none, which shortens steps the more, the slower the link is (docs/results/compression_accuracy.md has steps at
100 Mbit/s). Ten steps say nothing about accuracy.
"""

from collections.abc import Iterable

from ml_collections import ConfigDict

from configs.overrides import Overrides, over
from configs.sweeps import partition_size_by_rate

METRIC = "step_time_s"
EMULATE = "--nodes=4 --devices_per_node=2"
sweep_rate = partition_size_by_rate.sweep_rate


def get_config() -> ConfigDict:
    """Returns the config that the runs share: partition_size_by_rate's, with a group in each node."""
    config = partition_size_by_rate.get_config()
    config.num_steps = 10
    config.sharding.partition_size = 2
    return config


def sweep_codec() -> Iterable[Overrides]:
    """From the widest to the narrowest."""
    return over("compression.all_reduce", ("none", "bf16", "int8", "int4", "statistical"))
