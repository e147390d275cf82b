"""The standard workload of the benchmarks: 25.6 M parameters, one sequence per device, four micro-steps per step.

    python -m lab.benchmarks.steps

8 layers of 512, 8 heads, MLP of 2048, 256 tokens, f32, AdamW, rematerialised layers; lab/benchmarks/pytorch_peer.py has
the same sizes. It is for timing steps, not for learning. The final checkpoint and validation are not timed.

Hardware: 2 CPU cores and root for the emulated cluster, 4 nodes of 2 devices (docs/results/strategies.md).
Expected: the loss falls from 5.7 to 4.3 in 3 steps of 10 to 60 s, depending on strategy and link rate.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """Returns the standard workload's config, for 8 devices (4 rows each)."""
    config = base.get_config()
    config.num_steps = 3
    config.model.update({"num_layers": 8, "hidden": 512, "intermediate": 2048, "num_heads": 8, "num_kv_heads": 8})
    config.model.update({"positions": "learned", "norm": "layer", "activation": "gelu", "tied_head": False})
    config.data.source = "synthetic"
    config.batch.update({"global_size": 32, "micro_size": 1})
    config.mesh.devices_per_node = 2
    config.sharding.partition_size = 2
    config.optimizer.update({"learning_rate": 3e-4, "schedule": "constant", "warmup_steps": 0})
    config.elastic.snapshot_every = 0
    base.for_timing(config)
    return config
