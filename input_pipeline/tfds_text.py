"""The text of any TFDS data set, by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from input_pipeline import cache
from input_pipeline.config import nearest
from input_pipeline.folder import VALIDATION_SHARE, signature, text_files
from input_pipeline.streams import TextSource

VALIDATION_SPLITS = ("validation", "valid", "test")


def source(name: str, data_dir: str, split: str) -> TextSource:
    """Returns the documents of a split of the TFDS data set `name`, prepared by TFDS first if it is not.

    Its splits: `train` is train. Validation is the first of `validation`, `valid`, `test` that there is; if there is
    none, the last 5 % of the records of train (at least one), which then are not in train.
    Its text: the feature `text`, or else the only feature that is text.
    Raises ValueError for a data set that TFDS does not know or cannot prepare or read, without train or without text.
    """
    builder = _prepared_builder(name, data_dir)
    feature = _text_feature(name, builder.info.features)
    tfds_split, start, stop = _range_of(name, builder.info.splits, split)
    folder = Path(builder.data_dir)
    rule = f"tfds {feature} {tfds_split} {start} {stop}"

    def documents() -> Iterator[str]:
        records = _data_source(name, builder, tfds_split)
        for place in range(start, stop):
            try:
                yield _text(records[place][feature])
            except UnicodeDecodeError as error:
                raise ValueError(f"tfds:{name}: record {place} of {tfds_split} is not UTF-8 text") from error
            except Exception as error:  # damaged files raise anything at all
                raise ValueError(
                    f"tfds:{name}: record {place} of {tfds_split} cannot be read ({_first_line(error)})"
                ) from error

    return TextSource(
        name=f"tfds:{name}", signature=signature(rule, folder, list(text_files(folder))), documents=documents
    )


def _prepared_builder(name: str, data_dir: str) -> Any:
    import tensorflow_datasets as tfds

    where = str(Path(data_dir).expanduser()) if data_dir else None
    try:
        builder = tfds.builder(name, data_dir=where)
        if not builder.is_prepared():
            with cache.lock(cache.cache_dir() / f".tfds-{name.replace('/', '-')}.lock"):
                builder = tfds.builder(name, data_dir=where, file_format="array_record")
                builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
        return builder
    except tfds.core.DatasetNotFoundError as error:
        known = tfds.list_builders(with_community_datasets=False)
        raise ValueError(
            f"data.source is 'tfds:{name}': TFDS knows no such data set, and there is none in "
            f"{where or 'its default data_dir'} (data.path).{nearest(name, known)}"
        ) from error
    except Exception as error:  # a builder is other people's code: it raises anything at all
        raise ValueError(
            f"data.source is 'tfds:{name}': TFDS cannot prepare it ({type(error).__name__}: {_first_line(error)})"
        ) from error


def _data_source(name: str, builder: Any, split: str) -> Any:
    try:
        return builder.as_data_source(split=split)
    except Exception as error:
        raise ValueError(
            f"data.source is 'tfds:{name}': no random access to {builder.data_dir} ({_first_line(error)}); "
            "prepare it with file_format='array_record'"
        ) from error


def _text_feature(name: str, features: Any) -> str:
    import tensorflow_datasets as tfds

    found = [key for key, feature in features.items() if isinstance(feature, tfds.features.Text)]
    if "text" in found:
        return "text"
    if len(found) == 1:
        return found[0]
    listing = ", ".join(f"{key} ({type(feature).__name__})" for key, feature in features.items())
    problem = "no text feature" if not found else f"{len(found)} text features and none is called 'text'"
    raise ValueError(f"data.source is 'tfds:{name}': it has {problem}; its features are {listing}")


def _range_of(name: str, splits: Any, split: str) -> tuple[str, int, int]:
    """Returns (TFDS split, first record, end) for our split."""
    if "train" not in splits:
        raise ValueError(f"data.source is 'tfds:{name}': it has no split 'train', only {', '.join(splits)}")
    validation = next((other for other in VALIDATION_SPLITS if other in splits), None)
    if validation:
        chosen = "train" if split == "train" else validation
        return chosen, 0, splits[chosen].num_examples
    count = splits["train"].num_examples
    cut = count - max(1, round(count * VALIDATION_SHARE))
    return ("train", 0, cut) if split == "train" else ("train", cut, count)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
