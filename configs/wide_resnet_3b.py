"""WideResNet with 3 B parameters: the MiCS paper's only model that is not a transformer (figure 11).

    python train.py --config=configs/wide_resnet_3b.py --workdir=runs/wide_resnet_3b

Bottlenecks in stages of 6, 8, 46 and 6, eight times as wide inside as ResNet's: 3.04 B parameters. 198 convolutions are
in the blocks' branches; with the stem and the classifier that makes 200 layers (4 shortcuts are convolutions too).
As in the paper: float32, synthetic images of 3 x 224 x 224, 8 per device, and no convolution is computed twice (norms
and ReLUs are: `remat=dots`, with which gathered parameters need not be kept). The partition group, one node, and the
optimizer are ours.

Hardware: 2 nodes or more of 8 GPUs with 32 GB.
Not run yet; by the planner (lab/benchmarks/planner_configs.py):

    wide_resnet_3b: 2 p4d.24xlarge (16 GPUs), 10.1 GB of 38.1 GB a GPU, 553 ms a step, $0.67 for its 100 steps on demand

docs/results/paper_tables.md has its replay on V100s.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """Returns the config of the wide network."""
    config = base.get_config()
    config.num_steps = 100
    config.model = base.resnet(50)
    config.model.update({"stage_blocks": (6, 8, 46, 6), "widening": 8, "norm": "batch", "remat": "dots"})
    config.model.class_multiple = 128  # 1000 classes: padded to 1024, which a scope of any power of two divides
    config.data.update({"source": "synthetic", "objective": "classify", "image_size": 224, "channels": 3})
    config.data.prefetch = 16
    config.batch.update({"global_size": 128, "micro_size": 8})
    config.sharding.partition_size = 8
    config.optimizer.update({"name": "sgd", "learning_rate": 0.05, "weight_decay": 1e-4, "clip_norm": 0.0})
    config.eval.update({"every": 0, "num_batches": 1})
    config.checkpoint.every = 0
    return config
