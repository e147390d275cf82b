"""The texts and labelled images of any TFDS data set: prepared if necessary, split, and read record by record."""

import difflib
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from input_pipeline import cache
from input_pipeline.folder import VALIDATION_SHARE, signature, text_files
from input_pipeline.streams import TextSource
from runtime.command_line import check_installed
from runtime.files.cache import cache_dir
from runtime.files.paths import user_path

if TYPE_CHECKING:
    from PIL.Image import Image

VALIDATION_SPLITS = ("validation", "valid", "test")


def source(name: str, data_dir: str, split: str) -> TextSource:
    """Returns the documents of a split of the TFDS data set `name`. TFDS prepares the data set first if necessary.

    `_range_of` defines the splits. The text is the feature `text`, or else the only text feature.
    Raises ValueError for a data set that TFDS does not know or cannot prepare or read, or without train or text.
    """
    builder = _prepared_builder(name, data_dir)
    import tensorflow_datasets as tfds

    feature = _only_feature(name, builder.info.features, "text", tfds.features.Text)
    tfds_split, start, stop = _range_of(name, builder.info.splits, split)
    folder = Path(builder.data_dir)
    rule = f"tfds {feature} {tfds_split} {start} {stop}"

    def documents() -> Iterator[str]:
        records = _data_source(name, builder, tfds_split)
        for place in range(start, stop):
            try:
                value = records[place][feature]
                yield value.decode() if isinstance(value, bytes) else str(value)
            except Exception as error:  # damaged files can raise any exception
                raise _unreadable(name, place, tfds_split, error) from error

    return TextSource(
        name=f"tfds:{name}", signature=signature(rule, folder, list(text_files(folder))), documents=documents
    )


class TfdsImages:
    """The images of a split of the TFDS data set `name`. TFDS prepares the data set first if necessary.

    `_range_of` defines the splits. Image and label are the features `image` and `label`, or else the only image feature
    and the only class feature. `content` hashes splits of up to 256 MiB completely and 256 blocks of larger splits.
    Raises ValueError for a data set that TFDS does not know or cannot prepare or read, and if a feature is missing.
    """

    threads = 16  # reading and decoding release Python's global lock

    def __init__(self, name: str, data_dir: str, split: str) -> None:
        builder = _prepared_builder(name, data_dir)
        import tensorflow_datasets as tfds

        features = builder.info.features
        self._image = _only_feature(name, features, "image", tfds.features.Image)
        self._label = _only_feature(name, features, "label", tfds.features.ClassLabel)
        self.num_classes: int = features[self._label].num_classes
        self._name = name
        self._split, self._start, self._stop = _range_of(name, builder.info.splits, split)
        decoders = {self._image: tfds.decode.SkipDecoding()}  # images are cropped before they are converted to arrays
        self._records = _data_source(name, builder, self._split, decoders)
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
            raise _unreadable(self._name, self._start + number, self._split, error) from error


def _prepared_builder(name: str, data_dir: str) -> Any:
    """Returns the builder of a prepared data set. ValueError if TFDS does not know it or cannot prepare it."""
    check_installed("tensorflow_datasets", f"data.source=tfds:{name}", "tfds")
    import tensorflow_datasets as tfds

    where = str(user_path(data_dir)) if data_dir else None
    try:
        builder = tfds.builder(name, data_dir=where)
        if not builder.is_prepared():
            with cache.lock(cache_dir() / f".tfds-{name.replace('/', '-')}.lock"):
                builder = tfds.builder(name, data_dir=where, file_format="array_record")
                try:
                    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
                except OSError:  # another node with a separate cache lock may have been first
                    if not (builder := tfds.builder(name, data_dir=where)).is_prepared():
                        raise
        return builder
    except tfds.core.DatasetNotFoundError as error:
        known = difflib.get_close_matches(name, tfds.list_builders(with_community_datasets=False), n=1, cutoff=0.5)
        near = f" Did you mean {known[0]!r}?" if known else ""
        raise ValueError(
            f"data.source is 'tfds:{name}': TFDS knows no such data set, and there is none in "
            f"{where or 'its default data_dir'} (data.path).{near}"
        ) from error
    except Exception as error:  # builders are third-party code and can raise any exception
        raise ValueError(
            f"data.source is 'tfds:{name}': TFDS cannot prepare it ({type(error).__name__}: {_first_line(error)})"
        ) from error


def _data_source(name: str, builder: Any, split: str, decoders: Any = None) -> Any:
    """Returns the records of a TFDS split by index. ValueError if its file format has no random access."""
    try:
        return builder.as_data_source(split=split, decoders=decoders)
    except Exception as error:
        raise ValueError(
            f"data.source is 'tfds:{name}': no random access to {builder.data_dir} ({_first_line(error)}); "
            "prepare it with file_format='array_record'"
        ) from error


def _range_of(name: str, splits: Any, split: str) -> tuple[str, int, int]:
    """Returns (TFDS split, first record, end) for our split.

    `train` is TFDS's train. `validation` is the first of `validation`, `valid` and `test` that exists. If none exists,
    it is the last 5 % (at least one) of the records of train, which are then excluded from train.
    """
    if "train" not in splits:
        raise ValueError(f"data.source is 'tfds:{name}': it has no split 'train', only {', '.join(splits)}")
    validation = next((other for other in VALIDATION_SPLITS if other in splits), None)
    if validation:
        chosen = "train" if split == "train" else validation
        return chosen, 0, splits[chosen].num_examples
    count = splits["train"].num_examples
    cut = count - max(1, round(count * VALIDATION_SHARE))
    return ("train", 0, cut) if split == "train" else ("train", cut, count)


def _only_feature(name: str, features: Any, wanted: str, kind: type) -> str:
    """Returns the feature `wanted` if its type is `kind`, else the only feature of that type.

    ValueError if none fits.
    """
    found = [key for key, feature in features.items() if isinstance(feature, kind)]
    if wanted in found:
        return wanted
    if len(found) == 1:
        return found[0]
    listing = ", ".join(f"{key} ({type(feature).__name__})" for key, feature in features.items())
    raise ValueError(
        f"data.source is 'tfds:{name}', which needs a feature {wanted!r} or a single one of type {kind.__name__}, but "
        f"has {len(found)} of that type; its features are {listing}"
    )


def _unreadable(name: str, place: int, split: str, error: Exception) -> ValueError:
    """Returns the error of a record that cannot be read."""
    why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else _first_line(error)
    return ValueError(f"tfds:{name}: record {place} of {split} cannot be read ({why})")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
