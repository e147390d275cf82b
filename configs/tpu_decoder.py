"""Decoders for TPU slices: MaxText's `:16b`, `:32b` and `:64b`, and Llama 3.1's `:llama_8b` and `:llama_70b`.

    python -m planner --config=configs/tpu_decoder.py:16b --cluster=v5e-256 --nodes=4
    python -m planner --config=configs/tpu_decoder.py:llama_8b --cluster=v6e-8

Hardware: TPU slices; a node is a slice. A step has the rows for 4 (16b), 2 (32b) or 1 v5e-256, for v6e-8 (llama_8b)
or for v6e-64 (llama_70b). The data is synthetic. Never run here.
Expected, as MaxText and tpu-recipes published them (lab/benchmarks/published_tpu_steps.csv): 16b 117 TFLOP/s a chip on
4 v5e-256 (10.6 s a step), 32b 128 on 2 (12.5 s), 64b 118 on one (13.5 s), llama_8b 3.44 s on v6e-8. By the planner
(lab/benchmarks/planner_configs.py):

    16b: 4 v5e-256 (1024 TPUs), 15.7 GB of 16.9 GB a TPU, 10.5 s a step, $3,590 for its 1,000 steps on demand
    32b: 2 v5e-256 (512 TPUs), 16.4 GB of 16.9 GB a TPU, 13.2 s a step, $2,251 for its 1,000 steps on demand
    64b: 1 v5e-256 (256 TPUs), 15.7 GB of 16.9 GB a TPU, 14.9 s a step, $1,274 for its 1,000 steps on demand
    llama_8b: 1 v6e-8 (8 TPUs), 31.6 GB of 33.5 GB a TPU, 3.74 s a step, $22 for its 1,000 steps on demand
    llama_70b: 1 v6e-64 (64 TPUs), 31.9 GB of 33.5 GB a TPU, 25.1 s a step, $1,203 for its 1,000 steps on demand
"""

from ml_collections import ConfigDict

from configs import base

MODELS = {  # layers, hidden, intermediate, heads, heads of keys, tokens of a row, vocabulary, rows of a chip, chips
    "16b": (32, 4096, 28672, 64, 64, 2048, 32000, 6, 4 * 256),
    "32b": (32, 8192, 28672, 64, 64, 2048, 32000, 4, 2 * 256),
    "64b": (64, 8192, 28672, 64, 64, 2048, 32000, 2, 256),
    "llama_8b": (32, 4096, 14336, 32, 8, 8192, 128256, 3, 8),
    "llama_70b": (80, 8192, 28672, 64, 8, 8192, 128256, 2, 64),
}
ROTARY = {"rotary_base": 500_000.0, "rotary_scaling": "llama3", "rotary_factor": 8.0}


def get_config(arg: str = "16b") -> ConfigDict:
    """Returns the config of a size: FSDP inside a slice, a replica per slice. ValueError for an unknown one."""
    layers, hidden, intermediate, heads, kv_heads, length, vocab, rows, chips = base.chosen(arg, MODELS, __file__)
    config = base.get_config()
    config.num_steps = 1000
    config.model.update({"compute_dtype": "bfloat16", "vocab_size": vocab, "max_len": length, "tied_head": False})
    config.model.update({"num_layers": layers, "hidden": hidden, "intermediate": intermediate, "remat": "full"})
    config.model.update({"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 128})
    if arg.startswith("llama"):
        config.model.update(ROTARY)
    if arg == "llama_70b":  # fits on 64 chips only like this
        config.model.remat = "offload"
        config.sharding.overlap = "off"
    config.data.update({"source": "synthetic", "seq_len": length})
    config.batch.update({"global_size": rows * chips, "micro_size": rows})
    config.sharding.update({"strategy": "hsdp", "partition_size": 0})
    config.optimizer.update({"learning_rate": 1e-4, "warmup_steps": 100})
    config.elastic.snapshot_every = 0
    base.for_timing(config)
    return config
