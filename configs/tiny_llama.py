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
    config.model.update({"num_kv_heads": 2, "intermediate": 384, "tied_head": False})
    config.optimizer.learning_rate = 3e-3
    base.on_virtual_nodes(config)
    return config
