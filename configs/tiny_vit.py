"""A small vision transformer on scikit-learn's digits: 8 virtual devices as 4 nodes of 2, MiCS groups of 2.

    python train.py --config=configs/tiny_vit.py --workdir=runs/tiny_vit

The data of digits.py, in 16 patches of 2 x 2 pixels, for 27 epochs.

Hardware: any machine with 2 CPU cores.
Expected: a few minutes, a validation loss of 0.134 nats per image and an accuracy of 96.4 %. On one
device, with losses that are the same to 1e-6 for 80 steps and then drift apart by rounding, 0.075 nats and 98.1 %.
"""

from ml_collections import ConfigDict

from configs import base, digits


def get_config() -> ConfigDict:
    """Returns the config of digits.py with a vision transformer of 4 layers, AdamW and twice the steps."""
    config = digits.get_config()
    config.num_steps = 600
    config.model = base.model("vit")
    config.optimizer = base.get_config().optimizer
    config.optimizer.update({"learning_rate": 3e-3, "warmup_steps": 20, "final_fraction": 0.0})
    config.eval.every = 100
    return config
