"""A byte-level decoder in the style of GPT-2 on the Python standard library's sources.

    python train.py --config=configs/tiny_gpt2.py --workdir=runs/tiny_gpt2

Hardware: any machine with 2 CPU cores (8 virtual devices as 4 nodes of 2, MiCS groups of 2).
Expected: a validation loss of 2.46 nats per byte after 100 steps.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """Returns the config of a small GPT-2: learned positions, LayerNorm, GELU, biases, tied head."""
    config = base.get_config()
    config.model.update({"positions": "learned", "norm": "layer", "activation": "gelu", "use_bias": True})
    config.optimizer.learning_rate = 3e-3
    base.on_virtual_nodes(config)
    return config
