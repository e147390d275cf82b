"""ResNet-110 on CIFAR-10 (He et al. 2015, 4.2): batch 128, 64,000 steps, shifted and mirrored images.

    python train.py --config=configs/resnet110.py --workdir=runs/resnet110

The images are TFDS's `cifar10`, which TFDS downloads. The example in docs/extending.md with `resnet110.get_config()`
and a sparsity of 0.999 comes nearest to the run in table 2 of Deep Gradient Compression. The page lists the
differences.

Batch norm has its statistics over 32 rows, as on DGC's 4 GPUs. Shortcuts that change shape are 1x1 convolutions, 2,752
of 1.73 M parameters; the paper's have none. The learning rate falls as a cosine, not in two steps.

Hardware: 4 nodes of one GPU.
Not run yet; by the planner (lab/benchmarks/planner_configs.py):

    resnet110: 4 h100-10gbit (4 GPUs), 273 MB of 76.4 GB a GPU, 14.8 ms a step

Published: 93.4 % (He et al., table 6: the best of five runs 93.57 %); on 4 GPUs 93.75 %, and 93.87 % with DGC (Lin et
al. 2018, arXiv 1712.01887, table 2).
"""

from ml_collections import ConfigDict

from configs import base

EPOCH = 50_000 // 128


def get_config() -> ConfigDict:
    """Returns the config of ResNet-110: three stages of 18 basic blocks, images of 32 x 32."""
    config = base.get_config()
    config.num_steps = 64_000
    config.model = base.resnet(110)
    config.model.update({"norm": "batch", "norm_rows": 32})
    config.data.update({"source": "tfds:cifar10", "objective": "classify", "image_size": 32, "channels": 3})
    config.data.augment = "shift_flip"
    config.batch.update({"global_size": 128, "micro_size": 32})
    config.sharding.strategy = "ddp"
    config.optimizer.update({"name": "sgd", "learning_rate": 0.1, "final_fraction": 0.0, "weight_decay": 1e-4})
    config.optimizer.update({"warmup_steps": 400, "clip_norm": 0.0})
    config.eval.update({"every": 10 * EPOCH, "num_batches": 79})
    config.checkpoint.every = 10 * EPOCH
    return config
