"""MiCS figure 16 on a small scale: a decoder on real text with four micro-steps per step, trained with MiCS or ZeRO-3.

    python train.py --config=configs/fidelity.py:mics --workdir=runs/fidelity_mics

Hardware: any machine with 2 CPU cores (8 virtual devices as 4 nodes of 2). Expected: two loss curves of 300 steps
that differ by 2.8e-5 at most, relatively 1.8e-5; docs/results/papers/mics.md compares them with the paper's.
"""

from ml_collections import ConfigDict

from configs import base, quickstart


def get_config(arg: str = "mics") -> ConfigDict:
    """Returns the config of one curve; `arg` is `mics` (groups of one node) or `zero3`."""
    partition_size = base.chosen(arg, {"mics": 2, "zero3": 0}, __file__)
    config = quickstart.get_config()
    config.num_steps = 300
    config.batch.micro_size = 1  # four micro-steps, as in the paper
    config.sharding.update({"strategy": arg, "partition_size": partition_size})
    config.checkpoint.every = 0
    config.eval.every = 0
    config.sample.length = 0
    return config
