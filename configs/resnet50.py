"""ResNet-50 v1.5 on ImageNet, as in AWS's Dynamic Training example: batch 4096, learning rate 1.6, 90 epochs.

    python train.py --config=configs/resnet50.py --workdir=runs/resnet50 --config.data.path=TFDS_DATA_DIR

The images are TFDS's `imagenet2012`, which must be downloaded manually; its page says where to put the two archives.
Batch norm has its statistics over 32 rows, as Goyal et al. 2017 (arXiv 1706.02677) have them per GPU. The example's
float16 is bfloat16 here. A step's gradients are 97.7 MiB in float32; 0.2 of them are for classes that do not exist.

`:lars` (You, Gitman & Ginsburg 2017, arXiv 1708.03888): batch 16,384; a warm-up to a learning rate of 25, then down
with the square of what is left, as in TensorFlow's ResNet with LARS. LARS scales the step of each tensor by
0.001 |w| / |g + decay w|; biases, norms and batch norm's running averages are left alone.

Hardware: 2 nodes or more of 8 GPUs; the number of nodes may change between restarts. With 16 nodes a device has one
micro-step of 128 rows under `:lars`.
Not run yet; by the planner (lab/benchmarks/planner_configs.py):

    sgd: 2 p4d.24xlarge (16 GPUs), 5.32 GB of 38.1 GB a GPU, 123 ms a step, $42 for its 28,150 steps on demand
    lars: 2 p4d.24xlarge (16 GPUs), 4.64 GB of 38.1 GB a GPU, 486 ms a step, $42 for its 7,037 steps on demand

Published: 76.4 % top-1 at batch 256, 76.3 % at batch 8192 (Goyal et al., table 1); with LARS batches of up to 32,768
without loss of accuracy.
"""

from ml_collections import ConfigDict

from configs import base

NUM_IMAGES = 1_281_167
OPTIMIZERS = {"sgd": (4096, 1.6, 13), "lars": (16_384, 25.0, 4)}  # batch, learning rate, batches of a validation


def get_config(arg: str = "sgd") -> ConfigDict:
    """Returns the config of ResNet-50: stages of 3, 4, 6 and 3 bottlenecks, images of 224 x 224.

    `arg` is the optimizer, a key of OPTIMIZERS.
    """
    batch, learning_rate, num_batches = base.chosen(arg, OPTIMIZERS, __file__)
    epoch = NUM_IMAGES // batch
    config = base.get_config()
    config.num_steps = 90 * NUM_IMAGES // batch
    config.model = base.resnet(50)
    config.model.update({"version": "1.5", "norm": "batch", "norm_rows": 32, "class_multiple": 128})
    config.model.compute_dtype = "bfloat16"
    config.data.update({"source": "tfds:imagenet2012", "objective": "classify", "image_size": 224, "channels": 3})
    config.data.update({"augment": "crop_flip", "prefetch": 16})
    config.batch.update({"global_size": batch, "micro_size": 128})
    config.sharding.partition_size = 8
    config.optimizer.update({"name": arg, "learning_rate": learning_rate, "final_fraction": 0.0, "weight_decay": 1e-4})
    config.optimizer.update({"schedule": "quadratic", "warmup_steps": 5 * NUM_IMAGES // batch, "clip_norm": 0.0})
    config.eval.update({"every": epoch, "num_batches": num_batches})
    config.checkpoint.every = epoch
    return config
