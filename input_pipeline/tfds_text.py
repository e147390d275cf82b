"""The text of any TFDS data set."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from input_pipeline import tfds_records
from input_pipeline.folder import signature, text_files
from input_pipeline.streams import TextSource


def source(name: str, data_dir: str, split: str) -> TextSource:
    """Returns the documents of a split of the TFDS data set `name`, prepared by TFDS first if it is not.

    `tfds_records.range_of` defines the splits. The text is the feature `text`, or else the only text feature.
    Raises ValueError for a data set that TFDS does not know or cannot prepare or read, or without train or text.
    """
    import tensorflow_datasets as tfds

    builder = tfds_records.prepared_builder(name, data_dir)
    feature = tfds_records.only_feature(name, builder.info.features, "text", tfds.features.Text)
    tfds_split, start, stop = tfds_records.range_of(name, builder.info.splits, split)
    folder = Path(builder.data_dir)
    rule = f"tfds {feature} {tfds_split} {start} {stop}"

    def documents() -> Iterator[str]:
        records = tfds_records.data_source(name, builder, tfds_split)
        for place in range(start, stop):
            try:
                yield _text(records[place][feature])
            except Exception as error:  # damaged files can raise any exception
                raise tfds_records.unreadable(name, place, tfds_split, error) from error

    return TextSource(
        name=f"tfds:{name}", signature=signature(rule, folder, list(text_files(folder))), documents=documents
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
