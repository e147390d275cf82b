"""Files of documents: array_record, parquet, JSON and plain text, recognised by their file names."""

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from input_pipeline.unpacking import MOST_RATIO, UNPACKERS, check_first_bytes, most_unpacked, opened
from runtime.command_line import check_installed
from runtime.files import json_objects

_PACKED = "(" + "|".join(re.escape(ending) for ending in UNPACKERS) + ")?"
# ends of file names in lower case; TFDS appends `-00000-of-00010`
_FORMATS = {
    "array_record": re.compile(r"\.array_record(-\d+-of-\d+)?$"),
    "parquet": re.compile(r"\.parquet$"),
    "json": re.compile(rf"\.(jsonl|ndjson|json){_PACKED}$"),
    "txt": re.compile(rf"\.txt{_PACKED}$"),
}
OF_TEXT, OF_CHATS = tuple(_FORMATS), ("parquet", "json")  # formats of documents and of conversations
_ENDINGS = {"array_record": ".array_record", "parquet": ".parquet", "json": ".jsonl, .ndjson, .json", "txt": ".txt"}
_NO_DOCUMENTS = re.compile(r"(^|/)(index|config|dataset_infos?|dataset_dict|state)\.json$")  # which describe a data set
_RECORDS = 256  # records per read
_CHARACTERS = 1 << 20  # per read of a JSON list
_MOST_CHARACTERS = 1 << 28  # of an element of a JSON list


@dataclass(frozen=True)
class Document:
    """A document that is not parsed yet."""

    place: str  # its file, and its line, row or record
    content: Any  # bytes, a text, or the fields of a row
    parse: Callable[[Any], Any]

    def read(self) -> Any:
        """Returns the parsed document. ValueError if it is broken."""
        return self.parse(self.content)

    @property
    def sha256(self) -> str:
        """The hash of the unparsed document."""
        content = self.content
        if not isinstance(content, bytes):
            content = json.dumps(content, sort_keys=True, default=str).encode()
        return sha256(content.strip()).hexdigest()


def format_of(name: str) -> str:
    """Returns the format of a file by its name, "" if it is unknown or the file describes a data set."""
    if _NO_DOCUMENTS.search(name.lower()):
        return ""
    return next((kind for kind, ending in _FORMATS.items() if ending.search(name.lower())), "")


def unpacked(name: str) -> str:
    """Returns the name of a file without the ending of its compression."""
    return re.sub(rf"{_PACKED}$", "", name, count=1, flags=re.IGNORECASE)


def endings(kinds: Sequence[str]) -> str:
    """Returns the ends of the names of files of these formats."""
    return f"{', '.join(_ENDINGS[kind] for kind in kinds)} (JSON and text also with {', '.join(UNPACKERS)})"


def matches(name: str, pattern: str) -> bool:
    """Whether a relative path matches a glob from its right end: `*.txt` at any depth, `a/*.txt` in folders `a`."""
    return not pattern or PurePosixPath(name).match(pattern)


def documents(path: Path, name: str, text_field: str) -> Iterator[Document]:
    """Yields the documents of a file, whose values are texts, in the format given by its `name`.

    ValueError names the file and its unreadable part.
    """
    for document in records(path, name, [text_field]):
        yield Document(document.place, document.content, partial(_text_of, text_field, document.parse))


def records(path: Path, name: str, columns: Sequence[str] | None = None) -> Iterator[Document]:
    """Yields the records of a file, whose values are mappings, or bytes for plain text.

    Only parquet reads nothing but the `columns`, by default all. ValueError names the file and its unreadable part.
    """
    kind = format_of(name)
    if not kind:
        raise ValueError(f"{name} matches data.pattern, but its format is not known; known are {endings(OF_TEXT)}")
    if kind == "parquet" or name.lower().endswith(".zst"):
        check_installed("pyarrow", name, "shards")
    count = 0
    try:
        check_first_bytes(path, name)
        for place, content, parse in _READERS[kind](path, columns, name):
            count += 1
            yield Document(f"{name}, {place}" if place else name, content, parse)
    except Exception as error:  # damaged files can raise any exception
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        is_ours = type(error) is ValueError  # pyarrow's are of other types
        said += "" if is_ours else "; the file is damaged: fetch or write it again"
        raise ValueError(f"{name} cannot be read as {kind}: after {count} documents: {said}") from error


_Raw = Iterator[tuple[str, Any, Callable[[Any], Any]]]  # place in the file, content, parser


def _text_of(text_field: str, parse: Callable[[Any], Any], content: Any) -> str:
    """Returns the text of a record."""
    record = parse(content)
    text = record if isinstance(record, bytes) else _field(record, text_field)
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start})") from error
    if not isinstance(text, str):
        raise ValueError(f"{text_field!r} is of type {type(text).__name__}, and no text")
    return text


