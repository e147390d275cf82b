"""A byte-level decoder on the Python standard library's sources: 8 virtual devices as 4 nodes of 2, MiCS groups of 2.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart

Hardware: any machine with 2 CPU cores.
Expected: 2 minutes, a validation loss of 1.6 nats per byte, and text that looks like Python.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """Returns the quickstart's config."""
    config = base.get_config()
    base.on_virtual_nodes(config)
    config.data.seq_len = 128
    config.num_steps = 240
    config.eval.every = 40
    config.checkpoint.every = 80
    config.optimizer.learning_rate = 4e-3
    return config
