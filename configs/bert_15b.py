"""BERT 15B of the MiCS paper (Zhang et al. 2022, table 1).

    python train.py --config=configs/bert_15b.py --workdir=runs/bert_15b

Hardware: 2 nodes or more of 8 GPUs with 32 GB each and bfloat16 (the paper: 8 V100 per node, 100 Gbit/s, fp16).
Not run yet. Published, in sequences per second (the paper's figure 7): 12.3 / 24.6 / 48.5 / 97.2 on 16 / 32 / 64 / 128
of its GPUs.
"""

from ml_collections import ConfigDict

from configs import bert_10b


def get_config() -> ConfigDict:
    """Returns the config of BERT 15B: BERT 10B with 190 layers, partition group of 2 nodes."""
    config = bert_10b.get_config()
    config.model.num_layers = 190
    config.sharding.partition_size = 16
    return config
