"""GPT-2 20B of the MiCS paper (Zhang et al. 2022, table 1).

    python train.py --config=configs/gpt2_20b.py --workdir=runs/gpt2_20b

Hardware: 2 nodes or more of 8 GPUs with 32 GB each and bfloat16 (the paper: 8 V100 per node, 100 Gbit/s, fp16).
Not run yet.

The paper does not give the partition size. It ran on 16 GPUs, the partition size of BERT 20B, so we use 16.
"""

from ml_collections import ConfigDict

from configs import base, bert_10b


def get_config() -> ConfigDict:
    """Returns the config of GPT-2 20B: 62 layers of hidden 5120, learned positions, tied head."""
    config = bert_10b.get_config()
    config.model = base.decoder()
    config.model.vocab_size = 50265
    config.model.max_len = 512
    config.model.num_layers = 62
    config.model.hidden = 5120
    config.model.intermediate = 20480
    config.model.num_heads = 40
    config.model.num_kv_heads = 40
    config.model.positions = "learned"
    config.model.norm = "layer"
    config.model.activation = "gelu"
    config.model.use_bias = True
    config.model.compute_dtype = "bfloat16"
    config.data.objective = "causal"
    config.sharding.partition_size = 16
    return config