def _array_record(path: Path, columns: Sequence[str] | None, name: str) -> _Raw:
    from array_record.python.array_record_module import ArrayRecordReader

    with contextlib.closing(ArrayRecordReader(str(path))) as reader:
        count = reader.num_records()
        for start in range(0, count, _RECORDS):
            for number, record in enumerate(reader.read(range(start, min(start + _RECORDS, count))), start + 1):
                yield f"record {number}", record, _of_json if record.startswith(b"{") else _of_example


def _of_example(record: bytes) -> Mapping[str, bytes]:
    """Returns the fields of a tf.train.Example (as TFDS writes)."""
    check_installed("tensorflow_datasets", "a tf.train.Example", "tfds")
    from tensorflow_datasets.proto import tf_example_pb2

    example: Any = tf_example_pb2
    try:
        features = example.Example.FromString(record).features.feature
    except Exception as error:
        raise ValueError("it is neither a JSON object nor a tf.train.Example") from error
    return {name: b"".join(value.bytes_list.value) for name, value in features.items()}


def _parquet(path: Path, columns: Sequence[str] | None, name: str) -> _Raw:
    from pyarrow import parquet, types

    kinds = {field.name: field.type for field in parquet.read_schema(path)}
    for column in columns or ():
        if types.is_nested(kind := _field(kinds, column)):
            raise ValueError(f"{column!r} is of type {kind}, and no text")
    with parquet.ParquetFile(path, read_dictionary=columns and [*columns]) as file:
        _check_unpacked(file.metadata, columns or list(kinds))
        number = 0
        for batch in file.iter_batches(_RECORDS, columns=columns and [*columns]):
            for row in range(batch.num_rows):  # not a list of all rows, which may repeat a large value many times
                number += 1
                values = {key: batch.column(key)[row].as_py() for key in batch.schema.names}
                yield f"row {number}", values, _without_nulls if columns is None else _same


def _check_unpacked(metadata: Any, columns: Sequence[str]) -> None:
    """Raises ValueError if columns of a parquet file declare a larger uncompressed size than text can have."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for part in (group.column(i) for i in range(group.num_columns)):
            most, column = most_unpacked(part.total_compressed_size), part.path_in_schema.partition(".")[0]
            if column in columns and part.total_uncompressed_size > most:
                raise ValueError(f"{column!r} unpacks to more than {most >> 20} MiB and {MOST_RATIO} times its size")


def _same(value: Any) -> Any:
    return value


def _without_nulls(value: Any) -> Any:
    """Returns a value of parquet without the nulls of fields that other rows have."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _json(path: Path, columns: Sequence[str] | None, name: str) -> _Raw:
    """Yields the lines of a file that are not blank, or the elements of a file that is one list."""
    with opened(path, name) as file:
        if file.peek().removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            with io.TextIOWrapper(file, "utf-8-sig") as texts:
                for number, element in enumerate(_elements(texts), start=1):
                    yield f"element {number}", element, _of_json
        else:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"line {number}", line, _of_json


def _of_json(content: bytes | str) -> Any:
    if content.strip() in ("{", b"{"):
        raise ValueError(
            "it is not JSON lines, because an object continues on the next line; write one document per line"
        )
    return json_objects.value(content, "it", lenient=True)


def _elements(file: io.TextIOWrapper) -> Iterator[str]:
    """Yields the elements of a JSON list, of which only a part is in memory. ValueError if the list is broken."""
    decoder, gap = json.JSONDecoder(), re.compile(r"\s*,?\s*")
    text, at, size = file.read(_CHARACTERS).lstrip()[1:], 0, _CHARACTERS
    while True:
        at = found.end() if (found := gap.match(text, at)) else at
        if text[at : at + 1] == "]":
            if (text[at + 1 :] + file.read(_CHARACTERS)).strip():
                raise ValueError("it continues after the end of its list: write one list, or a document in each line")
            return
        try:
            end = decoder.raw_decode(text, at)[1]
        except json.JSONDecodeError as error:  # or the element is not read completely
            more = file.read(size) if size < _MOST_CHARACTERS else ""
            if not more:
                raise ValueError(f"its list is broken or does not end: {error.msg}; write it again") from error
            text, at, size = text[at:] + more, 0, 2 * size
            continue
        yield text[at:end]
        at, size = end, _CHARACTERS


def _txt(path: Path, columns: Sequence[str] | None, name: str) -> _Raw:
    with opened(path, name) as file:
        yield "", file.read(), _same


_READERS = {"array_record": _array_record, "parquet": _parquet, "json": _json, "txt": _txt}


def _field(row: object, text_field: str) -> Any:
    """Returns the text of a document. ValueError if the field is missing."""
    if not isinstance(row, Mapping) or text_field not in row:
        there = ", ".join(sorted(row)) or "{}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
        raise ValueError(f"it has no field {text_field!r} (data.text_field), only {there}")
    return row[text_field]
