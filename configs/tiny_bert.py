"""A byte-level BERT: masked language modelling on the Python standard library's sources.

    python train.py --config=configs/tiny_bert.py --workdir=runs/tiny_bert

Hardware: any machine with 2 CPU cores (8 virtual devices as 4 nodes of 2, MiCS groups of 2).
Expected: a validation loss of 2.94 nats per masked byte after 200 steps.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """Returns the config of a small BERT."""
    config = base.get_config()
    config.num_steps = 200
    config.model = base.model("encoder")
    config.data.objective = "masked"
    config.optimizer.learning_rate = 3e-3
    base.on_virtual_nodes(config)
    return config
