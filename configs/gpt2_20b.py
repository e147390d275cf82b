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
    config.model = base.model("decoder")
    config.model.update({"vocab_size": 50265, "max_len": 512, "num_layers": 62, "hidden": 5120, "intermediate": 20480})
    config.model.update({"num_heads": 40, "num_kv_heads": 40, "positions": "learned", "norm": "layer"})
    config.model.update({"activation": "gelu", "use_bias": True, "compute_dtype": "bfloat16"})
    config.data.objective = "causal"
    config.sharding.partition_size = 16
    return config
