"""The sizes of GShard (arXiv 2006.16668, table 1) as decoders: `:600b`, `:200b`, `:150b`, `:50b`, `:37b`, `:12.5b`.

    python train.py --config=configs/gshard.py:600b --workdir=runs/gshard_600b

Hardware: nodes of 8, 1024 devices or a multiple for 600b and 200b, 512 for 150b and 50b, 128 for 37b and 12.5b.
Not run yet; by the planner (lab/benchmarks/planner_configs.py):

    12.5b: 16 p4d.24xlarge (128 GPUs), 2.33 GB of 38.1 GB a GPU, 2.50 s a step, $244 for its 1,000 steps on demand
    600b: 128 p4d.24xlarge (1024 GPUs), 10.5 GB of 38.1 GB a GPU, 1.97 s a step, $1,539 for its 1,000 steps on demand

The paper has a TPU v3 core for each expert. 2048 experts are two on a device here, because a width of 1024 cannot be
cut into 2048 shards.

The paper's models are encoder-decoders for translation. These are decoders with the same number of layers, and every
second layer has experts. Width (1024), MLP (8192), number of heads (16, of size 64 instead of 128) and capacity (`2 T /
E` tokens of a row) are the paper's.
The data is synthetic, and the learning rate is ours.
"""

from ml_collections import ConfigDict

from configs import base

SIZES = {  # experts, layers
    "600b": (2048, 36),
    "200b": (2048, 12),
    "150b": (512, 36),
    "50b": (512, 12),
    "37b": (128, 36),
    "12.5b": (128, 12),
}


def get_config(arg: str = "600b") -> ConfigDict:
    """Returns the config of a size. ValueError for an unknown one."""
    experts, layers = base.chosen(arg, SIZES, __file__)
    config = base.get_config()
    config.num_steps = 1000
    config.model = base.model("moe")
    config.model.update({"num_experts": experts, "num_layers": layers, "moe_every": 2, "capacity_factor": 1.0})
    config.model.update({"hidden": 1024, "intermediate": 8192, "num_heads": 16, "num_kv_heads": 16})
    config.model.update({"vocab_size": 64000, "max_len": 1024, "norm": "layer", "activation": "gelu"})
    config.model.compute_dtype = "bfloat16"
    config.data.update({"source": "synthetic", "seq_len": 1024})
    config.batch.update({"global_size": 4096, "micro_size": 1})  # 4 million tokens
    config.mesh.devices_per_node = 8
    config.sharding.partition_size = min(experts, 1024)  # it divides the width
    config.sharding.experts = str(config.sharding.partition_size)
    config.optimizer.update({"learning_rate": 1e-3, "warmup_steps": 100})
    return config
