"""ResNet-50 v1 on ImageNet, as in AWS's Dynamic Training example: batch 4096, learning rate 1.6, 90 epochs.

    python train.py --config=configs/resnet50.py --workdir=runs/resnet50 --config.data.path=TFDS_DATA_DIR

The images are TFDS's `imagenet2012`, which must be downloaded manually; its page says where to put the two archives.
Unlike the example, this network has group norm (models/resnet.py), and the learning rate decays as a cosine, not a
polynomial.

Hardware: 2 nodes or more of 8 GPUs; the number of nodes may change between restarts.
Not run yet. Published for the same network: Wu & He 2018 (arXiv 1803.08494, table 1) reach 75.9 % with group
norm, 76.4 % with batch norm.
"""

from ml_collections import ConfigDict

from configs import base

NUM_IMAGES = 1_281_167
BATCH = 4096


def get_config(arg: str = "") -> ConfigDict:
    """Returns the config of ResNet-50: stages of 3, 4, 6 and 3 bottlenecks, images of 224 x 224."""
    base.no_argument(arg, __file__)
    config = base.get_config()
    config.num_steps = 90 * NUM_IMAGES // BATCH
    config.model = base.resnet()
    config.model.update({"channels": 3, "num_classes": 1000, "class_multiple": 128, "stem": "conv7_pool"})
    config.model.update({"block": "bottleneck", "stage_blocks": (3, 4, 6, 3), "width": 64, "norm_groups": 32})
    config.model.compute_dtype = "bfloat16"
    config.data.update({"source": "tfds:imagenet2012", "objective": "classify", "image_size": 224, "channels": 3})
    config.data.update({"augment": "crop_flip", "prefetch": 16})
    config.batch.update({"global_size": BATCH, "micro_size": 128})
    config.sharding.partition_size = 8
    config.optimizer.update({"name": "sgd", "learning_rate": 1.6, "final_fraction": 0.0, "weight_decay": 1e-4})
    config.optimizer.update({"warmup_steps": 5 * NUM_IMAGES // BATCH, "clip_norm": 0.0})
    config.eval.update({"every": NUM_IMAGES // BATCH, "num_batches": 13})
    config.checkpoint.every = NUM_IMAGES // BATCH
    return config
