"""ResNet-50 on ImageNet with a large batch: LARS and a warm-up (You, Gitman & Ginsburg 2017, arXiv 1708.03888).

    python train.py --config=configs/resnet50_lars.py --workdir=runs/resnet50_lars --config.data.path=TFDS_DATA_DIR

Batch 16,384; five epochs of linear warm-up to a learning rate of 25, then down with the square of what is left of 90
epochs, as in TensorFlow's ResNet with LARS. LARS scales the step of each tensor by 0.001 |w| / |g + decay w|; biases,
norms and batch norm's running averages are left alone.

Hardware: 16 nodes of 8 GPUs, each device one micro-step of 128 rows; with fewer nodes there are more micro-steps.
Not run yet. Published: the paper trains ResNet-50 with batches of up to 32,768 without loss of accuracy.
"""

from ml_collections import ConfigDict

from configs import resnet50

BATCH = 16_384


def get_config() -> ConfigDict:
    """Returns the config of resnet50.py with another batch and optimizer."""
    config = resnet50.get_config()
    epoch = resnet50.NUM_IMAGES // BATCH
    config.num_steps = 90 * resnet50.NUM_IMAGES // BATCH
    config.batch.global_size = BATCH
    config.optimizer.update({"name": "lars", "learning_rate": 25.0, "momentum": 0.9, "weight_decay": 1e-4})
    config.optimizer.warmup_steps = 5 * resnet50.NUM_IMAGES // BATCH
    config.eval.update({"every": epoch, "num_batches": 4})
    config.checkpoint.every = epoch
    return config
