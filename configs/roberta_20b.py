"""RoBERTa 20B of the MiCS paper (Zhang et al. 2022, table 1).

    python train.py --config=configs/roberta_20b.py --workdir=runs/roberta_20b

Hardware: 2 nodes or more of 8 GPUs with 32 GB each and bfloat16 (the paper: 8 V100 per node, 100 Gbit/s, fp16).
Not run yet.

The paper does not give the partition size. It ran on 16 GPUs, the partition size of BERT 20B, so we use 16.
"""

from ml_collections import ConfigDict

from configs import bert_10b


def get_config() -> ConfigDict:
    """Returns the config of RoBERTa 20B: 62 layers of hidden 5120 and RoBERTa's vocabulary."""
    config = bert_10b.get_config()
    config.model.update({"vocab_size": 50265, "num_layers": 62, "hidden": 5120, "intermediate": 20480})
    config.sharding.partition_size = 16
    return config
