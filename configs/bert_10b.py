"""BERT 10B of the MiCS paper (Zhang et al. 2022, table 1) with the paper's settings; base of its other models.

    python train.py --config=configs/bert_10b.py --workdir=runs/bert_10b

Hardware: 2 nodes or more of 8 GPUs with 32 GB each and bfloat16 (the paper: p3dn.24xlarge, 8 V100, 100 Gbit/s, in
fp16). Not run yet. Published, in sequences per second (the paper's figure 7): 21.2 / 42.2 / 84.8 / 165.4 on 16 / 32 /
64 / 128 of its GPUs.

The paper's data is English Wikipedia; the default here is synthetic tokens, which need no files. The paper gives no
learning rate, so we chose one. The model is pre-norm (`models/encoder.py` says why).
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """Returns the config of BERT 10B: sequences of 512, micro-batch 8, global batch 8192, partition group of 1 node."""
    config = base.get_config()
    config.num_steps = 500
    config.model = base.model("encoder")
    config.model.update({"vocab_size": 32008, "max_len": 512, "num_layers": 127, "hidden": 2560})
    config.model.update({"intermediate": 10240, "num_heads": 40, "compute_dtype": "bfloat16"})
    config.data.update({"source": "synthetic", "seq_len": 512, "objective": "masked"})
    config.batch.update({"global_size": 8192, "micro_size": 8})
    config.mesh.devices_per_node = 8
    config.sharding.partition_size = 8
    config.optimizer.update({"learning_rate": 1e-4, "b2": 0.999, "weight_decay": 0.01, "warmup_steps": 50})
    return config
