"""The 1.5B model of the MiCS paper's fidelity test (Zhang et al. 2022, figure 16).

    python train.py --config=configs/bert_1_5b.py --workdir=runs/bert_1_5b

Hardware: 2 nodes of 8 GPUs (the paper: 8 V100 a node, 100 Gbit/s, fp16; global batch 512, 4 micro-steps).
Not run yet. Published (the paper's figure 16): the loss of MiCS by tenths of the run, at most 0.15 from ZeRO-3's.

The paper states layers, hidden and intermediate, nothing else. We take 25 heads of 64, as GPT-2 has for the same 48
layers of 1600 (Radford et al. 2019), its BERTs' vocabulary, and a partition group of one node. The paper trains on one
million sequences, 1954 steps.
"""

from ml_collections import ConfigDict

from configs import base, bert_10b


def get_config(arg: str = "") -> ConfigDict:
    """Returns the config of the 1.5B fidelity model: 48 layers of hidden 1600, global batch 512."""
    base.no_argument(arg, __file__)
    config = bert_10b.get_config()
    config.num_steps = 1954
    config.model.num_layers = 48
    config.model.hidden = 1600
    config.model.intermediate = 6400
    config.model.num_heads = 25
    config.batch.global_size = 512
    return config
