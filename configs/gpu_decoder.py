"""A decoder of GPT-2's kind in bfloat16 for GPUs: `:124m` (12 layers of 768), `:350m`, `:1.3b`, or `:tiny` to try it.

    python train.py --config=configs/gpu_decoder.py:124m --workdir=runs/gpu_124m

Hardware: NVIDIA GPUs with bfloat16; 1.3b on one GPU wants 80 GB. A step has the rows of one micro-step on 8 GPUs.
Synthetic tokens, so that nothing is downloaded: this is for speed, not for what is learned. 124m, 350m and 1.3b
ran on one H100 (docs/results/gpu.md). Not run yet on 8; by the planner (lab/benchmarks/planner_configs.py):

    124m: 1 p4d.24xlarge (8 GPUs), 2.16 GB of 38.1 GB a GPU, 102 ms a step, $0.03 for its 50 steps on demand
    350m: 1 p4d.24xlarge (8 GPUs), 4.08 GB of 38.1 GB a GPU, 152 ms a step, $0.05 for its 50 steps on demand
    1.3b: 1 p4d.24xlarge (8 GPUs), 13.8 GB of 38.1 GB a GPU, 279 ms a step, $0.09 for its 50 steps on demand
"""

from ml_collections import ConfigDict

from configs import base

SIZES = {  # layers, hidden, heads, rows of a micro-step on one device
    "124m": (12, 768, 12, 16),
    "350m": (24, 1024, 16, 8),
    "1.3b": (24, 2048, 16, 4),
    "tiny": (2, 64, 2, 1),
}
DEVICES = 8


def get_config(arg: str = "124m") -> ConfigDict:
    """Returns the config of a size. ValueError for an unknown one."""
    layers, hidden, heads, rows = base.chosen(arg, SIZES, __file__)
    vocab_size, max_len = (256, 64) if arg == "tiny" else (50257, 1024)
    config = base.get_config()
    config.num_steps = 50
    config.model.update({"compute_dtype": "bfloat16", "vocab_size": vocab_size, "max_len": max_len})
    config.model.update({"num_layers": layers, "hidden": hidden, "intermediate": 4 * hidden})
    config.model.update({"num_heads": heads, "num_kv_heads": heads})
    config.model.update({"positions": "learned", "norm": "layer", "activation": "gelu"})
    config.data.update({"source": "synthetic", "seq_len": max_len})
    config.batch.update({"global_size": DEVICES * rows, "micro_size": rows})
    config.sharding.strategy = "zero1"
    config.optimizer.update({"learning_rate": 3e-4, "schedule": "constant", "warmup_steps": 0})
    config.elastic.snapshot_every = 0
    base.for_timing(config)
    return config
