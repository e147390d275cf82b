"""BERT 50B of the MiCS paper (Zhang et al. 2022, table 1).

    python train.py --config=configs/bert_50b.py --workdir=runs/bert_50b

Hardware: 8 nodes or more of 8 GPUs with 32 GB each and bfloat16 (the paper: 8 V100 per node, 100 Gbit/s, fp16).
Not run yet. Published, in sequences per second (the paper's figure 7): 13.9 / 27.1 on 64 / 128 of its GPUs.

The paper prints 40 heads, which do not divide its hidden of 8192; we take 64 heads of 128. Parameters and operations
are the same for any number of heads.
"""

from ml_collections import ConfigDict

from configs import bert_10b


def get_config() -> ConfigDict:
    """Returns the config of BERT 50B: 62 layers of hidden 8192, partition group of 8 nodes."""
    config = bert_10b.get_config()
    config.model.num_layers = 62
    config.model.hidden = 8192
    config.model.intermediate = 32768
    config.model.num_heads = 64  # the paper: 40
    config.sharding.partition_size = 64
    return config
