"""A byte-level decoder in the style of Llama on the Python standard library's sources.

    python train.py --config=configs/tiny_llama.py --workdir=runs/tiny_llama

Hardware: any machine with 2 CPU cores (8 virtual devices as 4 nodes of 2, MiCS groups of 2).
Expected: a validation loss of 2.18 nats per byte after 100 steps.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """Returns the config of a small Llama: rotary positions, RMSNorm, SwiGLU, grouped heads, untied head."""
    config = base.get_config()
    config.model.num_kv_heads = 2
    config.model.intermediate = 384
    config.model.tied_head = False
    config.optimizer.learning_rate = 3e-3
    config.mesh.num_cpu_devices = 8
    config.mesh.devices_per_node = 2
    config.sharding.strategy = "mics"
    config.sharding.partition_size = 2
    return config
