"""Reads JSON from outside this process: returns an object, or raises one ValueError with place and reason.

Plain `json.loads` lets a RecursionError through, accepts NaN, and keeps only the last of two equal keys.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.files.regular import open_regular

JsonObject = dict[str, Any]  # keys and values as parsed: the reader of a value checks it
JsonMapping = Mapping[str, Any]  # the same, only to be read
_MOST_BYTES = 1 << 28  # file size; the index of a million token shards has about 200 MB
_MOST_LEVELS = 100  # far below Python's limit, because the value is also written, compared and printed
_MOST_DIGITS = 20  # digits of an integer: 64 bits and a sign


def read(file: Path, *, lenient: bool = False) -> JsonObject:
    """Returns the object in a file. OSError if the file cannot be read, ValueError if it does not hold an object."""
    return parse(read_bytes(file), file, lenient=lenient)


def read_bytes(file: Path) -> bytes:
    """Returns the content of a JSON file. ValueError if it is too large, or not a regular file."""
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size > _MOST_BYTES:
            raise ValueError(f"{file} has {size} bytes: too large for JSON")
        return opened.read()


def parse(content: bytes | str, where: object, *, lenient: bool = False) -> JsonObject:
    """Returns the object in `content`. ValueError, which begins with `where`, if it is not an object."""
    found = value(content, where, lenient=lenient)
    if not isinstance(found, dict):
        raise ValueError(f"{where} is not a JSON object, but of type {type(found).__name__}")
    return found


def value(content: bytes | str, where: object, *, lenient: bool = False) -> Any:
    """Returns the value of `content`. Raises ValueError, which begins with `where`, for invalid JSON.

    Strict JSON follows RFC 7493: unique keys, Unicode text, numbers within 64 bits. `lenient` allows all output of
    Python's json, such as NaN, for files that this program wrote and for documents.
    """
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        found = (_LENIENT if lenient else _STRICT).decode(text)
        if text.count("[") + text.count("{") > _MOST_LEVELS:
            _check_levels(found)
        if not lenient and "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()  # an unpaired surrogate has no encoding
        return found
    except UnicodeError:
        why = "it is not UTF-8"
    except RecursionError:
        why = f"it has more than {_MOST_LEVELS} levels"
    except ValueError as error:
        why = str(error)
    raise ValueError(f"{where} is not JSON: {why}")


def _check_levels(found: object) -> None:
    """Raises RecursionError for a value with too many levels."""
    level = [found] if isinstance(found, dict | list) else []
    for _ in range(_MOST_LEVELS):
        inner = (x.values() if isinstance(x, dict) else x for x in level)
        level = [x for values in inner for x in values if isinstance(x, dict | list)]
    if level:
        raise RecursionError


def _unique(pairs: Sequence[tuple[str, object]]) -> JsonObject:
    found: JsonObject = {}
    for key, inner in pairs:
        if key in found:
            raise ValueError(f"the key {key[:40]!r} is there twice")
        found[key] = inner
    return found


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is too large for a float")
    return number


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


_STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_integer, parse_float=_finite, parse_constant=_refuse)
_LENIENT = json.JSONDecoder()
