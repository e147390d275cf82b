"""Learning rate against batch size, with the same number of tokens: larger batches take fewer steps.

    python sweep.py --config=configs/sweeps/learning_rate_by_batch.py --workers=2

Hardware: any machine with 2 CPU cores. Each run is a byte-level decoder of 0.25 M parameters on one device.
Expected: 5 to 10 minutes; the lowest validation loss, 1.83 nats per byte, with batch 16 and learning rate 0.003.
"""

from collections.abc import Iterable

from ml_collections import ConfigDict

from configs import base
from configs.overrides import Overrides, over, zip_

METRIC = "validation_loss"


def get_config() -> ConfigDict:
    """Returns the config that the runs share."""
    config = base.get_config()
    config.mesh.num_cpu_devices = 1
    config.sharding.strategy = "ddp"
    config.model.update({"num_layers": 2, "hidden": 96, "intermediate": 256, "num_heads": 4, "num_kv_heads": 4})
    config.data.seq_len = 64
    config.batch.micro_size = 16
    config.eval.update({"every": 0, "num_batches": 8})
    config.checkpoint.every = 0
    config.sample.length = 0
    return config


def sweep_batch() -> Iterable[Overrides]:
    """307 200 tokens, in 300, 150 or 75 steps."""
    return zip_(over("batch.global_size", (16, 32, 64)), over("num_steps", (300, 150, 75)))


def sweep_lr() -> Iterable[Overrides]:
    """The peak of the schedule."""
    return over("optimizer.learning_rate", (1e-3, 3e-3, 1e-2, 3e-2, 1e-1))
