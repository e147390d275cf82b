"""ResNet-50 v1.5 on ImageNet, as in AWS's Dynamic Training example: batch 4096, learning rate 1.6, 90 epochs.

    python train.py --config=configs/resnet50.py --workdir=runs/resnet50 --config.data.path=TFDS_DATA_DIR

The images are TFDS's `imagenet2012`, which must be downloaded manually; its page says where to put the two archives.
Batch norm has its statistics over 32 rows, as Goyal et al. 2017 (arXiv 1706.02677) have them per GPU. The example's
float16 is bfloat16 here. A step's gradients are 97.7 MiB in float32; 0.2 of them are for classes that do not exist.

Hardware: 2 nodes or more of 8 GPUs; the number of nodes may change between restarts.
Not run yet. Published: 76.4 % top-1 at batch 256, 76.3 % at batch 8192 (Goyal et al., table 1).
"""

from ml_collections import ConfigDict

from configs import base

NUM_IMAGES = 1_281_167
BATCH = 4096


def get_config() -> ConfigDict:
    """Returns the config of ResNet-50: stages of 3, 4, 6 and 3 bottlenecks, images of 224 x 224."""
    config = base.get_config()
    config.num_steps = 90 * NUM_IMAGES // BATCH
    config.model = base.resnet(50)
    config.model.update({"version": "1.5", "norm": "batch", "norm_rows": 32, "class_multiple": 128})
    config.model.compute_dtype = "bfloat16"
    config.data.update({"source": "tfds:imagenet2012", "objective": "classify", "image_size": 224, "channels": 3})
    config.data.update({"augment": "crop_flip", "prefetch": 16})
    config.batch.update({"global_size": BATCH, "micro_size": 128})
    config.sharding.partition_size = 8
    config.optimizer.update({"name": "sgd", "learning_rate": 1.6, "final_fraction": 0.0, "weight_decay": 1e-4})
    config.optimizer.update({"schedule": "quadratic", "warmup_steps": 5 * NUM_IMAGES // BATCH, "clip_norm": 0.0})
    config.eval.update({"every": NUM_IMAGES // BATCH, "num_batches": 13})
    config.checkpoint.every = NUM_IMAGES // BATCH
    return config
