"""Files of documents ("shards"): array_record, parquet, JSON lines and plain text, recognised by their file names."""

import contextlib
import gzip
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from runtime.command_line import check_installed
from runtime.files import json_objects

# ends of file names; TFDS appends `-00000-of-00010`; .gz and .zst files are decompressed while they are read
_FORMATS = {
    "array_record": re.compile(r"\.array_record(-\d+-of-\d+)?$"),
    "parquet": re.compile(r"\.parquet$"),
    "jsonl": re.compile(r"\.jsonl(\.gz|\.zst)?$"),
    "txt": re.compile(r"\.txt(\.gz|\.zst)?$"),
}
KNOWN = ".array_record, .parquet, .jsonl, .txt (the last two also with .gz or .zst)"
_RECORDS = 256  # records per read
# A compressed file may decompress to this size, or to this multiple of its size. Text is compressed to a tenth, rarely
# to a fiftieth.
MOST_UNPACKED_BYTES = 64 << 20
MOST_RATIO = 100


def format_of(name: str) -> str:
    """Returns the format of a file by its name, "" if unknown."""
    return next((kind for kind, ending in _FORMATS.items() if ending.search(name)), "")


def matches(name: str, pattern: str) -> bool:
    """Whether a relative path matches a glob from its right end: `*.txt` at any depth, `a/*.txt` in folders `a`."""
    return not pattern or PurePosixPath(name).match(pattern)


def documents(path: Path, name: str, text_field: str) -> Iterator[str]:
    """Yields the documents of a file in the format given by its `name`. ValueError names the unreadable part."""
    kind = format_of(name)
    if not kind:
        raise ValueError(f"{name} matches data.pattern, but its format is not known; known are {KNOWN}")
    if kind == "parquet" or name.endswith(".zst"):
        check_installed("pyarrow", name, "shards")
    count = 0
    try:
        for text in _READERS[kind](path, name, text_field):
            if not isinstance(text, str):
                raise ValueError(f"{text_field!r} is of type {type(text).__name__}, and no text")
            count += 1
            yield text
    except Exception as error:  # damaged files can raise any exception
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{name} cannot be read as {kind}: after {count} documents: {said}") from error


def _array_record(path: Path, name: str, text_field: str) -> Iterator[object]:
    from array_record.python.array_record_module import ArrayRecordReader

    with contextlib.closing(ArrayRecordReader(str(path))) as reader:
        count = reader.num_records()
        for start in range(0, count, _RECORDS):
            for record in reader.read(range(start, min(start + _RECORDS, count))):
                yield _text_of_record(record, text_field)


def _text_of_record(record: bytes, text_field: str) -> Any:
    """Returns the text of a record, which is a JSON object or a tf.train.Example (as TFDS writes)."""
    if record.startswith(b"{"):
        return _field(json_objects.value(record, "a record", lenient=True), text_field)
    check_installed("tensorflow_datasets", "a tf.train.Example", "tfds")
    from tensorflow_datasets.proto import tf_example_pb2

    example: Any = tf_example_pb2
    features = example.Example.FromString(record).features.feature
    return b"".join(_field(features, text_field).bytes_list.value).decode()


def _parquet(path: Path, name: str, text_field: str) -> Iterator[object]:
    from pyarrow import parquet, types

    kinds = {field.name: field.type for field in parquet.read_schema(path)}
    if types.is_nested(kind := _field(kinds, text_field)):
        raise ValueError(f"{text_field!r} is of type {kind}, and no text")
    with parquet.ParquetFile(path, read_dictionary=[text_field]) as file:  # it must be a column, not nested
        _check_unpacked(file.metadata, text_field)
        for batch in file.iter_batches(_RECORDS, columns=[text_field]):
            for value in batch.column(0):  # not a list of all values, which may repeat a large value many times
                yield value.as_py()


def _check_unpacked(metadata: Any, column: str) -> None:
    """Raises ValueError if a column of a parquet file declares a larger uncompressed size than text can have."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for part in (group.column(i) for i in range(group.num_columns)):
            most = _most_unpacked(part.total_compressed_size)
            if part.path_in_schema == column and part.total_uncompressed_size > most:
                raise ValueError(f"{column!r} unpacks to more than {most >> 20} MiB and {MOST_RATIO} times its size")


def _jsonl(path: Path, name: str, text_field: str) -> Iterator[object]:
    with _opened(path, name) as file:
        for line in file:
            if line.strip():
                yield _field(json_objects.value(line, "a line", lenient=True), text_field)


def _txt(path: Path, name: str, text_field: str) -> Iterator[str]:
    with _opened(path, name) as file:
        yield file.read().decode("utf-8-sig")  # without a byte order mark


_READERS = {"array_record": _array_record, "parquet": _parquet, "jsonl": _jsonl, "txt": _txt}


def _field(row: object, text_field: str) -> Any:
    """Returns the text of a document. ValueError if the field is missing."""
    if not isinstance(row, Mapping) or text_field not in row:
        there = ", ".join(sorted(row)) if isinstance(row, Mapping) else f"a {type(row).__name__}"
        raise ValueError(f"it has no field {text_field!r} (data.text_field), only {there}")
    return row[text_field]


def _opened(path: Path, name: str) -> io.BufferedReader:
    """Returns a file of bytes, decompressed while it is read."""
    if name.endswith(".gz"):
        stream: Any = gzip.GzipFile(path)
    elif name.endswith(".zst"):
        import pyarrow

        stream = pyarrow.input_stream(str(path), compression="zstd")
    else:
        return path.open("rb")
    return io.BufferedReader(_Unpacked(stream, _most_unpacked(path.stat().st_size)))


def _most_unpacked(size: int) -> int:
    """Returns the largest decompressed size for a compressed file of `size` bytes."""
    return max(MOST_UNPACKED_BYTES, MOST_RATIO * size)


class _Unpacked(io.RawIOBase):
    """The content of a compressed file. ValueError where it is longer than text can be."""

    def __init__(self, stream: Any, most: int) -> None:
        self._stream, self._most, self._count = stream, most, 0

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()
        super().close()

    def readinto(self, buffer: Any, /) -> int:
        count = self._stream.readinto(buffer)
        self._count += count
        if self._count > self._most:
            raise ValueError(
                f"it unpacks to more than {self._most >> 20} MiB and {MOST_RATIO} times its size; if it is yours, "
                "unpack it first"
            )
        return count
