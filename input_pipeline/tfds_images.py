"""The labelled images of any TFDS data set."""

import hashlib
import io
from pathlib import Path
from typing import TYPE_CHECKING

from input_pipeline import cache, tfds_records

if TYPE_CHECKING:
    from PIL.Image import Image


class TfdsImages:
    """The images of a split of the TFDS data set `name`, prepared by TFDS first if it is not.

    `tfds_records.range_of` defines the splits. Image and label are the features `image` and `label`, or else the only
    feature that is an image and the only one that is a class. `content` hashes splits of up to 256 MiB completely and
    256 blocks of larger ones.
    Raises ValueError for a data set that TFDS does not know or cannot prepare or read, and if one of these is missing.
    """

    threads = 16  # reading and decoding release Python's global lock

    def __init__(self, name: str, data_dir: str, split: str) -> None:
        import tensorflow_datasets as tfds

        builder = tfds_records.prepared_builder(name, data_dir)
        features = builder.info.features
        self._image = tfds_records.only_feature(name, features, "image", tfds.features.Image)
        self._label = tfds_records.only_feature(name, features, "label", tfds.features.ClassLabel)
        self.num_classes: int = features[self._label].num_classes
        self._name = name
        self._split, self._start, self._stop = tfds_records.range_of(name, builder.info.splits, split)
        decoders = {self._image: tfds.decode.SkipDecoding()}  # images are cropped before they are converted to arrays
        self._records = tfds_records.data_source(name, builder, self._split, decoders)
        here = builder.info.splits[self._split]
        bytes_there = cache.checksum([Path(str(path)) for path in here.filepaths])
        rule = f"{builder.info.full_name} {self._image} {self._label} {split} {here.shard_lengths} {bytes_there}"
        self.content = hashlib.sha256(rule.encode()).hexdigest()

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, number: int) -> "tuple[Image, int]":
        from PIL import Image

        try:
            record = self._records[self._start + number]
            image = Image.open(io.BytesIO(record[self._image]))
            image.load()
            return image, int(record[self._label])
        except Exception as error:  # damaged files can raise any exception
            raise tfds_records.unreadable(self._name, self._start + number, self._split, error) from error
