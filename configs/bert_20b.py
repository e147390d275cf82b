"""BERT 20B of the MiCS paper (Zhang et al. 2022, table 1).

    python train.py --config=configs/bert_20b.py --workdir=runs/bert_20b

Hardware: 2 nodes or more of 8 GPUs with 32 GB each and bfloat16 (the paper: 8 V100 per node, 100 Gbit/s, fp16).
Not run yet. Published, in sequences per second (the paper's figure 7): 6.4 / 14.5 / 27.8 / 53.2 on 16 / 32 / 64 / 128
of its GPUs; on 16 the paper needed flat gathers (`--config.sharding.hierarchical=False`) to fit into memory.
"""

from ml_collections import ConfigDict

from configs import bert_10b


def get_config() -> ConfigDict:
    """Returns the config of BERT 20B: 64 layers of hidden 5120, partition group of 2 nodes."""
    config = bert_10b.get_config()
    config.model.update({"num_layers": 64, "hidden": 5120, "intermediate": 20480})
    config.sharding.partition_size = 16
    return config
