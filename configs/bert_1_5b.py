"""The 1.5B model of the MiCS paper's fidelity test (Zhang et al. 2022, figure 16).

    python train.py --config=configs/bert_1_5b.py --workdir=runs/bert_1_5b

Hardware: 2 nodes of 8 GPUs (the paper: 8 V100 per node, 100 Gbit/s, fp16; global batch 512, 4 micro-steps).
Not run yet. Published (the paper's figure 16): mean loss per tenth of the run; MiCS and ZeRO-3 differ by at
most 0.15.

The paper gives only the number of layers, hidden and intermediate. We use 25 heads of 64, like GPT-2 with the same 48
layers of 1600 (Radford et al. 2019), the vocabulary of the paper's BERTs, and a partition group of one node. The paper
trains on one million sequences, 1954 steps.
"""

from ml_collections import ConfigDict

from configs import bert_10b


def get_config() -> ConfigDict:
    """Returns the config of the 1.5B fidelity model: 48 layers of hidden 1600, global batch 512."""
    config = bert_10b.get_config()
    config.num_steps = 1954
    config.model.update({"num_layers": 48, "hidden": 1600, "intermediate": 6400, "num_heads": 25})
    config.batch.global_size = 512
    return config
