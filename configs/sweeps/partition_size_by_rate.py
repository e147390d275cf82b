"""MiCS's partition size against the link rate: the slower the network, the greater the advantage of small groups.

    python sweep.py --config=configs/sweeps/partition_size_by_rate.py

Hardware: any machine with 2 CPU cores, and root or user namespaces for the emulated cluster (docs/emulation.md).
Expected: 8 minutes. At 1 Gbit/s step times are close together; at 50 Mbit/s a step with groups of 2, which are inside
one node, takes 0.4 times as long as with larger groups. The losses are equal up to rounding.
"""

from collections.abc import Iterable

from ml_collections import ConfigDict

from configs import base
from configs.overrides import Overrides, over

METRIC = "step_time_s"
EMULATE = "--nodes=4 --devices_per_node=2"


def get_config() -> ConfigDict:
    """Returns the config that the runs share: 8 devices, 2.1 M parameters, a micro-step of one row per device."""
    config = base.get_config()
    config.num_steps = 5
    config.model.update({"hidden": 256, "intermediate": 1024, "num_layers": 2})
    config.data.update({"source": "synthetic", "seq_len": 64})
    config.batch.update({"global_size": 16, "micro_size": 1})
    config.optimizer.warmup_steps = 0
    config.elastic.snapshot_every = 0  # a snapshot's copies cross the same links during the first steps
    base.for_timing(config)
    return config


def sweep_size() -> Iterable[Overrides]:
    """From groups of one node to one group of all devices."""
    return over("sharding.partition_size", (2, 4, 8))


def sweep_rate() -> Iterable[Overrides]:
    """The rate of each node's link, as tc writes it."""
    return over("emulate.rate", ("50mbit", "200mbit", "1gbit"))
