"""The records of any TFDS data set: prepares it if necessary, splits it, and reads single records."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from files.cache import cache_dir
from input_pipeline import cache
from input_pipeline.folder import VALIDATION_SHARE

VALIDATION_SPLITS = ("validation", "valid", "test")


def prepared_builder(name: str, data_dir: str) -> Any:
    """Returns the builder of a prepared data set. ValueError if TFDS does not know it or cannot prepare it."""
    import tensorflow_datasets as tfds

    where = str(Path(data_dir).expanduser()) if data_dir else None
    try:
        builder = tfds.builder(name, data_dir=where)
        if not builder.is_prepared():
            with cache.lock(cache_dir() / f".tfds-{name.replace('/', '-')}.lock"):
                builder = tfds.builder(name, data_dir=where, file_format="array_record")
                builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
        return builder
    except tfds.core.DatasetNotFoundError as error:
        known = tfds.list_builders(with_community_datasets=False)
        raise ValueError(
            f"data.source is 'tfds:{name}': TFDS knows no such data set, and there is none in "
            f"{where or 'its default data_dir'} (data.path).{_did_you_mean(name, known)}"
        ) from error
    except Exception as error:  # builders are third-party code and can raise any exception
        raise ValueError(
            f"data.source is 'tfds:{name}': TFDS cannot prepare it ({type(error).__name__}: {_first_line(error)})"
        ) from error


def data_source(name: str, builder: Any, split: str, decoders: Any = None) -> Any:
    """Returns the records of a TFDS split by index. ValueError if its file format has no random access."""
    try:
        return builder.as_data_source(split=split, decoders=decoders)
    except Exception as error:
        raise ValueError(
            f"data.source is 'tfds:{name}': no random access to {builder.data_dir} ({_first_line(error)}); "
            "prepare it with file_format='array_record'"
        ) from error


def range_of(name: str, splits: Any, split: str) -> tuple[str, int, int]:
    """Returns (TFDS split, first record, end) for our split.

    `train` is TFDS's train. `validation` is the first of `validation`, `valid` and `test` that exists; without any of
    them it is the last 5 % (at least one) of the records of train, which are then excluded from train.
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


def only_feature(name: str, features: Any, wanted: str, kind: type) -> str:
    """Returns the feature `wanted` if its type is `kind`, else the only feature of that type. ValueError if none is."""
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


def unreadable(name: str, place: int, split: str, error: Exception) -> ValueError:
    """Returns the error of a record that cannot be read."""
    why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else _first_line(error)
    return ValueError(f"tfds:{name}: record {place} of {split} cannot be read ({why})")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean 'NAME'?" for the known name most similar to `name`, "" if there is none."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
