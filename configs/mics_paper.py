"""The models of the MiCS paper (Zhang et al. 2022, table 1; bert_1_5b: figure 16) with the paper's settings.

    python train.py --config=configs/mics_paper.py:bert_10b --workdir=runs/bert_10b

Hardware: 2 nodes or more (bert_50b: 8) of 8 GPUs with 32 GB each and bfloat16 (the paper: p3dn.24xlarge, 8 V100,
100 Gbit/s, in fp16: `--config.model.compute_dtype=float16`).
Not run yet; by the planner (lab/benchmarks/planner_configs.py):

    bert_1_5b: 2 p4d.24xlarge (16 GPUs), 4.59 GB of 38.1 GB a GPU, 1.28 s a step, $31 for its 1,954 steps on demand
    bert_10b: 2 p4d.24xlarge (16 GPUs), 24.2 GB of 38.1 GB a GPU, 1m 51s a step, $674 for its 500 steps on demand
    bert_15b: 2 p4d.24xlarge (16 GPUs), 20.4 GB of 38.1 GB a GPU, 3m 09s a step, $1,152 for its 500 steps on demand
    bert_20b: 2 p4d.24xlarge (16 GPUs), 26.7 GB of 38.1 GB a GPU, 3m 57s a step, $1,445 for its 500 steps on demand
    bert_50b: 8 p4d.24xlarge (64 GPUs), 23.5 GB of 38.1 GB a GPU, 3m 23s a step, $4,945 for its 500 steps on demand
    roberta_20b: 2 p4d.24xlarge (16 GPUs), 26.6 GB of 38.1 GB a GPU, 3m 51s a step, $1,408 for its 500 steps on demand
    gpt2_20b: 2 p4d.24xlarge (16 GPUs), 26.0 GB of 38.1 GB a GPU, 3m 48s a step, $1,391 for its 500 steps on demand

Published, in sequences per second on 16 / 32 / 64 / 128 GPUs (the paper's figure 7):

    bert_10b    21.2 / 42.2 / 84.8 / 165.4
    bert_15b    12.3 / 24.6 / 48.5 / 97.2
    bert_20b    6.4 / 14.5 / 27.8 / 53.2, the first with flat gathers (`--config.ablation.hierarchical=False`), to fit
    bert_50b    - / - / 13.9 / 27.1

Of bert_1_5b: the mean loss per tenth of a run on one million sequences; MiCS and ZeRO-3 differ by at most 0.15.

Ours, because the paper does not give them: the learning rate; 25 heads of bert_1_5b (GPT-2 has as many in 48 layers of
1600), its vocabulary and partition group; the groups of roberta_20b and gpt2_20b, which ran on 16 GPUs; 64 heads of
bert_50b, since the 40 that are printed do not divide 8192. The data is synthetic, which needs no files (the paper's:
English Wikipedia). The encoders are pre-norm (`models/encoder.py` says why).
"""

from ml_collections import ConfigDict

from configs import base

MODELS = {  # layers, hidden, heads, vocabulary, devices of a partition group
    "bert_1_5b": (48, 1600, 25, 32008, 8),
    "bert_10b": (127, 2560, 40, 32008, 8),
    "bert_15b": (190, 2560, 40, 32008, 16),
    "bert_20b": (64, 5120, 40, 32008, 16),
    "bert_50b": (62, 8192, 64, 32008, 64),
    "roberta_20b": (62, 5120, 40, 50265, 16),
    "gpt2_20b": (62, 5120, 40, 50265, 16),
}


def get_config(arg: str = "bert_10b") -> ConfigDict:
    """Returns the config of a model: sequences of 512, micro-batch 8. ValueError for an unknown one."""
    layers, hidden, heads, vocab_size, group = base.chosen(arg, MODELS, __file__)
    config = base.get_config()
    config.num_steps = 1954 if arg == "bert_1_5b" else 500
    config.model = base.model("decoder" if arg == "gpt2_20b" else "encoder")
    config.model.update({"vocab_size": vocab_size, "max_len": 512, "compute_dtype": "bfloat16"})
    config.model.update({"num_layers": layers, "hidden": hidden, "intermediate": 4 * hidden, "num_heads": heads})
    if arg == "gpt2_20b":
        config.model.update({"num_kv_heads": heads, "positions": "learned", "norm": "layer"})
        config.model.update({"activation": "gelu", "use_bias": True})
    config.data.update({"source": "synthetic", "seq_len": 512})
    config.data.objective = "causal" if arg == "gpt2_20b" else "masked"
    config.batch.update({"global_size": 512 if arg == "bert_1_5b" else 8192, "micro_size": 8})
    config.mesh.devices_per_node = 8
    config.sharding.partition_size = group
    config.optimizer.update({"learning_rate": 1e-4, "b2": 0.999, "weight_decay": 0.01, "warmup_steps": 50})
    return config
