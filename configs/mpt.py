"""Decoders of MosaicML's throughput benchmark: `:125m`, `:350m`, `:760m`, `:1b`, `:3b`, `:7b`, `:13b`, `:30b`, `:70b`.

    python -m planner --config=configs/mpt.py:7b --cluster=p4de.24xlarge --config.model.remat=dots

Hardware: 8 GPUs with 40 GB (70b: 32 with 80 GB) and bfloat16.
Not run yet; by the planner (lab/benchmarks/planner_configs.py):

    7b: 1 p4d.24xlarge (8 GPUs), 17.3 GB of 38.1 GB a GPU, 34.7 s a step, $106 for its 500 steps on demand
    70b: 4 p4de.24xlarge (32 GPUs), 45.1 GB of 76.6 GB a GPU, 2m 01s a step, $1,841 for its 500 steps on demand

Published, with many lengths and batches: github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md
(lab/benchmarks/published_steps.csv). Learned positions, biases and a tied head, by the published numbers of parameters.
The data is synthetic.
"""

from ml_collections import ConfigDict

from configs import base

MODELS = {  # layers, hidden, heads
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
LENGTH = 2048


def get_config(arg: str = "7b") -> ConfigDict:
    """Returns the config of a size: rows of 2048, ZeRO-3. ValueError for an unknown one."""
    layers, hidden, heads = base.chosen(arg, MODELS, __file__)
    config = base.get_config()
    config.num_steps = 500
    config.model.update({"vocab_size": 50368, "max_len": LENGTH, "compute_dtype": "bfloat16"})
    config.model.update({"num_layers": layers, "hidden": hidden, "intermediate": 4 * hidden})
    config.model.update({"num_heads": heads, "num_kv_heads": heads})
    config.model.update({"positions": "learned", "norm": "layer", "activation": "gelu", "use_bias": True})
    config.data.update({"source": "synthetic", "seq_len": LENGTH})
    config.batch.update({"global_size": 512, "micro_size": 2})
    config.mesh.devices_per_node = 8
    config.sharding.update({"strategy": "zero3", "gather": "layer"})
    config.optimizer.update({"learning_rate": 1e-4, "warmup_steps": 50})
    return config
