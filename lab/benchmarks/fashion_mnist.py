"""A ResNet on Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747) of Debian: 60,000 training and 10,000 other images.

    apt-get install dataset-fashion-mnist
    python train.py --config=lab/benchmarks/fashion_mnist.py --workdir=runs/fashion

The images of 28 x 28 pixels are read in half their size, so that a step takes three times as long as on the digits.

Hardware: any machine with 2 CPU cores (8 virtual devices as 4 nodes of 2, MiCS groups of 2).
"""

import gzip
import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from ml_collections import ConfigDict

from configs import digits
from configs.register import register
from configs.schema import DataConfig

if TYPE_CHECKING:
    from PIL.Image import Image

NAME, FOLDER = "fashion_mnist", Path("/usr/share/datasets/fashion-mnist")
REMEDY = "apt-get install dataset-fashion-mnist, or set data.path to a folder with its four files"
FILES = {"train": "train", "validation": "t10k"}


class FashionMnist:
    """A split: grey images of 28 x 28 pixels in 10 classes."""

    num_classes = 10
    threads = 1

    def __init__(self, config: DataConfig, split: str) -> None:
        folder = Path(config.path or FOLDER)
        self._pixels = idx(folder / f"{FILES[split]}-images-idx3-ubyte.gz", 3)
        self._labels = idx(folder / f"{FILES[split]}-labels-idx1-ubyte.gz", 1)
        self.content = hashlib.sha256(self._pixels.tobytes() + self._labels.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, number: int) -> "tuple[Image, int]":
        from PIL.Image import fromarray

        return fromarray(self._pixels[number]), int(self._labels[number])


def idx(file: Path, ndim: int) -> np.ndarray:
    """Returns the bytes uint8 `[...]` of a compressed IDX file. ValueError if it is missing or something else."""
    try:
        content = gzip.decompress(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror or error}): {REMEDY}") from error
    start = 4 + 4 * ndim
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if content[:4] != bytes([0, 0, 8, ndim]) or len(content) != start + math.prod(shape):
        raise ValueError(f"{file} is not an IDX file of bytes with {ndim} dims: {REMEDY}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


register("source", NAME, FashionMnist)


def get_config() -> ConfigDict:
    """Returns the config: the ResNet and SGD of configs/digits.py, 600 steps of 64 images."""
    config = digits.get_config()
    keys = {"num_steps": 600, "data.source": NAME, "data.image_size": 14, "eval.every": 200}
    config.update_from_flattened_dict(keys | {"eval.num_batches": 156})  # the last 16 images are left out
    return config
