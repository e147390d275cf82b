"""Examples of labelled images: which part of an image is seen, at what size, and its pixels as numbers."""

import hashlib
import json
import math
from typing import TYPE_CHECKING, Protocol

import numpy as np

from configs.schema import DataConfig
from input_pipeline import index
from input_pipeline.rows import row_arrays

if TYPE_CHECKING:
    from PIL.Image import Image

Box = tuple[float, float, float, float]  # left, top, right, bottom
CENTRE = 0.875  # of the shorter side, what `crop_flip` is validated on: 224 of 256 pixels
MIN_AREA, MAX_RATIO, ATTEMPTS = 0.08, 4 / 3, 10  # of random crops


class Images(Protocol):
    """Images by number, in the order of the source."""

    content: str  # changes with the images and labels, as far as they are read for it
    num_classes: int
    threads: int  # at most so many are of use to read them

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> "tuple[Image, int]":
        """Returns an image and its label."""
        ...


class ImageDataset:
    """Examples `dataset[i]` for every i >= 0, an endless sequence of epochs that each visit all images once.

    An example holds the arrays of `row_arrays` and is a pure function of (seed, i):
    {"images": float32 [S, S, C] in [-1, 1], "labels": int32 [], "weights": float32 [], 1}.
    `augment` chooses the part that is seen, squeezed to a square. `none`: the whole image. `crop_flip`: in training a
    random part, mirrored every other time, which only depends on (seed, i); in validation the centre.
    """

    def __init__(self, images: Images, config: DataConfig, seed: int, *, training: bool) -> None:
        self.seed = seed
        self.row_arrays = row_arrays(config)
        self.num_classes, self.threads = images.num_classes, images.threads
        self._images, self._size, self._channels = images, config.image_size, config.channels
        self._augment, self._training = config.augment, training
        settings = {
            "content": images.content,
            "image_size": config.image_size,
            "channels": config.channels,
            "augment": config.augment,
        }
        self.fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def __len__(self) -> int:
        """Returns the number of images in an epoch."""
        return len(self._images)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if i < 0:
            raise IndexError(f"example {i}: examples are numbered from 0")
        image, label = self._images[index.window_of(int(i), windows=len(self), seed=self.seed)]
        box, mirrored = whole_box(*image.size), False
        if self._augment == "crop_flip" and self._training:
            chances = index.uniform(index.random_bits((self.seed, int(i)), (4 * ATTEMPTS + 1,)))
            box, mirrored = random_box(*image.size, chances[1:].reshape(ATTEMPTS, 4)), bool(chances[0] < 0.5)
        elif self._augment == "crop_flip":
            box = centre_box(*image.size, CENTRE)
        values = pixels(image, box, size=self._size, channels=self._channels)
        return {
            "images": values[:, ::-1] if mirrored else values,
            "labels": np.asarray(label, np.int32),
            "weights": np.ones((), np.float32),
        }


def pixels(image: "Image", box: Box, *, size: int, channels: int) -> np.ndarray:
    """Returns the part `box` of an image as float32 [size, size, channels] in [-1, 1], grey or RGB.

    ValueError for an image of more than 8 bits a channel: Pillow would turn every value above 255 into white.
    """
    from PIL.Image import Resampling  # here: a run on text needs no Pillow

    if image.mode.startswith(("I", "F")):
        raise ValueError(f"an image of mode {image.mode} has more than 8 bits a channel; convert the images to 8 bits")
    image = image.convert("RGB" if channels == 3 else "L")
    if image.size != (size, size) or box != whole_box(size, size):
        image = image.resize((size, size), Resampling.BILINEAR, box)
    return np.asarray(image, np.float32).reshape(size, size, channels) / 127.5 - 1


def whole_box(width: int, height: int) -> Box:
    """Returns the box of a whole image."""
    return (0, 0, width, height)


def centre_box(width: int, height: int, share: float) -> Box:
    """Returns the centred square with `share` of the shorter side."""
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return (left, top, left + side, top + side)


def random_box(width: int, height: int, chances: np.ndarray) -> Box:
    """Returns a part of 8 to 100 % of the area and a ratio of 3:4 to 4:3 (Szegedy et al. 2015, arXiv 1409.4842, 6).

    `chances` are uniform numbers `[attempts, 4]`, a row for each attempt at one that fits; if none does, the centre.
    """
    for size, form, x, y in chances.tolist():
        area = width * height * (MIN_AREA + (1 - MIN_AREA) * size)
        ratio = math.exp((2 * form - 1) * math.log(MAX_RATIO))
        part_width, part_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if part_width <= width and part_height <= height:
            left, top = x * (width - part_width), y * (height - part_height)
            return (left, top, left + part_width, top + part_height)
    return centre_box(width, height, 1.0)
