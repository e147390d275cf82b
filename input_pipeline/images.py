"""Examples of labelled images (cropped, resized and converted to arrays), and the digit images of scikit-learn."""

import hashlib
import json
import math
from typing import TYPE_CHECKING, Protocol

import numpy as np

from configs.schema import DataConfig
from input_pipeline import index
from runtime.command_line import check_installed

if TYPE_CHECKING:
    from PIL.Image import Image

Box = tuple[float, float, float, float]  # left, top, right, bottom
CENTRE = 0.875  # side of `crop_flip`'s validation crop divided by the shorter side: 224 of 256 pixels
MIN_AREA, MAX_RATIO, ATTEMPTS = 0.08, 4 / 3, 10  # of random crops
DIGITS_SIZE, DIGITS_BRIGHTEST = 8, 16  # side of an image, largest pixel value
DIGITS_VALIDATION = 360  # images, a fifth
SHIFT = 1 / 8  # largest shift of an image by `shift_flip`, as a fraction of the side: 4 of 32 pixels


class Images(Protocol):
    """Images by index, in the order of the source."""

    content: str  # a hash that detects changes of the images and labels
    num_classes: int
    threads: int  # useful number of reader threads

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> "tuple[Image, int]":
        """Returns an image and its label."""
        ...


class Digits:
    """A split of scikit-learn's handwritten digits: 1797 grey images of 8 x 8 pixels; nothing is downloaded."""

    num_classes = 10
    threads = 1

    def __init__(self, split: str) -> None:
        check_installed("sklearn", "data.source=digits", "vision")
        from sklearn.datasets import load_digits  # a slow import (1 s) that only these runs need

        values, labels = load_digits(return_X_y=True)
        order = [index.window_of(i, windows=len(labels), seed=0) for i in range(len(labels))]
        chosen = order[:-DIGITS_VALIDATION] if split == "train" else order[-DIGITS_VALIDATION:]
        self._pixels = (
            np.round(values[chosen] * (255 / DIGITS_BRIGHTEST)).astype(np.uint8).reshape(-1, DIGITS_SIZE, DIGITS_SIZE)
        )
        self._labels = np.asarray(labels[chosen], np.uint8)
        self.content = hashlib.sha256(self._pixels.tobytes() + self._labels.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, number: int) -> "tuple[Image, int]":
        from PIL.Image import fromarray

        return fromarray(self._pixels[number]), int(self._labels[number])


class ImageDataset:
    """Examples `dataset[i]` for every i >= 0: an endless sequence of epochs, each of which visits every image once.

    An example holds the arrays of `row_arrays` and is a pure function of (seed, i):
    {"images": float32 [S, S, C] in [-1, 1], "labels": int32 [], "weights": float32 [], 1}.
    `augment` selects the crop, which is resized to a square:
    - `none`: the whole image.
    - `crop_flip`: in training a random crop, mirrored with probability 1/2; in validation the centre.
    - `shift_flip`: the whole image, in training shifted and mirrored with probability 1/2 (He et al. 2015, arXiv
      1512.03385, 4.2).
    """

    def __init__(self, images: Images, config: DataConfig, seed: int, *, training: bool) -> None:
        self.seed = seed
        self.row_arrays = index.row_arrays(config)
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
        image, label = self._images[index.window_of(int(i), windows=len(self), seed=self.seed)]
        box, mirrored, moves = (0, 0, *image.size), False, None
        if self._training and self._augment != "none":
            chances = index.uniform(index.random_bits((self.seed, int(i)), (4 * ATTEMPTS + 1,)))
            mirrored = bool(chances[0] < 0.5)
            if self._augment == "crop_flip":
                box = random_box(*image.size, chances[1:].reshape(ATTEMPTS, 4))
            else:
                moves = chances[1:3]
        elif self._augment == "crop_flip":
            box = centre_box(*image.size, CENTRE)
        values = pixels(image, box, size=self._size, channels=self._channels)
        values = values if moves is None else shifted(values, moves)
        return {
            "images": values[:, ::-1] if mirrored else values,
            "labels": np.asarray(label, np.int32),
            "weights": np.ones((), np.float32),
        }


def pixels(image: "Image", box: Box, *, size: int, channels: int) -> np.ndarray:
    """Returns the crop `box` of an image as float32 [size, size, channels] in [-1, 1], grey or RGB.

    ValueError for more than 8 bits per channel, because Pillow would clip every value above 255 to white.
    """
    from PIL.Image import Resampling  # imported here, because runs on text need no Pillow

    if image.mode.startswith(("I", "F")):
        raise ValueError(f"an image of mode {image.mode} has more than 8 bits per channel; convert it to 8 bits")
    image = image.convert("RGB" if channels == 3 else "L")
    if image.size != (size, size) or box != (0, 0, size, size):
        image = image.resize((size, size), Resampling.BILINEAR, box)
    return np.asarray(image, np.float32).reshape(size, size, channels) / 127.5 - 1


def centre_box(width: int, height: int, share: float) -> Box:
    """Returns the centred square with `share` of the shorter side."""
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return (left, top, left + side, top + side)


def random_box(width: int, height: int, chances: np.ndarray) -> Box:
    """Returns a crop of 8 to 100 % of the area with a ratio of 3:4 to 4:3 (Szegedy et al. 2015, arXiv 1409.4842, 6).

    `chances` are uniform numbers `[attempts, 4]`, one row per attempt. If no attempt fits into the image: the centre.
    """
    for size, form, x, y in chances.tolist():
        area = width * height * (MIN_AREA + (1 - MIN_AREA) * size)
        ratio = math.exp((2 * form - 1) * math.log(MAX_RATIO))
        part_width, part_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if part_width <= width and part_height <= height:
            left, top = x * (width - part_width), y * (height - part_height)
            return (left, top, left + part_width, top + part_height)
    return centre_box(width, height, 1.0)


def shifted(values: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """Returns an image `[S, S, C]` shifted by whole pixels, at most SHIFT of its side. Uncovered pixels are mid-grey.

    `chances` are two uniform numbers, which determine the shifts down and to the right.
    """
    most = round(SHIFT * len(values))
    top, left = (2 * most - int(chance * (2 * most + 1)) for chance in chances.tolist())
    padded = np.pad(values, ((most, most), (most, most), (0, 0)))
    return padded[top : top + len(values), left : left + len(values)]
